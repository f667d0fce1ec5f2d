// Entry point of the launch that appends new tokens and multiplies their queries with W_UK.
#pragma once
#include "append.cuh"
#include "head_product.cuh"
#include "small/append_and_multiply.cuh"

namespace mla::ffi {

// Arguments as of `append` and `head_product`.
template <typename Element, CacheFormat kFormat, int kDepth, bool kDepthContiguous>
void append_and_multiply(TensorView q_rope, TensorView kv_c, TensorView k_rope, TensorView cache, TensorView slots,
                         TensorView positions, TensorView cos_sin, bool interleaved, Optional<TensorView> norm_weight,
                         double norm_eps, Optional<TensorView> kv_scale, Optional<TensorView> kv_c_out,
                         Optional<TensorView> k_rope_out, TensorView x, TensorView weights, TensorView out,
                         Optional<TensorView> next_weights) {
    const int tokens = static_cast<int>(q_rope.size(0));
    if (tokens == 0) return;
    const DeviceScope device(q_rope.device().device_id);
    const AppendParams append = append_params(q_rope, kv_c, k_rope, cache, slots, positions, cos_sin, interleaved,
                                              norm_weight, norm_eps, kv_scale, kv_c_out, k_rope_out);
    auto run = [&]<int kTokens>() {
        using C = HeadProductConfig<Element, kDepth, kTokens, kDepthContiguous, true>;
        const auto p = head_product_params<kDepthContiguous>(x, weights, out, next_weights, C::kColumns);
        const int ctas = static_cast<int>(weights.size(0) * weights.size(2)) / C::kColumns;
        Launch how = {stream_of(x), ctas + tokens * append.ctas_per_token, C::kThreads};
        how.shared_bytes = sizeof(typename C::SharedMemory);
        how.overlaps = true;
        launch(append_and_multiply_kernel<AppendConfig<Element, kFormat, true>, C>, how, append, p, ctas);
    };
    if (tokens <= 8)
        run.template operator()<8>();
    else if (tokens <= 16)
        run.template operator()<16>();
    else if (tokens <= 32)
        run.template operator()<32>();
    else
        run.template operator()<64>();
}

}  // namespace mla::ffi
