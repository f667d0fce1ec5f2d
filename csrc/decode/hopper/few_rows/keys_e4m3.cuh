// What a consumer of few_rows does with e4m3 keys, which the tensor cores multiply without conversion. Queries and P
// become sums of two e4m3, a high and a low term (two_terms.cuh), which are rows of the same product: N is twice the
// number of rows.
//
//   S^T[tokens x 2 rows] = K * (Q high, Q low)^T        A = K, from shared memory
//   O^T[d_c x 2 rows]    = V^T * (P high, P low)^T      A = V^T, from registers, as wgmma takes 8-bit operands K-major
//
// The columns of both terms are added in fp32: of S^T for each column block, of O^T for each tile.
#pragma once
#include "keys.cuh"
#include "numbers/two_terms.cuh"
#include "ptx/wgmma.cuh"

namespace mla::hopper {

template <typename C>
struct FewRowsKeysE4m3 {
    using Element = typename C::Element;
    using Blocks = float[C::kBlocks][C::kRows / 2];
    static constexpr int kScores = C::kRows / 2;
    static constexpr int kLatentBlocks = C::kDimLatent / 64;
    static constexpr int kAwaitedColumns = C::kBarrierSegments * C::kSegmentColumnBlocks * C::kBlockColumns;
    static constexpr int kInFlight = C::kTma && C::kRows <= 16 ? 3 : 2;       // blocks
    static constexpr int kWeightOctetBytes = C::kTile / 16 * 128;             // of P^T, of 8 rows of a term
    static constexpr int kTermsBytes = 2 * C::kRows / 8 * kWeightOctetBytes;  // of both terms
    using Terms = float[2 * kScores];  // the high terms' products, then the low ones'
    using Product = WgmmaE4m3<2 * C::kRows>;

    struct Memory {
        // Of a consumer: [term][kRows / 8][kTile / 16] core matrices of 8 rows of 16 B: tokens 0, 8, 1, 9 and so on
        // of 16.
        unsigned char weights[2][C::kWeightBuffers][C::kWeightBytes];
        alignas(1024) unsigned char query_terms[C::kQueryTermBytes];  // [column block][2 kRows rows][64 B], swizzled
    };
    struct Scales {
        float score_scales[C::kQueryBuffers][C::kRows];  // a product times this is a score in log2
        float kv_scale;                                  // of the cache; 1 for records
        float largest_scales[2];                         // of each consumer's keys: no scale exceeds it
    };

    ConsumerThread<C>& t;
    Memory& memory;
    Scales& scales;

    __device__ FewRowsKeysE4m3(ConsumerThread<C>& t, Memory& memory, Scales& scales)
        : t(t), memory(memory), scales(scales) {}

    // Read before the queries arrive, as it takes as long.
    __device__ float cache_scale() const { return *t.p.kv_scale; }

    // By both consumers: makes terms of the queries of a work tile.
    __device__ void prepare_queries(int q_buffer, float kv_scale) {
        if (threadIdx.x == 128) {
            scales.kv_scale = kv_scale;
            for (float& largest : scales.largest_scales) largest = C::Layout::kScale == Scale::kTensor ? kv_scale : 0.f;
        }
        const float scale = t.p.scale_log2 * kv_scale;
#pragma unroll 1
        for (int r = (threadIdx.x - 128) / 16; r < C::kRows; r += kConsumerThreads / 16) {
            const float inverse =
                QueryTerms<Element, C, C::kFp8Blocks>::convert(t.rings.q[q_buffer], memory.query_terms, r);
            if (t.lane % 16 == 0) scales.score_scales[q_buffer][r] = scale * inverse;
        }
        fence_async_proxy();
        t.sync_consumers();
    }

    __device__ void scores_are_known(const unsigned char*, int) const {}
    __device__ void publish_weights() const { fence_async_proxy(); }

    // In what O^T is counted, and the bound of all values (TransposedOutput::prepare).
    __device__ float output_unit() const { return scales.kv_scale * (1.f / C::kWeightScale); }
    __device__ float largest_value() const {
        return kE4m3Max * fmaxf(scales.largest_scales[0], scales.largest_scales[1]);
    }

    // S^T = K Q^T over a tile, in log2.
    __device__ void scores(float (&s)[kScores], const PipelineState<C::kStages>& ring, int q_buffer) {
        multiply_keys(ring, [&](int block, int i, float product) { s[i] = block == 0 ? product : s[i] + product; });
        t.profiler.mark(Event::kScores);
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] *= scales.score_scales[q_buffer][row_of(t.lane, row_of_score(i))];
    }

    // Zeroes the values of the tokens from `valid` on, in this warp's columns, which no other warp reads: what was not
    // loaded may be NaN.
    __device__ void zero_values(unsigned char* kv, int valid) const {
        __syncwarp();
        for (int token = valid + t.lane / kLatentBlocks; token < C::kTile; token += 32 / kLatentBlocks)
            *reinterpret_cast<uint4*>(kv + token / 8 * C::kTokenGroupBytes +
                                      vector_further_on<C>(vector_offset<C::kBlockBytes>(token % 8, t.warp),
                                                           t.lane % kLatentBlocks * 64)) = make_uint4(0, 0, 0, 0);
        fence_async_proxy();  // the copy engine writes there next
        __syncwarp();
    }

    __device__ void store_weights(unsigned char* target, int j, const float (&e)[4]) const {
        store_weight_terms(target + j * kWeightOctetBytes, e, C::kWeightScale, C::kWeightScale);
    }

    // O^T += V^T P^T over a tile.
    __device__ void accumulate(Blocks& o, const unsigned char* kv, const unsigned char* weights) {
        multiply_values<C::kBlocks>(kv, weights, [&](int block, int i, float product) { o[block][i] += product; });
    }

    // Multiplies the tile's keys: `add(column block, i, product)` takes a block's product for score i.
    template <typename Add>
    __device__ void multiply_keys(const PipelineState<C::kStages>& ring, Add add) {
        const uint64_t k_descriptor =
            uniform(make_descriptor(t.rings.kv[ring.stage], 0, C::kTokenGroupBytes, kKeySwizzle<C>));
        const uint64_t q_descriptor = uniform(make_descriptor(memory.query_terms, 0, 512, Swizzle::k64B));
        Terms sums[kInFlight];
#pragma unroll
        for (int b = 0; b < C::kFp8Blocks + kInFlight - 1; ++b) {
            if (b < C::kFp8Blocks) {
                if (b * 64 % kAwaitedColumns == 0) wait_for_keys(ring, b * 64 / kAwaitedColumns);
                wgmma_fence();
#pragma unroll
                for (int column = b * 64; column < min((b + 1) * 64, C::kDim); column += 32)
                    Product::mma(sums[b % kInFlight],
                                 advance(k_descriptor, column_block_offset<C>(column) + offset_in_block<C>(column)),
                                 advance(q_descriptor, b * C::kQueryColumnBlockBytes + column % 64), column > b * 64);
                wgmma_commit();
            }
            take_sums<C::kFp8Blocks>(b, sums, add);
        }
    }

    __device__ void wait_for_keys(const PipelineState<C::kStages>& ring, int barrier) {
        t.rings.kv_full[ring.stage][barrier].wait(ring.phase);
        if constexpr (!C::kTma) fence_async_proxy();
        if (barrier == 0) t.profiler.mark(Event::kKeysArrived);
    }

    // Multiplies the tile's values: `add(m64 block, i, product)` takes a block's product for accumulator i. Every
    // kBlocksOfWeights blocks have a P^T of their own.
    template <int kBlocksOfWeights, typename Add>
    __device__ void multiply_values(const unsigned char* kv, const unsigned char* weights, Add add) {
        const uint64_t p_descriptor = uniform(make_descriptor(weights, 128, kWeightOctetBytes, Swizzle::kNone));
        const uint32_t values =
            smem_address(kv) + t.lane / 8 * C::kTokenGroupBytes + vector_offset<C::kBlockBytes>(t.lane % 8, t.warp);
        Terms sums[kInFlight];
        uint32_t words[2][4], fragments[kInFlight][2][4];  // of 32 tokens each
        auto load = [&](int block) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                load_matrices_transposed(words[half],
                                         vector_further_on<C>(values, block * 64) + half * 4 * C::kTokenGroupBytes);
        };
        load(0);
#pragma unroll
        for (int b = 0; b < C::kBlocks + kInFlight - 1; ++b) {
            if (b < C::kBlocks) {
                auto& v = fragments[b % kInFlight];
                make_value_fragment(v[0], words[0]);
                make_value_fragment(v[1], words[1]);
                wgmma_fence();
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    Product::mma(sums[b % kInFlight], v[half],
                                 advance(p_descriptor, b / kBlocksOfWeights * kTermsBytes + half * 256), half > 0);
                wgmma_commit();
                if (b + 1 < C::kBlocks) load(b + 1);
            }
            take_sums<C::kBlocks>(b, sums, add);
        }
        __syncwarp();  // lane 0 releases the tile for all lanes
        t.profiler.mark(Event::kValues);
    }

    // When block `b` of kCount has been started: waits for the one that has been in flight longest, and adds its terms.
    template <int kCount, typename Add>
    static __device__ void take_sums(int b, Terms (&sums)[kInFlight], Add add) {
        const int done = b - (kInFlight - 1);
        if (done < 0) return;
        if (b < kCount)
            wgmma_wait<kInFlight - 1>();
        else
            wgmma_wait<0>();
        Terms& terms = sums[done % kInFlight];
        pin_registers(terms);
#pragma unroll
        for (int i = 0; i < kScores; ++i) add(done, i, sum_of_terms(terms[i], terms[kScores + i]));
    }

    // Stores a warp's 16 tokens of 8 rows of P^T, times a factor for each of a thread's tokens. A thread has two of
    // them, 8 apart, of two rows, and stores them as one element of 16 bits.
    __device__ void store_weight_terms(unsigned char* target, const float (&e)[4], float first, float second) const {
        const auto terms =
            TwoTerms::of(pack<__half>(e[0] * first, e[2] * second), pack<__half>(e[1] * first, e[3] * second));
        const uint32_t row =
            smem_address(target) + t.lane / 8 % 2 * (C::kRows / 8 * kWeightOctetBytes) + t.warp * 128 + t.lane % 8 * 16;
        store_matrices_transposed(row, terms.high, terms.low);
    }
};

}  // namespace mla::hopper
