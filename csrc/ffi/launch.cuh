// From tvm-ffi tensors to kernel parameters and launches. Shapes and dtypes are checked in Python.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <string>

#include "../common/params.cuh"

namespace mla::ffi {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

inline void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(status);
}

inline cudaStream_t stream_of(const TensorView& tensor) {
    return static_cast<cudaStream_t>(TVMFFIEnvGetStream(tensor.device().device_type, tensor.device().device_id));
}

template <typename T>
T* data(const TensorView& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}

inline Lengths lengths(const TensorView& seq_lens, const Optional<TensorView>& query_start_loc, int64_t query_len) {
    return {data<const int>(seq_lens), query_start_loc.has_value() ? data<const int>(*query_start_loc) : nullptr,
            static_cast<int>(query_len)};
}

// table int32 [rows, width], table_rows int32/int64 [batch] or None.
inline PageTable page_table(const TensorView& table, const Optional<TensorView>& table_rows, int64_t page_size,
                            bool token_table) {
    return {data<const int>(table),
            table.stride(0),
            table_rows.has_value() ? data<const void>(*table_rows) : nullptr,
            table_rows.has_value() && (*table_rows).dtype().bits == 64,
            token_table,
            Divisor(static_cast<int>(page_size))};
}

// Raises unless all rows of the tensor, whose last dimension is contiguous, begin at multiples of `bytes`.
inline void check_alignment(const char* name, const TensorView& tensor, int64_t bytes) {
    const int64_t elements = bytes / 2;
    bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % bytes == 0;
    for (int i = 0; i < tensor.ndim() - 1; ++i) aligned &= tensor.size(i) <= 1 || tensor.stride(i) % elements == 0;
    if (aligned) return;
    std::string strides;
    for (int i = 0; i < tensor.ndim() - 1; ++i) strides += (i ? ", " : "") + std::to_string(tensor.stride(i));
    TVM_FFI_THROW(ValueError) << name << " must be aligned to " << bytes << " bytes and its strides multiples of "
                              << elements << " elements, got strides " << strides;
}

// Launches a kernel. With `kDependentLaunch` (sm_90 and newer) it waits on the device for its predecessor in the
// stream; if `overlaps`, it may begin before that has ended.
template <bool kDependentLaunch = true, typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int grid, int cluster, int block, int shared_bytes, bool overlaps,
            cudaStream_t stream, Arguments&&... arguments) {
    if constexpr (!kDependentLaunch) {
        kernel<<<grid, block, shared_bytes, stream>>>(std::forward<Arguments>(arguments)...);
        check(cudaGetLastError(), "kernel launch");
        return;
    }
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = overlaps;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster == 1 ? 1 : 2;
    check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), "kernel launch");
}

}  // namespace mla::ffi
