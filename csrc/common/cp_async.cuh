// cp.async: copies of 16 bytes from global to shared memory, and the L2 cache policy of such reads.
#pragma once
#include <cstdint>

namespace mla {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// How the L2 cache treats keys: they are evicted first unless this CTA reads them again for another m-block of the same
// request. (CTA groups read the same keys at about the same time.)
__device__ __forceinline__ uint64_t cache_policy(bool evict_first) {
    uint64_t policy;
    if (evict_first)
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else
        asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

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
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace mla
