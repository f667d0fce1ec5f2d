// Entry point of the Hopper decode kernels.
#pragma once
#include <cuda_bf16.h>

#include <type_traits>

#include "../sm90/decode.cuh"
#include "../sm90/decode64.cuh"
#include "decode.cuh"

namespace mla::ffi {

// Describes the cache to the copy engine, which takes no empty tensor. Of a cache without pages nothing is ever read:
// one page is described in its place, at the plans, whose address is aligned.
template <typename C>
sm90::KeyBox key_box(const DecodeParams& p, int64_t pages) {
    static const auto encode =
        driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled", 12000);
    if (!encode) TVM_FFI_THROW(RuntimeError) << "the driver is older than CUDA 12.0: update it (R525 or newer)";
    constexpr bool kWholeChunks = C::kDim % 64 == 0;
    static_assert(!kWholeChunks || C::kChunks % C::kKeyParts == 0);
    sm90::KeyBox box = {{}, sm90::box_groups<C>(p.table.page_size)};
    const void* base = pages > 0 ? p.cache : p.plans;
    pages = std::max(pages, int64_t{1});
    const cuuint64_t row_bytes = p.row_stride * 2, page_bytes = p.page_stride * 2, page_size = p.table.page_size;
    const cuuint64_t sizes[5] = {kWholeChunks ? 64u : C::kDim, kWholeChunks ? 8u : page_size,
                                 kWholeChunks ? C::kChunks : cuuint64_t(pages), page_size / 8, cuuint64_t(pages)};
    const cuuint64_t strides[4] = {row_bytes, kWholeChunks ? 128u : page_bytes, row_bytes * 8, page_bytes};
    const cuuint32_t extents[5] = {64, 8, kWholeChunks ? C::kPartChunks : 1, cuuint32_t(box.groups), 1};
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    CUresult result = encode(
        &box.map,
        std::is_same_v<typename C::Element, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                    : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        kWholeChunks ? 5 : 3, const_cast<void*>(base), sizes, strides, extents, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        TVM_FFI_THROW(ValueError) << "the latent cache cannot be described to the copy engine (CUDA error "
                                  << static_cast<int>(result) << "): its base must be aligned to 16 bytes and its "
                                  << "strides to 8 elements, got strides " << p.page_stride << ", " << p.row_stride;
    return box;
}

// The kernels, as a launch sees them.
template <typename C>
struct SwappedKernel {
    using Config = C;
    using SharedMemory = sm90::SharedMemoryPlan<C>;
    static auto* entry() { return sm90::decode_kernel<C>; }
};
template <typename C>
struct Rows64Kernel {
    using Config = C;
    using SharedMemory = sm90::SharedMemoryPlan64<C>;
    static auto* entry() { return sm90::decode64_kernel<C>; }
};

// Dynamic shared memory of a CTA.
template <typename Kernel>
int64_t sm90_shared_bytes() {
    static_assert(sizeof(typename Kernel::SharedMemory) <= kMaxSharedBytes);
    return sizeof(typename Kernel::SharedMemory);
}

// Whether a plan may make pairs of CTAs, which have to be launched in clusters to be of use. It makes them where there
// are two CTAs for each block of rows; how many blocks there are, the host knows of equal queries only.
inline bool may_pair(const Lengths& lengths, int64_t batch, int64_t num_heads, int64_t rows, int64_t num_ctas) {
    const int64_t blocks = batch * ((lengths.query_len * num_heads + rows - 1) / rows);
    return num_ctas % 2 == 0 && (lengths.query_start_loc || (blocks > 0 && num_ctas / blocks == 2));
}

template <typename Kernel>
void sm90_decode(TensorView q_nope, TensorView q_rope, TensorView cache, TensorView table,
                 Optional<TensorView> table_rows, TensorView seq_lens, Optional<TensorView> query_start_loc,
                 TensorView plans, TensorView partials, TensorView flags, TensorView out, TensorView lse,
                 Optional<TensorView> profile, int64_t query_len, bool token_table, bool causal, double softmax_scale,
                 int64_t num_ctas, bool may_wait, bool overlaps) {
    using C = typename Kernel::Config;
    DecodeParams params =
        decode_params(q_nope, q_rope, cache, table, table_rows, seq_lens, query_start_loc, plans, partials, flags, out,
                      lse, profile, query_len, token_table, causal, softmax_scale);
    if (C::kProfile && !params.profile) TVM_FFI_THROW(ValueError) << "a profiling variant needs a profile buffer";
    const DeviceScope device(q_nope.device().device_id);
    sm90::KeyBox box = {};
    if constexpr (C::kTma) box = key_box<C>(params, cache.size(0));
    Launch how = decode_launch(plans, num_ctas, may_wait, overlaps, stream_of(q_nope));
    how.block = sm90::kThreads;
    how.cluster = may_pair(params.lengths, seq_lens.size(0), params.num_heads, C::kRows, num_ctas) ? 2 : 1;
    how.shared_bytes = static_cast<int>(sm90_shared_bytes<Kernel>());
    auto* kernel = Kernel::entry();
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared_bytes),
          "reserving shared memory");
    launch(kernel, how, params, box);
}

}  // namespace mla::ffi
