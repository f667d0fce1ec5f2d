// What a consumer of swapped.cuh does otherwise with e4m3 keys: both products of a tile by mma.sync, on fragments in
// registers (fp8.cuh), and queries in fp16, which the consumers convert in place when they have arrived.
//
// A warp has the same tokens of S^T and the same columns of O^T as with wgmma, in the same registers.
#pragma once
#include "fp8.cuh"
#include "swapped_products.cuh"

namespace mla::sm90 {

// S has, beside what swapped_epilogue.cuh says, `score_scales` [kQueryBuffers][kRows]: a product times this is a score
// in log2.
template <typename C, typename S>
struct SwappedProductsFp8 : SwappedDefaults<C, S> {
    using Base = SwappedDefaults<C, S>;
    using Base::Base;
    using Base::kScores, Base::kRowGroups;
    using Base::p, Base::smem, Base::consumer, Base::warp, Base::lane, Base::profiler, Base::o;
    using typename Base::Element;

    // The queries of the first segments stay in registers for a whole work tile. Those of the others are read again for
    // each tile, in a loop: longer code is slower.
    static constexpr int kHeldSegments = C::kHeldSegments, kHeldBlocks = kHeldSegments * C::kSegmentColumnBlocks;
    using QueryFragments = uint32_t[4][2];  // of 8 rows of a column block
    QueryFragments held[kHeldBlocks > 0 ? kHeldBlocks : 1][kRowGroups];

    __device__ float cache_scale() const { return *p.kv_scale; }
    static constexpr int kBlocks = C::Layout::kIsRecord ? C::kDimLatent / 64 : C::kColumnBlocks;  // with e4m3 keys

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
            const QueryRow<Element, kBlocks, C::kQueryColumnBlockBytes> row{smem.q[q_buffer] + r * 128, r % 8};
            const float inverse = row.convert();
            if (lane % 16 == 0) smem.score_scales[q_buffer][r] = scale * inverse;
        }
        Base::sync_consumers();
#pragma unroll
        for (int i = 0; i < kHeldBlocks && i < C::kColumnBlocks; ++i)
#pragma unroll
            for (int j = 0; j < kRowGroups; ++j) load_queries(held[i][j], q_buffer, i, j);
    }

    __device__ void load_queries(QueryFragments& q, int q_buffer, int column_block, int j) const {
        load_query_fragments(q, smem.q[q_buffer] + column_block * C::kQueryColumnBlockBytes + (j * 8 + lane / 4) * 128);
    }

    // Accumulators of S^T, in turn: products need not wait for those before.
    static constexpr int kSums = C::kRows <= 16 ? 4 : 2;

    // Adds the products of a column block to the accumulators in turn; `queries_of(j)` are those of the j-th 8 rows.
    template <int kCount, typename QueriesOf>
    __device__ void add_column_block(float (&sums)[kCount][kScores], const PipelineState<C::kStages>& ring,
                                     int column_block, QueriesOf queries_of) const {
        const unsigned char* keys = smem.kv[ring.stage] + column_block_offset<C>(column_block) +
                                    warp * 2 * C::kTokenGroupBytes + vector_offset<64>(lane / 4, lane % 4);
        uint32_t k[4][4];
        load_key_fragments<C::kTokenGroupBytes>(k, keys, min(C::kDim - column_block * 64, 64));
#pragma unroll
        for (int j = 0; j < kRowGroups; ++j) {
            const QueryFragments& q = queries_of(j);
#pragma unroll
            for (int step = 0; step < 4; ++step) multiply(&sums[step % kCount][j * 4], k[step], q[step]);
        }
    }

    // Adds those of one segment's columns; `queries_of(i, j)` are those of its i-th column block.
    template <typename QueriesOf>
    __device__ void add_segment(float (&sums)[kSums][kScores], const PipelineState<C::kStages>& ring, int segment,
                                QueriesOf queries_of) {
        smem.kv_full[ring.stage][segment].wait(ring.phase);
        if (segment == 0) profiler.mark(Event::kKeysArrived);
#pragma unroll
        for (int i = 0; i < C::kSegmentColumnBlocks; ++i) {
            const int column_block = segment * C::kSegmentColumnBlocks + i;
            if (C::kColumnBlocks % C::kSegments != 0 && column_block >= C::kColumnBlocks) break;
            add_column_block(sums, ring, column_block,
                             [&](int j) -> const QueryFragments& { return queries_of(i, j); });
        }
    }

    // S^T = K Q^T over a tile, in log2.
    __device__ void compute_scores(float (&s)[kScores], const PipelineState<C::kStages>& ring, int q_buffer) {
        float sums[kSums][kScores] = {};
#pragma unroll
        for (int segment = 0; segment < kHeldSegments; ++segment)
            add_segment(sums, ring, segment, [&](int i, int j) -> const QueryFragments& {
                return held[segment * C::kSegmentColumnBlocks + i][j];
            });
#pragma unroll 1
        for (int segment = kHeldSegments; segment < C::kSegments; ++segment) {
            QueryFragments q;
            add_segment(sums, ring, segment, [&](int i, int j) -> const QueryFragments& {
                load_queries(q, q_buffer, segment * C::kSegmentColumnBlocks + i, j);
                return q;
            });
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

    // O^T += V^T P^T over a tile, two column blocks and 32 tokens at a time.
    __device__ void accumulate(const unsigned char* kv, const unsigned char* probabilities) {
        constexpr int kBlocksAtOnce = 2;
        constexpr int kOctetBytes = C::kTile / 8 * 128;  // of P, of 8 rows
        const uint32_t values = smem_address(kv) + lane / 8 * C::kTokenGroupBytes + vector_offset<64>(lane % 8, warp);
        const uint32_t rows = smem_address(probabilities) + lane * 16;
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {  // of the tokens
            uint32_t weights[kRowGroups][2][2];
#pragma unroll
            for (int block = 0; block < C::kBlocks; block += kBlocksAtOnce) {
                const int copy = C::kWeightCopies > 1 ? block * 64 / C::Layout::kScaleColumns : 0;
                if (block == 0 || copy > 0) {
#pragma unroll
                    for (int j = 0; j < kRowGroups; ++j)
                        load_weight_fragments(weights[j],
                                              rows + copy * C::kWeightBytes + j * kOctetBytes + half * 4 * 128);
                }
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

  protected:
    // d += A * B^T: mma.sync's accumulators of 8 rows are ordered as those of wgmma.
    template <typename Factor = __half>
    static __device__ void multiply(float* d, const uint32_t (&a)[4], const uint32_t (&b)[2]) {
        sm80::mma<Factor>(reinterpret_cast<float (&)[4]>(*d), a, b[0], b[1]);
    }
};

}  // namespace mla::sm90
