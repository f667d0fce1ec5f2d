// How consumers of many_rows_fp8 compute with records: e4m3 keys become A fragments in fp16, in registers, four at a
// time, while the tensor cores multiply the previous four.
//
//   S^T  Four fragments cover a warp's 16 tokens and 64 columns, half of those that share a scale; B has the same
//        columns of Q. Columns may take any places in a product's K dimension if keys and queries agree. So a lane
//        reads 16 columns of a token at once: column 32 t + 16 h + 4 j + b of a group (t, j, b < 4) is multiplied in
//        step j of half h of the group, by lanes 4 i + t. Rotary columns have no halves: column 16 t + 4 j + b is
//        multiplied there.
//   O^T  as in values.cuh
//
// A token has a unit, the least power of two above its scales. Widened latents are multiplied, in fp16, by the ratio of
// their scale to the unit, and rotary keys, in bf16, by the inverse of the unit. Scores are multiplied by the unit. P^T
// is stored times the ratio of the unit to a reference, a power of two above all units so far, and O^T is in units of
// the reference. Like the maxima, the reference belongs to a tile.
#pragma once
#include "keys.cuh"
#include "numbers/record_units.cuh"

namespace mla::hopper {

// The units of a thread's two tokens of a tile, 8 apart. `tail` is the tail of the first token's record.
template <typename C>
struct TokenUnits {
    static constexpr int kLeastExponent = 127 - 60;  // rotary keys are divided by a unit, too
    using Ratios = uint32_t[C::Layout::kScales];     // of each group, of both tokens, in fp16
    float units[2];

    // Chooses the units and computes the ratios. Tokens from number `valid` on do not exist: their ratios are 0.
    __device__ void choose(const unsigned char* tail, int valid, Ratios& ratios) {
        float4 scales[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            scales[k] = *reinterpret_cast<const float4*>(token(tail, k));
            if (valid <= k * 8) scales[k] = make_float4(0.f, 0.f, 0.f, 0.f);
            units[k] = unit_above(scales[k], kLeastExponent);
            const float inverse = over_power(units[k]);
            scales[k].x *= inverse, scales[k].y *= inverse, scales[k].z *= inverse, scales[k].w *= inverse;
        }
        ratios[0] = pack<__half>(scales[0].x, scales[1].x), ratios[1] = pack<__half>(scales[0].y, scales[1].y);
        ratios[2] = pack<__half>(scales[0].z, scales[1].z), ratios[3] = pack<__half>(scales[0].w, scales[1].w);
    }
    // Multiplies fragments of keys by the ratios of their group.
    static __device__ void scale(uint32_t (&keys)[4][4], uint32_t ratios) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const uint32_t factor = __byte_perm(ratios, 0, k == 0 ? 0x1010 : 0x3232);
#pragma unroll
            for (auto& fragment : keys) {
                fragment[k] = multiplied<__half2>(fragment[k], factor);
                fragment[k + 2] = multiplied<__half2>(fragment[k + 2], factor);
            }
        }
    }
    // Four A fragments of the rotary keys over their unit, whose columns are in the order of fp8 keys.
    __device__ void load_rotary(uint32_t (&keys)[4][4], const unsigned char* tail) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float inverse = over_power(units[k]);
            const uint32_t factor = pack<__nv_bfloat16>(inverse, inverse);
            const auto* rope = token(tail, k) + C::Layout::kScales * 4 + lane % 4 * 32;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const auto words = *reinterpret_cast<const uint4*>(rope + i * 16);
                keys[i * 2][k] = multiplied<__nv_bfloat162>(words.x, factor);
                keys[i * 2][k + 2] = multiplied<__nv_bfloat162>(words.y, factor);
                keys[i * 2 + 1][k] = multiplied<__nv_bfloat162>(words.z, factor);
                keys[i * 2 + 1][k + 2] = multiplied<__nv_bfloat162>(words.w, factor);
            }
        }
    }

  private:
    static __device__ const unsigned char* token(const unsigned char* tail, int k) {
        return tail + k * 8 * C::Layout::kTailBytes;
    }
};

template <typename C>
struct ManyRowsFp8KeysRecords {
    using Values = ManyRowsFp8Values<C>;
    using Scores = typename Values::Scores;
    using Blocks = typename Values::Blocks;
    using Fragments = typename Values::Fragments;
    using Weights = ExactWeights<C>;
    struct Memory {
        // [tile % 4][group][lane % 4][8 octets][2 tokens], in fp16. ThreadSanitizer does not see that a __half is
        // stored.
        alignas(16) uint16_t ratios[4][4][4][8][2];
    };
    static constexpr int kScores = Values::kScores, kConsumerBlocks = Values::kConsumerBlocks;
    static constexpr int kLatentBlocks = Values::kLatentBlocks;
    static constexpr bool kHasUnits = true;
    static constexpr int kLeastExponent = TokenUnits<C>::kLeastExponent;
    static constexpr int kGroupBlocks = C::Layout::kScaleColumns / 64;  // blocks of 64 columns that share a scale
    using Words = uint32_t[2][4];  // what a lane reads for four fragments of keys: 16 columns of two tokens
    static_assert(C::Layout::kScales == 4 && std::is_same_v<typename C::Element, __nv_bfloat16>);

    ConsumerThread<C>& t;
    Memory& memory;
    Values values;
    TokenUnits<C> units;  // of the current tile

    __device__ ManyRowsFp8KeysRecords(ConsumerThread<C>& t, ProductMemory<C>& products, Memory& memory)
        : t(t), memory(memory), values{t, products} {}

    // The tail of the record of this thread's first token.
    __device__ const unsigned char* tail(uint32_t tile) const {
        return values.keys_of(tile) + C::kRopeSegment * C::kSegmentBytes +
               (t.warp * 16 + t.lane / 4) * C::Layout::kTailBytes;
    }

    // Converts queries to fp16, their rotary columns to bf16, and moves each column to the place where the keys' column
    // is multiplied: columns of half h of a group to the group's column block h, there to 16 j + 2 t + b, plus 6 for b
    // of 2 and 3. By both consumers: 8 threads per row.
    __device__ void prepare_queries(float scale) {
        const int own = pinned(static_cast<int>(threadIdx.x) - 128), vector = own % 8;
#pragma unroll 1
        for (int r = own / 8; r < C::kRows; r += 256 / 8) {
            unsigned char* row = t.rings.q[0] + r / 8 * 1024 + r % 8 * 128;
            uint4 words[C::kQueryColumnBlocks];
            const float factor = values.template load_query_row<14>(words, row + (vector ^ r % 8) * 16, r, scale);
            const uint32_t factors = pack<__nv_bfloat16>(factor, factor);
            __syncwarp();  // all have read the row
#pragma unroll
            for (int i = 0; i < C::kQueryColumnBlocks; ++i) {
                const uint32_t pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const uint32_t scaled = multiplied<__nv_bfloat162>(pairs[k], factors);
                    const float2 values = floats_of<__nv_bfloat16>(scaled);
                    const uint32_t pair = i == kLatentBlocks ? scaled : pack<__half>(values.x, values.y);
                    const int sixteen = i % kGroupBlocks * 4 + vector / 2;  // number of 16 columns of a group
                    const int half = i == kLatentBlocks ? 0 : sixteen % 2,
                              t = i == kLatentBlocks ? sixteen : sixteen / 2;
                    const int block = i / kGroupBlocks * kGroupBlocks + half;
                    reinterpret_cast<uint32_t*>(row + block * C::kQueryColumnBlockBytes +
                                                ((vector % 2 * 4 + k) ^ r % 8) * 16)[t] = pair;
                }
            }
        }
    }

    // S^T = K Q^T over a tile. `remaining` as in remaining_at_token.
    __device__ void scores(Scores& s, uint32_t tile, int remaining) {
        // Once a tile: it takes a shuffle.
        const uint64_t queries = uniform(make_descriptor(t.rings.q[0], 0, 1024, Swizzle::k128B));
        Fragments fragments[2];
        Words words;
        values.wait_for_segment(tile, C::kRopeSegment);
        t.profiler.mark(Event::kKeysArrived);
        typename TokenUnits<C>::Ratios ratios;
        units.choose(tail(tile), C::kLists ? C::kTile : values.remaining_at_token(remaining), ratios);
        load_keys(words, tile, 0);
        share_ratios(ratios, tile);
#pragma unroll
        for (int b = 0; b < kLatentBlocks; ++b) {
            Fragments& keys = fragments[b % 2];
            if (b >= 2) wgmma_wait<1>();  // `keys` have been multiplied
            widen_keys(keys, words);
            units.scale(keys, ratios[b / kGroupBlocks]);
            if (b + 1 < kLatentBlocks) load_keys(words, tile, b + 1);
            multiply_keys<__half>(s, keys, queries, b);
        }
        wgmma_wait<1>();
        units.load_rotary(fragments[0], tail(tile));
        multiply_keys<__nv_bfloat16>(s, fragments[0], queries, kLatentBlocks);
        wgmma_wait<0>();
        pin_registers(s);
        t.profiler.mark(Event::kScores);
    }

    // O^T += V^T P^T over a tile, and releases it.
    template <bool kOwn>
    __device__ void accumulate(Blocks& o, uint32_t tile) {
        uint32_t ratios[2][4];
        values.multiply_values(o, tile, [&](Fragments& fragments, int block) {
            if (block % kGroupBlocks == 0)
                load_ratios(ratios, tile, (t.consumer * kConsumerBlocks + block) / kGroupBlocks);
            scale_values(fragments, ratios);
        });
    }

    static __device__ float cache_scale() { return 1.f; }
    // Of this thread's k-th token.
    __device__ float unit(int k) const { return units.units[k]; }

  private:
    __device__ void load_keys(Words& words, uint32_t tile, int block) {
        const int segment = block / kGroupBlocks;
        if (block % kGroupBlocks == 0) values.wait_for_segment(tile, segment);
        const unsigned char* keys = values.keys_of(tile) + segment * C::kSegmentBytes +
                                    t.warp * 2 * C::kTokenGroupBytes +
                                    vector_offset<128>(t.lane / 4, t.lane % 4 * 2 + block % 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 vector = *reinterpret_cast<const uint4*>(keys + half * C::kTokenGroupBytes);
            words[half][0] = vector.x, words[half][1] = vector.y, words[half][2] = vector.z, words[half][3] = vector.w;
        }
    }
    static __device__ void widen_keys(Fragments& fragments, const Words& words) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int step = 0; step < 4; ++step)
                halves_in_order(words[half][step], fragments[step][half], fragments[step][half + 2]);
    }
    template <typename T>
    __device__ void multiply_keys(Scores& s, const Fragments& keys, uint64_t queries, int block) {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
            Values::template Product<T>::mma(
                s, keys[step], advance(queries, block * C::kQueryColumnBlockBytes + step * 32), block > 0 || step > 0);
        wgmma_commit();
    }

    // Writes a tile's ratios for both consumers. Lane 4 i + g writes those of group g.
    __device__ void share_ratios(const typename TokenUnits<C>::Ratios& ratios, uint32_t tile) const {
        const uint32_t first = t.lane % 2 ? ratios[1] : ratios[0], second = t.lane % 2 ? ratios[3] : ratios[2];
        const uint32_t own = t.lane % 4 < 2 ? first : second;
#pragma unroll
        for (int k = 0; k < 2; ++k)
            memory.ratios[tile % 4][t.lane % 4][t.lane / 8][t.warp * 2 + k][t.lane / 4 % 2] = own >> k * 16;
    }

    // Loads the ratios of the tokens whose values this lane holds.
    __device__ void load_ratios(uint32_t (&ratios)[2][4], uint32_t tile, int group) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 four = *reinterpret_cast<const uint4*>(memory.ratios[tile % 4][group][t.lane % 4][half * 4]);
            ratios[half][0] = four.x, ratios[half][1] = four.y, ratios[half][2] = four.z, ratios[half][3] = four.w;
        }
    }
    static __device__ void scale_values(Fragments& values, const uint32_t (&ratios)[2][4]) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    uint32_t& pair = values[half * 2 + i / 2][i % 2 * 2 + k];
                    pair = multiplied<__half2>(pair, ratios[half][i]);
                }
    }
};

}  // namespace mla::hopper
