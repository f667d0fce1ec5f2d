// Both products of many_rows_fp8 in e4m3, for e4m3 keys. They take the tensor cores half as long as exact ones, and
// round:
//
//   Q   to one e4m3, relative to a power of two for each row. Of the last kTwoTermBlocks column blocks, among them the
//       rotary columns, what this leaves is rounded, too, and multiplied in the same sum
//   P   to one e4m3, relative to a number that lets it take the whole range
//   V   not at all. The tensor cores cut off bits of e4m3's products (ptx/wgmma.cuh), so the product of a tile's values
//       is a sum of its own, which is added to O^T in fp32
#pragma once
#include "keys.cuh"
#include "numbers/two_terms.cuh"

namespace mla::hopper {

// Four numbers as e4m3, and what this leaves of them.
struct RoundedToE4m3 {
    uint32_t rounded, remainders;

    // From two pairs of a query's neighbouring columns, times a factor.
    template <typename Element>
    static __device__ RoundedToE4m3 of(uint32_t first, uint32_t second, float factor) {
        const Pair a = pair_of(to_halves<Element>(first, factor)), b = pair_of(to_halves<Element>(second, factor));
        return {a.rounded | b.rounded << 16, a.remainders | b.remainders << 16};
    }

  private:
    struct Pair {
        uint32_t rounded, remainders;
    };
    static __device__ Pair pair_of(uint32_t halves) {
        const auto& numbers = reinterpret_cast<const __half2_raw&>(halves);
        const auto rounded = __nv_cvt_halfraw2_to_fp8x2(numbers, __NV_SATFINITE, __NV_E4M3);
        const __half2_raw rest = __hsub2(__half2(numbers), __half2(__nv_cvt_fp8x2_to_halfraw2(rounded, __NV_E4M3)));
        return {rounded, __nv_cvt_halfraw2_to_fp8x2(rest, __NV_SATFINITE, __NV_E4M3)};
    }
};

// P^T in e4m3; otherwise as ExactWeights. Sums are those of rounded weights: where many weights are alike, so are their
// errors, which then cancel in the output.
template <typename C>
struct RoundedWeights {
    // In log2. e4m3 holds 2^8.8, so weights may grow by 2^3.8 before the maximum is refreshed. A larger headroom would
    // leave more range to small weights, but be used up more often.
    static constexpr float kHeadroom = 5.f;
    static constexpr float kLargest = 447.f;  // a weight that does not fit becomes 448
    // As in few_rows/kernel.cuh.
    static constexpr bool kFalls = true;
    static constexpr float kFar = 7.f, kFall = 12.f;
    static constexpr int kMostFalls = 6;
    static constexpr int kOctetBytes = C::kTile / 16 * 128;
    using Octet = uint32_t;

    static __device__ uint32_t place(const ConsumerThread<C>& t) {
        return t.lane / 8 * kOctetBytes + t.warp * 128 + t.lane % 8 * 16;
    }
    static __device__ Octet of(const float (&e)[4], const float (&)[2], float& first, float& second) {
        const auto first_token = rounded(e[0], e[1]), second_token = rounded(e[2], e[3]);
        const float2 sums = __half22float2(__hadd2(halves(first_token), halves(second_token)));
        first = sums.x, second = sums.y;
        return __byte_perm(first_token, second_token, 0x5140);
    }
    static __device__ void store(uint32_t address, const Octet (&octets)[4]) {
        store_matrices_transposed(address, octets[0], octets[1], octets[2], octets[3]);
    }

  private:
    static __device__ __nv_fp8x2_storage_t rounded(float first, float second) {
        return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
    }
    static __device__ __half2 halves(__nv_fp8x2_storage_t pair) { return __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3); }
};

template <typename C>
struct ManyRowsFp8KeysE4m3Products {
    using Values = ManyRowsFp8Values<C>;
    using Element = typename C::Element;
    using Scores = typename Values::Scores;
    using Blocks = typename Values::Blocks;
    using Weights = RoundedWeights<C>;
    using Product = WgmmaE4m3<C::kRows>;
    struct Memory {};
    static constexpr int kScores = Values::kScores, kConsumerBlocks = Values::kConsumerBlocks;
    static constexpr bool kHasUnits = false;
    static constexpr int kTermBytes = C::kRows * 64;  // of a column block of queries
    static constexpr int kFirstTwoTermBlock = C::kQueryColumnBlocks - C::kTwoTermBlocks;
    static_assert(C::kTwoTermBlocks <= C::kQueryColumnBlocks);

    ConsumerThread<C>& t;
    Values values;

    __device__ ManyRowsFp8KeysE4m3Products(ConsumerThread<C>& t, ProductMemory<C>& products, Memory&)
        : t(t), values{t, products} {}

    // Rounds queries, in place: [column block][64 rows][64 B], K-major, swizzled, then remainders likewise. By both
    // consumers: 8 threads have a row and the one 32 rows further on.
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
            for (int b = 0; b < C::kQueryColumnBlocks; ++b) {
                const uint4& eight = words[k][b];
                const auto first = RoundedToE4m3::of<Element>(eight.x, eight.y, factors[k]);
                const auto second = RoundedToE4m3::of<Element>(eight.z, eight.w, factors[k]);
                *reinterpret_cast<uint2*>(to + b * kTermBytes) = make_uint2(first.rounded, second.rounded);
                if (b >= kFirstTwoTermBlock)
                    *reinterpret_cast<uint2*>(to + (b + C::kTwoTermBlocks) * kTermBytes) =
                        make_uint2(first.remainders, second.remainders);
            }
        }
    }

    // S^T = K Q^T over a tile.
    __device__ void scores(Scores& s, uint32_t tile, int /*remaining*/) {
        const uint64_t keys = uniform(make_descriptor(values.keys_of(tile), 0, C::kTokenGroupBytes, Swizzle::k64B));
        const uint64_t queries = uniform(make_descriptor(t.rings.q[0], 0, 512, Swizzle::k64B));
#pragma unroll
        for (int b = 0; b < C::kQueryColumnBlocks; ++b) {
            if (b % C::kBarrierSegments == 0) {
                values.wait_for_segment(tile, b);
                if constexpr (!C::kTma) fence_async_proxy();
            }
            if (b == 0) t.profiler.mark(Event::kKeysArrived);
            wgmma_fence();
#pragma unroll
            for (int column = 0; column < min(C::kDim - b * 64, 64); column += 32) {
                const uint64_t a = advance(keys, b * C::kSegmentBytes + column);
                Product::mma(s, a, advance(queries, b * kTermBytes + column), b > 0 || column > 0);
                if (b >= kFirstTwoTermBlock)
                    Product::mma(s, a, advance(queries, (b + C::kTwoTermBlocks) * kTermBytes + column), true);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin_registers(s);
        t.profiler.mark(Event::kScores);
    }

    // O^T += V^T P^T over a tile, and releases it. The products of kSums m64 blocks are in flight: of the own tile, as
    // its scores have left their registers, two.
    template <bool kOwn>
    __device__ void accumulate(Blocks& o, uint32_t tile) {
        constexpr int kSums = 1;
        const uint64_t weights =
            uniform(make_descriptor(values.memory.weights[tile % 2], 128, Weights::kOctetBytes, Swizzle::kNone));
        float sums[kSums][kScores];
        uint32_t words[2][4], fragments[2][2][4];  // of two blocks, each of 32 tokens
        values.load_values(words, tile, 0);
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b) {
            auto& f = fragments[b % 2];
            if (kSums == 2 && b >= 2) add_product<1>(o[b - 2], sums[b % 2]);  // `f` have been multiplied
            make_value_fragment(f[0], words[0]);
            make_value_fragment(f[1], words[1]);
            if (kSums == 1 && b >= 1) add_product<0>(o[b - 1], sums[0]);
            wgmma_fence();
#pragma unroll
            for (int half = 0; half < 2; ++half)
                Product::mma(sums[b % kSums], f[half], advance(weights, half * 256), half > 0);
            wgmma_commit();
            if (b + 1 < kConsumerBlocks)
                values.load_values(words, tile, b + 1);
            else
                values.release(tile);
        }
        if constexpr (kSums == 2) add_product<1>(o[kConsumerBlocks - 2], sums[0]);
        add_product<0>(o[kConsumerBlocks - 1], sums[kSums - 1]);
        t.profiler.mark(Event::kValues);
    }

    // Of the whole cache. Read before the queries arrive, as it takes as long.
    __device__ float cache_scale() const { return *t.p.kv_scale; }

  private:
    // Adds the product of a block, when all but the last kInFlight ones have been computed.
    template <int kInFlight>
    static __device__ void add_product(float (&o)[kScores], float (&sums)[kScores]) {
        wgmma_wait<kInFlight>();
        pin_registers(sums);
#pragma unroll
        for (int i = 0; i < kScores; ++i) o[i] += sums[i];
    }
};

}  // namespace mla::hopper
