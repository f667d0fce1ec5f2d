// From tvm-ffi tensors to kernel parameters and launches. Shapes and dtypes are checked in Python.
#pragma once
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <string>

#include "../common/params.cuh"
#include "driver.cuh"

namespace mla::ffi {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

inline cudaStream_t stream_of(const TensorView& tensor) {
    return static_cast<cudaStream_t>(TVMFFIEnvGetStream(tensor.device().device_type, tensor.device().device_id));
}

// How many CTAs a decode launch on the stream has: as many as the workspace (`plans`, a row a CTA) is for, and no more
// than the stream has multiprocessors.
inline int num_ctas_of(const TensorView& plans, cudaStream_t stream) {
    return std::min(static_cast<int>(plans.size(0)), multiprocessors_of(stream));
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

// The most shared memory that a CTA may have (CUDA C++ Programming Guide, technical specifications) on the architecture
// that device code is being compiled for. Host code is the same for every architecture.
#ifdef __CUDA_ARCH__
constexpr int kArch = __CUDA_ARCH__ / 10;
#else
constexpr int kArch = 90;
#endif
constexpr bool kSmallShared = kArch == 86 || kArch == 89 || kArch == 120 || kArch == 121;
constexpr size_t kMaxSharedBytes = (kSmallShared ? 99 : kArch < 90 ? 163 : 227) << 10;

// How a kernel is launched.
//
// A grid whose CTAs wait for one another ends if all of them start. There is a multiprocessor for each (`num_ctas_of`),
// so a CTA is kept from starting only by other grids. Those that end by themselves, or start all CTAs at once as
// cooperative launches do, make it wait, no more. Two grids that wait for their own could each hold what the other
// needs. But a GPU starts grids of one priority in turn, all CTAs of the earlier one first. So all launches that wait
// have one priority, the greatest: whatever their streams have, nothing comes between their CTAs. (Cooperative launches
// of our own guarantee as much, but begin only when their predecessor has left all multiprocessors, which is slower.)
struct Launch {
    cudaStream_t stream;
    int grid, block;
    int cluster = 1;  // CTAs in a cluster
    int shared_bytes = 0;
    bool waits = false;     // its CTAs may wait for one another
    bool overlaps = false;  // with `kDependentLaunch`: may begin before its predecessor in the stream has ended
};

inline int greatest_priority() {
    static const int priority = [] {
        int least, greatest;
        check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "reading the range of priorities");
        return greatest;
    }();
    return priority;
}

// With `kDependentLaunch` (sm_90 and newer) the kernel itself waits on the device for its predecessor in the stream.
template <bool kDependentLaunch = true, typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const Launch& how, Arguments&&... arguments) {
    cudaLaunchAttribute attributes[3];
    cudaLaunchConfig_t config = {};
    config.gridDim = how.grid;
    config.blockDim = how.block;
    config.dynamicSmemBytes = how.shared_bytes;
    config.stream = how.stream;
    config.attrs = attributes;
    if (how.waits) {
        attributes[config.numAttrs].id = cudaLaunchAttributePriority;
        attributes[config.numAttrs++].val.priority = greatest_priority();
    }
    if (kDependentLaunch) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = how.overlaps;
    }
    if (how.cluster > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(how.cluster), 1, 1};
    }
    check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), "kernel launch");
}

}  // namespace mla::ffi
