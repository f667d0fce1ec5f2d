#pragma once
#include <cmath>

namespace mla {

inline float exp2_approx(float x) { return std::exp2(x); }
inline float finite(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

}  // namespace mla
