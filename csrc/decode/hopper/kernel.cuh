// What the kernels of this folder share. A CTA has three warpgroups: one loads, and two, the consumers, compute.
//
//   loader             consumer 0                                   consumer 1
//   -----------------  -------------------------------------------  --------------------------------------
//   read the plan      initialize the mbarriers                     -
//   sync_cta           sync_cta                                     sync_cta
//   see load/keys.cuh  wait for the predecessor kernel, allow the   likewise
//                      successor to start
//                      compute all work tiles, write outputs or     likewise, other tiles or columns
//                      split buffers: see few_rows/kernel.cuh and so on
//                      raise the CTA's flag                         -
//                      combine parts of the m-blocks that the CTA shares (schedule/combine.cuh)
//
// Configuration C and shared memory S are described in load/keys.cuh; S also has `range` and `pair`.
//
// Pairs. If the two CTAs of a cluster share one m-block and have no other, they write no split buffers. Each consumer
// sends the part that the other CTA combines to the same consumer there, which receives it in the last query buffer. If
// there are two, it never holds queries, as there is one m-block. A single one is free when all warps have computed
// their last scores; each warp then arrives at the partner's may_send.
//
//   CTA 2i, consumer c                                CTA 2i + 1, consumer c
//   ------------------------------------------------  ------------------------------------------------
//   attend to its keys                                attend to its keys
//   arrive may_send at the partner                    arrive may_send at the partner
//   wait may_send, send states, then quads            wait may_send, send states, then quads
//   wait states_arrived: weigh both splits            wait states_arrived: weigh both splits
//   wait quads_arrived: combine, write the output     wait quads_arrived: combine, write the output
//
//   * A CTA of a pair ends only after all that its partner does in its shared memory (`may_send`, states, quads). CTAs
//     that share keys (C::kRangeCtas = 2) are never pairs. They load keys into each other's shared memory and arrive at
//     each other's kv_empty, so each waits before it ends until the other has done its work (`cluster_leave`). Others
//     use only their own.
//   * The planner tells both whether they are a pair. It does not know how the kernel is launched, as a captured graph
//     may repeat a launch after plans of other batches: without clusters, a pair writes split buffers.
#pragma once
#include <cuda.h>

#include <cstddef>

#include "load/loaders.cuh"
#include "ptx/cluster.cuh"
#include "ptx/named_barrier.cuh"
#include "schedule/combine.cuh"

namespace mla::hopper {

constexpr int kThreads = 384;
constexpr int kConsumerThreads = 256;
constexpr int kRegisters = 504;  // per thread, summed over the warpgroups

// In m-blocks of 64, the maximum in use of a row that does not exist (log2). Its scores are 0. With this maximum its
// probabilities are 0, too, instead of 1, and the tensor cores take less power for products with 0.
constexpr float kNoRow = 1e30f;

// Named after the threads that synchronize there.
enum NamedBarrier { kConsumer0 = 1, kConsumer1, kBothConsumers };

struct PairBarriers {
    Barrier may_send;                             // the partner's receive buffer is free
    Barrier states_arrived[2], quads_arrived[2];  // per consumer
};

// What a consumer of a pair receives, as a split buffer would have it. Layout: the Quads of the kernel
// (schedule/splits.cuh).
template <typename Layout>
struct Received {
    static constexpr int kQuads = Layout::kCount / 2 / kConsumerThreads;  // of a thread
    static constexpr int kWordQuads = Layout::kWordQuads;
    typename Layout::Word words[(kQuads + kWordQuads - 1) / kWordQuads][128];
    float4 states[Layout::kPairs];

    // This thread's i-th quad.
    __device__ float4 quad(int i) const { return Layout::loaded(words[i / kWordQuads][threadIdx.x % 128], i); }
};

// A thread of a consumer.
template <typename C, typename S, typename Layout>
struct ConsumerThread {
    const DecodeParams& p;
    S& smem;
    const uint32_t consumer = threadIdx.x / 128 - 1;
    const int thread = threadIdx.x % 128;
    const int warp = thread / 32;
    const int lane = thread % 32;
    const int cta = planned_cta<C>();
    int two_way_splits = 0, wider_splits = 0;  // m-blocks so far that this CTA shares with one other, or with more
    Profiler<C::kProfile> profiler;

    __device__ ConsumerThread(const DecodeParams& p, S& smem)
        : p(p), smem(smem), profiler(p.profile, 1 + consumer, thread == 0) {}

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

    // Zeroes the value columns of a tile's tokens from `valid` on: what was not loaded may be NaN.
    __device__ void zero_values(unsigned char* keys, int valid) {
        constexpr int kVectors = C::kDimLatent / 8;  // of 16 bytes, in a token's value columns
        const int vector = thread % kVectors;
        static_assert(!C::Layout::kFp8);
#pragma unroll 2
        for (int token = valid + thread / kVectors; token < C::kTile; token += 128 / kVectors) {
            auto* target = keys + token / 8 * C::kTokenGroupBytes + column_block_offset<C>(vector * 8) +
                           token % 8 * 128 + vector % 8 * 16;
            *reinterpret_cast<uint4*>(target) = make_uint4(0, 0, 0, 0);
        }
    }

    __device__ void count_split(const WorkTile& work) {
        if (work.split()) ++(is_two_way_split(work, smem.range, cta) ? two_way_splits : wider_splits);
    }

    // By one lane of a warp that has read keys of a stage for the last time.
    __device__ void release_keys(int stage, int release) const {
        Barrier& empty = smem.kv_empty[stage][release];
        empty.arrive();
        if constexpr (C::kRangeCtas == 2) arrive_at_partner(empty);
    }

    // By every warp, when it has computed its last scores with a buffer of queries.
    __device__ void release_queries(int buffer) const {
        if (lane != 0) return;
        smem.q_empty[buffer].arrive();
        if (C::kQueryBuffers == 1 && smem.range.paired) arrive_at_partner(smem.pair.may_send);
    }

    // Where this consumer receives what the partner sends.
    __device__ Received<Layout>& received() const {
        static_assert(2 * sizeof(Received<Layout>) <= C::kQueryBytes);
        return reinterpret_cast<Received<Layout>*>(smem.q[C::kQueryBuffers - 1])[consumer];
    }

    __device__ void begin_pair() const {
        cluster_wait();
        if (C::kQueryBuffers > 1 && lane == 0) arrive_at_partner(smem.pair.may_send);
    }

    // Sends the partner the states of the m-block's rows. They are sent before the quads, which may still have to be
    // merged, so the partner can weigh the quads when they arrive.
    template <typename StateOf>
    __device__ void send_states(StateOf state_of) const {
        wait_for_partner(smem.pair.may_send, 0);
        if (thread < Layout::kPairs)
            send_to_partner(&received().states[thread], SplitBuffers<Layout>::states_of(thread, state_of),
                            smem.pair.states_arrived[consumer]);
    }

    // Sends those of this thread's quads that the partner combines.
    template <typename QuadOf>
    __device__ void send_quads(QuadOf quad_of) {
        constexpr int kQuads = Received<Layout>::kQuads, kWordQuads = Received<Layout>::kWordQuads;
#pragma unroll
        for (int i = 0; i < kQuads; i += kWordQuads)  // of two quads, the last may be alone
            send_to_partner(&received().words[i / kWordQuads][thread],
                            Layout::word(quad_of(i), quad_of(min(i + 1, kQuads - 1))),
                            smem.pair.quads_arrived[consumer]);
        profiler.mark(Event::kWorkTileWritten);
    }

    template <typename StateOf>
    __device__ auto weights_in_pair(int row_pair, StateOf state_of) const {
        const float4 own = SplitBuffers<Layout>::states_of(row_pair, state_of);
        wait_for_partner(smem.pair.states_arrived[consumer], 0);
        return SplitBuffers<Layout>::weights_of_two(own, received().states[row_pair]);
    }

    __device__ void wait_for_quads() const { wait_for_partner(smem.pair.quads_arrived[consumer], 0); }

    // Raises this CTA's flag: its split buffers are complete. The flag was loaded with the queries of the first work
    // tile, if there was one.
    __device__ void announce_splits(bool had_work) const {
        if (threadIdx.x == 128) raise_flag(p, cta, had_work ? smem.flag : read_flag(p, cta));
    }
    // A pair's flag counts the launch, too. Nobody waits for it: it is next read when this launch has ended.
    __device__ void count_launch() const {
        if (threadIdx.x == 128) *flag_of(p, cta) = smem.flag + 1;
    }

    // Combines this CTA's parts of the m-blocks that it shares with others: that of its last work tile, number
    // `work_index`, and that of its first. Both consumers together combine a two-way split with `combine_two`. A wider
    // split takes one team: both consumers if it is the only one, otherwise one consumer. Their scratch memory, a half
    // for each consumer, is where keys and queries were: both consumers have used all that was loaded.
    template <typename CombineTwo>
    __device__ void combine(WorkTile work, int work_index, CombineTwo combine_two) {
        static_assert(offsetof(S, kv) == 0);
        constexpr int kHalfBytes = (offsetof(S, q) + sizeof(smem.q)) / 2 / 16 * 16;
        static_assert(!Shares<Layout>::kServed || Shares<Layout>::kScratchBytes <= kHalfBytes);
        if (two_way_splits + wider_splits == 0) return;
        const bool one_team = wider_splits == 1;
        auto sync_team = [&] { one_team ? sync_consumers() : sync_consumer(); };
        const int team_thread = one_team ? thread + consumer * 128 : thread;
        const CombineTeam team{smem.kv[0] + (one_team ? 0 : consumer * kHalfBytes), team_thread,
                               one_team ? kConsumerThreads : 128, sync_team};
#pragma unroll 1
        for (bool last = true;; last = false) {
            if (work.split()) {
                const SplitBuffers<Layout> buffers(p, work, smem.range, cta);
                const auto& offsets = smem.offsets[offset_buffer(work_index)];
                if (buffers.count == 2)
                    combine_two(last, buffers, offsets);
                else if (one_team || last == consumer)
                    combine_splits<typename C::Element>(buffers, smem.flag, offsets, team);
            }
            if (work_index == 0) break;
            work_index = 0;
            WorkCursor<C>(p, smem.range).next(work);
        }
    }
};

// Called by one thread. `kKeyReaders` warps release each part of a stage.
template <typename C, typename S, typename Layout, int kKeyReaders>
__device__ __forceinline__ void init_barriers(S& smem) {
    for (int i = 0; i < C::kStages; ++i) {
        for (Barrier& segment : smem.kv_full[i]) segment.init(KeyLoaderOf<C, S>::kKeyArrivals);
        for (int release = 0; release < C::kReleases; ++release) smem.kv_empty[i][release].init(kKeyReaders);
    }
    for (int i = 0; i < C::kQueryBuffers; ++i) {
        smem.q_full[i].init(LoaderThread<C, S>::kQueryArrivals);
        smem.q_empty[i].init(kConsumerThreads / 32);
    }
    smem.pair.may_send.init(kConsumerThreads / 32);
    for (int i = 0; i < 2; ++i) {
        smem.pair.states_arrived[i].init(1);
        smem.pair.states_arrived[i].arrive_expect(sizeof(Received<Layout>::states));
        smem.pair.quads_arrived[i].init(1);
        smem.pair.quads_arrived[i].arrive_expect(sizeof(Received<Layout>::words));
    }
}

// The body of a kernel whose consumers are `Consumer`s; `init` initializes what else S has.
template <typename C, typename S, typename Consumer, int kKeyReaders, typename Init>
__device__ __forceinline__ void run_kernel(const DecodeParams& p, const BoxOf<C>& box, S& smem, Init init) {
    // Loaders and consumers each read the plan, so that neither waits for the other.
    const CtaPlan& plan = p.plans[planned_cta<C>()];
    if (threadIdx.x < 128) {
        const LoaderThread<C, S> loader(p, smem, plan);
        sync_cta();
        cluster_arrive();
        lower_register_limit<C::kLoaderRegisters>();
        run_loader(loader, box);
        return;
    }
    const int thread = threadIdx.x - 128;
    if (thread == 0) {  // not by a loader: the first warp is busy requesting the first keys
        if constexpr (C::kTma) prefetch_tensor_map(&box.map);
        if constexpr (C::kTma && C::Layout::kIsRecord) prefetch_tensor_map(&box.tails);
        init_barriers<C, S, typename Consumer::OutputQuads, kKeyReaders>(smem);
        init();
        fence_barrier_init();
    }
    sync_cta();
    cluster_arrive();
    raise_register_limit<(kRegisters - C::kLoaderRegisters) / 2>();
    if (thread < sizeof(CtaRange) / 4)
        reinterpret_cast<int*>(&smem.range)[thread] = reinterpret_cast<const int*>(&plan.range)[thread];
    if (thread == 32) check_plan(p, plan);
    // By the thread that has just written it.
    if (thread == offsetof(CtaRange, paired) / 4 && !has_partner()) smem.range.paired = false;
    Consumer::sync_consumers();
    wait_for_predecessor();
    allow_successor();
    Consumer(p, smem).run();
}

}  // namespace mla::hopper
