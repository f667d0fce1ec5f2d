// S and O of 16 query rows with keys in 8 bits. For S, a warp holds all columns of the queries in registers and takes 8
// tokens of each tile; for O, it takes its own columns of all tokens:
//
//   S[rows x tokens]    = Q * K^T     each warp its own tokens: scores are whole, and stay in registers
//   O^T[columns x rows] += V^T * P^T  each warp its own columns
//
// So keys are read once for S and converted once, no partial scores go through shared memory, and a tile takes one
// barrier. What each warp does, for tile i of a work tile, which lies in stage i % kStages:
//
//   scores of tile 0
//   exponentiates scores of tile i, writes P ------------------------------------------------------------------
//   == barrier: P of tile i is complete, tile i + 1 has landed, the stage of tile i - 1 is free ===============
//   issues copies of tile i + kStages - 1
//   O += P * V of tile i, between products for the scores of tile i + 1
//   (back to the exponentials with i + 1)
//
// Every warp exponentiates by the same maxima, which may be stale as softmax.cuh says. The barrier tells all of them
// whether a warp met a score that is too large; they then agree on new maxima, and write P once more.
//
// Scales of groups of columns: scores are multiplied by a token's scales in fp32, group by group. P is written once for
// each group, multiplied by its scales, and O is in units, as group_scales.cuh says. A scale that
// exceeds 2^e is treated as a score that is too large.
#pragma once
#include "accumulators.cuh"
#include "fragments.cuh"
#include "group_scales.cuh"
#include "key_loader.cuh"
#include "numbers/arithmetic.cuh"
#include "softmax.cuh"
#include "token_queries.cuh"

namespace mla::portable {

template <typename C>
struct TokenProducts : Accumulators<C> {
    using Base = Accumulators<C>;
    using Base::p, Base::smem, Base::lane, Base::warp, Base::o;
    using Queries = TokenQueries<C>;
    // [row][token]: this lane has rows lane / 4 and lane / 4 + 8, and two neighbouring tokens.
    using Scores = float[4];
    static constexpr int kScales = C::kGroupScales ? C::Layout::kScales : 1;
    static_assert(C::Layout::kScaleColumns % 64 == 0);

    Queries queries;
    float top[2], sums[2];  // maxima and sums of the lane's rows; the sums are over its tokens alone
    int exponent;           // with scales of groups: see group_scales.cuh

    __device__ TokenProducts(const DecodeParams& p, DecodeMemory<C>& smem) : Base(p, smem) {}

    __device__ void begin(const WorkTile& work) {
        queries.load(p, smem, work);
#pragma unroll
        for (int i = 0; i < 2; ++i) top[i] = -INFINITY, sums[i] = 0.f;
        exponent = kLeastExponent;
        this->clear_output();
    }

    // Multiplies the queries with all tiles of the work tile; the first one has landed.
    __device__ void attend(KeyLoader<C>& loader) {
        const int tokens = smem.work.token_end - smem.work.token_begin;
        int stage = smem.stage, remaining = tokens;
        Scores s, weights;
        if (remaining > 0) score(s, stage, [](int) {});
        for (; remaining > 0; remaining -= C::kTile) {
            const int buffer = remaining / C::kTile % 2;
            loader.prepare();
            const Own mine;
            mask(mine, s, stage, remaining);
            TokenScales scales;
            if constexpr (C::kGroupScales) load_scales(scales, scales_of(mine, stage));
            const bool exceeds = exceeds_maximum(s) || exceeds_unit(scales);
            store_weights(mine, s, scales, weights, buffer);
            cp_async_wait<C::kStages - 3>();
            if (__builtin_expect(__syncthreads_or(exceeds), 0)) {
                renew_maxima(s, scales);
                store_weights(mine, s, scales, weights, buffer);
                __syncthreads();
            }
            loader.copy(stage == 0 ? C::kStages - 1 : stage - 1);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i / 2] += weights[i];
            const int current = stage;
            stage = stage + 1 == C::kStages ? 0 : stage + 1;
            lane = pinned(lane);  // as in Own
            const uint32_t values = smem_address(smem.kv[current]) + this->value_offset();
            // After the last tile, the scores are those of the current tile once more, and nobody reads them.
            score(s, remaining > C::kTile ? stage : current, [&](int part) { accumulate(values, buffer, part); });
        }
        if (threadIdx.x == 0 && tokens > 0) smem.stage = stage;  // others have read it: there was a barrier
    }

    // For a work tile whose barriers have all been passed.
    __device__ float output_unit() const { return C::kGroupScales ? unit_of_output(exponent) : tensor_scale<C>(p); }
    __device__ void write_states() {
        lane = pinned(lane);  // or else registers would be kept for what the end of a work tile makes of it
#pragma unroll
        for (int i = 0; i < 2; ++i) exchange_row(i, sum_over_lanes<4>(sums[i]));
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = Own().row(i);
            float total = 0.f;
#pragma unroll
            for (int w = 0; w < C::kWarps; ++w) total += smem.rows[w][row];
            if (warp == 0 && lane % 4 == 0) smem.end.states[row] = {top[i], total};
        }
    }

  private:
    // This thread's part of a tile.
    struct Own {
        // Pinned: otherwise values derived from it would be kept in registers.
        const uint32_t tid = pinned(static_cast<int>(threadIdx.x));
        __device__ int key_token() const { return tid / 4; }                       // of the keys that it reads
        __device__ int first_token() const { return tid / 32 * 8 + tid % 4 * 2; }  // of its scores
        __device__ int row(int i) const { return tid % 32 / 4 + i * 8; }
    };
    // Tells the other warps a value of row i of this lane's.
    __device__ void exchange_row(int i, float value) {
        if (lane % 4 == 0) smem.rows[warp][lane / 4 + i * 8] = value;
    }

    // ---- scores ----

    static constexpr int kBlocks = C::kDimLatent / 64;  // of 64 latent columns

    // Computes scores of a tile's tokens, in log2. `meanwhile(part)` runs between products, for each part from 0 to
    // kBlocks - 1.
    template <typename Meanwhile>
    __device__ void score(Scores& s, int stage, Meanwhile meanwhile) {
        constexpr int kScaledBlocks = C::Layout::kScaleColumns / 64;
        const unsigned char* tile = smem.kv[stage];
        const Own mine;
#pragma unroll
        for (float& score : s) score = 0.f;
        const float* scales = scales_of(mine, stage);
        float parts[2][4] = {};
#pragma unroll
        for (int block = 0; block < kBlocks; block += kScaledBlocks) {
#pragma unroll
            for (int i = 0; i < kScaledBlocks; ++i) {
                const auto* keys =
                    tile + vector_offset<C>(mine.key_token(), mine.tid % 4) + (block + i) * C::kColumnBlockBytes;
                add_columns<4>(parts, *reinterpret_cast<const uint4*>(keys), (block + i) * 4);
                meanwhile(block + i);
            }
            if constexpr (C::kGroupScales) add_scaled(s, parts, scales + block / kScaledBlocks);
        }
        add_rope(mine, parts, tile);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if constexpr (C::kGroupScales)
                s[i] = (s[i] * queries.score_scales[i / 2] + parts[0][i]) * p.scale_log2;
            else
                s[i] = (parts[0][i] + parts[1][i]) * (queries.score_scales[i / 2] * p.scale_log2);
    }

    // Adds products with 64 columns of a token, of which each of four lanes has 16.
    template <int kSteps>
    __device__ void add_columns(float (&parts)[2][4], const uint4& keys, int first) const {
        const uint32_t words[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t k[2];
            halves_in_any_order(words[step], k[0], k[1]);
            mma<__half>(parts[step % 2], queries.q[first + step], k[0], k[1]);
        }
    }

    __device__ void add_rope(const Own& mine, float (&parts)[2][4], const unsigned char* tile) const {
        constexpr int kFirst = Queries::kLatentSteps, kSteps = Queries::kRopeSteps;
        static_assert(kSteps == 4 || kSteps == 2 || kSteps == 0);
        if constexpr (kSteps == 0) return;
        if constexpr (C::kHasTail) {
#pragma unroll
            for (int i = 0; i < kSteps / 2; ++i) {
                const int vector = mine.tid % 4 * (kSteps / 2) + i;
                const auto words =
                    *reinterpret_cast<const uint4*>(tile + tail_rope_offset<C>(mine.key_token(), vector));
                add_rope_product(mine, parts[0], i * 2, words.x, words.y);
                add_rope_product(mine, parts[0], i * 2 + 1, words.z, words.w);
            }
        } else {
            const int byte = mine.tid % 4 * (kSteps * 4);
            const auto* keys =
                tile + vector_offset<C>(mine.key_token(), byte / 16) + byte % 16 + kBlocks * C::kColumnBlockBytes;
            if constexpr (kSteps == 4) {
                add_columns<4>(parts, *reinterpret_cast<const uint4*>(keys), kFirst);
            } else {
                const auto words = *reinterpret_cast<const uint2*>(keys);
                add_columns<2>(parts, make_uint4(words.x, words.y, 0, 0), kFirst);
            }
        }
    }

    // Adds a product with 16 rotary columns of a tail.
    __device__ void add_rope_product(const Own& mine, float (&part)[4], int step, uint32_t b0, uint32_t b1) const {
        const uint4 words = smem.rope_queries[step][mine.tid % 32];
        const uint32_t q[4] = {words.x, words.y, words.z, words.w};
        mma<typename C::RopeFactor>(part, q, b0, b1);
    }
    __device__ void add_scaled(Scores& s, float (&parts)[2][4], const float* scales) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[i] += (parts[0][i] + parts[1][i]) * scales[i % 2 * kScales];
            parts[0][i] = parts[1][i] = 0.f;
        }
    }

    // ---- softmax ----

    __device__ void mask(const Own& mine, Scores& s, int stage, int remaining) const {
        if (const uint64_t invalid = smem.invalid.of(stage); __builtin_expect(invalid != 0, 0)) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (smem.invalid.has(invalid, mine.first_token() + i % 2)) s[i] = -INFINITY;
        }
        if (!C::kLists && __builtin_expect(remaining < smem.masked, 0)) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int limit = key_limit<C>(p, smem.work, mine.row(i / 2)) - smem.work.token_end + remaining;
                if (mine.first_token() + i % 2 >= limit) s[i] = -INFINITY;
            }
        }
    }

    // Scales of groups: those of this lane's first token, followed by those of the next one. All of them are
    // loaded for P alone, since registers are few during the products.
    __device__ const float* scales_of(const Own& mine, int stage) const {
        const auto* scales = reinterpret_cast<const float*>(smem.kv[stage] + C::kScaleOffset);
        return scales + mine.first_token() * kScales;
    }
    using TokenScales = float[2][kScales];
    static __device__ float largest_of(const TokenScales& scales) {
        float largest = 0.f;
#pragma unroll
        for (int i = 0; i < 2 * kScales; ++i) largest = fmaxf(largest, fabsf(scales[i / kScales][i % kScales]));
        return largest;
    }

    __device__ bool exceeds_maximum(const Scores& s) const {
        return fmaxf(s[0], s[1]) > top[0] + kStaleBound || fmaxf(s[2], s[3]) > top[1] + kStaleBound;
    }
    __device__ bool exceeds_unit(const TokenScales& scales) const {
        return C::kGroupScales && largest_of(scales) >= power_of_two(exponent + 1);
    }

    // Computes P, in fp32 for this thread and in fp16 for all warps.
    __device__ void store_weights(const Own& mine, const Scores& s, const TokenScales& scales, Scores& weights,
                                  int buffer) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[i] = exp2_approx(s[i] - finite(top[i / 2]));
#pragma unroll
        for (int matrix = 0; matrix < C::kWeightMatrices; ++matrix) {
            float factors[2] = {1.f, 1.f};
            if constexpr (C::kGroupScales)
                for (int k = 0; k < 2; ++k) factors[k] = scales[k][matrix] * inverse_unit_of_output(exponent);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const __half2 pair = __floats2half2_rn(weights[i * 2] * factors[0], weights[i * 2 + 1] * factors[1]);
                auto* words =
                    reinterpret_cast<uint32_t*>(&smem.p[buffer][matrix][mine.tid / 64][0][0][0]) + mine.tid % 32 * 4;
                words[i * 2 + mine.tid / 32 % 2] = reinterpret_cast<const uint32_t&>(pair);
            }
        }
    }

    // Raises the maxima to the tile's scores, and the unit of O above the tile's scales.
    __device__ void renew_maxima(const Scores& s, const TokenScales& scales) {
#pragma unroll
        for (int i = 0; i < 2; ++i) exchange_row(i, max_over_lanes<4>(fmaxf(s[i * 2], s[i * 2 + 1])));
        if constexpr (C::kGroupScales) {
            const unsigned largest = __reduce_max_sync(~0u, __float_as_int(largest_of(scales)) >> 23);
            if (lane == 0) smem.largest_scales[warp] = largest;
        }
        __syncthreads();
        float growth = 1.f, factors[2];
        if constexpr (C::kGroupScales) {
            const int before = exponent;
#pragma unroll
            for (int w = 0; w < C::kWarps; ++w) exponent = max(exponent, smem.largest_scales[w]);
            growth = rescaling(before, exponent);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float before = top[i];
#pragma unroll
            for (int w = 0; w < C::kWarps; ++w) top[i] = fmaxf(top[i], smem.rows[w][lane / 4 + i * 8]);
            factors[i] = exp2_approx(before - finite(top[i]));
            sums[i] *= factors[i];
        }
        this->scale_output(
            [&](int octet, int k) { return __shfl_sync(~0u, factors[octet], (lane % 4 * 2 + k) * 4) * growth; });
    }

    // ---- output ----

    // O += P * V, one of kBlocks parts; `values` as in ValueFragments.
    __device__ void accumulate(uint32_t values, int buffer, int part) {
        constexpr int kPairs = C::kColumns / 32, kParts = C::kTokenBlocks * kPairs;  // 32 columns of a token block each
        if (part >= kParts) return;
        static_assert(kParts <= kBlocks);
        const int block = part / kPairs, matrix = warp * C::kWeightMatrices / C::kWarps;
        const uint4 weights = reinterpret_cast<const uint4*>(&smem.p[buffer][matrix][block][0][0][0])[lane];
        ValueFragments<C> fragments;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = part % kPairs * 2 + half;
            uint32_t v[4];
            fragments.load(v, values + block * C::kTokenBlockBytes, i);
            mma<__half>(o[0][i], v, weights.x, weights.y);
            mma<__half>(o[1][i], v, weights.z, weights.w);
        }
    }
};

}  // namespace mla::portable
