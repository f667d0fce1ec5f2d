#pragma once
#include <type_traits>

#include "descriptor.cuh"

namespace mla {

// All threads' parts of a product are done between the fence and the commit.
inline void wgmma_fence() { emulation::meet_warp(); }
EMULATES inline void wgmma_commit() {
    auto& warpgroup = emulation::warpgroup();
    {
        const emulation::Acting acting(emulation::warp().wgmma);
        auto& groups = emulation::wgmma_groups();
        emulation::release(&groups[emulation::current->wgmma_groups++ % sizeof(groups)]);
    }
    emulation::meet(warpgroup.barrier, 128);
}
template <int kPending>
void wgmma_wait() {
    const auto& completed = emulation::wgmma_groups();
    const uint32_t groups = emulation::current->wgmma_groups;
    static_assert(kPending < sizeof(completed));
    if (groups > kPending) emulation::acquire(&completed[(groups - 1 - kPending) % sizeof(completed)]);
}
enum class Major { kK = 0, kMN = 1 };

// Element (mn, k) of an operand that a descriptor points to. The whole 8 bytes of it are read, which belong to elements
// that this warp reads anyway.
template <typename T>
float element(uint64_t descriptor, Major major, int mn, int k) {
    constexpr int kVector = 16 / sizeof(T);  // elements of 16 bytes
    const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
                   stride = (descriptor >> 32 & 0x3fff) << 4;
    const auto swizzle = static_cast<Swizzle>(descriptor >> 62);
    uint32_t address;
    if (major == Major::kMN)
        address = start + k / 8 * stride + k % 8 * 128 + mn / 64 * leading + mn % 64 * 2;
    else if (swizzle == Swizzle::kNone)
        address = start + mn / 8 * stride + k / kVector * leading + mn % 8 * 16 + k % kVector * sizeof(T);
    else
        address = start + mn / 8 * stride + mn % 8 * (swizzle == Swizzle::k128B ? 128 : 64) + k * sizeof(T);
    if (swizzle == Swizzle::k128B) address ^= (address >> 7 & 7) << 4;
    if (swizzle == Swizzle::k64B) address ^= (address >> 7 & 3) << 4;
    T values[8 / sizeof(T)];
    std::memcpy(values, emulation::at_shared(address / 8 * 8, 8), 8);
    return static_cast<float>(values[address % 8 / sizeof(T)]);
}

// Row and column of the accumulators that this thread holds.
inline int row_of(int i) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
inline int column_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

template <int N, typename T, Major kMajorA>
struct Wgmma {
    static void mma(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
        float rows[2][16], columns[N / 4][16];
        {
            const emulation::Acting acting(emulation::warp().wgmma);
            for (int k = 0; k < 16; ++k) {
                for (int h = 0; h < 2; ++h) rows[h][k] = element<T>(a, kMajorA, row_of(h * 2), k);
                for (int c = 0; c < N / 4; ++c)
                    columns[c][k] = element<T>(b, Major::kK, column_of(c / 2 * 4 + c % 2), k);
            }
        }
        for (int i = 0; i < N / 2; ++i) {
            float sum = accumulate ? d[i] : 0.f;
            for (int k = 0; k < 16; ++k) sum += rows[i / 2 % 2][k] * columns[i / 4 * 2 + i % 2][k];
            d[i] = sum;
        }
    }
};

template <int N, typename T, Major kMajorB>
struct WgmmaFromRegisters {
    static void mma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
        // Lane l has of rows l / 4 and l / 4 + 8 the pairs at k = 2 * (l % 4), then both at k + 8.
        uint4 own;
        std::memcpy(&own, a, 16);
        const auto fragments = emulation::exchange(own);
        T rows[2][16];
        for (int quad = 0; quad < 4; ++quad)
            for (int i = 0; i < 4; ++i)
                std::memcpy(&rows[i % 2][i / 2 * 8 + quad * 2], fragments[emulation::lane() / 4 * 4 + quad] + i * 4, 4);
        float columns[N / 4][16];
        {
            const emulation::Acting acting(emulation::warp().wgmma);
            for (int c = 0; c < N / 4; ++c)
                for (int k = 0; k < 16; ++k) columns[c][k] = element<T>(b, kMajorB, column_of(c / 2 * 4 + c % 2), k);
        }
        for (int i = 0; i < N / 2; ++i)
            for (int k = 0; k < 16; ++k)
                d[i] = (accumulate || k > 0 ? d[i] : 0.f) +
                       static_cast<float>(rows[i / 2 % 2][k]) * columns[i / 4 * 2 + i % 2][k];
    }
};

template <int N>
struct WgmmaE4m3 {
    using T = __nv_fp8_e4m3;
    static void mma(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
        float rows[2][32];
        {
            const emulation::Acting acting(emulation::warp().wgmma);
            for (int h = 0; h < 2; ++h)
                for (int k = 0; k < 32; ++k) rows[h][k] = element<T>(a, Major::kK, row_of(h * 2), k);
        }
        multiply(d, rows, b, accumulate);
    }
    static void mma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
        // Lane l has of rows l / 4 and l / 4 + 8 four columns from k = 4 * (l % 4) on, then those at k + 16.
        uint4 own;
        std::memcpy(&own, a, 16);
        const auto fragments = emulation::exchange(own);
        float rows[2][32];
        for (int quad = 0; quad < 4; ++quad) {
            T values[16];
            std::memcpy(values, fragments[emulation::lane() / 4 * 4 + quad], 16);
            for (int i = 0; i < 16; ++i) rows[i / 4 % 2][i / 8 * 16 + quad * 4 + i % 4] = static_cast<float>(values[i]);
        }
        multiply(d, rows, b, accumulate);
    }

  private:
    static void multiply(float (&d)[N / 2], const float (&rows)[2][32], uint64_t b, bool accumulate) {
        float columns[N / 4][32];
        {
            const emulation::Acting acting(emulation::warp().wgmma);
            for (int c = 0; c < N / 4; ++c)
                for (int k = 0; k < 32; ++k) columns[c][k] = element<T>(b, Major::kK, column_of(c / 2 * 4 + c % 2), k);
        }
        for (int i = 0; i < N / 2; ++i) {
            float sum = accumulate ? d[i] : 0.f;
            for (int k = 0; k < 32; ++k) sum += rows[i / 2 % 2][k] * columns[i / 4 * 2 + i % 2][k];
            d[i] = sum;
        }
    }
};

}  // namespace mla
