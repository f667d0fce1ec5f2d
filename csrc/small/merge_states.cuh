// Merges the attention over two disjoint sets of keys, weighted by their log-sum-exp, in one pass over the outputs.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "numbers/arithmetic.cuh"

namespace mla {

constexpr int kMergeThreads = 256;

struct MergeParams {
    const void *a, *b;  // [tokens, heads, d]
    void* out;          // [tokens, heads, d]
    int64_t a_token_stride, a_head_stride, b_token_stride, b_head_stride, out_token_stride, out_head_stride;
    const float *a_lse, *b_lse;  // [tokens, heads], natural log; -inf where a side has no keys, whose output is ignored
    float* lse;                  // [tokens, heads]
    int64_t a_lse_token_stride, a_lse_head_stride, b_lse_token_stride, b_lse_head_stride;
    int64_t rows;            // tokens * heads
    int num_heads, vectors;  // of 8 elements, of a row
};

// The weights of both sides. Their sum is 1; both are 0 if neither side has keys.
struct MergeWeights {
    float a, b, lse;

    __device__ MergeWeights(float a_lse, float b_lse) {
        constexpr float kLog2E = static_cast<float>(kLog2OfE);
        const float top = fmaxf(a_lse, b_lse), base = finite(top);
        a = exp2_approx((a_lse - base) * kLog2E);
        b = exp2_approx((b_lse - base) * kLog2E);
        const float sum = a + b, factor = inverse(sum);
        a *= factor, b *= factor;
        lse = sum == 0.f ? -INFINITY : base + log2_approx(sum) / kLog2E;
    }
};

// grid   CTAs of kMergeThreads; a thread merges 8 elements of a row
template <typename Element>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ MergeParams p) {
    union Vector {
        uint4 word;
        Element element[8];
    };
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kMergeThreads + threadIdx.x, row = index / p.vectors;
    if (row >= p.rows) return;
    const int column = static_cast<int>(index - row * p.vectors) * 8;
    const int64_t token = row / p.num_heads, head = row - token * p.num_heads;
    const MergeWeights weights(p.a_lse[token * p.a_lse_token_stride + head * p.a_lse_head_stride],
                               p.b_lse[token * p.b_lse_token_stride + head * p.b_lse_head_stride]);
    auto load = [&](const void* base, int64_t offset, float weight) {
        Vector vector = {};  // a side without weight may hold NaN
        if (weight > 0.f) vector.word = *reinterpret_cast<const uint4*>(static_cast<const Element*>(base) + offset);
        return vector;
    };
    const Vector a = load(p.a, token * p.a_token_stride + head * p.a_head_stride + column, weights.a);
    const Vector b = load(p.b, token * p.b_token_stride + head * p.b_head_stride + column, weights.b);
    Vector merged;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        merged.element[i] = static_cast<Element>(static_cast<float>(a.element[i]) * weights.a +
                                                 static_cast<float>(b.element[i]) * weights.b);
    auto* out = static_cast<Element*>(p.out) + token * p.out_token_stride + head * p.out_head_stride + column;
    *reinterpret_cast<uint4*>(out) = merged.word;
    if (column == 0) p.lse[row] = weights.lse;
}

}  // namespace mla
