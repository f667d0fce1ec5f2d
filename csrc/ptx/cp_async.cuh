// cp.async: copies of 16 bytes from global to shared memory.
//
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
#pragma once
#include <cstdint>

namespace mla {

// 16 bytes.
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
                 "l"(policy)
                 : "memory");
}

// 16 bytes; zeros if `valid` is false, when the source is not read.
__device__ __forceinline__ void cp_async_16_or_zero(uint32_t destination, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(valid ? 16 : 0)
                 : "memory");
}

// 16 bytes; zeros if `valid` is false, when the source is not read.
__device__ __forceinline__ void cp_async_16_or_zero(uint32_t destination, const void* source, bool valid,
                                                    uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(destination), "l"(source),
                 "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
}

// 16 bytes of weights, which no kernel of a step writes: they may be loaded before the predecessor has ended.
__device__ __forceinline__ void cp_async_16_of_weights(uint32_t destination, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-commit-group
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-wait-group-cp-async-wait-all
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace mla
