// Template arguments of the portable decode kernel and what follows from them, and its shared memory.
//
// Words: an mma multiplies a token block (16 tokens) by a row octet (8 query rows). A column group is the columns of Q
// and K that one warp multiplies for S. With several row groups (kRowGroups), that many warps have the same columns;
// each multiplies its own part of the octets.
#pragma once
#include "numbers/cache_format.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "schedule/params.cuh"
#include "schedule/splits.cuh"

namespace mla::portable {

constexpr int kThreads = 256;

// kTile: tokens of a KV tile. kDependentLaunch: the launch may overlap its predecessor (sm_90 and newer). kLists: keys
// are those of a list of slots.
template <typename Element_, CacheFormat kFormat, int kDimLatent_, int kDimRope_, int kRows_, int kTile_, int kStages_,
          int kRowGroups_, bool kDependentLaunch_, bool kLists_ = false>
struct DecodeConfig {
    using Element = Element_;
    using Layout = CacheLayout<kFormat, kDimLatent_, kDimRope_>;
    using Factor = std::conditional_t<Layout::kFp8, __half, Element>;  // what tensor cores multiply
    using RopeFactor = std::conditional_t<Layout::kRopeElementBytes == 1, __half, Element>;  // of rotary columns
    static constexpr int kDimLatent = kDimLatent_;
    static constexpr int kDimRope = kDimRope_;
    static constexpr int kDim = kDimLatent + kDimRope;
    static constexpr int kRows = kRows_;
    static constexpr int kRangeCtas = 1, kMBlockCost = 2;
    static constexpr bool kForOneMBlock = false;
    static constexpr int kSlotStride = 0;  // the planner looks up no slots
    static constexpr int kTile = kTile_;
    static constexpr int kStages = kStages_;
    static constexpr int kRowGroups = kRowGroups_;
    static constexpr bool kDependentLaunch = kDependentLaunch_, kLists = kLists_;

    static constexpr int kWarps = kThreads / 32;
    static constexpr int kOctets = kRows / 8;
    static constexpr int kTokenBlocks = kTile / 16;
    static constexpr int kColumns = kDimLatent / kWarps;  // of O, of a warp
    static constexpr int kColumnGroups = kWarps / kRowGroups;
    static constexpr int kScoreColumns = kDimLatent / kColumnGroups;  // of Q and K, of a warp
    static constexpr int kScoreOctets = kOctets / kRowGroups;         // of Q, of a warp
    static constexpr int kRopeGroups = kDimRope / 16;                 // column groups with 16 rotary columns
    static constexpr bool kRecords = Layout::kIsRecord;
    static constexpr int kColumnBlocks = ((kRecords ? kDimLatent : kDim) + 63) / 64;  // of 64 columns
    static constexpr int kBlockBytes = Layout::kFp8 ? 64 : 128;                       // of a column block of a token
    static constexpr int kColumnBlockBytes = kTile * kBlockBytes;
    static constexpr int kTokenBlockBytes = 16 * kBlockBytes;  // of a token block in a column block
    // With records, a tile's rotary columns and scales follow the column blocks.
    static constexpr int kRopeTokenBytes = kRecords ? kDimRope * 2 : kBlockBytes;
    static constexpr int kRopeBlockBytes = 16 * kRopeTokenBytes;
    static constexpr int kRopeOffset = kColumnBlocks * kColumnBlockBytes;
    static constexpr int kScaleOffset = kRopeOffset + (kRecords ? kTile * kRopeTokenBytes : 0);
    // A warp has whole scores, of 8 tokens of a tile: see token_products.cuh.
    static constexpr bool kWholeScores = Layout::kFp8 && kRows == 16 && kTile == kWarps * 8;
    // P of a tile: alternating buffers, and matrices, of which each warp multiplies one.
    static constexpr int kWeightBuffers = kWholeScores ? 2 : 1;
    static constexpr int kWeightMatrices = kWholeScores && kRecords ? Layout::kScales : 1;
    static constexpr int kTileBytes = kScaleOffset + kTile * Layout::kScales * 4;

    static_assert(kRows % 8 == 0 && kRows <= 64 && (kTile == 16 || kTile == 32 || kTile == 64));
    static_assert(kOctets % kRowGroups == 0 && kWarps % kRowGroups == 0);
    static_assert(kDimLatent % 64 == 0 && kColumns % 32 == 0 && kDimRope % 16 == 0 && kRopeGroups <= kColumnGroups);
    static_assert(kStages >= 3);
};

// The window of tokens that a warp copies next; see KeyLoader.
struct NextWindow {
    Place place;           // where the next work tile begins
    int row;               // of the page table, of the window's request
    int token, token_end;  // where the window begins, and where its work tile ends; -1 past the last work tile
};

// Factors of the partial scores of a column group's latents, in addition to the scales of records. In shared memory,
// because with 64 rows no registers are left for them.
template <typename C>
struct RecordMemory {
    float score_scales[C::kColumnGroups][C::kRows];
};
struct NoMemory {};

// What warps with whole scores of a few tokens exchange.
template <typename C>
struct TokenMemory {
    std::conditional_t<C::kRecords, uint4[C::kDimRope / 16][32], char> rope_queries;  // see TokenQueries
    float rows[C::kWarps][C::kRows];  // maxima of queries or scores, or sums
    int largest_scales[C::kWarps];    // of records: exponents
    int stage;                        // of the next work tile's first tile
};
template <typename C>
using ExtraMemory =
    std::conditional_t<C::kWholeScores, TokenMemory<C>, std::conditional_t<C::kRecords, RecordMemory<C>, NoMemory>>;

template <typename C>
using ScoreMemory =
    std::conditional_t<C::kWholeScores, char, float4[C::kColumnGroups][C::kOctets][C::kTokenBlocks][32]>;

// Tokens of each stage that do not exist, or whose entry in the page table or the list names no key, because it lies
// outside of the cache: a byte for each warp that copies keys, a bit for each of its tokens. The stage holds zeros for
// them.
template <typename C>
struct UnnamedTokens {
    static constexpr int kWarpTokens = C::kTile / C::kWarps;
    alignas(8) unsigned char bits[C::kStages][C::kWarps];
    static_assert(kWarpTokens <= 8 && C::kWarps == 8);

    __device__ uint64_t of(int stage) const { return reinterpret_cast<const uint64_t&>(bits[stage]); }
    static __device__ bool has(uint64_t unnamed, int token) {
        return unnamed >> (token / kWarpTokens * 8 + token % kWarpTokens) & 1;
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
    float top[C::kRows];     // the maximum that exponentials of a row use; known to the row's warp alone
    float factor[C::kRows];  // by which a refreshed maximum scales O
    // All that follows is in an order that leaves no gaps: with five stages 99 KB are full.
    CtaRange range;
    // In shared memory because with 64 rows no registers are left for them:
    NextWindow next_windows[C::kWarps];
    uint32_t flag;  // this CTA's, when the launch began
    Place place;    // where the next work tile begins
    WorkTile work;  // whose keys are being multiplied; in the end the last one
    int masked;     // a tile holds keys that some row does not see if fewer tokens than these are left
    int refreshed;  // how many tokens were left when a maximum was last refreshed
    int two_way_splits, other_splits;  // work tiles so far whose m-blocks have two splits, or more
    bool has_work;                     // false past the last work tile
    bool keeps_half;                   // the last work tile is one of two splits: see combine_two
    UnnamedTokens<C> unnamed;
};

// A query row.
struct QueryRow {
    int head;
    int64_t token;  // among those of all requests
    bool exists;
};

// Row r of a work tile's m-block.
template <typename C>
__device__ __forceinline__ QueryRow query_row(const DecodeParams& p, const WorkTile& work, int r) {
    const int row = work.m_block * C::kRows + r, token = row / p.num_heads;
    const uint32_t in_batch = query_token(p, work, token);
    return {row - token * p.num_heads, in_batch, in_batch < p.num_tokens};
}

// Offset of a 16-byte vector of a token's key within a stage. The vectors are swizzled: the offset of any other
// vector of the same token follows by one exclusive or.
template <typename C>
__device__ __forceinline__ uint32_t vector_offset(int token, int vector) {
    if constexpr (C::Layout::kFp8)
        return vector / 4 * C::kColumnBlockBytes + token * 64 + (vector ^ token / 2) % 4 * 16;
    else
        return vector / 8 * C::kColumnBlockBytes + token * 128 + (vector ^ token) % 8 * 16;
}

// Likewise of a record's rotary columns: 64 of 16 bits, 128 bytes.
template <typename C>
__device__ __forceinline__ uint32_t record_rope_offset(int token, int vector) {
    return C::kRopeOffset + token * C::kRopeTokenBytes + (vector ^ token) % 8 * 16;
}

}  // namespace mla::portable
