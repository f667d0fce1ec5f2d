// Barriers of a CTA, whole or by number.
//
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar-barrier
#pragma once
#include <cstdint>

namespace mla {

// Like __syncthreads(), but warps may reach it at different lines of the code.
__device__ __forceinline__ void sync_cta() { asm volatile("barrier.cta.sync.aligned 0;" ::: "memory"); }

// Barrier numbers are constants: compute-sanitizer does not follow a number in a register, for which the compiler would
// also reserve all 16 barriers. Whole warps arrive (`aligned`): for divergent warps, the compiler would add a path with
// the number in a register.
template <int kId, int kThreads>
__device__ __forceinline__ void named_barrier_sync() {
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// A barrier that also returns, to every thread, whether any of them passed true.
template <int kId, int kThreads>
__device__ __forceinline__ bool named_barrier_any(bool value) {
    int any;
    asm volatile(
        "{\n"
        ".reg .pred in, out;\n"
        "setp.ne.s32 in, %3, 0;\n"
        "barrier.cta.red.or.pred.aligned out, %1, %2, in;\n"
        "selp.s32 %0, 1, 0, out;\n"
        "}\n"
        : "=r"(any)
        : "n"(kId), "n"(kThreads), "r"(static_cast<int>(value))
        : "memory");
    return any != 0;
}

}  // namespace mla
