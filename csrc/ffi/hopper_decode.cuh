// The Hopper decode kernels, as `decode` launches them.
#pragma once
#include <cuda_bf16.h>

#include <algorithm>

#include "decode.cuh"
#include "decode/hopper/few_rows/kernel.cuh"
#include "decode/hopper/few_rows/keys_16bit.cuh"
#include "decode/hopper/few_rows/keys_e4m3.cuh"
#include "decode/hopper/few_rows/keys_records.cuh"
#include "decode/hopper/many_rows/kernel.cuh"
#include "decode/hopper/many_rows_fp8/kernel.cuh"
#include "decode/hopper/many_rows_fp8/keys_e4m3.cuh"
#include "decode/hopper/many_rows_fp8/keys_records.cuh"
#include "decode/hopper/many_rows_fp8_products/kernel.cuh"

namespace mla::ffi {

// Describes a box of a tensor to the copy engine. `strides` are of all dimensions but the first, in bytes.
inline void describe_box(CUtensorMap& map, const DecodeParams& p, int element_bytes, int rank, const void* base,
                         const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* extents,
                         CUtensorMapSwizzle swizzle) {
    static const auto encode = driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled", 12000);
    if (!encode) TVM_FFI_THROW(RuntimeError) << "the driver is older than CUDA 12.0: update it (R525 or newer)";
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    CUresult result = encode(
        &map, element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, rank,
        const_cast<void*>(base), sizes, strides, extents, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        // A row of a box of e4m3 columns is half a line of the L2 cache; the next column block has the other half.
        element_bytes == 1 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        TVM_FFI_THROW(ValueError) << "the latent cache cannot be described to the copy engine (CUDA error "
                                  << static_cast<int>(result) << "): its base must be aligned to 16 bytes and its "
                                  << "strides to " << 16 / element_bytes << " elements, got strides " << p.page_stride
                                  << ", " << p.row_stride;
}

// The tensor map of the cache, with the box that the page size allows (`box_groups` in
// decode/hopper/load/tma_keys.cuh). Dimensions: column, row of a group, column block, group of 8 tokens, page; or
// column, row, page. The copy engine refuses an empty tensor: for a cache without pages, of which nothing is read, one
// page at the (aligned) address of the plans is described.
template <typename C>
hopper::BoxOf<C> key_box(const DecodeParams& p, int64_t pages) {
    using Layout = typename C::Layout;
    constexpr bool kWholeColumnBlocks = C::kDim % 64 == 0;
    static_assert(!kWholeColumnBlocks || C::kKeyColumnBlocks % C::kSegmentColumnBlocks == 0);
    hopper::BoxOf<C> box = {};
    box.groups = hopper::box_groups<C>(p.table.page_size);
    box.all_groups = (1u << box.groups) - 1, box.first_groups = ~0u / box.all_groups;
    const void* base = pages > 0 ? p.cache : p.plans;
    pages = std::max(pages, int64_t{1});
    constexpr int kElementBytes = Layout::kElementBytes;
    const cuuint64_t row_bytes = p.row_stride * kElementBytes, page_bytes = p.page_stride * kElementBytes;
    const cuuint64_t page_size = p.table.page_size;
    const cuuint64_t sizes[5] = {
        cuuint64_t(kWholeColumnBlocks ? C::kBlockColumns : C::kDim), kWholeColumnBlocks ? 8u : page_size,
        kWholeColumnBlocks ? C::kKeyColumnBlocks : cuuint64_t(pages), page_size / 8, cuuint64_t(pages)};
    const cuuint64_t strides[4] = {row_bytes, kWholeColumnBlocks ? C::kBlockBytes : page_bytes, row_bytes * 8,
                                   page_bytes};
    const cuuint32_t extents[5] = {C::kBlockColumns, 8, kWholeColumnBlocks ? C::kSegmentColumnBlocks : 1,
                                   cuuint32_t(box.groups), 1};
    describe_box(box.map, p, kElementBytes, kWholeColumnBlocks ? 5 : 3, base, sizes, strides, extents,
                 C::kBlockBytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
    if constexpr (Layout::kHasTail) {
        const cuuint64_t tail_sizes[3] = {Layout::kTailBytes, page_size, cuuint64_t(pages)};
        const cuuint64_t tail_strides[2] = {row_bytes, page_bytes};
        const cuuint32_t tail_extents[3] = {Layout::kTailBytes, cuuint32_t(box.groups * 8), 1};
        describe_box(box.tails, p, 1, 3, static_cast<const char*>(base) + Layout::kScaleOffset, tail_sizes,
                     tail_strides, tail_extents, CU_TENSOR_MAP_SWIZZLE_NONE);
    }
    return box;
}

// Whether a plan may contain pairs of CTAs, for which the launch must be in clusters: where there are exactly two CTAs
// for each m-block. The host knows the number of m-blocks only if all requests have equally many query tokens;
// otherwise it assumes that there may be.
inline bool may_pair(const DecodeSizes& sizes, int64_t num_heads, int64_t rows, int64_t num_ctas) {
    const int64_t m_blocks = sizes.batch * ((sizes.query_len * num_heads + rows - 1) / rows);
    return num_ctas % 2 == 0 && (!sizes.uniform || (m_blocks > 0 && num_ctas / m_blocks == 2));
}

template <typename C>
void launch_hopper(void (*kernel)(DecodeParams, hopper::BoxOf<C>), Launch how, const DecodeParams& p,
                   const DecodeSizes& sizes) {
    if (C::kProfile && !p.profile) TVM_FFI_THROW(ValueError) << "a profiling variant needs a profile buffer";
    how.cluster = C::kRangeCtas == 2 || may_pair(sizes, p.num_heads, C::kRows, how.grid) ? 2 : 1;
    how.grid -= how.grid % C::kRangeCtas;
    hopper::BoxOf<C> box = {};
    if constexpr (C::kTma) box = key_box<C>(p, sizes.pages);
    launch(kernel, how, p, box);
}

template <typename C, typename S, typename Consumer, void (*kKernel_)(DecodeParams, hopper::BoxOf<C>)>
struct HopperKernel {
    using Config = C;
    using SharedMemory = S;
    using SplitBuffers = typename Consumer::Buffers;
    static constexpr int kThreads = hopper::kThreads + 128 * C::kTransposesValues;
    static constexpr auto kKernel = kKernel_;
    static constexpr int kMostCluster = 2;  // also without shared keys: pairs

    static void launch(const Launch& how, const DecodeParams& p, const DecodeSizes& sizes) {
        launch_hopper<C>(kKernel, how, p, sizes);
    }
};

// Which keys_*.cuh a configuration's format takes.
template <typename C>
using FewRowsKeys = std::conditional_t<
    C::Layout::kHasTail, hopper::FewRowsKeysRecords<C>,
    std::conditional_t<C::Layout::kElementBytes == 1, hopper::FewRowsKeysE4m3<C>, hopper::FewRowsKeys16Bit<C>>>;
template <typename C>
using ManyRowsFp8Keys =
    std::conditional_t<C::Layout::kHasTail, hopper::ManyRowsFp8KeysRecords<C>, hopper::ManyRowsFp8KeysE4m3<C>>;

template <typename C, typename Keys = FewRowsKeys<C>>
using FewRowsKernel = HopperKernel<C, hopper::FewRowsMemory<C, Keys>, hopper::FewRowsConsumer<C, Keys>,
                                   hopper::few_rows_decode_kernel<C, Keys>>;
template <typename C>
using ManyRowsKernel =
    HopperKernel<C, hopper::ManyRowsMemory<C>, hopper::ManyRowsConsumer<C>, hopper::many_rows_decode_kernel<C>>;
template <typename C, typename Keys = ManyRowsFp8Keys<C>>
using ManyRowsFp8Kernel = HopperKernel<C, hopper::ManyRowsFp8Memory<C, Keys>, hopper::ManyRowsFp8Consumer<C, Keys>,
                                       hopper::many_rows_fp8_decode_kernel<C, Keys>>;
template <typename C>
using ManyRowsFp8ProductsKernel =
    HopperKernel<C, hopper::ManyRowsFp8ProductsMemory<C>, hopper::ManyRowsFp8ProductsConsumer<C>,
                 hopper::many_rows_fp8_products_decode_kernel<C>>;

}  // namespace mla::ffi
