// What a consumer of swapped.cuh does with records: groups of 128 e4m3 columns with a scale a token each, and rotary
// columns in bf16.
//
// A warp has the columns of one group (swapped_fp8.cuh), and so one scale a token:
//
//   S^T  its sums are multiplied by the token's scale, in fp32, before they are sent. Rotary columns are multiplied in
//        bf16, and added at the end
//   O^T  its columns are multiplied by P^T * the token's scale
//
// P^T is fp16, and one copy of it serves all groups. A token has a unit, the least power of two above its scales. P^T
// is stored times the unit, and a warp that has read it multiplies it by the ratio of its own scale to the unit, in
// fp16. Units are divided by a reference, a power of two above all that the consumer has met, as m is above all scores;
// O^T is in its units. When a unit exceeds it, the maximum is refreshed, and the reference with it. Together, P^T <=
// 2^kStaleBound and a unit <= the reference, the products use the upper end of fp16: so a token with the largest score
// keeps all its bits even if its unit is 2^-20 of the largest. A ratio below 2^-14 loses bits, but the token then adds
// far more to the row's other columns.
//
// A stage has, behind the e4m3 columns, [token][kTailBytes]: 16 bytes of scales and 128 of rotary columns.
#pragma once
#include "record_units.cuh"
#include "swapped_fp8.cuh"

namespace mla::sm90 {

// S has, beside what swapped_fp8.cuh says, `largest_units` [consumer][warp] and `ratios` [consumer][half of the
// tokens][group][lane % 4][8], in the order of the weights' fragments.
template <typename C, typename S>
struct SwappedProductsRecord : SwappedProductsFp8<C, S> {
    using Base = SwappedProductsFp8<C, S>;
    using Base::Base;
    using Base::kScores, Base::kRowGroups, Base::kWarps;
    using Base::p, Base::smem, Base::consumer, Base::warp, Base::lane, Base::profiler, Base::o;
    using typename Base::QueryFragments, typename Base::WeightFragments;
    static constexpr int kGroups = C::Layout::kScales, kTailSegment = C::kSegments - 1;
    static_assert(kGroups == kWarps && Base::kWarpBlocks * 64 == C::Layout::kScaleColumns);

    float reference = 0.f;
    float units[2];  // of the thread's two tokens, 8 apart

    static __device__ float cache_scale() { return 1.f; }

    // The tail of the first of a lane's two tokens in a slice of 16; the other one's is 8 behind it.
    __device__ const unsigned char* tail(int stage, int slice) const {
        return smem.kv[stage] + kTailSegment * C::kSegmentBytes + (slice * 16 + lane / 4) * C::Layout::kTailBytes;
    }
    static __device__ float scale_in(const unsigned char* tail, int k, int group) {
        return reinterpret_cast<const float*>(tail + k * 8 * C::Layout::kTailBytes)[group];
    }

    // S^T = K Q^T over a tile, in log2.
    __device__ void compute_scores(float (&s)[kScores], const PipelineState<C::kStages>& ring, int q_buffer) {
        wait_for_keys(ring);
        Base::multiply_latents(s, ring.stage, q_buffer, [&](float (&sums)[kScores], int slice) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float scale = scale_in(tail(ring.stage, slice), k, warp);
#pragma unroll
                for (int j = 0; j < kRowGroups; ++j) sums[j * 4 + k * 2] *= scale, sums[j * 4 + k * 2 + 1] *= scale;
            }
        });
        float rotary[kScores] = {};
        add_rotary(rotary, ring.stage, q_buffer);
        choose_units(ring.stage);
        Base::receive_sums(s);
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            s[i] = s[i] * smem.score_scales[q_buffer][Base::column(i / 4 * 2 + i % 2)] + rotary[i] * p.scale_log2;
        store_ratios(ring.stage);
    }

    __device__ void zero_values(unsigned char* kv, int valid) {
        Base::zero_values(kv, valid);
#pragma unroll
        for (int k = 0; k < 2; ++k)
            if (warp * 16 + lane / 4 + k * 8 >= valid) {
                units[k] = 0.f;
                *ratio_of(k) = 0;
            }
    }

    __device__ bool exceeds_reference() const { return units[0] > reference || units[1] > reference; }
    __device__ void publish_largest_scale() const {
        const float largest = warp_max(fmaxf(units[0], units[1]));
        if (lane == 0) smem.largest_units[consumer][warp] = largest;
    }
    // Behind a barrier. Returns by what O is multiplied.
    __device__ float renew_reference(bool first) {
        const float (&of_warps)[4] = smem.largest_units[consumer];
        const float largest = fmaxf(fmaxf(of_warps[0], of_warps[1]), fmaxf(of_warps[2], of_warps[3]));
        if (!first && largest <= reference) return 1.f;
        const float before = reference;
        reference = reference_above(largest, kLeastExponent);
        return before * over_power(reference);
    }

    __device__ void store_weights(uint32_t address, const float (&e)[4]) const {
        const float factor = over_power<kUnitExponent>(reference);
        const float first = units[0] * factor, second = units[1] * factor;
        store_matrices_transposed(address, pack<__half>(e[0] * first, e[1] * first),
                                  pack<__half>(e[2] * second, e[3] * second));
    }

    // O^T += V^T P^T over a tile.
    __device__ void accumulate(const unsigned char* kv, const unsigned char* probabilities) {
        Base::accumulate(kv, probabilities, [&](WeightFragments& weights, int half) {
            const uint4 ratios = *reinterpret_cast<const uint4*>(smem.ratios[consumer][half][warp][lane % 4]);
            const uint32_t of_octets[4] = {ratios.x, ratios.y, ratios.z, ratios.w};
#pragma unroll
            for (int j = 0; j < kRowGroups; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    weights[j][i / 2][i % 2] = multiplied<__half2>(weights[j][i / 2][i % 2], of_octets[i]);
        });
    }

    __device__ float output_unit() const { return output_unit_of(reference); }

  private:
    static constexpr int kLeastExponent = 17;  // of units

    __device__ void wait_for_keys(const PipelineState<C::kStages>& ring) {
        smem.kv_full[ring.stage][kTailSegment].wait(ring.phase);
        smem.kv_full[ring.stage][Base::first_block / C::kSegmentColumnBlocks].wait(ring.phase);
        profiler.mark(Event::kKeysArrived);
    }

    // The least power of two above all scales of a token.
    __device__ void choose_units(int stage) {
        const unsigned char* own = tail(stage, warp);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const auto scales = *reinterpret_cast<const float4*>(own + k * 8 * C::Layout::kTailBytes);
            units[k] = unit_above(scales, kLeastExponent);
        }
    }

    // Lane 4 i + g has the ratio of group g and of the warp's tokens i and i + 8.
    __device__ uint16_t* ratio_of(int k) const {
        return &smem.ratios[consumer][warp / 2][lane % 4][lane / 8][(warp % 2 * 2 + k) * 2 + lane / 4 % 2];
    }
    __device__ void store_ratios(int stage) const {
#pragma unroll
        for (int k = 0; k < 2; ++k)
            *ratio_of(k) = to_fp16(scale_in(tail(stage, warp), k, lane % 4) * over_power(units[k]));
    }

    // Rotary columns are read in the order of e4m3 keys: a lane has 16 of a token.
    __device__ void add_rotary(float (&sums)[kScores], int stage, int q_buffer) const {
        uint32_t keys[4][4];
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto words = *reinterpret_cast<const uint4*>(tail(stage, warp) + k * 8 * C::Layout::kTailBytes +
                                                                   kGroups * 4 + (lane % 4 * 2 + i) * 16);
                keys[i * 2][k] = words.x, keys[i * 2][k + 2] = words.y;
                keys[i * 2 + 1][k] = words.z, keys[i * 2 + 1][k + 2] = words.w;
            }
        QueryFragments q[kRowGroups];
        Base::load_queries(q, q_buffer, C::kDimLatent / 64);
#pragma unroll
        for (int step = 0; step < 4; ++step)
#pragma unroll
            for (int j = 0; j < kRowGroups; ++j)
                Base::template multiply<__nv_bfloat16>(&sums[j * 4], keys[step], q[j][step]);
    }
};

}  // namespace mla::sm90
