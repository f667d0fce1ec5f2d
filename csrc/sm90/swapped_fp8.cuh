// What a consumer of swapped.cuh does otherwise with e4m3 keys: both products of a tile by mma.sync, on fragments in
// registers (fp8.cuh), and queries in fp16, which the consumers convert in place when they have arrived.
//
// A warp has the same tokens of S^T and the same columns of O^T as with wgmma, in the same registers.
#pragma once
#include "fp8.cuh"
#include "swapped_epilogue.cuh"

namespace mla::sm90 {

// S has, beside what swapped_epilogue.cuh says, `score_scales` [kQueryBuffers][kRows]: a product times this is a score
// in log2.
template <typename C, typename S>
struct SwappedProductsFp8 : SwappedEpilogue<C, S> {
    using Base = SwappedEpilogue<C, S>;
    using Base::Base;
    using Base::kScores, Base::kRowGroups;
    using Base::p, Base::smem, Base::consumer, Base::warp, Base::lane, Base::profiler, Base::o;
    using typename Base::Element;

    // With 32 rows there are no registers to compute ahead.
    static constexpr int kUnrolledSegments = C::kRows <= 24 ? C::kSegments : 1,
                         kUnrolledHalves = C::kRows <= 24 ? 2 : 1;
    // The first column blocks of the queries stay in registers for a whole work tile.
    static constexpr int kHeldBlocks = C::kHeldBlocks;
    uint32_t held[kHeldBlocks > 0 ? kHeldBlocks : 1][kRowGroups][4][2];

    // Before the queries have arrived.
    __device__ float cache_scale() const { return *p.kv_scale; }

    __device__ const unsigned char* query_row(int q_buffer) const { return smem.q[q_buffer] + lane / 4 * 128; }
    __device__ static int offset_of_queries(int column_block, int j) {
        return column_block * C::kQueryColumnBlockBytes + j * 8 * 128;
    }

    // By both consumers: makes the queries of a work tile what e4m3 keys are multiplied by.
    __device__ void prepare_queries(int q_buffer, float kv_scale) {
        if (threadIdx.x == 128) smem.kv_scale = kv_scale;
        const float scale = p.scale_log2 * kv_scale;
#pragma unroll 1
        for (int r = (threadIdx.x - 128) / 16; r < C::kRows; r += kConsumerThreads / 16) {
            const QueryRow<Element, C::kColumnBlocks, C::kQueryColumnBlockBytes> row{smem.q[q_buffer] + r * 128, r % 8};
            const float inverse = row.convert();
            if (lane % 16 == 0) smem.score_scales[q_buffer][r] = scale * inverse;
        }
        Base::sync_consumers();
#pragma unroll
        for (int i = 0; i < kHeldBlocks; ++i)
#pragma unroll
            for (int j = 0; j < kRowGroups; ++j)
                load_query_fragments(held[i][j], query_row(q_buffer) + offset_of_queries(i, j));
    }

    // S^T = K Q^T over a tile, in log2.
    __device__ void compute_scores(float (&s)[kScores], const PipelineState<C::kStages>& ring, int q_buffer) {
        // Accumulators, in turn: products need not wait for those before.
        constexpr int kSums = C::kRows <= 16 ? 4 : C::kRows == 24 ? 2 : 1;
        float sums[kSums][kScores] = {};
        const unsigned char* keys =
            smem.kv[ring.stage] + warp * 2 * C::kTokenGroupBytes + vector_offset<64>(lane / 4, lane % 4);
        const unsigned char* queries = query_row(q_buffer);
#pragma unroll kUnrolledSegments
        for (int segment = 0; segment < C::kSegments; ++segment) {
            smem.kv_full[ring.stage][segment].wait(ring.phase);
            if (segment == 0) profiler.mark(Event::kKeysArrived);
#pragma unroll
            for (int i = 0; i < C::kSegmentColumnBlocks; ++i) {
                const int column_block = segment * C::kSegmentColumnBlocks + i;
                if (C::kColumnBlocks % C::kSegments != 0 && column_block >= C::kColumnBlocks) break;
                uint32_t k[4][4];
                load_key_fragments<C::kTokenGroupBytes>(k, keys + column_block_offset<C>(column_block),
                                                        min(C::kDim - column_block * 64, 64));
#pragma unroll
                for (int j = 0; j < kRowGroups; ++j) {
                    uint32_t q[4][2];
                    if (column_block >= kHeldBlocks)
                        load_query_fragments(q, queries + offset_of_queries(column_block, j));
                    auto& fragments = column_block < kHeldBlocks ? held[column_block][j] : q;
#pragma unroll
                    for (int step = 0; step < 4; ++step) multiply(&sums[step % kSums][j * 4], k[step], fragments[step]);
                }
            }
        }
        profiler.mark(Event::kScores);
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
#pragma unroll
            for (int sum = 1; sum < kSums; ++sum) sums[0][i] += sums[sum][i];
            s[i] = sums[0][i] * smem.score_scales[q_buffer][Base::column(i / 4 * 2 + i % 2)];
        }
    }

    // Zeroes the values of this warp's tokens from `valid` on, which only this warp has read for scores: what was not
    // loaded may be NaN.
    __device__ void zero_values(unsigned char* kv, int valid) const {
        constexpr int kVectors = C::kDimLatent / 16;
        __syncwarp();
        for (int token = max(valid, warp * 16); token < (warp + 1) * 16; ++token)
            for (int vector = lane; vector < kVectors; vector += 32)
                *reinterpret_cast<uint4*>(kv + token / 8 * C::kTokenGroupBytes + column_block_offset<C>(vector / 4) +
                                          vector_offset<64>(token % 8, vector % 4)) = make_uint4(0, 0, 0, 0);
        fence_async_proxy();  // the copy engine writes there next
    }

    __device__ void publish_probabilities() const {}

    // O^T += V^T P^T over a tile, two column blocks and 32 tokens at a time.
    __device__ void accumulate(const unsigned char* kv, const unsigned char* probabilities) {
        constexpr int kBlocksAtOnce = C::kRows <= 24 ? 2 : 1;
        constexpr int kOctetBytes = C::kTile / 8 * 128;  // of P, of 8 rows
        const uint32_t values = smem_address(kv) + lane / 8 * C::kTokenGroupBytes + vector_offset<64>(lane % 8, warp);
        const uint32_t rows = smem_address(probabilities) + lane * 16;
#pragma unroll kUnrolledHalves
        for (int half = 0; half < 2; ++half) {  // of the tokens
            uint32_t weights[kRowGroups][2][2];
#pragma unroll
            for (int j = 0; j < kRowGroups; ++j)
                load_weight_fragments(weights[j], rows + j * kOctetBytes + half * 4 * 128);
#pragma unroll
            for (int block = 0; block < C::kBlocks; block += kBlocksAtOnce) {
                uint32_t v[kBlocksAtOnce][2][4];
#pragma unroll
                for (int b = 0; b < kBlocksAtOnce; ++b)
                    load_value_fragments(v[b],
                                         values + half * 4 * C::kTokenGroupBytes + column_block_offset<C>(block + b));
#pragma unroll
                for (int step = 0; step < 2; ++step)
#pragma unroll
                    for (int b = 0; b < kBlocksAtOnce; ++b)
#pragma unroll
                        for (int j = 0; j < kRowGroups; ++j)
                            multiply(&o[block + b][j * 4], v[b][step], weights[j][step]);
            }
        }
        __syncwarp();  // lane 0 gives the tile back for all lanes
        profiler.mark(Event::kValues);
    }

    // Ends a work tile: O is in units of the cache's scale.
    __device__ void scale_output() {
#pragma unroll
        for (int b = 0; b < C::kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < kScores; ++i) o[b][i] *= smem.kv_scale;
    }

  private:
    // d += A * B^T: mma.sync's accumulators of 8 rows are ordered as those of wgmma.
    static __device__ void multiply(float* d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
        sm80::mma<__half>(reinterpret_cast<float (&)[4]>(*d), a, b[0], b[1]);
    }
};

}  // namespace mla::sm90
