// Scores of many_rows_fp8 with e4m3 keys, which the tensor cores multiply directly. Queries are sums of two e4m3, a
// high and a low term (two_terms.cuh), which are rows of the same product, as in few_rows/keys_e4m3.cuh:
//
//   S^T[tokens x 2 rows] = K * (Q high, Q low)^T     A = K, B = terms, both from shared memory
//
// No registers are free for partial sums, so each score is one sequence of wgmma. This loses bits (wgmma.cuh), but
// fewer than rounding keys to e4m3 does.
#pragma once
#include "keys.cuh"
#include "numbers/two_terms.cuh"

namespace mla::hopper {

template <typename C>
struct ManyRowsFp8KeysE4m3 {
    using Values = ManyRowsFp8Values<C>;
    using Element = typename C::Element;
    using Scores = typename Values::Scores;
    using Blocks = typename Values::Blocks;
    using Weights = ExactWeights<C>;
    struct Memory {};
    static constexpr int kScores = Values::kScores;
    static constexpr bool kHasUnits = false;

    ConsumerThread<C>& t;
    Values values;

    __device__ ManyRowsFp8KeysE4m3(ConsumerThread<C>& t, ProductMemory<C>& products, Memory&)
        : t(t), values{t, products} {}

    // Converts queries to terms, in place. By both consumers: 8 threads have a row and the one 32 rows further on.
    __device__ void prepare_queries(float scale) {
        const int own = pinned(static_cast<int>(threadIdx.x) - 128), row = own / 8, vector = own % 8;
        uint4 words[2][C::kQueryColumnBlocks];
        float factors[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const unsigned char* from = t.rings.q[0] + (row + k * 32) * 128 + (vector ^ row % 8) * 16;
            factors[k] = values.template load_query_row<7>(words[k], from, row + k * 32, scale);
        }
        t.sync_consumers();  // all have read the queries
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            unsigned char* to =
                t.rings.q[0] + (row / 8 + k * 4) * 512 + vector_offset<64>(row % 8, vector / 2) + vector % 2 * 8;
#pragma unroll
            for (int i = 0; i < C::kQueryColumnBlocks; ++i, to += C::kQueryColumnBlockBytes) {
                const uint4& eight = words[k][i];
                const auto first = TwoTerms::of_query<Element>(eight.x, eight.y, factors[k]);
                const auto second = TwoTerms::of_query<Element>(eight.z, eight.w, factors[k]);
                *reinterpret_cast<uint2*>(to) = make_uint2(first.high, second.high);
                *reinterpret_cast<uint2*>(to + C::kRows * 64) = make_uint2(first.low, second.low);
            }
        }
    }

    // S^T = K Q^T over a tile.
    __device__ void scores(Scores& s, uint32_t tile, int /*remaining*/) {
        const uint64_t keys = uniform(make_descriptor(values.keys_of(tile), 0, C::kTokenGroupBytes, Swizzle::k64B));
        const uint64_t queries = uniform(make_descriptor(t.rings.q[0], 0, 512, Swizzle::k64B));
        float terms[2 * kScores];  // products with high terms, then those with low ones
#pragma unroll
        for (int b = 0; b < C::kQueryColumnBlocks; ++b) {
            if (b % C::kBarrierSegments == 0) {
                values.wait_for_segment(tile, b);
                if constexpr (!C::kTma) fence_async_proxy();
            }
            if (b == 0) t.profiler.mark(Event::kKeysArrived);
            wgmma_fence();
#pragma unroll
            for (int column = 0; column < min(C::kDim - b * 64, 64); column += 32)
                WgmmaE4m3<2 * C::kRows>::mma(terms, advance(keys, b * C::kSegmentBytes + column),
                                             advance(queries, b * C::kQueryColumnBlockBytes + column),
                                             b > 0 || column > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin_registers(terms);
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = sum_of_terms(terms[i], terms[kScores + i]);
        t.profiler.mark(Event::kScores);
    }

    // O^T += V^T P^T over a tile, and releases it.
    template <bool kOwn>
    __device__ void accumulate(Blocks& o, uint32_t tile) {
        values.multiply_values(o, tile, [](auto&, int) {});
    }

    // Of the whole cache. Read before the queries arrive, as it takes as long.
    __device__ float cache_scale() const { return *t.p.kv_scale; }
};

}  // namespace mla::hopper
