// Appends a layer's new tokens to the latent cache: normalizes their latents (Zhang and Sennrich, "Root Mean Square
// Layer Normalization", 2019, equation 4), rotates their queries and keys (Su et al., "RoFormer", 2021, equation 34)
// and writes their rows of the cache. One launch, which lets the decode kernel behind it begin.
//
// grid   p.ctas_per_token CTAs for each token
// block  each thread has one vector of 8 elements (16 bytes): of the latents, of a query head's rotary part, or of the
//        key's
#pragma once
#include "params.cuh"
#include "sync.cuh"

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
    void* cache;  // [pages, page_size, d_c + d_rope]
    int64_t page_stride, row_stride;
    Divisor page_size;
    const void* slots;  // [tokens] page * page_size + offset, int32 or int64 (`slots_64`); negative: no row is written
    bool slots_64;
    const int64_t* positions;  // [tokens]
    const float* cos_sin;      // [positions, d_rope]: cosines, then sines of d_rope / 2 angles
    bool interleaved;          // a pair is two neighbours; else one element of each half
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

// Rotates pairs 4 * vector to 4 * vector + 3 of a rotary part; `cos_sin` is the row of the token's position.
template <typename Element>
__device__ __forceinline__ void rotate(const AppendParams& p, const Element* from, Element* to, int vector,
                                       const float* cos_sin) {
    const int half = p.d_rope / 2;
    const float4 c = *reinterpret_cast<const float4*>(cos_sin + vector * 4);
    const float4 s = *reinterpret_cast<const float4*>(cos_sin + half + vector * 4);
    alignas(16) Element x[8];
    if (p.interleaved) {
        *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(from + vector * 8);
        rotate_pair(x[0], x[1], c.x, s.x);
        rotate_pair(x[2], x[3], c.y, s.y);
        rotate_pair(x[4], x[5], c.z, s.z);
        rotate_pair(x[6], x[7], c.w, s.w);
        *reinterpret_cast<uint4*>(to + vector * 8) = *reinterpret_cast<const uint4*>(x);
    } else {
        reinterpret_cast<uint2*>(x)[0] = *reinterpret_cast<const uint2*>(from + vector * 4);
        reinterpret_cast<uint2*>(x)[1] = *reinterpret_cast<const uint2*>(from + half + vector * 4);
        rotate_pair(x[0], x[4], c.x, s.x);
        rotate_pair(x[1], x[5], c.y, s.y);
        rotate_pair(x[2], x[6], c.z, s.z);
        rotate_pair(x[3], x[7], c.w, s.w);
        *reinterpret_cast<uint2*>(to + vector * 4) = reinterpret_cast<const uint2*>(x)[0];
        *reinterpret_cast<uint2*>(to + half + vector * 4) = reinterpret_cast<const uint2*>(x)[1];
    }
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
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
    return rsqrtf(squares / p.d_c + p.norm_eps);
}

// Copies vector number `vector` of the token's latents to its row of the cache, normalized if there are weights.
template <typename Element>
__device__ __forceinline__ void append_latents(const AppendParams& p, const Element* kv_c, Element* row, int vector,
                                               float scale) {
    alignas(16) Element x[8];
    *reinterpret_cast<uint4*>(x) = reinterpret_cast<const uint4*>(kv_c)[vector];
    if (p.norm_weight) {
        alignas(16) Element weights[8];
        *reinterpret_cast<uint4*>(weights) = static_cast<const uint4*>(p.norm_weight)[vector];
#pragma unroll
        for (int k = 0; k < 8; ++k)
            x[k] = static_cast<Element>(static_cast<float>(x[k]) * scale * static_cast<float>(weights[k]));
    }
    reinterpret_cast<uint4*>(row)[vector] = *reinterpret_cast<const uint4*>(x);
}

// kDependentLaunch: the launch may overlap its predecessor, and its successor may overlap it (sm_90 and newer).
template <typename Element, bool kDependentLaunch>
__global__ void __launch_bounds__(kAppendThreads) append_kernel(const AppendParams p) {
    const int token = blockIdx.x / p.ctas_per_token, cta = blockIdx.x - token * p.ctas_per_token;
    // Vectors of a token: of its latents, of each query head, of the key. The key counts as the head behind the last.
    const int index = cta * kAppendThreads + threadIdx.x, latents = p.d_c / 8, head_vectors = p.d_rope / 8;
    const int head = (index - latents) / head_vectors, vector = (index - latents) - head * head_vectors;
    if constexpr (kDependentLaunch) {
        allow_successor();
        wait_for_predecessor();
    }
    const auto* kv_c = static_cast<const Element*>(p.kv_c) + token * p.kv_c_stride;
    // By whole warps, even if only some of their lanes have latents.
    const float scale = p.norm_weight && index - threadIdx.x % 32 < latents ? inverse_rms(p, kv_c) : 1.f;
    if (index >= latents && head > p.num_heads) return;

    const bool is_query = index >= latents && head < p.num_heads;
    Element* row = nullptr;
    if (!is_query) {
        const int64_t slot = index_at(p.slots, p.slots_64, token);
        if (slot < 0) return;
        int page, row_of_page;
        p.page_size.split(static_cast<int>(slot), page, row_of_page);
        row = static_cast<Element*>(p.cache) + page * p.page_stride + row_of_page * p.row_stride;
    }
    if (index < latents) return append_latents(p, kv_c, row, index, scale);
    auto* query = static_cast<Element*>(p.q_rope) + token * p.q_rope_token_stride + head * p.q_rope_head_stride;
    const auto* key = static_cast<const Element*>(p.k_rope) + token * p.k_rope_stride;
    rotate(p, is_query ? query : key, is_query ? query : row + p.d_c, vector,
           p.cos_sin + p.positions[token] * p.d_rope);
}

}  // namespace mla
