// Entry points of the products that absorb queries and expand outputs.
#pragma once
#include <algorithm>

#include "../sm80/project.cuh"
#include "decode.cuh"

namespace mla::ffi {

// The more inputs, the more warps share a sum, and the fewer share the columns.
template <typename Element, int kDimIn, int kDimOut, bool kWide, int kRowWarps, bool kDependentLaunch>
using Projection = sm80::ProjectConfig<Element, kDimIn, kDimOut, kWide ? 64 : 16, kRowWarps, kWide ? 8 / kRowWarps : 1,
                                       kDependentLaunch>;

// Dynamic shared memory of a CTA, at most: of the form that sums over most warps.
template <typename Element, int kDimNope, int kDimLatent, int kDimValue>
int64_t project_shared_bytes() {
    return std::max(sizeof(sm80::ProjectMemory<Projection<Element, kDimNope, kDimLatent, true, 1, true>>),
                    sizeof(sm80::ProjectMemory<Projection<Element, kDimLatent, kDimValue, false, 1, true>>));
}

template <typename C>
void project_with(const sm80::ProjectParams& params, cudaStream_t stream) {
    constexpr int kSharedBytes = sizeof(sm80::ProjectMemory<C>);
    static_assert(kSharedBytes <= 48 << 10);
    const int grid = C::kSlices * params.num_heads * ((params.num_tokens + C::kRows - 1) / C::kRows);
    if constexpr (C::kDependentLaunch) {
        launch_overlapped(sm80::project_kernel<C>, grid, C::kThreads, kSharedBytes, stream, params);
    } else {
        sm80::project_kernel<C><<<grid, C::kThreads, kSharedBytes, stream>>>(params);
        check(cudaGetLastError(), "projection launch");
    }
}

template <typename Element, int kDimIn, int kDimOut, bool kWide, bool kDependentLaunch>
void project(const TensorView& x, const TensorView& w, const TensorView& out, const sm80::AppendParams& append) {
    check_alignment("x", x, 16);
    check_alignment("out", out, 4);
    if (x.size(0) == 0) return;
    const sm80::ProjectParams params{data<void>(x),
                                     x.stride(0),
                                     x.stride(1),
                                     data<void>(w),
                                     data<void>(out),
                                     out.stride(0),
                                     out.stride(1),
                                     static_cast<int>(x.size(0)),
                                     static_cast<int>(x.size(1)),
                                     append};
    if (params.num_tokens <= 16)
        project_with<Projection<Element, kDimIn, kDimOut, kWide, 1, kDependentLaunch>>(params, stream_of(x));
    else if (params.num_tokens <= 32)
        project_with<Projection<Element, kDimIn, kDimOut, kWide, 2, kDependentLaunch>>(params, stream_of(x));
    else
        project_with<Projection<Element, kDimIn, kDimOut, kWide, 4, kDependentLaunch>>(params, stream_of(x));
}

// x [tokens, heads, d_nope] and out [tokens, heads, d_c], the last dimension contiguous; w [heads, d_nope, d_c],
// contiguous. With slots int64 [new]: latent [>= new, d_c] and rope [>= new, d_rope], whose rows begin at multiples of
// 16 bytes, go to cache [pages, page_size, d_c + d_rope]. Without queries nothing is written.
template <typename Element, int kDimIn, int kDimOut, bool kDependentLaunch>
void absorb(TensorView x, TensorView w, TensorView out, Optional<TensorView> latent, Optional<TensorView> rope,
            Optional<TensorView> slots, Optional<TensorView> cache) {
    sm80::AppendParams append = {};
    if (slots.has_value()) {
        check_alignment("latent_cache", *cache, 16);
        append = {data<void>(*latent),
                  data<void>(*rope),
                  (*latent).stride(0),
                  (*rope).stride(0),
                  data<const int64_t>(*slots),
                  data<void>(*cache),
                  (*cache).stride(0),
                  (*cache).stride(1),
                  static_cast<int>((*cache).size(1)),
                  static_cast<int>((*rope).size(1)),
                  static_cast<int>((*slots).size(0))};
    }
    project<Element, kDimIn, kDimOut, true, kDependentLaunch>(x, w, out, append);
}

// x [tokens, heads, d_c] and out [tokens, heads, d_v], the last dimension contiguous; w [heads, d_c, d_v], contiguous.
template <typename Element, int kDimIn, int kDimOut, bool kDependentLaunch>
void expand(TensorView x, TensorView w, TensorView out) {
    project<Element, kDimIn, kDimOut, false, kDependentLaunch>(x, w, out, {});
}

}  // namespace mla::ffi
