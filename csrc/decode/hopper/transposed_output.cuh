// How consumers with O^T in registers write it to the output or to a split buffer, or combine it with that of the other
// CTA of a pair. Consumers of few_rows have merged it before (few_rows/merge.cuh); those of many_rows_fp8 divide its
// columns from the start. So a consumer has half of the m64 blocks of O^T, over all keys of a work tile.
//
//   consumer 0                                         consumer 1
//   -------------------------------------------------  -------------------------------------------------
//   fp8: find the factors of rows (prepare)            -
//   fp8: sync_consumers                                sync_consumers
//   fp8: multiply O^T, here or when merging            likewise
//   -                                                  write the LSE, or the split's states
//   write the lower half of the columns                write the upper half
//   sync_consumers: a split is complete                sync_consumers
//
// Where consumers merge (C::kConsumersMerge) and there is a single tile, consumer 0 has all blocks, and writes them.
#pragma once
#include "kernel.cuh"
#include "ptx/mma.cuh"
#include "transposed_stage.cuh"

namespace mla::hopper {

// With fp8 keys, splits are in fp16, and a quad has neighbouring columns, because values are converted by pairs.
template <typename C>
using TransposedQuads =
    Quads<C::kRows, C::kDimLatent, true, C::Layout::kElementBytes == 1, C::Layout::kElementBytes == 1>;

template <typename C>
struct OutputMemory {
    // Of each consumer: sums of each warp, then a maximum. In softmax, maxima of each warp.
    alignas(8) float warp_rows[2][5][C::kRows];
    // With fp8 keys: what rows of O^T are multiplied by, and states as a split buffer gets them.
    alignas(8) float factors[2][C::kRows];
    RowState split_states[C::kRows];
};

template <typename C>
struct TransposedOutput {
    using Element = typename C::Element;
    using OutputQuads = TransposedQuads<C>;
    using Buffers = SplitBuffers<OutputQuads>;
    using Offsets = OutputOffsets<C::kRows>;
    static constexpr int kThreadRows = C::kRows / 4;  // query rows, columns of S^T, that a thread holds
    static constexpr int kScores = C::kRows / 2;      // accumulators that a thread has of one m64 block
    static constexpr int kOctets = C::kRows / 8;
    static constexpr int kOctetsAtOnce = kOctets <= 3 ? kOctets : 2;  // that are combined
    // Of the m64 blocks of O^T: what a consumer finishes, and what one of two splits combines of that.
    static constexpr int kConsumerBlocks = C::kBlocks / 2, kSplitBlocks = kConsumerBlocks / 2;
    static constexpr int kHeldBlocks = C::kConsumersMerge ? C::kBlocks : kConsumerBlocks;

    ConsumerThread<C>& t;
    OutputMemory<C>& memory;
    float o[kHeldBlocks][kScores];  // the fragment of O^T

    __device__ TransposedOutput(ConsumerThread<C>& t, OutputMemory<C>& memory) : t(t), memory(memory) {}

    // Masks the scores of a stage's tokens without keys.
    __device__ void mask_unnamed(float (&s)[kScores], int stage) const {
        uint32_t unnamed = t.rings.unnamed.of(stage, t.warp);
        if (unnamed == 0) return;
        unnamed = t.rings.unnamed.tokens_of_half(unnamed) >> t.lane / 4;
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            if (unnamed >> i / 2 % 2 * 8 & 1) s[i] = -INFINITY;
    }

    // Whether consumer 0 has all columns: there is a single tile, and nothing to merge.
    static __device__ bool is_single_tile(const WorkTile& work) {
        return C::kConsumersMerge && work.token_end - work.token_begin <= C::kTile;
    }

    __device__ float sum_over_warps(int of_consumer, int row) const {
        const auto& sums = memory.warp_rows[of_consumer];
        return (sums[0][row] + sums[1][row]) + (sums[2][row] + sums[3][row]);
    }

    // The softmax state of a row over all keys of a work tile. `factors`: of each consumer's sums.
    __device__ RowState state_of(int row, float (&factors)[2]) const {
        const float tops[2] = {memory.warp_rows[0][4][row], memory.warp_rows[1][4][row]};
        const float top = fmaxf(tops[0], tops[1]);
        factors[0] = exp2_approx(tops[0] - finite(top)), factors[1] = exp2_approx(tops[1] - finite(top));
        return {top, sum_over_warps(0, row) * factors[0] + sum_over_warps(1, row) * factors[1]};
    }
    __device__ RowState state_of(int row) const {
        float factors[2];
        return state_of(row, factors);
    }

    // The state of a split's row, as it is written or sent.
    __device__ RowState split_state_of(int row) const {
        if constexpr (OutputQuads::kFp16)
            return memory.split_states[row];
        else
            return state_of(row);
    }

    // With fp8 keys, by both consumers: finds what each consumer's rows of O^T, in units of `unit`, are multiplied by
    // at the end of a work tile. An output is then normalized, and a split in the range of fp16. No element of a row
    // exceeds `largest`, the bound of all values, times the row's sum of weights.
    __device__ void prepare(float unit, float largest, bool split) {
        if (const int row = threadIdx.x - 128; row < C::kRows) {
            float factors[2];
            const RowState state = state_of(row, factors);
            if (split) {
                const int exponent = fp16_exponent(largest * state.total, state.total);
                memory.split_states[row] = state.divided(exponent);
                unit *= power_of_two(127 - exponent);
            } else {
                unit *= inverse(state.total);
            }
            memory.factors[0][row] = unit * factors[0], memory.factors[1][row] = unit * factors[1];
        }
        t.sync_consumers();
    }

    // What `prepare` has found, of this consumer and octet j.
    __device__ float2 factors(int j) const {
        return *reinterpret_cast<const float2*>(&memory.factors[t.consumer][row_of(t.lane, j * 2)]);
    }
    __device__ void scale() {
#pragma unroll
        for (int j = 0; j < kOctets; ++j) {
            const float2 two = factors(j);
#pragma unroll
            for (int b = 0; b < kHeldBlocks; ++b)
#pragma unroll
                for (int i = 0; i < 4; ++i) multiply_in_place(o[b][j * 4 + i], i % 2 ? two.y : two.x);
        }
    }

    // This thread's quad of block b and of rows j * 8 + lane % 4 * 2 and the next, and its place in a split buffer.
    __device__ float4 quad(int b, int j) const {
        return make_float4(o[b][j * 4], o[b][j * 4 + 1], o[b][j * 4 + 2], o[b][j * 4 + 3]);
    }
    __device__ int place_of_quad(int block, int j) const {
        return (j * 4 + t.lane % 4) * OutputQuads::kPairQuads + block * 32 + t.warp * 8 + t.lane / 4;
    }
    // Quad of what split 0 or 1 of two combines: registers cannot be indexed by the split's number.
    __device__ float4 quad_of_split(int split, int b, int j) const {
        return split ? quad(kSplitBlocks + b, j) : quad(b, j);
    }

    // Writes kCount blocks of O^T, from `block` on, of octet j: `quad_of(i)` is this thread's quad of the i-th one. A
    // thread stores neighbouring columns of one row.
    template <int kCount, typename QuadOf>
    __device__ void store_blocks(const Offsets& offsets, int j, int block, QuadOf quad_of) const {
        if constexpr (OutputQuads::kNextColumn == 1) return store_column_pairs<kCount>(offsets, j, block, quad_of);
        const int64_t offset = offsets.out[j * 8 + t.lane / 4];
        auto* out = static_cast<Element*>(t.p.out) + offset + block * 64 + t.warp * 16 + t.lane % 4 * 2;
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
        const int64_t first = offsets.out[j * 8 + t.lane % 4 * 2], next = offsets.out[j * 8 + t.lane % 4 * 2 + 1];
        auto* out = static_cast<Element*>(t.p.out) + block * 64 + t.warp * 16 + t.lane / 4 * 2;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float4 values = quad_of(i);
            if (first >= 0) *reinterpret_cast<uint32_t*>(out + first + i * 64) = pack<Element>(values.x, values.z);
            if (next >= 0) *reinterpret_cast<uint32_t*>(out + next + i * 64) = pack<Element>(values.y, values.w);
        }
    }

    // Writes what this CTA's split of two combines, of octet j.
    __device__ void store_combined(const Offsets& offsets, int split, int j, const float4 (&own)[kSplitBlocks],
                                   const float4 (&other)[kSplitBlocks], const typename Buffers::Weights& weights) {
        store_blocks<kSplitBlocks>(offsets, j, t.consumer * kConsumerBlocks + split * kSplitBlocks,
                                   [&](int i) { return weights.sum(own[i], other[i]); });
        if (split == 0 && t.consumer == 0 && t.warp == 0 && t.lane < 4) {
            store_lse(t.p, offsets, row_of(t.lane, j * 2), weights.states[0]);
            store_lse(t.p, offsets, row_of(t.lane, j * 2 + 1), weights.states[1]);
        }
    }

    // What a pair sends and weighs.
    __device__ auto split_states() const {
        return [this](int row) { return split_state_of(row); };
    }
    __device__ void send_states() const { Pair<OutputQuads, ConsumerThread<C>>{t}.send_states(split_states()); }

    // Ends the m-block of a pair, whose states have been sent.
    __device__ void finish_pair(const Offsets& offsets) {
        const Pair<OutputQuads, ConsumerThread<C>> pair{t};
        const int split = t.cta() % 2;
        pair.send_quads([&](int i) { return quad_of_split(1 - split, i % kSplitBlocks, i / kSplitBlocks); });
        t.profiler.mark(Event::kWorkTileWritten);
#pragma unroll
        for (int first = 0; first < kOctets; first += kOctetsAtOnce) {
            typename Buffers::Weights weights[kOctetsAtOnce];
#pragma unroll
            for (int i = 0; i < kOctetsAtOnce; ++i)
                weights[i] = pair.weights((first + i) * 4 + t.lane % 4, split_states());
            pair.wait_for_quads();
#pragma unroll
            for (int i = 0; i < kOctetsAtOnce; ++i) {
                const int j = first + i;
                float4 own[kSplitBlocks], other[kSplitBlocks];
#pragma unroll
                for (int b = 0; b < kSplitBlocks; ++b) {
                    own[b] = quad_of_split(split, b, j);
                    other[b] = pair.received.quad(j * kSplitBlocks + b);
                }
                store_combined(offsets, split, j, own, other, weights[i]);
            }
        }
    }

    // Writes this consumer's blocks of O^T, or of a single tile all, to the split buffer. Not those of part
    // `part_in_registers`: if 0 or 1, what this split of two combines stays in registers.
    __device__ void write_split(const Buffers& buffers, const WorkTile& work, int part_in_registers) const {
        const bool single = is_single_tile(work);
        const int first_block = single ? 0 : t.consumer * kConsumerBlocks;
        constexpr int kParts = kHeldBlocks / kSplitBlocks;
        const int parts = single ? kParts : 2;
        auto* place = pinned(buffers.own_buffer(work.has_first_key) + place_of_quad(first_block, 0));
#pragma unroll
        for (int j = 0; j < kOctets; ++j) {
            if ((j * 4 + t.lane % 4) * OutputQuads::kPairQuads >= buffers.quads) break;  // no such rows
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                if (part == part_in_registers || part >= parts) continue;
#pragma unroll
                for (int b = part * kSplitBlocks; b < (part + 1) * kSplitBlocks; ++b)
                    __stcg(place + (j * 4 * OutputQuads::kPairQuads + b * 32), OutputQuads::stored(quad(b, j)));
            }
        }
    }

    // Gives quads of octet j, by their blocks, as they are written to the output.
    __device__ auto normalized_quads(int j) const {
        if constexpr (OutputQuads::kFp16) {
            return [this, j](int i) { return quad(i, j); };  // normalized: see `prepare`
        } else {
            const int row = row_of(t.lane, j * 2);
            const float2 scale = make_float2(inverse(state_of(row).total), inverse(state_of(row + 1).total));
            return [this, j, scale](int i) { return OutputQuads::scaled(quad(i, j), scale); };
        }
    }

    // Writes this consumer's blocks of O^T, or of a single tile all, to the output.
    __device__ void write_output(const WorkTile& work, const Offsets& offsets) {
        const bool single = is_single_tile(work);
        // For a single tile, the code for half of the blocks runs twice: the second half moves to the front in between.
#pragma unroll 1
        for (int half = 0;; ++half) {
            const int block = (single ? half : t.consumer) * kConsumerBlocks;
#pragma unroll
            for (int j = 0; j < kOctets; ++j) store_blocks<kConsumerBlocks>(offsets, j, block, normalized_quads(j));
            if (half == single) break;
#pragma unroll
            for (int b = kConsumerBlocks; b < kHeldBlocks; ++b)
#pragma unroll
                for (int i = 0; i < kScores; ++i) o[b - kConsumerBlocks][i] = o[b][i];
        }
    }

    // By consumers that have their blocks of O^T and can read all states. `part_in_registers` as in write_split.
    __device__ void write_work_tile(const Buffers& buffers, const WorkTile& work, const Offsets& offsets,
                                    int part_in_registers = -1) {
        t.profiler.mark(Event::kMerged);
        if (t.consumer == 1) {
            if (work.split())
                buffers.write_states(buffers.own_buffer(work.has_first_key), t.thread,
                                     [&](int row) { return split_state_of(row); });
            else if (t.thread < C::kRows)
                store_lse(t.p, offsets, t.thread, state_of(t.thread));
        }
        const bool has_output = t.consumer == 0 || !is_single_tile(work);
        if (has_output && work.split())
            write_split(buffers, work, part_in_registers);
        else if (has_output)
            write_output(work, offsets);
        t.profiler.mark(Event::kWorkTileWritten);
        t.sync_consumers();  // the split is complete, and what both share is free for the next work tile
    }
};

}  // namespace mla::hopper
