// Products with e4m3 keys: A operands in registers, made of what lies in shared memory. The tensor cores multiply fp16,
// in which every e4m3 is exact.
//
// A column block of fp8 keys is 64 columns in 64 bytes of a token: [8 tokens][64 B], swizzled by 64 B, so vector v of
// 16 bytes of token t lies at v ^ t / 2 % 4. Which column of a block is multiplied in which place of wgmma's K
// dimension is free as long as the queries agree. So a lane reads 16 columns of a token at once, and the queries are
// permuted:
//
//   column 16 t + 4 j + b of the block (t, j, b < 4)  -->  place 16 j + 8 (b % 2) + 2 t + b / 2
//
// Likewise row g of a 16-row slice of V^T is column 2 g, and row g + 8 column 2 g + 1.
#pragma once
#include "../common/cache_format.cuh"
#include "../common/fp8_queries.cuh"
#include "../sm80/mma.cuh"
#include "wgmma.cuh"

namespace mla::sm90 {

// Offset of a vector of 16 bytes of one of 8 tokens in a column block, which has 64 or 128 bytes of each: as the copy
// engine swizzles it.
template <int kBlockBytes>
__device__ __forceinline__ uint32_t vector_offset(int token, int vector) {
    return token * kBlockBytes + (kBlockBytes == 64 ? vector ^ token / 2 : vector ^ token) * 16;
}

// Four fragments of keys: the 64 columns of a column block, of 16 tokens. `keys` is this lane's vector of the first 8
// tokens; `columns`, a constant, of the block exist.
template <int kGroupBytes>
__device__ __forceinline__ void load_key_fragments(uint32_t (&fragments)[4][4], const unsigned char* keys,
                                                   int columns) {
    const bool exists = static_cast<int>(threadIdx.x) % 4 * 16 < columns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 words = *reinterpret_cast<const uint4*>(keys + half * kGroupBytes);
        if (columns < 64 && !exists) words = make_uint4(0, 0, 0, 0);
        halves_of_e4m3(words.x, fragments[0][half], fragments[0][half + 2]);
        halves_of_e4m3(words.y, fragments[1][half], fragments[1][half + 2]);
        halves_of_e4m3(words.z, fragments[2][half], fragments[2][half + 2]);
        halves_of_e4m3(words.w, fragments[3][half], fragments[3][half + 2]);
    }
}

// Two fragments of V^T: 16 columns of 32 tokens. The lanes' addresses are of a token each, `values` of this lane's.
__device__ __forceinline__ void load_value_fragments(uint32_t (&first)[4], uint32_t (&second)[4], uint32_t values) {
    uint32_t words[4];
    sm80::load_matrices_transposed(words, values);
    halves_of_e4m3(words[0], first[0], first[1]);
    halves_of_e4m3(words[1], first[2], first[3]);
    halves_of_e4m3(words[2], second[0], second[1]);
    halves_of_e4m3(words[3], second[2], second[3]);
}

// A row of queries that 8 neighbouring threads convert in place, in shared memory: each has a vector of 16 bytes of
// every column block (64 columns = 128 B, kStride bytes apart).
template <typename Element, int kBlocks, int kStride>
struct QueryRow {
    static constexpr int kAtOnce = 2;  // blocks

    unsigned char* const row;
    const int vector, swizzle;  // this thread's vector, and what its number in a block is exclusive-ored with

    __device__ uint4 load(int block) const {
        return *reinterpret_cast<const uint4*>(row + block * kStride + (vector ^ swizzle) * 16);
    }

    __device__ float largest() const {
        float most = 0.f;
#pragma unroll 3
        for (int i = 0; i < kBlocks; ++i) {
            const uint4 words = load(i);
            most = fmaxf(most, fmaxf(largest_of<Element>(words.x), largest_of<Element>(words.y)));
            most = fmaxf(most, fmaxf(largest_of<Element>(words.z), largest_of<Element>(words.w)));
        }
#pragma unroll
        for (int distance = 1; distance < 8; distance *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
        return most;
    }

    // This thread's columns of a block to their places: twice four, of the same t, each four of one j.
    __device__ void store(int block, uint4 words, float factor) const {
        const int t = vector / 2;
        unsigned char* to = row + block * kStride + t * 4;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int j = vector % 2 * 2 + k;
            uint32_t &even = k ? words.z : words.x, &odd = k ? words.w : words.y;
            convert_queries<Element>(even, odd, factor);
            *reinterpret_cast<uint32_t*>(to + ((j * 2) ^ swizzle) * 16) = even;
            *reinterpret_cast<uint32_t*>(to + ((j * 2 + 1) ^ swizzle) * 16) = odd;
        }
    }

    // By all lanes of a warp, which have four rows. Returns the inverse of the row's factor.
    __device__ float convert() const {
        const QueryScale scale = QueryScale::of(largest());
#pragma unroll
        for (int begin = 0; begin < kBlocks; begin += kAtOnce) {
            uint4 words[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce && begin + i < kBlocks; ++i) words[i] = load(begin + i);
            __syncwarp();  // all have read these blocks
#pragma unroll
            for (int i = 0; i < kAtOnce && begin + i < kBlocks; ++i) store(begin + i, words[i], scale.factor);
        }
        return scale.inverse;
    }
};

}  // namespace mla::sm90
