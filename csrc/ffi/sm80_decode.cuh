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
    static_assert(sizeof(sm80::SharedMemoryPlan<C>) <= kMaxSharedBytes);
    return sizeof(sm80::SharedMemoryPlan<C>);
}

template <typename C>
void sm80_decode(TensorView q_nope, TensorView q_rope, TensorView cache, TensorView table,
                 Optional<TensorView> table_rows, TensorView seq_lens, Optional<TensorView> query_start_loc,
                 TensorView plans, TensorView partials, TensorView flags, TensorView out, TensorView lse,
                 Optional<TensorView> profile, int64_t query_len, bool token_table, bool causal, double softmax_scale,
                 int64_t num_ctas, bool may_wait, bool overlaps) {
    DecodeParams params =
        decode_params(q_nope, q_rope, cache, table, table_rows, seq_lens, query_start_loc, plans, partials, flags, out,
                      lse, profile, query_len, token_table, causal, softmax_scale);
    const DeviceScope device(q_nope.device().device_id);
    Launch how = decode_launch(plans, num_ctas, may_wait, overlaps, stream_of(q_nope));
    how.block = sm80::kThreads;
    how.shared_bytes = static_cast<int>(sm80_shared_bytes<C>());
    auto* kernel = sm80::decode_kernel<C>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared_bytes),
          "reserving shared memory");
    launch<C::kDependentLaunch>(kernel, how, params);
}

}  // namespace mla::ffi
