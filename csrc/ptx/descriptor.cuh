// Matrix descriptors: where an operand of wgmma lies in shared memory.
//
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout-matrix-descriptor
#pragma once
#include <cstdint>

#include "operands.cuh"

namespace mla {

enum class Swizzle : uint64_t { kNone = 0, k128B = 1, k64B = 2 };

// `leading` and `stride` are in bytes.
//   K-major, 128 B swizzle:  rows of 128 B in groups of 8; `stride` between groups; `leading` unused
//   K-major, 64 B swizzle:   likewise rows of 64 B
//   MN-major, 128 B swizzle: `stride` between groups of 8 k; `leading` between blocks of 64 mn
//   K-major, no swizzle:     core matrices of 8 rows of 16 B; `leading` between them along k, `stride` along mn
__device__ __forceinline__ uint64_t make_descriptor(const void* start, uint32_t leading, uint32_t stride,
                                                    Swizzle swizzle) {
    return static_cast<uint64_t>((smem_address(start) & 0x3ffff) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
           static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}

// The descriptor of an operand `bytes` further on. Addresses stay below 2^18, so adding to the low word never carries;
// a 64-bit addition would cost several instructions between two wgmma.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) {
    return descriptor >> 32 << 32 | static_cast<uint32_t>(static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// Moves a descriptor that is the same in all lanes to uniform registers. It is then advanced there, too, instead of
// being moved there before each wgmma.
__device__ __forceinline__ uint64_t uniform(uint64_t descriptor) {
    return descriptor >> 32 << 32 | __shfl_sync(~0u, static_cast<uint32_t>(descriptor), 0);
}

// Offset of a vector of 16 bytes of one of 8 tokens or rows, each with 64 or 128 bytes, which are swizzled by as many.
template <int kRowBytes>
__device__ __forceinline__ uint32_t vector_offset(int row, int vector) {
    return row * kRowBytes + (kRowBytes == 64 ? vector ^ row / 2 : vector ^ row) * 16;
}

}  // namespace mla
