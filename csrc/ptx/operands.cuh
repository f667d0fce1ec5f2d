// Operands of copies and barriers: addresses in shared memory and policies of the L2 cache.
#pragma once
#include <cstdint>

namespace mla {

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvta
__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// How the L2 cache treats keys: they are evicted first unless this CTA reads them again for another m-block of the same
// request. (CTA groups read the same keys at about the same time.)
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-createpolicy
__device__ __forceinline__ uint64_t cache_policy(bool evict_first) {
    uint64_t policy;
    if (evict_first)
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else
        asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

}  // namespace mla
