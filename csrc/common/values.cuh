// Small functions of single values: what rows without keys need, and values in registers.
#pragma once
#include "math.cuh"

namespace mla {

// The maximum of a row without keys is -inf; differences to it must not be NaN.
__device__ __forceinline__ float finite(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }
// The weights of such a row sum to 0, and its output is zeros. (A division would be a function call.)
__device__ __forceinline__ float inverse(float total) { return total > 0.f ? reciprocal_approx(total) : 0.f; }

// Makes the compiler hold a value in a register, and compute addresses from there instead of from the start.
template <typename T>
__device__ __forceinline__ T* pinned(T* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}
__device__ __forceinline__ int pinned(int number) {
    asm volatile("" : "+r"(number));
    return number;
}

}  // namespace mla
