// Entry point of the append kernel.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>

#include "launch.cuh"
#include "small/append.cuh"
#include "tensors.cuh"

namespace mla::ffi {

// q_rope [tokens, heads, d_rope], rotated in place; kv_c [tokens, d_c], k_rope [tokens, d_rope], cache [pages,
// page_size, ...], rows of the format; slots int32/int64 [tokens]; positions int64 [tokens]; cos_sin fp32 or Element
// [positions, d_rope]; norm_weight [d_c], or None if the latents are normalized already; kv_scale fp32 [1] where the
// format has a scale of the tensor, else None; kv_c_out [tokens, d_c] and k_rope_out [tokens, d_rope], or both None.
template <typename Element, CacheFormat kFormat, bool kDependentLaunch>
void append(TensorView q_rope, TensorView kv_c, TensorView k_rope, TensorView cache, TensorView slots,
            TensorView positions, TensorView cos_sin, bool interleaved, Optional<TensorView> norm_weight,
            double norm_eps, Optional<TensorView> kv_scale, Optional<TensorView> kv_c_out,
            Optional<TensorView> k_rope_out) {
    check_alignment("q_rope", q_rope, 16);
    check_alignment("kv_c", kv_c, 16);
    check_alignment("k_rope", k_rope, 16);
    check_alignment("latent_cache", cache, 16);
    if (norm_weight.has_value()) check_alignment("norm_weight", *norm_weight, 16);
    if (kv_c_out.has_value()) check_alignment("kv_c_out", *kv_c_out, 16);
    if (k_rope_out.has_value()) check_alignment("k_rope_out", *k_rope_out, 16);
    const int tokens = static_cast<int>(q_rope.size(0));
    if (tokens == 0) return;
    const DeviceScope device(q_rope.device().device_id);
    AppendParams p = {};
    p.q_rope = data<void>(q_rope);
    p.q_rope_token_stride = q_rope.stride(0);
    p.q_rope_head_stride = q_rope.stride(1);
    p.kv_c = data<void>(kv_c);
    p.kv_c_stride = kv_c.stride(0);
    p.norm_weight = norm_weight.has_value() ? data<const void>(*norm_weight) : nullptr;
    p.norm_eps = static_cast<float>(norm_eps);
    p.k_rope = data<void>(k_rope);
    p.k_rope_stride = k_rope.stride(0);
    if (kv_c_out.has_value()) {
        p.kv_c_out = data<void>(*kv_c_out);
        p.kv_c_out_stride = (*kv_c_out).stride(0);
        p.k_rope_out = data<void>(*k_rope_out);
        p.k_rope_out_stride = (*k_rope_out).stride(0);
    }
    p.cache = data<void>(cache);
    const int bytes = cache.dtype().bits / 8;
    p.page_bytes = cache.stride(0) * bytes;
    p.row_bytes = cache.stride(1) * bytes;
    p.kv_scale = kv_scale.has_value() ? data<const float>(*kv_scale) : nullptr;
    p.page_size = Divisor(static_cast<int>(cache.size(1)));
    p.num_slots = std::min(cache.size(0) * cache.size(1), int64_t{INT_MAX});
    p.slots = data<void>(slots);
    p.slots_64 = slots.dtype().bits == 64;
    p.positions = data<int64_t>(positions);
    p.num_positions = cos_sin.size(0);
    p.cos_sin = data<const void>(cos_sin);
    p.cos_sin_fp32 = cos_sin.dtype().bits == 32;
    p.interleaved = interleaved;
    p.num_heads = static_cast<int>(q_rope.size(1));
    p.d_c = static_cast<int>(kv_c.size(1));
    p.d_rope = static_cast<int>(k_rope.size(1));
    p.ctas_per_token = append_ctas_per_token(p.num_heads, p.d_c, p.d_rope);
    Launch how = {stream_of(q_rope), tokens * p.ctas_per_token, kAppendThreads};
    how.overlaps = true;
    launch<kDependentLaunch>(append_kernel<AppendConfig<Element, kFormat, kDependentLaunch>>, how, p);
}

}  // namespace mla::ffi
