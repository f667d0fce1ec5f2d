// Scales of groups of latent columns (numbers/cache_format.cuh) in the products with their latents.
//
// A warp's columns of a product share a scale of each token. Scores are multiplied by it in fp32. P is multiplied by it
// in fp16, as 2^(7 - e) * scale * P, where 2^e exceeds all scales so far. P is at most 2^8 (softmax.cuh), so this fits
// fp16, and a scale that is 2^20 times smaller than another one still is a normal number. O, in units of 2^(e - 7), is
// rescaled when e grows.
#pragma once
#include "config.cuh"
#include "ptx/operands.cuh"

namespace mla::portable {

// `exponent` is the largest biased exponent of a scale so far, so e = exponent + 1 - 127. It begins with the least one
// with which 2^(e - 7) is a normal number.
constexpr int kLeastExponent = 7;
// 2^(7 - e), by which scales are multiplied for P.
__device__ __forceinline__ float inverse_unit_of_output(int exponent) {
    return power_of_two(127 + 7 - (exponent + 1 - 127));
}
// 2^(e - 7).
__device__ __forceinline__ float unit_of_output(int exponent) { return power_of_two(127 + exponent + 1 - 127 - 7); }
// What O is multiplied by when the exponent grows.
__device__ __forceinline__ float rescaling(int before, int exponent) {
    return power_of_two(max(127 + before - exponent, 0));
}

// The scales of a stage's tokens for the columns around `column`; those of successive tokens are C::Layout::kScales
// floats apart.
template <typename C>
__device__ __forceinline__ const float* scales_at(const DecodeMemory<C>& smem, uint32_t kv, int column) {
    const unsigned char* stage = smem.kv[0] + (kv - smem_address(smem.kv));
    return reinterpret_cast<const float*>(stage + C::kScaleOffset) + column / C::Layout::kScaleColumns;
}

// Of token blocks from `first_block` on: the scales of this lane's token in the first half of each, and in the second.
// `own_scales` has that of its first token of the tile.
template <typename C, int kBlocks>
__device__ __forceinline__ void load_key_scales(float (&of_keys)[kBlocks][2], const float* own_scales,
                                                int first_block) {
#pragma unroll
    for (int i = 0; i < kBlocks * 2; ++i)
        of_keys[i / 2][i % 2] = own_scales[(first_block * 2 + i) * 8 * C::Layout::kScales];
}

// Loads the scales of two neighbouring tokens.
template <int kScales>
__device__ __forceinline__ void load_scales(float (&scales)[2][kScales], const float* from) {
    static_assert(kScales == 4);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        const float4 words = reinterpret_cast<const float4*>(from)[k];
        scales[k][0] = words.x, scales[k][1] = words.y, scales[k][2] = words.z, scales[k][3] = words.w;
    }
}

template <typename C>
struct GroupScales {
    static constexpr int kLaneTokens = (C::kTile + 31) / 32;  // of a tile, of a lane; each of 16 tokens has two lanes

    int exponent;                   // the largest so far
    float own[kLaneTokens];         // scales of this lane's tokens of a tile
    float growth;                   // what O must be multiplied by
    uint32_t factors[kLaneTokens];  // of P, in fp16: of this lane's token and the next one

    // Before the first tile of a work tile.
    __device__ void reset() { exponent = kLeastExponent; }

    // Loads a tile's scales, as `scales_at` gives them. `take` must follow, later.
    __device__ void load(const float* scales) {
        const int lane = threadIdx.x % 32 % C::kTile;
#pragma unroll
        for (int i = 0; i < kLaneTokens; ++i) own[i] = scales[(i * 32 + lane) * C::Layout::kScales];
    }

    __device__ void take() {
        float most = 0.f;
#pragma unroll
        for (int i = 0; i < kLaneTokens; ++i) most = fmaxf(most, fabsf(own[i]));
        const int before = exponent;
        exponent = max(before, static_cast<int>(__reduce_max_sync(~0u, __float_as_int(most) >> 23)));
        const float inverse_unit = inverse_unit_of_output(exponent);
#pragma unroll
        for (int i = 0; i < kLaneTokens; ++i) {
            const float factor = own[i] * inverse_unit;
            const __half2 two = __floats2half2_rn(factor, __shfl_down_sync(~0u, factor, 1));
            factors[i] = reinterpret_cast<const uint32_t&>(two);
        }
        growth = rescaling(before, exponent);
    }

    // Spreads what P of the tile is multiplied by to the lanes, as operands b of the token blocks.
    using Factors = uint32_t[C::kTokenBlocks][2];
    __device__ void spread(Factors& of_blocks) const {
#pragma unroll
        for (int block = 0; block < C::kTokenBlocks; ++block)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                of_blocks[block][i] =
                    __shfl_sync(~0u, factors[block / 2], block % 2 * 16 + i * 8 + threadIdx.x % 4 * 2);
    }

    template <int kOctets>
    __device__ static void multiply(uint32_t (&p)[kOctets][2], const uint32_t (&factors)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int octet = 0; octet < kOctets; ++octet) p[octet][i] = multiplied<__half2>(p[octet][i], factors[i]);
        }
    }

    // The unit of O.
    __device__ float unit() const { return unit_of_output(exponent); }
};

}  // namespace mla::portable
