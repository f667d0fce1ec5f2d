// Fences, named barriers, inter-CTA signals and programmatic dependent launch.
#pragma once
#include <cstdint>

namespace mla {

// Orders ordinary shared-memory writes before later reads by tensor cores or the copy engine.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Barrier that also tells every thread whether any of them passed true.
__device__ __forceinline__ bool named_barrier_any(int id, int threads, bool value) {
    int any;
    asm volatile(
        "{\n"
        ".reg .pred in, out;\n"
        "setp.ne.s32 in, %3, 0;\n"
        "barrier.cta.red.or.pred out, %1, %2, in;\n"
        "selp.s32 %0, 1, 0, out;\n"
        "}\n"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(static_cast<int>(value))
        : "memory");
    return any != 0;
}

__device__ __forceinline__ uint64_t atomic_add_release(uint64_t* address, uint64_t value) {
    uint64_t old;
    asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(old) : "l"(address), "l"(value) : "memory");
    return old;
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* address) {
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

// Programmatic dependent launch: nothing that an earlier kernel wrote may be read before `wait_for_predecessor`.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void allow_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void raise_register_limit() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void lower_register_limit() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace mla
