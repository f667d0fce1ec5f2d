// Work tiles: what the planner deals out to the CTAs of a decode launch. A CTA walks its own by WorkCursor
// (params.cuh).
//
// The query rows of a request (query_len * num_heads) are cut into m-blocks of kRows rows. The planner counts the keys
// of an m-block in tiles of kPlanTile tokens, a multiple of every kernel's own KV tile. It puts all m-blocks in a line,
// each as long as its tiles plus a constant, and cuts the line into one contiguous range per CTA. An m-block that is
// cut is computed by several consecutive CTAs: each leaves a split, and together they combine the splits at the end of
// the launch (splits.cuh). If the batch gives one number of query tokens for all requests (no query_start_loc), these
// have equally many m-blocks. CTAs then form groups, one for each m-block index, and every group has a line of its own,
// unless too many CTAs would have no work.
//
// C::kForOneMBlock: the kernel is made for requests with at most kRows rows. If a request has more, each of its
// m-blocks loads all keys, and masks those that it does not see.
//
// C::kRangeCtas CTAs, 1 or 2, have the same range. The CTAs of a cluster of 2 compute two neighbouring m-blocks from
// the same keys; to the planner these are one m-block of kRangeCtas * kRows rows, and a cluster is one CTA.
#pragma once
#include "shard.cuh"

namespace mla {

constexpr int kPlanTile = 64;
constexpr int kMaxCtas = 192;  // of a launch; a GPU with more multiprocessors would leave some idle

// The rows of an m-block as the planner sees it.
template <typename C>
constexpr int kPlanRows = C::kRows * C::kRangeCtas;

// How many of a request's `keys` on this shard an m-block sees. With the causal mask, a query token sees the
// keys up to its own; the query tokens' own keys are the last ones of the `seq_len` of all shards.
template <typename C, typename NumHeads>
__device__ __forceinline__ int visible_keys(const Shard& shard, int seq_len, int keys, int query_len, int m_block,
                                            const NumHeads& num_heads, bool causal) {
    if constexpr (C::kForOneMBlock) return keys;
    const int end_row = (m_block + 1) * kPlanRows<C>;
    if (!causal || end_row >= query_len * num_heads) return keys;
    return shard.keys_of(seq_len - query_len + (end_row - 1) / num_heads + 1);
}

// This CTA's number in a plan. The first CTAs of all clusters are numbered before the second ones, so that the splits
// of an m-block have consecutive numbers.
template <typename C>
__device__ __forceinline__ int planned_cta() {
    return C::kRangeCtas == 1 ? blockIdx.x : blockIdx.x % 2 * (gridDim.x / 2) + blockIdx.x / 2;
}

// A place in the line: a tile of an m-block of a request.
struct Place {
    int request, m_block, tile;
};

// What the planner makes of a request's lengths. Any numbers may stand in the caller's arrays: they are cut to what
// exists. Decode kernels take a request as it was planned, so all agree on it.
struct alignas(16) PlannedRequest {
    int query_begin, query_len;  // query tokens, among those of all requests
    int seq_len;                 // of all shards together
    int keys;                    // of this shard
};

// The part of the line that a CTA computes.
struct CtaRange {
    int request, m_block, tile;              // where it begins
    int first_cta;                           // with a split of the m-block there; this CTA itself if tile == 0
    int end_request, end_m_block, end_tile;  // where it ends: one past the last tile
    int last_cta;                            // with a split of the m-block there; this CTA itself if end_tile == 0
    int paired;                              // this CTA and CTA ^ 1 share one m-block, and have no other
    int same_m_block;                        // no CTA has two m-blocks of a request; all of this one's are `m_block`
    // The first request, to save a look-up at the start; 0 if there is none. Words of a PlannedRequest.
    int query_begin, query_len, seq_len, keys;

    __device__ Place begin() const { return {request, m_block, tile}; }
};

// What the planner writes for a CTA.
constexpr int kPlannedSlots = 32;
struct alignas(16) CtaPlan {
    CtaRange range;
    // Slots of the range's first tokens, or of every 8th of them (C::kSlotStride; 0: of none); -1 past the last
    // token, and for a token without a key.
    int slots[kPlannedSlots];
    // Of the launches that the plan is for, and which of the decoder's plans it is: see `check_plan`.
    int num_ctas, generation;
};

// Lengths of the requests, as the caller gives them. If `query_start_loc` is null, every request has `query_len` query
// tokens; otherwise no more than that.
struct Lengths {
    const int* seq_lens;         // [batch], of all shards together
    const int* query_start_loc;  // [batch + 1] or null
    int query_len;
    Shard shard;
    int longest;  // request, in tokens, for which a row of the table has entries

    // `has_row`: whether the table has a row for the request. If not, there are no keys.
    __device__ PlannedRequest of(int request, bool has_row) const {
        PlannedRequest planned = {request * query_len, query_len, 0, 0};
        if (query_start_loc) {
            planned.query_begin = max(query_start_loc[request], 0);
            planned.query_len = min(max(max(query_start_loc[request + 1], 0) - planned.query_begin, 0), query_len);
        }
        if (has_row) planned.seq_len = min(max(seq_lens[request], 0), longest);
        planned.keys = shard.keys_of(planned.seq_len);
        return planned;
    }
};

// A range of the keys of one m-block, on one CTA.
struct WorkTile {
    int request, m_block;
    int query_begin;  // first query token of the request
    int query_len;
    int seq_len;                 // of all shards together
    int token_begin, token_end;  // the keys, counted among those of this shard
    bool has_first_key, has_last_key;

    // Whether other CTAs have work tiles of this m-block.
    __device__ bool split() const { return !(has_first_key && has_last_key); }
};

// The CTAs that have a work tile of the same m-block as `work`, which is one of CTA `cta`.
struct Splits {
    int cta, first, last;
    __device__ Splits(const WorkTile& work, const CtaRange& range, int cta)
        : cta(cta), first(work.has_first_key ? cta : range.first_cta), last(work.has_last_key ? cta : range.last_cta) {}
    __device__ int count() const { return last - first + 1; }
    __device__ int index() const { return cta - first; }
};

// Whether the m-block of a work tile of a CTA has exactly two splits.
__device__ __forceinline__ bool is_two_way_split(const WorkTile& work, const CtaRange& range, int cta) {
    return work.split() && Splits(work, range, cta).count() == 2;
}

}  // namespace mla
