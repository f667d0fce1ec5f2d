// The plan that the device planner writes and every decode kernel walks.
//
// The query rows of a request (query_len * num_heads) are cut into blocks of kRows; a (request, block) pair is an
// entry, and its keys are counted in units of kUnit tokens: whole tiles of the kernels. All entries in a row, weighed
// by units plus a constant each, form a line that the planner cuts into one contiguous range per CTA. An entry that a
// cut goes through is computed by several CTAs (its contributors, consecutive) and reduced by them at the end. Where
// each block of the requests has a crew of CTAs, every crew has a line of its own.
#pragma once
#include <cstdint>

namespace mla {

constexpr int kUnit = 64;
constexpr int kMaxCtas = 192;  // of a launch

struct CtaRange {
    int request, block, unit;              // where the range starts
    int first_contributor;                 // of the entry there (the CTA itself when unit == 0)
    int end_request, end_block, end_unit;  // where it ends (exclusive)
    int last_contributor;                  // of the entry there (the CTA itself when end_unit == 0)
    int paired;     // whether this CTA and its neighbour (CTA ^ 1) share one entry, and have no other
    int one_block;  // whether no CTA computes two blocks of a request: all items here are of `block`
    int query_begin, query_len, seq_len;  // of the first request, so that work starts without looking them up; or 0
};

// What the planner writes for a CTA.
constexpr int kSlots = 32;
struct alignas(16) CtaPlan {
    CtaRange range;
    int slots[kSlots];  // page * page_size + row of the first keys, or of the first group of 8 each; -1 behind the end
};

// Per-request lengths; `query_start_loc` null means that every request has `query_len` rows of queries.
struct Lengths {
    const int* seq_lens;         // [batch]
    const int* query_start_loc;  // [batch + 1] or null
    int query_len;

    __device__ int query_begin(int request) const {
        return query_start_loc ? query_start_loc[request] : request * query_len;
    }
    __device__ int num_queries(int request) const {
        return query_start_loc ? query_start_loc[request + 1] - query_start_loc[request] : query_len;
    }
};

// One CTA's share of one entry.
struct WorkItem {
    int request, block;
    int query_begin;  // first query token of the request
    int query_len;
    int seq_len;
    int token_begin, token_end;   // keys of this share
    bool whole_begin, whole_end;  // the share holds the entry's first key / its last key

    __device__ bool split() const { return !(whole_begin && whole_end); }
};

// The CTAs that share the entry of a split item.
struct Contributors {
    int first, last;
    __device__ Contributors(const WorkItem& item, const CtaRange& range)
        : first(item.whole_begin ? static_cast<int>(blockIdx.x) : range.first_contributor),
          last(item.whole_end ? static_cast<int>(blockIdx.x) : range.last_contributor) {}
    __device__ int count() const { return last - first + 1; }
    __device__ int rank() const { return static_cast<int>(blockIdx.x) - first; }
};

// Whether exactly one other CTA shares the item's entry.
__device__ __forceinline__ bool of_two(const WorkItem& item, const CtaRange& range) {
    return item.split() && Contributors(item, range).count() == 2;
}

template <int kRows>
struct WorkCursor {
    const Lengths lengths;
    const int num_heads;
    const CtaRange& range;
    int request, block, unit;

    __device__ WorkCursor(const Lengths& lengths, int num_heads, const CtaRange& range)
        : lengths(lengths),
          num_heads(num_heads),
          range(range),
          request(range.request),
          block(range.block),
          unit(range.unit) {}

    __device__ bool at_end() const {
        if (request != range.end_request) return request > range.end_request;
        return block != range.end_block ? block > range.end_block : unit >= range.end_unit;
    }

    // False, and the item as it was, behind the last one.
    __device__ bool next(WorkItem& item) {
        while (!at_end()) {
            const bool first = request == range.request;
            const int query_len = first ? range.query_len : lengths.num_queries(request);
            int blocks = (query_len * num_heads + kRows - 1) / kRows;
            if (block >= blocks) {  // a request without queries
                ++request;
                block = 0;
                continue;
            }
            item.request = request;
            item.block = block;
            item.query_len = query_len;
            item.query_begin = first ? range.query_begin : lengths.query_begin(request);
            item.seq_len = first ? range.seq_len : lengths.seq_lens[request];
            bool cut = request == range.end_request && block == range.end_block;
            item.token_begin = unit * kUnit;
            item.token_end = cut ? min(range.end_unit * kUnit, item.seq_len) : item.seq_len;
            item.whole_begin = unit == 0;
            item.whole_end = !cut;
            unit = 0;
            if (range.one_block) {
                ++request;
            } else if (++block == blocks) {
                ++request;
                block = 0;
            }
            return true;
        }
        return false;
    }
};

}  // namespace mla
