// How many registers a thread may have, and what the compiler must keep in them. Pinning takes no instruction: the
// compiler only has to assume that the value changes there.
#pragma once

namespace mla {

// The registers that each thread of this warpgroup may have.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg
template <int kRegisters>
__device__ __forceinline__ void raise_register_limit() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void lower_register_limit() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Keeps the compiler from moving accumulator accesses across an asynchronous region.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Multiplies an accumulator where it is: otherwise ptxas may give the products other registers, and have too few.
__device__ __forceinline__ void multiply_in_place(float& accumulator, float factor) {
    asm volatile("mul.f32 %0, %0, %1;" : "+f"(accumulator) : "f"(factor));
}

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
