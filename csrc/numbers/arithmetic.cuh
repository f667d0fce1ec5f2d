// Arithmetic of softmaxes on values in registers: rows without keys, powers of two, conversions, and reductions over
// lanes.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "approximate.cuh"

namespace mla {

constexpr double kLog2OfE = 1.4426950408889634, kLnOf2 = 0.6931471805599453;

// How far a score may exceed the maximum in use (in log2).
constexpr float kStaleBound = 8.f;

// The maximum of a row without keys is -inf; differences to it must not be NaN.
__device__ __forceinline__ float finite(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }
// The weights of such a row sum to 0, and its output is zeros. (A division would be a function call.)
__device__ __forceinline__ float inverse(float total) { return total > 0.f ? reciprocal_approx(total) : 0.f; }

// 2^(exponent - 127): `exponent` is biased, as a float stores it.
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float(exponent << 23); }
// The logarithm of a power of two, base 2.
__device__ __forceinline__ int exact_log2(int power) { return 31 - __clz(power); }

// Two values as the 16-bit halves of a register, the first one low.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
    if constexpr (std::is_same_v<T, __half>) {
        const __half2 both = __floats2half2_rn(low, high);
        return reinterpret_cast<const uint32_t&>(both);
    } else {
        const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return reinterpret_cast<const uint32_t&>(both);
    }
}

// Reductions over groups of kLanes neighbouring lanes, a power of two. Every lane of a group gets the result.
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
// The maximum over a warp of values none of which is NaN.
__device__ __forceinline__ float warp_max(float x) {
    // Read as integers, floats keep their order, but that of negative ones is reversed.
    auto in_order = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(in_order(__reduce_max_sync(~0u, in_order(__float_as_int(x)))));
}

}  // namespace mla
