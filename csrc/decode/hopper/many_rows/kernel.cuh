// MLA decode for Hopper from 16-bit caches, up to 64 rows (query heads x query tokens) an m-block: rows on wgmma's
// 64-row side.
//
//   S[64 x tokens] = Q[64 x d] * K^T[d x tokens]      A = Q, B = K, both from shared memory
//   O[64 x d_c]   += P[64 x tokens] * V[tokens x d_c] A = P from registers, B = V: the same bytes as K
//
// grid, block, loading, pairs   as in few_rows/kernel.cuh
//   consumers  The consumers own alternate tiles (64 tokens): a tile's owner computes its scores and softmax. Both
//              consumers multiply the values of every tile, each into its half of the d_c columns, so nothing has to be
//              merged at the end. The accumulator fragment of S has the layout of the A fragment of P, so a thread
//              passes its 64 B of P to the same thread of the other consumer.
//   segments   The keys of a tile arrive in segments of 64 columns. Each consumer releases the half of the latent
//              segments whose values it has multiplied. The rope segment is released once P has been read from it; keys
//              without rotary columns have none. An owner multiplies its own half first, since that half arrives first.
//
//   consumer 0 (first half of the columns)          consumer 1 (second half)
//   ----------------------------------------------  ----------------------------------------------
//   S = Q K^T of tile 0                             -
//   softmax of tile 0, share P  --> p_full          S = Q K^T of tile 1, own half and rope
//   O += P V of tile 0                              take P of tile 0, release the rope segment
//   release the first half of tile 0                O += P V of tile 0
//   S = Q K^T of tile 2, own half and rope          S += Q K^T of tile 1, other half
//   -                                               release the second half of tile 0
//   -                                               softmax of tile 1, share P  --> p_full
//   take P of tile 1, release the rope segment      O += P V of tile 1
//   O += P V of tile 1                              release the second half of tile 1
//   S += Q K^T of tile 2, other half                S = Q K^T of tile 3, own half and rope
//   release the first half of tile 1                -
//   softmax of tile 2, share P  --> p_full          -
//   ...                                             ...
//
//   The order is fixed: no consumer checks what has arrived first. While one consumer computes its softmax, the tensor
//   cores work for the other.
//
// clusters   kRangeCtas = 2 only if the longest request has 65 rows or more. The CTAs of a cluster compute two
//            neighbouring m-blocks from the same keys; the second m-block may have no rows. Each CTA loads half of the
//            segments for both (multicast), once the consumers of both have released them: this halves the reads from
//            the L2 cache. A CTA ends only when its partner no longer accesses its shared memory.
//
// shared memory (ManyRowsSharedMemory)
//   kv       kStages tiles, [column block][64 tokens][128 B], swizzled by 128 B; K-major as K, MN-major as V. Once the
//            scores are computed, the rope segment carries P to the other consumer; without one, `p` does.
//   q        [column block][64][128 B], K-major, swizzled
//
// softmax  As in few_rows/kernel.cuh, the maximum may be stale by up to 8 (in log2). Four neighbouring lanes hold a row
//          of S. Each warp decides alone for its 16 rows; the same warp of the other consumer adopts the maxima with P.
//
// invariants
//   * tiles are computed in order, and consumer 0 owns the first tile of each work tile, so the order of sums does not
//     depend on earlier work tiles. Before a warp writes `tops` (and `p`) of its own tile, it has read those of the
//     previous tile (or, after a work tile, both consumers have synchronized), so one buffer suffices.
//   * keys outside [token_begin, token_end), splits, order of sums: as in few_rows/kernel.cuh
#pragma once
#include "numbers/arithmetic.cuh"
#include "output.cuh"
#include "ptx/wgmma.cuh"

namespace mla::hopper {

template <typename Element_, CacheFormat kFormat, int kDimLatent_, int kDimRope_, int kStages_, int kRangeCtas_,
          bool kTma_, bool kProfile_, bool kLists_ = false>
struct ManyRowsConfig {
    using Element = Element_;
    static constexpr int kDimLatent = kDimLatent_;
    static constexpr int kDimRope = kDimRope_;
    static constexpr int kDim = kDimLatent + kDimRope;
    static constexpr int kRows = 64, kRangeCtas = kRangeCtas_, kMBlockCost = 3;
    static constexpr bool kForOneMBlock = false;
    static constexpr int kTile = 64;
    static constexpr int kStages = kStages_;
    static constexpr int kQueryBuffers = 1;
    using Layout = CacheLayout<kFormat, kDimLatent, kDimRope>;
    static constexpr bool kTma = kTma_, kLists = kLists_, kByTokens = !kTma;
    static constexpr int kSlotStride = kTma ? 8 : 0;
    static constexpr bool kProfile = kProfile_;

    static constexpr int kKeyColumnBlocks = (kDim + 63) / 64, kQueryColumnBlocks = kKeyColumnBlocks;  // of 64 columns
    static constexpr int kSegments = kKeyColumnBlocks, kSegmentColumnBlocks = 1;
    static constexpr int kBlockBytes = 128, kBlockColumns = 64;  // of a column block of a token
    static constexpr int kLoaderRegisters = 72;                  // consumers get the rest of kRegisters: 216
    static constexpr int kTokenGroupBytes = 1024, kSegmentBytes = kTile / 8 * kTokenGroupBytes;
    static constexpr int kStageBytes = kSegments * kSegmentBytes;
    // These parts are released separately: the half of consumer 0, the half of consumer 1 and the rope segment.
    static constexpr int kHalf = kDimLatent / 128;  // segments
    static constexpr bool kHasRope = kDimRope > 0;
    static constexpr int kRopeSegment = 2 * kHalf, kRopeRelease = 2;
    static constexpr int kReleases = 2 + kHasRope, kFirstRelease = kHalf;
    // Consumers wait for keys by segments; where threads copy keys, by releases, since each wait then needs a fence.
    static constexpr int kFullBarriers = kTma ? kSegments : kReleases;
    // Only with clusters: without them, kernels wait for memory anyway, and prefetches made them slower.
    static constexpr int kPrefetchTiles = kRangeCtas == 2 ? 2 : 0;
    static constexpr int kQueryColumnBlockBytes = kRows * 128;
    static constexpr int kQueryBytes = kQueryColumnBlocks * kQueryColumnBlockBytes;

    static __device__ int release_of(int segment) { return segment / kHalf; }
    static __device__ int full_barrier_of(int segment) { return kTma ? segment : release_of(segment); }
    // Whether the segment that is multiplied i-th is the first one of a barrier.
    static constexpr bool is_waited_for(int i) { return kTma || i == 0 || i == kHalf || i == kHalf + kHasRope; }
    // The order in which the owner of the tile multiplies: its own half first, which is also released first.
    static __device__ constexpr int segment_in_turn(int tile, int i) {
        if (!kHasRope) return (i + tile % 2 * kHalf) % kSegments;
        if (tile % 2 == 0) return i < kHalf ? i : i == kHalf ? kRopeSegment : i - 1;
        return i <= kHalf ? kHalf + i : i - kHalf - 1;
    }

    static_assert(kDim % 32 == 0 && kDimLatent % 256 == 0 && kDimRope <= 64 && !Layout::kFp8);
};

template <typename C>
struct ManyRowsSharedMemory {
    alignas(1024) unsigned char kv[C::kStages][C::kStageBytes];
    alignas(1024) unsigned char q[C::kQueryBuffers][C::kQueryBytes];
    uint4 p[C::kHasRope ? 1 : C::kTile / 16][C::kHasRope ? 1 : 128];  // P of a tile
    float2 tops[128];        // the maxima that P is relative to, per thread of a consumer
    RowStates<C> states[2];  // work tiles take turns
    OutputOffsets<C::kRows> offsets[kOffsetBuffers];
    CtaRange range;
    uint32_t flag;  // this CTA's, when the launch began
    Barrier kv_full[C::kStages][C::kFullBarriers], kv_empty[C::kStages][C::kReleases];
    Barrier q_full[C::kQueryBuffers], q_empty[C::kQueryBuffers];
    Barrier p_full[4];  // per warp of a consumer: P of a tile is shared; one phase per tile
    PairBarriers pair;
    UnnamedTokens<C> unnamed;
};

template <typename C>
struct ManyRowsConsumer : ManyRowsOutput<C, ManyRowsSharedMemory<C>> {
    using Base = ManyRowsOutput<C, ManyRowsSharedMemory<C>>;
    using Base::Base;
    using Base::kOutputs;
    using Base::p, Base::smem, Base::consumer, Base::thread, Base::warp, Base::lane, Base::profiler;
    using Base::sync_consumer, Base::row, Base::row_of, Base::rescale, Base::o, Base::m, Base::l;
    using typename Base::Buffers, typename Base::Offsets;
    using typename Base::Element;
    static constexpr int kScores = C::kTile / 2;     // accumulators of S that a thread has
    static constexpr int kProducts = C::kTile / 16;  // P V, of 16 tokens each
    // Whether a tile may hold other data in place of keys that do not exist. Only with TMA: other loaders write zeros.
    static constexpr bool kMayLackKeys = C::kTma;
    using Scores = float[kScores];
    using Unnamed = typename UnnamedTokens<C>::Bits;
    using Probabilities = uint32_t[kProducts][4];

    // Tiles are numbered across all work tiles of the CTA.
    static __device__ int stage_of(uint32_t tile) { return tile % C::kStages; }
    static __device__ uint32_t phase_of(uint32_t tile) { return tile / C::kStages % 2; }
    __device__ unsigned char* keys_of(uint32_t tile) const { return smem.kv[stage_of(tile)]; }
    // Where a tile's owner leaves P for the other consumer: in the tile's rope columns, which only the scores need.
    __device__ uint4& shared_probabilities(uint32_t tile, int product) const {
        if constexpr (!C::kHasRope) return smem.p[product][thread];
        return reinterpret_cast<uint4*>(keys_of(tile) + C::kRopeSegment * C::kSegmentBytes)[product * 128 + thread];
    }

    __device__ void reset_state(const Offsets& offsets) {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) o[i] = 0.f;
#pragma unroll
        for (int r = 0; r < 2; ++r) m[r] = offsets.out[row() + r * 8] < 0 ? kNoRow : -INFINITY;
        l[0] = l[1] = 0.f;
    }

    __device__ void wait_for_keys(uint32_t tile, int segment) {
        smem.kv_full[stage_of(tile)][C::full_barrier_of(segment)].wait(phase_of(tile));
        if constexpr (!C::kTma) fence_async_proxy();
    }
    // For a tile with fewer than kTile keys: waits for all segments, and zeroes the values of keys that do not exist.
    __device__ void complete_last_tile(uint32_t tile, int valid) {
        for (int segment = 0; segment < C::kSegments; ++segment) wait_for_keys(tile, segment);
        Base::zero_values(keys_of(tile), valid);
        fence_async_proxy();
        sync_consumer();  // all values are zeroed before any warp multiplies with them or passes P on
    }

    __device__ uint64_t query_descriptor(int segment) const {
        return uniform(make_descriptor(smem.q[0] + segment * C::kQueryColumnBlockBytes, 0, 1024, Swizzle::k128B));
    }
    __device__ uint64_t key_descriptor(uint32_t tile, int segment) const {
        return uniform(
            make_descriptor(keys_of(tile) + segment * C::kSegmentBytes, 0, C::kTokenGroupBytes, Swizzle::k128B));
    }
    // Of this consumer's half of the columns.
    __device__ uint64_t value_descriptor(uint32_t tile) const {
        return uniform(make_descriptor(keys_of(tile) + consumer * (C::kHalf * C::kSegmentBytes), C::kSegmentBytes,
                                       C::kTokenGroupBytes, Swizzle::k128B));
    }

    // Starts S (+)= Q K^T over segments kBegin to kEnd - 1 of a tile's loading order, as they arrive.
    template <int kBegin, int kEnd>
    __device__ void start_scores(Scores& s, uint32_t tile) {
        using Product = Wgmma<C::kTile, Element, Major::kK>;
        // In loading order, the segments form three spans: this consumer's half, the rope segment, the other half.
        // Descriptors are made for the first segment of each span. Those of the other segments differ from it by
        // constants, which the compiler adds in uniform registers.
        constexpr int kSpanBegin[3] = {0, C::kHalf, C::kHalf + C::kHasRope};
        uint64_t q[3], k[3];
#pragma unroll
        for (int span = 0; span < 3; ++span) {
            const int segment = C::segment_in_turn(consumer, kSpanBegin[span]);
            q[span] = query_descriptor(segment);
            k[span] = key_descriptor(tile, segment);
        }
#pragma unroll
        for (int i = kBegin; i < kEnd; ++i) {
            if (C::is_waited_for(i)) wait_for_keys(tile, C::segment_in_turn(consumer, i));
            if (i == 0) profiler.mark(Event::kKeysArrived);
            wgmma_fence();
            const bool is_rope = C::kHasRope && i == C::kHalf;
            const int span = i < C::kHalf ? 0 : is_rope ? 1 : 2, segment = i - kSpanBegin[span];
#pragma unroll
            for (int step = 0; step < (is_rope ? C::kDimRope : 64) / 16; ++step)
                Product::mma(s, advance(q[span], segment * C::kQueryColumnBlockBytes + step * 32),
                             advance(k[span], segment * C::kSegmentBytes + step * 32), i > 0 || step > 0);
        }
        wgmma_commit();
    }

    __device__ void finish_scores(Scores& s) {
        wgmma_wait<0>();
        pin_registers(s);
        profiler.mark(Event::kScores);
        if constexpr (C::kHasRope)
            sync_consumer();  // all warps have multiplied with the rope columns, where P will lie
    }

    // By a warp that has read segments of a tile for the last time.
    __device__ void release(uint32_t tile, int release) {
        if (lane == 0) Base::release_keys(stage_of(tile), release);
    }

    // Starts O += P V over a tile; `values` is the descriptor of its values. Callers make it before P is ready, because
    // making it takes a shuffle, which would delay the products.
    __device__ void start_values(const Probabilities& probabilities, uint64_t values) {
        using Product = WgmmaFromRegisters<C::kDimLatent / 2, Element, Major::kMN>;
        pin_registers(o);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kProducts; ++i)
            Product::mma(o, probabilities[i], advance(values, i * 2 * C::kTokenGroupBytes), true);
        wgmma_commit();
    }

    // Waits for these products, and releases this consumer's half of the columns, which nobody reads any more.
    __device__ void finish_values(uint32_t tile) {
        wgmma_wait<0>();
        pin_registers(o);
        release(tile, consumer);
        profiler.mark(Event::kValues);
    }

    // Masks the scores from the rows' key limits on. Row 0 has the lowest limit, `least_limit`.
    __device__ void mask(Scores& s, const WorkTile& work, int tile_token, int least_limit) {
        if (tile_token + C::kTile <= least_limit) return;
        const int limits[2] = {key_limit<C>(p, work, row()), key_limit<C>(p, work, row() + 8)};
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            if (tile_token + i / 4 * 8 + lane % 4 * 2 + i % 2 >= limits[row_of(i)]) s[i] = -INFINITY;
    }

    // Masks the scores of tokens without keys.
    __device__ void mask_unnamed(Scores& s, uint64_t unnamed) {
        unnamed >>= lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            if (unnamed >> (i / 4 * 8 + i % 2) & 1) s[i] = -INFINITY;
    }

    // If a score, scaled to log2, exceeds the maximum in use by too much, takes the exact maximum and returns true: O
    // must be rescaled.
    __device__ bool refresh_maximum(const Scores& s, float (&factor)[2]) {
        float tops[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int i = 0; i < kScores; ++i) tops[row_of(i)] = fmaxf(tops[row_of(i)], s[i]);
        tops[0] *= p.scale_log2, tops[1] *= p.scale_log2;
        const bool refresh = __any_sync(~0u, tops[0] > m[0] + kStaleBound || tops[1] > m[1] + kStaleBound);
        if (refresh) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float top = max_over_lanes<4>(fmaxf(m[r], tops[r]));
                factor[r] = exp2_approx(m[r] - finite(top));
                m[r] = top;
                l[r] *= factor[r];
            }
        }
        return refresh;
    }

    // Computes P of this consumer's own tile and shares it with the other consumer. True if O must be rescaled.
    __device__ bool softmax(Scores& s, Probabilities& probabilities, float (&factor)[2], const WorkTile& work,
                            int tile_token, int least_limit, uint32_t tile, Unnamed unnamed) {
        if (unnamed) mask_unnamed(s, smem.unnamed.tokens(unnamed));
        if constexpr (!C::kLists) mask(s, work, tile_token, least_limit);
        const bool refreshed = refresh_maximum(s, factor);
        const float base[2] = {finite(m[0]), finite(m[1])};
#pragma unroll
        for (int i = 0; i < kScores; i += 2) {
            const float low = exp2_approx(fmaf(s[i], p.scale_log2, -base[row_of(i)]));
            const float high = exp2_approx(fmaf(s[i + 1], p.scale_log2, -base[row_of(i)]));
            l[row_of(i)] += low + high;
            probabilities[i / 8][i / 2 % 4] = pack<Element>(low, high);
        }
#pragma unroll
        for (int i = 0; i < kProducts; ++i)
            shared_probabilities(tile, i) = reinterpret_cast<const uint4&>(probabilities[i]);
        smem.tops[thread] = make_float2(m[0], m[1]);
        smem.p_full[warp].arrive();
        profiler.mark(Event::kSoftmax);
        return refreshed;
    }

    // Reads P and the maximum of a tile of the other consumer, and rescales O to that maximum.
    __device__ void take_probabilities(Probabilities& probabilities, uint32_t tile) {
        smem.p_full[warp].wait(tile % 2);
        profiler.mark(Event::kProbabilitiesArrived);
        if constexpr (C::kHasRope && !C::kTma) fence_async_proxy();
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

    // Starts O += P V over the other consumer's tile. The rope segment, which carried P, will be loaded again; the
    // fence orders that load after the accesses to P.
    __device__ void start_other(Probabilities& probabilities, uint32_t tile) {
        const uint64_t values = value_descriptor(tile);
        take_probabilities(probabilities, tile);
        start_values(probabilities, values);
        if constexpr (!C::kHasRope) return;
        fence_async_proxy();
        __syncwarp();  // lane 0 arrives for all lanes
        release(tile, C::kRopeRelease);
    }
    __device__ void multiply_other(uint32_t tile) {
        Probabilities probabilities;
        start_other(probabilities, tile);
        finish_values(tile);
    }

    // Computes a work tile, whose first tile is number `first_tile` of this CTA. An iteration covers two tiles of the
    // schedule above: the other consumer's tile, then the next one, which is this consumer's own.
    __device__ void compute_work_tile(const WorkTile& work, uint32_t first_tile, int tiles) {
        const int least_limit = key_limit<C>(p, work, 0);
        if (consumer >= tiles) Base::release_queries(0);
        for (int i = consumer; i <= tiles; i += 2) {
            const uint32_t own = first_tile + i, other = own - 1;
            const int token = work.token_begin + i * C::kTile;
            if (i == tiles) {
                if (i > 0) multiply_other(other);
                break;
            }
            if constexpr (kMayLackKeys)
                if (const int valid = work.token_end - token; valid < C::kTile) complete_last_tile(own, valid);
            constexpr int kFirst = C::kHalf + C::kHasRope;  // this consumer's half and the rope columns
            Scores s;
            Probabilities probabilities;
            float factor[2];
            Unnamed unnamed;
            if (i > 0) {
                Probabilities other_probabilities;
                start_scores<0, kFirst>(s, own);
                unnamed = smem.unnamed.of(stage_of(own));  // the first segments have arrived
                start_other(other_probabilities, other);
                start_scores<kFirst, C::kSegments>(s, own);
                wgmma_wait<1>();  // for the values
                release(other, consumer);
                finish_scores(s);
                pin_registers(o);
            } else {
                start_scores<0, C::kSegments>(s, own);
                unnamed = smem.unnamed.of(stage_of(own));  // the first segments have arrived
                finish_scores(s);
            }
            const uint64_t values = value_descriptor(own);
            const bool refreshed = softmax(s, probabilities, factor, work, token, least_limit, own, unnamed);
            if (i + 2 >= tiles) Base::release_queries(0);  // these were this consumer's last scores
            if (refreshed) rescale(factor);
            start_values(probabilities, values);
            finish_values(own);
        }
    }

    __device__ void run() {
        WorkCursor<C> cursor(p, smem.range);
        WorkTile work;
        uint32_t first_tile = 0;
        bool in_registers = false;
        int work_index = 0;
        const bool paired = C::kRangeCtas == 1 && smem.range.paired;
        if (paired) Base::begin_pair();
        if constexpr (C::kRangeCtas == 2) cluster_wait();  // the partner's barriers are initialized
        for (; cursor.next(work); ++work_index) {
            smem.q_full[0].wait(work_index % 2);
            reset_state(smem.offsets[offset_buffer(work_index)]);
            fence_async_proxy();
            profiler.mark(Event::kQueriesArrived);
            const int tiles = (work.token_end - work.token_begin + C::kTile - 1) / C::kTile;
            compute_work_tile(work, first_tile, tiles);
            first_tile += tiles;
            RowStates<C>& states = smem.states[work_index % 2];
            Base::publish_state(states, work);
            if (paired) break;
            in_registers = Base::stays_in_registers(work, cursor.at_end());
            Base::finish_work_tile(work, smem.offsets[offset_buffer(work_index)], states, in_registers);
            Base::count_split(work);
        }
        if constexpr (C::kRangeCtas == 2) cluster_leave();
        // The code of pairs comes last. The code that runs without pairs is then contiguous, and loads sooner when it
        // comes from memory.
        if (!paired) {
            Base::sync_consumers();  // all split buffers are complete
            Base::announce_splits(work_index > 0);
            if (in_registers)
                Base::template combine_two<true>(Buffers(p, work, smem.range, Base::cta),
                                                 smem.offsets[offset_buffer(work_index - 1)]);
            Base::combine(work, work_index - 1, [&](bool last, const Buffers& buffers, const Offsets& offsets) {
                if (!(last && in_registers)) Base::template combine_two<false>(buffers, offsets);
            });
        } else {
            Base::count_launch();
            Base::finish_pair(smem.offsets[0], smem.states[0]);
        }
        if constexpr (C::kRangeCtas == 2) cluster_wait();  // until then the partner may access this shared memory
        profiler.mark(Event::kCombined);
    }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, 1)
    many_rows_decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ KeyBox box) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& smem = *reinterpret_cast<ManyRowsSharedMemory<C>*>(bytes);
    run_kernel<C, ManyRowsSharedMemory<C>, ManyRowsConsumer<C>, 4 * C::kRangeCtas>(p, box, smem, [&] {
        for (Barrier& barrier : smem.p_full) barrier.init(32);
    });
}

}  // namespace mla::hopper
