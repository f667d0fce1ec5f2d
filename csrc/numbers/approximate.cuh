// Approximate functions of the special function unit.
#pragma once

namespace mla {

// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-ex2
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-lg2
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions-rcp
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace mla
