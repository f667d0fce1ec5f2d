// How a consumer of few_rows ends a work tile: merges O^T with the other consumer's, then see transposed_output.cuh.
//
//   consumer 0                                         consumer 1
//   -------------------------------------------------  -------------------------------------------------
//   publish maximum and sum of every row               likewise
//   sync_consumers                                     sync_consumers
//   fp8: prepare                                       fp8: prepare
//   exchange the upper half of its blocks of O^T       exchange the lower half
//   sync_consumers                                     sync_consumers
//   add what it received to its lower half             add what it received to its upper half
//
// A single tile needs no merge: consumer 0 has all of it.
#pragma once
#include "decode/hopper/transposed_output.cuh"

namespace mla::hopper {

// What the consumers exchange: [consumer][quads of a thread's half of O^T][thread].
template <typename C>
using MergeExchange = float4[2][C::kBlocks / 2 * C::kRows / 8][128];

template <typename C>
struct FewRowsOutput {
    using OutputQuads = TransposedQuads<C>;
    using Buffers = SplitBuffers<OutputQuads>;
    using Offsets = OutputOffsets<C::kRows>;
    static constexpr int kThreadRows = TransposedOutput<C>::kThreadRows, kOctets = TransposedOutput<C>::kOctets;
    static constexpr int kConsumerBlocks = TransposedOutput<C>::kConsumerBlocks;

    ConsumerThread<C>& t;
    MergeExchange<C>& exchange;
    TransposedOutput<C> blocks;

    // The softmax state of each row of this thread: the maximum m in use (in log2, the same in all threads of the
    // consumer) and this thread's own share of the sum l.
    float m[kThreadRows], l[kThreadRows];

    __device__ FewRowsOutput(ConsumerThread<C>& t, MergeExchange<C>& exchange, OutputMemory<C>& memory)
        : t(t), exchange(exchange), blocks(t, memory) {}

    // Makes this consumer's part of the state available to `state_of`, after a barrier.
    __device__ void publish_state(const WorkTile& work) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) l[i] += __shfl_xor_sync(~0u, l[i], distance);
        if (t.p.sinks && t.consumer == 0 && t.warp == 0) {
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) count_sink<C>(t.p, work, row_of(t.lane, i), m[i], l[i]);
        }
        if (t.lane < 4) {
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) {
                float* place = &blocks.memory.warp_rows[t.consumer][t.warp][row_of(t.lane, i)];
                *place = l[i];
                if (t.warp == 0) place[4 * C::kRows] = m[i];
            }
        }
    }

    // What this consumer's rows of O^T are multiplied by when they are merged. Then they are relative to the common
    // maximum, and with fp8 keys they are also what is written.
    __device__ void find_factors(float (&factors)[kThreadRows]) const {
        if constexpr (C::kTwoTerms) {
#pragma unroll
            for (int j = 0; j < kOctets; ++j) {
                const float2 two = blocks.factors(j);
                factors[j * 2] = two.x, factors[j * 2 + 1] = two.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) {
                const float top = fmaxf(blocks.memory.warp_rows[0][4][row_of(t.lane, i)],
                                        blocks.memory.warp_rows[1][4][row_of(t.lane, i)]);
                factors[i] = exp2_approx(m[i] - finite(top));
            }
        }
    }

    // Adds up what the two consumers computed. Afterwards o[0 .. kConsumerBlocks) of consumer c holds blocks
    // c * kConsumerBlocks + ... of the sum.
    __device__ void merge() {
        float factor[kThreadRows];
        find_factors(factor);
        // Registers cannot be indexed by the consumer's number.
        if (t.consumer == 0)
            merge<0>(factor);
        else
            merge<kConsumerBlocks>(factor);
    }

    // kFirstBlock: of those that this consumer finishes.
    template <int kFirstBlock>
    __device__ void merge(const float (&factor)[kThreadRows]) {
        constexpr int kOtherBlock = kConsumerBlocks - kFirstBlock;
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b)
#pragma unroll
            for (int j = 0; j < kOctets; ++j)
                exchange[1 - t.consumer][b * kOctets + j][t.thread] =
                    OutputQuads::scaled(blocks.quad(kOtherBlock + b, j), make_float2(factor[j * 2], factor[j * 2 + 1]));
        t.sync_consumers();
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b)
#pragma unroll
            for (int j = 0; j < kOctets; ++j) {
                float4 sum = exchange[t.consumer][b * kOctets + j][t.thread];
                OutputQuads::add(sum, blocks.quad(kFirstBlock + b, j), make_float2(factor[j * 2], factor[j * 2 + 1]));
                float* to = blocks.o[b] + j * 4;
                to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
            }
    }

    // By both consumers, which can read all states: with fp8 keys, finds what rows of O^T are multiplied by.
    template <typename Keys>
    __device__ void prepare(const Keys& keys, bool split) {
        if constexpr (C::kTwoTerms) blocks.prepare(keys.output_unit(), keys.largest_value(), split);
    }

    // Ends the m-block of a pair. A single tile is merged, too: the partner waits for both consumers' parts.
    template <typename Keys>
    __device__ void finish_pair(const Keys& keys, const WorkTile& work, const Offsets& offsets) {
        publish_state(work);
        t.sync_consumers();
        prepare(keys, true);
        blocks.send_states();
        merge();
        t.profiler.mark(Event::kMerged);
        blocks.finish_pair(offsets);
    }

    template <typename Keys>
    __device__ void finish_work_tile(const Keys& keys, const WorkTile& work, const Offsets& offsets) {
        const Buffers buffers(t.p, work, t.range, t.cta());
        publish_state(work);
        t.sync_consumers();
        prepare(keys, work.split());
        if (!blocks.is_single_tile(work))
            merge();
        else if (C::kTwoTerms && t.consumer == 0)
            blocks.scale();
        blocks.write_work_tile(buffers, work, offsets);
    }
};

}  // namespace mla::hopper
