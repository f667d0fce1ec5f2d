#pragma once
#include <cstdint>

namespace mla {

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
inline void fence_async_proxy() {
    auto& warp = emulation::warp();
    emulation::release(&warp.fence);
    const emulation::Acting acting(warp.wgmma);
    emulation::acquire(&warp.fence);
}

}  // namespace mla
