// MLA decode for Hopper, up to 64 rows (query heads x query tokens) an m-block: rows on wgmma's 64-row side.
//
//   S[64 x tokens] = Q[64 x d] * K^T[d x tokens]      A = Q, B = K, both from shared memory
//   O[64 x d_c]   += P[64 x tokens] * V[tokens x d_c] A = P from registers, B = V: the same bytes as K
//
// grid, block, loading, pairs   as in swapped.cuh
//   consumers  Scores and softmax of a tile (64 tokens) belong to one consumer, those of the next tile to the other.
//              Both multiply the values of every tile, each into its half of the d_c columns, so nothing has to be
//              merged at the end. The fragment of S is the A fragment of P, so a thread passes 64 B of P to the same
//              thread of the other consumer.
//
//   consumer 0 (first half of the columns)          consumer 1 (second half)
//   ----------------------------------------------  ----------------------------------------------
//   S = Q K^T of tile 0                             -
//   softmax of tile 0, share P  --> p_full          -
//   O += P V of tile 0                              S = Q K^T of tile 1, if its keys have arrived
//     arrive kv_empty of tile 0                     wait p_full, take P of tile 0
//   -                                               O += P V of tile 0, and meanwhile
//   -                                                 softmax of tile 1, share P  --> p_full
//   S = Q K^T of tile 2, if its keys have arrived     arrive kv_empty of tile 0
//   wait p_full, take P of tile 1                   O += P V of tile 1
//   O += P V of tile 1, and meanwhile                 arrive kv_empty of tile 1
//     softmax of tile 2, share P  --> p_full        -
//     arrive kv_empty of tile 1                     S = Q K^T of tile 3, if its keys have arrived
//   O += P V of tile 2                              ...
//
//   If the keys of its own tile have not arrived, a consumer finishes the other's tile first, so that the stages of
//   that tile are loaded again as early as possible.
//
// shared memory (Rows64SharedMemory)
//   kv       kStages stages of 32 tokens, two of which, side by side, are a tile; in groups of 8 tokens:
//            [column block][8][128 B], swizzled by 128 B; K-major as K, MN-major as V. Each stage is given back by
//            itself. When the scores are computed, the rope columns carry P to the other consumer.
//   q        [column block][64][128 B], K-major, swizzled
//
// softmax  As in swapped.cuh, the maximum may be stale by up to 8 (in log2). Four neighbouring lanes hold a row of S; a
//          warp decides alone for its 16 rows, and the same warp of the other consumer follows it one tile later.
//
// invariants
//   * tiles are computed in order, and their owner changes with every tile, also from one m-block to the next. A warp
//     has read `tops` of the tile before when it writes those of its own, so one buffer is enough. Which consumer owns
//     which tile does not change any bit.
//   * keys outside [token_begin, token_end), splits, order of sums: as in swapped.cuh
#pragma once
#include "rows64_epilogue.cuh"

namespace mla::sm90 {

template <typename Element_, int kDimLatent_, int kDimRope_, int kStages_, bool kTma_, bool kProfile_>
struct Rows64Config {
    using Element = Element_;
    static constexpr int kDimLatent = kDimLatent_;
    static constexpr int kDimRope = kDimRope_;
    static constexpr int kDim = kDimLatent + kDimRope;
    static constexpr int kRows = 64;
    static constexpr int kStageTokens = 32;
    static constexpr int kTile = 64;
    static constexpr int kStages = kStages_;
    static constexpr int kQueryBuffers = 1;
    static constexpr bool kTma = kTma_;
    static constexpr int kSlotStride = kTma ? 8 : 1;
    static constexpr bool kProfile = kProfile_;

    static constexpr int kColumnBlocks = (kDim + 63) / 64;  // of 64 columns = 128 B
    static constexpr int kSegments = 1, kSegmentColumnBlocks = kColumnBlocks;
    static constexpr int kTokenGroupBytes = kSegmentColumnBlocks * 1024,
                         kSegmentBytes = kStageTokens / 8 * kTokenGroupBytes;
    static constexpr int kStageBytes = kSegments * kSegmentBytes;
    static constexpr int kQueryColumnBlockBytes = kRows * 128;
    static constexpr int kQueryBytes = kColumnBlocks * kQueryColumnBlockBytes;

    static_assert(kDim % 32 == 0 && kDimLatent % 256 == 0);
    static_assert((kStages & (kStages - 1)) == 0 && kStages >= 4);
};

template <typename C>
struct Rows64SharedMemory {
    alignas(1024) unsigned char kv[C::kStages][C::kStageBytes];
    alignas(1024) unsigned char q[C::kQueryBuffers][C::kQueryBytes];
    float2 tops[128];        // the maxima that P is relative to, per thread of a consumer
    RowStates<C> states[2];  // work tiles take turns
    OutputOffsets<C::kRows> offsets[kOffsetBuffers];
    CtaRange range;
    uint32_t flag;  // this CTA's, when the launch began
    Barrier kv_full[C::kStages][C::kSegments], kv_empty[C::kStages];
    Barrier q_full[C::kQueryBuffers], q_empty[C::kQueryBuffers];
    Barrier p_full[4];  // P of a tile is shared, per warp of a consumer; a phase a tile
    PairBarriers pair;
};

template <typename C>
struct Rows64Consumer : Rows64Epilogue<C, Rows64SharedMemory<C>> {
    using Base = Rows64Epilogue<C, Rows64SharedMemory<C>>;
    using Base::Base;
    using Base::kBlocks, Base::kOutputs;
    using Base::p, Base::smem, Base::consumer, Base::thread, Base::warp, Base::lane, Base::profiler;
    using Base::sync_consumer, Base::any_in_consumer, Base::key_limit, Base::row, Base::row_of, Base::o, Base::m,
        Base::l;
    using typename Base::Element, typename Base::Buffers, typename Base::Offsets;
    static constexpr int kTileStages = C::kTile / C::kStageTokens;
    static constexpr int kScores = C::kTile / 2;     // accumulators of S that a thread has
    static constexpr int kProducts = C::kTile / 16;  // P V, of 16 tokens each
    using Scores = float[kScores];
    using Probabilities = uint32_t[kProducts][4];

    // The stages of a tile lie side by side. Tiles are numbered across all work tiles of the CTA.
    static __device__ int first_stage(uint32_t tile) { return tile % (C::kStages / kTileStages) * kTileStages; }
    static __device__ uint32_t phase_of(uint32_t tile) { return tile / (C::kStages / kTileStages) % 2; }
    __device__ unsigned char* keys_of(uint32_t tile) const { return smem.kv[first_stage(tile)]; }
    // Where P of a tile lies for the other consumer: in the rope columns of its keys, which serve the scores alone.
    __device__ uint4& shared_probabilities(uint32_t tile, int product) const {
        return reinterpret_cast<uint4*>(keys_of(tile) + (product * 2 + thread / 64) * C::kTokenGroupBytes +
                                        C::kDimLatent / 64 * 1024)[thread % 64];
    }

    __device__ void reset_state() {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < kOutputs; ++i) o[b][i] = 0.f;
        m[0] = m[1] = -INFINITY;
        l[0] = l[1] = 0.f;
    }

    __device__ void rescale(const float (&factor)[2]) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < kOutputs; ++i) o[b][i] *= factor[row_of(i)];
    }

    // Whether the keys of a tile have arrived, to all warps of this consumer.
    __device__ bool keys_arrived(uint32_t tile) const {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < kTileStages; ++i)
            missing |= !smem.kv_full[first_stage(tile) + i][0].has_completed(phase_of(tile));
        return !any_in_consumer(missing);
    }
    __device__ void wait_for_keys(uint32_t tile) {
#pragma unroll
        for (int i = 0; i < kTileStages; ++i) smem.kv_full[first_stage(tile) + i][0].wait(phase_of(tile));
        profiler.mark(Event::kKeysArrived);
    }

    // Starts S = Q K^T over a tile whose keys have arrived, `valid` of which exist.
    __device__ void start_scores(Scores& s, uint32_t tile, int valid) {
        using Product = Wgmma<C::kTile, Element, Major::kK>;
        unsigned char* kv = keys_of(tile);
        if constexpr (!C::kTma) fence_async_proxy();
        if (valid < C::kTile) {
            Base::zero_values(kv, valid);
            fence_async_proxy();
            sync_consumer();  // all values are zeroed before any warp multiplies with them or passes P on
        }
        const uint64_t q_descriptor = make_descriptor(smem.q[0], 0, 1024, Swizzle::k128B);
        const uint64_t k_descriptor = uniform(make_descriptor(kv, 0, C::kTokenGroupBytes, Swizzle::k128B));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::kDim / 16; ++i)
            Product::mma(s, advance(q_descriptor, i / 4 * C::kQueryColumnBlockBytes + i % 4 * 32),
                         advance(k_descriptor, i / 4 * 1024 + i % 4 * 32), i > 0);
        wgmma_commit();
    }

    // Waits for the scores, but not for the last kPending groups of products.
    template <int kPending>
    __device__ void finish_scores(Scores& s) {
        wgmma_wait<kPending>();
        pin_registers(s);
        profiler.mark(Event::kScores);
        sync_consumer();  // all warps have multiplied with the rope columns, where P will lie
    }

    // Starts O += P V over a tile: a group of products for each of its stages.
    __device__ void start_values(const Probabilities& probabilities, uint32_t tile) {
        using Product = WgmmaFromRegisters<Element>;
        const uint64_t v_descriptor = uniform(
            make_descriptor(keys_of(tile) + consumer * (kBlocks * 2048), 1024, C::kTokenGroupBytes, Swizzle::k128B));
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) pin_registers(o[b]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
#pragma unroll
            for (int b = 0; b < kBlocks; ++b)
                Product::mma(o[b], probabilities[i], advance(v_descriptor, i * 2 * C::kTokenGroupBytes + b * 2048));
            if ((i + 1) % (C::kStageTokens / 16) == 0) wgmma_commit();
        }
    }

    // Waits for these products, and gives each stage back as soon as it has been read.
    __device__ void finish_values(uint32_t tile) {
        static_assert(kTileStages == 2);
        wgmma_wait<1>();
        __syncwarp();  // lane 0 arrives for all lanes, which have also read P from these stages
        if (lane == 0) smem.kv_empty[first_stage(tile)].arrive();
        wgmma_wait<0>();
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) pin_registers(o[b]);
        if (lane == 0) smem.kv_empty[first_stage(tile) + 1].arrive();
        profiler.mark(Event::kValues);
    }

    // Scales the scores to log2, and masks those behind the rows' key limits, of which row 0 has the least.
    __device__ void scale_and_mask(Scores& s, const WorkTile& work, int tile_token, int least_limit) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] *= p.scale_log2;
        if (tile_token + C::kTile <= least_limit) return;
        const int limits[2] = {key_limit(work, row()), key_limit(work, row() + 8)};
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            if (tile_token + i / 4 * 8 + lane % 4 * 2 + i % 2 >= limits[row_of(i)]) s[i] = -INFINITY;
    }

    // If a score exceeds the maximum in use by too much, takes the exact one and returns true: O must be rescaled.
    __device__ bool refresh_maximum(const Scores& s, float (&factor)[2]) {
        float tops[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int i = 0; i < kScores; ++i) tops[row_of(i)] = fmaxf(tops[row_of(i)], s[i]);
        const bool refresh = __any_sync(~0u, tops[0] > m[0] + kStaleBound || tops[1] > m[1] + kStaleBound);
        if (refresh) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float top = fmaxf(m[r], tops[r]);
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                factor[r] = exp2_approx(m[r] - finite(top));
                m[r] = top;
                l[r] *= factor[r];
            }
        }
        return refresh;
    }

    // P from the scores of this consumer's own tile, also to the other consumer. True if O must be rescaled.
    __device__ bool softmax(Scores& s, Probabilities& probabilities, float (&factor)[2], const WorkTile& work,
                            int tile_token, int least_limit, uint32_t tile) {
        scale_and_mask(s, work, tile_token, least_limit);
        const bool refreshed = refresh_maximum(s, factor);
        const float base[2] = {finite(m[0]), finite(m[1])};
#pragma unroll
        for (int i = 0; i < kScores; i += 2) {
            const float low = exp2_approx(s[i] - base[row_of(i)]), high = exp2_approx(s[i + 1] - base[row_of(i)]);
            l[row_of(i)] += low + high;
            probabilities[i / 8][i / 2 % 4] = pack<Element>(low, high);
        }
#pragma unroll
        for (int i = 0; i < kProducts; ++i)
            shared_probabilities(tile, i) = reinterpret_cast<const uint4&>(probabilities[i]);
        smem.tops[thread] = make_float2(m[0], m[1]);
        fence_async_proxy();  // the stages are loaded again, and their tails may have been zeroed
        smem.p_full[warp].arrive();
        profiler.mark(Event::kSoftmax);
        return refreshed;
    }

    // Reads P and the maximum of a tile of the other consumer, and rescales O to that maximum.
    __device__ void take_probabilities(Probabilities& probabilities, uint32_t tile) {
        smem.p_full[warp].wait(tile % 2);
        if constexpr (!C::kTma) fence_async_proxy();
#pragma unroll
        for (int i = 0; i < kProducts; ++i) reinterpret_cast<uint4&>(probabilities[i]) = shared_probabilities(tile, i);
        const float2 top = smem.tops[thread];
        if (__any_sync(~0u, top.x != m[0] || top.y != m[1])) {
            const float factor[2] = {exp2_approx(m[0] - finite(top.x)), exp2_approx(m[1] - finite(top.y))};
            rescale(factor);
            m[0] = top.x, m[1] = top.y;
            l[0] *= factor[0], l[1] *= factor[1];
        }
    }

    // All keys of a work tile, whose first tile is number `first_tile` of this CTA. An iteration is the schedule above
    // for two tiles: the other consumer's, then the next one, which is this consumer's own.
    __device__ void compute_work_tile(const WorkTile& work, uint32_t first_tile, int tiles) {
        const int least_limit = key_limit(work, 0);
        const int first_own = (first_tile ^ consumer) % 2;
        if (first_own >= tiles) Base::release_queries(0);
        for (int i = first_own; i <= tiles; i += 2) {
            const bool has_other = i > 0, has_own = i < tiles;
            const uint32_t own = first_tile + i, other = own - 1;
            const int token = work.token_begin + i * C::kTile, valid = work.token_end - token;
            Scores s;
            Probabilities own_probabilities, other_probabilities;
            float factor[2];
            bool refreshed = false;
            if (has_other && has_own && keys_arrived(own)) {
                start_scores(s, own, valid);
                take_probabilities(other_probabilities, other);
                start_values(other_probabilities, other);
                finish_scores<kTileStages>(s);  // the values' products hide the softmax
                refreshed = softmax(s, own_probabilities, factor, work, token, least_limit, own);
                finish_values(other);
            } else {
                if (has_other) {
                    take_probabilities(other_probabilities, other);
                    start_values(other_probabilities, other);
                    finish_values(other);
                }
                if (has_own) {
                    wait_for_keys(own);
                    start_scores(s, own, valid);
                    finish_scores<0>(s);
                    refreshed = softmax(s, own_probabilities, factor, work, token, least_limit, own);
                }
            }
            if (!has_own) break;
            if (i + 2 >= tiles) Base::release_queries(0);  // these were this consumer's last scores
            if (refreshed) rescale(factor);
            start_values(own_probabilities, own);
            finish_values(own);
        }
    }

    __device__ void run() {
        WorkCursor<C::kRows> cursor(p.lengths, p.num_heads, smem.range);
        WorkTile work;
        uint32_t first_tile = 0;
        bool in_registers = false;
        int work_index = 0;
        const bool paired = smem.range.paired;
        if (paired) Base::begin_pair();
        for (; cursor.next(work); ++work_index) {
            reset_state();
            smem.q_full[0].wait(work_index % 2);
            fence_async_proxy();
            profiler.mark(Event::kQueriesArrived);
            const int tiles = (work.token_end - work.token_begin + C::kTile - 1) / C::kTile;
            compute_work_tile(work, first_tile, tiles);
            first_tile += tiles;
            RowStates<C>& states = smem.states[work_index % 2];
            Base::publish_state(states);
            if (paired) break;
            in_registers = Base::stays_in_registers(work, cursor.at_end());
            Base::finish_work_tile(work, smem.offsets[offset_buffer(work_index)], states, in_registers);
            Base::count_split(work);
        }
        // A pair's code comes last: then the code that runs without pairs lies together, and arrives sooner when it
        // comes from memory.
        if (!paired) {
            Base::sync_consumers();  // all split buffers are complete
            Base::announce_splits(work_index > 0);
            if (in_registers)
                Base::template combine_two<true>(Buffers(p, work, smem.range),
                                                 smem.offsets[offset_buffer(work_index - 1)]);
            Base::combine(work, work_index - 1, [&](bool last, const Buffers& buffers, const Offsets& offsets) {
                if (!(last && in_registers)) Base::template combine_two<false>(buffers, offsets);
            });
        } else {
            Base::count_launch();
            Base::finish_pair(smem.offsets[0], smem.states[0]);
        }
        profiler.mark(Event::kCombined);
    }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, 1)
    rows64_decode_kernel(const DecodeParams p, const __grid_constant__ KeyBox box) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& smem = *reinterpret_cast<Rows64SharedMemory<C>*>(bytes);
    run_kernel<C, Rows64SharedMemory<C>, Rows64Consumer<C>, 8>(p, box, smem, [&] {
        for (Barrier& barrier : smem.p_full) barrier.init(32);
    });
}

}  // namespace mla::sm90
