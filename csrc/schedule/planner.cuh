// The device planner: one launch a decode step, so lengths never leave the GPU. The same algorithm in plain Python is
// tests/support/planner.py, whose functions have the same names; it also says why there are two ways to cut.
//
// Example: a line of m-blocks of 9, 2 and 2 plan tiles. Each m-block costs kMBlockCost (c) in addition. For 2 CTAs the
// line is cut by cost; for 6, every m-block is cut into two equal splits. The CTA of each tile:
//
//   line             c c 1 2 3 4 5 6 7 8 9   c c 1 2   c c 1 2
//   2 CTAs, by cost  0 0 0 0 0 0 0 0 0 1 1   1 1 1 1   1 1 1 1
//   6 CTAs, equally  0 0 0 0 0 0 0 1 1 1 1   2 2 2 3   4 4 4 5
//
// grid 1 CTA of 1024 threads
//
//   pass             a thread takes   reads                    writes
//   1 sum_costs      a request        lengths                  the request; prefix sums of costs and m-blocks (global
//                                                              memory)
//   2 place_cuts     a cut            prefix sums, requests    cuts (shared memory)
//     barrier
//   3 write_ranges   a CTA            cuts, requests           the CTA's range; its flag
//     barrier
//   4 look_up_slots  a planned slot   ranges, page table       slots of the range's first keys
#pragma once
#include <climits>

#include "params.cuh"

namespace mla {

struct PlanParams {
    Lengths lengths;
    int batch;
    Divisor num_heads;
    int num_ctas;   // of the launches that follow
    int most_ctas;  // of any launch with this workspace
    bool whole;     // no m-block is cut
    int generation;
    PageTable table;
    int64_t* ends;             // [2][batch] scratch: inclusive prefix sums of costs and of m-blocks
    PlannedRequest* requests;  // [batch]
    CtaPlan* plans;            // [most_ctas]; those past num_ctas get no work
    uint32_t* flags;           // [most_ctas][kFlagStride]; cleared: launches with fewer CTAs leave them unequal
};

constexpr int kPlanThreads = 1024;
constexpr int kPlanWarps = kPlanThreads / 32;
constexpr int kMaxCtaGroups = 8;  // requests with more m-blocks have a single group
// With several groups, at most one range in 16 may be left without work. Equal splits may cost at most a sixteenth more
// than a range of equal cost.
constexpr int kRangesPerIdleRange = 16;

__device__ __forceinline__ bool is_before(const Place& a, const Place& b) {
    if (a.request != b.request) return a.request < b.request;
    return a.m_block != b.m_block ? a.m_block < b.m_block : a.tile < b.tile;
}

struct PlannerMemory {
    int64_t warp_costs[kPlanWarps], warp_m_blocks[kPlanWarps];
    int longest;        // tiles of the longest m-block
    int most_m_blocks;  // of a request
    Place cuts[kMaxCtas + 1];
};

// Plans for a kernel whose m-blocks have kPlanRows<C> rows and cost as much as their tiles and C::kMBlockCost more. The
// slot of every C::kSlotStride-th token is looked up (0: of none). The line is that of one CTA group; all groups are
// cut alike. A cluster of C::kRangeCtas counts as one CTA.
template <typename C>
struct Planner {
    const PlanParams& p;
    PlannerMemory& shared;
    const int thread = threadIdx.x;
    const int num_ranges;  // of CTAs or clusters
    int num_groups;        // if several, each has one m-block of every request
    int group_size;        // ranges
    int64_t line_cost = 0;
    int64_t num_m_blocks = 0;  // in the line
    int64_t num_balanced;      // ranges of equal cost, none cheaper than an m-block with a single tile
    int splits;                // of every m-block, if all are cut into equally many; 0: the line is cut by cost

    __device__ Planner(const PlanParams& p, PlannerMemory& shared)
        : p(p), shared(shared), num_ranges(p.num_ctas / C::kRangeCtas) {
        num_groups = p.lengths.query_start_loc ? 1 : groups_for(all_m_blocks_of({0, p.lengths.query_len, 0, 0}));
        group_size = num_ranges / num_groups;
    }

    // The number of CTA groups if every request has `m_blocks` m-blocks. Ranges outside of groups have no work, so they
    // must be few.
    __device__ int groups_for(int m_blocks) const {
        if (m_blocks <= 0 || m_blocks > min(kMaxCtaGroups, num_ranges)) return 1;
        return num_ranges % m_blocks * kRangesPerIdleRange <= num_ranges ? m_blocks : 1;
    }

    __device__ int64_t* cost_ends() const { return p.ends; }
    __device__ int64_t* m_block_ends() const { return p.ends + p.batch; }

    __device__ int all_m_blocks_of(const PlannedRequest& request) const {
        return (request.query_len * p.num_heads + kPlanRows<C> - 1) / kPlanRows<C>;
    }
    __device__ int m_blocks_of(const PlannedRequest& request) const {
        return num_groups > 1 ? 1 : all_m_blocks_of(request);
    }
    // The tiles of an m-block: of those that it sees under the causal mask if there is one group. (Without the mask,
    // the last split is longer.)
    __device__ int tiles_of(const PlannedRequest& request, int m_block) const {
        const int keys = visible_keys<C>(p.lengths.shard, request.seq_len, request.keys, request.query_len, m_block,
                                         p.num_heads, num_groups == 1);
        return (keys + kPlanTile - 1) / kPlanTile;
    }
    __device__ int cost_of(const PlannedRequest& request, int m_block) const {
        return tiles_of(request, m_block) + C::kMBlockCost;
    }
    __device__ int64_t cost_of(const PlannedRequest& request) const {
        int64_t request_cost = 0;
        const int m_blocks = m_blocks_of(request);
#pragma unroll 1
        for (int m_block = 0; m_block < m_blocks; ++m_block) request_cost += cost_of(request, m_block);
        return request_cost;
    }

    __device__ void sum_costs() {
        const int lane = thread % 32, warp = thread / 32;
        if (thread == 0) shared.longest = shared.most_m_blocks = 0;
        for (int begin = 0; begin < p.batch; begin += kPlanThreads) {
            const int request = begin + thread;
            const bool exists = request < p.batch;
            PlannedRequest planned = {};
            if (exists) p.requests[request] = planned = p.lengths.of(request, p.table.has_row(request));
            const int m_blocks = exists ? m_blocks_of(planned) : 0;
            int64_t m_block_end = m_blocks;
            int64_t cost_end = exists ? cost_of(planned) : 0;
            for (int distance = 1; distance < 32; distance *= 2) {
                const int64_t lower_cost = __shfl_up_sync(~0u, cost_end, distance);
                const int64_t lower_m_blocks = __shfl_up_sync(~0u, m_block_end, distance);
                if (lane >= distance) cost_end += lower_cost, m_block_end += lower_m_blocks;
            }
            if (lane == 31) shared.warp_costs[warp] = cost_end, shared.warp_m_blocks[warp] = m_block_end;
            __syncthreads();
            if (m_blocks > 0) {
                atomicMax(&shared.longest, tiles_of(planned, m_blocks - 1));
                atomicMax(&shared.most_m_blocks, m_blocks);
            }
#pragma unroll 1
            for (int i = 0; i < warp; ++i) cost_end += shared.warp_costs[i], m_block_end += shared.warp_m_blocks[i];
            if (exists)
                cost_ends()[request] = line_cost + cost_end, m_block_ends()[request] = num_m_blocks + m_block_end;
#pragma unroll 1
            for (int i = 0; i < kPlanWarps; ++i)
                line_cost += shared.warp_costs[i], num_m_blocks += shared.warp_m_blocks[i];
            __syncthreads();
        }
        num_balanced = max(min(line_cost / (1 + C::kMBlockCost), static_cast<int64_t>(group_size)), int64_t{1});
        splits = equal_splits();
    }

    // The tiles of each split but the last, if an m-block is cut equally.
    static __device__ int split_tiles(int tiles, int num_splits) {
        return max((tiles + num_splits - 1) / num_splits, 1);
    }

    // Equal splits are taken if there are CTAs for them, and a split of the longest m-block exceeds a range of equal
    // cost by no more than a sixteenth and an m-block's constant. They may be longer because a range of equal cost may
    // hold parts of two m-blocks, which costs the constant once more, and because CTAs that idle leave power and
    // bandwidth to others.
    __device__ int equal_splits() const {
        if (num_m_blocks == 0 || num_m_blocks > group_size) return 0;
        const int num_splits = min(p.whole ? 1 : group_size / static_cast<int>(num_m_blocks), shared.longest);
        const int64_t balanced = line_cost / num_balanced;
        const bool fits = num_splits > 0 && split_tiles(shared.longest, num_splits) <=
                                                balanced + balanced / kRangesPerIdleRange + C::kMBlockCost;
        return fits ? num_splits : 0;
    }

    __device__ void place_cuts() {
        if (thread <= group_size) shared.cuts[thread] = splits > 0 ? cut_equally(thread) : cut_by_cost(thread);
    }

    __device__ Place cut_equally(int cut) const {
        const int index = cut / splits;  // of an m-block in the line
        if (index >= num_m_blocks) return {p.batch, 0, 0};
        const int request = request_at(m_block_ends(), index);
        const PlannedRequest planned = p.requests[request];
        const int m_block = static_cast<int>(index - (m_block_ends()[request] - m_blocks_of(planned)));
        return place(request, planned, m_block, cut % splits * split_tiles(tiles_of(planned, m_block), splits));
    }

    __device__ Place cut_by_cost(int cut) const {
        const int64_t position = cut * line_cost / num_balanced;
        if (position >= line_cost) return {p.batch, 0, 0};
        const int request = request_at(cost_ends(), position);
        const PlannedRequest planned = p.requests[request];
        int64_t offset = position - (request > 0 ? cost_ends()[request - 1] : 0);
        int m_block = 0;
#pragma unroll 1
        for (int block_cost; offset >= (block_cost = cost_of(planned, m_block)); ++m_block) offset -= block_cost;
        return place(request, planned, m_block, p.whole ? 0 : max(static_cast<int>(offset) - C::kMBlockCost, 0));
    }

    // The first number from 0 to `last` for which `holds` is true, as it is for all numbers after it and for `last`.
    template <typename Holds>
    static __device__ int first_number(int last, Holds holds) {
        int low = 0;
        while (low < last) {
            const int middle = (low + last) / 2;
            if (holds(middle))
                last = middle;
            else
                low = middle + 1;
        }
        return low;
    }

    // The first request whose end is greater than `position`; there is one.
    __device__ int request_at(const int64_t* ends, int64_t position) const {
        return first_number(p.batch - 1, [&](int request) { return ends[request] > position; });
    }

    // The place of a tile of an m-block; past the last tile, that of what follows the m-block.
    __device__ Place place(int request, const PlannedRequest& planned, int m_block, int tile) const {
        if (tile > 0 && tile >= tiles_of(planned, m_block)) tile = 0, ++m_block;
        return m_block < m_blocks_of(planned) ? Place{request, m_block, tile} : Place{request + 1, 0, 0};
    }

    __device__ void write_ranges() const {
        if (thread >= p.most_ctas) return;
        p.plans[thread].range = range_of(thread);
        p.plans[thread].num_ctas = num_ranges * C::kRangeCtas;
        p.plans[thread].generation = p.generation;
        p.flags[thread * kFlagStride] = 0;
    }

    __device__ CtaRange range_of(int cta) const {
        const int first_of_half = cta / num_ranges * num_ranges;  // `planned_cta`
        const int group = (cta - first_of_half) / group_size, member = (cta - first_of_half) % group_size;
        if (group >= num_groups || cta >= num_ranges * C::kRangeCtas)  // one of a few without work
            return {p.batch, 0, 0, cta, p.batch, 0, 0, cta, false, true};
        const Place begin = shared.cuts[member], end = shared.cuts[member + 1];
        const int group_begin = first_of_half + group * group_size;
        const bool two_each = num_m_blocks * 2 <= group_size && group_size < num_m_blocks * 3;
        const bool in_clusters = C::kRangeCtas == 1 && group_begin % 2 == 0;  // a cluster begins at an even CTA
        const int paired = splits == 2 && two_each && in_clusters && (begin.tile > 0 || end.tile > 0);
        CtaRange range{begin.request, begin.m_block + group,    begin.tile, group_begin + first_split(member, begin),
                       end.request,   end.m_block + group,      end.tile,   group_begin + last_split(member, end),
                       paired,        shared.most_m_blocks <= 1};
        if (!is_before(begin, end)) return range;
        const PlannedRequest first = p.requests[begin.request];
        if (first.query_len > 0) {
            range.query_begin = first.query_begin, range.query_len = first.query_len;
            range.seq_len = first.seq_len, range.keys = first.keys;
        }
        return range;
    }

    // The member of the group with the first split of the m-block in which a range begins, and that with the last split
    // of the one in which it ends. If the range begins or ends between m-blocks, that is its own member.
    __device__ int first_split(int member, const Place& begin) const {
        return begin.tile > 0 ? first_cut_behind({begin.request, begin.m_block, 0}) - 1 : member;
    }
    __device__ int last_split(int member, const Place& end) const {
        return end.tile > 0 ? first_cut_behind({end.request, end.m_block, INT_MAX}) - 1 : member;
    }
    // The last cut comes after every place.
    __device__ int first_cut_behind(const Place& place) const {
        return first_number(group_size, [&](int cut) { return is_before(place, shared.cuts[cut]); });
    }

    __device__ void look_up_slots() const {
        for (int i = thread; i < p.most_ctas * kPlannedSlots; i += kPlanThreads) {
            CtaPlan& plan = p.plans[i / kPlannedSlots];
            const int token = plan.range.tile * kPlanTile + i % kPlannedSlots * C::kSlotStride;
            int slot = -1;
            if (token < plan.range.keys) {
                int page, row;
                p.table.locate(p.table.row_of(plan.range.request), token, page, row);
                const int64_t number = int64_t{page} * p.table.page_size + row;
                if (page >= 0 && number <= INT_MAX) slot = static_cast<int>(number);  // otherwise no cache has it
            }
            plan.slots[i % kPlannedSlots] = slot;
        }
    }
};

template <typename C>
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams p) {
    __shared__ PlannerMemory shared;
    Planner<C> planner(p, shared);
    planner.sum_costs();
    planner.place_cuts();
    __syncthreads();
    planner.write_ranges();
    if constexpr (C::kSlotStride > 0) {
        __syncthreads();
        planner.look_up_slots();
    }
}

}  // namespace mla
