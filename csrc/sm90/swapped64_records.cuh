// What consumers of swapped64.cuh do with records: A fragments in fp16 are made of e4m3 keys in registers, four at a
// time, while the tensor cores multiply the four before.
//
//   S^T  Four fragments are a warp's 16 tokens and 64 columns, half of those that share a scale; B is as many columns
//        of Q. Which column is multiplied in which place of a product's K dimension is free as long as keys and queries
//        agree. So a lane reads 16 columns of a token at once: column 32 t + 16 h + 4 j + b of a group (t, j, b < 4) is
//        multiplied in step j of its half h, by lanes 4 i + t. Of the rotary columns, which have no halves, it is
//        column 16 t + 4 j + b.
//   O^T  as in swapped64_products.cuh
//
// A token has a unit, the least power of two above its scales. Latents are multiplied, in fp16, by the ratio of their
// scale to the unit when they have been widened, and rotary keys by the inverse of the unit, in bf16. Scores are
// multiplied by the unit. P^T is stored times the unit over a reference, a power of two above all units so far, and O^T
// is in units of it. The reference belongs to a tile, as the maxima do.
#pragma once
#include "record_units.cuh"
#include "swapped64_products.cuh"

namespace mla::sm90 {

// The scales of a thread's two tokens of a tile, 8 apart. `tail` is that of the first one's record.
template <typename C>
struct TokenUnits {
    static constexpr int kLeastExponent = 127 - 60;  // rotary keys are divided by a unit, too
    float units[2];

    __device__ void choose(const unsigned char* tail) {
#pragma unroll
        for (int k = 0; k < 2; ++k)
            units[k] = unit_above(*reinterpret_cast<const float4*>(token(tail, k)), kLeastExponent);
    }
    // For the tokens from the `valid`-th on: they do not exist.
    __device__ void forget(int valid) {
        if (valid <= 0) units[0] = 0.f;
        if (valid <= 8) units[1] = 0.f;
    }
    __device__ float ratio(const unsigned char* tail, int k, int group) const {
        const float scale = reinterpret_cast<const float*>(token(tail, k))[group];
        return units[k] > 0.f ? scale * over_power(units[k]) : 0.f;
    }

    // Multiplies fragments of keys by their ratios.
    __device__ void scale(uint32_t (&keys)[4][4], const unsigned char* tail, int group) const {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float both = ratio(tail, k, group);
            const uint32_t factor = pack<__half>(both, both);
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

// S has, beside what swapped64_products.cuh says, `ratios` [4][group][lane % 4][8 octets][2 tokens] (tiles take turns).
template <typename C, typename S>
struct Swapped64Records : Swapped64Products<C, S> {
    using Base = Swapped64Products<C, S>;
    using Base::Base;
    using Base::kScores, Base::kConsumerBlocks, Base::kLatentBlocks, Base::keys_of;
    using Base::smem, Base::consumer, Base::warp, Base::lane, Base::profiler;
    using typename Base::Fragments, typename Base::Scores;
    static constexpr int kGroupBlocks = C::Layout::kScaleColumns / 64;  // blocks of 64 columns that share a scale
    using Words = uint32_t[2][4];  // what a lane reads for four fragments of keys: 16 columns of two tokens

    // Of the tile at hand.
    TokenUnits<C> units;

    // That of the record of the first of this thread's two tokens.
    __device__ const unsigned char* tail(uint32_t tile) const {
        return keys_of(tile) + C::kRopeSegment * C::kSegmentBytes + (warp * 16 + lane / 4) * C::Layout::kTailBytes;
    }

    // Columns become fp16, but the rotary ones bf16, and move to the places where the keys' columns are multiplied:
    // those of half h of a group to its column block h, there to 16 j + 2 t + b, and 6 further on for b of 2 and 3. By
    // both consumers: 8 threads have a row.
    __device__ void convert_queries(float scale) {
        const int thread = pinned(static_cast<int>(threadIdx.x) - 128), vector = thread % 8;
#pragma unroll 1
        for (int r = thread / 8; r < C::kRows; r += 256 / 8) {
            unsigned char* row = smem.q[0] + r / 8 * 1024 + r % 8 * 128;
            uint4 words[C::kQueryColumnBlocks];
            const float factor = Base::template load_query_row<14>(words, row + (vector ^ r % 8) * 16, r, scale);
            __syncwarp();  // all have read the row
#pragma unroll
            for (int i = 0; i < C::kQueryColumnBlocks; ++i) {
                const uint32_t pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    float2 values = floats_of<typename C::Element>(pairs[k]);
                    values.x *= factor, values.y *= factor;
                    const uint32_t pair =
                        i == kLatentBlocks ? pack<__nv_bfloat16>(values.x, values.y) : pack<__half>(values.x, values.y);
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

    // S^T = K Q^T over a tile.
    __device__ void compute_scores(Scores& s, uint32_t tile) {
        Fragments fragments[2];
        Words words;
        Base::wait_for_segment(tile, C::kRopeSegment);
        units.choose(tail(tile));
        load_keys(words, tile, 0);
        profiler.mark(Event::kKeysArrived);
#pragma unroll
        for (int b = 0; b < kLatentBlocks; ++b) {
            Fragments& keys = fragments[b % 2];
            if (b >= 2) wgmma_wait<1>();  // `keys` have been multiplied
            widen_keys(keys, words);
            units.scale(keys, tail(tile), b / kGroupBlocks);
            if (b + 1 < kLatentBlocks) load_keys(words, tile, b + 1);
            multiply_keys<__half>(s, keys, b);
        }
        wgmma_wait<1>();
        units.load_rotary(fragments[0], tail(tile));
        multiply_keys<__nv_bfloat16>(s, fragments[0], kLatentBlocks);
        wgmma_wait<0>();
        pin_registers(s);
        profiler.mark(Event::kScores);
    }

    // O^T += V^T P^T over a tile, which is given back.
    __device__ void multiply_values(uint32_t tile) {
        uint32_t ratios[2][4];
        Base::multiply_scaled_values(tile, [&](Fragments& values, int block) {
            if (block % kGroupBlocks == 0)
                load_ratios(ratios, tile, (consumer * kConsumerBlocks + block) / kGroupBlocks);
            scale_values(values, ratios);
        });
    }

    // Those of this warp's tokens of a tile from `valid` on, of which there are no keys.
    __device__ void zero_values(uint32_t tile, int valid) {
        Base::zero_values(tile, valid);
        units.forget(valid - warp * 16 - lane / 4);
    }

    // Tells both consumers the ratios of a tile. Lane 4 i + g tells those of group g.
    __device__ void share_ratios(uint32_t tile) const {
        float ratios[2];  // loaded together
#pragma unroll
        for (int k = 0; k < 2; ++k) ratios[k] = units.ratio(tail(tile), k, lane % 4);
#pragma unroll
        for (int k = 0; k < 2; ++k)
            smem.ratios[tile % 4][lane % 4][lane / 8][warp * 2 + k][lane / 4 % 2] = to_fp16(ratios[k]);
    }

    static __device__ float cache_scale() { return 1.f; }

  private:
    __device__ void load_keys(Words& words, uint32_t tile, int block) {
        const int segment = block / kGroupBlocks;
        if (block % kGroupBlocks == 0) Base::wait_for_segment(tile, segment);
        const unsigned char* keys = keys_of(tile) + segment * C::kSegmentBytes + warp * 2 * C::kTokenGroupBytes +
                                    vector_offset<128>(lane / 4, lane % 4 * 2 + block % 2);
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
    __device__ void multiply_keys(Scores& s, const Fragments& keys, int block) {
        const uint64_t q_descriptor = uniform(make_descriptor(smem.q[0], 0, 1024, Swizzle::k128B));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
            Base::template Product<T>::mma(s, keys[step],
                                           advance(q_descriptor, block * C::kQueryColumnBlockBytes + step * 32),
                                           block > 0 || step > 0);
        wgmma_commit();
    }

    // Those of the tokens of which this lane has values.
    __device__ void load_ratios(uint32_t (&ratios)[2][4], uint32_t tile, int group) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 four = *reinterpret_cast<const uint4*>(smem.ratios[tile % 4][group][lane % 4][half * 4]);
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

}  // namespace mla::sm90
