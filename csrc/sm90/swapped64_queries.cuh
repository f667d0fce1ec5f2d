// Queries for swapped64.cuh, which the loader has copied as they are: the consumers convert them in place.
#pragma once
#include "../common/fp8_queries.cuh"
#include "../common/lanes.cuh"
#include "wgmma.cuh"

namespace mla::sm90 {

// A thread's share of a row: a vector of 16 B, `from`, of every column block; 8 neighbouring threads have the row.
// Returns what the row is to be multiplied by, so that its largest magnitude comes to lie in [2^kExponent,
// 2^(kExponent + 1)). `scale` turns products with keys as they are into scores in log2.
template <typename C, int kExponent, typename S>
__device__ __forceinline__ float load_query_row(S& smem, uint4 (&words)[C::kColumnBlocks], const unsigned char* from,
                                                int row, float scale) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < C::kColumnBlocks; ++i) {
        words[i] = *reinterpret_cast<const uint4*>(from + i * C::kQueryColumnBlockBytes);
        most = largest_of<typename C::Element>(most, words[i]);
    }
    most = max_over_lanes<8>(most);
    const QueryScale factor = QueryScale::of<kExponent>(most);
    // Not 0, by which masked scores, -INFINITY, are multiplied, too. NaN if a query is infinite, which no e4m3 is.
    if (threadIdx.x % 8 == 0) smem.score_scales[row] = most < INFINITY ? fmaxf(scale * factor.inverse, 0x1p-126f) : NAN;
    return factor.factor;
}

}  // namespace mla::sm90
