// O of a work tile, in registers. ColumnProducts and TokenProducts are two ways to compute it.
#pragma once
#include "config.cuh"

namespace mla::portable {

template <typename C>
struct Accumulators {
    const DecodeParams& p;
    DecodeMemory<C>& smem;
    int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    float o[C::kOctets][C::kColumns / 16][4];  // in fragments (mma.cuh), rows on the n side

    __device__ Accumulators(const DecodeParams& p, DecodeMemory<C>& smem) : p(p), smem(smem) {}

    __device__ void clear_output() {
#pragma unroll
        for (int octet = 0; octet < C::kOctets; ++octet)
#pragma unroll
            for (int i = 0; i < C::kColumns / 16; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k) o[octet][i][k] = 0.f;
    }

    // Multiplies O by factor_of(octet, k): that of row k of the two that this lane has in an octet.
    template <typename FactorOf>
    __device__ void scale_output(FactorOf factor_of) {
#pragma unroll
        for (int octet = 0; octet < C::kOctets; ++octet)
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const float factor = factor_of(octet, k);
#pragma unroll
                for (int i = 0; i < C::kColumns / 16; ++i) o[octet][i][k] *= factor, o[octet][i][k + 2] *= factor;
            }
    }

    // Offset within a stage of this lane's row of the first matrices of values.
    static constexpr int kVectorColumns = 16 / C::Layout::kElementBytes;
    __device__ uint32_t value_offset() const {
        const int first = warp * (C::kColumns / kVectorColumns);
        if constexpr (C::kWidens) return vector_offset<C>(lane % 16, first + lane / 16);
        return vector_offset<C>(lane / 16 * 8 + lane % 8, first + lane / 8 % 2);
    }
};

}  // namespace mla::portable
