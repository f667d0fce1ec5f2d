// Queries of many_rows_fp8_products: one e4m3 a column, or in some column blocks the sum of two, a high and a low term.
//
// Unlike those of two_terms.cuh, low terms are not multiplied by a factor, so that products of both have one sum. The
// largest column of a row is brought to [2^7, 2^8), and the least low term is 2^-9.
#pragma once
#include "decode/hopper/kernel.cuh"
#include "numbers/query_scale.cuh"

namespace mla::hopper {

// What brings a product of a row to log2, and the least maximum of the row.
struct RowScale {
    float factor, least;
};

template <typename C>
struct ProductQueries {
    using Element = typename C::Element;
    static constexpr int kTermBytes = C::kRows * 64;  // of a column block

    // Rotary columns first: they have the largest products.
    static __device__ constexpr bool has_two_terms(int block) {
        return block == C::kRopeSegment ? C::kTwoTermBlocks > 0 : block % C::kHalf < (C::kTwoTermBlocks - 1) / 2;
    }

    // Converts queries in place: [column block][row][128 B] to [column block][64 rows of high terms, then of low ones]
    // [64 B], swizzled by 64 B. By both consumers: 8 threads have a row and the one 32 rows further on. `scale` turns
    // products with unconverted keys into scores in log2.
    static __device__ void convert(ConsumerThread<C>& t, RowScale (&scales)[C::kRows],
                                   const OutputOffsets<C::kRows>& offsets, float scale) {
        const int own = pinned(static_cast<int>(threadIdx.x) - 128), row = own / 8, vector = own % 8;
        uint4 words[2][C::kQueryColumnBlocks];
        float factors[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const unsigned char* from = t.rings.q[0] + (row + k * 32) * 128 + (vector ^ row % 8) * 16;
            uint32_t largest = 0;
#pragma unroll
            for (int i = 0; i < C::kQueryColumnBlocks; ++i) {
                words[k][i] = *reinterpret_cast<const uint4*>(from + i * C::kQueryColumnBlockBytes);
                largest = largest_magnitudes(largest, words[k][i]);
            }
            const float most = max_over_lanes<8>(largest_of<Element>(largest));
            const QueryScale factor = QueryScale::of<7>(most);
            factors[k] = factor.factor;
            // Never 0: masked scores, -INFINITY, are multiplied by it, too. NaN if a query is infinite, as no e4m3 is.
            if (vector == 0)
                scales[row + k * 32] = {most < INFINITY ? fmaxf(scale * factor.inverse, 0x1p-126f) : NAN,
                                        offsets.out[row + k * 32] < 0 ? kNoRow : -INFINITY};
        }
        t.sync_consumers();  // all have read the queries
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            unsigned char* to =
                t.rings.q[0] + (row / 8 + k * 4) * 512 + vector_offset<64>(row % 8, vector / 2) + vector % 2 * 8;
#pragma unroll
            for (int i = 0; i < C::kQueryColumnBlocks; ++i, to += C::kQueryColumnBlockBytes) {
                const uint4& eight = words[k][i];
                const Terms a = terms_of(eight.x, factors[k]), b = terms_of(eight.y, factors[k]);
                const Terms c = terms_of(eight.z, factors[k]), d = terms_of(eight.w, factors[k]);
                *reinterpret_cast<uint2*>(to) = make_uint2(a.high | b.high << 16, c.high | d.high << 16);
                if (has_two_terms(i))
                    *reinterpret_cast<uint2*>(to + kTermBytes) = make_uint2(a.low | b.low << 16, c.low | d.low << 16);
            }
        }
    }

  private:
    // Of two neighbouring columns.
    struct Terms {
        uint32_t high, low;
    };
    static __device__ Terms terms_of(uint32_t pair, float factor) {
        const uint32_t halves = to_halves<Element>(pair, factor);
        const auto& numbers = reinterpret_cast<const __half2_raw&>(halves);
        const auto high = __nv_cvt_halfraw2_to_fp8x2(numbers, __NV_SATFINITE, __NV_E4M3);
        const __half2_raw remainder = __hsub2(__half2(numbers), __half2(__nv_cvt_fp8x2_to_halfraw2(high, __NV_E4M3)));
        return {high, __nv_cvt_halfraw2_to_fp8x2(remainder, __NV_SATFINITE, __NV_E4M3)};
    }
};

}  // namespace mla::hopper
