// Copies of keys by threads, with cp.async.
#pragma once
#include "loader.cuh"
#include "ptx/cp_async.cuh"

namespace mla::hopper {

// Copies 16 bytes of the cache; with a list, writes zeros unless the key `exists`. Keys of a list have no cache policy,
// because other requests' lists may name them, too.
template <typename C>
__device__ void copy_16(uint32_t destination, const void* source, uint64_t policy, bool exists = true) {
    if constexpr (C::kLists)
        cp_async_16_or_zero(destination, source, exists);
    else
        cp_async_16(destination, source, policy);
}

// A row of zeros, read in place of keys that do not exist.
alignas(16) __device__ const unsigned char no_row[1152] = {};

// By 8 neighbouring lanes: copies a token's record to its places in a stage. Records are not aligned to cache lines
// (128 bytes). Each instruction copies one line's part of the record, so a lane copies every eighth vector.
template <typename C>
__device__ void copy_record(uint32_t stage, uint32_t token, const unsigned char* record, uint64_t policy) {
    static_assert(C::kBlockBytes == 128);  // as many as a line
    constexpr int kVectors = C::Layout::kTokenBytes / 16, kLines = (kVectors + 7 + 7) / 8;
    const int first = threadIdx.x % 8 - reinterpret_cast<uintptr_t>(record) / 16 % 8;  // in the record's first line
    const unsigned char* from = record + first * 16;
    const uint32_t row = stage + token / 8 * C::kTokenGroupBytes + vector_offset<128>(token % 8, first & 7);
    const uint32_t tail = stage + C::kRopeSegment * C::kSegmentBytes + token * C::Layout::kTailBytes + (first & 7) * 16;
    auto place = [&](int block) {
        return block < C::Layout::kScales ? row + column_block_offset<C>(block * C::kBlockColumns)
                                          : tail + (block - C::Layout::kScales) * C::kBlockBytes;
    };
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
        const int vector = first + line * 8;
        if ((line == 0 && vector < 0) || (line >= kVectors / 8 && vector >= kVectors)) continue;
        copy_16<C>(first < 0 ? place(line - 1) : place(line), from + line * 128, policy);
    }
}

}  // namespace mla::hopper
