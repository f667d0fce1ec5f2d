// Queries for swapped64.cuh, which the loader has copied as they are: the consumers convert them in place.
#pragma once
#include "../common/fp8_queries.cuh"
#include "../common/lanes.cuh"
#include "fp8.cuh"
#include "wgmma.cuh"

namespace mla::sm90 {

// By both consumers, `thread` of their 256: 8 threads a row, of which each has a vector of 16 B of every column block.
// Columns become fp16, but the rotary ones of records bf16, and move to the places where the keys' columns are
// multiplied (fp8.cuh): column 16 t + 4 j + b of a block to 16 j + 2 t + b, and 6 further on for b of 2 and 3.
// `scale` turns products with keys as they are into scores in log2.
template <typename C, typename S>
__device__ __forceinline__ void convert_m_block_queries(S& smem, int thread, float scale) {
    using Element = typename C::Element;
    const int vector = thread % 8;
#pragma unroll 1
    for (int r = thread / 8; r < C::kRows; r += 256 / 8) {
        unsigned char* row = smem.q[0] + r / 8 * 1024 + r % 8 * 128;
        auto place = [&](int block, int v) { return row + block * C::kQueryColumnBlockBytes + (v ^ r % 8) * 16; };
        float most = 0.f;
#pragma unroll
        for (int i = 0; i < C::kColumnBlocks; ++i)
            most = largest_of<Element>(most, *reinterpret_cast<const uint4*>(place(i, vector)));
        const QueryScale factor = QueryScale::of(max_over_lanes<8>(most));
        // Not 0, by which masked scores, -INFINITY, are multiplied, too.
        if (vector == 0) smem.score_scales[r] = fmaxf(scale * factor.inverse, 0x1p-126f);
#pragma unroll 3
        for (int i = 0; i < C::kColumnBlocks; ++i) {
            const bool stays_bf16 = C::Layout::kIsRecord && i == C::kDimLatent / 64;
            const uint4 words = *reinterpret_cast<const uint4*>(place(i, vector));
            const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
            __syncwarp();  // all have read the block
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                float2 values = floats_of<Element>(pairs[k]);
                values.x *= factor.factor, values.y *= factor.factor;
                auto* to = reinterpret_cast<uint32_t*>(place(i, vector % 2 * 4 + k)) + vector / 2;
                *to = stays_bf16 ? pack<__nv_bfloat16>(values.x, values.y) : pack<__half>(values.x, values.y);
            }
        }
    }
}

}  // namespace mla::sm90
