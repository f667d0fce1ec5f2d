// Fragments (mma.cuh) of keys, values and P, from shared memory. Those in 8 bits become fp16.
#pragma once
#include "config.cuh"

namespace mla::portable {

// Operands a for scores: two vectors of each token of a token block, which are 16 columns, or 32 in 8 bits.
template <typename C>
using KeyFragments = uint32_t[C::kWidens ? 2 : 1][4];

// `keys` is the address of this lane's row of the first matrices.
template <typename C>
__device__ __forceinline__ void load_keys(KeyFragments<C>& fragments, uint32_t keys) {
    if constexpr (C::kWidens) {
        uint32_t raw[4];
        load_matrices(raw, keys);
#pragma unroll
        for (int i = 0; i < 4; ++i) halves_of_e4m3(raw[i], fragments[i / 2][i % 2], fragments[i / 2][i % 2 + 2]);
    } else {
        load_matrices(fragments[0], keys);
    }
}

// The same for 16 rotary columns.
template <typename C>
__device__ __forceinline__ void load_rope(uint32_t (&fragment)[4], uint32_t keys) {
    if constexpr (C::kWidensRope) {
        uint32_t raw[2];
        load_matrices(raw, keys);
        halves_of_e4m3(raw[0], fragment[0], fragment[2]);
        halves_of_e4m3(raw[1], fragment[1], fragment[3]);
    } else {
        load_matrices(fragment, keys);
    }
}

// Operands a for O, of 16 columns of a token block each, one after another.
template <typename C>
struct ValueFragments {
    uint32_t raw[4];  // in 8 bits: of two of them

    // Loads number i; `values` is the address of this lane's row of the first matrices.
    __device__ void load(uint32_t (&fragment)[4], uint32_t values, int i) {
        if constexpr (C::kWidens) {
            if (i % 2 == 0) load_matrices_transposed(raw, values ^ i / 2 * 32);
            halves_of_e4m3(raw[i % 2 * 2], fragment[0], fragment[1]);
            halves_of_e4m3(raw[i % 2 * 2 + 1], fragment[2], fragment[3]);
        } else {
            load_matrices_transposed(fragment, values ^ i * 32);
        }
    }
};

// P of a token block: an operand b for each octet.
template <int kOctets>
__device__ __forceinline__ void load_weights(uint32_t (&weights)[kOctets][2], uint32_t row) {
#pragma unroll
    for (int octet = 0; octet < kOctets; octet += 2) {
        if (octet + 1 < kOctets) {
            uint32_t two_octets[4];
            load_matrices_transposed(two_octets, row + octet * 256);
            weights[octet][0] = two_octets[0], weights[octet][1] = two_octets[1];
            weights[octet + 1][0] = two_octets[2], weights[octet + 1][1] = two_octets[3];
        } else {
            load_matrices_transposed(weights[octet], row + octet * 256);
        }
    }
}

}  // namespace mla::portable
