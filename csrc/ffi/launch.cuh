// How kernels are launched.
#pragma once
#include <algorithm>

#include "driver.cuh"
#include "tvm.cuh"

namespace mla::ffi {

// The CTAs of a decode launch on the stream: as many as the workspace (`plans`, a row per CTA) is for, and no more than
// the stream has multiprocessors.
inline int num_ctas_of(const TensorView& plans, cudaStream_t stream) {
    return std::min(static_cast<int>(plans.size(0)), multiprocessors_of(stream));
}

// A launch.
//
// A grid whose CTAs wait for one another ends if all of them start. There is a multiprocessor for each (`num_ctas_of`),
// so only other grids can keep a CTA from starting. Grids that end by themselves, or that start all their CTAs at once
// as cooperative launches do, only delay it. But two grids that wait for CTAs of their own could each hold the
// multiprocessors that the other needs. A GPU starts grids of one priority in turn, all CTAs of the earlier grid first.
// Therefore all launches that wait have the same priority, the greatest, whatever their streams have: nothing comes
// between their CTAs. (Cooperative launches of our own would guarantee as much, but they begin only when their
// predecessor has left all multiprocessors, which is slower.)
struct Launch {
    cudaStream_t stream;
    int grid, block;
    int shared_bytes = 0;   // dynamic
    int cluster = 1;        // CTAs in a cluster
    bool waits = false;     // its CTAs may wait for one another
    bool overlaps = false;  // with `kDependentLaunch`: may begin before its predecessor in the stream has ended
};

// How many CTAs of a launch the current device can hold at once if nothing else runs there, by clusters of
// `how.cluster`.
template <typename... Parameters>
int resident_ctas(void (*kernel)(Parameters...), const Launch& how) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared_bytes),
          "reserving shared memory");
    if (how.cluster == 1) {
        int device, multiprocessors, ctas;
        check(cudaGetDevice(&device), "reading the current device");
        check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
              "counting multiprocessors");
        check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, how.block, how.shared_bytes),
              "counting resident CTAs");
        return ctas * multiprocessors;
    }
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(how.cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = how.cluster;
    config.blockDim = how.block;
    config.dynamicSmemBytes = how.shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int clusters;
    check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "counting resident clusters");
    return clusters * how.cluster;
}

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
    if (how.shared_bytes > 0)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared_bytes),
              "reserving shared memory");
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
