// Named barriers, flags between CTAs and programmatic dependent launch.
#pragma once
#include <cstdint>

namespace mla {

// Like __syncthreads(), but warps may reach it at different places of the code.
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

// Flags that other CTAs of the grid wait for.
__device__ __forceinline__ void store_release(uint32_t* flag, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* flag) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* flag) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
}

// Programmatic dependent launch: nothing that an earlier kernel wrote may be read before `wait_for_predecessor`, except
// the plan and the page table (KernelDecode.run in mla_backend/kernels/base.py says why). The wait covers
// the predecessor alone; what ran before it has ended only if the predecessor waits, too, as all kernels here do.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void allow_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace mla
