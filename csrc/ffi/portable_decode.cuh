// The portable decode kernel, as `decode` launches it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "decode.cuh"
#include "decode/portable/kernel.cuh"

namespace mla::ffi {

template <typename C>
struct PortableKernel {
    using Config = C;
    using SharedMemory = portable::DecodeMemory<C>;
    using SplitBuffers = typename portable::Decoder<C>::Buffers;
    static constexpr int kThreads = portable::kThreads;
    static constexpr auto kKernel = portable::decode_kernel<C>;
    static constexpr int kMostCluster = 1;

    static void launch(const Launch& how, const DecodeParams& p, const DecodeSizes&) {
        ffi::launch<C::kDependentLaunch>(portable::decode_kernel<C>, how, p);
    }
};

}  // namespace mla::ffi
