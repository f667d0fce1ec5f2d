// Reads of global memory to registers, and prefetches to the L2 cache, of single addresses.
#pragma once
#include <cstdint>

namespace mla::sm90 {

// 16 bytes.
__device__ __forceinline__ uint4 load_16(const void* source, uint64_t policy) {
    uint4 words;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(source), "l"(policy)
                 : "memory");
    return words;
}

// Harmless if an earlier kernel is still writing there: it writes through the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* source) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(source) : "memory");
}

}  // namespace mla::sm90
