// Copies from global to shared memory: the bulk tensor engine (TMA) and cp.async.
#pragma once
#include <cuda.h>

#include "mbarrier.cuh"

namespace mla {

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// How the second-level cache treats keys: first to go, unless this CTA reads them again for another block of rows.
// Crews read them at about the same time.
__device__ __forceinline__ uint64_t cache_policy(bool first_to_go) {
    uint64_t policy;
    if (first_to_go)
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else
        asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void tma_load(void* destination, const CUtensorMap* map, Barrier* barrier, uint64_t policy,
                                         int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(smem_address(destination)),
        "l"(map), "r"(smem_address(barrier)), "l"(policy), "r"(x), "r"(y), "r"(z)
        : "memory");
}

__device__ __forceinline__ void tma_load(void* destination, const CUtensorMap* map, Barrier* barrier, uint64_t policy,
                                         int x, int y, int z, int w, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(smem_address(destination)),
        "l"(map), "r"(smem_address(barrier)), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
        : "memory");
}

// Brings a box, or `bytes`, a multiple of 16, to the second-level cache. Harmless if an earlier kernel is still writing
// them: it writes through that cache.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, uint64_t policy, int x, int y, int z) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.L2::cache_hint [%0, {%2, %3, %4}], %1;" ::"l"(map),
                 "l"(policy), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, uint64_t policy, int x, int y, int z, int w,
                                             int v) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.L2::cache_hint [%0, {%2, %3, %4, %5, %6}], %1;" ::"l"(map),
                 "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
                 : "memory");
}
__device__ __forceinline__ void bulk_prefetch(const void* source, int bytes, uint64_t policy) {
    asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(source), "r"(bytes), "l"(policy)
                 : "memory");
}

// True in one thread of the (converged) warp.
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred is;\n"
        "elect.sync _|is, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, is;\n"
        "}\n"
        : "=r"(elected));
    return elected != 0;
}

// 16 bytes.
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
                 "l"(policy)
                 : "memory");
}

// 16 bytes; zeros where `valid` is false (the source is not read then).
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(valid ? 16 : 0)
                 : "memory");
}

}  // namespace mla
