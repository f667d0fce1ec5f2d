#pragma once

namespace mla {

template <int>
void raise_register_limit() {}
template <int>
void lower_register_limit() {}

template <int kCount>
void pin_registers(float (&)[kCount]) {}
inline void multiply_in_place(float& accumulator, float factor) { accumulator *= factor; }
template <typename T>
T pinned(T value) {
    return value;
}

}  // namespace mla
