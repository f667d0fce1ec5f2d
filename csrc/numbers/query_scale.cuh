// Queries for keys in 8 bits, which the tensor cores multiply in fp16. fp16 has a smaller range than bf16, so columns
// of a query are multiplied by a power of two, and their products with keys by its inverse. The largest magnitude then
// lies in [2^14, 2^15), and elements 2^28 times smaller lose bits. For sums of two e4m3 see two_terms.cuh.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cache_format.cuh"

namespace mla {

struct QueryScale {
    float factor, inverse;

    // For columns whose largest magnitude is `largest`. Multiplied by `factor`, it lies in [2^kExponent, 2^(kExponent +
    // 1)).
    template <int kExponent = 14>
    static __device__ QueryScale of(float largest) {
        const int exponent = __float_as_int(largest) >> 23;
        const int scaled = min(127 + kExponent + 127 - exponent, 253);  // both are normal numbers
        return {__int_as_float(scaled << 23), __int_as_float((254 - scaled) << 23)};
    }
};

template <typename Element>
__device__ __forceinline__ float2 floats_of(uint32_t pair) {
    if constexpr (std::is_same_v<Element, __half>)
        return __half22float2(reinterpret_cast<const __half2&>(pair));
    else
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
}

template <typename Element>
__device__ __forceinline__ float largest_of(uint32_t pair) {
    const float2 values = floats_of<Element>(pair);
    return fmaxf(fabsf(values.x), fabsf(values.y));
}

// Adds 8 columns to the largest magnitudes so far, which are a pair: of even columns, and of odd ones. Read as
// integers, magnitudes keep their order.
__device__ __forceinline__ uint32_t largest_magnitudes(uint32_t before, const uint4& words) {
    constexpr uint32_t kMagnitudes = 0x7fff7fff;
    const uint32_t first = __vimax3_u16x2(before, words.x & kMagnitudes, words.y & kMagnitudes);
    return __vimax3_u16x2(first, words.z & kMagnitudes, words.w & kMagnitudes);
}

// Converts two neighbouring columns to fp16.
template <typename Element>
__device__ __forceinline__ uint32_t to_halves(uint32_t pair, float factor) {
    const float2 values = floats_of<Element>(pair);
    const __half2 halves = __floats2half2_rn(values.x * factor, values.y * factor);
    return reinterpret_cast<const uint32_t&>(halves);
}

// Converts four neighbouring columns, two pairs of Element, to fp16: columns 0 and 2, and columns 1 and 3, in the order
// in which `halves_of_e4m3` returns those of keys.
template <typename Element>
__device__ __forceinline__ void convert_queries(uint32_t& first, uint32_t& second, float factor) {
    const float2 a = floats_of<Element>(first), b = floats_of<Element>(second);
    const __half2 even = __floats2half2_rn(a.x * factor, b.x * factor);
    const __half2 odd = __floats2half2_rn(a.y * factor, b.y * factor);
    first = reinterpret_cast<const uint32_t&>(even);
    second = reinterpret_cast<const uint32_t&>(odd);
}

// The same in the order of `halves_in_any_order`.
template <typename Element>
__device__ __forceinline__ void convert_queries_in_any_order(uint32_t& first, uint32_t& second, float factor) {
    if constexpr (kConvertsE4m3) {
        first = to_halves<Element>(first, factor);
        second = to_halves<Element>(second, factor);
    } else {
        convert_queries<Element>(first, second, factor);
    }
}

}  // namespace mla
