// A ring of buffers, each with a barrier that says when it is full and one that says when it is empty.
#pragma once
#include <cstdint>

namespace mla {

// A position in a ring of `kStages` barriers. A consumer waits for `parity()`; a producer, which finds a fresh
// ring empty, for `parity() ^ 1`.
template <int kStages>
struct RingCursor {
    uint32_t stage = 0;
    uint32_t phase = 0;

    __device__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

}  // namespace mla
