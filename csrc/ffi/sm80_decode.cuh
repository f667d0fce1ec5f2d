// Entry point of the portable decode kernel.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../sm80/decode.cuh"
#include "decode.cuh"

namespace mla::ffi {

// Dynamic shared memory of a CTA.
template <typename C>
int64_t sm80_shared_bytes() {
    return sizeof(sm80::SharedMemoryPlan<C>);
}

template <typename C>
void sm80_decode(TensorView q_nope, TensorView q_rope, TensorView cache, TensorView table,
                 Optional<TensorView> table_rows, TensorView seq_lens, Optional<TensorView> query_start_loc,
                 TensorView plans, TensorView partials, TensorView flags, TensorView out, TensorView lse,
                 Optional<TensorView> profile, int64_t query_len, bool token_table, bool causal, double softmax_scale,
                 bool overlaps) {
    DecodeParams params =
        decode_params(q_nope, q_rope, cache, table, table_rows, seq_lens, query_start_loc, plans, partials, flags, out,
                      lse, profile, query_len, token_table, causal, softmax_scale);
    const int shared_bytes = static_cast<int>(sm80_shared_bytes<C>()), grid = static_cast<int>(plans.size(0));
    auto* kernel = sm80::decode_kernel<C>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          "reserving shared memory");
    launch<C::kDependentLaunch>(kernel, grid, 1, sm80::kThreads, shared_bytes, overlaps, stream_of(q_nope), params);
}

}  // namespace mla::ffi
