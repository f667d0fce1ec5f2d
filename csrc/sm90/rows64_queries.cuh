// Queries for fp8 keys, which the loader has copied as they are: the consumers of rows64.cuh convert them in place.
#pragma once
#include "../common/fp8_queries.cuh"
#include "../common/lanes.cuh"
#include "../common/params.cuh"
#include "fp8.cuh"
#include "wgmma.cuh"

namespace mla::sm90 {

// By both consumers, `thread` of their 256: 8 threads a row, of which each has a vector of 16 B of every column block.
// The rotary columns of records stay bf16, as those of the keys.
// Not by `QueryRow`: with its addresses these kernels spill.
template <typename C, typename S>
__device__ __forceinline__ void convert_queries(const DecodeParams& p, S& smem, int thread) {
    using Element = typename C::Element;
    constexpr int kStride = C::kQueryColumnBlockBytes / 16;
    float scale = p.scale_log2;
    if constexpr (!C::Layout::kIsRecord) scale *= *p.kv_scale;
#pragma unroll 1
    for (int r = thread / 8; r < C::kRows; r += 256 / 8) {
        auto* row = reinterpret_cast<uint4*>(smem.q[0] + r / 8 * 1024 + vector_offset<128>(r % 8, thread % 8));
        uint4 blocks[C::kColumnBlocks];
        float most = 0.f;
#pragma unroll
        for (int i = 0; i < C::kColumnBlocks; ++i) {
            blocks[i] = row[i * kStride];
            most = fmaxf(most, fmaxf(largest_of<Element>(blocks[i].x), largest_of<Element>(blocks[i].y)));
            most = fmaxf(most, fmaxf(largest_of<Element>(blocks[i].z), largest_of<Element>(blocks[i].w)));
        }
        const QueryScale factor = QueryScale::of(max_over_lanes<8>(most));
        if (thread % 8 == 0) smem.fp8.score_scales[r] = scale * factor.inverse;
#pragma unroll
        for (int i = 0; i < C::kColumnBlocks; ++i) {
            auto converted = [&](uint32_t pair) {
                const float2 values = floats_of<Element>(pair);
                const float first = values.x * factor.factor, second = values.y * factor.factor;
                return C::Layout::kIsRecord && i == C::kRopeSegment ? pack<__nv_bfloat16>(first, second)
                                                                    : pack<__half>(first, second);
            };
            row[i * kStride] = make_uint4(converted(blocks[i].x), converted(blocks[i].y), converted(blocks[i].z),
                                          converted(blocks[i].w));
        }
    }
}

}  // namespace mla::sm90
