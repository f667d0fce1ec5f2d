// The portable decode kernel, as `decode` launches it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../sm80/decode.cuh"
#include "decode.cuh"

namespace mla::ffi {

template <typename C>
struct PortableKernel {
    using Config = C;
    using SharedMemory = sm80::DecodeMemory<C>;
    static constexpr int kThreads = sm80::kThreads;

    static void launch(const Launch& how, const DecodeParams& p, const DecodeSizes&) {
        ffi::launch<C::kDependentLaunch>(sm80::decode_kernel<C>, how, p);
    }
};

}  // namespace mla::ffi
