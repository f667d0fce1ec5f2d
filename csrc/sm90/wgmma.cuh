// wgmma: warpgroup matrix multiply, both operands in shared memory, fp32 accumulators in registers
// (PTX ISA, "Asynchronous warpgroup level matrix instructions").
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../common/mbarrier.cuh"

namespace mla::sm90 {

enum class Swizzle : uint64_t { kNone = 0, k128B = 1 };

// Shared-memory matrix descriptor. Strides in bytes.
//   K-major, 128 B swizzle:  rows of 128 B in groups of 8; `stride` between groups; `leading` unused
//   MN-major, 128 B swizzle: `stride` between groups of 8 k; `leading` between blocks of 64 mn
//   K-major, no swizzle:     8x8 core matrices of 128 B; `leading` between them along k, `stride` along mn
__device__ __forceinline__ uint64_t make_descriptor(const void* start, uint32_t leading, uint32_t stride,
                                                    Swizzle swizzle) {
    return static_cast<uint64_t>((smem_address(start) & 0x3ffff) >> 4) | static_cast<uint64_t>(leading >> 4) << 16 |
           static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}

// The descriptor `bytes` further on; addresses stay below 2^18, so the sum never carries into another field.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accumulator accesses across an asynchronous region.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

enum class Major { kK = 0, kMN = 1 };

// D[64 x N] (+)= A[64 x 16] * B[16 x N]; `accumulate` false overwrites D. B is K-major.
// D's fragment: thread t of the warpgroup holds rows 16*(t/32) + t%32/4 (+8), columns 8j + 2*(t%4) (+1),
// in the order [j][row, row+8][column, column+1].
template <int N, typename T, Major kMajorA>
struct Wgmma;

template <Major kMajorA>
struct Wgmma<8, __nv_bfloat16, kMajorA> {
    __device__ __forceinline__ static void mma(float (&d)[4], uint64_t a, uint64_t b, bool accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3}, "
            "%4, %5, p, 1, 1, %7, 0;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorA)));
    }
};

template <Major kMajorA>
struct Wgmma<8, __half, kMajorA> {
    __device__ __forceinline__ static void mma(float (&d)[4], uint64_t a, uint64_t b, bool accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
            "{%0, %1, %2, %3}, "
            "%4, %5, p, 1, 1, %7, 0;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorA)));
    }
};

template <Major kMajorA>
struct Wgmma<16, __nv_bfloat16, kMajorA> {
    __device__ __forceinline__ static void mma(float (&d)[8], uint64_t a, uint64_t b, bool accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7}, "
            "%8, %9, p, 1, 1, %11, 0;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorA)));
    }
};

template <Major kMajorA>
struct Wgmma<16, __half, kMajorA> {
    __device__ __forceinline__ static void mma(float (&d)[8], uint64_t a, uint64_t b, bool accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7}, "
            "%8, %9, p, 1, 1, %11, 0;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorA)));
    }
};

template <Major kMajorA>
struct Wgmma<24, __nv_bfloat16, kMajorA> {
    __device__ __forceinline__ static void mma(float (&d)[12], uint64_t a, uint64_t b, bool accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %14, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, "
            "%12, %13, p, 1, 1, %15, 0;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
            : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorA)));
    }
};

template <Major kMajorA>
struct Wgmma<24, __half, kMajorA> {
    __device__ __forceinline__ static void mma(float (&d)[12], uint64_t a, uint64_t b, bool accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %14, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, "
            "%12, %13, p, 1, 1, %15, 0;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
            : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorA)));
    }
};

template <Major kMajorA>
struct Wgmma<32, __nv_bfloat16, kMajorA> {
    __device__ __forceinline__ static void mma(float (&d)[16], uint64_t a, uint64_t b, bool accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
            "%16, %17, p, 1, 1, %19, 0;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
            : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorA)));
    }
};

template <Major kMajorA>
struct Wgmma<32, __half, kMajorA> {
    __device__ __forceinline__ static void mma(float (&d)[16], uint64_t a, uint64_t b, bool accumulate) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
            "%16, %17, p, 1, 1, %19, 0;\n}\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
            : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorA)));
    }
};

}  // namespace mla::sm90
