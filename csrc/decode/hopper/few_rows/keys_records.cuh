// What a consumer of few_rows does with records: groups of 128 e4m3 columns with a scale a token each, and rotary
// columns in bf16.
//
//   S^T  sums over a group are multiplied by the token's scale, in fp32. Rotary columns are multiplied in bf16, by
//        mma.sync
//   O^T  the columns of a group are multiplied by P^T * the tokens' scales: P^T is stored for each group
//
// A tile has a unit for each group, the least power of two above the scales of its tokens. P^T is stored times a
// token's scale over the unit, for each group: [group][term] and so on as in keys_e4m3.cuh. What a tile adds
// to O^T is multiplied by the unit, in fp32.
//
// A stage has, after the e4m3 columns, [token][kTailBytes]: 16 bytes of scales and 128 of rotary columns.
#pragma once
#include "keys_e4m3.cuh"
#include "numbers/record_units.cuh"

namespace mla::hopper {

// Four B fragments of 8 query rows: the 64 columns of a column block. `row` is that of this lane, row lane / 4.
__device__ __forceinline__ void load_query_fragments(uint32_t (&fragments)[4][2], const unsigned char* row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int vector = (lane % 4 * 2 + i) ^ lane / 4;
        const uint4 words = *reinterpret_cast<const uint4*>(row + vector * 16);
        fragments[i * 2][0] = words.x, fragments[i * 2][1] = words.y;
        fragments[i * 2 + 1][0] = words.z, fragments[i * 2 + 1][1] = words.w;
    }
}

template <typename C>
struct FewRowsKeysRecords {
    using Blocks = float[C::kBlocks][C::kRows / 2];
    using Memory = typename FewRowsKeysE4m3<C>::Memory;
    using Scales = typename FewRowsKeysE4m3<C>::Scales;
    static constexpr int kScores = C::kRows / 2;
    static constexpr int kGroups = C::Layout::kScales;
    static constexpr int kGroupBlocks = C::Layout::kScaleColumns / 64;
    static_assert(kGroups == 4);

    ConsumerThread<C>& t;
    FewRowsKeysE4m3<C> e4m3;
    float units[kGroups];       // of this tile
    float factors[2][kGroups];  // of the thread's two tokens, 8 apart: their scales, later the factors of stored P^T

    __device__ FewRowsKeysRecords(ConsumerThread<C>& t, Memory& memory, Scales& scales)
        : t(t), e4m3(t, memory, scales) {}

    static __device__ float cache_scale() { return 1.f; }
    __device__ void prepare_queries(int q_buffer, float kv_scale) { e4m3.prepare_queries(q_buffer, kv_scale); }
    __device__ void zero_values(unsigned char* kv, int valid) const { e4m3.zero_values(kv, valid); }
    __device__ void publish_weights() const { e4m3.publish_weights(); }
    __device__ float output_unit() const { return e4m3.output_unit(); }
    __device__ float largest_value() const { return e4m3.largest_value(); }

    // S^T = K Q^T over a tile, in log2.
    __device__ void scores(float (&s)[kScores], const PipelineState<C::kStages>& ring, int q_buffer) {
        t.rings.kv_full[ring.stage][C::full_barrier_of(C::kRopeSegment)].wait(ring.phase);
        const unsigned char* own_tail = tail(t.rings.kv[ring.stage], t.warp * 16 + t.lane / 4);
        float rotary[kScores] = {};
        add_rotary(rotary, own_tail, q_buffer);
        load_scales(own_tail);
        e4m3.multiply_keys(ring, [&](int block, int i, float product) {
            s[i] = fmaf(product, factors[i / 2 % 2][block / kGroupBlocks], block == 0 ? 0.f : s[i]);
        });
        t.profiler.mark(Event::kScores);
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            s[i] =
                s[i] * e4m3.scales.score_scales[q_buffer][row_of(t.lane, row_of_score(i))] + rotary[i] * t.p.scale_log2;
    }

    // Chooses the units of a tile of which the first `valid` tokens exist, by each warp for itself.
    __device__ void scores_are_known(const unsigned char* kv, int valid) {
        float largest[kGroups] = {};
#pragma unroll
        for (int token = 0; token < C::kTile; token += 32) {
            if (token + t.lane >= valid) continue;
            const auto scales = *reinterpret_cast<const float4*>(tail(kv, token + t.lane));
            largest[0] = fmaxf(largest[0], fabsf(scales.x)), largest[1] = fmaxf(largest[1], fabsf(scales.y));
            largest[2] = fmaxf(largest[2], fabsf(scales.z)), largest[3] = fmaxf(largest[3], fabsf(scales.w));
        }
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            // As they are not negative, floats have the order of their bits.
            units[group] = unit_above(__int_as_float(__reduce_max_sync(~0u, __float_as_int(largest[group]))));
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const bool exists = t.warp * 16 + t.lane / 4 + k * 8 < valid;
                factors[k][group] = exists ? factors[k][group] * over_power(units[group]) * C::kWeightScale : 0.f;
            }
        }
        if (t.thread == 0) {
            float& largest = e4m3.scales.largest_scales[t.consumer];
            largest = fmaxf(largest, fmaxf(fmaxf(units[0], units[1]), fmaxf(units[2], units[3])));
        }
    }

    __device__ void store_weights(unsigned char* target, int j, const float (&e)[4]) const {
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
            e4m3.store_weight_terms(
                target + group * FewRowsKeysE4m3<C>::kTermsBytes + j * FewRowsKeysE4m3<C>::kWeightOctetBytes, e,
                factors[0][group], factors[1][group]);
    }

    // O^T += V^T P^T over a tile.
    __device__ void accumulate(Blocks& o, const unsigned char* kv, const unsigned char* weights) {
        e4m3.template multiply_values<kGroupBlocks>(kv, weights, [&](int block, int i, float product) {
            o[block][i] = fmaf(product, units[block / kGroupBlocks], o[block][i]);
        });
    }

  private:
    static __device__ const unsigned char* tail(const unsigned char* kv, int token) {
        return kv + C::kRopeSegment * C::kSegmentBytes + token * C::Layout::kTailBytes;
    }

    // The scales of the thread's tokens, of which `own_tail` is the first one's.
    __device__ void load_scales(const unsigned char* own_tail) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const auto scales = *reinterpret_cast<const float4*>(own_tail + k * 8 * C::Layout::kTailBytes);
            factors[k][0] = scales.x, factors[k][1] = scales.y, factors[k][2] = scales.z, factors[k][3] = scales.w;
        }
    }

    // Adds the products of the warp's 16 tokens' rotary columns. A lane reads 16 columns of two tokens, and the same
    // ones of a query row: the order of columns within a product is arbitrary, as long as keys and queries use the
    // same one.
    __device__ void add_rotary(float (&sums)[kScores], const unsigned char* own_tail, int q_buffer) const {
        uint32_t keys[4][4];
#pragma unroll
        for (int k = 0; k < 2; ++k)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto words = *reinterpret_cast<const uint4*>(own_tail + k * 8 * C::Layout::kTailBytes +
                                                                   kGroups * 4 + (t.lane % 4 * 2 + i) * 16);
                keys[i * 2][k] = words.x, keys[i * 2][k + 2] = words.y;
                keys[i * 2 + 1][k] = words.z, keys[i * 2 + 1][k + 2] = words.w;
            }
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            uint32_t queries[4][2];
            const unsigned char* row =
                t.rings.q[q_buffer] + FewRowsKeysE4m3<C>::kLatentBlocks * C::kQueryColumnBlockBytes;
            load_query_fragments(queries, row + (j * 8 + t.lane / 4) * 128);
#pragma unroll
            for (int step = 0; step < 4; ++step)
                mma<__nv_bfloat16>(reinterpret_cast<float (&)[4]>(sums[j * 4]), keys[step], queries[step][0],
                                   queries[step][1]);
        }
    }
};

}  // namespace mla::hopper
