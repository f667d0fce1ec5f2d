// How a consumer of swapped.cuh ends a work tile: merges O^T with the other consumer's, and writes it to the output or
// to a split buffer, or combines it with the only other split.
//
//   consumer 0                                         consumer 1
//   -------------------------------------------------  -------------------------------------------------
//   publish maximum and sum of every column            likewise
//   sync_consumers                                     sync_consumers
//   exchange the upper half of its blocks of O^T       exchange the lower half
//   sync_consumers                                     sync_consumers
//   add what it received to its lower half             add what it received to its upper half
//   -                                                  write the LSE, or the split's states
//   write the lower half of the columns                write the upper half
//   sync_consumers: a split is complete, and the exchange buffer is free
//
// Of a single tile there is nothing to merge: consumer 0 has it, and writes all.
#pragma once
#include "consumer.cuh"

namespace mla::sm90 {

template <typename C>
using SwappedQuads = Quads<C::kRows, C::kDimLatent, true, C::Layout::kFp8>;

// S has, beside what consumer.cuh says, `scratch.exchange` [consumer][quads of a thread's half of O^T][thread] and
// `warp_column` [consumer][5][kRows]: sums of each warp, then a maximum.
template <typename C, typename S>
struct SwappedEpilogue : ConsumerThread<C, S, SwappedQuads<C>> {
    using Element = typename C::Element;
    using OutputQuads = SwappedQuads<C>;
    using Buffers = SplitBuffers<OutputQuads>;
    using Offsets = OutputOffsets<C::kRows>;
    static constexpr int kColumns = C::kColumns;
    static constexpr int kScores = C::kRows / 2;  // accumulators that a thread has of one m64 block
    static constexpr int kRowGroups = C::kRows / 8;
    // Of the m64 blocks of O^T: what a consumer finishes, and what one of two splits combines of that.
    static constexpr int kConsumerBlocks = C::kBlocks / 2, kSplitBlocks = kConsumerBlocks / 2;

    using Base = ConsumerThread<C, S, OutputQuads>;
    using Base::Base;
    using Base::p, Base::smem, Base::consumer, Base::thread, Base::warp, Base::lane, Base::profiler;
    using Base::sync_consumers, Base::sync_consumers_before_reading;

    // The fragment of O^T, and the softmax state of each column of this thread: the maximum m in use (in log2, the same
    // in all threads of the consumer) and this thread's own share of the sum l.
    float o[C::kBlocks][kScores];
    float m[kColumns], l[kColumns];

    __device__ int column(int i) const { return i / 2 * 8 + lane % 4 * 2 + i % 2; }

    // Consumer 0 has the first tile.
    static __device__ bool is_single_tile(const WorkTile& work) {
        return work.token_end - work.token_begin <= C::kTile;
    }

    // Whether the part of an m-block of two splits that this CTA combines stays in registers until then.
    __device__ bool stays_in_registers(const WorkTile& work, bool last) const {
        return last && is_two_way_split(work, smem.range, Base::cta) && !is_single_tile(work);
    }

    __device__ float sum_over_warps(int of_consumer, int c) const {
        const auto& sums = smem.warp_column[of_consumer];
        return (sums[0][c] + sums[1][c]) + (sums[2][c] + sums[3][c]);
    }

    // The softmax state of a column over all keys of a work tile.
    __device__ RowState state_of(int c) const {
        const float tops[2] = {smem.warp_column[0][4][c], smem.warp_column[1][4][c]};
        const float top = fmaxf(tops[0], tops[1]);
        return {top, sum_over_warps(0, c) * exp2_approx(tops[0] - finite(top)) +
                         sum_over_warps(1, c) * exp2_approx(tops[1] - finite(top))};
    }

    // Makes this consumer's part of the state available to `state_of`, behind a barrier.
    __device__ void publish_state() {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
            for (int i = 0; i < kColumns; ++i) l[i] += __shfl_xor_sync(~0u, l[i], distance);
        if (lane < 4) {
#pragma unroll
            for (int i = 0; i < kColumns; ++i) {
                float* place = &smem.warp_column[consumer][warp][column(i)];
                *place = l[i];
                if (warp == 0) place[4 * C::kRows] = m[i];
            }
        }
    }

    // Adds up what the two consumers computed, relative to their common maximum. Afterwards o[0 .. kConsumerBlocks) of
    // consumer c holds blocks c * kConsumerBlocks + ... of the sum.
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
            merge<kConsumerBlocks>(factor);
    }

    // kFirstBlock: of those that this consumer finishes.
    template <int kFirstBlock>
    __device__ void merge(const float (&factor)[kColumns]) {
        constexpr int kOtherBlock = kConsumerBlocks - kFirstBlock;
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b)
#pragma unroll
            for (int j = 0; j < kRowGroups; ++j)
                smem.scratch.exchange[1 - consumer][b * kRowGroups + j][thread] =
                    OutputQuads::scaled(quad(kOtherBlock + b, j), make_float2(factor[j * 2], factor[j * 2 + 1]));
        sync_consumers();
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b)
#pragma unroll
            for (int j = 0; j < kRowGroups; ++j) {
                float4 sum = smem.scratch.exchange[consumer][b * kRowGroups + j][thread];
                OutputQuads::add(sum, quad(kFirstBlock + b, j), make_float2(factor[j * 2], factor[j * 2 + 1]));
                float* to = o[b] + j * 4;
                to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
            }
    }

    // The 16 columns of O^T that a warp has of a block: of fp8 keys, warps have neighbouring columns.
    static constexpr int kSliceStep = C::Layout::kFp8 ? 1 : 4;
    __device__ int slice_of(int block) const { return C::Layout::kFp8 ? warp * C::kBlocks + block : block * 4 + warp; }

    // This thread's quad of block b and of rows j * 8 + lane % 4 * 2 and the next, and its place in a split buffer.
    __device__ float4 quad(int b, int j) const {
        return make_float4(o[b][j * 4], o[b][j * 4 + 1], o[b][j * 4 + 2], o[b][j * 4 + 3]);
    }
    __device__ int place_of_quad(int block, int j) const {
        return (j * 4 + lane % 4) * OutputQuads::kPairQuads + slice_of(block) * 8 + lane / 4;
    }
    // Quad of what split 0 or 1 of two combines: registers cannot be indexed by the split's number.
    __device__ float4 quad_of_split(int split, int b, int j) const {
        return split ? quad(kSplitBlocks + b, j) : quad(b, j);
    }

    // Writes kCount blocks of O^T, from `block` on, of rows j * 8 and the next seven: `quad_of(i)` is this thread's
    // quad of the i-th one. A thread stores neighbouring columns of one row.
    template <int kCount, typename QuadOf>
    __device__ void store_blocks(const Offsets& offsets, int j, int block, QuadOf quad_of) const {
        if constexpr (C::Layout::kFp8) return store_column_pairs<kCount>(offsets, j, block, quad_of);
        const int64_t offset = offsets.out[j * 8 + lane / 4];
        auto* out = static_cast<Element*>(p.out) + offset + block * 64 + warp * 16 + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float4 values = quad_of(i);
            const uint32_t columns = transposed(pack<Element>(values.x, values.y));
            const uint32_t next = transposed(pack<Element>(values.z, values.w));
            if (offset < 0) continue;
            *reinterpret_cast<uint32_t*>(out + i * 64) = columns;
            *reinterpret_cast<uint32_t*>(out + i * 64 + 8) = next;
        }
    }

    // The same where a quad has neighbouring columns.
    template <int kCount, typename QuadOf>
    __device__ void store_column_pairs(const Offsets& offsets, int j, int block, QuadOf quad_of) const {
        const int64_t first = offsets.out[j * 8 + lane % 4 * 2], next = offsets.out[j * 8 + lane % 4 * 2 + 1];
        auto* out = static_cast<Element*>(p.out) + slice_of(block) * 16 + lane / 4 * 2;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float4 values = quad_of(i);
            if (first >= 0)
                *reinterpret_cast<uint32_t*>(out + first + i * kSliceStep * 16) = pack<Element>(values.x, values.z);
            if (next >= 0)
                *reinterpret_cast<uint32_t*>(out + next + i * kSliceStep * 16) = pack<Element>(values.y, values.w);
        }
    }

    // Writes what this CTA's split of two combines, of rows j * 8 and the next seven.
    __device__ void store_combined(const Offsets& offsets, int split, int j, const float4 (&own)[kSplitBlocks],
                                   const float4 (&other)[kSplitBlocks], const typename Buffers::Weights& weights) {
        store_blocks<kSplitBlocks>(offsets, j, consumer * kConsumerBlocks + split * kSplitBlocks,
                                   [&](int i) { return weights.sum(own[i], other[i]); });
        if (split == 0 && consumer == 0 && warp == 0 && lane < 4) {
            store_lse(p, offsets, column(j * 2), weights.states[0]);
            store_lse(p, offsets, column(j * 2 + 1), weights.states[1]);
        }
    }

    // Of two splits each combines half of each consumer's blocks. This CTA's are in registers or in its split buffer.
    template <bool kInRegisters>
    __device__ void combine_two(const Buffers& buffers, const Offsets& offsets) {
        const int split = buffers.splits.index(), block = consumer * kConsumerBlocks + split * kSplitBlocks;
        buffers.wait_for(1 - split, smem.flag);
        __syncwarp();  // each lane has waited for itself
        // Groups of 8 rows are read whole. The quads of rows that do not exist were never written; their sums stay
        // within these rows, which have no place in the output.
        auto exists = [&](int j) { return j * 4 * OutputQuads::kPairQuads < buffers.quads; };
        float4 other[kRowGroups][kSplitBlocks], own[kRowGroups][kSplitBlocks];
#pragma unroll
        for (int j = 0; j < kRowGroups; ++j)
#pragma unroll
            for (int b = 0; b < kSplitBlocks; ++b) {
                if (!exists(j)) continue;
                other[j][b] = __ldcg(buffers.buffer_of_split(1 - split) + place_of_quad(block + b, j));
                if constexpr (kInRegisters)
                    own[j][b] = quad_of_split(split, b, j);
                else
                    own[j][b] = __ldcg(buffers.buffer_of_split(split) + place_of_quad(block + b, j));
            }
#pragma unroll
        for (int j = 0; j < kRowGroups; ++j) {
            if (!exists(j)) continue;
            store_combined(offsets, split, j, own[j], other[j], buffers.weights_of_two(j * 4 + lane % 4));
        }
    }

    // Ends the m-block of a pair. A single tile is merged, too: the partner counts on all that it is sent.
    __device__ void finish_pair(const Offsets& offsets) {
        const int split = blockIdx.x % 2;
        auto state = [&](int row) { return state_of(row); };
        publish_state();
        sync_consumers_before_reading();
        Base::send_states(state);
        merge();
        profiler.mark(Event::kMerged);
        Base::send_quads([&](int i) { return quad_of_split(1 - split, i % kSplitBlocks, i / kSplitBlocks); });
        typename Buffers::Weights weights[kRowGroups];
#pragma unroll
        for (int j = 0; j < kRowGroups; ++j) weights[j] = Base::weights_in_pair(j * 4 + lane % 4, state);
        Base::wait_for_quads();
#pragma unroll
        for (int j = 0; j < kRowGroups; ++j) {
            float4 own[kSplitBlocks], other[kSplitBlocks];
#pragma unroll
            for (int b = 0; b < kSplitBlocks; ++b) {
                own[b] = quad_of_split(split, b, j);
                other[b] = Base::received().quads[j * kSplitBlocks + b][thread];
            }
            store_combined(offsets, split, j, own, other, weights[j]);
        }
    }

    // Writes this consumer's blocks of O^T, or of a single tile all, to the split buffer. Not those that stay in
    // registers.
    __device__ void write_split(const Buffers& buffers, const WorkTile& work, bool in_registers) const {
        const bool single = is_single_tile(work);
        const int first_block = single ? 0 : consumer * kConsumerBlocks;
        const int parts = single ? 4 : 2, part_in_registers = in_registers ? buffers.splits.index() : -1;
        float4* place = pinned(buffers.own_buffer(work.has_first_key) + place_of_quad(first_block, 0));
#pragma unroll
        for (int j = 0; j < kRowGroups; ++j) {
            if ((j * 4 + lane % 4) * OutputQuads::kPairQuads >= buffers.quads) break;  // no such rows
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                if (part == part_in_registers || part >= parts) continue;
#pragma unroll
                for (int b = part * kSplitBlocks; b < (part + 1) * kSplitBlocks; ++b)
                    __stcg(place + (j * 4 * OutputQuads::kPairQuads + b * kSliceStep * 8), quad(b, j));
            }
        }
    }

    // Writes this consumer's blocks of O^T, or of a single tile all, to the output.
    __device__ void write_output(const WorkTile& work, const Offsets& offsets) {
        const bool single = is_single_tile(work);
        // All blocks of a single tile go through the code for half of them: the second half moves to the front.
#pragma unroll 1
        for (int half = 0;; ++half) {
            const int block = (single ? half : consumer) * kConsumerBlocks;
#pragma unroll
            for (int j = 0; j < kRowGroups; ++j) {
                const int c = column(j * 2);
                const float2 scale = make_float2(inverse(state_of(c).total), inverse(state_of(c + 1).total));
                store_blocks<kConsumerBlocks>(offsets, j, block,
                                              [&](int i) { return OutputQuads::scaled(quad(i, j), scale); });
            }
            if (half == single) break;
#pragma unroll
            for (int b = 0; b < kConsumerBlocks; ++b)
#pragma unroll
                for (int i = 0; i < kScores; ++i) o[b][i] = o[kConsumerBlocks + b][i];
        }
    }

    __device__ void finish_work_tile(const WorkTile& work, const Offsets& offsets, bool in_registers) {
        const Buffers buffers(p, work, smem.range, Base::cta);
        publish_state();
        sync_consumers_before_reading();
        if (!is_single_tile(work)) merge();
        profiler.mark(Event::kMerged);
        if (consumer == 1) {
            if (work.split())
                buffers.write_states(buffers.own_buffer(work.has_first_key), thread,
                                     [&](int row) { return state_of(row); });
            else if (thread < C::kRows)
                store_lse(p, offsets, thread, state_of(thread));
        }
        const bool has_output = consumer == 0 || !is_single_tile(work);
        if (has_output && work.split())
            write_split(buffers, work, in_registers);
        else if (has_output)
            write_output(work, offsets);
        profiler.mark(Event::kWorkTileWritten);
        sync_consumers();  // the split is complete, and the exchange buffer is free for P
    }
};

}  // namespace mla::sm90
