// Entry point of the prefill kernel.
#pragma once
#include <limits>

#include "launch.cuh"
#include "prefill/kernel.cuh"
#include "tensors.cuh"

namespace mla::ffi {

inline int token_stride(const char* name, const TensorView& tensor) {
    const int64_t stride = tensor.stride(0);
    if (stride > std::numeric_limits<int>::max())
        TVM_FFI_THROW(ValueError) << name << " has " << stride << " elements from token to token, more than 2^31 - 1";
    return static_cast<int>(stride);
}

// q [tokens, heads, d_qk], k [keys, KV heads, d_qk], v [keys, KV heads, d_v], out [tokens, heads, d_v];
// lse fp32 [tokens, heads]; cu_seqlens_q, cu_seqlens_k int32 [requests + 1]; max_q: tokens of the longest request.
template <typename C>
void prefill(TensorView q, TensorView k, TensorView v, TensorView cu_seqlens_q, TensorView cu_seqlens_k, TensorView out,
             TensorView lse, int64_t max_q, double softmax_scale, bool causal, int64_t head_group) {
    check_alignment("q", q, 16);
    check_alignment("k", k, 16);
    check_alignment("v", v, 16);
    check_alignment("out", out, 4);
    prefill::PrefillParams p = {};
    p.q = data<void>(q), p.q_token_stride = token_stride("q", q), p.q_head_stride = q.stride(1);
    p.k = data<void>(k), p.k_token_stride = token_stride("k", k), p.k_head_stride = k.stride(1);
    p.v = data<void>(v), p.v_token_stride = token_stride("v", v), p.v_head_stride = v.stride(1);
    p.out = data<void>(out), p.out_token_stride = token_stride("out", out), p.out_head_stride = out.stride(1);
    p.lse = data<float>(lse), p.lse_token_stride = lse.stride(0), p.lse_head_stride = lse.stride(1);
    p.query_starts = data<const int>(cu_seqlens_q);
    p.key_starts = data<const int>(cu_seqlens_k);
    p.num_heads = static_cast<int>(q.size(1));
    p.heads_per_kv = static_cast<int>(q.size(1) / k.size(1));
    p.query_blocks = static_cast<int>((max_q + C::kRows - 1) / C::kRows);
    p.head_group = static_cast<int>(head_group);
    p.scale_log2 = static_cast<float>(softmax_scale * kLog2OfE);
    p.causal = causal;
    const DeviceScope device(q.device().device_id);
    const int64_t ctas = (cu_seqlens_q.size(0) - 1) * p.num_heads * p.query_blocks;
    if (ctas == 0) return;
    if (ctas > std::numeric_limits<int>::max())
        TVM_FFI_THROW(ValueError) << "so many requests, heads and query tokens need " << ctas
                                  << " CTAs, more than the 2^31 - 1 of a launch: divide the batch";
    const Launch how = {stream_of(q), static_cast<int>(ctas), C::kThreads,
                        static_cast<int>(sizeof(prefill::PrefillMemory<C>))};
    launch<false>(prefill::prefill_kernel<C>, how, p);
}

}  // namespace mla::ffi
