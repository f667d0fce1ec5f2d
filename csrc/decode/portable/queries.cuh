// A warp's queries, in registers for a whole work tile.
#pragma once
#include "config.cuh"
#include "numbers/arithmetic.cuh"
#include "numbers/query_scale.cuh"

namespace mla::portable {

template <typename C>
struct Queries {
    using Element = typename C::Element;

    const int lane = threadIdx.x % 32;
    uint32_t q[C::kScoreOctets][C::kScoreColumns / 16 + 1][2];  // fragments (mma.cuh); the last one has rotary columns
    // What scores of this lane's rows are multiplied by; see load_widened. With scales of groups, GroupScaleMemory has
    // it.
    float score_scales[C::kWidens && !C::kGroupScales ? C::kScoreOctets : 1][2];

    static __device__ int column_group() { return threadIdx.x / 32 / C::kRowGroups; }
    static __device__ int first_octet() { return threadIdx.x / 32 % C::kRowGroups * C::kScoreOctets; }

    // Loads those of a work tile; rows that do not exist are zeros.
    __device__ void load(const DecodeParams& p, DecodeMemory<C>& smem, const WorkTile& work) {
        if constexpr (C::kWidens)
            load_widened(p, smem, work);
        else
            load_16_bit(p, work);
    }

  private:
    static constexpr int kRopeStep = C::kScoreColumns / 16;                // the fragment with rotary columns
    static constexpr int kWidened = kRopeStep + (C::kWidensRope ? 1 : 0);  // fragments that become fp16

    // Loads rotary columns unconverted; `rope` points to this lane's first one.
    static __device__ void load_rope(uint32_t (&fragment)[2], const Element* rope, bool exists) {
#pragma unroll
        for (int i = 0; i < 2; ++i) fragment[i] = exists ? *reinterpret_cast<const uint32_t*>(rope + i * 8) : 0;
    }

    __device__ void load_16_bit(const DecodeParams& p, const WorkTile& work) {
#pragma unroll
        for (int octet = 0; octet < C::kScoreOctets; ++octet) {
            const QueryRow row = query_row<C>(p, work, (first_octet() + octet) * 8 + lane / 4);
            const auto* nope = static_cast<const Element*>(p.q_nope) + row.token * p.q_nope_token_stride +
                               row.head * p.q_nope_head_stride + column_group() * C::kScoreColumns + lane % 4 * 2;
            const auto* rope = static_cast<const Element*>(p.q_rope) + row.token * p.q_rope_token_stride +
                               row.head * p.q_rope_head_stride + column_group() * 16 + lane % 4 * 2;
            auto load = [](const Element* at, bool exists) {
                return exists ? *reinterpret_cast<const uint32_t*>(at) : 0;
            };
#pragma unroll
            for (int i = 0; i < C::kScoreColumns / 8; ++i) q[octet][i / 2][i % 2] = load(nope + i * 8, row.exists);
            load_rope(q[octet][kRopeStep], rope, row.exists && column_group() < C::kRopeGroups);
        }
    }

    // For keys that become fp16: in fp16, and in the order of their fragments. fp16 has a smaller range than bf16, so
    // this warp's columns of a row are multiplied by a power of two, and the row's partial scores by its inverse.
    __device__ void load_widened(const DecodeParams& p, DecodeMemory<C>& smem, const WorkTile& work) {
        const float key_scale = tensor_scale<C>(p) * kE4m3Unit;
#pragma unroll
        for (int octet = 0; octet < C::kScoreOctets; ++octet) {
            const QueryRow row = query_row<C>(p, work, (first_octet() + octet) * 8 + lane / 4);
            const bool has_rope = column_group() < C::kRopeGroups;
            const auto* nope = static_cast<const Element*>(p.q_nope) + row.token * p.q_nope_token_stride +
                               row.head * p.q_nope_head_stride + column_group() * C::kScoreColumns + lane % 4 * 4;
            const auto* rope = static_cast<const Element*>(p.q_rope) + row.token * p.q_rope_token_stride +
                               row.head * p.q_rope_head_stride + column_group() * 16 + lane % 4 * 4;
            float largest = 0.f;
#pragma unroll
            for (int i = 0; i < kWidened; ++i) {
                const bool is_rope = i == kRopeStep;
                uint2 words = make_uint2(0, 0);
                if (row.exists && (!is_rope || has_rope))
                    words = *reinterpret_cast<const uint2*>(is_rope ? rope : nope + i * 16);
                largest = fmaxf(largest, fmaxf(largest_of<Element>(words.x), largest_of<Element>(words.y)));
                q[octet][i][0] = words.x, q[octet][i][1] = words.y;
            }
            const QueryScale scale = QueryScale::of(max_over_lanes<4>(largest));
#pragma unroll
            for (int i = 0; i < kWidened; ++i) convert_queries<Element>(q[octet][i][0], q[octet][i][1], scale.factor);
            if constexpr (!C::kWidensRope) load_rope(q[octet][kRopeStep], rope - lane % 4 * 2, row.exists && has_rope);
            if constexpr (C::kGroupScales) {
                if (lane % 4 == 0)
                    smem.score_scales[column_group()][(first_octet() + octet) * 8 + lane / 4] =
                        scale.inverse * key_scale;
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    score_scales[octet][i] = __shfl_sync(~0u, scale.inverse, (lane % 4 * 2 + i) * 4) * key_scale;
            }
        }
        if constexpr (C::kGroupScales) __syncwarp();
    }
};

}  // namespace mla::portable
