// The loading warpgroup loads keys into a ring of stages and each work tile's queries, and writes output offsets.
//
// Pages of a multiple of 8 tokens: warp 0 loads keys by TMA, warps 1-3 load queries.
// Smaller pages and lists of slots: warps 0-2 copy keys row by row with cp.async; each takes a third of the column
// blocks, or every third group of records. Warp 3 loads queries.
// In many_rows and many_rows_fp8, all four warps load small pages, lists and queries (token_keys.cuh).
//
//   key loader                                           query loader
//   ---------------------------------------------------  ---------------------------------------------------------
//   prefetch the first keys to the L2 cache (not those   compute the addresses of its first row
//   of lists)
//   wait for the predecessor kernel                      wait for the predecessor kernel
//   load the first stages, up to half of the ring        copy the queries of work tile 0, write its output offsets
//                                                        read this CTA's flag
//   wait q_full[0]                                  <--  arrive q_full[0]
//   for each later stage, across all work tiles:         for each later work tile:
//     wait kv_empty[stage][release] <-- consumers          wait q_empty[buffer]              <-- consumers
//     load KV tile                                         copy queries, write output offsets
//     arrive kv_full[stage] --> consumers                  arrive q_full[buffer]              --> consumers
//     look up the page table for later stages
#pragma once
#include "decode/hopper/ring.cuh"
#include "schedule/params.cuh"

namespace mla::hopper {

// What the roles of the warpgroup share.
template <typename C>
struct LoaderThread {
    static constexpr int kKeyWarps = C::kByTokens ? 0 : C::kTma ? 1 : 3;  // that load no queries
    static constexpr int kQueryThreads = (4 - kKeyWarps) * 32;
    // If registers are few, cheap values that are needed once in a work tile are computed again instead of kept.
    static constexpr bool kFewRegisters = C::kByTokens || C::kLoaderRegisters < 72;
    static constexpr int kQueryArrivals = 2 * kQueryThreads;  // at each q_full

    const DecodeParams& p;
    RingMemory<C>& rings;
    const int planned_slot;  // that the planner has looked up for this lane
    const CtaRange range;

    __device__ LoaderThread(const DecodeParams& p, RingMemory<C>& rings, const CtaPlan& plan)
        : p(p),
          rings(rings),
          planned_slot(C::kSlotStride == 0 ? -1 : plan.slots[threadIdx.x % 32]),
          range(plan.range) {}

    // The range, for all work tiles.
    __device__ const CtaRange& range_to_walk() const {
        if constexpr (kFewRegisters)
            return p.plans[planned_cta<C>()].range;
        else
            return range;
    }
};

// If the first work tile has at least this many keys, more than its first stage is prefetched while the predecessor
// ends. Otherwise, usually all CTAs still take part in the predecessor's combine, which this would disturb.
constexpr int kLongWorkTile = 768;

// The ring of keys, as a warp that fills it sees it.
template <typename C>
struct KeyRing {
    const LoaderThread<C>& t;
    PipelineState<C::kStages> ring;
    bool first_ring = true;  // until the queries of the first work tile have arrived

    __device__ KeyRing(const LoaderThread<C>& t) : t(t) {}

    // How many keys the first work tile has. The planner has looked up kPlannedSlots of them, every C::kSlotStride-th.
    __device__ int first_keys() const {
        const bool cut = t.range.request == t.range.end_request && t.range.m_block == t.range.end_m_block;
        const int keys = visible_keys<C>(t.p.shard, t.range.seq_len, t.range.keys, t.range.query_len, t.range.m_block,
                                         t.p.num_heads, t.p.causal);
        return (cut ? min(t.range.end_tile * kPlanTile, keys) : keys) - t.range.tile * kPlanTile;
    }
    // How many of these keys are prefetched (with small pages, at most 96).
    __device__ int prefetched_keys() const {
        return min(first_keys(), first_keys() < kLongWorkTile ? C::kTile : 2 * C::kTile);
    }

    // Waits until a release's segments may be loaded. If CTAs share keys, this waits for the consumers of both. It
    // reads nothing that the partner wrote, so the wait need not acquire at cluster scope. The second half of the first
    // ring also waits for the first queries, which would otherwise arrive late, after a whole ring of keys.
    __device__ void wait_for_release(int release) {
        t.rings.kv_empty[ring.stage][release].wait(ring.phase ^ 1);
        if (!first_ring || ring.stage < C::kStages / 2) return;
        first_ring = false;
        t.rings.q_full[0].wait(0);
    }
};

// Address in the cache, `offset` elements from the start of the caller's tensor.
template <typename C>
__device__ const auto* row_in_cache(const DecodeParams& p, int64_t offset) {
    return static_cast<const std::conditional_t<C::Layout::kElementBytes == 1, uint8_t, uint16_t>*>(p.cache) + offset;
}

}  // namespace mla::hopper
