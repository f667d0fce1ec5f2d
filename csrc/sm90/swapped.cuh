// MLA decode for Hopper, up to 24 rows (query heads x query tokens) a block: the operands are swapped.
//
//   S^T[tokens x rows] = K[tokens x d] * Q^T        A = K, B = Q: wgmma's 64-row side holds tokens, and N is the
//   O^T[d_c x rows]   += V^T[d_c x tokens] * P^T    number of rows rounded up to 8, so few heads waste nothing.
//
// grid   at most one persistent CTA per SM, walking the range that the planner gave it (common/work.cuh); in clusters
//        of two where there may be pairs (consumer.cuh)
// block  3 warpgroups: one loads (loader.cuh), two compute
//   consumers  take alternate tiles of kTile tokens, each with its own O^T, m and l: no traffic between the two
//              inside an m-block. At its end each finishes half of the d_c columns (`finish_entry`).
//
// shared memory (SwappedSharedMemory)
//   kv       kStages tiles of kTile tokens, in kSegments parts of their columns, each in groups of 8 tokens:
//            [d / 64][8][128 B], swizzled by 128 B. The same bytes are K (K-major: a group is 8 rows of M) and V^T
//            (MN-major: a group is 8 values of K).
//   q        kQueryBuffers x [d / 64][N][128 B], K-major, swizzled
//   p        per consumer 2 x [N / 8][kTile / 8] core matrices of 8 x 8, K-major, not swizzled; the same bytes are
//            the exchange buffer of `finish_entry`
//
// softmax  A column's maximum lives in all four warps. Exponentials use a maximum that may be stale by up to 8 (log2):
//          P then stays below 2^8, and fp32 sums and 16-bit P keep their relative precision. One barrier per tile
//          both publishes P and tells whether any score exceeded that bound; only then is the maximum refreshed
//          and O rescaled.
//
// invariants
//   * of keys outside [token_begin, token_end) only those are loaded that share a page with one inside; they are
//     masked in S and zeroed in V (0 x NaN is NaN)
//   * splits of a split m-block wait for each other (common/combine.cuh; pairs: consumer.cuh) only after all their
//     own work
//   * a fixed order everywhere: the same inputs and plan give the same bits
#pragma once
#include "consumer.cuh"

namespace mla::sm90 {

template <typename Element_, int kDimLatent_, int kDimRope_, int kRows_, int kStages_, int kQueryBuffers_, bool kTma_,
          bool kProfile_>
struct SwappedConfig {
    using Element = Element_;
    static constexpr int kDimLatent = kDimLatent_;
    static constexpr int kDimRope = kDimRope_;
    static constexpr int kDim = kDimLatent + kDimRope;
    static constexpr int kRows = kRows_;  // N
    static constexpr int kTile = 64;
    static constexpr int kStageTokens = kTile;
    static constexpr int kStages = kStages_;
    static constexpr int kQueryBuffers = kQueryBuffers_;
    static constexpr bool kTma = kTma_;
    static constexpr int kSlotStride = kTma ? 8 : 1;
    static constexpr bool kProfile = kProfile_;

    static constexpr int kColumnBlocks = (kDim + 63) / 64;  // of 64 columns = 128 B
    static constexpr int kBlocks = kDimLatent / 64;         // m64 blocks of O^T
    static constexpr int kSegments = 3, kSegmentColumnBlocks = (kColumnBlocks + kSegments - 1) / kSegments;
    static constexpr int kTokenGroupBytes = kSegmentColumnBlocks * 1024, kSegmentBytes = kTile / 8 * kTokenGroupBytes;
    static constexpr int kStageBytes = kSegments * kSegmentBytes;
    static constexpr int kQueryColumnBlockBytes = kRows * 128;
    static constexpr int kQueryBytes = kColumnBlocks * kQueryColumnBlockBytes;
    static constexpr int kColumns = kRows / 4;  // columns of S^T that a thread holds

    static_assert(kRows % 8 == 0 && kRows <= 24);  // O^T has to fit in registers
    static_assert(kDim % 32 == 0 && kDimLatent % 128 == 0);
};

template <typename C>
struct SwappedSharedMemory {
    alignas(1024) unsigned char kv[C::kStages][C::kStageBytes];
    alignas(1024) unsigned char q[C::kQueryBuffers][C::kQueryBytes];
    alignas(1024) union {
        unsigned char p[2][2][C::kTile * C::kRows * 2];
        float4 exchange[2][C::kBlocks / 2 * C::kRows / 8][128];
    } scratch;
    float warp_column[2][5][C::kRows];  // per consumer: a value per warp and column; [4]: one per column
    OutputOffsets<C::kRows> offsets[kOffsetBuffers];
    CtaRange range;
    uint32_t flag;  // this CTA's, when the launch began
    Barrier kv_full[C::kStages][C::kSegments], kv_empty[C::kStages];
    Barrier q_full[C::kQueryBuffers], q_empty[C::kQueryBuffers];
    PairBarriers pair;
};

template <typename C>
using SwappedQuads = Quads<C::kRows, C::kDimLatent, true>;

template <typename C>
struct SwappedConsumer : ConsumerThread<C, SwappedSharedMemory<C>, SwappedQuads<C>> {
    using Element = typename C::Element;
    static constexpr int kColumns = C::kColumns;
    static constexpr int kScores = C::kRows / 2;  // accumulators a thread of one m64 block

    static constexpr int kHalf = C::kBlocks / 2, kQuarter = kHalf / 2;
    using OutputQuads = SwappedQuads<C>;
    using Rows = OutputOffsets<C::kRows>;

    using Base = ConsumerThread<C, SwappedSharedMemory<C>, SwappedQuads<C>>;
    using Base::any_of_own, Base::sync_own, Base::sync_both, Base::key_limit, Base::zero_values;
    using Base::Base;
    using Base::p, Base::smem, Base::consumer, Base::thread, Base::warp, Base::lane, Base::profiler;

    // The fragment of O^T, and per column of this thread the softmax state: the maximum m in use (log2 tiles, the
    // same in all threads of the warpgroup) and this thread's own share of the sum l.
    float o[C::kBlocks][kScores];
    float m[kColumns], l[kColumns];

    __device__ int column(int i) const { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

    __device__ void reset_state() {
#pragma unroll
        for (int b = 0; b < C::kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < kScores; ++i) o[b][i] = 0.f;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            m[i] = -INFINITY;
            l[i] = 0.f;
        }
    }

    static __device__ int column_of_score(int i) { return i / 4 * 2 + i % 2; }

    __device__ void mask(float (&s)[kScores], const WorkTile& work, int tile_token) {
        const int token = tile_token + warp * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            int limit = key_limit(work, column(i));
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (token + half * 8 >= limit) s[i / 2 * 4 + half * 2 + i % 2] = -INFINITY;
        }
    }

    // P^T = exp2(s - m) to shared memory, as 8 x 8 core matrices [row][token].
    __device__ void store_probabilities(const float (&s)[kScores], unsigned char* target, float (&sums)[kColumns]) {
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            float e[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                e[i] = exp2_approx(s[j * 4 + i] - finite(m[j * 2 + i % 2]));
            }
            sums[j * 2] = e[0] + e[2];
            sums[j * 2 + 1] = e[1] + e[3];
            uint32_t address =
                smem_address(target) + (j * (C::kTile / 8) + warp * 2 + lane / 8 % 2) * 128 + lane % 8 * 16;
            store_matrices_transposed(address, pack<Element>(e[0], e[1]), pack<Element>(e[2], e[3]));
        }
    }

    // Takes the exact maximum over the tile and all before it, and rescales O and l to it.
    __device__ void refresh_maximum(const float (&s)[kScores], bool first) {
        float tops[kColumns];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) tops[i] = fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + 2 + i % 2]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2)  // columns innermost: their shuffles overlap
#pragma unroll
            for (int i = 0; i < kColumns; ++i) tops[i] = fmaxf(tops[i], __shfl_xor_sync(~0u, tops[i], step));
        if (lane < 4) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) smem.warp_column[consumer][warp][column(i)] = tops[i];
        }
        sync_own();
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            float top = m[i];
#pragma unroll
            for (int w = 0; w < 4; ++w) top = fmaxf(top, smem.warp_column[consumer][w][column(i)]);
            float factor = exp2_approx(m[i] - finite(top));
            m[i] = top;
            if (first) continue;  // O and l are zero
            l[i] *= factor;
#pragma unroll
            for (int b = 0; b < C::kBlocks; ++b) {
                o[b][i / 2 * 4 + i % 2] *= factor;
                o[b][i / 2 * 4 + 2 + i % 2] *= factor;
            }
        }
    }

    // O^T += V^T P^T over a tile.
    __device__ void accumulate(const unsigned char* kv, const unsigned char* probabilities) {
        using Values = Wgmma<C::kRows, Element, Major::kMN>;
        const uint64_t v_descriptor = make_descriptor(kv, 0, C::kTokenGroupBytes, Swizzle::k128B);
        const uint64_t p_descriptor = make_descriptor(probabilities, 128, C::kTile / 8 * 128, Swizzle::kNone);
#pragma unroll
        for (int b = 0; b < C::kBlocks; ++b) pin_registers(o[b]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < C::kTile / 16; ++step)
#pragma unroll
            for (int b = 0; b < C::kBlocks; ++b)
                Values::mma(o[b], advance(v_descriptor, step * 2 * C::kTokenGroupBytes + column_block_offset<C>(b)),
                            advance(p_descriptor, step * 256), true);
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int b = 0; b < C::kBlocks; ++b) pin_registers(o[b]);
    }

    __device__ void tile(const WorkTile& work, int tile_token, const PipelineState<C::kStages>& ring,
                         const unsigned char* q, unsigned char* probabilities, bool first) {
        unsigned char* kv = smem.kv[ring.stage];
        using Scores = Wgmma<C::kRows, Element, Major::kK>;
        float s[kScores], odd[kScores];  // two accumulators: a wgmma need not wait for the one before it
        const uint64_t k_descriptor = make_descriptor(kv, 0, C::kTokenGroupBytes, Swizzle::k128B);
        const uint64_t q_descriptor = make_descriptor(q, 0, 1024, Swizzle::k128B);
#pragma unroll
        for (int column_block = 0; column_block < C::kColumnBlocks; ++column_block) {
            if (column_block % C::kSegmentColumnBlocks == 0) {
                smem.kv_full[ring.stage][column_block / C::kSegmentColumnBlocks].wait(ring.phase);
                if constexpr (!C::kTma) fence_async_proxy();
                if (column_block == 0) profiler.mark(Event::kKeysArrived);
                wgmma_fence();
            }
#pragma unroll
            for (int step = 0; step < 4; ++step)
                if (column_block * 4 + step < C::kDim / 16)
                    Scores::mma(step % 2 ? odd : s,
                                advance(k_descriptor, column_block_offset<C>(column_block) + step * 32),
                                advance(q_descriptor, column_block * C::kQueryColumnBlockBytes + step * 32),
                                column_block > 0 || step >= 2);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin_registers(s);
        pin_registers(odd);
        profiler.mark(Event::kScores);

        const int valid = work.token_end - tile_token;
        if (valid < C::kTile) zero_values(kv, valid);
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = (s[i] + odd[i]) * p.scale_log2;
        if (tile_token + C::kTile > key_limit(work, 0)) mask(s, work, tile_token);

        float sums[kColumns] = {};
        bool refresh = first, exceeds = false;
        do {
            if (refresh)
                refresh_maximum(s, first);
            else {
#pragma unroll
                for (int i = 0; i < kScores; ++i) exceeds |= s[i] > m[column_of_score(i)] + kStaleBound;
            }
            store_probabilities(s, probabilities, sums);
            fence_async_proxy();
            exceeds = any_of_own(exceeds && !refresh);
            refresh = true;
        } while (exceeds);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) l[i] += sums[i];
        profiler.mark(Event::kSoftmax);

        accumulate(kv, probabilities);
        profiler.mark(Event::kValues);
    }

    __device__ float sum_over_warps(int of_consumer, int c) const {
        const auto& sums = smem.warp_column[of_consumer];
        return (sums[0][c] + sums[1][c]) + (sums[2][c] + sums[3][c]);
    }

    // The softmax state of a column over all tiles of an m-block.
    __device__ RowState state_of(int c) const {
        const float tops[2] = {smem.warp_column[0][4][c], smem.warp_column[1][4][c]};
        const float top = fmaxf(tops[0], tops[1]);
        return {top, sum_over_warps(0, c) * exp2_approx(tops[0] - finite(top)) +
                         sum_over_warps(1, c) * exp2_approx(tops[1] - finite(top))};
    }

    // Makes this consumer's part of the state available to `state_of`; a barrier must follow.
    __device__ void publish_state() {
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
#pragma unroll
            for (int i = 0; i < kColumns; ++i) l[i] += __shfl_xor_sync(~0u, l[i], step);
        if (lane < 4) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                float* slot = &smem.warp_column[consumer][warp][column(i)];
                *slot = l[i];
                if (warp == 0) slot[4 * C::kRows] = m[i];
            }
        }
    }

    // Joins what the two consumers computed. Afterwards consumer c holds in o[0 .. kHalf) the sum over all tiles of
    // blocks c * kHalf + ..., relative to the joint maximum.
    __device__ void merge() {
        float factor[kColumns];
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
            const float top = fmaxf(smem.warp_column[0][4][column(i)], smem.warp_column[1][4][column(i)]);
            factor[i] = exp2_approx(m[i] - finite(top));
        }
        // Registers cannot be indexed by the consumer's number.
        if (consumer == 0)
            merge<0>(factor);
        else
            merge<kHalf>(factor);
    }

    // kOwn: this consumer's first block.
    template <int kOwn>
    __device__ void merge(const float (&factor)[kColumns]) {
#pragma unroll
        for (int b = 0; b < kHalf; ++b)
#pragma unroll
            for (int j = 0; j < C::kRows / 8; ++j)
                smem.scratch.exchange[1 - consumer][b * (C::kRows / 8) + j][thread] =
                    OutputQuads::scaled(quad(kHalf - kOwn + b, j), make_float2(factor[j * 2], factor[j * 2 + 1]));
        sync_both();
#pragma unroll
        for (int b = 0; b < kHalf; ++b)
#pragma unroll
            for (int j = 0; j < C::kRows / 8; ++j) {
                float4 sum = smem.scratch.exchange[consumer][b * (C::kRows / 8) + j][thread];
                OutputQuads::add(sum, quad(kOwn + b, j), make_float2(factor[j * 2], factor[j * 2 + 1]));
                float* to = o[b] + j * 4;
                to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
            }
    }

    // This thread's quad j of a block, of rows j * 8 + lane % 4 * 2 and the next, and where it is in a slot.
    __device__ float4 quad(int b, int j) const {
        return make_float4(o[b][j * 4], o[b][j * 4 + 1], o[b][j * 4 + 2], o[b][j * 4 + 3]);
    }
    __device__ int quad_of(int block, int j) const {
        return (j * 4 + lane % 4) * OutputQuads::kPairQuads + (block * 4 + warp) * 8 + lane / 4;
    }
    __device__ bool has_rows(const SplitBuffers<OutputQuads>& buffers, int j) const {
        return (j * 4 + lane % 4) * OutputQuads::kPairQuads < buffers.quads;
    }

    // With a single tile there is nothing to join: consumer 0 has it, and writes all.
    static __device__ bool alone(const WorkTile& work) { return work.token_end - work.token_begin <= C::kTile; }
    // Whether what this CTA will combine of an m-block of two stays in registers.
    __device__ bool keeps(const WorkTile& work, bool last) const {
        return last && is_two_way_split(work, smem.range) && !alone(work);
    }

    // Writes kCount blocks of O^T, from `block` on, of rows j * 8 and the next seven: `piece_of(i)` is this thread's
    // quad of the i-th one. A thread stores neighbouring columns of one row.
    template <int kCount, typename QuadOf>
    __device__ void store_blocks(const Rows& rows, int j, int block, QuadOf quad_of) const {
        const int64_t row = rows.out[j * 8 + lane / 4];
        auto* out = static_cast<Element*>(p.out) + row + block * 64 + warp * 16 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float4 values = quad_of(i);
            const uint32_t columns = transposed(pack<Element>(values.x, values.y));
            const uint32_t next = transposed(pack<Element>(values.z, values.w));
            if (row < 0) continue;
            *reinterpret_cast<uint32_t*>(out + i * 64) = columns;
            *reinterpret_cast<uint32_t*>(out + i * 64 + 8) = next;
        }
    }

    // Writes the weighed sums of two splits' quads j of the blocks that split `rank`, this one, combines.
    __device__ void write_sums(const Rows& rows, int rank, int j, const float4 (&own)[kQuarter],
                               const float4 (&other)[kQuarter],
                               const typename SplitBuffers<OutputQuads>::Weights& weights) {
        store_blocks<kQuarter>(rows, j, consumer * kHalf + rank * kQuarter,
                               [&](int i) { return weights.sum(own[i], other[i]); });
        if (rank == 0 && consumer == 0 && warp == 0 && lane < 4) {
            store_lse(p, rows, column(j * 2), weights.states[0]);
            store_lse(p, rows, column(j * 2 + 1), weights.states[1]);
        }
    }

    // Two splits combine half of each consumer's blocks each. `kKept`: this one's are in its registers.
    template <bool kKept>
    __device__ void combine_two(const SplitBuffers<OutputQuads>& buffers, const Rows& rows) {
        const int rank = buffers.splits.index(), block = consumer * kHalf + rank * kQuarter;
        buffers.wait_for(1 - rank, smem.flag);
        __syncwarp();  // each lane has waited for itself
        // Groups of 8 rows are taken whole. What is read of rows that do not exist was never written, and stays within
        // these rows, which have no place in the output.
        auto exists = [&](int j) { return j * 4 * OutputQuads::kPairQuads < buffers.quads; };
        float4 other[C::kRows / 8][kQuarter], own[C::kRows / 8][kQuarter];
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j)
#pragma unroll
            for (int b = 0; b < kQuarter; ++b) {
                if (!exists(j)) continue;
                other[j][b] = __ldcg(buffers.buffer_of_split(1 - rank) + quad_of(block + b, j));
                if constexpr (kKept) {  // registers cannot be indexed by the rank
                    own[j][b] = rank ? quad(kQuarter + b, j) : quad(b, j);
                } else {
                    own[j][b] = __ldcg(buffers.buffer_of_split(rank) + quad_of(block + b, j));
                }
            }
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            if (!exists(j)) continue;
            write_sums(rows, rank, j, own[j], other[j], buffers.weights_of_two(j * 4 + lane % 4));
        }
    }

    // Ends the m-block of a pair. Nothing is left out where there is little to join: the partner counts on all of it.
    __device__ void finish_pair(const Rows& rows) {
        const int rank = blockIdx.x % 2;
        auto state = [&](int row) { return state_of(row); };
        auto quad_of_half = [&](int half, int i) {  // registers cannot be indexed by the rank
            const int b = i % kQuarter, j = i / kQuarter;
            return half ? quad(kQuarter + b, j) : quad(b, j);
        };
        publish_state();
        Base::sync_both_to_read();
        Base::send_states(state);
        merge();
        profiler.mark(Event::kMerged);
        Base::send_quads([&](int i) { return quad_of_half(1 - rank, i); });
        typename SplitBuffers<OutputQuads>::Weights weights[C::kRows / 8];
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) weights[j] = Base::weights_in_pair(j * 4 + lane % 4, state);
        Base::wait_for_quads();
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            float4 own[kQuarter], other[kQuarter];
#pragma unroll
            for (int b = 0; b < kQuarter; ++b) {
                own[b] = quad_of_half(rank, j * kQuarter + b);
                other[b] = Base::received().quads[j * kQuarter + b][thread];
            }
            write_sums(rows, rank, j, own, other, weights[j]);
        }
    }

    // Writes blocks from `block` on of O^T as a split: the `quarters` of four that o holds, without the one that
    // stays in registers (`kept`, -1: none).
    __device__ void write_partial(const SplitBuffers<OutputQuads>& buffers, const WorkTile& work, int block,
                                  int quarters, int kept) const {
        float4* place = pinned(buffers.buffer(blockIdx.x, work.has_first_key) + quad_of(block, 0));
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            if (!has_rows(buffers, j)) break;
#pragma unroll
            for (int quarter = 0; quarter < 4; ++quarter) {
                if (quarter == kept || quarter >= quarters) continue;
#pragma unroll
                for (int b = quarter * kQuarter; b < (quarter + 1) * kQuarter; ++b)
                    __stcg(place + (j * 4 * OutputQuads::kPairQuads + b * 32), quad(b, j));
            }
        }
    }

    // Writes what o[0 .. kHalf) holds, blocks from `block` on of O^T, to the output.
    __device__ void write_output(const Rows& rows, int block) const {
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            const int c = column(j * 2);
            const float2 scale = make_float2(inverse(state_of(c).total), inverse(state_of(c + 1).total));
            store_blocks<kHalf>(rows, j, block, [&](int i) { return OutputQuads::scaled(quad(i, j), scale); });
        }
    }

    // Ends an m-block's share.
    __device__ void finish_entry(const WorkTile& work, const Rows& rows, bool kept) {
        const SplitBuffers<OutputQuads> buffers(p, work, smem.range);
        publish_state();
        Base::sync_both_to_read();
        if (!alone(work)) merge();
        profiler.mark(Event::kMerged);
        if (consumer == 1) {
            if (work.split())
                buffers.write_states(buffers.buffer(blockIdx.x, work.has_first_key), thread,
                                     [&](int row) { return state_of(row); });
            else if (thread < C::kRows)
                store_lse(p, rows, thread, state_of(thread));
        }
        const bool writes = !alone(work) || consumer == 0;
        if (writes && work.split()) {
            write_partial(buffers, work, alone(work) ? 0 : consumer * kHalf, alone(work) ? 4 : 2,
                          kept ? buffers.splits.index() : -1);
        } else if (writes) {
            // Both halves go through one copy of the code: what a lone consumer's second half holds moves to the front.
#pragma unroll 1
            for (int half = 0;; ++half) {
                write_output(rows, (alone(work) ? half : consumer) * kHalf);
                if (half == alone(work)) break;
#pragma unroll
                for (int b = 0; b < kHalf; ++b)
#pragma unroll
                    for (int i = 0; i < kScores; ++i) o[b][i] = o[kHalf + b][i];
            }
        }
        profiler.mark(Event::kWorkTileWritten);
        sync_both();  // the exchange buffer is reused for P, and a split must be complete before it is announced
    }

    __device__ void run() {
        PipelineState<C::kStages> ring;
        WorkCursor<C::kRows> cursor(p.lengths, p.num_heads, smem.range);
        WorkTile work;
        bool last = false, kept = false;
        int ordinal = 0;
        const bool paired = smem.range.paired;
        if (paired) Base::begin_pair();
        for (; cursor.next(work); ++ordinal) {
            reset_state();
            last = cursor.at_end();
            kept = keeps(work, last);
            const int q_stage = ordinal % C::kQueryBuffers;
            smem.q_full[q_stage].wait(ordinal / C::kQueryBuffers % 2);
            fence_async_proxy();
            profiler.mark(Event::kQueriesArrived);
            // Every m-block begins with consumer 0, so that its bits do not depend on the m-blocks before it.
            uint32_t turn = 0;
            for (int token = work.token_begin; token < work.token_end; token += C::kTile, ++turn) {
                if (turn % 2 == consumer) {
                    tile(work, token, ring, smem.q[q_stage], smem.scratch.p[consumer][turn / 2 % 2], turn < 2);
                    if (lane == 0) smem.kv_empty[ring.stage].arrive();
                }
                ring.advance();
            }
            Base::release_queries(q_stage);
            if (paired) break;
            finish_entry(work, smem.offsets[offset_buffer(ordinal)], kept);
            if (last) Base::announce(true);
            Base::note(work);
        }
        // A pair's code comes last: what runs without pairs lies together then, and is there sooner when it comes from
        // memory.
        if (!paired) {
            if (!last)
                Base::announce(ordinal > 0);  // where only requests without queries were left, or nothing was there
            if (kept)
                combine_two<true>(SplitBuffers<OutputQuads>(p, work, smem.range),
                                  smem.offsets[offset_buffer(ordinal - 1)]);
            Base::combine(work, ordinal - 1, [&](bool last, const auto& buffers, const Rows& rows) {
                if (!(last && kept)) combine_two<false>(buffers, rows);
            });
        } else {
            Base::count_launch();
            finish_pair(smem.offsets[0]);
        }
        profiler.mark(Event::kCombined);
    }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, 1)
    swapped_decode_kernel(const DecodeParams p, const __grid_constant__ KeyBox box) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& smem = *reinterpret_cast<SwappedSharedMemory<C>*>(bytes);
    run_kernel<C, SwappedSharedMemory<C>, SwappedConsumer<C>, 4>(p, box, smem, [] {});
}

}  // namespace mla::sm90
