// Parameters that all decode kernels have in common, and how a CTA walks its work tiles. Strides count elements; the
// last dimension of every tensor is contiguous.
#pragma once
#include <cstddef>

#include "fail.cuh"
#include "numbers/arithmetic.cuh"
#include "ptx/registers.cuh"
#include "work.cuh"

namespace mla {

// Index i of int64 or int32 indices.
__device__ __forceinline__ int64_t index_at(const void* indices, bool are_64, int i) {
    return are_64 ? static_cast<const int64_t*>(indices)[i] : static_cast<const int*>(indices)[i];
}

// Where the keys of requests lie: a block table, or a token table (`of_tokens`).
struct PageTable {
    const int* entries;  // [num_rows, width]: the pages of a request, or the slots of its tokens
    int64_t stride;      // from row to row
    int64_t num_rows;
    const void* rows;  // [batch] row of each request, int32 or int64 (`rows_64`); null: row = request
    bool rows_64;
    bool of_tokens;
    Divisor page_size;
    // Of a token table: it has entries for the tokens of all ranks, from this rank's first one on.
    Divisor shard_size;

    // The number of the row of a request that has keys, and the row's entries.
    __device__ int row_number(int request) const {
        return rows ? static_cast<int>(index_at(rows, rows_64, request)) : request;
    }
    __device__ const int* row(int number) const { return entries + number * stride; }
    __device__ const int* row_of(int request) const { return row(row_number(request)); }

    // Whether the table has the row that `rows` gives for a request.
    __device__ bool has_row(int request) const {
        return !rows || static_cast<uint64_t>(index_at(rows, rows_64, request)) < static_cast<uint64_t>(num_rows);
    }

    // The entry that locates a token; and, from the entry, the token's page and its row of that page. The page may lie
    // outside of the cache: below 0 if the entry does.
    __device__ int entry_of(const int* row_of_table, int token) const {
        return row_of_table[of_tokens ? token * shard_size : token / page_size];
    }
    __device__ void locate(int entry, int token, int& page, int& row) const {
        if (of_tokens) {
            page_size.split(entry / shard_size, page, row);
            if (entry < 0) page = -1;
        } else {
            page = entry;
            row = token - token / page_size * page_size;
        }
    }
    __device__ void locate(const int* row_of_table, int token, int& page, int& row) const {
        locate(entry_of(row_of_table, token), token, page, row);
    }
};

// Words from one CTA's flag to the next. Each flag has a cache line of its own: when all CTAs watch all flags, flags
// that share a line are seen 1 us later (H200).
constexpr int kFlagStride = 32;

struct DecodeParams {
    uint32_t num_tokens;  // of the tensors of queries and outputs
    const void* q_nope;   // [tokens, heads, d_c]
    int64_t q_nope_token_stride, q_nope_head_stride;
    const void* q_rope;  // [tokens, heads, d_rope]
    int64_t q_rope_token_stride, q_rope_head_stride;

    const void* cache;  // [pages, page_size, ...] in a format (cache_format.cuh)
    int64_t page_stride, row_stride;
    uint32_t num_pages, num_slots;  // of the cache; entries that lie outside stand for no key
    PageTable table;

    const PlannedRequest* requests;  // [batch], by the planner
    Shard shard;
    int longest;  // length of a list, with lists: their batches are planned before lengths are known
    Divisor num_heads;
    bool causal;
    float scale_log2;  // softmax scale * log2(e)

    void* out;  // [tokens, heads, d_c]
    int64_t out_token_stride, out_head_stride;
    float* lse;  // [tokens, heads], natural log
    int64_t lse_token_stride, lse_head_stride;

    int generation;        // of the plan; 0: any
    int* failure;          // host memory: see `check_plan`
    const CtaPlan* plans;  // [most_ctas]; a launch of fewer CTAs uses the first ones, of flags likewise
    void* split_buffers;   // [2 * most_ctas], see schedule/splits.cuh
    uint32_t* flags;       // [most_ctas][kFlagStride]; those of a launch are equal between launches

    uint64_t* profile;  // see decode/hopper/profile.cuh; used by profiling variants only

    const float* kv_scale;  // of a cache with Scale::kTensor
    const float* sinks;     // [heads], natural log; null: none. See `count_sink`
};

// Reasons to end a launch with an error; KernelDecode in mla_backend/kernels/base.py has a text for each.
enum Failure { kOtherCtas = 1, kOtherPlan };

// By any threads: ends the launch with an error if the workspace holds a plan for another number of CTAs, with which it
// might wait forever, or another plan than the host takes it for. A captured launch may meet either: it is repeated
// with whatever plan is there.
__device__ __forceinline__ void check_plan(const DecodeParams& p, const CtaPlan& plan) {
    static_assert(offsetof(CtaPlan, num_ctas) % sizeof(int2) == 0);
    const auto [num_ctas, generation] = reinterpret_cast<const int2&>(plan.num_ctas);  // in one load
    const bool fits = num_ctas == gridDim.x, is_last = p.generation == 0 || generation == p.generation;
    if (!fits || !is_last) fail(p.failure, fits ? kOtherPlan : kOtherCtas);
}

// Offset in the cache, in elements, of a token whose entry in the page table or the list is `entry`. -1 if there is no
// such key: the entry lies outside of the cache.
template <typename C>
__device__ __forceinline__ int64_t offset_in_cache(const DecodeParams& p, int entry, int token) {
    int page, row;
    if constexpr (C::kLists) {
        if (static_cast<uint32_t>(entry) >= p.num_slots) return -1;
        p.table.page_size.split(entry, page, row);
    } else {
        p.table.locate(entry, token, page, row);
        if (static_cast<uint32_t>(page) >= p.num_pages) return -1;
    }
    return page * p.page_stride + row * p.row_stride;
}

// The number of a work tile's query token `token` among those of all requests; `num_tokens` or more if it does not
// exist.
__device__ __forceinline__ uint32_t query_token(const DecodeParams& p, const WorkTile& work, int token) {
    return token < work.query_len ? static_cast<uint32_t>(work.query_begin) + token : ~0u;
}

// Where the keys end that row r of a work tile's m-block sees.
template <typename C>
__device__ __forceinline__ int key_limit(const DecodeParams& p, const WorkTile& work, int r) {
    if (!p.causal || work.query_len == 1) return work.token_end;
    const int token = (work.m_block * C::kRows + r) / p.num_heads;
    return min(work.token_end, p.shard.keys_of(work.seq_len - work.query_len + token + 1));
}

// A head's sink counts as a key that every row sees, with this score and without values. Adds it to the maximum (in
// log2) and to the sum of weights of row r, of the work tile with the m-block's first keys. All else follows from
// these. The sum stays finite: if all scores are lower than the sink by more than kMost, the LSE is that of a lower
// sink.
template <typename C>
__device__ __forceinline__ void count_sink(const DecodeParams& p, const WorkTile& work, int r, float& top,
                                           float& total) {
    constexpr float kMost = 126.f, kNoKeys = -1e29f;
    if (!p.sinks || !work.has_first_key) return;
    // Pinned: otherwise rows would be computed before the loop over tiles, and held in registers.
    const int row = pinned(work.m_block) * C::kRows + r;
    const float sink = p.sinks[row - row / p.num_heads * p.num_heads] * static_cast<float>(kLog2OfE);
    if (top < kNoKeys)
        top = sink, total = 1.f;
    else
        total += exp2_approx(fminf(sink - top, kMost));
}

// Walks the work tiles of a CTA, from the beginning of its range or from a later place.
template <typename C>
struct WorkCursor {
    const DecodeParams& p;
    const CtaRange& range;
    Place place;  // where the next work tile begins

    __device__ WorkCursor(const DecodeParams& p, const CtaRange& range, const Place& place)
        : p(p), range(range), place(place) {}
    __device__ WorkCursor(const DecodeParams& p, const CtaRange& range) : WorkCursor(p, range, range.begin()) {}

    __device__ bool at_end() const {
        if (place.request != range.end_request) return place.request > range.end_request;
        return place.m_block != range.end_m_block ? place.m_block > range.end_m_block : place.tile >= range.end_tile;
    }

    // Returns false, and leaves `work` unchanged, after the last one.
    __device__ bool next(WorkTile& work) {
        while (!at_end()) {
            PlannedRequest request = {range.query_begin, range.query_len, range.seq_len, range.keys};
            if (place.request != range.request) request = p.requests[place.request];
            if constexpr (C::kLists) request.seq_len = request.keys = min(request.keys, p.longest);
            const int query_len = request.query_len;
            const int m_blocks = (query_len * p.num_heads + kPlanRows<C> - 1) / kPlanRows<C>;
            if (place.m_block >= m_blocks) {  // a request without queries
                ++place.request;
                place.m_block = 0;
                continue;
            }
            work.request = place.request;
            work.m_block = place.m_block * C::kRangeCtas + blockIdx.x % C::kRangeCtas;
            work.query_len = query_len;
            work.query_begin = request.query_begin;
            work.seq_len = request.seq_len;
            const bool cut = place.request == range.end_request && place.m_block == range.end_m_block;
            work.token_begin = place.tile * kPlanTile;
            const int keys =
                visible_keys<C>(p.shard, work.seq_len, request.keys, query_len, place.m_block, p.num_heads, p.causal);
            // CTA groups are cut alike, though their m-blocks may see fewer keys: the last split may have none.
            work.token_end = max(cut ? min(range.end_tile * kPlanTile, keys) : keys, work.token_begin);
            work.has_first_key = place.tile == 0;
            work.has_last_key = !cut;
            place.tile = 0;
            if (range.same_m_block) {
                ++place.request;
            } else if (++place.m_block == m_blocks) {
                ++place.request;
                place.m_block = 0;
            }
            return true;
        }
        return false;
    }
};

}  // namespace mla
