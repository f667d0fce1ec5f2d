#pragma once
#include "mbarrier.cuh"

namespace mla {

inline void fence_barrier_init() {}

EMULATES inline bool has_partner() { return emulation::current->cta->partner; }
EMULATES inline emulation::Cta& first_of_cluster() {
    auto& cta = *emulation::current->cta;
    return has_partner() && blockIdx.x % 2 ? *cta.partner : cta;
}
EMULATES inline void cluster_arrive() {
    auto& barrier = first_of_cluster().cluster;
    emulation::release(barrier.points[0]);
    ++barrier.arrived;
    emulation::progressed();
}
// By the consumers: all other threads have ended, or will without doing anything more in the cluster.
EMULATES inline void cluster_leave() {
    auto& barrier = first_of_cluster().cluster_end;
    emulation::release(barrier.points[0]);
    ++barrier.arrived;
    emulation::current->left = true;
    emulation::progressed();
}
EMULATES inline void cluster_wait() {
    const bool left = emulation::current->left;
    const auto& barrier = left ? first_of_cluster().cluster_end : first_of_cluster().cluster;
    while (barrier.arrived < 2 * (left ? 256 : static_cast<int>(blockDim.x))) emulation::yield();
    emulation::acquire(barrier.points[0]);
}
inline void arrive_at_partner(Barrier& barrier) { emulation::at_partner(barrier).arrive(); }
template <typename T>
EMULATES void send_to_partner(T* place, const T& value, Barrier& barrier) {
    auto& self = *emulation::current;
    if (!self.sender.handle) self.sender.begin("st.async of thread " + std::to_string(self.thread.x));
    emulation::release(&self.sender);
    const emulation::Acting acting(self.sender);
    emulation::acquire(&self.sender);
    auto& to = emulation::at_partner(*place);
    emulation::note_write(&to, sizeof(value));
    to = value;
    emulation::at_partner(barrier).complete(sizeof(value));
}
inline bool try_wait_for_partner(Barrier& barrier, uint32_t parity) {
    barrier.wait(parity);
    return true;
}

}  // namespace mla
