// Each warp holds 16 query rows with all their columns in registers for a whole work tile: the A fragments of S = Q *
// K^T. Each warp converts some of the columns, and all warps read them from shared memory. If keys have a tail,
// queries' rotary columns stay in shared memory, as registers are few.
//
// The order of columns within a product is arbitrary, as long as queries and keys use the same one. So a lane reads
// neighbouring columns of a token at once, 16 of every 64, and the same columns of a query row.
#pragma once
#include "config.cuh"
#include "numbers/arithmetic.cuh"
#include "numbers/query_scale.cuh"

namespace mla::portable {

template <typename C>
struct TokenQueries {
    using Element = typename C::Element;
    static constexpr int kLatentSteps = C::kDimLatent / 16, kRopeSteps = C::kDimRope / 16;  // of 16 columns
    static constexpr int kOwnSteps = kLatentSteps / C::kWarps;  // whose columns a warp converts
    static constexpr int kHeldRopeSteps = C::kHasTail ? 0 : kRopeSteps;
    static_assert(kOwnSteps == 4 || kOwnSteps == 2);

    uint32_t q[kLatentSteps + kHeldRopeSteps][4];  // fragments (mma.cuh)
    float score_scales[2];  // of rows lane / 4 and lane / 4 + 8: what products of converted columns are multiplied by

    // To be called by all threads; overwrites smem.p and smem.rows, and a barrier must follow. Rows that do not exist
    // are zeros. fp16 has a smaller range than bf16, so columns that become fp16 are multiplied by a power of two, and
    // their products by its inverse.
    __device__ void load(const DecodeParams& p, DecodeMemory<C>& smem, const WorkTile& work) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        uint32_t own[kOwnSteps][4], rope[kRopeSteps > 0 ? kRopeSteps : 1][4] = {};
        constexpr int kLaneColumns = kOwnSteps * 4;  // of a row
        load_rows(own, p, work, p.q_nope, p.q_nope_token_stride, p.q_nope_head_stride,
                  warp * kLaneColumns / 16 * 64 + lane % 4 * 16 + warp * kLaneColumns % 16);
        if constexpr (kRopeSteps > 0)
            load_rows(rope, p, work, p.q_rope, p.q_rope_token_stride, p.q_rope_head_stride,
                      lane % 4 * (kRopeSteps * 4));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float largest = largest_of_row(own, i);
            if constexpr (C::kWidensRope) largest = fmaxf(largest, largest_of_row(rope, i));
            if (lane % 4 == 0) smem.rows[warp][lane / 4 + i * 8] = largest;
        }
        __syncthreads();
        const float key_scale = tensor_scale<C>(p) * kE4m3Unit;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float largest = 0.f;
#pragma unroll
            for (int w = 0; w < C::kWarps; ++w) largest = fmaxf(largest, smem.rows[w][lane / 4 + i * 8]);
            const QueryScale scale = QueryScale::of(largest);
            score_scales[i] = scale.inverse * key_scale;
            convert_row(own, i, scale.factor);
            if constexpr (C::kWidensRope) convert_row(rope, i, scale.factor);
        }
#pragma unroll
        for (int step = 0; step < kOwnSteps; ++step) smem.queries[warp * kOwnSteps + step][lane] = words_of(own[step]);
        if constexpr (C::kHasTail)
            if (warp == 0)
#pragma unroll
                for (int step = 0; step < kRopeSteps; ++step) smem.rope_queries[step][lane] = words_of(rope[step]);
        __syncthreads();
#pragma unroll
        for (int step = 0; step < kLatentSteps; ++step) {
            const uint4 words = smem.queries[step][lane];
            q[step][0] = words.x, q[step][1] = words.y, q[step][2] = words.z, q[step][3] = words.w;
        }
#pragma unroll
        for (int step = 0; step < kHeldRopeSteps; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) q[kLatentSteps + step][i] = rope[step][i];
    }

  private:
    static __device__ uint4 words_of(const uint32_t (&q)[4]) { return make_uint4(q[0], q[1], q[2], q[3]); }

    // Loads, of rows lane / 4 and lane / 4 + 8, four columns for each step, from column `first` on.
    template <int kSteps>
    static __device__ void load_rows(uint32_t (&fragments)[kSteps][4], const DecodeParams& p, const WorkTile& work,
                                     const void* queries, int64_t token_stride, int64_t head_stride, int first) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const QueryRow row = query_row<C>(p, work, i * 8 + threadIdx.x % 32 / 4);
            const auto* at =
                static_cast<const Element*>(queries) + row.token * token_stride + row.head * head_stride + first;
#pragma unroll
            for (int step = 0; step < kSteps; step += 2) {
                uint4 words = make_uint4(0, 0, 0, 0);
                if (row.exists) words = *reinterpret_cast<const uint4*>(at + step * 4);
                fragments[step][i] = words.x, fragments[step][i + 2] = words.y;
                fragments[step + 1][i] = words.z, fragments[step + 1][i + 2] = words.w;
            }
        }
    }

    // The largest magnitude of row i, over the four lanes with its columns.
    template <int kSteps>
    static __device__ float largest_of_row(const uint32_t (&fragments)[kSteps][4], int i) {
        float largest = 0.f;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            largest = fmaxf(
                largest, fmaxf(largest_of<Element>(fragments[step][i]), largest_of<Element>(fragments[step][i + 2])));
        return max_over_lanes<4>(largest);
    }

    template <int kSteps>
    static __device__ void convert_row(uint32_t (&fragments)[kSteps][4], int i, float factor) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            convert_queries_in_any_order<Element>(fragments[step][i], fragments[step][i + 2], factor);
    }
};

}  // namespace mla::portable
