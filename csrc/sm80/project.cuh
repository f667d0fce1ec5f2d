// Products of each head's rows with a matrix of its own, for few tokens: what absorbs queries and expands outputs.
//
//   out[t, h, :] = x[t, h, :] * w[h]        x [tokens, heads, in], w [heads, in, out], out [tokens, heads, out]
//
// The product of queries also appends the step's new latents to the cache, which attention is about to read: a kernel
// of its own that would take as long again.
//
// At this size a product takes as long as its memory's latency. A CTA therefore asks for its part of the weights before
// it waits for the kernel that makes x, and every load after that is on its way at once.
//
// grid   slices of kColumns output columns, heads, blocks of kRows tokens
// block  8 warps: of 16 tokens, kColumns / kColumnWarps columns and a part of the sum each. Warps that share a sum add
//        it up in shared memory, in a fixed order.
//
// inputs are taken in a permuted order, the same for x and w, so that a lane's part of a row of x is 16 adjacent bytes:
//   of 32 inputs, lane l has those from l % 4 * 8 on, in pairs. Pairs 0 and 1 are its operands of one mma, 2 and 3 of
//   the next. Matrix j of `weights` consists of the rows that are pair j of some lane.
#pragma once
#include "../common/copy.cuh"
#include "../common/sync.cuh"
#include "mma.cuh"

namespace mla::sm80 {

// New rows of the latent cache: [tokens, d_c] and [tokens, d_rope] go to their slots (page * page_size + row); a
// negative slot gets none.
struct AppendParams {
    const void* latent;
    const void* rope;
    int64_t latent_stride, rope_stride;  // in elements
    const int64_t* slots;
    void* cache;
    int64_t page_stride, row_stride;
    int page_size, dim_rope, num_tokens;
};

struct ProjectParams {
    const void* x;
    int64_t x_token_stride, x_head_stride;  // in elements
    const void* w;
    void* out;
    int64_t out_token_stride, out_head_stride;
    int num_tokens, num_heads;
    AppendParams append;  // no tokens, if there is nothing to append
};

// kRowWarps * 16 tokens, kColumnWarps parts of kColumns columns; the sum is divided among the rest of the 8 warps.
template <typename Element_, int kDimIn_, int kDimOut_, int kColumns_, int kRowWarps_, int kColumnWarps_,
          bool kDependentLaunch_>
struct ProjectConfig {
    using Element = Element_;
    static constexpr int kDimIn = kDimIn_;
    static constexpr int kDimOut = kDimOut_;
    static constexpr int kColumns = kColumns_;
    static constexpr int kRowWarps = kRowWarps_;
    static constexpr int kColumnWarps = kColumnWarps_;
    static constexpr bool kDependentLaunch = kDependentLaunch_;

    static constexpr int kThreads = 256;
    static constexpr int kRows = kRowWarps * 16;
    static constexpr int kSumWarps = 8 / kRowWarps / kColumnWarps;
    static constexpr int kSlices = kDimOut / kColumns;
    static constexpr int kPieces = kColumns / 8;             // of 16 bytes, of a row of w
    static constexpr int kEights = kPieces / kColumnWarps;   // of 8 columns, of a warp
    static constexpr int kBlocks = kDimIn / 32 / kSumWarps;  // of 32 inputs, of a warp
    static constexpr int kCopies = kDimIn * kPieces / kThreads;

    static_assert(kRowWarps * kColumnWarps * kSumWarps == 8);
    static_assert(kDimOut % kColumns == 0 && kPieces % kColumnWarps == 0 && (kPieces & (kPieces - 1)) == 0);
    static_assert(kDimIn % (32 * kSumWarps) == 0 && kDimIn * kPieces % kThreads == 0);
};

template <typename C>
struct ProjectMemory {
    // Of 32 inputs, 4 matrices of 8 inputs for each 8 columns. A piece's place is exclusive-ored with its columns', so
    // that a row of w, which several lanes copy, goes to different banks.
    alignas(128) uint4 weights[C::kDimIn / 32][4][C::kPieces][8];
    float4 sums[C::kSumWarps == 1 ? 1 : 8][C::kEights][32];
};

// Each token by one CTA, in pieces of 16 bytes.
template <typename C>
__device__ __forceinline__ void append(const AppendParams& p) {
    using Element = typename C::Element;
    for (int token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
        const int64_t slot = p.slots[token];
        const int latent_pieces = C::kDimOut / 8, piece = threadIdx.x;
        if (slot < 0 || piece >= latent_pieces + p.dim_rope / 8) continue;
        const auto* from =
            piece < latent_pieces
                ? static_cast<const Element*>(p.latent) + token * p.latent_stride + piece * 8
                : static_cast<const Element*>(p.rope) + token * p.rope_stride + (piece - latent_pieces) * 8;
        auto* to = static_cast<Element*>(p.cache) + slot / p.page_size * p.page_stride +
                   slot % p.page_size * p.row_stride + piece * 8;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    }
}

template <typename C>
__global__ void __launch_bounds__(C::kThreads) project_kernel(const __grid_constant__ ProjectParams p) {
    using Element = typename C::Element;
    extern __shared__ __align__(128) unsigned char bytes[];
    auto& smem = *reinterpret_cast<ProjectMemory<C>*>(bytes);
    const int slice = blockIdx.x % C::kSlices, head = blockIdx.x / C::kSlices % p.num_heads;
    const int first_token = blockIdx.x / C::kSlices / p.num_heads * C::kRows;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row_warp = warp % C::kRowWarps, column_warp = warp / C::kRowWarps % C::kColumnWarps;
    const int sum_warp = warp / C::kRowWarps / C::kColumnWarps;

    const auto* w = static_cast<const Element*>(p.w) + int64_t(head) * C::kDimIn * C::kDimOut + slice * C::kColumns;
    auto for_own_pieces = [&](auto action) {
#pragma unroll
        for (int i = 0; i < C::kCopies; ++i) {
            const int index = i * C::kThreads + threadIdx.x;
            action(index / C::kPieces, index % C::kPieces);
        }
    };
    if constexpr (C::kDependentLaunch) {
        for_own_pieces([&](int input, int piece) { prefetch_to_l2(w + input * C::kDimOut + piece * 8); });
        wait_for_predecessor();
        allow_successor();
    }
    for_own_pieces([&](int input, int piece) {
        const int within = input % 32, matrix = within % 8 / 2, row = within / 8 * 2 + within % 2;
        mla::cp_async_16(smem_address(&smem.weights[input / 32][matrix][piece][row ^ piece % 8]),
                         w + input * C::kDimOut + piece * 8, true);
    });
    cp_async_commit();

    uint4 x[C::kBlocks][2];  // rows lane / 4 and lane / 4 + 8
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int token = first_token + row_warp * 16 + i * 8 + lane / 4;
        const auto* row = reinterpret_cast<const uint4*>(static_cast<const Element*>(p.x) + token * p.x_token_stride +
                                                         head * p.x_head_stride + sum_warp * C::kBlocks * 32);
#pragma unroll
        for (int block = 0; block < C::kBlocks; ++block)
            x[block][i] = token < p.num_tokens ? row[block * 4 + lane % 4] : make_uint4(0, 0, 0, 0);
    }
    append<C>(p.append);
    cp_async_wait<0>();
    __syncthreads();

    float sum[C::kEights][4] = {};
#pragma unroll
    for (int block = 0; block < C::kBlocks; ++block) {
        const uint32_t first[4] = {x[block][0].x, x[block][1].x, x[block][0].y, x[block][1].y};
        const uint32_t second[4] = {x[block][0].z, x[block][1].z, x[block][0].w, x[block][1].w};
#pragma unroll
        for (int i = 0; i < C::kEights; ++i) {
            const int piece = column_warp * C::kEights + i;
            uint32_t pairs[4];
            load_matrices_transposed(
                pairs,
                smem_address(&smem.weights[sum_warp * C::kBlocks + block][lane / 8][piece][lane % 8 ^ piece % 8]));
            mma<Element>(sum[i], first, pairs[0], pairs[1]);
            mma<Element>(sum[i], second, pairs[2], pairs[3]);
        }
    }
    if constexpr (C::kSumWarps > 1) {
#pragma unroll
        for (int i = 0; i < C::kEights; ++i)
            smem.sums[warp][i][lane] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < C::kEights; ++i) {
        if (i % C::kSumWarps != sum_warp) continue;
        if constexpr (C::kSumWarps > 1) {
#pragma unroll
            for (int k = 0; k < 4; ++k) sum[i][k] = 0.f;
#pragma unroll
            for (int other = 0; other < C::kSumWarps; ++other) {
                const float4 part = smem.sums[warp + (other - sum_warp) * C::kRowWarps * C::kColumnWarps][i][lane];
                sum[i][0] += part.x, sum[i][1] += part.y, sum[i][2] += part.z, sum[i][3] += part.w;
            }
        }
        const int column = slice * C::kColumns + (column_warp * C::kEights + i) * 8 + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = first_token + row_warp * 16 + half * 8 + lane / 4;
            const Element pair[2] = {static_cast<Element>(sum[i][half * 2]),
                                     static_cast<Element>(sum[i][half * 2 + 1])};
            auto* out = static_cast<Element*>(p.out) + token * p.out_token_stride + head * p.out_head_stride + column;
            if (token < p.num_tokens) *reinterpret_cast<uint32_t*>(out) = reinterpret_cast<const uint32_t&>(pair);
        }
    }
}

}  // namespace mla::sm80
