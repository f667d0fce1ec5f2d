// 16-bit numbers as sums of two e4m3, so that the tensor cores multiply them by unconverted e4m3 keys.
//
// e4m3 has 4 significant bits. The high term is the e4m3 nearest to a number. The low term is the e4m3 nearest to
// kLowFactor times the remainder, as e4m3 has few exponents. Together they have as many bits as bf16, but no error is
// below 2^-14. The largest query of a row is brought to [2^7, 2^8), so columns more than 2^13 times smaller lose bits.
#pragma once
#include "arithmetic.cuh"
#include "ptx/descriptor.cuh"
#include "query_scale.cuh"

namespace mla {

// High terms are at most 448, so the remainder is at most 16, and kLowFactor times it at most 256.
constexpr float kLowFactor = 16.f;

// Four numbers, each the sum of two e4m3: their high terms and their low terms.
struct TwoTerms {
    uint32_t high, low;

    // From two pairs of fp16.
    static __device__ TwoTerms of(uint32_t first, uint32_t second) {
        const Pair a = pair_of(first), b = pair_of(second);
        return {a.high | b.high << 16, a.low | b.low << 16};
    }

    // From two pairs of a query's neighbouring columns, times a factor.
    template <typename Element>
    static __device__ TwoTerms of_query(uint32_t first, uint32_t second, float factor) {
        return of(to_halves<Element>(first, factor), to_halves<Element>(second, factor));
    }

  private:
    struct Pair {
        uint32_t high, low;
    };
    static __device__ Pair pair_of(uint32_t halves) {
        const auto& numbers = reinterpret_cast<const __half2_raw&>(halves);
        const auto high = __nv_cvt_halfraw2_to_fp8x2(numbers, __NV_SATFINITE, __NV_E4M3);
        const __half2 remainder = __hsub2(__half2(numbers), __half2(__nv_cvt_fp8x2_to_halfraw2(high, __NV_E4M3)));
        const __half2_raw low = __hmul2(remainder, __float2half2_rn(kLowFactor));
        return {high, __nv_cvt_halfraw2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3)};
    }
};

// The sum of a product with high terms and one with low terms.
__device__ __forceinline__ float sum_of_terms(float high, float low) { return fmaf(low, 1.f / kLowFactor, high); }

// Converts a row of queries to terms. 16 neighbouring threads convert a row: each has a vector of 8 columns of every
// second column block. `queries` is [column block][row][128 B], swizzled by 128 B, `terms` [column block][kRows rows of
// high terms, then of low ones][64 B], swizzled by 64 B.
template <typename Element, typename C, int kBlocks>
struct QueryTerms {
    // To be called by all lanes of a warp. Returns the inverse of the row's factor; NaN if a query is infinite, as no
    // e4m3 is.
    static __device__ float convert(const unsigned char* queries, unsigned char* terms, int row) {
        constexpr int kOwnBlocks = (kBlocks + 1) / 2;
        const int vector = threadIdx.x % 8, first_block = threadIdx.x / 8 % 2;
        const unsigned char* from = queries + row * 128 + (vector ^ row % 8) * 16;
        unsigned char* to = terms + row / 8 * 512 + vector_offset<64>(row % 8, vector / 2) + vector % 2 * 8;
        auto column_block = [&](int i) { return (i * 2 + first_block) * C::kQueryColumnBlockBytes; };
        auto exists = [&](int i) { return i * 2 + first_block < kBlocks; };
        uint4 words[kOwnBlocks];
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < kOwnBlocks; ++i) {
            if (!exists(i)) continue;
            words[i] = *reinterpret_cast<const uint4*>(from + column_block(i));
            largest = largest_magnitudes(largest, words[i]);
        }
        const float most = max_over_lanes<16>(largest_of<Element>(largest));
        const QueryScale scale = QueryScale::of<7>(most);
#pragma unroll
        for (int i = 0; i < kOwnBlocks; ++i) {
            if (!exists(i)) continue;
            const auto first = TwoTerms::of_query<Element>(words[i].x, words[i].y, scale.factor);
            const auto second = TwoTerms::of_query<Element>(words[i].z, words[i].w, scale.factor);
            *reinterpret_cast<uint2*>(to + column_block(i)) = make_uint2(first.high, second.high);
            *reinterpret_cast<uint2*>(to + column_block(i) + C::kRows * 64) = make_uint2(first.low, second.low);
        }
        return most < INFINITY ? scale.inverse : NAN;
    }
};

// Makes an A fragment of V^T, 32 tokens of 16 columns. Row g is column 2 g, and row g + 8 is column 2 g + 1. Of each 16
// tokens, t and t + 8 follow each other, as in `store_weight_terms`. `words` are what `load_matrices_transposed` gives
// if each lane's address is that of a token.
__device__ __forceinline__ void make_value_fragment(uint32_t (&fragment)[4], const uint32_t (&words)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        fragment[half * 2] = __byte_perm(words[half * 2], words[half * 2 + 1], 0x6240);
        fragment[half * 2 + 1] = __byte_perm(words[half * 2], words[half * 2 + 1], 0x7351);
    }
}

}  // namespace mla
