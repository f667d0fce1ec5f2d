// The product of each head's rows with the head's weights, out[t, h, :] = x[t, h, :] * W[h], for few tokens: queries
// with W_UK, and attention's outputs with W_UV.
//
// It takes as long as its loads, so these overlap other kernels: weights depend on no kernel, and are loaded before the
// predecessor has ended.
//
// grid   heads * columns / C::kColumns CTAs, each with some columns of a head
// block  C::kWarps warps, which divide the CTA's columns, or if these are few, the depth
//
// Shared memory: SharedMemory, 27 KB for 8 tokens and 16 KB of weights.
#pragma once
#include <algorithm>

#include "numbers/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "ptx/operands.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tma.cuh"
#include "schedule/params.cuh"

namespace mla {

// Strides count elements; the last dimension of x and out is contiguous.
struct HeadProductParams {
    const void* x;  // [tokens, heads, depth]
    int64_t x_token_stride, x_head_stride;
    const void* weights;  // [heads, depth, columns], in which depth or columns are contiguous
    int64_t weights_head_stride, weights_row_stride;
    void* out;  // [tokens, heads, columns]
    int64_t out_token_stride, out_head_stride;
    int tokens;
    Divisor ctas_per_head;
    const void* next_weights;  // of the next product: brought to the L2 cache
    int64_t next_head_bytes;   // from one head to the next
    int next_cta_bytes;        // that each CTA of a head brings there; 0 for none
};

// kDepthContiguous: the weights of a column are contiguous, else those of a row. kTokens: at most, a multiple of 8.
constexpr int head_product_columns(int depth) {
    return depth >= 512 ? 16 : depth >= 192 ? 32 : depth >= 128 ? 64 : 128;
}
template <typename Element_, int kDepth_, int kTokens_, bool kDepthContiguous_, bool kDependentLaunch_, int kWarps_ = 4,
          int kColumns_ = head_product_columns(kDepth_)>
struct HeadProductConfig {
    using Element = Element_;
    static constexpr int kDepth = kDepth_, kTokens = kTokens_;
    static constexpr bool kDepthContiguous = kDepthContiguous_, kDependentLaunch = kDependentLaunch_;
    static constexpr int kWarps = kWarps_, kThreads = kWarps * 32;
    static constexpr int kColumns = kColumns_;
    static constexpr int kColumnWarps = std::min(kWarps, kColumns / 16), kDepthWarps = kWarps / kColumnWarps;
    static constexpr int kBlocks = kColumns / 16 / kColumnWarps;  // of 16 columns, of a warp
    static constexpr int kSteps = kDepth / 16 / kDepthWarps;      // of 16 rows of weights, of a warp
    static_assert(kDepth % (16 * kDepthWarps) == 0 && kTokens % 8 == 0);
    // Rows of shared memory in elements. 16 bytes more than the row, so that ldmatrix meets all banks.
    static constexpr int kWeightWidth = kDepthContiguous ? kDepth : kColumns;
    static constexpr int kXPitch = kDepth + 8, kWeightPitch = kWeightWidth + 8;
    static constexpr int kWeightRows = kDepthContiguous ? kColumns : kDepth;
    static constexpr int kSumPitch = kColumns + 4;

    struct SharedMemory {
        alignas(16) Element weights[kWeightRows][kWeightPitch];
        alignas(16) Element x[kTokens][kXPitch];
        alignas(16) float sums[kDepthWarps][kTokens][kSumPitch];
    };
};

// Loads `rows` rows of kWidth elements, as many at once as the CTA has threads for. copy(to, from) copies 16 bytes.
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

// The warp's part of the sums, with weights as A and x as B, goes to shared memory.
template <typename C>
__device__ __forceinline__ void multiply(typename C::SharedMemory& smem) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column = warp % C::kColumnWarps * C::kBlocks * 16, part = warp / C::kColumnWarps;
    const int depth = part * C::kSteps * 16;
    float sums[C::kBlocks][C::kTokens / 8][4] = {};
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
        const int k = depth + step * 16;
        uint32_t a[C::kBlocks][4];
#pragma unroll
        for (int block = 0; block < C::kBlocks; ++block) {
            const int n = column + block * 16;
            if constexpr (C::kDepthContiguous)
                load_matrices(a[block], smem_address(&smem.weights[n + lane % 16][k + lane / 16 * 8]));
            else
                load_matrices_transposed(
                    a[block], smem_address(&smem.weights[k + lane % 8 + lane / 16 * 8][n + lane / 8 % 2 * 8]));
        }
#pragma unroll
        for (int tokens = 0; tokens < C::kTokens / 8; ++tokens) {
            uint32_t b[2];
            load_matrices(b, smem_address(&smem.x[tokens * 8 + lane % 8][k + lane / 8 % 2 * 8]));
#pragma unroll
            for (int block = 0; block < C::kBlocks; ++block)
                mma<typename C::Element>(sums[block][tokens], a[block], b[0], b[1]);
        }
    }
#pragma unroll
    for (int block = 0; block < C::kBlocks; ++block)
#pragma unroll
        for (int tokens = 0; tokens < C::kTokens / 8; ++tokens)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                smem.sums[part][tokens * 8 + lane % 4 * 2 + i % 2][column + block * 16 + lane / 4 + i / 2 * 8] =
                    sums[block][tokens][i];
}

// Adds up the sums of the warps that divide the depth, and writes the results.
template <typename C>
__device__ __forceinline__ void store_sums(const HeadProductParams& p, int head, int column,
                                           const typename C::SharedMemory& smem) {
    using Element = typename C::Element;
    constexpr int kVectors = C::kColumns / 4;  // of a token
    Element* out = static_cast<Element*>(p.out) + head * p.out_head_stride + column;
#pragma unroll 4
    for (int index = threadIdx.x; index < p.tokens * kVectors; index += C::kThreads) {
        const int token = static_cast<unsigned>(index) / kVectors, vector = static_cast<unsigned>(index) % kVectors * 4;
        float4 sum = *reinterpret_cast<const float4*>(&smem.sums[0][token][vector]);
#pragma unroll
        for (int part = 1; part < C::kDepthWarps; ++part) {
            const float4 other = *reinterpret_cast<const float4*>(&smem.sums[part][token][vector]);
            sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
        }
        *reinterpret_cast<uint2*>(out + token * p.out_token_stride + vector) =
            make_uint2(pack<Element>(sum.x, sum.y), pack<Element>(sum.z, sum.w));
    }
}

// What CTA number `cta` of the product does. It allows the successor, and waits for the predecessor.
template <typename C>
__device__ __forceinline__ void multiply_head(const HeadProductParams& p, int cta, typename C::SharedMemory& smem) {
    using Element = typename C::Element;
    int head, of_head;
    p.ctas_per_head.split(cta, head, of_head);
    const int column = of_head * C::kColumns;
    if constexpr (C::kDependentLaunch) allow_successor();
    const Element* weights = static_cast<const Element*>(p.weights) + head * p.weights_head_stride +
                             column * (C::kDepthContiguous ? p.weights_row_stride : 1);
    load_rows<C, C::kWeightWidth, C::kWeightPitch>(
        weights, p.weights_row_stride, smem_address(smem.weights), C::kWeightRows,
        [](uint32_t to, const void* from) { cp_async_16_of_weights(to, from); });
    const Element* x = static_cast<const Element*>(p.x) + head * p.x_head_stride;
    if constexpr (C::kDependentLaunch) wait_for_predecessor();
    // Rows of further tokens are not set: what they hold only reaches sums that nobody reads.
    load_rows<C, C::kDepth, C::kXPitch>(x, p.x_token_stride, smem_address(smem.x), p.tokens,
                                        [](uint32_t to, const void* from) { cp_async_16_or_zero(to, from, true); });
    if constexpr (C::kDependentLaunch) {
        if (threadIdx.x == 0 && p.next_cta_bytes)
            bulk_prefetch(
                static_cast<const char*>(p.next_weights) + head * p.next_head_bytes + of_head * p.next_cta_bytes,
                p.next_cta_bytes, cache_policy(false));
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    multiply<C>(smem);
    __syncthreads();
    store_sums<C>(p, head, column, smem);
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads) head_product_kernel(const __grid_constant__ HeadProductParams p) {
    extern __shared__ __align__(128) unsigned char bytes[];
    multiply_head<C>(p, blockIdx.x, *reinterpret_cast<typename C::SharedMemory*>(bytes));
}

}  // namespace mla
