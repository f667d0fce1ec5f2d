// e4m3 keys in shared memory, and how they become fp16 fragments in registers (swapped64_products.cuh,
// swapped64_records.cuh); fp16 holds every e4m3.
//
// A column block of fp8 keys is 64 columns in 64 bytes of a token: [8 tokens][64 B], swizzled by 64 B, so vector v of
// 16 bytes of token t lies at v ^ t / 2 % 4. Which column of a block is multiplied in which place of a product's K
// dimension is free as long as keys and queries agree. So a lane reads 16 columns of a token at once, and the same
// columns of a query row: column 16 t + 4 j + b of a block (t, j, b < 4) is multiplied in step j, by lanes 4 i + t.
//
// Likewise row g of a 16-row slice of V^T is column 2 g, and row g + 8 column 2 g + 1.
#pragma once
#include "../common/cache_format.cuh"
#include "../common/fp8_queries.cuh"
#include "../common/lanes.cuh"
#include "../sm80/mma.cuh"

namespace mla::sm90 {

// Offset of a vector of 16 bytes of one of 8 tokens in a column block, which has 64 or 128 bytes of each: as the copy
// engine swizzles it.
template <int kBlockBytes>
__device__ __forceinline__ uint32_t vector_offset(int token, int vector) {
    return token * kBlockBytes + (kBlockBytes == 64 ? vector ^ token / 2 : vector ^ token) * 16;
}

// What a lane needs of 16 tokens' keys in a column block: 16 columns of two tokens, 8 apart. `keys` is this lane's
// vector of the first 8 tokens; `columns`, a constant, of the block exist.
template <int kGroupBytes>
__device__ __forceinline__ void load_key_words(uint32_t (&words)[2][4], const unsigned char* keys, int columns) {
    const bool exists = static_cast<int>(threadIdx.x) % 4 * 16 < columns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint4 vector = *reinterpret_cast<const uint4*>(keys + half * kGroupBytes);
        if (columns < 64 && !exists) vector = make_uint4(0, 0, 0, 0);
        words[half][0] = vector.x, words[half][1] = vector.y, words[half][2] = vector.z, words[half][3] = vector.w;
    }
}
// Four A fragments of them: the 64 columns of the block.
__device__ __forceinline__ void widen_keys(uint32_t (&fragments)[4][4], const uint32_t (&words)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int step = 0; step < 4; ++step)
            halves_in_order(words[half][step], fragments[step][half], fragments[step][half + 2]);
}

// Two A fragments of V^T: 16 columns of 32 tokens, which lanes have as `load_matrices_transposed` gives them. The
// lanes' addresses are of a token each.
__device__ __forceinline__ void widen_values(uint32_t* first, uint32_t* second, const uint32_t (&words)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t* fragment = i < 2 ? first : second;
        halves_of_e4m3(words[i], fragment[i % 2 * 2], fragment[i % 2 * 2 + 1]);
    }
}
}  // namespace mla::sm90
