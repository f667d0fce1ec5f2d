// What a consumer of swapped.cuh does otherwise with e4m3 keys: both products of a tile by mma.sync, on fragments in
// registers (fp8.cuh), and queries in fp16, which the consumers convert in place when they have arrived.
//
// The four warps of a consumer divide the latent columns, not the tokens: with 512 latents a warp has 128 columns of
// all keys of a tile, for both products. So no warp reads what another one reads but P, and the queries of its columns
// stay in its registers. Of S^T, a warp then needs what the others have of its 16 tokens:
//
//   multiply the keys in the warp's columns    64 tokens, 16 at a time; of the others' tokens, send the sums (fp32)
//   multiply the rotary columns                of its own 16 tokens, by all rotary columns
//   sync_consumer, add what was received       now it has S^T of its tokens, as with wgmma: softmax
//   multiply the values in the warp's columns  by P^T of all 64 tokens
#pragma once
#include "fp8.cuh"
#include "swapped_products.cuh"

namespace mla::sm90 {

// What the other three warps send a warp: their sums for its 16 tokens, as they have them.
template <typename C>
struct SumsOfWarps {
    float4 of_warp[4][3][C::kRows / 8][32];
};

// S has, beside what swapped_epilogue.cuh says, `score_scales` [kQueryBuffers][kRows]: a product times this is a score
// in log2.
template <typename C, typename S>
struct SwappedProductsFp8 : SwappedDefaults<C, S> {
    using Base = SwappedDefaults<C, S>;
    using Base::Base;
    using Base::kScores, Base::kRowGroups;
    using Base::p, Base::smem, Base::consumer, Base::warp, Base::lane, Base::profiler, Base::o;
    using typename Base::Element;

    static constexpr int kWarps = 4;
    static constexpr int kLatentBlocks = C::kDimLatent / 64, kWarpBlocks = kLatentBlocks / kWarps;
    const int first_block = warp * kWarpBlocks;  // of this warp's columns

    // The queries of this warp's columns stay in registers for a whole work tile if there are so many.
    static constexpr bool kHoldsQueries = C::kRows <= 16;
    using QueryFragments = uint32_t[4][2];  // of 8 rows of a column block
    QueryFragments queries[kHoldsQueries ? kWarpBlocks : 1][kRowGroups];

    __device__ float cache_scale() const { return *p.kv_scale; }
    static constexpr int kBlocks = C::Layout::kIsRecord ? kLatentBlocks : C::kColumnBlocks;  // with e4m3 keys

    // By both consumers: makes the queries of a work tile what e4m3 keys are multiplied by.
    __device__ void prepare_queries(int q_buffer, float kv_scale) {
        if (threadIdx.x == 128) smem.kv_scale = kv_scale;
        const float scale = p.scale_log2 * kv_scale;
#pragma unroll 1
        for (int r = (threadIdx.x - 128) / 16; r < C::kRows; r += kConsumerThreads / 16) {
            const QueryRow<Element, kBlocks, C::kQueryColumnBlockBytes> row{smem.q[q_buffer] + r * 128, r % 8};
            const float inverse = row.convert();
            if (lane % 16 == 0) smem.score_scales[q_buffer][r] = scale * inverse;
        }
        Base::sync_consumers();
        if constexpr (kHoldsQueries) {
#pragma unroll
            for (int i = 0; i < kWarpBlocks; ++i) load_queries(queries[i], q_buffer, first_block + i);
        }
    }

    __device__ void load_queries(QueryFragments (&q)[kRowGroups], int q_buffer, int column_block) const {
#pragma unroll
        for (int j = 0; j < kRowGroups; ++j)
            load_query_fragments(
                q[j], smem.q[q_buffer] + column_block * C::kQueryColumnBlockBytes + (j * 8 + lane / 4) * 128);
    }

    // S^T = K Q^T over a tile, in log2.
    __device__ void compute_scores(float (&s)[kScores], const PipelineState<C::kStages>& ring, int q_buffer) {
        wait_for_keys(ring);
        multiply_latents(s, ring.stage, q_buffer, [](auto&, int) {});
        QueryFragments q[kRowGroups];
        load_queries(q, q_buffer, kLatentBlocks);
        add_column_block<C::kDimRope>(s, lane_keys(ring.stage) + column_block_offset<C>(kLatentBlocks), warp, q);
        receive_sums(s);
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] *= smem.score_scales[q_buffer][Base::column(i / 4 * 2 + i % 2)];
    }

    // Zeroes the values of the tokens from `valid` on, in this warp's columns, which no other warp reads: what was not
    // loaded may be NaN.
    __device__ void zero_values(unsigned char* kv, int valid) const {
        constexpr int kVectors = kWarpBlocks * 4;
        const int vector = lane % kVectors;
        __syncwarp();
        for (int token = valid + lane / kVectors; token < C::kTile; token += 32 / kVectors)
            *reinterpret_cast<uint4*>(kv + token / 8 * C::kTokenGroupBytes + block_offset(vector / 4) +
                                      vector_offset<64>(token % 8, vector % 4)) = make_uint4(0, 0, 0, 0);
        fence_async_proxy();  // the copy engine writes there next
    }

    // O^T += V^T P^T over a tile.
    __device__ void accumulate(const unsigned char* kv, const unsigned char* probabilities) {
        accumulate(kv, probabilities, [](auto&, int) {});
    }

    // O is in units of the cache's scale.
    __device__ float output_unit() const { return smem.kv_scale; }

  protected:
    using WeightFragments = uint32_t[kRowGroups][2][2];  // of P^T, over 32 tokens

    // d += A * B^T: mma.sync's accumulators of 8 rows are ordered as those of wgmma.
    template <typename Factor = __half>
    static __device__ void multiply(float* d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
        sm80::mma<Factor>(reinterpret_cast<float (&)[4]>(*d), a, b[0], b[1]);
    }

    // Bytes from the start of a stage to this warp's i-th column block.
    __device__ uint32_t block_offset(int i) const {
        if constexpr (C::kSegmentColumnBlocks % kWarpBlocks == 0)  // in the segment of the first one
            return column_block_offset<C>(first_block) + i * (8 * C::kBlockBytes);
        else
            return column_block_offset<C>(first_block + i);
    }

    __device__ void wait_for_keys(const PipelineState<C::kStages>& ring) {
#pragma unroll
        for (int segment = 0; segment < C::kSegments; ++segment) smem.kv_full[ring.stage][segment].wait(ring.phase);
        profiler.mark(Event::kKeysArrived);
    }

    // What a lane reads of the first 16 tokens' keys in a column block that begins the stage.
    __device__ const unsigned char* lane_keys(int stage) const {
        return smem.kv[stage] + vector_offset<64>(lane / 4, lane % 4);
    }

    // Adds the products of 16 tokens' keys in a column block, of whose columns kColumns exist.
    template <int kColumns = 64>
    __device__ void add_column_block(float (&sums)[kScores], const unsigned char* keys, int slice,
                                     const QueryFragments (&q)[kRowGroups]) const {
        uint32_t k[4][4];
        load_key_fragments<C::kTokenGroupBytes>(k, keys + slice * 2 * C::kTokenGroupBytes, kColumns);
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int j = 0; j < kRowGroups; ++j) multiply(&sums[j * 4], k[step], q[j][step]);
    }

    // Multiplies the tile's keys in this warp's columns. Of each 16 tokens, `scale(sums, slice)` finishes the sums, and
    // the warp that has these tokens of S^T gets them.
    template <typename Scale>
    __device__ void multiply_latents(float (&own)[kScores], int stage, int q_buffer, Scale scale) {
        constexpr int kAtOnce = kHoldsQueries ? 4 : 2;  // slices of 16 tokens: as many as registers allow
#pragma unroll 1
        for (int first = kWarps - kAtOnce; first >= 0; first -= kAtOnce) {
            float sums[kAtOnce][kScores] = {};
#pragma unroll
            for (int b = 0; b < kWarpBlocks; ++b) {
                if constexpr (!kHoldsQueries) load_queries(queries[0], q_buffer, first_block + b);
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i)
                    add_column_block(sums[i], lane_keys(stage) + block_offset(b), (warp + first + i) % kWarps,
                                     queries[kHoldsQueries ? b : 0]);
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                scale(sums[i], (warp + first + i) % kWarps);
                if (first + i > 0) send_sums(sums[i], first + i);
            }
            if (first > 0) continue;
#pragma unroll
            for (int i = 0; i < kScores; ++i) own[i] = sums[0][i];
        }
    }

    // To the warp that is the `distance`-th behind this one.
    __device__ void send_sums(const float (&sums)[kScores], int distance) const {
#pragma unroll
        for (int j = 0; j < kRowGroups; ++j)
            smem.scratch.tile.sums[consumer].of_warp[(warp + distance) % kWarps][distance - 1][j][lane] =
                make_float4(sums[j * 4], sums[j * 4 + 1], sums[j * 4 + 2], sums[j * 4 + 3]);
    }
    // Adds what the others sent.
    __device__ void receive_sums(float (&s)[kScores]) {
        Base::sync_consumer();
#pragma unroll
        for (int i = 0; i < kWarps - 1; ++i)
#pragma unroll
            for (int j = 0; j < kRowGroups; ++j) {
                const float4 sums = smem.scratch.tile.sums[consumer].of_warp[warp][i][j][lane];
                s[j * 4] += sums.x, s[j * 4 + 1] += sums.y, s[j * 4 + 2] += sums.z, s[j * 4 + 3] += sums.w;
            }
        profiler.mark(Event::kScores);
    }

    // O^T += V^T P^T over a tile, two slices of 16 columns and 32 tokens at a time; `weigh(weights, half)` may change
    // the weights of a half of the tokens.
    template <typename Weigh>
    __device__ void accumulate(const unsigned char* kv, const unsigned char* probabilities, Weigh weigh) {
        constexpr int kSlicesAtOnce = 2;
        constexpr int kOctetBytes = C::kTile / 8 * 128;  // of P, of 8 rows
        const uint32_t values = smem_address(kv) + lane / 8 * C::kTokenGroupBytes;
        const uint32_t rows = smem_address(probabilities) + lane * 16;
#pragma unroll(kHoldsQueries ? 2 : 1)
        for (int half = 0; half < 2; ++half) {  // of the tokens
            WeightFragments weights;
#pragma unroll
            for (int j = 0; j < kRowGroups; ++j)
                load_weight_fragments(weights[j], rows + j * kOctetBytes + half * 4 * 128);
            weigh(weights, half);
#pragma unroll
            for (int slice = 0; slice < C::kBlocks; slice += kSlicesAtOnce) {
                uint32_t v[kSlicesAtOnce][2][4];
#pragma unroll
                for (int b = 0; b < kSlicesAtOnce; ++b)
                    load_value_fragments(v[b], values + half * 4 * C::kTokenGroupBytes + block_offset((slice + b) / 4) +
                                                   vector_offset<64>(lane % 8, (slice + b) % 4));
#pragma unroll
                for (int step = 0; step < 2; ++step)
#pragma unroll
                    for (int b = 0; b < kSlicesAtOnce; ++b)
#pragma unroll
                        for (int j = 0; j < kRowGroups; ++j)
                            multiply(&o[slice + b][j * 4], v[b][step], weights[j][step]);
            }
        }
        __syncwarp();  // lane 0 gives the tile back for all lanes
        profiler.mark(Event::kValues);
    }
};

}  // namespace mla::sm90
