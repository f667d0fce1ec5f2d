#pragma once
#include <cstdint>

namespace mla {

// The bytes change when they are waited for, so that whoever reads too early reads poison.
inline void copy_16_later(uint32_t destination, const void* source, bool valid) {
    unsigned char* to = emulation::at_shared(destination, 16);
    emulation::copy_later(to, 16, [=]() EMULATES {
        static const unsigned char zeros[16] = {};
        std::memcpy(to, valid ? source : zeros, 16);
    });
}
inline void cp_async_16_of_weights(uint32_t destination, const void* source) {
    copy_16_later(destination, source, true);
}
inline void cp_async_16_or_zero(uint32_t destination, const void* source, bool valid) {
    emulation::need_predecessor();
    copy_16_later(destination, source, valid);
}
inline void cp_async_16(uint32_t destination, const void* source, uint64_t) {
    cp_async_16_or_zero(destination, source, true);
}
inline void cp_async_16_or_zero(uint32_t destination, const void* source, bool valid, uint64_t) {
    cp_async_16_or_zero(destination, source, valid);
}
inline void cp_async_commit() {
    auto& fiber = *emulation::current;
    fiber.groups.push_back(std::move(fiber.copies));
    fiber.copies.clear();
    emulation::release_copies(&fiber.groups.back());
}
template <int kPending>
void cp_async_wait() {
    auto& groups = emulation::current->groups;
    for (; groups.size() > kPending; groups.pop_front()) {
        for (auto& copy : groups.front()) copy();
        emulation::acquire(&groups.front());
    }
}

}  // namespace mla
