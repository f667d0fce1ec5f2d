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
//   softmax of tile 0, share P  --> p_is_there      S = Q K^T of tile 1, own half and rope
//   O += P V of tile 0                              take P of tile 0, release the rope segment
//   release the first half of tile 0                O += P V of tile 0
//   S = Q K^T of tile 2, own half and rope          S += Q K^T of tile 1, other half
//   -                                               release the second half of tile 0
//   -                                               softmax of tile 1, share P  --> p_is_there
//   take P of tile 1, release the rope segment      O += P V of tile 1
//   O += P V of tile 1                              release the second half of tile 1
//   S += Q K^T of tile 2, other half                S = Q K^T of tile 3, own half and rope
//   release the first half of tile 1                -
//   softmax of tile 2, share P  --> p_is_there      -
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
// shared memory (ManyRowsMemory)
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

template <typename Element, DecodeConfig kConfig>
struct ManyRowsConfig : KernelConfig<Element, kConfig> {
    using Layout = typename KernelConfig<Element, kConfig>::Layout;
    static constexpr int kMBlockCost = 3;
    static constexpr bool kCombinesTwo = true;
    static constexpr int kTile = 64;
    static constexpr bool kByTokens = !kConfig.tma;
    static constexpr int kSlotStride = kConfig.tma ? 8 : 0;

    static constexpr int kKeyColumnBlocks = column_blocks(kConfig.dim_latent + kConfig.dim_rope);  // of 64 columns
    static constexpr int kSegments = kKeyColumnBlocks, kSegmentColumnBlocks = 1;
    static constexpr int kBlockBytes = 128, kBlockColumns = 64;  // of a column block of a token
    static constexpr int kLoaderRegisters = 72;                  // consumers get the rest of kRegisters: 216
    static constexpr int kTokenGroupBytes = 1024, kSegmentBytes = kTile / 8 * kTokenGroupBytes;
    static constexpr int kStageBytes = kSegments * kSegmentBytes;
    // These parts are released separately: the half of consumer 0, the half of consumer 1 and the rope segment.
    static constexpr int kHalf = kConfig.dim_latent / 128;  // segments
    static constexpr bool kHasRope = kConfig.dim_rope > 0;
    static constexpr int kRopeSegment = 2 * kHalf, kRopeRelease = 2;
    static constexpr int kReleases = 2 + kHasRope, kFirstRelease = kHalf;
    // Consumers wait for keys by segments; where threads copy keys, by releases, since each wait then needs a fence.
    static constexpr int kFullBarriers = kConfig.tma ? kSegments : kReleases;
    // Only with clusters: without them, kernels wait for memory anyway, and prefetches made them slower.
    static constexpr int kPrefetchTiles = kConfig.range_ctas == 2 ? 2 : 0;

    static __device__ int release_of(int segment) { return segment / kHalf; }
    static __device__ int full_barrier_of(int segment) { return kConfig.tma ? segment : release_of(segment); }
    // Whether the segment that is multiplied i-th is the first one of a barrier.
    static constexpr bool is_waited_for(int i) { return kConfig.tma || i == 0 || i == kHalf || i == kHalf + kHasRope; }
    // The order in which the owner of the tile multiplies: its own half first, which is also released first.
    static __device__ constexpr int segment_in_turn(int tile, int i) {
        if (!kHasRope) return (i + tile % 2 * kHalf) % kSegments;
        if (tile % 2 == 0) return i < kHalf ? i : i == kHalf ? kRopeSegment : i - 1;
        return i <= kHalf ? kHalf + i : i - kHalf - 1;
    }

    static_assert(kConfig.rows == 64 && kConfig.query_buffers == 1 && !kConfig.for_one_m_block);
    static_assert(Layout::kElementBytes == 2 && !Layout::kHasTail);
    static_assert((kConfig.dim_latent + kConfig.dim_rope) % 32 == 0);
    static_assert(kConfig.dim_latent % 256 == 0 && kConfig.dim_rope <= 64);
};

template <typename C>
struct ManyRowsMemory {
    RingMemory<C> rings;
    uint4 p[C::kHasRope ? 1 : C::kTile / 16][C::kHasRope ? 1 : 128];  // P of a tile
    float2 tops[128];        // the maxima that P is relative to, per thread of a consumer
    RowStates<C> states[2];  // work tiles take turns
    Barrier p_is_there[4];   // per warp of a consumer: it has shared P of a tile; one phase per tile
    CtaRange range;
    PairMemory pair;
};

template <typename C>
struct ManyRowsConsumer {
    using Element = typename C::Element;
    using Offsets = OutputOffsets<C::kRows>;
    using Buffers = typename ManyRowsOutput<C>::Buffers;
    static constexpr int kScores = C::kTile / 2;     // accumulators of S that a thread has
    static constexpr int kProducts = C::kTile / 16;  // P V, of 16 tokens each
    // Whether a tile may hold other data in place of keys that do not exist. Only with TMA: other loaders write zeros.
    static constexpr bool kMayLackKeys = C::kTma;
    using Scores = float[kScores];
    using Unnamed = typename UnnamedTokens<C>::Bits;
    using Probabilities = uint32_t[kProducts][4];

    ConsumerThread<C>& t;
    ManyRowsMemory<C>& smem;
    ManyRowsOutput<C> output;

    __device__ ManyRowsConsumer(ConsumerThread<C>& t, ManyRowsMemory<C>& smem) : t(t), smem(smem), output(t) {}

    // Tiles are numbered across all work tiles of the CTA.
    static __device__ int stage_of(uint32_t tile) { return tile % C::kStages; }
    static __device__ uint32_t phase_of(uint32_t tile) { return tile / C::kStages % 2; }
    __device__ unsigned char* keys_of(uint32_t tile) const { return t.rings.kv[stage_of(tile)]; }
    // Where a tile's owner leaves P for the other consumer: in the tile's rope columns, which only the scores need.
    __device__ uint4& shared_probabilities(uint32_t tile, int product) const {
        if constexpr (!C::kHasRope) return smem.p[product][t.thread];
        return reinterpret_cast<uint4*>(keys_of(tile) + C::kRopeSegment * C::kSegmentBytes)[product * 128 + t.thread];
    }

    __device__ void reset_state(const Offsets& offsets) {
#pragma unroll
        for (int i = 0; i < ManyRowsOutput<C>::kOutputs; ++i) output.o[i] = 0.f;
#pragma unroll
        for (int r = 0; r < 2; ++r) output.m[r] = offsets.out[output.row() + r * 8] < 0 ? kNoRow : -INFINITY;
        output.l[0] = output.l[1] = 0.f;
    }

    __device__ void wait_for_keys(uint32_t tile, int segment) {
        t.rings.kv_full[stage_of(tile)][C::full_barrier_of(segment)].wait(phase_of(tile));
        if constexpr (!C::kTma) fence_async_proxy();
    }
    // For a tile with fewer than kTile keys: waits for all segments, and zeroes the values of keys that do not exist.
    __device__ void complete_last_tile(uint32_t tile, int valid) {
        for (int segment = 0; segment < C::kSegments; ++segment) wait_for_keys(tile, segment);
        zero_values_16bit(t, keys_of(tile), valid);
        fence_async_proxy();
        t.sync_consumer();  // all values are zeroed before any warp multiplies with them or passes P on
    }

    __device__ uint64_t query_descriptor(int segment) const {
        return uniform(make_descriptor(t.rings.q[0] + segment * C::kQueryColumnBlockBytes, 0, 1024, Swizzle::k128B));
    }
    __device__ uint64_t key_descriptor(uint32_t tile, int segment) const {
        return uniform(
            make_descriptor(keys_of(tile) + segment * C::kSegmentBytes, 0, C::kTokenGroupBytes, Swizzle::k128B));
    }
    // Of this consumer's half of the columns.
    __device__ uint64_t value_descriptor(uint32_t tile) const {
        return uniform(make_descriptor(keys_of(tile) + t.consumer * (C::kHalf * C::kSegmentBytes), C::kSegmentBytes,
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
            const int segment = C::segment_in_turn(t.consumer, kSpanBegin[span]);
            q[span] = query_descriptor(segment);
            k[span] = key_descriptor(tile, segment);
        }
#pragma unroll
        for (int i = kBegin; i < kEnd; ++i) {
            if (C::is_waited_for(i)) wait_for_keys(tile, C::segment_in_turn(t.consumer, i));
            if (i == 0) t.profiler.mark(Event::kKeysArrived);
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
        t.profiler.mark(Event::kScores);
        if constexpr (C::kHasRope)
            t.sync_consumer();  // all warps have multiplied with the rope columns, where P will lie
        else
            __syncwarp();  // every lane has read which tokens have no keys, before lane 0 releases the stage
    }

    // By a warp that has read segments of a tile for the last time.
    __device__ void release(uint32_t tile, int release) {
        if (t.lane == 0) t.release_keys(stage_of(tile), release);
    }

    // Starts O += P V over a tile; `values` is the descriptor of its values. Callers make it before P is ready, because
    // making it takes a shuffle, which would delay the products.
    __device__ void start_values(const Probabilities& probabilities, uint64_t values) {
        using Product = WgmmaFromRegisters<C::kDimLatent / 2, Element, Major::kMN>;
        pin_registers(output.o);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kProducts; ++i)
            Product::mma(output.o, probabilities[i], advance(values, i * 2 * C::kTokenGroupBytes), true);
        wgmma_commit();
    }

    // Waits for these products, and releases this consumer's half of the columns, which nobody reads any more.
    __device__ void finish_values(uint32_t tile) {
        wgmma_wait<0>();
        pin_registers(output.o);
        release(tile, t.consumer);
        t.profiler.mark(Event::kValues);
    }

    // Masks the scores from the rows' key limits on. Row 0 has the lowest limit, `least_limit`.
    __device__ void mask(Scores& s, const WorkTile& work, int tile_token, int least_limit) {
        if (tile_token + C::kTile <= least_limit) return;
        const int limits[2] = {key_limit<C>(t.p, work, output.row()), key_limit<C>(t.p, work, output.row() + 8)};
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            if (tile_token + i / 4 * 8 + t.lane % 4 * 2 + i % 2 >= limits[output.row_of(i)]) s[i] = -INFINITY;
    }

    // Masks the scores of tokens without keys.
    __device__ void mask_unnamed(Scores& s, uint64_t unnamed) {
        unnamed >>= t.lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kScores; ++i)
            if (unnamed >> (i / 4 * 8 + i % 2) & 1) s[i] = -INFINITY;
    }

    // If a score, scaled to log2, exceeds the maximum in use by too much, takes the exact maximum and returns true: O
    // must be rescaled.
    __device__ bool refresh_maximum(const Scores& s, float (&factor)[2]) {
        float tops[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int i = 0; i < kScores; ++i) tops[output.row_of(i)] = fmaxf(tops[output.row_of(i)], s[i]);
        tops[0] *= t.p.scale_log2, tops[1] *= t.p.scale_log2;
        const bool refresh =
            __any_sync(~0u, tops[0] > output.m[0] + kStaleBound || tops[1] > output.m[1] + kStaleBound);
        if (refresh) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float top = max_over_lanes<4>(fmaxf(output.m[r], tops[r]));
                factor[r] = exp2_approx(output.m[r] - finite(top));
                output.m[r] = top;
                output.l[r] *= factor[r];
            }
        }
        return refresh;
    }

    // Computes P of this consumer's own tile and shares it with the other consumer. True if O must be rescaled.
    __device__ bool softmax(Scores& s, Probabilities& probabilities, float (&factor)[2], const WorkTile& work,
                            int tile_token, int least_limit, uint32_t tile, Unnamed unnamed) {
        if (unnamed) mask_unnamed(s, t.rings.unnamed.tokens(unnamed));
        if constexpr (!C::kLists) mask(s, work, tile_token, least_limit);
        const bool refreshed = refresh_maximum(s, factor);
        const float base[2] = {finite(output.m[0]), finite(output.m[1])};
#pragma unroll
        for (int i = 0; i < kScores; i += 2) {
            const float low = exp2_approx(fmaf(s[i], t.p.scale_log2, -base[output.row_of(i)]));
            const float high = exp2_approx(fmaf(s[i + 1], t.p.scale_log2, -base[output.row_of(i)]));
            output.l[output.row_of(i)] += low + high;
            probabilities[i / 8][i / 2 % 4] = pack<Element>(low, high);
        }
#pragma unroll
        for (int i = 0; i < kProducts; ++i)
            shared_probabilities(tile, i) = reinterpret_cast<const uint4&>(probabilities[i]);
        smem.tops[t.thread] = make_float2(output.m[0], output.m[1]);
        smem.p_is_there[t.warp].arrive();
        t.profiler.mark(Event::kSoftmax);
        return refreshed;
    }

    // Reads P and the maximum of a tile of the other consumer, and rescales O to that maximum.
    __device__ void take_probabilities(Probabilities& probabilities, uint32_t tile) {
        smem.p_is_there[t.warp].wait(tile % 2);
        t.profiler.mark(Event::kProbabilitiesArrived);
        if constexpr (C::kHasRope && !C::kTma) fence_async_proxy();
#pragma unroll
        for (int i = 0; i < kProducts; ++i) reinterpret_cast<uint4&>(probabilities[i]) = shared_probabilities(tile, i);
        const float2 top = smem.tops[t.thread];
        if (__any_sync(~0u, top.x != output.m[0] || top.y != output.m[1])) {
            const float factor[2] = {exp2_approx(output.m[0] - finite(top.x)),
                                     exp2_approx(output.m[1] - finite(top.y))};
            output.rescale(factor);
            output.m[0] = top.x, output.m[1] = top.y;
            output.l[0] *= factor[0], output.l[1] *= factor[1];
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
        const int least_limit = key_limit<C>(t.p, work, 0);
        if (t.consumer >= tiles) t.release_queries(0);
        for (int i = t.consumer; i <= tiles; i += 2) {
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
                unnamed = t.rings.unnamed.of(stage_of(own));  // the first segments have arrived
                start_other(other_probabilities, other);
                start_scores<kFirst, C::kSegments>(s, own);
                wgmma_wait<1>();  // for the values
                release(other, t.consumer);
                finish_scores(s);
                pin_registers(output.o);
            } else {
                start_scores<0, C::kSegments>(s, own);
                unnamed = t.rings.unnamed.of(stage_of(own));  // the first segments have arrived
                finish_scores(s);
            }
            const uint64_t values = value_descriptor(own);
            const bool refreshed = softmax(s, probabilities, factor, work, token, least_limit, own, unnamed);
            if (i + 2 >= tiles) t.release_queries(0);  // these were this consumer's last scores
            if (refreshed) output.rescale(factor);
            start_values(probabilities, values);
            finish_values(own);
        }
    }

    __device__ void finish_pair(const WorkTile&, const Offsets& offsets) {
        output.finish_pair(offsets, smem.states[0]);
    }
    template <bool kInRegisters>
    __device__ void combine_two(const Buffers& buffers, const Offsets& offsets) {
        output.template combine_two<kInRegisters>(buffers, offsets);
    }

    __device__ void run() {
        WorkCursor<C> cursor(t.p, t.range);
        WorkTile work;
        uint32_t first_tile = 0;
        bool in_registers = false;
        int work_index = 0;
        t.begin_launch();
        for (; cursor.next(work); ++work_index) {
            t.rings.q_full[0].wait(work_index % 2);
            reset_state(t.rings.offsets[offset_buffer(work_index)]);
            fence_async_proxy();
            t.profiler.mark(Event::kQueriesArrived);
            const int tiles = (work.token_end - work.token_begin + C::kTile - 1) / C::kTile;
            compute_work_tile(work, first_tile, tiles);
            first_tile += tiles;
            RowStates<C>& states = smem.states[work_index % 2];
            output.publish_state(states, work);
            if (t.paired()) break;
            in_registers = output.stays_in_registers(work, cursor.at_end());
            // Pinned: otherwise the address would be kept from the start of the work tile on.
            const auto& offsets = t.rings.offsets[offset_buffer(pinned(work_index))];
            output.finish_work_tile(work, offsets, states, in_registers);
        }
        t.sync_consumers();  // all split buffers are complete
        end_launch<ManyRowsQuads<C>>(t, *this, work, work_index, false, in_registers);
    }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, 1)
    many_rows_decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ BoxOf<C> box) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& smem = *reinterpret_cast<ManyRowsMemory<C>*>(bytes);
    run_kernel<C, ManyRowsConsumer<C>, ManyRowsQuads<C>, 4 * C::kRangeCtas>(p, box, smem, [&] {
        for (Barrier& barrier : smem.p_is_there) barrier.init(32);
    });
}

}  // namespace mla::hopper
