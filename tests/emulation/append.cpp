// The kernel that takes new tokens in, emulated: what csrc/ffi/append.cuh does on a GPU. Status as in main.cpp.
// clang-format off: it comes first, since it says what the others' keywords mean
#include "cuda_on_cpu.h"
// clang-format on
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/append.cuh"

extern "C" int append(int64_t is_bf16, void* q_rope, int64_t q_token, int64_t q_head, void* kv_c, int64_t kv_c_stride,
                      void* k_rope, int64_t k_rope_stride, void* cache, int64_t page_stride, int64_t row_stride,
                      int64_t page_size, void* slots, int64_t slots_64, int64_t* positions, float* cos_sin,
                      int64_t interleaved, int64_t tokens, int64_t num_heads, int64_t d_c, int64_t d_rope,
                      void* norm_weight, double norm_eps) {
    mla::AppendParams p = {};
    p.q_rope = q_rope, p.q_rope_token_stride = q_token, p.q_rope_head_stride = q_head;
    p.kv_c = kv_c, p.kv_c_stride = kv_c_stride, p.k_rope = k_rope, p.k_rope_stride = k_rope_stride;
    p.cache = cache, p.page_stride = page_stride, p.row_stride = row_stride, p.page_size = mla::Divisor(int(page_size));
    p.slots = slots, p.slots_64 = slots_64, p.positions = positions, p.cos_sin = cos_sin, p.interleaved = interleaved;
    p.norm_weight = norm_weight, p.norm_eps = float(norm_eps);
    p.num_heads = int(num_heads), p.d_c = int(d_c), p.d_rope = int(d_rope);
    p.ctas_per_token = mla::append_ctas_per_token(p.num_heads, p.d_c, p.d_rope);
    emulation::overlaps = true;
    return !emulation::launch(tokens * p.ctas_per_token, mla::kAppendThreads, [&] {
        is_bf16 ? mla::append_kernel<__nv_bfloat16, true>(p) : mla::append_kernel<__half, true>(p);
        emulation::need_predecessor();  // all that a thread reads and writes may be another kernel's
    });
}
