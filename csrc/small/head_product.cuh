// The product of each head's rows with the head's weights, out[t, h, :] = x[t, h, :] * W[h], for few tokens: of queries
// with W_UK, and of attention's outputs with W_UV.
//
// With few tokens, loading the weights takes most of the time. No kernel of a step writes them, so they are loaded
// while the predecessor still runs. Sums have one order, so the same inputs give the same bits.
//
// grid   a CTA for each C::kColumns columns of each head
// block  C::kWarps warps, which divide the columns; if there are fewer blocks of 16 columns than warps, also the depth
//
//   load the weights of the CTA's columns
//   wait for the predecessor, load x of the head
//   multiply: weights are A of the tensor cores' products, because there may be only one token
//   add up the sums of the warps that divide the depth, and store them
#pragma once
#include <algorithm>

#include "numbers/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "ptx/operands.cuh"
#include "ptx/pdl.cuh"
#include "schedule/params.cuh"

namespace mla {

// Strides count elements; the last dimension of x and of out is contiguous.
struct HeadProductParams {
    const void* x;  // [tokens, heads, depth]
    int64_t x_token_stride, x_head_stride;
    const void* weights;  // [heads, depth, columns]: rows of depth or of columns are contiguous
    int64_t weights_head_stride, weights_row_stride;
    void* out;  // [tokens, heads, columns]
    int64_t out_token_stride, out_head_stride;
    int tokens;
    Divisor ctas_per_head;
};

// kTokens: the most that there are, a multiple of 8. kDepthContiguous: the weights of a column are contiguous, instead
// of those of a row.
template <typename Element_, int kDepth_, int kTokens_, bool kDepthContiguous_>
struct HeadProductConfig {
    using Element = Element_;
    static constexpr int kDepth = kDepth_, kTokens = kTokens_;
    static constexpr bool kDepthContiguous = kDepthContiguous_;
    static constexpr int kWarps = 8, kThreads = kWarps * 32;
    static constexpr int kColumns = kDepth > 128 ? 32 : 64;  // of a CTA
    static constexpr int kColumnWarps = std::min(kWarps, kColumns / 16), kDepthWarps = kWarps / kColumnWarps;
    static constexpr int kSteps = kDepth / 16 / kDepthWarps;  // of a warp, with 16 of the depth each
    static_assert(kDepth % (16 * kDepthWarps) == 0 && kTokens % 8 == 0);
    // Of rows in shared memory, in elements. 16 bytes more than the row has, so that ldmatrix meets all banks.
    static constexpr int kWeightRows = kDepthContiguous ? kColumns : kDepth;
    static constexpr int kWeightWidth = kDepthContiguous ? kDepth : kColumns;
    static constexpr int kWeightPitch = kWeightWidth + 8, kXPitch = kDepth + 8, kSumPitch = kColumns + 4;

    struct SharedMemory {  // 54 KB with 8 tokens and a depth of 512, 135 KB with 64
        alignas(16) Element weights[kWeightRows][kWeightPitch];
        alignas(16) Element x[kTokens][kXPitch];
        alignas(16) float sums[kDepthWarps][kTokens][kSumPitch];
    };
};

// Loads rows of kWidth elements, as many at once as the CTA has threads for. copy(to, from) copies 16 bytes.
template <typename C, int kWidth, int kPitch, typename Copy>
__device__ __forceinline__ void load_rows(const typename C::Element* from, int64_t stride, uint32_t to, int rows,
                                          Copy copy) {
    constexpr int kVectors = kWidth / 8, kAtOnce = C::kThreads / kVectors;
    const int first = threadIdx.x / kVectors, vector = threadIdx.x % kVectors;
    if (first >= kAtOnce) return;
    from += first * stride + vector * 8;
    to += (first * kPitch + vector * 8) * sizeof(*from);
#pragma unroll 8
    for (int row = first; row < rows; row += kAtOnce) {
        copy(to, from);
        from += kAtOnce * stride;
        to += kAtOnce * kPitch * sizeof(*from);
    }
}

// Multiplies the warp's part of the depth for its 16 columns.
template <typename C>
__device__ __forceinline__ void multiply(typename C::SharedMemory& smem) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column = warp % C::kColumnWarps * 16, part = warp / C::kColumnWarps;
    float sums[C::kTokens / 8][4] = {};
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
        const int k = (part * C::kSteps + step) * 16;
        uint32_t a[4];
        if constexpr (C::kDepthContiguous)
            load_matrices(a, smem_address(&smem.weights[column + lane % 16][k + lane / 16 * 8]));
        else
            load_matrices_transposed(
                a, smem_address(&smem.weights[k + lane % 8 + lane / 16 * 8][column + lane / 8 % 2 * 8]));
#pragma unroll
        for (int tokens = 0; tokens < C::kTokens / 8; ++tokens) {
            uint32_t b[2];
            load_matrices(b, smem_address(&smem.x[tokens * 8 + lane % 8][k + lane / 8 % 2 * 8]));
            mma<typename C::Element>(sums[tokens], a, b[0], b[1]);
        }
    }
#pragma unroll
    for (int tokens = 0; tokens < C::kTokens / 8; ++tokens)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            smem.sums[part][tokens * 8 + lane % 4 * 2 + i % 2][column + lane / 4 + i / 2 * 8] = sums[tokens][i];
}

// Adds up the sums of the parts of the depth, and stores the results of columns from `out` on.
template <typename C>
__device__ __forceinline__ void store_sums(const HeadProductParams& p, typename C::Element* out,
                                           const typename C::SharedMemory& smem) {
    constexpr unsigned kVectors = C::kColumns / 4;  // of a token
#pragma unroll 4
    for (unsigned index = threadIdx.x; index < p.tokens * kVectors; index += C::kThreads) {
        const int token = index / kVectors, column = index % kVectors * 4;
        float4 sum = *reinterpret_cast<const float4*>(&smem.sums[0][token][column]);
#pragma unroll
        for (int part = 1; part < C::kDepthWarps; ++part) {
            const float4 other = *reinterpret_cast<const float4*>(&smem.sums[part][token][column]);
            sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
        }
        using Element = typename C::Element;
        *reinterpret_cast<uint2*>(out + token * p.out_token_stride + column) =
            make_uint2(pack<Element>(sum.x, sum.y), pack<Element>(sum.z, sum.w));
    }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads) head_product_kernel(const __grid_constant__ HeadProductParams p) {
    using Element = typename C::Element;
    extern __shared__ __align__(128) unsigned char bytes[];
    auto& smem = *reinterpret_cast<typename C::SharedMemory*>(bytes);
    int head, column;
    p.ctas_per_head.split(blockIdx.x, head, column);
    column *= C::kColumns;
    allow_successor();
    const Element* weights = static_cast<const Element*>(p.weights) + head * p.weights_head_stride +
                             column * (C::kDepthContiguous ? p.weights_row_stride : 1);
    load_rows<C, C::kWeightWidth, C::kWeightPitch>(
        weights, p.weights_row_stride, smem_address(smem.weights), C::kWeightRows,
        [](uint32_t to, const void* from) { cp_async_16_of_weights(to, from); });
    const Element* x = static_cast<const Element*>(p.x) + head * p.x_head_stride;
    wait_for_predecessor();
    // Rows of further tokens are not set: what they hold only reaches sums that are not read.
    load_rows<C, C::kDepth, C::kXPitch>(x, p.x_token_stride, smem_address(smem.x), p.tokens,
                                        [](uint32_t to, const void* from) { cp_async_16_or_zero(to, from, true); });
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    multiply<C>(smem);
    __syncthreads();
    store_sums<C>(p, static_cast<Element*>(p.out) + head * p.out_head_stride + column, smem);
}

}  // namespace mla
