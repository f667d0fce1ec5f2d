// What the kernels of this folder have in common: three warpgroups a CTA, of which one loads and two consume.
//
// Config C and shared-memory plan S as in loader.cuh; beside what is said there, S has `range` and `pair`.
//
// Pairs. Where the two CTAs of a cluster share one m-block and have no other, split buffers do not go through memory:
// each consumer sends the same consumer of the other CTA the half that is combined there. It is received in the last
// buffer of queries. Of two buffers that one is never used, as there is one m-block; a single one is free when all
// warps have computed their last scores, and each tells the partner so.
//   * A CTA of a pair waits for all that its partner does in its shared memory (`may_send`, `states`, `quads`) before
//     it ends, and nobody does anything in that of other CTAs.
//   * Both know from the planner whether they are a pair. It does not know of the launch, which a captured graph may
//     repeat after plans of other batches: without clusters a pair leaves split buffers.
#pragma once
#include <cuda.h>

#include <cstddef>

#include "../common/sync.cuh"
#include "cluster.cuh"
#include "loader.cuh"
#include "wgmma.cuh"

namespace mla::sm90 {

constexpr int kThreads = 384;
constexpr int kConsumerThreads = 256;
constexpr float kStaleBound = 8.f;  // how far a score may exceed the maximum in use (log2 tiles)
enum NamedBarrier { kFirstConsumer = 1, kSecondConsumer, kBothConsumers };

struct PairBarriers {
    Barrier may_send;             // the partner's buffer is free
    Barrier states[2], quads[2];  // have been received by a consumer
};

// What a consumer of a pair receives. `P` says how split buffers are ordered (common/combine.cuh).
template <typename P>
struct Received {
    static constexpr int kQuads = P::kCount / 2 / kConsumerThreads;  // of a thread
    float4 quads[kQuads][128];
    float4 states[P::kPairs];
};

// A thread of a consumer. `P` as above.
template <typename C, typename S, typename P>
struct ConsumerThread {
    const DecodeParams& p;
    S& smem;
    const uint32_t consumer = threadIdx.x / 128 - 1;
    const int thread = threadIdx.x % 128;
    const int warp = thread / 32;
    const int lane = thread % 32;
    int shared_by_two = 0, shared_by_more = 0;  // m-blocks so far that other CTAs share
    Profiler<C::kProfile> profiler;

    __device__ ConsumerThread(const DecodeParams& p, S& smem)
        : p(p), smem(smem), profiler(p.profile, 1 + consumer, thread == 0) {}

    __device__ void sync_own() const {
        if (consumer == 0)
            named_barrier_sync<kFirstConsumer, 128>();
        else
            named_barrier_sync<kSecondConsumer, 128>();
    }
    __device__ bool any_of_own(bool value) const {
        return consumer == 0 ? named_barrier_any<kFirstConsumer, 128>(value)
                             : named_barrier_any<kSecondConsumer, 128>(value);
    }
    static __device__ void sync_both() { named_barrier_sync<kBothConsumers, kConsumerThreads>(); }
    // Before either reads at once what the other has written. Twice: to racecheck (CUDA 13.0) the first reads of a warp
    // that leaves a barrier sooner than others are races.
    static __device__ void sync_both_to_read() {
        sync_both();
        sync_both();
    }

    // Keys of row r are those below this token.
    __device__ int key_limit(const WorkTile& work, int r) const {
        if (!p.causal || work.query_len == 1) return work.token_end;
        int token = (work.m_block * C::kRows + r) / p.num_heads;
        return min(work.token_end, work.seq_len - work.query_len + token + 1);
    }

    // Zeroes the value columns of tokens from `valid` on: what was not loaded may be NaN.
    __device__ void zero_values(unsigned char* keys, int valid) {
        constexpr int kQuads = C::kDimLatent / 8;
        const int quad = thread % kQuads;
#pragma unroll 2
        for (int token = valid + thread / kQuads; token < C::kTile; token += 128 / kQuads) {
            auto* target = keys + token / 8 * C::kTokenGroupBytes + column_block_offset<C>(quad / 8) + token % 8 * 128 +
                           quad % 8 * 16;
            *reinterpret_cast<uint4*>(target) = make_uint4(0, 0, 0, 0);
        }
    }

    __device__ void note(const WorkTile& work) {
        if (work.split()) ++(is_two_way_split(work, smem.range) ? shared_by_two : shared_by_more);
    }

    // By every warp, when it has computed its last scores with a buffer of queries.
    __device__ void release_queries(int buffer) const {
        if (lane != 0) return;
        smem.q_empty[buffer].arrive();
        if (C::kQueryBuffers == 1 && smem.range.paired) arrive_at_partner(smem.pair.may_send);
    }

    // What the partner sends to this consumer.
    __device__ Received<P>& received() const {
        static_assert(2 * sizeof(Received<P>) <= C::kQueryBytes);
        return reinterpret_cast<Received<P>*>(smem.q[C::kQueryBuffers - 1])[consumer];
    }

    __device__ void begin_pair() const {
        cluster_wait();
        if (C::kQueryBuffers > 1 && lane == 0) arrive_at_partner(smem.pair.may_send);
    }

    // Sends the partner the states of the m-block's rows. They come before the quads, which may still have to be
    // joined, so that what these weigh is known when they arrive.
    template <typename StateOf>
    __device__ void send_states(StateOf state_of) const {
        wait_for_partner(smem.pair.may_send, 0);
        if (thread < P::kPairs)
            send_to_partner(&received().states[thread], SplitBuffers<P>::states_of(thread, state_of),
                            smem.pair.states[consumer]);
    }

    // Then this thread's quads of what the partner combines.
    template <typename QuadOf>
    __device__ void send_quads(QuadOf quad_of) {
#pragma unroll
        for (int i = 0; i < Received<P>::kQuads; ++i)
            send_to_partner(&received().quads[i][thread], quad_of(i), smem.pair.quads[consumer]);
        profiler.mark(Event::kWorkTileWritten);
    }

    template <typename StateOf>
    __device__ auto weights_in_pair(int pair, StateOf state_of) const {
        const float4 own = SplitBuffers<P>::states_of(pair, state_of);
        wait_for_partner(smem.pair.states[consumer], 0);
        return SplitBuffers<P>::weights_of_two(own, received().states[pair]);
    }

    __device__ void wait_for_quads() const { wait_for_partner(smem.pair.quads[consumer], 0); }

    // Announces this CTA's split buffers, which are complete. The flag came with the queries of the first work tile, if
    // any.
    __device__ void announce(bool has_items) const {
        if (threadIdx.x == 128) raise_flag(p, has_items ? smem.flag : read_flag(p));
    }
    // A pair's flag counts the launch, too, but nobody waits for it: it is next read when this launch has ended.
    __device__ void count_launch() const {
        if (threadIdx.x == 128) *flag_of(p, blockIdx.x) = smem.flag + 1;
    }

    // Reduces this CTA's parts of the m-blocks that it splits: those of its last work tile, which is number `ordinal`,
    // and of its first. `combine_two` takes the ones with two splits. Of others two take one warpgroup each, and a
    // single one takes both. The ring is free to be their scratch.
    template <typename ReduceOfTwo>
    __device__ void combine(WorkTile work, int ordinal, ReduceOfTwo combine_two) {
        if (shared_by_two + shared_by_more == 0) return;
        const bool together = shared_by_more == 1;
        auto sync_team = [&] { together ? sync_both() : sync_own(); };
        auto* scratch = reinterpret_cast<float4*>(smem.kv[0]) + (together ? 0 : consumer * kConsumerThreads);
#pragma unroll 1
        for (bool last = true;; last = false) {
            if (work.split()) {
                const SplitBuffers<P> buffers(p, work, smem.range);
                const auto& rows = smem.offsets[offset_buffer(ordinal)];
                if (buffers.count == 2)
                    combine_two(last, buffers, rows);
                else if (together || last == consumer)
                    buffers.template combine<typename C::Element>(smem.flag, rows, scratch,
                                                                  together ? threadIdx.x - 128 : thread,
                                                                  together ? kConsumerThreads : 128, sync_team);
            }
            if (ordinal == 0) break;
            ordinal = 0;
            WorkCursor<C::kRows>(p.lengths, p.num_heads, smem.range).next(work);
        }
    }
};

// The body of a kernel whose consumers are `Consumer`s. `kKeyReaders` of their warps give a tile back; `init` sets up
// what else S has.
template <typename C, typename S, typename Consumer, int kKeyReaders, typename Init>
__device__ __forceinline__ void run_kernel(const DecodeParams& p, const KeyBox& box, S& smem, Init init) {
    using LoaderThread = sm90::LoaderThread<C, S>;
    // Loaders and consumers read the plan each for themselves, so that neither waits for the other.
    const CtaPlan& plan = p.plans[blockIdx.x];
    if (threadIdx.x < 128) {
        const LoaderThread loader(p, smem, plan);
        sync_cta();
        cluster_arrive();
        lower_register_limit<72>();
        load(loader, box);
        return;
    }
    const int thread = threadIdx.x - 128;
    if (thread == 0) {  // the loaders' first warp is on its way to the first keys
        if constexpr (C::kTma) prefetch_tensor_map(&box.map);
        for (int i = 0; i < C::kStages; ++i) {
            for (Barrier& part : smem.kv_full[i]) part.init(LoaderThread::kKeyArrivals);
            smem.kv_empty[i].init(kKeyReaders);
        }
        for (int i = 0; i < C::kQueryBuffers; ++i) {
            smem.q_full[i].init(LoaderThread::kQueryArrivals);
            smem.q_empty[i].init(kConsumerThreads / 32);
        }
        smem.pair.may_send.init(kConsumerThreads / 32);
        using KernelReceived = Received<typename Consumer::OutputQuads>;
        for (int i = 0; i < 2; ++i) {
            smem.pair.states[i].init(1);
            smem.pair.states[i].arrive_expect(sizeof(KernelReceived::states));
            smem.pair.quads[i].init(1);
            smem.pair.quads[i].arrive_expect(sizeof(KernelReceived::quads));
        }
        init();
        fence_barrier_init();
    }
    sync_cta();
    cluster_arrive();
    raise_register_limit<216>();
    if (thread < sizeof(CtaRange) / 4)
        reinterpret_cast<int*>(&smem.range)[thread] = reinterpret_cast<const int*>(&plan.range)[thread];
    // By the thread that has just written it.
    if (thread == offsetof(CtaRange, paired) / 4 && !has_partner()) smem.range.paired = false;
    Consumer::sync_both();
    wait_for_predecessor();
    allow_successor();
    Consumer(p, smem).run();
}

}  // namespace mla::sm90
