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
inline void store_release(uint32_t* flag, uint32_t value) {
    emulation::need_predecessor();
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
    emulation::progressed();
}
inline uint32_t load_relaxed(const uint32_t* flag) {
    emulation::need_predecessor();
    return __atomic_load_n(flag, __ATOMIC_RELAXED);
}
inline uint32_t load_acquire(const uint32_t* flag) {
    emulation::need_predecessor();
    emulation::yield();
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
inline void wait_for_predecessor() { emulation::current->waited = true; }
inline void allow_successor() {}
}  // namespace mla
