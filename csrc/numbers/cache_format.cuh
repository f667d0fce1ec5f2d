// How a token's key lies in the latent cache, and what follows from that. The formats are the table FORMATS of
// mla_backend/cache_format.py, a row of which arrives here as a template argument, a CacheFormat.
//
// A key is d_c latents, then fp32 scales where groups of columns have them, then d_rope rotary columns. A new format is
// a row there and, where its products differ, a file keys_*.cuh for each Hopper kernel. Code asks for what it means
// (bytes of an element, columns that share a scale, whether there is a tail), not for a format, and static_asserts say
// what a part cannot do. Scales that are stored in another way, such as one byte of e8m0 for 64 columns in rows of 584
// bytes, also change CacheLayout and what reads or writes scales: decode/portable/group_scales.cuh, the Hopper kernels'
// keys_*.cuh, `append_latents` in small/append.cuh, and `split`, `quantize` and `dequantize` in cache_format.py. Rows
// of no multiple of 16 bytes change all copies (load/, `key_box`, portable/key_loader.cuh). Groups of other than 128
// columns change `copy_record` in decode/hopper/load/copy.cuh, for which a column block has 128 bytes; an odd number of
// groups changes `few_rows_segment` in few_rows/kernel.cuh.
//
// e4m3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022): sign, 4 bits of exponent with bias 7, 3 bits of
// mantissa; up to 448, no infinity, 0x7f and 0xff are NaN. Every value is exact in fp16.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace mla {

enum class Stored { kAsQueries, kE4m3, kBf16 };  // how an element is stored; kAsQueries: in the queries' dtype
enum class Scale { kNone, kTensor, kGroup };     // what shares an fp32 scale; kGroup: some latent columns of a token

struct CacheFormat {
    Stored latents, rope;
    Scale scale;  // of the latents; kTensor: also of the rotary columns, and read on the device
    int group;    // with kGroup: how many columns share a scale; d_c means one scale for each token
};

constexpr int bytes_of(Stored stored) { return stored == Stored::kE4m3 ? 1 : 2; }
template <Stored kStored, typename Element>
using StoredType = std::conditional_t<kStored == Stored::kAsQueries, Element,
                                      std::conditional_t<kStored == Stored::kE4m3, uint8_t, __nv_bfloat16>>;

// Bytes of a token, from the start of its row.
template <CacheFormat kFormat, int kDimLatent, int kDimRope>
struct CacheLayout {
    static constexpr Scale kScale = kFormat.scale;
    static constexpr int kElementBytes = bytes_of(kFormat.latents);
    static constexpr int kRopeElementBytes = bytes_of(kFormat.rope);
    static constexpr int kScaleColumns = kScale == Scale::kGroup ? kFormat.group : kDimLatent;  // share a scale
    static constexpr int kScales = kScale == Scale::kGroup ? kDimLatent / kScaleColumns : 0;    // in a key
    static constexpr int kScaleOffset = kDimLatent * kElementBytes;
    static constexpr int kRopeOffset = kScaleOffset + kScales * 4;
    static constexpr int kTokenBytes = kRopeOffset + kDimRope * kRopeElementBytes;
    // The tail is what is not stored as the latents are: scales and rotary columns.
    static constexpr bool kHasTail = kFormat.rope != kFormat.latents;
    static constexpr int kTailBytes = kTokenBytes - kScaleOffset;
    static_assert(kDimLatent % kScaleColumns == 0 && (kScales == 0 || kHasTail));
    static_assert(kTokenBytes % 16 == 0 && kRopeOffset % 16 == 0);  // copies are of 16 bytes
};

constexpr float kE4m3Max = 448.f;

// The nearest e4m3, saturating at +-448; NaN stays NaN.
__host__ __device__ __forceinline__ uint8_t to_e4m3(float value) {
    return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

// Whether the architecture converts e4m3 by an instruction. On the CPU (tests) a function of the toolkit does.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr bool kConvertsE4m3 = false;
#else
constexpr bool kConvertsE4m3 = true;
#endif
// `halves_of_e4m3` turns 1 into 1 / kE4m3Unit: without the instruction, the exponent keeps its bias.
constexpr float kE4m3Unit = kConvertsE4m3 ? 1.f : 256.f;

// Converts four e4m3 to fp16 by the instruction: bytes 0 and 1 to `low`, bytes 2 and 3 to `high`.
__device__ __forceinline__ void halves_in_order(uint32_t bytes, uint32_t& low, uint32_t& high) {
#ifdef __CUDA_ARCH__  // the toolkit's function takes an instruction more
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}\n"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
#else
    const __half2_raw first = __nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(bytes), __NV_E4M3);
    const __half2_raw second = __nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(bytes >> 16), __NV_E4M3);
    low = first.x | static_cast<uint32_t>(first.y) << 16;
    high = second.x | static_cast<uint32_t>(second.y) << 16;
#endif
}

// Converts four e4m3 to fp16, in multiples of kE4m3Unit: bytes 0 and 2 to `even`, bytes 1 and 3 to `odd`. Without the
// instruction, NaN becomes 480.
__device__ __forceinline__ void halves_of_e4m3(uint32_t bytes, uint32_t& even, uint32_t& odd) {
    if constexpr (kConvertsE4m3) {
        halves_in_order(__byte_perm(bytes, 0, 0x3120), even, odd);
    } else {  // exponent and mantissa move to their place in fp16, whose exponent has one bit more
        even = (bytes << 8 & 0x80008000) | (bytes << 7 & 0x3f803f80);
        odd = (bytes & 0x80008000) | (bytes >> 1 & 0x3f803f80);
    }
}

// Converts four e4m3 to fp16, in whichever order takes the fewest instructions: that of `halves_in_order` with the
// instruction, else that of `halves_of_e4m3`.
__device__ __forceinline__ void halves_in_any_order(uint32_t bytes, uint32_t& first, uint32_t& second) {
    if constexpr (kConvertsE4m3)
        halves_in_order(bytes, first, second);
    else
        halves_of_e4m3(bytes, first, second);
}

// The product of two pairs of fp16 or of bf16.
template <typename Pair>
__device__ __forceinline__ uint32_t multiplied(uint32_t a, uint32_t b) {
    const Pair product = __hmul2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
    return reinterpret_cast<const uint32_t&>(product);
}

}  // namespace mla
