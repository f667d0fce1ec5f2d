#pragma once
#include <cstdint>

namespace mla {

inline void sync_cta() { __syncthreads(); }
template <int kId, int kThreads>
void named_barrier_sync() {
    emulation::wait(emulation::current->cta->barriers[kId], kThreads);
}
template <int kId, int kThreads>
bool named_barrier_any(bool value) {
    return emulation::wait(emulation::current->cta->barriers[kId], kThreads, value);
}

}  // namespace mla
