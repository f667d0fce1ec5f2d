// The device planner: one launch a decode step, lengths never leave the GPU.
//
// grid 1 CTA x 1024 threads. Pass 1 prefix-sums the entries' costs over the batch; pass 2 places the cuts, one
// thread a cut; pass 3 finds the contributors of cut entries and clears the signals. The same algorithm in
// torch is `mla_backend.plan.plan_reference`.
#pragma once
#include "work.cuh"

namespace mla {

struct PlanParams {
    Lengths lengths;
    int batch;
    int num_heads;
    int num_ctas;
    int entry_cost;      // what an entry costs beside its keys, in units
    int min_cta_cost;    // a range is not cut smaller than this while CTAs are left over
    int min_split;       // a cut never leaves fewer units than this on one side of it
    int64_t* cost_ends;  // [batch] scratch: inclusive prefix sum of costs
    CtaRange* ranges;    // [num_ctas]
    uint32_t* signals;   // [2 * num_ctas], see DecodeParams
};

struct Cut {
    int request, block, unit;
    __device__ bool inside(const Cut& other) const {
        return unit > 0 && request == other.request && block == other.block;
    }
};

constexpr int kPlanThreads = 1024;
constexpr int kMaxCtas = 1023;

template <int kRows, int kUnit>
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const PlanParams p) {
    __shared__ int64_t warp_sums[kPlanThreads / 32];
    __shared__ Cut cuts[kMaxCtas + 1];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

    auto units_of = [&](int request) { return (max(p.lengths.seq_lens[request], 0) + kUnit - 1) / kUnit; };
    auto blocks_of = [&](int request) { return (p.lengths.num_queries(request) * p.num_heads + kRows - 1) / kRows; };

    int64_t carry = 0;
    for (int base = 0; base < p.batch; base += kPlanThreads) {
        int request = base + thread;
        int64_t sum =
            request < p.batch ? static_cast<int64_t>(blocks_of(request)) * (units_of(request) + p.entry_cost) : 0;
        for (int step = 1; step < 32; step *= 2) {
            int64_t other = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == 31) warp_sums[warp] = sum;
        __syncthreads();
        int64_t before = carry, all = 0;
        for (int i = 0; i < kPlanThreads / 32; ++i) {
            if (i < warp) before += warp_sums[i];
            all += warp_sums[i];
        }
        if (request < p.batch) p.cost_ends[request] = before + sum;
        carry += all;
        __syncthreads();
    }
    const int64_t total = carry;
    const int64_t share =
        max((total + p.num_ctas - 1) / p.num_ctas, static_cast<int64_t>(max(p.min_cta_cost, 1)));

    if (thread <= p.num_ctas) {
        Cut cut{p.batch, 0, 0};
        int64_t position = thread * share;
        if (position < total) {
            int low = 0, high = p.batch - 1;  // the first request whose costs end behind the position
            while (low < high) {
                int middle = (low + high) / 2;
                if (p.cost_ends[middle] > position)
                    high = middle;
                else
                    low = middle + 1;
            }
            int units = units_of(low), blocks = blocks_of(low), cost = units + p.entry_cost;
            int offset = static_cast<int>(position - (p.cost_ends[low] - static_cast<int64_t>(blocks) * cost));
            int block = offset / cost, unit = max(offset % cost - p.entry_cost, 0);
            if (unit < p.min_split) unit = 0;
            if (unit > 0 && units - unit < p.min_split) {
                unit = 0;
                ++block;
            }
            cut = block < blocks ? Cut{low, block, unit} : Cut{low + 1, 0, 0};
        }
        cuts[thread] = cut;
    }
    __syncthreads();

    if (thread < p.num_ctas) {
        Cut begin = cuts[thread], end = cuts[thread + 1];
        int first = thread, last = thread;
        if (begin.unit > 0)
            do {
                --first;
            } while (cuts[first].inside(begin));
        if (end.unit > 0)
            do {
                ++last;
            } while (cuts[last + 1].inside(end));
        CtaRange range{begin.request, begin.block, begin.unit, first, end.request, end.block, end.unit, last};
        if (begin.request < p.batch) {
            range.query_begin = p.lengths.query_begin(begin.request);
            range.query_len = p.lengths.num_queries(begin.request);
            range.seq_len = p.lengths.seq_lens[begin.request];
        }
        p.ranges[thread] = range;
        p.signals[thread] = p.signals[p.num_ctas + thread] = 0;
    }
}

}  // namespace mla
