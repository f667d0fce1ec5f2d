// Matrix instructions of a warp: loads and stores of fragments, transposition, products. stmatrix is newer than sm_80.
//
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace mla {

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. From each matrix, lane l
// receives elements 2 * (l % 4) and 2 * (l % 4) + 1 of row l / 4, or of column l / 4 if transposed.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-load-instruction-ldmatrix
__device__ __forceinline__ void load_matrices(uint32_t (&d)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row)
                 : "memory");
}
// Two matrices, whose addresses lanes 0 to 15 give.
__device__ __forceinline__ void load_matrices(uint32_t (&d)[2], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(row)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&d)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(row)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&d)[2], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(d[0]), "=r"(d[1])
                 : "r"(row)
                 : "memory");
}

// Stores four 8x8 matrices of 16-bit elements in shared memory, as `load_matrices` loads them.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-store-instruction-stmatrix
__device__ __forceinline__ void store_matrices(uint32_t row, uint32_t first, uint32_t second, uint32_t third,
                                               uint32_t fourth) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(first), "r"(second),
                 "r"(third), "r"(fourth)
                 : "memory");
}

// Stores two 8x8 matrices of 16-bit elements, transposed, in shared memory. Of each matrix, lane l holds columns
// 2 * (l % 4) and the next of row l / 4. Lanes 0-15 give the addresses of the rows that are stored.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-store-instruction-stmatrix
__device__ __forceinline__ void store_matrices_transposed(uint32_t row, uint32_t first, uint32_t second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(first), "r"(second)
                 : "memory");
}

// The same with four matrices; all lanes give addresses.
__device__ __forceinline__ void store_matrices_transposed(uint32_t row, uint32_t first, uint32_t second, uint32_t third,
                                                          uint32_t fourth) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(first),
                 "r"(second), "r"(third), "r"(fourth)
                 : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements that the lanes of a warp hold: before and after it, lane l holds columns
// 2 * (l % 4) and the next of row l / 4.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-transpose-instruction-movmatrix
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
    return pair;
}

// D[16 x 8] += A[16 x 16] * B[16 x 8]. With g = lane / 4 and t = 2 * (lane % 4), and each 16-bit pair adjacent along k:
//   d  (g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1)
//   a  rows g, g + 8 at k = t, then both at k = t + 8
//   b  column g at k = t and at k = t + 8
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
template <typename Element>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<Element, __half>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace mla
