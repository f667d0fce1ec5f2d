// What neighbouring lanes have in common: of kLanes lanes, a power of two, each gets the result.
#pragma once

namespace mla {

template <int kLanes>
__device__ __forceinline__ float max_over_lanes(float value) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2)
        value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
    return value;
}

template <int kLanes>
__device__ __forceinline__ float sum_over_lanes(float value) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) value += __shfl_xor_sync(~0u, value, distance);
    return value;
}

}  // namespace mla
