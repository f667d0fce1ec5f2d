// What the entry points use of tvm-ffi: tensors as Python passes them, and the stream that is current there.
#pragma once
#include <cuda_runtime.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

namespace mla::ffi {

using tvm::ffi::Optional;
using tvm::ffi::Shape;
using tvm::ffi::TensorView;

inline cudaStream_t stream_of(const TensorView& tensor) {
    return static_cast<cudaStream_t>(TVMFFIEnvGetStream(tensor.device().device_type, tensor.device().device_id));
}

}  // namespace mla::ffi
