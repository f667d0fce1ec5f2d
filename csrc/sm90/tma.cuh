// TMA: loads and prefetches by the bulk tensor copy engine.
#pragma once
#include <cuda.h>

#include "../common/cp_async.cuh"
#include "mbarrier.cuh"

namespace mla::sm90 {

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
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

}  // namespace mla::sm90
