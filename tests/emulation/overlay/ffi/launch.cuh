#pragma once
#include <algorithm>

#include "driver.cuh"

namespace mla {
struct AppendParams;
struct HeadProductParams;
}  // namespace mla

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

// Whether all that a thread of a kernel with these parameters reads and writes, but for weights, may be another
// kernel's.
template <typename T>
constexpr bool kDepends = std::is_same_v<T, AppendParams> || std::is_same_v<T, HeadProductParams>;

// A launch that may overlap its predecessor does, for the check that it waits in time: also if `how.overlaps` is false.
template <bool kDependentLaunch = true, typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), const Launch& how, const Arguments&... arguments) {
    emulation::overlaps = kDependentLaunch;
    const bool finished = emulation::launch(how.grid, how.block, how.cluster, [&] {
        kernel(arguments...);
        if constexpr ((kDepends<Arguments> || ...)) emulation::need_predecessor();
    });
    if (!finished) TVM_FFI_THROW(RuntimeError) << "all threads wait for each other";
}

}  // namespace mla::ffi
