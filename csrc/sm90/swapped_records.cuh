// What a consumer of swapped.cuh does with records: groups of 128 e4m3 columns with a scale a token each, and rotary
// columns in bf16.
//
//   S^T  the sum over groups of (K Q^T of the group) * the token's scale, in fp32, and a product of bf16 rotary columns
//   O^T  columns of a group are multiplied by P^T * the token's scale of the group: so P^T is stored four times
//
// P^T is fp16, so scales are divided by a reference, a power of two above all that the consumer has met, as m is above
// all scores; O^T is in its units. When a scale exceeds it, the maximum is refreshed, and the reference with it.
// Together, P^T <= 2^kStaleBound and a scale <= the reference, the products use the upper end of fp16: so a token with
// the largest score keeps all its bits even if its scale is 2^-20 of the largest.
//
// A stage has, behind the e4m3 columns, [token][kTailBytes]: 16 bytes of scales and 128 of rotary columns.
#pragma once
#include "swapped_fp8.cuh"

namespace mla::sm90 {

// S has, beside what swapped_fp8.cuh says, `largest_scales` [consumer][warp].
template <typename C, typename S>
struct SwappedProductsRecord : SwappedProductsFp8<C, S> {
    using Base = SwappedProductsFp8<C, S>;
    using Base::Base;
    using Base::kScores, Base::kRowGroups;
    using Base::p, Base::smem, Base::consumer, Base::warp, Base::lane, Base::profiler, Base::o;
    using typename Base::QueryFragments;
    static constexpr int kGroups = C::Layout::kScales, kTailSegment = C::kSegments - 1;
    static constexpr int kGroupBlocks = C::Layout::kScaleColumns / 64;  // column blocks of a group
    static constexpr int kSegmentGroups = C::kSegmentColumnBlocks / kGroupBlocks;
    static constexpr int kUnitExponent = 15 - static_cast<int>(kStaleBound);
    static_assert(C::kTma || C::kSegments == 3);

    float reference = 0.f;
    float scales[2][kGroups];  // of the thread's two tokens, 8 apart

    static __device__ float cache_scale() { return 1.f; }

    // The tail of this thread's token of S^T, or of the one 8 behind it.
    __device__ const unsigned char* tail(int stage, int k) const {
        return smem.kv[stage] + kTailSegment * C::kSegmentBytes +
               (warp * 16 + lane / 4 + k * 8) * C::Layout::kTailBytes;
    }

    // S^T = K Q^T over a tile, in log2.
    __device__ void compute_scores(float (&s)[kScores], const PipelineState<C::kStages>& ring, int q_buffer) {
        smem.kv_full[ring.stage][kTailSegment].wait(ring.phase);
#pragma unroll
        for (float& score : s) score = 0.f;
#pragma unroll 1
        for (int segment = 0; segment < kTailSegment; ++segment) {
            smem.kv_full[ring.stage][segment].wait(ring.phase);
            if (segment == 0) profiler.mark(Event::kKeysArrived);
#pragma unroll
            for (int i = 0; i < kSegmentGroups; ++i) add_group(s, ring, segment * kSegmentGroups + i, q_buffer);
        }
        float rotary[2][kScores] = {};
        add_rotary(rotary, ring.stage, q_buffer);
        profiler.mark(Event::kScores);
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            s[i] = s[i] * smem.score_scales[q_buffer][Base::column(i / 4 * 2 + i % 2)] +
                   (rotary[0][i] + rotary[1][i]) * p.scale_log2;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const auto words = *reinterpret_cast<const float4*>(tail(ring.stage, k));
            scales[k][0] = words.x, scales[k][1] = words.y, scales[k][2] = words.z, scales[k][3] = words.w;
        }
    }

    __device__ void zero_values(unsigned char* kv, int valid) {
        Base::zero_values(kv, valid);
#pragma unroll
        for (int k = 0; k < 2; ++k)
            if (warp * 16 + lane / 4 + k * 8 >= valid)
                for (float& scale : scales[k]) scale = 0.f;
    }

    __device__ bool exceeds_reference() const {
        bool exceeds = false;
#pragma unroll
        for (int i = 0; i < 2 * kGroups; ++i) exceeds |= scales[i / kGroups][i % kGroups] > reference;
        return exceeds;
    }
    __device__ void publish_largest_scale() const {
        float largest = 0.f;
#pragma unroll
        for (int i = 0; i < 2 * kGroups; ++i) largest = fmaxf(largest, scales[i / kGroups][i % kGroups]);
        largest = warp_max(largest);
        if (lane == 0) smem.largest_scales[consumer][warp] = largest;
    }
    // Behind a barrier. Returns by what O is multiplied.
    __device__ float renew_reference(bool first) {
        const float (&of_warps)[4] = smem.largest_scales[consumer];
        const float largest = fmaxf(fmaxf(of_warps[0], of_warps[1]), fmaxf(of_warps[2], of_warps[3]));
        if (!first && largest <= reference) return 1.f;
        // More than twice as large: later scales are seldom larger.
        const int exponent = min(max(__float_as_int(largest) >> 23, 16) + 2, 250);
        const float before = reference;
        reference = __int_as_float(exponent << 23);
        return before * __int_as_float((254 - exponent) << 23);
    }

    __device__ void store_weights(uint32_t address, const float (&e)[4]) const {
        const float unit = __int_as_float(((254 + kUnitExponent) << 23) - __float_as_int(reference));
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            const float first = scales[0][group] * unit, second = scales[1][group] * unit;
            store_matrices_transposed(address + group * C::kWeightBytes, pack<__half>(e[0] * first, e[1] * first),
                                      pack<__half>(e[2] * second, e[3] * second));
        }
    }

    __device__ void scale_output() {
        const float unit = reference * (1.f / (1 << kUnitExponent));
#pragma unroll
        for (int b = 0; b < C::kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < kScores; ++i) o[b][i] *= unit;
    }

  private:
    __device__ void add_group(float (&scores)[kScores], const PipelineState<C::kStages>& ring, int group,
                              int q_buffer) const {
        float sums[2][kScores] = {};
#pragma unroll
        for (int i = 0; i < kGroupBlocks; ++i) {
            const int column_block = group * kGroupBlocks + i;
            QueryFragments q;
            Base::add_column_block(sums, ring, column_block, [&](int j) -> const QueryFragments& {
                Base::load_queries(q, q_buffer, column_block, j);
                return q;
            });
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float scale = reinterpret_cast<const float*>(tail(ring.stage, k))[group];
#pragma unroll
            for (int j = 0; j < kRowGroups; ++j)
#pragma unroll
                for (int i = j * 4 + k * 2; i < j * 4 + k * 2 + 2; ++i) scores[i] += (sums[0][i] + sums[1][i]) * scale;
        }
    }

    // Rotary columns are read in the order of e4m3 keys: a lane has 16 of a token.
    __device__ void add_rotary(float (&sums)[2][kScores], int stage, int q_buffer) const {
        uint32_t keys[4][4];
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto words =
                    *reinterpret_cast<const uint4*>(tail(stage, k) + C::Layout::kScales * 4 + (lane % 4 * 2 + i) * 16);
                keys[i * 2][k] = words.x, keys[i * 2][k + 2] = words.y;
                keys[i * 2 + 1][k] = words.z, keys[i * 2 + 1][k + 2] = words.w;
            }
#pragma unroll
        for (int j = 0; j < kRowGroups; ++j) {
            QueryFragments q;
            Base::load_queries(q, q_buffer, C::kDimLatent / 64, j);
#pragma unroll
            for (int step = 0; step < 4; ++step)
                Base::template multiply<__nv_bfloat16>(&sums[step % 2][j * 4], keys[step], q[step]);
        }
    }
};

}  // namespace mla::sm90
