// wgmma: warpgroup matrix multiply, B in shared memory, A there or in registers, fp32 accumulators in registers.
//
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "descriptor.cuh"

namespace mla {

// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-multiply-and-accumulate-instruction-wgmma-fence
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-multiply-and-accumulate-instruction-wgmma-commit-group
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-multiply-and-accumulate-instruction-wgmma-wait-group
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

enum class Major { kK = 0, kMN = 1 };

// D[64 x N] (+)= A[64 x 16] * B[16 x N]; `accumulate` false overwrites D. B is K-major.
// D's fragment: thread t of the warpgroup holds rows 16*(t/32) + t%32/4 (+8), columns 8j + 2*(t%4) (+1),
// in the order [j][row, row+8][column, column+1].
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-multiply-and-accumulate-instruction-wgmma-mma-async
template <int N, typename T, Major kMajorA>
struct Wgmma;

// The operand numbers of D's registers in an instruction, and D as operands.
#define MLA_PLACES_4 "%0, %1, %2, %3"
#define MLA_PLACES_8 MLA_PLACES_4 ", %4, %5, %6, %7"
#define MLA_PLACES_12 MLA_PLACES_8 ", %8, %9, %10, %11"
#define MLA_PLACES_16 MLA_PLACES_12 ", %12, %13, %14, %15"
#define MLA_PLACES_24 MLA_PLACES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MLA_PLACES_32 MLA_PLACES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MLA_PLACES_64                                                                                                  \
    MLA_PLACES_32                                                                                                      \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
    "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MLA_PLACES_128                                                                                             \
    MLA_PLACES_64                                                                                                  \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, "  \
    "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "    \
    "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, " \
    "%123, %124, %125, %126, %127"
#define MLA_FLOATS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MLA_FLOATS_8(i) MLA_FLOATS_4(i), MLA_FLOATS_4(i + 4)
#define MLA_FLOATS_12(i) MLA_FLOATS_8(i), MLA_FLOATS_4(i + 8)
#define MLA_FLOATS_16(i) MLA_FLOATS_8(i), MLA_FLOATS_8(i + 8)
#define MLA_FLOATS_24(i) MLA_FLOATS_16(i), MLA_FLOATS_8(i + 16)
#define MLA_FLOATS_32(i) MLA_FLOATS_16(i), MLA_FLOATS_16(i + 16)
#define MLA_FLOATS_64(i) MLA_FLOATS_32(i), MLA_FLOATS_32(i + 32)
#define MLA_FLOATS_128(i) MLA_FLOATS_64(i), MLA_FLOATS_64(i + 64)

#define MLA_WGMMA(N, kCount, kType, kPredicate, kOperands)                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " kPredicate ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                 "k16.f32." kType "." kType " {" MLA_PLACES_##kCount "}, " kOperands ", 0;\n}\n"             \
                 : MLA_FLOATS_##kCount(0)                                                                    \
                 : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(kMajorA)))

// The operand numbers in `kPredicate` and `kOperands` follow those of D.
#define MLA_DEFINE_WGMMA(N, kCount, kPredicate, kOperands)                                                        \
    template <typename T, Major kMajorA>                                                                          \
    struct Wgmma<N, T, kMajorA> {                                                                                 \
        __device__ __forceinline__ static void mma(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate) { \
            if constexpr (std::is_same_v<T, __half>)                                                              \
                MLA_WGMMA(N, kCount, "f16", kPredicate, kOperands);                                               \
            else                                                                                                  \
                MLA_WGMMA(N, kCount, "bf16", kPredicate, kOperands);                                              \
        }                                                                                                         \
    };
MLA_DEFINE_WGMMA(8, 4, "%6", "%4, %5, p, 1, 1, %7")
MLA_DEFINE_WGMMA(16, 8, "%10", "%8, %9, p, 1, 1, %11")
MLA_DEFINE_WGMMA(24, 12, "%14", "%12, %13, p, 1, 1, %15")
MLA_DEFINE_WGMMA(32, 16, "%18", "%16, %17, p, 1, 1, %19")
MLA_DEFINE_WGMMA(64, 32, "%34", "%32, %33, p, 1, 1, %35")

// The same with A in registers, and B of either kind. A's fragment: thread t holds rows 16*(t/32) + t%32/4 (+8),
// columns 2*(t%4) (+1, +8, +9), in the order [column, column+8][row, row+8], two columns a register: D's order, so that
// a D of N = 16 becomes an A element by element.
template <int N, typename T, Major kMajorB>
struct WgmmaFromRegisters;

#define MLA_WGMMA_FROM_REGISTERS(N, kCount, kType, kPredicate, kOperands)                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " kPredicate ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                 "k16.f32." kType "." kType " {" MLA_PLACES_##kCount "}, " kOperands ";\n}\n"                \
                 : MLA_FLOATS_##kCount(0)                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),    \
                   "n"(static_cast<int>(kMajorB)))
#define MLA_DEFINE_WGMMA_FROM_REGISTERS(N, kCount, kPredicate, kOperands)                                  \
    template <typename T, Major kMajorB>                                                                   \
    struct WgmmaFromRegisters<N, T, kMajorB> {                                                             \
        __device__ __forceinline__ static void mma(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, \
                                                   bool accumulate) {                                      \
            if constexpr (std::is_same_v<T, __half>)                                                       \
                MLA_WGMMA_FROM_REGISTERS(N, kCount, "f16", kPredicate, kOperands);                         \
            else                                                                                           \
                MLA_WGMMA_FROM_REGISTERS(N, kCount, "bf16", kPredicate, kOperands);                        \
        }                                                                                                  \
    };
MLA_DEFINE_WGMMA_FROM_REGISTERS(64, 32, "%37", "{%32, %33, %34, %35}, %36, p, 1, 1, %38")
MLA_DEFINE_WGMMA_FROM_REGISTERS(128, 64, "%69", "{%64, %65, %66, %67}, %68, p, 1, 1, %70")
MLA_DEFINE_WGMMA_FROM_REGISTERS(256, 128, "%133", "{%128, %129, %130, %131}, %132, p, 1, 1, %134")

// D[64 x N] (+)= A[64 x 32] * B[32 x N] of e4m3, both K-major, with A in shared memory or in registers. D's fragment is
// that of 16-bit products. A's: thread t holds rows 16*(t/32) + t%32/4 (+8), columns 4*(t%4) to 4*(t%4) + 3 (+16), in
// the order [column, column+16][row, row+8], four columns a register.
//
// Of the products of 32 columns, and of what they are added to, the tensor cores cut off all bits more than 13 places
// below the leading bit of the largest. So a long sum is made of short ones, which are added in fp32.
template <int N>
struct WgmmaE4m3;

#define MLA_WGMMA_E4M3(N, kCount, kPredicate, kOperands, ...)                                                \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " kPredicate ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
                 "k32.f32.e4m3.e4m3 {" MLA_PLACES_##kCount "}, " kOperands ", p, 1, 1;\n}\n"                 \
                 : MLA_FLOATS_##kCount(0)                                                                    \
                 : __VA_ARGS__, "l"(b), "r"(static_cast<int>(accumulate)))
#define MLA_DEFINE_WGMMA_E4M3(N, kCount, kPredicate, kOperands, kFromRegistersPredicate, kFromRegistersOperands)  \
    template <>                                                                                                   \
    struct WgmmaE4m3<N> {                                                                                         \
        __device__ __forceinline__ static void mma(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate) { \
            MLA_WGMMA_E4M3(N, kCount, kPredicate, kOperands, "l"(a));                                             \
        }                                                                                                         \
        __device__ __forceinline__ static void mma(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b,        \
                                                   bool accumulate) {                                             \
            MLA_WGMMA_E4M3(N, kCount, kFromRegistersPredicate, kFromRegistersOperands, "r"(a[0]), "r"(a[1]),      \
                           "r"(a[2]), "r"(a[3]));                                                                 \
        }                                                                                                         \
    };
MLA_DEFINE_WGMMA_E4M3(16, 8, "%10", "%8, %9", "%13", "{%8, %9, %10, %11}, %12")
MLA_DEFINE_WGMMA_E4M3(32, 16, "%18", "%16, %17", "%21", "{%16, %17, %18, %19}, %20")
MLA_DEFINE_WGMMA_E4M3(48, 24, "%26", "%24, %25", "%29", "{%24, %25, %26, %27}, %28")
MLA_DEFINE_WGMMA_E4M3(64, 32, "%34", "%32, %33", "%37", "{%32, %33, %34, %35}, %36")
MLA_DEFINE_WGMMA_E4M3(128, 64, "%66", "%64, %65", "%69", "{%64, %65, %66, %67}, %68")

}  // namespace mla
