// What softmaxes have in common, and small functions of values in registers.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "math.cuh"

namespace mla {

constexpr double kLog2OfE = 1.4426950408889634, kLnOf2 = 0.6931471805599453;

// How far a score may exceed the maximum in use (in log2).
constexpr float kStaleBound = 8.f;

// The maximum of a row without keys is -inf; differences to it must not be NaN.
__device__ __forceinline__ float finite(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }
// The weights of such a row sum to 0, and its output is zeros. (A division would be a function call.)
__device__ __forceinline__ float inverse(float total) { return total > 0.f ? reciprocal_approx(total) : 0.f; }

// By its biased exponent.
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float(exponent << 23); }

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

}  // namespace mla
