// Appends a layer's new tokens to the latent cache: normalizes their latents (Zhang and Sennrich, "Root Mean Square
// Layer Normalization", 2019, equation 4), rotates their queries and keys (Su et al., "RoFormer", 2021, equation 34)
// and writes their rows of the cache and, if they are wanted, normalized latents and rotated keys. One launch, which
// lets the decode kernel after it begin.
//
// grid   p.ctas_per_token CTAs for each token
// block  each thread has one vector of 8 elements (16 bytes): of the latents, of a query head's rotary part, or of the
//        key's
#pragma once
#include <cuda_bf16.h>

#include <cfloat>
#include <type_traits>

#include "numbers/arithmetic.cuh"
#include "numbers/cache_format.cuh"
#include "ptx/pdl.cuh"
#include "schedule/params.cuh"

namespace mla {

constexpr int kAppendThreads = 128;

// Strides count elements; the last dimension of every tensor is contiguous.
struct AppendParams {
    void* q_rope;  // [tokens, heads, d_rope], rotated in place
    int64_t q_rope_token_stride, q_rope_head_stride;
    const void* kv_c;  // [tokens, d_c]
    int64_t kv_c_stride;
    const void* norm_weight;  // [d_c]; null: kv_c is normalized already
    float norm_eps;
    const void* k_rope;  // [tokens, d_rope]
    int64_t k_rope_stride;
    // [tokens, d_c] and [tokens, d_rope]: latents and keys as they are before conversion to the cache's format, also of
    // tokens without a slot. Both null if nobody wants them.
    void* kv_c_out;
    int64_t kv_c_out_stride;
    void* k_rope_out;
    int64_t k_rope_out_stride;
    void* cache;                    // [pages, page_size, ...], rows of a format
    int64_t page_bytes, row_bytes;  // from one to the next
    const float* kv_scale;          // with Scale::kTensor
    Divisor page_size;
    int64_t num_slots;
    // [tokens] page * page_size + offset, int32 or int64 (`slots_64`). For those outside of the cache, no row is
    // written.
    const void* slots;
    bool slots_64;
    const int64_t* positions;  // [tokens]
    int64_t num_positions;
    const void* cos_sin;  // [num_positions, d_rope]: cosines, then sines of d_rope / 2 angles
    bool cos_sin_fp32;    // else in the dtype of the new tokens
    bool interleaved;     // a pair is two neighbours; else one element of each half
    int num_heads, d_c, d_rope;
    int ctas_per_token;
};

inline int append_ctas_per_token(int num_heads, int d_c, int d_rope) {
    return (d_c / 8 + (num_heads + 1) * (d_rope / 8) + kAppendThreads - 1) / kAppendThreads;
}

template <typename Element>
__device__ __forceinline__ void rotate_pair(Element& x, Element& y, float cosine, float sine) {
    const float a = static_cast<float>(x), b = static_cast<float>(y);
    x = static_cast<Element>(a * cosine - b * sine);
    y = static_cast<Element>(b * cosine + a * sine);
}

// Where the row of a token's position begins in `cos_sin`, in elements; below 0 if there is none.
__device__ __forceinline__ int64_t angles_of(const AppendParams& p, int token) {
    const int64_t position = p.positions[token];
    const bool exists = static_cast<uint64_t>(position) < static_cast<uint64_t>(p.num_positions);
    return exists ? position * p.d_rope : -1;
}

// Four elements of `cos_sin`.
template <typename Element>
__device__ __forceinline__ float4 four_angles(const AppendParams& p, int64_t index) {
    if (p.cos_sin_fp32) return *reinterpret_cast<const float4*>(static_cast<const float*>(p.cos_sin) + index);
    alignas(8) Element x[4];
    *reinterpret_cast<uint2*>(x) = *reinterpret_cast<const uint2*>(static_cast<const Element*>(p.cos_sin) + index);
    return make_float4(static_cast<float>(x[0]), static_cast<float>(x[1]), static_cast<float>(x[2]),
                       static_cast<float>(x[3]));
}

// Rotates pairs 4 * vector to 4 * vector + 3 of a rotary part by `angles_of` its token; to NaN if there are none.
template <typename Element>
__device__ __forceinline__ void rotate(const AppendParams& p, const Element* from, Element* x, int vector,
                                       int64_t angles) {
    const int half = p.d_rope / 2;
    float4 c = make_float4(NAN, NAN, NAN, NAN), s = c;
    if (angles >= 0) {
        c = four_angles<Element>(p, angles + vector * 4);
        s = four_angles<Element>(p, angles + half + vector * 4);
    }
    if (p.interleaved) {
        *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(from + vector * 8);
        rotate_pair(x[0], x[1], c.x, s.x);
        rotate_pair(x[2], x[3], c.y, s.y);
        rotate_pair(x[4], x[5], c.z, s.z);
        rotate_pair(x[6], x[7], c.w, s.w);
    } else {
        reinterpret_cast<uint2*>(x)[0] = *reinterpret_cast<const uint2*>(from + vector * 4);
        reinterpret_cast<uint2*>(x)[1] = *reinterpret_cast<const uint2*>(from + half + vector * 4);
        rotate_pair(x[0], x[4], c.x, s.x);
        rotate_pair(x[1], x[5], c.y, s.y);
        rotate_pair(x[2], x[6], c.z, s.z);
        rotate_pair(x[3], x[7], c.w, s.w);
    }
}

// Stores the result of `rotate` by store(count, column, elements): once with a count of 8, or twice with one of 4.
template <typename Element, typename Store>
__device__ __forceinline__ void store_rotated(const AppendParams& p, const Element* x, int vector, Store store) {
    if (p.interleaved) {
        store(std::integral_constant<int, 8>{}, vector * 8, x);
    } else {
        store(std::integral_constant<int, 4>{}, vector * 4, x);
        store(std::integral_constant<int, 4>{}, p.d_rope / 2 + vector * 4, x + 4);
    }
}

// Stores kCount (4 or 8) elements from `column` on, as a format stores them. In e4m3 they are divided by `scale`;
// values outside the range, infinity included, become the largest value; NaN stays NaN.
template <Stored kStored, int kCount, typename Element>
__device__ __forceinline__ void store_as(void* row, int column, const Element* x, float scale = 1.f) {
    using To = StoredType<kStored, Element>;
    using Vector = std::conditional_t<sizeof(To) * kCount == 16, uint4,
                                      std::conditional_t<sizeof(To) * kCount == 8, uint2, uint32_t>>;
    alignas(16) To converted[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k)
        if constexpr (kStored == Stored::kE4m3)
            converted[k] = to_e4m3(static_cast<float>(x[k]) / scale);
        else if constexpr (std::is_same_v<To, Element>)
            converted[k] = x[k];
        else
            converted[k] = static_cast<To>(static_cast<float>(x[k]));
    *reinterpret_cast<Vector*>(static_cast<To*>(row) + column) = reinterpret_cast<const Vector&>(converted);
}

// 1 / the root mean square of the token's latents. To be called by a whole warp.
template <typename Element>
__device__ __forceinline__ float inverse_rms(const AppendParams& p, const Element* kv_c) {
    float squares = 0.f;
    for (int i = threadIdx.x % 32; i < p.d_c / 8; i += 32) {
        alignas(16) Element x[8];
        *reinterpret_cast<uint4*>(x) = reinterpret_cast<const uint4*>(kv_c)[i];
#pragma unroll
        for (int k = 0; k < 8; ++k) squares += static_cast<float>(x[k]) * static_cast<float>(x[k]);
    }
    return rsqrtf(sum_over_lanes<32>(squares) / p.d_c + p.norm_eps);
}

// The scale of a group of columns: its largest magnitude becomes that of e4m3. To be called by a whole warp; each lane
// has 8 elements of a group. NaN does not count.
template <int kColumns, typename Element>
__device__ __forceinline__ float group_scale(const Element* x) {
    float largest = 0.f;
#pragma unroll
    for (int k = 0; k < 8; ++k) largest = fmaxf(largest, fabsf(static_cast<float>(x[k])));
    return fmaxf(fminf(max_over_lanes<kColumns / 8>(largest), FLT_MAX) / kE4m3Max, FLT_MIN);
}

// Writes vector number `vector` of the token's latents, normalized with `weights` if there are any, to its row of the
// cache (null: it has none) and of `kv_c_out`. To be called by whole warps if groups of columns have scales.
template <CacheFormat kFormat, typename Element>
__device__ __forceinline__ void append_latents(const AppendParams& p, const Element* kv_c, const Element* weights,
                                               unsigned char* row, int token, int vector, float norm) {
    alignas(16) Element x[8];
    *reinterpret_cast<uint4*>(x) = reinterpret_cast<const uint4*>(kv_c)[vector];
    if (p.norm_weight) {
#pragma unroll
        for (int k = 0; k < 8; ++k)
            x[k] = static_cast<Element>(static_cast<float>(x[k]) * norm * static_cast<float>(weights[k]));
    }
    if (p.kv_c_out)
        store_as<Stored::kAsQueries, 8>(static_cast<Element*>(p.kv_c_out) + token * p.kv_c_out_stride, vector * 8, x);
    if (!row) return;
    float scale = 1.f;
    if constexpr (kFormat.scale == Scale::kTensor) scale = *p.kv_scale;
    if constexpr (kFormat.scale == Scale::kGroup) {
        constexpr int kLanes = kFormat.group / 8;  // of a group
        scale = group_scale<kFormat.group>(x);
        auto* scales = reinterpret_cast<float*>(row + p.d_c * bytes_of(kFormat.latents));
        if (vector % kLanes == 0) scales[vector / kLanes] = scale;
    }
    store_as<kFormat.latents, 8>(row, vector * 8, x, scale);
}

// Writes the result of `rotate` on the token's key to its row of the cache (null: it has none) and of `k_rope_out`.
template <CacheFormat kFormat, typename Element>
__device__ __forceinline__ void append_key(const AppendParams& p, const Element* x, unsigned char* row, int token,
                                           int vector) {
    if (p.k_rope_out) {
        auto* out = static_cast<Element*>(p.k_rope_out) + token * p.k_rope_out_stride;
        store_rotated(p, x, vector, [&](auto count, int column, const Element* from) {
            store_as<Stored::kAsQueries, count.value>(out, column, from);
        });
    }
    if (!row) return;
    row += p.d_c * bytes_of(kFormat.latents);
    if constexpr (kFormat.scale == Scale::kGroup) row += p.d_c / kFormat.group * 4;
    float scale = 1.f;
    if constexpr (kFormat.scale == Scale::kTensor) scale = *p.kv_scale;
    store_rotated(p, x, vector, [&](auto count, int column, const Element* from) {
        store_as<kFormat.rope, count.value>(row, column, from, scale);
    });
}

// kDependentLaunch: the launch may overlap its predecessor, and its successor may overlap it (sm_90 and newer). A type
// holds the format, because nvcc 13.0 cannot name kernels with a struct among their own template arguments.
template <typename Element_, CacheFormat kFormat_, bool kDependentLaunch_>
struct AppendConfig {
    using Element = Element_;
    static constexpr CacheFormat kFormat = kFormat_;
    static constexpr bool kDependentLaunch = kDependentLaunch_;
};

template <typename C>
__global__ void __launch_bounds__(kAppendThreads) append_kernel(const __grid_constant__ AppendParams p) {
    using Element = typename C::Element;
    const int token = blockIdx.x / p.ctas_per_token, cta = blockIdx.x - token * p.ctas_per_token;
    // A token's vectors are those of its latents, of each query head and of the key, which counts as the head after the
    // last.
    const int index = cta * kAppendThreads + threadIdx.x, latents = p.d_c / 8, head_vectors = p.d_rope / 8;
    const int head = (index - latents) / max(head_vectors, 1), vector = (index - latents) - head * head_vectors;
    if constexpr (C::kDependentLaunch) {
        allow_successor();
        wait_for_predecessor();
    }
    const bool is_query = index >= latents && head < p.num_heads;
    const auto* kv_c = static_cast<const Element*>(p.kv_c) + token * p.kv_c_stride;
    // What does not depend on the norm is loaded before it.
    const int64_t slot = is_query ? -1 : index_at(p.slots, p.slots_64, token);
    alignas(16) Element weights[8];
    if (p.norm_weight && index < latents)
        *reinterpret_cast<uint4*>(weights) = static_cast<const uint4*>(p.norm_weight)[index];
    // `inverse_rms` needs whole warps, even if only some of their lanes have latents.
    const float norm = p.norm_weight && index - threadIdx.x % 32 < latents ? inverse_rms(p, kv_c) : 1.f;
    if (index >= latents && (head > p.num_heads || head_vectors == 0)) return;

    unsigned char* row = nullptr;
    if (static_cast<uint64_t>(slot) < static_cast<uint64_t>(p.num_slots)) {
        int page, row_of_page;
        p.page_size.split(static_cast<int>(slot), page, row_of_page);
        row = static_cast<unsigned char*>(p.cache) + page * p.page_bytes + row_of_page * p.row_bytes;
    } else if (!is_query && !p.kv_c_out) {
        return;
    }
    if (index < latents) return append_latents<C::kFormat>(p, kv_c, weights, row, token, index, norm);
    auto* query = static_cast<Element*>(p.q_rope) + token * p.q_rope_token_stride + head * p.q_rope_head_stride;
    const auto* key = static_cast<const Element*>(p.k_rope) + token * p.k_rope_stride;
    alignas(16) Element x[8];
    rotate(p, is_query ? query : key, x, vector, angles_of(p, token));
    if (!is_query) return append_key<C::kFormat>(p, x, row, token, vector);
    store_rotated(p, x, vector, [&](auto count, int column, const Element* from) {
        store_as<Stored::kAsQueries, count.value>(query, column, from);
    });
}

}  // namespace mla
