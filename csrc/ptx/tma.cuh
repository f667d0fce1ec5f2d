// TMA: loads and prefetches by the bulk tensor copy engine.
#pragma once
#include <cuda.h>

#include "mbarrier.cuh"
#include "operands.cuh"

namespace mla {

// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prefetch-prefetchu
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Where a box begins in a map. A cache whose rows are whole column blocks of 64 columns has a map of five dimensions,
// in which a box may span several column blocks and groups of 8 tokens; any other has one of three.
struct BlockedCoordinates {
    int column, row_in_group, column_block, token_group, page;
};
struct PlainCoordinates {
    int column, row, page;
};
constexpr uint16_t kBothCtas = 0b11;  // of a cluster

// Loads a box; its bytes arrive at `barrier`.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
__device__ __forceinline__ void tma_load(void* destination, const CUtensorMap* map, Barrier* barrier, uint64_t policy,
                                         const PlainCoordinates& at) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(smem_address(destination)),
        "l"(map), "r"(smem_address(barrier)), "l"(policy), "r"(at.column), "r"(at.row), "r"(at.page)
        : "memory");
}
__device__ __forceinline__ void tma_load(void* destination, const CUtensorMap* map, Barrier* barrier, uint64_t policy,
                                         const BlockedCoordinates& at) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(smem_address(destination)),
        "l"(map), "r"(smem_address(barrier)), "l"(policy), "r"(at.column), "r"(at.row_in_group), "r"(at.column_block),
        "r"(at.token_group), "r"(at.page)
        : "memory");
}

// Loads a box to the same address in both CTAs of a cluster; its bytes arrive at `barrier` of each.
__device__ __forceinline__ void tma_multicast(void* destination, const CUtensorMap* map, Barrier* barrier,
                                              uint64_t policy, const PlainCoordinates& at) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%5, %6, %7}], [%2], %3, %4;" ::"r"(smem_address(destination)),
        "l"(map), "r"(smem_address(barrier)), "h"(kBothCtas), "l"(policy), "r"(at.column), "r"(at.row), "r"(at.page)
        : "memory");
}
__device__ __forceinline__ void tma_multicast(void* destination, const CUtensorMap* map, Barrier* barrier,
                                              uint64_t policy, const BlockedCoordinates& at) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%5, %6, %7, %8, %9}], [%2], %3, %4;" ::"r"(smem_address(destination)),
        "l"(map), "r"(smem_address(barrier)), "h"(kBothCtas), "l"(policy), "r"(at.column), "r"(at.row_in_group),
        "r"(at.column_block), "r"(at.token_group), "r"(at.page)
        : "memory");
}

// Brings a box to the L2 cache. Harmless if an earlier kernel is still writing it: that kernel writes through L2.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-prefetch-tensor
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, uint64_t policy, const PlainCoordinates& at) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.L2::cache_hint [%0, {%2, %3, %4}], %1;" ::"l"(map),
                 "l"(policy), "r"(at.column), "r"(at.row), "r"(at.page)
                 : "memory");
}
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, uint64_t policy, const BlockedCoordinates& at) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.L2::cache_hint [%0, {%2, %3, %4, %5, %6}], %1;" ::"l"(map),
                 "l"(policy), "r"(at.column), "r"(at.row_in_group), "r"(at.column_block), "r"(at.token_group),
                 "r"(at.page)
                 : "memory");
}
// The same for a plain range of memory; `bytes` is a multiple of 16.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-prefetch
__device__ __forceinline__ void bulk_prefetch(const void* source, int bytes, uint64_t policy) {
    asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(source), "r"(bytes), "l"(policy)
                 : "memory");
}

// True in one thread of the (converged) warp.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-elect-sync
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

}  // namespace mla
