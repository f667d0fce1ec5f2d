// The device and the multiprocessors that a call runs on, by CUDA's driver interface. Its functions are looked up at
// run time, so that a module loads where there is no driver.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>

#include "tvm.cuh"

namespace mla::ffi {

inline void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // reported here, so not to be reported again by the next launch
    TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(status);
}

inline void check(CUresult status, const char* what) {
    if (status != CUDA_SUCCESS)
        TVM_FFI_THROW(RuntimeError) << what << " failed with CUDA driver error " << static_cast<int>(status);
}

// A driver function as of CUDA `version` (12.4: 12040); null if the driver is older or there is none.
template <typename Function>
Function driver_function(const char* name, unsigned version) {
    int driver = 0;  // stays 0 without a driver. Looking up a version that is newer than the driver is an error
    check(cudaDriverGetVersion(&driver), "reading the driver's version");
    if (driver < static_cast<int>(version)) return nullptr;
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &result), name);
    return reinterpret_cast<Function>(result == cudaDriverEntryPointSuccess ? entry : nullptr);
}

// The context that is current in this thread; null if it has not used CUDA yet.
inline CUcontext current_context() {
    static const auto get_current = driver_function<PFN_cuCtxGetCurrent_v4000>("cuCtxGetCurrent", 4000);
    if (!get_current) TVM_FFI_THROW(RuntimeError) << "there is no CUDA driver";
    CUcontext context = nullptr;
    get_current(&context);  // fails before the driver is initialized, when there is no context
    return context;
}

// While it lives, calls of this thread go to a device. If the current context is one of that device, it stays current:
// it may be a green one. A thread without a context gets the device's primary context, and keeps it.
class DeviceScope {
    const CUcontext previous_ = current_context();
    bool changed_ = false;

    static PFN_cuCtxSetCurrent_v4000 set_current() {
        static const auto function = driver_function<PFN_cuCtxSetCurrent_v4000>("cuCtxSetCurrent", 4000);
        return function;
    }

  public:
    explicit DeviceScope(int device) {
        int current = -1;
        if (previous_) check(cudaGetDevice(&current), "reading the current device");
        if (current == device) return;
        check(cudaSetDevice(device), "selecting the tensors' device");
        changed_ = previous_ != nullptr;
    }
    ~DeviceScope() {
        if (changed_) set_current()(previous_);
    }
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;
};

// How many multiprocessors kernels of a stream may use: those of its green context, or else of the current context, of
// which MPS may grant a part. To be called within a `DeviceScope` of the stream's device.
inline int multiprocessors_of(cudaStream_t stream) {
    static const auto green_of = driver_function<PFN_cuStreamGetGreenCtx_v12040>("cuStreamGetGreenCtx", 12040);
    static const auto green_resource =
        driver_function<PFN_cuGreenCtxGetDevResource_v12040>("cuGreenCtxGetDevResource", 12040);
    static const auto resource = driver_function<PFN_cuCtxGetDevResource_v12040>("cuCtxGetDevResource", 12040);
    CUdevResource multiprocessors = {};
    CUgreenCtx green = nullptr;
    if (green_of && green_resource && green_of(stream, &green) == CUDA_SUCCESS && green) {
        check(green_resource(green, &multiprocessors, CU_DEV_RESOURCE_TYPE_SM), "cuGreenCtxGetDevResource");
        return static_cast<int>(multiprocessors.sm.smCount);
    }
    if (resource && resource(current_context(), &multiprocessors, CU_DEV_RESOURCE_TYPE_SM) == CUDA_SUCCESS)
        return static_cast<int>(multiprocessors.sm.smCount);
    int device, count;  // a driver that knows no green contexts
    check(cudaGetDevice(&device), "reading the current device");
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "counting multiprocessors");
    return count;
}

}  // namespace mla::ffi
