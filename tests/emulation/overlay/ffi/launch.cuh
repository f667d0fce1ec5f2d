#pragma once
#include <algorithm>

#include "driver.cuh"

namespace mla {
struct AppendParams;
struct HeadProductParams;
}

namespace mla::ffi {

inline int num_ctas_of(const TensorView& plans, cudaStream_t stream) {
    return std::min(static_cast<int>(plans.size(0)), multiprocessors_of(stream));
}

struct Launch {
    cudaStream_t stream;
    int grid, block;
    int shared_bytes = 0;
    int cluster = 1;
    bool waits = false;
    bool overlaps = false;
};

template <typename... Parameters>
int resident_ctas(void (*)(Parameters...), const Launch& how) {
    return emulation::multiprocessors / how.cluster * how.cluster;
}

// A launch that may overlap its predecessor does, for the check that it waits in time: also if `how.overlaps` is false.
template <bool kDependentLaunch = true, typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const Launch& how, const Arguments&... arguments) {
    emulation::overlaps = kDependentLaunch;
    const bool finished = emulation::launch(how.grid, how.block, how.cluster, [&] {
        kernel(arguments...);
        // All that a thread of these kernels reads and writes, but for weights, may be another kernel's.
        if constexpr (((std::is_same_v<Arguments, AppendParams> || std::is_same_v<Arguments, HeadProductParams>) || ...))
            emulation::need_predecessor();
    });
    if (!finished) TVM_FFI_THROW(RuntimeError) << "all threads wait for each other";
}

}  // namespace mla::ffi
