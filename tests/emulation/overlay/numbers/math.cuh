#pragma once
#include <cmath>

namespace mla {

inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float reciprocal_approx(float x) { return 1.f / x; }
inline float warp_max(float x) {
    for (int distance = 16; distance > 0; distance /= 2) x = std::fmax(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

inline int exact_log2(int power) { return 31 - __builtin_clz(power); }

}  // namespace mla
