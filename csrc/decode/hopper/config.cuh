// What the host chooses for a kernel (mla_backend/kernels/hopper.py), and what follows from it for all kernels.
#pragma once
#include "numbers/cache_format.cuh"

namespace mla::hopper {

struct DecodeConfig {
    CacheFormat format;
    int dim_latent, dim_rope;
    int rows;  // of an m-block
    int stages, query_buffers;
    int range_ctas;        // 2: the CTAs of a cluster compute two neighbouring m-blocks from the same keys
    bool for_one_m_block;  // see schedule/work.cuh
    bool tma, lists;       // how keys are loaded: see load/loader.cuh
    bool profile;
    int two_term_blocks;  // see many_rows_fp8_products/kernel.cuh; otherwise 0
};

constexpr int column_blocks(int columns) { return (columns + 63) / 64; }

template <typename Element_, DecodeConfig kConfig>
struct KernelConfig {
    using Element = Element_;
    using Layout = CacheLayout<kConfig.format, kConfig.dim_latent, kConfig.dim_rope>;
    static constexpr int kDimLatent = kConfig.dim_latent, kDimRope = kConfig.dim_rope, kDim = kDimLatent + kDimRope;
    static constexpr int kRows = kConfig.rows, kStages = kConfig.stages, kQueryBuffers = kConfig.query_buffers;
    static constexpr int kRangeCtas = kConfig.range_ctas;
    static constexpr bool kForOneMBlock = kConfig.for_one_m_block, kProfile = kConfig.profile;
    static constexpr bool kTma = kConfig.tma, kLists = kConfig.lists;
    static constexpr int kQueryColumnBlocks = column_blocks(kDim), kQueryColumnBlockBytes = kRows * 128;
    static constexpr int kQueryBytes = kQueryColumnBlocks * kQueryColumnBlockBytes;
    static constexpr bool kTransposesValues = false;  // see load/transpose_values.cuh
    static constexpr int kTransposerRegisters = 0;
    static constexpr bool kFourColumns = false;  // see many_rows/output.cuh
};

}  // namespace mla::hopper
