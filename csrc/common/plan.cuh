// The device planner: one launch a decode step, lengths never leave the GPU.
//
// grid 1 CTA x 1024 threads. Pass 1 prefix-sums the m-blocks and their costs over the batch; pass 2 places the cuts,
// one thread a cut; pass 3 finds the splits of cut m-blocks, pass 4 where each CTA's first keys are. The same algorithm
// in Python is `tests/support/planner.py`, which also says why there are two ways to cut.
#pragma once
#include <climits>

#include "params.cuh"

namespace mla {

struct PlanParams {
    Lengths lengths;
    int batch;
    int num_heads;
    int num_ctas;      // of the launches that follow
    int most_ctas;     // of any launch with this workspace
    int m_block_cost;  // what an m-block costs beside its keys, in tiles
    bool whole;        // no m-block is cut
    PageTable table;
    int64_t* ends;    // [2][batch] scratch: inclusive prefix sums of costs and of m-blocks
    CtaPlan* plans;   // [most_ctas]; those behind num_ctas get no work
    uint32_t* flags;  // [most_ctas][kFlagStride]; made equal: the last launches may have had fewer CTAs
};

struct Cut {
    int request, m_block, tile;
    __device__ bool behind(const Cut& other) const {
        if (request != other.request) return request > other.request;
        return m_block != other.m_block ? m_block > other.m_block : tile > other.tile;
    }
};

constexpr int kPlanThreads = 1024;
constexpr int kMaxCtaGroups = 8;

// For a kernel that takes C::kRows rows at a time, and wants every C::kSlotStride-th token looked up (0: none).
template <typename C>
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const PlanParams p) {
    __shared__ int64_t warp_costs[kPlanThreads / 32], warp_m_blocks[kPlanThreads / 32];
    __shared__ int longest, most_m_blocks;
    __shared__ Cut cuts[kMaxCtas + 1];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

    auto tiles_of = [&](int request) { return (max(p.lengths.seq_lens[request], 0) + kPlanTile - 1) / kPlanTile; };
    auto all_m_blocks_of = [&](int request) {
        return (p.lengths.num_queries(request) * p.num_heads + C::kRows - 1) / C::kRows;
    };

    // Between here and the ranges, one CTA group is planned for. Of several, each has one block of every request.
    const int equal_m_blocks = p.lengths.query_start_loc ? 0 : all_m_blocks_of(0);
    const int num_groups = equal_m_blocks > 0 && equal_m_blocks <= min(kMaxCtaGroups, p.num_ctas) ? equal_m_blocks : 1;
    const int group_size = p.num_ctas / num_groups;
    auto m_blocks_of = [&](int request) { return num_groups > 1 ? 1 : all_m_blocks_of(request); };

    int64_t *cost_ends = p.ends, *m_block_ends = p.ends + p.batch;
    if (thread == 0) longest = most_m_blocks = 0;
    int64_t total = 0, num_m_blocks = 0;
    for (int base = 0; base < p.batch; base += kPlanThreads) {
        const int request = base + thread;
        const bool exists = request < p.batch;
        const int tiles = exists ? tiles_of(request) : 0;
        int64_t m_blocks = exists ? m_blocks_of(request) : 0, cost = m_blocks * (tiles + p.m_block_cost);
        for (int step = 1; step < 32; step *= 2) {
            const int64_t other_cost = __shfl_up_sync(~0u, cost, step), other = __shfl_up_sync(~0u, m_blocks, step);
            if (lane >= step) cost += other_cost, m_blocks += other;
        }
        if (lane == 31) warp_costs[warp] = cost, warp_m_blocks[warp] = m_blocks;
        __syncthreads();
        if (exists && m_blocks_of(request) > 0)
            atomicMax(&longest, tiles), atomicMax(&most_m_blocks, m_blocks_of(request));
#pragma unroll 1
        for (int i = 0; i < warp; ++i) cost += warp_costs[i], m_blocks += warp_m_blocks[i];
        if (exists) cost_ends[request] = total + cost, m_block_ends[request] = num_m_blocks + m_blocks;
#pragma unroll 1
        for (int i = 0; i < kPlanThreads / 32; ++i) total += warp_costs[i], num_m_blocks += warp_m_blocks[i];
        __syncthreads();
    }
    // Shares are no smaller than one unit of one m-block.
    const int64_t num_ranges = max(min(total / (1 + p.m_block_cost), static_cast<int64_t>(group_size)), int64_t{1});

    // Equal parts of every m-block, if there are CTAs for it and the longest m-block's parts are hardly longer than
    // splits.
    const int splits = num_m_blocks == 0 || num_m_blocks > group_size
                           ? 0
                           : min(p.whole ? 1 : group_size / static_cast<int>(num_m_blocks), longest);
    auto split_of = [&](int tiles) { return max((tiles + splits - 1) / splits, 1); };
    const bool equal_splits = splits > 0 && split_of(longest) <= total / num_ranges + p.m_block_cost;

    auto find = [&](const int64_t* ends, int64_t position) {  // the first request that ends behind the position
        int low = 0, high = p.batch - 1;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (ends[middle] > position)
                high = middle;
            else
                low = middle + 1;
        }
        return low;
    };

    if (thread <= group_size) {
        Cut cut{p.batch, 0, 0};
        const int64_t position = equal_splits ? thread / splits : thread * total / num_ranges;
        if (position < (equal_splits ? num_m_blocks : total)) {
            const int request = find(equal_splits ? m_block_ends : cost_ends, position);
            const int tiles = tiles_of(request), m_blocks = m_blocks_of(request);
            int m_block, tile;
            if (equal_splits) {
                m_block = static_cast<int>(position - (m_block_ends[request] - m_blocks));
                tile = thread % splits * split_of(tiles);
                if (tile > 0 && tile >= tiles) tile = 0, ++m_block;
            } else {
                const int cost = tiles + p.m_block_cost;
                const int offset =
                    static_cast<int>(position - (cost_ends[request] - static_cast<int64_t>(m_blocks) * cost));
                m_block = offset / cost;
                tile = p.whole ? 0 : max(offset % cost - p.m_block_cost, 0);
            }
            cut = m_block < m_blocks ? Cut{request, m_block, tile} : Cut{request + 1, 0, 0};
        }
        cuts[thread] = cut;
    }
    __syncthreads();

    auto range_of = [&](int cta) {
        const int group = cta / group_size, member = cta % group_size;
        if (group >= num_groups)  // one of a few that are left over
            return CtaRange{p.batch, 0, 0, cta, p.batch, 0, 0, cta, false, true};
        Cut begin = cuts[member], end = cuts[member + 1];
        // The first cut behind a place; the last of all cuts is behind everything.
        auto first_behind = [&](const Cut& place) {
            int low = 0, high = group_size;
            while (low < high) {
                const int middle = (low + high) / 2;
                if (cuts[middle].behind(place))
                    high = middle;
                else
                    low = middle + 1;
            }
            return low;
        };
        int first = member, last = member;
        if (begin.tile > 0) first = first_behind({begin.request, begin.m_block, 0}) - 1;
        if (end.tile > 0) last = first_behind({end.request, end.m_block, INT_MAX}) - 1;
        const int group_begin = group * group_size;
        const bool two_each = num_m_blocks * 2 <= group_size && group_size < num_m_blocks * 3;
        const bool in_clusters = group_begin % 2 == 0;  // neighbours of the CTA group are neighbours of the grid
        const int paired = equal_splits && splits == 2 && two_each && in_clusters && (begin.tile > 0 || end.tile > 0);
        CtaRange range{begin.request, begin.m_block + group, begin.tile, group_begin + first,
                       end.request,   end.m_block + group,   end.tile,   group_begin + last,
                       paired,        most_m_blocks <= 1};
        if (end.behind(begin) && p.lengths.num_queries(begin.request) > 0) {
            range.query_begin = p.lengths.query_begin(begin.request);
            range.query_len = p.lengths.num_queries(begin.request);
            range.seq_len = p.lengths.seq_lens[begin.request];
        }
        return range;
    };
    if (thread < p.most_ctas) {
        p.plans[thread].range = range_of(thread);
        p.flags[thread * kFlagStride] = 0;
    }
    __syncthreads();

    if constexpr (C::kSlotStride > 0) {
        for (int i = thread; i < p.most_ctas * kPlannedSlots; i += kPlanThreads) {
            CtaPlan& plan = p.plans[i / kPlannedSlots];
            const int token = plan.range.tile * kPlanTile + i % kPlannedSlots * C::kSlotStride;
            int slot = -1;
            if (token < plan.range.seq_len) {
                int page, row;
                p.table.locate(p.table.row_of(plan.range.request), token, page, row);
                slot = page * p.table.page_size + row;
            }
            plan.slots[i % kPlannedSlots] = slot;
        }
    }
}

}  // namespace mla
