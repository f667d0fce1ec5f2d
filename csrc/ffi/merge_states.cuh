// Entry point of the merge kernel.
#pragma once
#include "launch.cuh"
#include "small/merge_states.cuh"
#include "tensors.cuh"

namespace mla::ffi {

// a, b, out [tokens, heads, d], d a multiple of 8; a_lse, b_lse, lse fp32 [tokens, heads], lse contiguous.
template <typename Element>
void merge_states(TensorView a, TensorView a_lse, TensorView b, TensorView b_lse, TensorView out, TensorView lse) {
    check_alignment("out_a", a, 16);
    check_alignment("out_b", b, 16);
    check_alignment("out", out, 16);
    MergeParams p = {};
    p.a = data<void>(a), p.a_token_stride = a.stride(0), p.a_head_stride = a.stride(1);
    p.b = data<void>(b), p.b_token_stride = b.stride(0), p.b_head_stride = b.stride(1);
    p.out = data<void>(out), p.out_token_stride = out.stride(0), p.out_head_stride = out.stride(1);
    p.a_lse = data<float>(a_lse), p.a_lse_token_stride = a_lse.stride(0), p.a_lse_head_stride = a_lse.stride(1);
    p.b_lse = data<float>(b_lse), p.b_lse_token_stride = b_lse.stride(0), p.b_lse_head_stride = b_lse.stride(1);
    p.lse = data<float>(lse);
    p.num_heads = static_cast<int>(a.size(1));
    p.vectors = static_cast<int>(a.size(2) / 8);
    p.rows = a.size(0) * p.num_heads;
    const DeviceScope device(a.device().device_id);
    const int64_t ctas = (p.rows * p.vectors + kMergeThreads - 1) / kMergeThreads;
    if (ctas > 0) launch<false>(merge_kernel<Element>, {stream_of(a), static_cast<int>(ctas), kMergeThreads}, p);
}

}  // namespace mla::ffi
