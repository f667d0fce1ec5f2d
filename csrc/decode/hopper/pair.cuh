// Pairs. If the two CTAs of a cluster share one m-block and have no other, they write no split buffers. Each consumer
// sends the part that the other CTA combines to the same consumer there, which receives it in the last query buffer. If
// there are two query buffers, the last never holds queries, as there is one m-block. A single buffer is free when all
// warps have computed their last scores; each warp then arrives at the partner's may_send.
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
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ring.cuh"
#include "schedule/fail.cuh"
#include "schedule/splits.cuh"

namespace mla::hopper {

__device__ __forceinline__ void wait_for_partner(Barrier& barrier, uint32_t parity) {
    const Patience patience;
    while (!try_wait_for_partner(barrier, parity)) patience.check();
}

struct PairMemory {
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

// By one thread.
template <typename Layout>
__device__ __forceinline__ void init_pair_barriers(PairMemory& pair) {
    pair.may_send.init(kConsumerThreads / 32);
    for (int i = 0; i < 2; ++i) {
        pair.states_arrived[i].init(1);
        pair.states_arrived[i].arrive_expect(sizeof(Received<Layout>::states));
        pair.quads_arrived[i].init(1);
        pair.quads_arrived[i].arrive_expect(sizeof(Received<Layout>::words));
    }
}

// A pair, as a thread of a consumer sees it. Thread: see ConsumerThread in kernel.cuh.
template <typename Layout, typename Thread>
struct Pair {
    using Config = typename Thread::Config;
    const Thread& t;
    // Where this consumer receives what the partner sends.
    Received<Layout>& received = reinterpret_cast<Received<Layout>*>(t.rings.q[Config::kQueryBuffers - 1])[t.consumer];
    static_assert(2 * sizeof(Received<Layout>) <= Config::kQueryBytes);

    // Sends the partner the states of the m-block's rows. They are sent before the quads, which may still have to be
    // merged, so the partner can weigh the quads when they arrive.
    template <typename StateOf>
    __device__ void send_states(StateOf state_of) const {
        wait_for_partner(t.pair.may_send, 0);
        if (t.thread < Layout::kPairs)
            send_to_partner(&received.states[t.thread], SplitBuffers<Layout>::states_of(t.thread, state_of),
                            t.pair.states_arrived[t.consumer]);
    }

    // Sends those of this thread's quads that the partner combines.
    template <typename QuadOf>
    __device__ void send_quads(QuadOf quad_of) const {
        constexpr int kQuads = Received<Layout>::kQuads, kWordQuads = Received<Layout>::kWordQuads;
#pragma unroll
        for (int i = 0; i < kQuads; i += kWordQuads)  // of two quads, the last may be alone
            send_to_partner(&received.words[i / kWordQuads][t.thread],
                            Layout::word(quad_of(i), quad_of(min(i + 1, kQuads - 1))),
                            t.pair.quads_arrived[t.consumer]);
    }

    template <typename StateOf>
    __device__ auto weights(int row_pair, StateOf state_of) const {
        const float4 own = SplitBuffers<Layout>::states_of(row_pair, state_of);
        wait_for_partner(t.pair.states_arrived[t.consumer], 0);
        return SplitBuffers<Layout>::weights_of_two(own, received.states[row_pair]);
    }

    __device__ void wait_for_quads() const { wait_for_partner(t.pair.quads_arrived[t.consumer], 0); }
};

}  // namespace mla::hopper
