// What the kernels of the folders here share. A CTA has three warpgroups: one loads, and two, the consumers, compute.
//
//   loader                consumer 0                                   consumer 1
//   --------------------  -------------------------------------------  --------------------------------------
//   read the plan         initialize the mbarriers                     -
//   sync_cta              sync_cta                                     sync_cta
//   see load/loader.cuh   wait for the predecessor kernel, allow the   likewise
//                         successor to start
//                         compute all work tiles, write outputs or     likewise, other tiles or columns
//                         split buffers: see few_rows/kernel.cuh and so on
//                         raise the CTA's flag                         -
//                         combine parts of the m-blocks that the CTA shares (schedule/combine.cuh), or see pair.cuh
//
// A kernel has a configuration C (ring.cuh) and its shared memory S, which begins with RingMemory `rings`, and has
// CtaRange `range` and PairMemory `pair`. The other parts of a kernel have their own structs in S. A part refers to the
// thread that it belongs to: `t`.
#pragma once
#include <cstddef>
#include <type_traits>

#include "load/gather_keys.cuh"
#include "load/queries.cuh"
#include "load/tma_keys.cuh"
#include "load/token_keys.cuh"
#include "load/transpose_values.cuh"
#include "pair.cuh"
#include "ptx/named_barrier.cuh"
#include "schedule/combine.cuh"

namespace mla::hopper {

constexpr int kThreads = 384;
constexpr int kRegisters = 504;  // per thread, summed over the warpgroups

// In m-blocks of 64, the maximum in use of a row that does not exist (log2). Its scores are 0. With this maximum its
// probabilities are 0, too, instead of 1, and the tensor cores take less power for products with 0.
constexpr float kNoRow = 1e30f;

// Named after the threads that synchronize there.
enum NamedBarrier { kConsumer0 = 1, kConsumer1, kBothConsumers };

// A thread of a consumer.
template <typename C>
struct ConsumerThread {
    using Config = C;
    const DecodeParams& p;
    RingMemory<C>& rings;
    CtaRange& range;
    PairMemory& pair;
    const uint32_t consumer = threadIdx.x / 128 - 1;
    const int warp = threadIdx.x / 32 % 4;
    const int thread = threadIdx.x % 128;
    const int lane = threadIdx.x % 32;
    Profiler<C::kProfile> profiler;

    template <typename S>
    __device__ ConsumerThread(const DecodeParams& p, S& smem)
        : p(p), rings(smem.rings), range(smem.range), pair(smem.pair), profiler(p.profile, 1 + consumer, thread == 0) {}

    __device__ int cta() const { return rings.cta; }

    __device__ void sync_consumer() const {
        if (consumer == 0)
            named_barrier_sync<kConsumer0, 128>();
        else
            named_barrier_sync<kConsumer1, 128>();
    }
    // Also returns, to every thread, whether any of them passed true.
    __device__ bool any_in_consumer(bool value) const {
        return consumer == 0 ? named_barrier_any<kConsumer0, 128>(value) : named_barrier_any<kConsumer1, 128>(value);
    }
    static __device__ void sync_consumers() { named_barrier_sync<kBothConsumers, kConsumerThreads>(); }

    __device__ bool paired() const { return C::kRangeCtas == 1 && range.paired; }

    // Before the first work tile: waits until the partner's barriers are initialized.
    __device__ void begin_launch() const {
        if (paired()) {
            cluster_wait();
            if (C::kQueryBuffers > 1 && lane == 0) arrive_at_partner(pair.may_send);
        }
        if constexpr (C::kRangeCtas == 2) cluster_wait();
    }

    // By one lane of a warp that has read keys of a stage for the last time.
    __device__ void release_keys(int stage, int release) const {
        Barrier& empty = rings.kv_empty[stage][release];
        empty.arrive();
        if constexpr (C::kRangeCtas == 2) arrive_at_partner(empty);
    }

    // By every warp, when it has computed its last scores with a buffer of queries.
    __device__ void release_queries(int buffer) const {
        if (lane != 0) return;
        rings.q_empty[buffer].arrive();
        if (C::kQueryBuffers == 1 && range.paired) arrive_at_partner(pair.may_send);
    }

    // Raises this CTA's flag: its split buffers are complete. The flag was loaded with the queries of the first work
    // tile, if there was one.
    __device__ void announce_splits(bool had_work) const {
        if (threadIdx.x == 128) raise_flag(p, cta(), had_work ? rings.flag : read_flag(p, cta()));
    }
};

// By a consumer: zeroes the value columns of a tile's tokens from `valid` on, in 16 bits: what was not loaded may be
// NaN.
template <typename C>
__device__ void zero_values_16bit(const ConsumerThread<C>& t, unsigned char* keys, int valid) {
    constexpr int kVectors = C::kDimLatent / 8;  // of 16 bytes, in a token's value columns
    const int vector = t.thread % kVectors;
#pragma unroll 2
    for (int token = valid + t.thread / kVectors; token < C::kTile; token += 128 / kVectors) {
        auto* target = keys + token / 8 * C::kTokenGroupBytes + column_block_offset<C>(vector * 8) + token % 8 * 128 +
                       vector % 8 * 16;
        *reinterpret_cast<uint4*>(target) = make_uint4(0, 0, 0, 0);
    }
}

// Combines a CTA's parts of the m-blocks that it shares with others, which only its last and its first work tile may
// be: `last`, of `work_tiles`, and the one that `range` begins with. If C::kCombinesTwo, both consumers together
// combine a two-way split with `combine_two(is_last, buffers, offsets)`. Any other split takes one team: both consumers
// if it is the only one, otherwise one consumer. Their scratch memory, a half for each consumer, is where keys and
// queries were: both consumers have used all that was loaded.
template <typename Layout, typename C, typename CombineTwo>
__device__ __forceinline__ void combine(const ConsumerThread<C>& t, const WorkTile& last, int work_tiles,
                                        CombineTwo combine_two) {
    static_assert(offsetof(RingMemory<C>, kv) == 0);
    constexpr int kHalfBytes = (offsetof(RingMemory<C>, q) + sizeof(t.rings.q)) / 2 / 16 * 16;
    static_assert(!Shares<Layout>::kServed || Shares<Layout>::kScratchBytes <= kHalfBytes);
    WorkTile first;
    const bool shares_first = work_tiles > 1 && WorkCursor<C>(t.p, t.range).next(first) && first.split();
    const bool shares_last = work_tiles > 0 && last.split();
    auto has_team = [&](const WorkTile& work) {
        return !(C::kCombinesTwo && is_two_way_split(work, t.range, t.cta()));
    };
    const bool one_team = (shares_first && has_team(first)) + (shares_last && has_team(last)) == 1;
    auto sync_team = [&] { one_team ? t.sync_consumers() : t.sync_consumer(); };
    const int team_thread = one_team ? t.thread + t.consumer * 128 : t.thread;
    const CombineTeam team{t.rings.kv[0] + (one_team ? 0 : t.consumer * kHalfBytes), team_thread,
                           one_team ? kConsumerThreads : 128, sync_team};
#pragma unroll 1
    for (int i = shares_last ? 0 : 1; i < (shares_first ? 2 : 1); ++i) {
        const bool is_last = i == 0;
        const WorkTile work = is_last ? last : first;
        const SplitBuffers<Layout> buffers(t.p, work, t.range, t.cta());
        const auto& offsets = t.rings.offsets[is_last ? offset_buffer(work_tiles - 1) : 0];
        if (C::kCombinesTwo && buffers.count == 2)
            combine_two(is_last, buffers, offsets);
        else if (one_team || is_last == t.consumer)
            combine_splits<typename C::Element>(buffers, t.rings.flag, offsets, team);
    }
}

// Ends a launch, after the work tiles, of which `work` is the last one, number `work_tiles - 1`. `announced`: whether
// the CTA's flag has been raised. `in_registers`: whether what this CTA combines of the last one's two splits still is
// in registers. `output` has these steps:
//   finish_pair(work, offsets)                    ends the m-block of a pair
//   combine_two<kInRegisters>(buffers, offsets)   combines a two-way split, if C::kCombinesTwo
template <typename Layout, typename C, typename Output>
__device__ __forceinline__ void end_launch(ConsumerThread<C>& t, Output& output, const WorkTile& work, int work_tiles,
                                           bool announced, bool in_registers) {
    if constexpr (C::kRangeCtas == 2) cluster_leave();
    // The code of pairs comes last. The code that runs without pairs is then contiguous, and loads sooner when it comes
    // from memory.
    if (!t.paired()) {
        if (!announced) t.announce_splits(work_tiles > 0);
        if constexpr (C::kCombinesTwo) {
            if (in_registers)
                output.template combine_two<true>(SplitBuffers<Layout>(t.p, work, t.range, t.cta()),
                                                  t.rings.offsets[offset_buffer(work_tiles - 1)]);
        }
        combine<Layout>(t, work, work_tiles, [&](bool last, const auto& buffers, const auto& offsets) {
            if constexpr (C::kCombinesTwo)
                if (!(last && in_registers)) output.template combine_two<false>(buffers, offsets);
        });
    } else {
        // Nobody waits for a pair's flag, but it counts the launch, too: it is next read when this launch has ended.
        if (threadIdx.x == 128) *flag_of(t.p, t.cta()) = t.rings.flag + 1;
        output.finish_pair(work, t.rings.offsets[0]);
    }
    if constexpr (C::kRangeCtas == 2) cluster_wait();  // until then the partner may access this shared memory
    t.profiler.mark(Event::kCombined);
}

template <typename C>
using KeyLoaderOf = std::conditional_t<C::kTma, TmaKeyLoader<C>,
                                       std::conditional_t<C::kByTokens, TokenKeyLoader<C>, GatherKeyLoader<C>>>;

template <typename C>
__device__ __forceinline__ void run_loader(const LoaderThread<C>& thread, const BoxOf<C>& box) {
    if (!C::kByTokens && threadIdx.x / 32 >= thread.kKeyWarps)
        QueryLoader<C>(thread).run();
    else if constexpr (C::kTma)
        KeyLoaderOf<C>(thread, box).run();
    else
        KeyLoaderOf<C>(thread).run();
}

// By one thread. `kKeyReaders` warps release each part of a stage.
template <int kKeyReaders, typename C>
__device__ __forceinline__ void init_ring_barriers(RingMemory<C>& rings) {
    for (int i = 0; i < C::kStages; ++i) {
        for (Barrier& segment : rings.kv_full[i]) segment.init(KeyLoaderOf<C>::kKeyArrivals);
        for (Barrier& release : rings.kv_empty[i]) release.init(kKeyReaders);
    }
    for (int i = 0; i < C::kQueryBuffers; ++i) {
        rings.q_full[i].init(LoaderThread<C>::kQueryArrivals);
        rings.q_empty[i].init(kConsumerThreads / 32);
    }
}

// The body of a kernel. Its consumers are `Consumer`s, whose outputs have the layout `Layout` (schedule/splits.cuh).
// `init` initializes what else S has.
template <typename C, typename Consumer, typename Layout, int kKeyReaders, typename S, typename Init>
__device__ __forceinline__ void run_kernel(const DecodeParams& p, const BoxOf<C>& box, S& smem, Init init) {
    static_assert(offsetof(S, rings) == 0);
    // Loaders and consumers each read the plan, so that neither waits for the other.
    const CtaPlan& plan = p.plans[planned_cta<C>()];
    if (threadIdx.x < 128) {
        const LoaderThread<C> loader(p, smem.rings, plan);
        // Here, because the barriers are initialized meanwhile. By a consumer, it would take registers.
        if (threadIdx.x == 127) check_plan(p, plan);
        sync_cta();
        cluster_arrive();
        lower_register_limit<C::kLoaderRegisters>();
        run_loader(loader, box);
        return;
    }
    if constexpr (C::kTransposesValues) {
        if (threadIdx.x >= kThreads) {
            sync_cta();
            cluster_arrive();
            lower_register_limit<C::kTransposerRegisters>();
            ValueTransposer<C>(p, smem.rings, smem.transposition, plan).run();
            return;
        }
    }
    const int thread = threadIdx.x - 128;
    if (thread == 0) {  // not by a loader: the first warp is busy requesting the first keys
        if constexpr (C::kTma) prefetch_tensor_map(&box.map);
        if constexpr (C::kTma && C::Layout::kHasTail) prefetch_tensor_map(&box.tails);
        init_ring_barriers<kKeyReaders>(smem.rings);
        init_pair_barriers<Layout>(smem.pair);
        init();
        fence_barrier_init();
    }
    sync_cta();
    cluster_arrive();
    raise_register_limit<(C::kTransposesValues ? 512 - C::kLoaderRegisters - C::kTransposerRegisters
                                               : kRegisters - C::kLoaderRegisters) /
                         2>();
    if (thread < sizeof(CtaRange) / 4)
        reinterpret_cast<int*>(&smem.range)[thread] = reinterpret_cast<const int*>(&plan.range)[thread];
    if (thread == 64) smem.rings.cta = planned_cta<C>();
    // By the thread that has just written it.
    if (thread == offsetof(CtaRange, paired) / 4 && !has_partner()) smem.range.paired = false;
    ConsumerThread<C>::sync_consumers();
    wait_for_predecessor();
    allow_successor();
    ConsumerThread<C> t(p, smem);
    Consumer(t, smem).run();
}

}  // namespace mla::hopper
