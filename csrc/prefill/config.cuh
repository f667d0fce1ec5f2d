// Template arguments of the prefill kernel and what follows from them, its parameters and its shared memory.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/registers.cuh"
#include "schedule/splits.cuh"

namespace mla::prefill {

struct PrefillParams {
    const void* q;  // [tokens, heads, d_qk]
    const void* k;  // [keys, KV heads, d_qk]
    const void* v;  // [keys, KV heads, d_v]
    void* out;      // [tokens, heads, d_v]
    int q_token_stride, k_token_stride, v_token_stride, out_token_stride;
    int64_t q_head_stride, k_head_stride, v_head_stride, out_head_stride;
    float* lse;  // [tokens, heads], natural log
    int64_t lse_token_stride, lse_head_stride;

    const int *query_starts, *key_starts;  // [requests + 1]
    int num_heads, heads_per_kv;
    int query_blocks;  // of the longest request
    int head_group;    // heads whose query blocks are interleaved, so that few heads' keys share the L2 cache
    float scale_log2;  // softmax scale * log2(e)
    bool causal;
};

// What the host chooses (mla_backend/kernels/prefill.py).
struct PrefillConfig {
    int dim_qk, dim_v;
    int row_blocks;        // blocks of 16 query rows that a warp multiplies
    int row_groups;        // groups of warps, each of which has its own rows
    int column_groups;     // warps with the same rows: each has its own tokens of a tile for S, its own columns for O
    int tile;              // tokens of a KV tile
    int stages;            // of the ring
    int key_columns;       // columns of a slice of K
    int value_tokens;      // tokens of a slice of V, which has all columns
    bool streams_queries;  // Q is loaded again with each slice of K, instead of staying in shared memory
    bool mbarriers;        // warps wait for a slice, and for one another, at mbarriers; else at a barrier of the CTA
    int ctas;              // CTAs for which the registers of a multiprocessor suffice
};

template <typename Element_, PrefillConfig kConfig>
struct KernelConfig {
    using Element = Element_;
    static constexpr int kDimQk = kConfig.dim_qk, kDimV = kConfig.dim_v;
    static constexpr int kRowBlocks = kConfig.row_blocks, kRowGroups = kConfig.row_groups;
    static constexpr int kColumnGroups = kConfig.column_groups;
    static constexpr int kTile = kConfig.tile, kStages = kConfig.stages;
    static constexpr int kKeyColumns = kConfig.key_columns, kValueTokens = kConfig.value_tokens;
    static constexpr bool kStreamsQueries = kConfig.streams_queries, kMbarriers = kConfig.mbarriers;
    static constexpr int kCtas = kConfig.ctas;

    static constexpr int kThreads = kRowGroups * kColumnGroups * 32;
    static constexpr int kGroupRows = kRowBlocks * 16;                           // of a row group
    static constexpr int kRows = kRowGroups * kGroupRows;                        // of a CTA
    static constexpr int kTokens = kTile / kColumnGroups;                        // of a warp's scores of a tile
    static constexpr int kQkSteps = (kDimQk + 15) / 16;                          // of 16 columns
    static constexpr int kQkBlocks = (kDimQk + 63) / 64;                         // of 64 columns = 128 B
    static constexpr int kKeySteps = kKeyColumns / 16;                           // of a slice
    static constexpr int kKeyBlocks = kKeyColumns / 64;                          // of a slice
    static constexpr int kKeySlices = (kDimQk + kKeyColumns - 1) / kKeyColumns;  // of a tile
    static constexpr int kTailSteps = kQkSteps % kKeySteps;                      // of the last slice, if it has fewer
    // O is divided into fragments of 16 columns. A warp has every kColumnGroups-th of them, so its addresses are
    // constants.
    static constexpr int kFragments = (kDimV + 16 * kColumnGroups - 1) / (16 * kColumnGroups);  // of a warp
    static constexpr int kValueColumns = kFragments * kColumnGroups * 16;                       // of all warps
    static constexpr int kValueBlocks = (kValueColumns + 63) / 64;                              // of a slice
    static constexpr int kValueSlices = kTile / kValueTokens;
    static constexpr int kSlices = kKeySlices + kValueSlices;  // of a tile

    static constexpr int kQueryBlockBytes = kRows * 128;
    static constexpr int kKeyBlockBytes = kTile * 128;
    static constexpr int kValueBlockBytes = kValueTokens * 128;
    static constexpr int kKeyBytes = kKeyBlocks * kKeyBlockBytes;  // of a slice of keys, before its queries
    static constexpr int kKeySliceBytes = kKeyBytes + (kStreamsQueries ? kKeyBlocks * kQueryBlockBytes : 0);
    static constexpr int kValueSliceBytes = kValueBlocks * kValueBlockBytes;
    static constexpr int kStageBytes = kKeySliceBytes > kValueSliceBytes ? kKeySliceBytes : kValueSliceBytes;
    // Whether P overwrites queries in the ring, which came with a slice of keys. These have at least as many columns as
    // a tile has tokens, and lie past every slice of values (SliceLoader::probabilities).
    static constexpr bool kReplacesQueries =
        kStreamsQueries && kColumnGroups != 1 && kTile <= kKeyColumns && kValueSliceBytes <= kKeyBytes;

    static constexpr int kResultRegisters = kRowBlocks * (kFragments * 8 + kTokens / 2);  // of O and the scores
    // Whether O and the scores leave few registers, so that addresses are computed again for each slice.
    static constexpr bool kTight = kResultRegisters > 184;
    // Whether copies are issued before the products of a slice, instead of after the first ones: this is faster with P
    // in registers.
    static constexpr bool kCopiesFirst = kColumnGroups == 1;
    // Whether sums of P are stored in shared memory between tiles, and how many for a row: one of each warp, or of each
    // thread.
    static constexpr bool kStoresSums = kResultRegisters > 168;
    static constexpr int kRowSums = kColumnGroups > 1 ? kColumnGroups : 4;

    static_assert(kDimQk % 8 == 0 && kDimV % 8 == 0 && kKeyColumns % 64 == 0);
    static_assert(kTile % 64 == 0 && kTokens % 16 == 0 && kValueTokens % 16 == 0 && kTile % kValueTokens == 0);
    static_assert((kColumnGroups & (kColumnGroups - 1)) == 0 && kColumnGroups <= 8 && kRowGroups <= 8);
    static_assert(kStages >= 2 && kStages <= kSlices + 1);
};

// Offset of a 16-byte vector (8 columns) of a row, within a column block of 64 columns. The vectors of a row are
// swizzled, so that ldmatrix reads the same vector of 8 successive rows without bank conflicts.
__device__ __forceinline__ uint32_t swizzled_offset(int row, int vector) { return row * 128 + (vector ^ row % 8) * 16; }

// The thread's index. If registers are short, keeps the compiler from holding values derived from it in registers.
template <typename C>
__device__ __forceinline__ uint32_t thread_index() {
    return C::kTight ? pinned(static_cast<int>(threadIdx.x)) : threadIdx.x;
}

// Calls body(m, h) for each of a thread's query rows: row m * 16 + h * 8, counted from its first one.
template <typename C, typename Body>
__device__ __forceinline__ void for_each_row(Body body) {
#pragma unroll
    for (int m = 0; m < C::kRowBlocks; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) body(m, h);
}

// Calls `body` with each number from kFrom to kTo - 1, as a constant.
template <int kFrom, int kTo, typename Body>
__device__ __forceinline__ void unrolled(Body body) {
    if constexpr (kFrom < kTo) {
        body(std::integral_constant<int, kFrom>{});
        unrolled<kFrom + 1, kTo>(body);
    }
}

// A product of 64 bits from factors of 32, in one instruction.
__device__ __forceinline__ int64_t wide_product(int a, int b) { return static_cast<int64_t>(a) * b; }

// The query rows of a CTA and the keys that they see.
template <typename C>
struct QueryBlock {
    using Element = typename C::Element;
    const Element *q, *k, *v;  // of the block's first row, and of the request's first key and value
    int head;
    int first_row;                       // of the block, counted in the request
    int query_begin, query_len, kv_len;  // of the request
    int key_end;                         // where the keys end that the block sees; may be negative
    bool causal;

    // Blocks with many keys come first: requests in turn, groups of heads in turn, last rows first, heads in turn.
    __device__ void find(const PrefillParams& p, int index) {
        const int of_request = p.query_blocks * p.num_heads, of_group = p.query_blocks * p.head_group;
        const int request = index / of_request, in_request = index - request * of_request;
        const int group = in_request / of_group, in_group = in_request - group * of_group;
        const int heads = min(p.head_group, p.num_heads - group * p.head_group), block = in_group / heads;
        head = group * p.head_group + in_group - block * heads;
        first_row = (p.query_blocks - 1 - block) * C::kRows;
        query_begin = p.query_starts[request];
        query_len = p.query_starts[request + 1] - query_begin;
        const int key_begin = p.key_starts[request], kv_head = head / p.heads_per_kv;
        kv_len = p.key_starts[request + 1] - key_begin;
        causal = p.causal;
        key_end = key_limit(C::kRows - 1);
        q = static_cast<const Element*>(p.q) + wide_product(query_begin + first_row, p.q_token_stride) +
            head * p.q_head_stride;
        k = static_cast<const Element*>(p.k) + wide_product(key_begin, p.k_token_stride) + kv_head * p.k_head_stride;
        v = static_cast<const Element*>(p.v) + wide_product(key_begin, p.v_token_stride) + kv_head * p.v_head_stride;
    }

    __device__ bool exists() const { return first_row < query_len; }
    // How many rows of the block exist.
    __device__ int rows() const { return query_len - first_row; }
    // Where the keys end that a row of the block sees; may be negative.
    __device__ int key_limit(int row) const {
        return causal ? min(kv_len, kv_len - query_len + first_row + row + 1) : kv_len;
    }
};

template <typename C>
struct PrefillMemory {
    static constexpr int kQueryBytes = C::kStreamsQueries ? 0 : C::kQkBlocks * C::kQueryBlockBytes;
    static constexpr int kWeightBytes =
        C::kColumnGroups > 1 && !C::kReplacesQueries ? C::kTile / 64 * C::kQueryBlockBytes : 0;
    alignas(128) unsigned char ring[C::kStages * C::kStageBytes];
    alignas(128) unsigned char queries[kQueryBytes > 0 ? kQueryBytes : 16];
    alignas(128) unsigned char probabilities[kWeightBytes > 0 ? kWeightBytes : 16];  // P
    // With kMbarriers, for each stage: its slice has landed; all warps have read it.
    Barrier full[C::kMbarriers ? C::kStages : 1], empty[C::kMbarriers ? C::kStages : 1];
    QueryBlock<C> block;  // in shared memory because registers are few
    float top[C::kRows];  // the maximum that a row's exponentials use
    // One for each row and column group: what `over_column_groups` combines, and sums of P between tiles.
    float exchange[C::kColumnGroups > 1 ? C::kColumnGroups * C::kRows : 1];
    float sums[C::kStoresSums ? C::kRowSums * C::kRows : 1];
};

}  // namespace mla::prefill
