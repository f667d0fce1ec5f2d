// S and O, where each warp has its own columns of Q, K and V. The timeline is in kernel.cuh.
#pragma once
#include "accumulators.cuh"
#include "fragments.cuh"
#include "group_scales.cuh"
#include "key_loader.cuh"
#include "queries.cuh"
#include "softmax.cuh"

namespace mla::portable {

template <typename C>
struct ColumnProducts : Accumulators<C> {
    using Base = Accumulators<C>;
    using Base::p, Base::smem, Base::lane, Base::warp, Base::o, Base::kVectorColumns;
    using Factor = typename C::Factor;
    static_assert(C::Layout::kScaleColumns % C::kScoreColumns == 0);  // a warp's columns share a scale
    // Whether registers suffice for the scores of all token blocks at once, beside the products for O.
    static constexpr bool kRoomy = C::kRows * C::kColumns <= 48 * 64;

    Queries<C> queries;
    Softmax<C> softmax;
    GroupScales<C> value_scales;
    int stage = 0;  // of the next tile

    __device__ ColumnProducts(const DecodeParams& p, DecodeMemory<C>& smem) : Base(p, smem), softmax(p, smem) {}

    __device__ void begin(const WorkTile& work) {
        queries.load(p, smem, work);
        softmax.reset();
        if constexpr (C::kGroupScales) value_scales.reset();
        this->clear_output();
    }

    // Multiplies the queries with all tiles of the work tile; the first one has landed.
    __device__ void attend(KeyLoader<C>& loader) {
        const uint32_t kv = smem_address(smem.kv);
        int remaining = smem.work.token_end - smem.work.token_begin;
        if (remaining > 0) score_tile(kv + stage * C::kTileBytes, [] {});
        for (; remaining > 0; remaining -= C::kTile) {
            loader.prepare();
            __syncthreads();
            softmax.exponentiate(stage, remaining, [&] {
                if constexpr (C::kGroupScales)
                    value_scales.load(scales_at(smem, kv + stage * C::kTileBytes, warp * C::kColumns));
                loader.copy(stage == 0 ? C::kStages - 1 : stage - 1);
                if constexpr (C::kGroupScales) value_scales.take();
            });
            cp_async_wait<C::kStages - 2>();
            __syncthreads();
            const uint32_t current = kv + stage * C::kTileBytes;
            stage = stage + 1 == C::kStages ? 0 : stage + 1;
            // After the last tile, the scores are those of the current tile once more, and nobody reads them.
            score_tile(remaining > C::kTile ? kv + stage * C::kTileBytes : current,
                       [&] { accumulate(current, remaining); });
        }
    }

    // Writes this warp's partial scores of a tile. `meanwhile` runs other products: just before the scores are stored
    // if registers suffice for both, otherwise before all else.
    template <typename Meanwhile>
    __device__ void score_tile(uint32_t kv, Meanwhile meanwhile) {
        constexpr int kAtOnce = kRoomy ? C::kTokenBlocks : 1;  // token blocks
        const uint32_t keys = kv + key_offset(), rope_keys = kv + rope_offset();
        // With scales of groups: those of this lane's first token.
        const float* own_scales =
            scales_at(smem, kv, column_group() * C::kScoreColumns) + lane / 4 * C::Layout::kScales;
        if constexpr (!kRoomy) meanwhile();
#pragma unroll
        for (int block = 0; block < C::kTokenBlocks; block += kAtOnce) {
            float s[kAtOnce][C::kScoreOctets][4] = {};
            float key_scales[kAtOnce][2];  // with scales of groups
            if constexpr (C::kGroupScales && kRoomy) load_key_scales<C>(key_scales, own_scales, block);
            // Two vectors of each token at a time.
            constexpr int kPairColumns = 2 * kVectorColumns, kBlockPairs = 64 / kPairColumns;
#pragma unroll
            for (int pair = 0; pair < C::kScoreColumns / kPairColumns; ++pair)
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i)
                    add_products(
                        s[i],
                        (keys + pair / kBlockPairs * C::kColumnBlockBytes + (block + i) * C::kTokenBlockBytes) ^
                            pair % kBlockPairs * 32,
                        pair * (kPairColumns / 16));
            if constexpr (C::kGroupScales && !kRoomy) load_key_scales<C>(key_scales, own_scales, block);
            if constexpr (C::kGroupScales)
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) scale_scores(s[i], key_scales[i]);
            // Where the warp has no rotary columns, its queries are zeros: less time than a branch.
#pragma unroll
            for (int i = 0; i < kAtOnce && C::kRopeGroups > 0; ++i)
                add_rope_products(s[i], rope_keys + (block + i) * C::kRopeBlockBytes);
            if constexpr (kRoomy) meanwhile();
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) store_scores(s[i], block + i);
        }
    }

    // Adds the products of two vectors of each token of a token block, at `keys`, with query fragments `first` and on.
    __device__ void add_products(float (&s)[C::kScoreOctets][4], uint32_t keys, int first) const {
        KeyFragments<C> k;
        load_keys<C>(k, keys);
        add_product<Factor>(s, k[0], first);
        if constexpr (C::kWidens) add_product<Factor>(s, k[1], first + 1);
    }
    // The same for the warp's 16 rotary columns.
    __device__ void add_rope_products(float (&s)[C::kScoreOctets][4], uint32_t keys) const {
        uint32_t k[4];
        load_rope<C>(k, keys);
        add_product<typename C::RopeFactor>(s, k, C::kScoreColumns / 16);
    }
    template <typename Multiplied>
    __device__ void add_product(float (&s)[C::kScoreOctets][4], const uint32_t (&k)[4], int column) const {
#pragma unroll
        for (int octet = 0; octet < C::kScoreOctets; ++octet)
            mma<Multiplied>(s[octet], k, queries.q[octet][column][0], queries.q[octet][column][1]);
    }

    // Multiplies a token block's partial scores by the scales of keys and queries.
    __device__ void scale_scores(float (&s)[C::kScoreOctets][4], const float (&of_keys)[2]) const {
        const float* of_queries = smem.score_scales[column_group()] + first_octet() * 8 + lane % 4 * 2;
#pragma unroll
        for (int octet = 0; octet < C::kScoreOctets; ++octet)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[octet][i] *= of_keys[i / 2] * of_queries[octet * 8 + i % 2];
    }

    __device__ void store_scores(float (&s)[C::kScoreOctets][4], int block) {
        if constexpr (C::kWidens && !C::kGroupScales) {
#pragma unroll
            for (int octet = 0; octet < C::kScoreOctets; ++octet)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[octet][i] *= queries.score_scales[octet][i % 2];
        }
#pragma unroll
        for (int octet = 0; octet < C::kScoreOctets; ++octet)
            smem.scores[column_group()][first_octet() + octet][block][quad_index(lane % 4, lane / 4)] =
                make_float4(s[octet][0], s[octet][1], s[octet][2], s[octet][3]);
    }

    // O += P * V for one tile; `remaining` as in Softmax::exponentiate.
    __device__ void accumulate(uint32_t kv, int remaining) {
        const uint32_t weights_row = smem_address(smem.p) + lane * 16, values = kv + this->value_offset();
        const int refreshed = smem.refreshed;
        typename GroupScales<C>::Factors value_factors;
        if constexpr (C::kGroupScales) value_scales.spread(value_factors);
        ValueFragments<C> fragments;
        uint32_t v[4];
#pragma unroll
        for (int block = 0; block < C::kTokenBlocks; ++block) {
            uint32_t weights[C::kOctets][2];
            load_weights(weights, weights_row + block * C::kOctets * 256);
            if constexpr (C::kGroupScales) value_scales.multiply(weights, value_factors[block]);
            const uint32_t at = values + block * C::kTokenBlockBytes;
            fragments.load(v, at, 0);
            if (block == 0 && __builtin_expect(refreshed == remaining, 0))
                this->scale_output([&](int octet, int k) { return smem.factor[octet * 8 + lane % 4 * 2 + k]; });
            if constexpr (C::kGroupScales)
                if (block == 0 && __builtin_expect(value_scales.growth != 1.f, 0))
                    this->scale_output([&](int, int) { return value_scales.growth; });
#pragma unroll
            for (int i = 0; i < C::kColumns / 16; ++i) {
                if (i > 0) fragments.load(v, at, i);
#pragma unroll
                for (int octet = 0; octet < C::kOctets; ++octet)
                    mma<Factor>(o[octet][i], v, weights[octet][0], weights[octet][1]);
            }
        }
    }

    // To be called when the work tile's last barrier has been passed.
    __device__ float output_unit() const { return C::kGroupScales ? value_scales.unit() : tensor_scale<C>(p); }
    __device__ void write_states() { softmax.write_states(smem.end.states); }

  private:
    static __device__ int column_group() { return Queries<C>::column_group(); }
    static __device__ int first_octet() { return Queries<C>::first_octet(); }

    // Offsets within a stage of this lane's row of the first matrices that it loads.
    __device__ uint32_t key_offset() const {
        return vector_offset<C>(lane % 16, column_group() * (C::kScoreColumns / kVectorColumns) + lane / 16);
    }
    __device__ uint32_t rope_offset() const {
        const int group = column_group() % max(C::kRopeGroups, 1);
        if constexpr (C::kHasTail) return tail_rope_offset<C>(lane % 16, group * 2 + lane / 16);
        const int first = C::kDimLatent / kVectorColumns + group * (16 / kVectorColumns);
        return vector_offset<C>(lane % 16, first + (C::kWidensRope ? 0 : lane / 16));
    }
};

}  // namespace mla::portable
