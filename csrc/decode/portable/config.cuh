// Template arguments of the portable decode kernel and what follows from them, and its shared memory.
//
// An mma multiplies a token block (16 tokens) by an octet (8 query rows). A column group is the columns of Q and K that
// one warp multiplies for S. With several row groups, as many warps have the same columns, and each multiplies its own
// octets.
#pragma once
#include "numbers/cache_format.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "schedule/params.cuh"
#include "schedule/splits.cuh"

namespace mla::portable {

constexpr int kThreads = 256;

// What the host chooses (mla_backend/kernels/portable.py).
struct DecodeConfig {
    CacheFormat format;
    int dim_latent, dim_rope;
    int rows;  // of an m-block
    int tile;  // tokens of a KV tile
    int stages;
    int row_groups;
    bool dependent_launch;  // the launch may overlap its predecessor (sm_90 and newer)
    bool lists;             // keys are those of a list of slots
};

template <typename Element_, DecodeConfig kConfig>
struct KernelConfig {
    using Element = Element_;
    using Layout = CacheLayout<kConfig.format, kConfig.dim_latent, kConfig.dim_rope>;
    // What tensor cores multiply: latents and rotary columns in 8 bits become fp16.
    static constexpr bool kWidens = Layout::kElementBytes == 1, kWidensRope = Layout::kRopeElementBytes == 1;
    using Factor = std::conditional_t<kWidens, __half, Element>;
    using RopeFactor = std::conditional_t<kWidensRope, __half, Element>;
    static constexpr int kDimLatent = kConfig.dim_latent, kDimRope = kConfig.dim_rope, kDim = kDimLatent + kDimRope;
    static constexpr int kRows = kConfig.rows, kTile = kConfig.tile, kStages = kConfig.stages;
    static constexpr int kRowGroups = kConfig.row_groups;
    static constexpr bool kDependentLaunch = kConfig.dependent_launch, kLists = kConfig.lists;
    // For the planner: it looks up no slots.
    static constexpr int kRangeCtas = 1, kMBlockCost = 2, kSlotStride = 0;
    static constexpr bool kForOneMBlock = false;

    static constexpr int kWarps = kThreads / 32;
    static constexpr int kOctets = kRows / 8;
    static constexpr int kTokenBlocks = kTile / 16;
    static constexpr int kColumns = kDimLatent / kWarps;  // of a warp's O
    static constexpr int kColumnGroups = kWarps / kRowGroups;
    static constexpr int kScoreColumns = kDimLatent / kColumnGroups;  // of a warp's Q and K
    static constexpr int kScoreOctets = kOctets / kRowGroups;         // of a warp's Q
    static constexpr int kRopeGroups = kDimRope / 16;                 // column groups with 16 rotary columns
    static constexpr bool kGroupScales = Layout::kScale == Scale::kGroup, kHasTail = Layout::kHasTail;
    static constexpr int kColumnBlocks = ((kHasTail ? kDimLatent : kDim) + 63) / 64;  // of 64 columns
    static constexpr int kBlockBytes = 64 * Layout::kElementBytes;                    // of a column block of a token
    static constexpr int kColumnBlockBytes = kTile * kBlockBytes;
    static constexpr int kTokenBlockBytes = 16 * kBlockBytes;  // of a token block in a column block
    // A tile's tail follows the column blocks: rotary columns, then scales.
    static constexpr int kRopeTokenBytes = kHasTail ? kDimRope * Layout::kRopeElementBytes : kBlockBytes;
    static constexpr int kRopeBlockBytes = 16 * kRopeTokenBytes;
    static constexpr int kRopeOffset = kColumnBlocks * kColumnBlockBytes;
    static constexpr int kScaleOffset = kRopeOffset + (kHasTail ? kTile * kRopeTokenBytes : 0);
    // Each warp computes whole scores, of 8 tokens of a tile: see token_products.cuh.
    static constexpr bool kWholeScores = kWidens && kRows == 16 && kTile == kWarps * 8;
    // Buffers of P, which tiles use in turn, and matrices in each, one for the columns that share a scale.
    static constexpr int kWeightBuffers = kWholeScores ? 2 : 1;
    static constexpr int kWeightMatrices = kWholeScores && kGroupScales ? Layout::kScales : 1;
    static constexpr int kTileBytes = kScaleOffset + kTile * Layout::kScales * 4;

    static_assert(kRows % 8 == 0 && kRows <= 64 && (kTile == 16 || kTile == 32 || kTile == 64));
    static_assert(kOctets % kRowGroups == 0 && kWarps % kRowGroups == 0);
    static_assert(Layout::kScaleColumns % kColumns == 0);  // the columns of a warp's O share a scale
    static_assert(kDimLatent % 64 == 0 && kColumns % 32 == 0 && kDimRope % 16 == 0 && kRopeGroups <= kColumnGroups);
    static_assert(kStages >= 3);
};

// The window of tokens that a warp will copy next; see KeyLoader.
struct NextWindow {
    Place place;           // where the next work tile begins
    int row;               // of the page table, of the window's request
    int token, token_end;  // where the window begins, and where its work tile ends; -1 past the last work tile
};

// With scales of groups: what else the partial scores of a column group's latents are multiplied by. It lies in shared
// memory because with 64 rows all registers are taken.
template <typename C>
struct GroupScaleMemory {
    float score_scales[C::kColumnGroups][C::kRows];
};
struct NoMemory {};

// What warps with whole scores of a few tokens tell each other.
template <typename C>
struct TokenMemory {
    std::conditional_t<C::kHasTail, uint4[C::kDimRope / 16][32], char> rope_queries;  // see TokenQueries
    float rows[C::kWarps][C::kRows];  // maxima of queries or scores, or sums
    int largest_scales[C::kWarps];    // with scales of groups: exponents
    int stage;                        // of the next work tile's first tile
};
template <typename C>
using ExtraMemory = std::conditional_t<C::kWholeScores, TokenMemory<C>,
                                       std::conditional_t<C::kGroupScales, GroupScaleMemory<C>, NoMemory>>;

template <typename C>
using ScoreMemory =
    std::conditional_t<C::kWholeScores, char, float4[C::kColumnGroups][C::kOctets][C::kTokenBlocks][32]>;

// Tokens of each stage without a key: they lie past the work tile, or their entry in the page table or the list lies
// outside of the cache. Each warp that copies keys has a byte, with a bit for each of its tokens. The stage holds zeros
// for them.
template <typename C>
struct InvalidTokens {
    static constexpr int kWarpTokens = C::kTile / C::kWarps;
    alignas(8) unsigned char bits[C::kStages][C::kWarps];
    static_assert(kWarpTokens <= 8 && C::kWarps == 8);

    __device__ uint64_t of(int stage) const { return reinterpret_cast<const uint64_t&>(bits[stage]); }
    static __device__ bool has(uint64_t invalid, int token) {
        return invalid >> (token / kWarpTokens * 8 + token % kWarpTokens) & 1;
    }
};

template <typename C>
struct DecodeMemory : ExtraMemory<C> {
    alignas(128) unsigned char kv[C::kStages][C::kTileBytes];
    // The end of a work tile reuses the memory of its scores.
    union {
        alignas(128) ScoreMemory<C> scores;
        struct {
            OutputOffsets<C::kRows> rows;
            RowState states[C::kRows];
        } end;
    };
    union {
        alignas(128) uint4 p[C::kWeightBuffers][C::kWeightMatrices][C::kTokenBlocks][C::kOctets][2][8];
        std::conditional_t<C::kWholeScores, uint4[C::kDimLatent / 16][32], char> queries;  // see TokenQueries
    };
    float top[C::kRows];     // the maximum that a row's exponentials use; only the row's warp reads it
    float factor[C::kRows];  // what a refreshed maximum multiplies O by
    // The order of what follows leaves no gaps: with five stages, 99 KB are full.
    CtaRange range;
    // What follows would be in registers if 64 rows left any:
    NextWindow next_windows[C::kWarps];
    uint32_t flag;                     // this CTA's flag when the launch began
    Place place;                       // where the next work tile begins
    WorkTile work;                     // the one whose keys are being multiplied; after the loop, the last one
    int masked;                        // some row does not see all keys of a tile if fewer tokens than these remain
    int refreshed;                     // how many tokens remained when a maximum was last refreshed
    int two_way_splits, other_splits;  // work tiles so far whose m-blocks have two splits, or more
    bool has_work;                     // false past the last work tile
    bool keeps_half;                   // the last work tile is one of two splits: see combine_two
    InvalidTokens<C> invalid;
};

// A query row.
struct QueryRow {
    int head;
    int64_t token;  // among those of all requests
    bool exists;
};

// Query row r of a work tile's m-block.
template <typename C>
__device__ __forceinline__ QueryRow query_row(const DecodeParams& p, const WorkTile& work, int r) {
    const int row = work.m_block * C::kRows + r, token = row / p.num_heads;
    const uint32_t in_batch = query_token(p, work, token);
    return {row - token * p.num_heads, in_batch, in_batch < p.num_tokens};
}

// What all keys of the tensor are multiplied by.
template <typename C>
__device__ __forceinline__ float tensor_scale(const DecodeParams& p) {
    if constexpr (C::Layout::kScale == Scale::kTensor) return *p.kv_scale;
    return 1.f;
}

// Offset of a 16-byte vector of a token's key within a stage. The vectors are swizzled: the offset of any other
// vector of the same token follows by one exclusive or.
template <typename C>
__device__ __forceinline__ uint32_t vector_offset(int token, int vector) {
    if constexpr (C::kBlockBytes == 64)
        return vector / 4 * C::kColumnBlockBytes + token * 64 + (vector ^ token / 2) % 4 * 16;
    else
        return vector / 8 * C::kColumnBlockBytes + token * 128 + (vector ^ token) % 8 * 16;
}

// Likewise of the rotary columns in a tail, 128 bytes.
template <typename C>
__device__ __forceinline__ uint32_t tail_rope_offset(int token, int vector) {
    static_assert(!C::kHasTail || C::kRopeTokenBytes == 128);
    return C::kRopeOffset + token * C::kRopeTokenBytes + (vector ^ token) % 8 * 16;
}

}  // namespace mla::portable
