// The products of swapped64.cuh: A fragments are made of fp8 keys in registers, four at a time, while the tensor cores
// multiply the four before.
//
//   S^T  Four fragments are a warp's 16 tokens and the 64 columns of a column block; B is a column block of Q.
//   O^T  Four fragments are 64 tokens and a warp's 16 columns of an m64 block; B is P^T.
//
// Records. A token has a unit, the least power of two above its scales. Latents are multiplied, in fp16, by the ratio
// of their scale to the unit when they have been widened, and rotary keys by the inverse of the unit, in bf16. Scores
// are multiplied by the unit. P^T is stored times the unit over a reference, a power of two above all units so far, and
// O^T is in units of it. The reference belongs to a tile, as the maxima do.
#pragma once
#include "record_units.cuh"
#include "swapped_output.cuh"

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
struct NoUnits {
    __device__ void forget(int) const {}
};

// S has, beside what swapped_output.cuh says, `p` [2][kWeightBytes] (tiles take turns), and of records `ratios`
// [4][group][lane % 4][8 octets][2 tokens] (likewise).
template <typename C, typename S>
struct Swapped64Products : SwappedOutput<C, S> {
    using Base = SwappedOutput<C, S>;
    using Base::Base;
    using Base::kScores, Base::kConsumerBlocks;
    using Base::p, Base::smem, Base::consumer, Base::warp, Base::lane, Base::profiler, Base::o;

    using Scores = float[kScores];
    using Fragments = uint32_t[4][4];  // of four products
    // What a lane reads for them: of keys 16 columns of two tokens; of values, for 32 tokens each, four matrices of 8
    // x 8.
    using Words = uint32_t[2][4];
    static constexpr bool kRecords = C::Layout::kIsRecord;
    static constexpr int kLatentBlocks = C::kDimLatent / 64;
    static constexpr int kFp8Blocks = kRecords ? kLatentBlocks : C::kColumnBlocks;
    template <typename T>
    using Product = WgmmaFromRegisters<C::kRows, T, Major::kK>;

    // Of the tile at hand.
    std::conditional_t<kRecords, TokenUnits<C>, NoUnits> units;

    // Tiles are numbered across all work tiles of the CTA.
    static __device__ int stage_of(uint32_t tile) { return tile % C::kStages; }
    __device__ unsigned char* keys_of(uint32_t tile) const { return smem.kv[stage_of(tile)]; }
    __device__ void wait_for_segment(uint32_t tile, int segment) {
        smem.kv_full[stage_of(tile)][segment].wait(tile / C::kStages % 2);
    }
    // Of a record: the tail of the first of this thread's two tokens.
    __device__ const unsigned char* tail(uint32_t tile) const {
        return keys_of(tile) + kLatentBlocks * C::kSegmentBytes + (warp * 16 + lane / 4) * C::Layout::kTailBytes;
    }

    // S^T = K Q^T over a tile.
    __device__ void compute_scores(Scores& s, uint32_t tile) {
        Fragments fragments[2];
        Words words;
        if constexpr (kRecords) {
            wait_for_segment(tile, kLatentBlocks);
            units.choose(tail(tile));
        }
        load_keys(words, tile, 0);
        profiler.mark(Event::kKeysArrived);
#pragma unroll
        for (int b = 0; b < kFp8Blocks; ++b) {
            Fragments& keys = fragments[b % 2];
            if (b >= 2) wgmma_wait<1>();  // `keys` have been multiplied
            widen_keys(keys, words);
            if constexpr (kRecords) units.scale(keys, tail(tile), b * 64 / C::Layout::kScaleColumns);
            if (b + 1 < kFp8Blocks) load_keys(words, tile, b + 1);
            multiply_keys<__half>(s, keys, b);
        }
        if constexpr (kRecords) {
            wgmma_wait<1>();
            units.load_rotary(fragments[0], tail(tile));
            multiply_keys<__nv_bfloat16>(s, fragments[0], kLatentBlocks);
        }
        wgmma_wait<0>();
        pin_registers(s);
        profiler.mark(Event::kScores);
    }

    // O^T += V^T P^T over a tile, which is given back.
    __device__ void multiply_values(uint32_t tile) {
        const uint64_t p_descriptor =
            uniform(make_descriptor(smem.p[tile % 2], 128, C::kTile / 8 * 128, Swizzle::kNone));
        Fragments fragments[2];
        Words words;
        load_values(words, tile, 0);
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b) pin_registers(o[b]);
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b) {
            Fragments& values = fragments[b % 2];
            if (b >= 2) wgmma_wait<1>();  // `values` have been multiplied
            widen_values(values[0], values[1], words[0]);
            widen_values(values[2], values[3], words[1]);
            if constexpr (kRecords) scale_values(values, tile, b);
            if (b + 1 < kConsumerBlocks)
                load_values(words, tile, b + 1);
            else
                release(tile);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step)
                Product<__half>::mma(o[b], values[step], advance(p_descriptor, step * 256), true);
            wgmma_commit();
        }
        wgmma_wait<0>();
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b) pin_registers(o[b]);
        profiler.mark(Event::kValues);
    }

    // Zeroes the values of this warp's tokens of a tile from `valid` on, which only this warp has read for scores: what
    // was not loaded may be NaN. The fence behind the softmax also orders this before the next copy to that place.
    __device__ void zero_values(uint32_t tile, int valid) {
        __syncwarp();
#pragma unroll 1
        for (int token = max(valid, warp * 16); token < (warp + 1) * 16; ++token)
#pragma unroll 1
            for (int vector = lane; vector < kLatentBlocks * 4; vector += 32)
                *reinterpret_cast<uint4*>(keys_of(tile) + vector / 4 * C::kSegmentBytes +
                                          token / 8 * C::kTokenGroupBytes + vector_offset<64>(token % 8, vector % 4)) =
                    make_uint4(0, 0, 0, 0);
        units.forget(valid - warp * 16 - lane / 4);
    }

    // Of records: tells both consumers the ratios of a tile. Lane 4 i + g tells those of group g.
    __device__ void share_ratios(uint32_t tile) const {
#pragma unroll
        for (int k = 0; k < 2; ++k)
            smem.ratios[tile % 4][lane % 4][lane / 8][warp * 2 + k][lane / 4 % 2] =
                to_fp16(units.ratio(tail(tile), k, lane % 4));
    }

    // Of the whole cache. Read before the queries arrive, as it takes as long.
    __device__ float cache_scale() const {
        if constexpr (kRecords) return 1.f;
        return *p.kv_scale;
    }

  private:
    __device__ void load_keys(Words& words, uint32_t tile, int block) {
        wait_for_segment(tile, block);
        const unsigned char* keys = keys_of(tile) + block * C::kSegmentBytes + warp * 2 * C::kTokenGroupBytes;
        load_key_words<C::kTokenGroupBytes>(words, keys + vector_offset<64>(lane / 4, lane % 4),
                                            min(C::kDim - block * 64, 64));
    }
    template <typename T>
    __device__ void multiply_keys(Scores& s, const Fragments& keys, int block) {
        const uint64_t q_descriptor = uniform(make_descriptor(smem.q[0], 0, 1024, Swizzle::k128B));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
            Product<T>::mma(s, keys[step], advance(q_descriptor, block * C::kQueryColumnBlockBytes + step * 32),
                            block > 0 || step > 0);
        wgmma_commit();
    }

    // Of this consumer's `block`-th m64 block.
    __device__ void load_values(Words& words, uint32_t tile, int block) const {
        const uint32_t values = smem_address(keys_of(tile)) + (consumer * kConsumerBlocks + block) * C::kSegmentBytes +
                                lane / 8 * C::kTokenGroupBytes + vector_offset<64>(lane % 8, warp);
        sm80::load_matrices_transposed(words[0], values);
        sm80::load_matrices_transposed(words[1], values + 4 * C::kTokenGroupBytes);
    }
    // Of records: by the ratios of their tokens.
    __device__ void scale_values(Fragments& values, uint32_t tile, int block) const {
        const int group = (consumer * kConsumerBlocks + block) * 64 / C::Layout::kScaleColumns;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 four = *reinterpret_cast<const uint4*>(smem.ratios[tile % 4][group][lane % 4][half * 4]);
            const uint32_t ratios[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    uint32_t& pair = values[half * 2 + i / 2][i % 2 * 2 + k];
                    pair = multiplied<__half2>(pair, ratios[i]);
                }
        }
    }

    // By a warp that has read a tile for the last time.
    __device__ void release(uint32_t tile) {
        __syncwarp();  // lane 0 arrives for all lanes
        if (lane != 0) return;
        Barrier& empty = smem.kv_empty[stage_of(tile)][0];
        empty.arrive();
        if constexpr (C::kRangeCtas == 2) arrive_at_partner(empty);
    }
};

}  // namespace mla::sm90
