#pragma once
#include <cstdint>

namespace mla {

inline uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - emulation::shared_memory());
}

struct alignas(8) Barrier {
    uint16_t expected, pending;
    int32_t state;  // bytes awaited * 2 + parity of the phase at hand

    void init(uint32_t arrivals) {
        expected = pending = arrivals;
        state = 0;
    }
    void settle() {
        if (pending || state >> 1) return;
        pending = expected;
        state ^= 1;
        ++emulation::progress;
    }
    void arrive() {
        if (pending == 0) emulation::fail("an mbarrier has more arrivals than it expects");
        --pending;
        settle();
    }
    void arrive_expect(uint32_t bytes) {
        state += static_cast<int32_t>(bytes) * 2;
        arrive();
    }
    void complete(uint32_t bytes) {
        state -= static_cast<int32_t>(bytes) * 2;
        settle();
    }
    void arrive_after_cp_async() {
        for (auto& copy : emulation::current->copies) copy();
        emulation::current->copies.clear();
        arrive();
    }
    bool has_completed(uint32_t parity) const { return (static_cast<uint32_t>(state) & 1) != parity; }
    void wait(uint32_t parity) const {
        while (!has_completed(parity)) emulation::yield();
    }
};

inline void fence_barrier_init() {}

}  // namespace mla
