#pragma once
#include <cstdint>

#include "operands.cuh"

namespace mla {

struct alignas(8) Barrier {
    uint16_t expected, pending;
    int32_t state;  // bytes awaited * 2 + parity of the phase at hand

    void init(uint32_t arrivals) {
        expected = pending = arrivals;
        state = 0;
    }
    // Phases take turns.
    const emulation::Point& point(uint32_t parity) const {
        return reinterpret_cast<const emulation::Point*>(this)[parity & 1];
    }
    const emulation::Point& point() const { return point(state); }
    EMULATES void count(uint32_t arrivals, int32_t bytes) {
        pending -= arrivals;
        state += bytes * 2;
        if (pending || state >> 1) return;
        pending = expected;
        state ^= 1;
        emulation::progressed();
    }
    void check() const {
        if (pending == 0) emulation::fail("an mbarrier has more arrivals than it expects");
    }
    void arrive() { arrive_expect(0); }
    void arrive_expect(uint32_t bytes) {
        check();
        emulation::release(point());
        count(1, bytes);
    }
    // By the copier, also in wgmma's view: it reads what the same engine wrote.
    void complete(uint32_t bytes) {
        emulation::release(&point().of_threads);
        emulation::release(&point().of_wgmma);
        count(0, -static_cast<int32_t>(bytes));
    }
    void arrive_after_cp_async() {
        check();
        for (auto& copy : emulation::current->copies) copy();
        emulation::current->copies.clear();
        emulation::release_copies(&point().of_threads);
        count(1, 0);
    }
    EMULATES void wait(uint32_t parity) const {
        while ((static_cast<uint32_t>(state) & 1) == parity) emulation::yield();
        emulation::acquire(point(parity));
    }
};

}  // namespace mla
