// Powers of two in multiples of which fp16 expresses products with scales of groups: scales may be any numbers, but
// fp16 has few exponents. A unit is the least power of two above some scales: those of a token
// (many_rows_fp8/keys_records.cuh), or those of a group of columns in a tile (few_rows/keys_records.cuh). A reference
// (many_rows_fp8/kernel.cuh) is a power of two above many units.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

#include "arithmetic.cuh"

namespace mla {

constexpr int kLargestUnitExponent = 250;  // biased, as below: inverses are normal numbers
// P^T is multiplied by a token's unit, divided by the reference and multiplied by 2^kUnitExponent: it is at most 2^15.
constexpr int kUnitExponent = 15 - static_cast<int>(kStaleBound);

__device__ __forceinline__ int exponent_of(float number) { return __float_as_int(number) >> 23; }
// 2^kExponent divided by a power of two.
template <int kExponent = 0>
__device__ __forceinline__ float over_power(float power) {
    return __int_as_float(((254 + kExponent) << 23) - __float_as_int(power));
}

__device__ __forceinline__ float unit_above(float largest, int least_exponent = 17) {
    return power_of_two(min(max(exponent_of(largest) + 1, least_exponent), kLargestUnitExponent));
}
__device__ __forceinline__ float unit_above(const float4& scales, int least_exponent) {
    return unit_above(fmaxf(fmaxf(fabsf(scales.x), fabsf(scales.y)), fmaxf(fabsf(scales.z), fabsf(scales.w))),
                      least_exponent);
}
// The unit of O^T for a reference.
__device__ __forceinline__ float output_unit_of(float reference) { return reference * (1.f / (1 << kUnitExponent)); }
// The reference for a unit: twice the least possible, so that few later units exceed it.
__device__ __forceinline__ float reference_above(float unit, int least_exponent) {
    return power_of_two(max(exponent_of(unit), least_exponent) + 1);
}

}  // namespace mla
