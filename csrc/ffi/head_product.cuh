// Entry point of the products of heads with their weights.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.cuh"
#include "small/head_product.cuh"
#include "tensors.cuh"

namespace mla::ffi {

template <typename C>
void launch_head_product(const TensorView& x, const TensorView& weights, const TensorView& out) {
    const int heads = static_cast<int>(weights.size(0)), columns = static_cast<int>(weights.size(2));
    HeadProductParams p = {};
    p.x = data<const void>(x);
    p.x_token_stride = x.stride(0);
    p.x_head_stride = x.stride(1);
    p.weights = data<const void>(weights);
    p.weights_head_stride = weights.stride(0);
    p.weights_row_stride = weights.stride(C::kDepthContiguous ? 2 : 1);
    p.out = data<void>(out);
    p.out_token_stride = out.stride(0);
    p.out_head_stride = out.stride(1);
    p.tokens = static_cast<int>(x.size(0));
    p.ctas_per_head = Divisor(columns / C::kColumns);
    Launch how = {stream_of(x), heads * (columns / C::kColumns), C::kThreads};
    how.shared_bytes = sizeof(typename C::SharedMemory);
    how.overlaps = true;
    launch(head_product_kernel<C>, how, p);
}

// x [tokens, heads, kDepth], 1 to 64 tokens; weights [heads, kDepth, columns], whose rows, or if kDepthContiguous whose
// columns, are contiguous and begin at multiples of 16 bytes; out [tokens, heads, columns].
template <typename Element, int kDepth, bool kDepthContiguous>
void head_product(TensorView x, TensorView weights, TensorView out) {
    check_alignment("x", x, 16);
    check_alignment("out", out, 8);
    const DeviceScope device(x.device().device_id);
    auto launch_for = [&]<int kTokens>() {
        launch_head_product<HeadProductConfig<Element, kDepth, kTokens, kDepthContiguous>>(x, weights, out);
    };
    const int tokens = static_cast<int>(x.size(0));
    if (tokens <= 8)
        launch_for.template operator()<8>();
    else if (tokens <= 16)
        launch_for.template operator()<16>();
    else if (tokens <= 32)
        launch_for.template operator()<32>();
    else
        launch_for.template operator()<64>();
}

}  // namespace mla::ffi
