// The device planner: one launch a decode step, lengths never leave the GPU.
//
// grid 1 CTA x 1024 threads. Pass 1 prefix-sums the entries and their costs over the batch; pass 2 places the cuts, one
// thread a cut; pass 3 finds the contributors of cut entries, pass 4 where each CTA's first keys are. The same
// algorithm in Python is `mla_backend.plan.plan_reference`, which also says why there are two ways to cut.
#pragma once
#include <climits>

#include "params.cuh"

namespace mla {

struct PlanParams {
    Lengths lengths;
    int batch;
    int num_heads;
    int num_ctas;    // of the launches that follow
    int most_ctas;   // of any launch with this workspace
    int entry_cost;  // what an entry costs beside its keys, in units
    bool whole;      // no entry is cut
    PageTable table;
    int64_t* ends;    // [2][batch] scratch: inclusive prefix sums of costs and of entries
    CtaPlan* plans;   // [most_ctas]; those behind num_ctas get no work
    uint32_t* flags;  // [most_ctas][kFlagStride]; made equal: the last launches may have had fewer CTAs
};

struct Cut {
    int request, block, unit;
    __device__ bool behind(const Cut& other) const {
        if (request != other.request) return request > other.request;
        return block != other.block ? block > other.block : unit > other.unit;
    }
};

constexpr int kPlanThreads = 1024;
constexpr int kMaxCrews = 8;

// For a kernel that takes C::kRows rows at a time, and wants every C::kSlotTokens-th token looked up (0: none).
template <typename C>
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const PlanParams p) {
    __shared__ int64_t warp_costs[kPlanThreads / 32], warp_entries[kPlanThreads / 32];
    __shared__ int longest, most_blocks;
    __shared__ Cut cuts[kMaxCtas + 1];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

    auto units_of = [&](int request) { return (max(p.lengths.seq_lens[request], 0) + kUnit - 1) / kUnit; };
    auto all_blocks_of = [&](int request) {
        return (p.lengths.num_queries(request) * p.num_heads + C::kRows - 1) / C::kRows;
    };

    // Between here and the ranges, one crew is planned for. Of several, each has one block of every request.
    const int equal_blocks = p.lengths.query_start_loc ? 0 : all_blocks_of(0);
    const int crews = equal_blocks > 0 && equal_blocks <= min(kMaxCrews, p.num_ctas) ? equal_blocks : 1;
    const int crew_size = p.num_ctas / crews;
    auto blocks_of = [&](int request) { return crews > 1 ? 1 : all_blocks_of(request); };

    int64_t *cost_ends = p.ends, *entry_ends = p.ends + p.batch;
    if (thread == 0) longest = most_blocks = 0;
    int64_t total = 0, entries = 0;
    for (int base = 0; base < p.batch; base += kPlanThreads) {
        const int request = base + thread;
        const bool exists = request < p.batch;
        const int units = exists ? units_of(request) : 0;
        int64_t blocks = exists ? blocks_of(request) : 0, cost = blocks * (units + p.entry_cost);
        for (int step = 1; step < 32; step *= 2) {
            const int64_t other_cost = __shfl_up_sync(~0u, cost, step), other = __shfl_up_sync(~0u, blocks, step);
            if (lane >= step) cost += other_cost, blocks += other;
        }
        if (lane == 31) warp_costs[warp] = cost, warp_entries[warp] = blocks;
        __syncthreads();
        if (exists && blocks_of(request) > 0) atomicMax(&longest, units), atomicMax(&most_blocks, blocks_of(request));
#pragma unroll 1
        for (int i = 0; i < warp; ++i) cost += warp_costs[i], blocks += warp_entries[i];
        if (exists) cost_ends[request] = total + cost, entry_ends[request] = entries + blocks;
#pragma unroll 1
        for (int i = 0; i < kPlanThreads / 32; ++i) total += warp_costs[i], entries += warp_entries[i];
        __syncthreads();
    }
    // Shares are no smaller than one unit of one entry.
    const int64_t num_shares = max(min(total / (1 + p.entry_cost), static_cast<int64_t>(crew_size)), int64_t{1});

    // Equal parts of every entry, if there are CTAs for it and the longest entry's parts are hardly longer than shares.
    const int parts =
        entries == 0 || entries > crew_size ? 0 : min(p.whole ? 1 : crew_size / static_cast<int>(entries), longest);
    auto part_of = [&](int units) { return max((units + parts - 1) / parts, 1); };
    const bool equal_parts = parts > 0 && part_of(longest) <= total / num_shares + p.entry_cost;

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

    if (thread <= crew_size) {
        Cut cut{p.batch, 0, 0};
        const int64_t position = equal_parts ? thread / parts : thread * total / num_shares;
        if (position < (equal_parts ? entries : total)) {
            const int request = find(equal_parts ? entry_ends : cost_ends, position);
            const int units = units_of(request), blocks = blocks_of(request);
            int block, unit;
            if (equal_parts) {
                block = static_cast<int>(position - (entry_ends[request] - blocks));
                unit = thread % parts * part_of(units);
                if (unit > 0 && unit >= units) unit = 0, ++block;
            } else {
                const int cost = units + p.entry_cost;
                const int offset =
                    static_cast<int>(position - (cost_ends[request] - static_cast<int64_t>(blocks) * cost));
                block = offset / cost;
                unit = p.whole ? 0 : max(offset % cost - p.entry_cost, 0);
            }
            cut = block < blocks ? Cut{request, block, unit} : Cut{request + 1, 0, 0};
        }
        cuts[thread] = cut;
    }
    __syncthreads();

    auto range_of = [&](int cta) {
        const int crew = cta / crew_size, member = cta % crew_size;
        if (crew >= crews)  // one of a few that are left over
            return CtaRange{p.batch, 0, 0, cta, p.batch, 0, 0, cta, false, true};
        Cut begin = cuts[member], end = cuts[member + 1];
        // The first cut behind a place; the last of all cuts is behind everything.
        auto first_behind = [&](const Cut& place) {
            int low = 0, high = crew_size;
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
        if (begin.unit > 0) first = first_behind({begin.request, begin.block, 0}) - 1;
        if (end.unit > 0) last = first_behind({end.request, end.block, INT_MAX}) - 1;
        const int crew_begin = crew * crew_size;
        const bool two_each = entries * 2 <= crew_size && crew_size < entries * 3;
        const bool in_clusters = crew_begin % 2 == 0;  // neighbours of the crew are neighbours of the grid
        const int paired = equal_parts && parts == 2 && two_each && in_clusters && (begin.unit > 0 || end.unit > 0);
        CtaRange range{begin.request, begin.block + crew, begin.unit, crew_begin + first, end.request, end.block + crew,
                       end.unit,      crew_begin + last,  paired,     most_blocks <= 1};
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

    if constexpr (C::kSlotTokens > 0) {
        for (int i = thread; i < p.most_ctas * kSlots; i += kPlanThreads) {
            CtaPlan& plan = p.plans[i / kSlots];
            const int token = plan.range.unit * kUnit + i % kSlots * C::kSlotTokens;
            int slot = -1;
            if (token < plan.range.seq_len) {
                int page, row;
                p.table.locate(p.table.row_of(plan.range.request), token, page, row);
                slot = page * p.table.page_size + row;
            }
            plan.slots[i % kSlots] = slot;
        }
    }
}

}  // namespace mla
