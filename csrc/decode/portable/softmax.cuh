// The softmax of a tile's scores, by all threads of the CTA; P goes to shared memory.
//
// Exponentials use a maximum that may be stale by up to 8 (log2): P then stays below 2^8, so fp32 sums keep their
// relative precision, and so does P, in fp16 from 2^-14 on. A row's maximum and sum live in the warp that owns the row.
// Only when a score exceeds the bound is the maximum refreshed, and all warps rescale O after the next barrier.
#pragma once
#include <type_traits>

#include "config.cuh"

namespace mla::portable {

// Scores lie in shared memory as an mma leaves them (mma.cuh). Lane l has a quad: a float4 of two adjacent rows,
// 2 * (l % 4) and the next one, and of tokens l / 4 and l / 4 + 8 of a token block. The 8 quads of a pair of rows lie
// together, permuted to avoid bank conflicts: of 8 successive lanes, which write quads of different pairs, and of the 8
// lanes that read the quads of one pair.
__device__ __forceinline__ int quad_index(int pair, int token) { return pair * 8 + (token ^ pair * 2); }

// The scores of a tile that this thread exponentiates. They belong to one pair of adjacent rows, as do those of
// kPairLanes lanes of a warp. In each of kRounds rounds the thread loads kVector floats of one quad: all 4 (two rows,
// two tokens), 2 (two rows, one token) or 1. For example, lane 13 of warp 1:
//
//   rows x tokens | kVector  kRounds  kPairLanes | pair  lane_of_pair   quad  element  token | scores: rows, tokens
//   64 x 32       |    4        2         8      |   5        5          5       0       7   | 10, 11  7, 15, 23, 31
//   16 x 32       |    2        1        32      |   1       13          6       2       4   | 2, 3    12
//   16 x 16       |    1        1        32      |   1       13          3       1       1   | 3       1
template <typename C>
struct OwnScores {
    static constexpr int kScores = (C::kRows * C::kTile + kThreads - 1) / kThreads;
    static constexpr int kVector = kScores > 2 ? 4 : kScores;
    static constexpr int kRounds = kScores > 4 ? 2 : 1;
    static constexpr int kRows = kVector == 1 ? 1 : 2;
    static constexpr int kTokens = kVector == 4 ? 2 : 1;  // in a round
    static constexpr int kRoundBlocks = C::kTokenBlocks / kRounds;
    static constexpr int kPairLanes = kRoundBlocks * 32 / kVector;
    static constexpr int kPairs = 32 / kPairLanes;           // of a warp
    static constexpr int kRowDistance = kRows == 2 ? 1 : 2;  // from one lane of a row to the next

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int pair = warp * kPairs + lane / kPairLanes;
    const int lane_of_pair = lane % kPairLanes;
    const int quad = lane_of_pair / (4 / kVector) % 8;           // among the pair's 8, by its index in shared memory
    const int element = lane_of_pair % (4 / kVector) * kVector;  // first float of the quad
    const int token = quad ^ pair % 4 * 2;                       // of the quad's first two floats, in its token block

    // Whether this thread has scores. If not, no lane of its warp has any.
    __device__ bool exists() const { return kPairs * C::kWarps == C::kRows / 2 || pair < C::kRows / 2; }
    __device__ int row(int i) const { return pair * 2 + element % 2 + i; }
    __device__ int token_block(int round) const { return round * kRoundBlocks + lane_of_pair / (32 / kVector); }
    // 0: the first 8 tokens of a token block. 1: the others.
    __device__ int half(int k) const { return element / 2 + k; }
    __device__ int tile_token(int round, int k) const { return token_block(round) * 16 + half(k) * 8 + token; }
    // Whether this lane acts for all lanes with its rows.
    __device__ bool leads() const { return lane_of_pair < kRowDistance; }

    // Calls body(round, k) for each of this thread's tokens.
    template <typename Body>
    __device__ void for_each_token(Body body) const {
#pragma unroll
        for (int round = 0; round < kRounds; ++round)
#pragma unroll
            for (int k = 0; k < kTokens; ++k) body(round, k);
    }

    // Reduces a value over the lanes with this thread's rows.
    template <typename Operation>
    __device__ float over_row(float value, Operation operation) const {
#pragma unroll
        for (int distance = kRowDistance; distance < kPairLanes; distance *= 2)
            value = operation(value, __shfl_xor_sync(~0u, value, distance));
        return value;
    }
};

template <typename C>
struct Softmax {
    using Element = typename C::Factor;  // of P
    using Own = OwnScores<C>;
    using Scores = float[Own::kRounds][Own::kRows][Own::kTokens];
    // A round's scores, as each column group has them.
    union PartialScores {
        std::conditional_t<Own::kVector == 4, float4, std::conditional_t<Own::kVector == 2, float2, float>> vector;
        float element[Own::kVector];
    };

    const DecodeParams& p;
    DecodeMemory<C>& smem;
    float sums[Own::kRows];  // of P, over this thread's tokens alone

    __device__ Softmax(const DecodeParams& p, DecodeMemory<C>& smem) : p(p), smem(smem) {}

    __device__ void reset() {
        const Own mine;
#pragma unroll
        for (int i = 0; i < Own::kRows; ++i) {
            if (mine.exists() && mine.leads()) smem.top[mine.row(i)] = -INFINITY;
            sums[i] = 0.f;
        }
    }

    // Writes P and the factors for O. The tile's keys are in `stage`; `remaining` counts the tokens of the work tile
    // from the tile's first one on. `meanwhile` runs while scores are being loaded.
    template <typename Meanwhile>
    __device__ void exponentiate(int stage, int remaining, Meanwhile meanwhile) {
        const Own mine;
        if (!mine.exists()) return meanwhile();
        Scores s;
        PartialScores partial[C::kColumnGroups];
        float top[Own::kRows];
        const int masked = smem.masked;
#pragma unroll
        for (int i = 0; i < Own::kRows; ++i) top[i] = smem.top[mine.row(i)];
        load(mine, 0, partial);
        meanwhile();
        add(partial, s[0]);
        if constexpr (Own::kRounds == 2) {
            load(mine, 1, partial);
            add(partial, s[1]);
        }
        if (const uint64_t invalid = smem.invalid.of(stage); __builtin_expect(invalid != 0, 0))
            mask_invalid(mine, invalid, s);
        if (!C::kLists && __builtin_expect(remaining < masked, 0)) mask(mine, remaining, s);
        refresh(mine, remaining, s, top);
        store(mine, s, top);
    }

    // After the last tile: the maximum and the sum of each row.
    __device__ void write_states(RowState (&states)[C::kRows]) {
        const Own mine;
#pragma unroll
        for (int i = 0; i < Own::kRows; ++i) {
            sums[i] = mine.over_row(sums[i], [](float a, float b) { return a + b; });
            if (mine.exists() && mine.leads()) states[mine.row(i)] = {smem.top[mine.row(i)], sums[i]};
        }
    }

  private:
    __device__ void load(const Own& mine, int round, PartialScores (&partial)[C::kColumnGroups]) const {
        using Vector = decltype(partial[0].vector);
#pragma unroll
        for (int group = 0; group < C::kColumnGroups; ++group) {
            const float4& quad =
                smem.scores[group][mine.pair / 4][mine.token_block(round)][mine.pair % 4 * 8 + mine.quad];
            partial[group].vector =
                *reinterpret_cast<const Vector*>(reinterpret_cast<const float*>(&quad) + mine.element);
        }
    }

    __device__ void add(const PartialScores (&partial)[C::kColumnGroups], float (&s)[Own::kRows][Own::kTokens]) const {
#pragma unroll
        for (int k = 0; k < Own::kVector; ++k) {
            auto of = [&](int group) { return partial[group].element[k]; };
            float sum = (of(0) + of(1)) + (of(2) + of(3));
            if constexpr (C::kColumnGroups == 8) sum += (of(4) + of(5)) + (of(6) + of(7));
            s[k % Own::kRows][k / Own::kRows] = sum * p.scale_log2;
        }
    }

    __device__ void mask(const Own& mine, int remaining, Scores& s) const {
#pragma unroll
        for (int i = 0; i < Own::kRows; ++i) {
            const int limit = key_limit<C>(p, smem.work, mine.row(i)) - smem.work.token_end + remaining;
            mine.for_each_token([&](int round, int k) {
                if (mine.tile_token(round, k) >= limit) s[round][i][k] = -INFINITY;
            });
        }
    }

    // Masks the scores of tokens without keys.
    __device__ void mask_invalid(const Own& mine, uint64_t invalid, Scores& s) const {
        mine.for_each_token([&](int round, int k) {
            if (smem.invalid.has(invalid, mine.tile_token(round, k)))
#pragma unroll
                for (int i = 0; i < Own::kRows; ++i) s[round][i][k] = -INFINITY;
        });
    }

    // Refreshes the maxima of this warp's rows if one of them is too stale.
    __device__ void refresh(const Own& mine, int remaining, const Scores& s, float (&top)[Own::kRows]) {
        float tile_top[Own::kRows], factor[Own::kRows];
        bool exceeds = false;
#pragma unroll
        for (int i = 0; i < Own::kRows; ++i) {
            factor[i] = 1.f;
            tile_top[i] = s[0][i][0];
            mine.for_each_token([&](int round, int k) { tile_top[i] = fmaxf(tile_top[i], s[round][i][k]); });
            exceeds |= tile_top[i] > top[i] + kStaleBound;
        }
        if (__builtin_expect(__any_sync(~0u, exceeds), 0)) {
            __syncwarp();  // all lanes of a row have read its maximum
#pragma unroll
            for (int i = 0; i < Own::kRows; ++i) {
                const float before = top[i];
                top[i] = mine.over_row(fmaxf(tile_top[i], before), [](float a, float b) { return fmaxf(a, b); });
                factor[i] = exp2_approx(before - finite(top[i]));
                sums[i] *= factor[i];
                if (mine.leads()) smem.top[mine.row(i)] = top[i];
            }
            smem.refreshed = remaining;
        }
#pragma unroll
        for (int i = 0; i < Own::kRows; ++i)
            smem.factor[mine.row(i)] = factor[i];  // all lanes of the row write the same
    }

    __device__ void store(const Own& mine, const Scores& s, const float (&top)[Own::kRows]) {
        mine.for_each_token([&](int round, int k) {
            union {
                Element element[Own::kRows];
                std::conditional_t<Own::kRows == 2, uint32_t, uint16_t> word;
            } weights;
#pragma unroll
            for (int i = 0; i < Own::kRows; ++i) {
                const float weight = exp2_approx(s[round][i][k] - finite(top[i]));
                sums[i] += weight;
                weights.element[i] = static_cast<Element>(weight);
            }
            uint4& octet = smem.p[0][0][mine.token_block(round)][mine.pair / 4][mine.half(k)][mine.token];
            auto* to = reinterpret_cast<Element*>(&octet) + mine.row(0) % 8;
            *reinterpret_cast<decltype(weights.word)*>(to) = weights.word;
        });
    }
};

}  // namespace mla::portable
