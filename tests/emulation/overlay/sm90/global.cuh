#pragma once
#include <cstdint>

namespace mla::sm90 {

inline uint4 load_16(const void* source, uint64_t) {
    emulation::need_predecessor();
    uint4 words;
    std::memcpy(&words, source, sizeof(words));
    return words;
}
inline void prefetch_line(const void* source) { (void)*static_cast<const volatile unsigned char*>(source); }

}  // namespace mla::sm90
