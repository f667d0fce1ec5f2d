// Clusters of two CTAs, 2i and 2i + 1 of the grid: accesses to the partner's shared memory. A pointer into a CTA's own
// shared memory stands for the same address in the partner's.
//
// The partner's shared memory may be accessed only after `cluster_wait` and before the partner ends. So a CTA waits for
// everything that its partner sends, even if it has no use for it.
#pragma once
#include "mbarrier.cuh"
#include "operands.cuh"

namespace mla {

// Makes freshly initialized barriers visible to the copy engine and to the cluster.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar-fence
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The two halves of a barrier of both CTAs. All threads arrive; those that access the partner wait. This barrier, the
// first, orders nothing but `fence_barrier_init`.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// The first half of a second barrier, by all consumers: they will do nothing more in the partner's shared memory. After
// `cluster_wait` the partner does nothing more in this CTA's. (Loaders have ended then, or end without an access.)
__device__ __forceinline__ void cluster_leave() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Whether the launch is in clusters.
__device__ __forceinline__ bool has_partner() {
    uint32_t ctas;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(ctas));
    return ctas == 2;
}

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-mapa
__device__ __forceinline__ uint32_t address_at_partner(const void* pointer) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address(pointer)), "r"(1 - blockIdx.x % 2));
    return address;
}

// Tells the partner that it may overwrite what this thread has read. A release at cluster scope would also wait for all
// that this thread has written; what must precede the partner's copies has been fenced before.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-arrive
__device__ __forceinline__ void arrive_at_partner(Barrier& barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_at_partner(&barrier)) : "memory");
}

// Writes 16 bytes to the partner; its barrier counts them when they have arrived.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st-async
template <typename T>
__device__ __forceinline__ void send_to_partner(T* to, const T& value, Barrier& barrier) {
    static_assert(sizeof(T) == 16);
    const auto& words = reinterpret_cast<const uint4&>(value);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                     address_at_partner(to)),
                 "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(address_at_partner(&barrier))
                 : "memory");
}

// Waits a while for what the partner has done; true if the phase with this parity has completed (acquire at cluster
// scope).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait
__device__ __forceinline__ bool try_wait_for_partner(Barrier& barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(smem_address(&barrier)), "r"(parity)
        : "memory");
    return done;
}

}  // namespace mla
