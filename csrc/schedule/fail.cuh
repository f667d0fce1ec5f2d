// How a launch ends that cannot go on: with an error instead of a wait.
#pragma once
#include <cassert>
#include <cstdint>

namespace mla {

// Ends the launch with an error, and tells the host the reason: `report` is host memory. The process can launch nothing
// more. (Device code that prints a message needs a stack, and takes registers.)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-trap
__device__ __forceinline__ void fail(int* report, int reason) {
    *report = reason;
    __threadfence_system();
    asm volatile("trap;");
}

// Ends a wait for another CTA that takes longer than any launch. Only in kernels built with MLA_BACKEND_DEBUG=1; in
// others it does nothing.
#ifdef MLA_BACKEND_DEBUG
class Patience {
    const uint64_t begin_ = now();

    // https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-globaltimer
    static __device__ uint64_t now() {
        uint64_t nanoseconds;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
        return nanoseconds;
    }

  public:
    __device__ Patience() {}
    __device__ void check() const {
        if (now() - begin_ > 10'000'000'000)
            __assert_fail("no CTA waits 10 s for another one of its launch", "mla_backend", 0, "decode");
    }
};
#else
struct Patience {
    __device__ void check() const {}
};
#endif

}  // namespace mla
