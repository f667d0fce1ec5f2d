// Approximate functions for the softmax, the maximum over a warp, and the logarithm of a power of two.
#pragma once

namespace mla {

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The largest of all lanes' values, none of which is NaN.
__device__ __forceinline__ float warp_max(float x) {
    // Read as integers, floats keep their order; only that of negative ones is reversed.
    auto in_order = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(in_order(__reduce_max_sync(~0u, in_order(__float_as_int(x)))));
}

// The logarithm of a power of two, base 2.
__device__ __forceinline__ int exact_log2(int power) { return 31 - __clz(power); }

}  // namespace mla
