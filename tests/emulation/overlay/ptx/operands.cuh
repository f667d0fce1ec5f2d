#pragma once
#include <cstdint>

namespace mla {

inline uint32_t smem_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - emulation::shared_memory());
}

inline uint64_t cache_policy(bool) { return 0; }

}  // namespace mla
