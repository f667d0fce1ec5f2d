// How a consumer of few_rows ends a work tile: merges O^T with the other consumer's, then see transposed_output.cuh.
//
//   consumer 0                                         consumer 1
//   -------------------------------------------------  -------------------------------------------------
//   publish maximum and sum of every row               likewise
//   sync_consumers                                     sync_consumers
//   fp8: prepare_output                                fp8: prepare_output
//   exchange the upper half of its blocks of O^T       exchange the lower half
//   sync_consumers                                     sync_consumers
//   add what it received to its lower half             add what it received to its upper half
//
// A single tile needs no merge: consumer 0 has all of it.
#pragma once
#include "decode/hopper/transposed_output.cuh"

namespace mla::hopper {

// Besides what transposed_output.cuh says, S has `scratch.exchange` [consumer][quads of a thread's half of
// O^T][thread]. With fp8 keys it also has `kv_scale`, that of the cache, or 1 for records, and `largest_scales`
// [consumer], which no scale of a consumer's keys exceeds.
template <typename C, typename S>
struct FewRowsMerge : TransposedOutput<C, S> {
    using Base = TransposedOutput<C, S>;
    using Base::Base;
    using Base::kThreadRows, Base::kScores, Base::kOctets, Base::kConsumerBlocks;
    using Base::smem, Base::consumer, Base::thread, Base::warp, Base::lane, Base::profiler, Base::o;
    using Base::sync_consumers, Base::row_of, Base::quad;
    using typename Base::Buffers, typename Base::Offsets, typename Base::OutputQuads;

    // The softmax state of each row of this thread: the maximum m in use (in log2, the same in all threads of the
    // consumer) and this thread's own share of the sum l.
    float m[kThreadRows], l[kThreadRows];

    // Makes this consumer's part of the state available to `state_of`, after a barrier.
    __device__ void publish_state(const WorkTile& work) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) l[i] += __shfl_xor_sync(~0u, l[i], distance);
        if (lane < 4) {
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) {
                float top = m[i], sum = l[i];
                if (consumer == 0 && warp == 0) count_sink<C>(Base::p, work, row_of(i), top, sum);
                float* place = &smem.warp_rows[consumer][warp][row_of(i)];
                *place = sum;
                if (warp == 0) place[4 * C::kRows] = top;
            }
        }
    }

    // What this consumer's rows of O^T are multiplied by when they are merged. Then they are relative to the common
    // maximum, and with fp8 keys they are also what is written.
    __device__ void find_factors(float (&factors)[kThreadRows]) const {
        if constexpr (C::Layout::kFp8) {
#pragma unroll
            for (int j = 0; j < kOctets; ++j) {
                const float2 two = Base::output_factors(j);
                factors[j * 2] = two.x, factors[j * 2 + 1] = two.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) {
                const float top = fmaxf(smem.warp_rows[0][4][row_of(i)], smem.warp_rows[1][4][row_of(i)]);
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
        if (consumer == 0)
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
                smem.scratch.exchange[1 - consumer][b * kOctets + j][thread] =
                    OutputQuads::scaled(quad(kOtherBlock + b, j), make_float2(factor[j * 2], factor[j * 2 + 1]));
        sync_consumers();
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b)
#pragma unroll
            for (int j = 0; j < kOctets; ++j) {
                float4 sum = smem.scratch.exchange[consumer][b * kOctets + j][thread];
                OutputQuads::add(sum, quad(kFirstBlock + b, j), make_float2(factor[j * 2], factor[j * 2 + 1]));
                float* to = o[b] + j * 4;
                to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
            }
    }

    // Ends the m-block of a pair. A single tile is merged, too: the partner waits for both consumers' parts.
    __device__ void finish_pair(const WorkTile& work, const Offsets& offsets) {
        publish_state(work);
        sync_consumers();
        prepare_output(true);
        Base::send_states();
        merge();
        profiler.mark(Event::kMerged);
        Base::finish_pair(offsets);
    }

    // By both consumers, which can read all states.
    __device__ void prepare_output(bool split) {
        if constexpr (C::Layout::kFp8)
            Base::prepare_output(smem.kv_scale * (1.f / C::kWeightScale),
                                 kE4m3Max * fmaxf(smem.largest_scales[0], smem.largest_scales[1]), split);
    }

    __device__ void finish_work_tile(const WorkTile& work, const Offsets& offsets, bool in_registers) {
        const Buffers buffers(Base::p, work, smem.range, Base::cta);
        publish_state(work);
        sync_consumers();
        prepare_output(work.split());
        if (!Base::is_single_tile(work))
            merge();
        else if (C::Layout::kFp8 && consumer == 0)
            Base::scale_output();
        Base::write_work_tile(buffers, work, offsets, in_registers);
    }
};

}  // namespace mla::hopper
