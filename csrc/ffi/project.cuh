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

// x [tokens, heads, in] and out [tokens, heads, out], the last dimension contiguous; w [heads, in, out], contiguous.
template <typename Element, int kDimIn, int kDimOut, bool kWide, bool kDependentLaunch>
void project(TensorView x, TensorView w, TensorView out) {
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
                                     static_cast<int>(x.size(1))};
    if (params.num_tokens <= 16)
        project_with<Projection<Element, kDimIn, kDimOut, kWide, 1, kDependentLaunch>>(params, stream_of(x));
    else if (params.num_tokens <= 32)
        project_with<Projection<Element, kDimIn, kDimOut, kWide, 2, kDependentLaunch>>(params, stream_of(x));
    else
        project_with<Projection<Element, kDimIn, kDimOut, kWide, 4, kDependentLaunch>>(params, stream_of(x));
}

}  // namespace mla::ffi
