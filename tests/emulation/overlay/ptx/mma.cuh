#pragma once
#include <type_traits>

namespace mla {

// Matrix `i` of those whose rows' addresses the lanes 8 * i .. 8 * i + 7 give.
inline uint32_t fragment_of(const unsigned char (*rows)[16], int i, bool transposed) {
    const int lane = emulation::lane();
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
        const int row = transposed ? lane % 4 * 2 + e : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + e;
        uint32_t address;
        std::memcpy(&address, rows[i * 8 + row], 4);
        if (address % 16) emulation::fail("a row of ldmatrix is not aligned to 16 bytes");
        std::memcpy(&pair[e], emulation::at_shared(address + column * 2, 2), 2);
    }
    uint32_t value;
    std::memcpy(&value, pair, 4);
    return value;
}
inline void load_matrices(uint32_t (&d)[4], uint32_t row) {
    const auto rows = emulation::exchange(row);
    for (int i = 0; i < 4; ++i) d[i] = fragment_of(rows, i, false);
}
inline void load_matrices(uint32_t (&d)[2], uint32_t row) {
    const auto rows = emulation::exchange(row);
    for (int i = 0; i < 2; ++i) d[i] = fragment_of(rows, i, false);
}
inline void load_matrices_transposed(uint32_t (&d)[4], uint32_t row) {
    const auto rows = emulation::exchange(row);
    for (int i = 0; i < 4; ++i) d[i] = fragment_of(rows, i, true);
}
inline void load_matrices_transposed(uint32_t (&d)[2], uint32_t row) {
    const auto rows = emulation::exchange(row);
    for (int i = 0; i < 2; ++i) d[i] = fragment_of(rows, i, true);
}

// D[16 x 8] += A[16 x 16] * B[16 x 8].
template <typename Element>
void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const int lane = emulation::lane();
    Element all_a[32][8], all_b[32][4];
    const auto values_a = emulation::exchange(a);
    std::memcpy(all_a, values_a, sizeof(all_a));
    const auto values_b = emulation::exchange(make_uint2(b0, b1));
    for (int i = 0; i < 32; ++i) std::memcpy(all_b[i], values_b[i], sizeof(all_b[i]));
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const Element of_a = all_a[row * 4 + k % 8 / 2][(k / 8 * 2 + i / 2) * 2 + k % 2];
            const Element of_b = all_b[column * 4 + k % 8 / 2][k / 8 * 2 + k % 2];
            d[i] += static_cast<float>(of_a) * static_cast<float>(of_b);
        }
    }
}

inline void store_matrices(uint32_t row, uint32_t first, uint32_t second, uint32_t third, uint32_t fourth) {
    const auto rows = emulation::exchange(row);
    const uint32_t values[] = {first, second, third, fourth};
    for (int matrix = 0; matrix < 4; ++matrix) {
        uint32_t address;
        std::memcpy(&address, rows[matrix * 8 + emulation::lane() / 4], 4);
        if (address % 16) emulation::fail("a row of stmatrix is not aligned to 16 bytes");
        std::memcpy(emulation::at_shared(address + emulation::lane() % 4 * 4, 4), &values[matrix], 4);
    }
    emulation::meet_warp();
}

template <typename... Values>
void store_matrices_transposed(uint32_t row, Values... given_values) {
    uint32_t addresses[32];
    const auto given = emulation::exchange(row);
    for (int i = 0; i < 32; ++i) std::memcpy(&addresses[i], given[i], 4);
    const uint32_t values[] = {given_values...};
    for (int matrix = 0; matrix < static_cast<int>(sizeof...(Values)); ++matrix)
        for (int i = 0; i < 2; ++i) {
            const uint32_t to = addresses[matrix * 8 + emulation::lane() % 4 * 2 + i] + emulation::lane() / 4 * 2;
            std::memcpy(emulation::at_shared(to, 2), reinterpret_cast<const unsigned char*>(&values[matrix]) + i * 2,
                        2);
        }
    emulation::meet_warp();
}

inline uint32_t transposed(uint32_t pair) {
    uint16_t columns[2];
    const auto given = emulation::exchange(pair);
    for (int i = 0; i < 2; ++i)  // of row l % 4 * 2 + i, column l / 4
        std::memcpy(&columns[i],
                    given[(emulation::lane() % 4 * 2 + i) * 4 + emulation::lane() / 8] + emulation::lane() / 4 % 2 * 2,
                    2);
    emulation::meet_warp();
    std::memcpy(&pair, columns, 4);
    return pair;
}

}  // namespace mla
