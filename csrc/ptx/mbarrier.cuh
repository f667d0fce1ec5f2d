// mbarrier: a barrier in shared memory. Threads arrive at it, and so do their copies and, on Hopper, the copy engine.
//
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier
#pragma once
#include <cstdint>

#include "operands.cuh"

namespace mla {

struct alignas(8) Barrier {
    uint64_t state;

    // https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-init
    __device__ void init(uint32_t arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(this)), "r"(arrivals));
    }

    // https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-arrive
    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(this)) : "memory");
    }

    // One arrival that also announces `bytes` still to be written by the copy engine.
    // https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-arrive
    __device__ void arrive_expect(uint32_t bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(this)), "r"(bytes)
                     : "memory");
    }

    // Arrives once all cp.async of this thread so far have landed; the arrival is one of the initial count.
    // https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-cp-async-mbarrier-arrive
    __device__ void arrive_after_cp_async() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(this)) : "memory");
    }

    // Blocks until the phase with this parity has completed (acquire). Before sm_90 threads poll.
    // https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier-test-wait-try-wait
    __device__ void wait(uint32_t parity) {
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "WAIT:\n"
#if __CUDA_ARCH__ >= 900
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#else
            "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
#endif
            "@done bra DONE;\n"
            "bra WAIT;\n"
            "DONE:\n"
            "}\n" ::"r"(smem_address(this)),
            "r"(parity)
            : "memory");
    }
};

}  // namespace mla
