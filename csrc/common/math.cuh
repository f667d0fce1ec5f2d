// Exponentials of the softmax.
#pragma once
#include <cmath>

namespace mla {

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The maximum of a row without keys is -inf; differences to it must not be NaN.
__device__ __forceinline__ float finite(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

}  // namespace mla
