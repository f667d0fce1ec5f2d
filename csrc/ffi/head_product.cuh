// Entry point of the products of heads with weights.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.cuh"
#include "small/head_product.cuh"
#include "tensors.cuh"

namespace mla::ffi {

// Arguments as of `head_product`.
template <bool kDepthContiguous>
HeadProductParams head_product_params(TensorView x, TensorView weights, TensorView out,
                                      Optional<TensorView> next_weights, int columns) {
    check_alignment("x", x, 16);
    check_alignment("out", out, 8);
    HeadProductParams p = {};
    p.x = data<const void>(x);
    p.x_token_stride = x.stride(0);
    p.x_head_stride = x.stride(1);
    p.weights = data<const void>(weights);
    p.weights_head_stride = weights.stride(0);
    p.weights_row_stride = weights.stride(kDepthContiguous ? 2 : 1);
    p.out = data<void>(out);
    p.out_token_stride = out.stride(0);
    p.out_head_stride = out.stride(1);
    p.tokens = static_cast<int>(x.size(0));
    const int ctas_per_head = static_cast<int>(weights.size(2)) / columns;
    p.ctas_per_head = Divisor(ctas_per_head);
    if (next_weights.has_value()) {
        p.next_weights = data<const void>(*next_weights);
        p.next_head_bytes = (*next_weights).stride(0) * 2;
        p.next_cta_bytes = (*next_weights).size(1) * (*next_weights).size(2) * 2 / ctas_per_head;
    }
    return p;
}

template <typename C>
void launch_head_product(const TensorView& x, const TensorView& weights, const TensorView& out,
                         const Optional<TensorView>& next_weights) {
    const auto p = head_product_params<C::kDepthContiguous>(x, weights, out, next_weights, C::kColumns);
    Launch how = {stream_of(x), static_cast<int>(weights.size(0) * weights.size(2)) / C::kColumns, C::kThreads};
    how.shared_bytes = sizeof(typename C::SharedMemory);
    how.overlaps = true;
    launch<C::kDependentLaunch>(head_product_kernel<C>, how, p);
}

// x [tokens, heads, depth], at most 64 tokens; weights [heads, depth, columns]; out [tokens, heads, columns];
// next_weights [heads, rows, columns], those of a head contiguous, or None.
template <typename Element, int kDepth, bool kDepthContiguous, bool kDependentLaunch, int... kOther>
void head_product(TensorView x, TensorView weights, TensorView out, Optional<TensorView> next_weights) {
    const int tokens = static_cast<int>(x.size(0));
    if (tokens == 0) return;
    const DeviceScope device(x.device().device_id);
    auto run = [&]<int kTokens>() {
        launch_head_product<HeadProductConfig<Element, kDepth, kTokens, kDepthContiguous, kDependentLaunch, kOther...>>(
            x, weights, out, next_weights);
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
