// MLA decode for Hopper from e4m3 caches with both products in e4m3, up to 64 rows (query heads x query tokens) an
// m-block: rows on wgmma's 64-row side. Faster than many_rows_fp8, and less exact.
//
//   S[64 x tokens] = Q[64 x d] * K^T[d x tokens]      A = Q, B = K, both from shared memory: queries.cuh
//   T[64 x d_c]    = P[64 x tokens] * V[tokens x d_c] A = P from registers, B = V^T: load/transpose_values.cuh
//   O[64 x d_c]   += factor * T                       in fp32, for every tile
//
// grid, block, loading, pairs   as in few_rows/kernel.cuh; clusters as in many_rows/kernel.cuh
//   consumers  The consumers own alternate tiles (64 tokens): a tile's owner computes its scores and softmax. Both
//              consumers multiply the values of every tile, each into its half of the d_c columns. A thread passes its
//              32 B of P to the same thread of the other consumer.
//
//   consumer 0 (first half of the columns)   consumer 1 (second half)                transposing warpgroup
//   ---------------------------------------  --------------------------------------  ---------------------------
//   S = Q K^T of tile 0         --> scored   S = Q K^T of tile 1         --> scored  transpose tile 0
//   softmax of tile 0, share P               softmax of tile 1, share P              transpose tile 1
//   O += P V of tile 0                       take P of tile 0, O += P V of tile 0
//   S = Q K^T of tile 2         --> scored   O += P V of tile 1
//   softmax of tile 2, share P               S = Q K^T of tile 3         --> scored  transpose tile 2
//   take P of tile 1, O += P V of tile 1     softmax of tile 3, share P              transpose tile 3
//   O += P V of tile 2                       take P of tile 2, O += P V of tile 2
//   ...                                      ...
//
// shared memory (ManyRowsFp8ProductsMemory)
//   kv       kStages tiles, [column block][64 tokens][64 B], swizzled by 64 B; K-major as K. Once the scores are
//            computed, latents are transposed in place, and the rotary columns' place carries P to the other consumer
//   q        [column block][64 rows of high terms, then of low ones][64 B], K-major, swizzled
//
// softmax  P of a tile is relative to the exact maximum of the tile, which becomes 448: P has all of e4m3's range. A
//          tile's products are weighed as they are added to O, which is relative to the maximum of an earlier tile.
//          Only if the tile's is greater by kFar (log2), O is rescaled. So no softmax waits for another.
//
// invariants
//   * tiles are computed in order, and consumer 0 owns the first tile of each work tile, so the order of sums does not
//     depend on earlier work tiles. O of both consumers is relative to the same maxima
//   * keys outside [token_begin, token_end), splits, order of sums: as in few_rows/kernel.cuh
#pragma once
#include "decode/hopper/config.cuh"
#include "decode/hopper/many_rows/output.cuh"
#include "ptx/wgmma.cuh"
#include "queries.cuh"

namespace mla::hopper {

template <typename Element, DecodeConfig kConfig>
struct ManyRowsFp8ProductsConfig : KernelConfig<Element, kConfig> {
    using Layout = typename KernelConfig<Element, kConfig>::Layout;
    static constexpr int kMBlockCost = 3;
    static constexpr bool kCombinesTwo = true, kTransposesValues = true, kFourColumns = true;
    static constexpr int kTile = 64;
    static constexpr bool kByTokens = false;
    static constexpr int kSlotStride = 8;

    static constexpr int kKeyColumnBlocks = column_blocks(kConfig.dim_latent + kConfig.dim_rope);  // of 64 columns
    static constexpr int kSegments = kKeyColumnBlocks, kSegmentColumnBlocks = 1;
    static constexpr int kBlockBytes = 64, kBlockColumns = 64;              // of a column block of a token
    static constexpr int kLoaderRegisters = 40, kTransposerRegisters = 40;  // consumers have 216
    static constexpr int kTokenGroupBytes = 512, kSegmentBytes = kTile / 8 * kTokenGroupBytes;
    static constexpr int kStageBytes = kSegments * kSegmentBytes;
    static constexpr int kRopeSegment = kConfig.dim_latent / 64;
    static constexpr int kHalf = kRopeSegment / 2;  // segments of a consumer
    static constexpr int kReleases = 1, kFirstRelease = kSegments, kPrefetchTiles = 0;
    static constexpr int kFullBarriers = 1;
    // Of the column blocks of queries, how many have two terms: the rotary one, and as many of each half.
    static constexpr int kTwoTermBlocks = kConfig.two_term_blocks;
    static_assert(kTwoTermBlocks % 2 == 1 || kTwoTermBlocks == 0);

    static __device__ int release_of(int) { return 0; }
    static __device__ int full_barrier_of(int) { return 0; }
    static __device__ constexpr int segment_in_turn(int, int i) { return i; }

    static_assert(kConfig.rows == 64 && kConfig.query_buffers == 1 && !kConfig.for_one_m_block);
    static_assert(Layout::kElementBytes == 1 && !Layout::kHasTail && kConfig.tma && !kConfig.lists);
    static_assert(kConfig.dim_latent == 512 && kConfig.dim_rope == 64);
};

template <typename C>
struct ManyRowsFp8ProductsMemory {
    RingMemory<C> rings;
    RowScale scales[C::kRows];
    float tops[C::kStages][C::kRows];  // the maxima that P of a tile is relative to
    RowStates<C> states[2];            // work tiles take turns
    float cache_scale;
    TranspositionMemory<C> transposition;
    Barrier p_is_there[C::kStages][4];  // per warp of the owner: it has shared P of a tile
    CtaRange range;
    PairMemory pair;
};

template <typename C>
struct ManyRowsFp8ProductsConsumer {
    using Element = typename C::Element;
    using Offsets = OutputOffsets<C::kRows>;
    using Buffers = typename ManyRowsOutput<C>::Buffers;
    using Queries = ProductQueries<C>;
    static constexpr int kScores = C::kTile / 2;  // accumulators of S that a thread has
    static constexpr int kSums = 16;              // accumulators of T at a time
    static constexpr int kSteps = 128 / kSums, kBuffers = 3;
    static constexpr float kHeadroom = 8.8073549f;  // log2(448)
    static constexpr float kFar = 32.f;
    using Scores = float[kScores];
    using Probabilities = uint32_t[2][4];  // A fragments of 32 tokens
    using PerRow = float[2];               // of this thread's two rows

    ConsumerThread<C>& t;
    ManyRowsFp8ProductsMemory<C>& smem;
    ManyRowsOutput<C> output;

    __device__ ManyRowsFp8ProductsConsumer(ConsumerThread<C>& t, ManyRowsFp8ProductsMemory<C>& smem)
        : t(t), smem(smem), output(t) {}

    // Tiles are numbered across all work tiles of the CTA.
    static __device__ int stage_of(uint32_t tile) { return tile % C::kStages; }
    static __device__ uint32_t phase_of(uint32_t tile) { return tile / C::kStages % 2; }
    __device__ unsigned char* keys_of(uint32_t tile) const { return t.rings.kv[stage_of(tile)]; }
    // Where a tile's owner leaves P for the other consumer.
    __device__ uint4& shared_probabilities(uint32_t tile, int step) const {
        return reinterpret_cast<uint4*>(keys_of(tile) + C::kRopeSegment * C::kSegmentBytes)[step * 128 + t.thread];
    }

    __device__ void reset_state() {
#pragma unroll
        for (int i = 0; i < ManyRowsOutput<C>::kOutputs; ++i) output.o[i] = 0.f;
        output.m[0] = output.m[1] = -INFINITY;
        output.l[0] = output.l[1] = 0.f;
    }

    // Descriptors of queries and keys, from a column block on.
    struct Operands {
        uint64_t queries, keys;
    };
    __device__ Operands operands(uint32_t tile, int block) const {
        return {
            uniform(make_descriptor(t.rings.q[0] + block * C::kQueryColumnBlockBytes, 0, 512, Swizzle::k64B)),
            uniform(make_descriptor(keys_of(tile) + block * C::kSegmentBytes, 0, C::kTokenGroupBytes, Swizzle::k64B))};
    }
    // Starts S (+)= Q K^T over column blocks.
    template <int kBlocks, bool kIsRope, bool kIsFirst>
    __device__ void start_scores(Scores& s, const Operands& from) {
        using Product = WgmmaE4m3<C::kTile>;
        wgmma_fence();
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int column = 0; column < 64; column += 32)
#pragma unroll
                for (int term = 0; term < 1 + Queries::has_two_terms(kIsRope ? C::kRopeSegment : b); ++term)
                    Product::mma(
                        s, advance(from.queries, b * C::kQueryColumnBlockBytes + term * Queries::kTermBytes + column),
                        advance(from.keys, b * C::kSegmentBytes + column),
                        !kIsFirst || b > 0 || column > 0 || term > 0);
    }
    // S of this consumer's tile: its own half of the columns first, which is then transposed first.
    __device__ void compute_scores(Scores& s, uint32_t tile) {
        const int own = t.consumer * C::kHalf, other = C::kHalf - own;
        const Operands first = operands(tile, own);  // takes shuffles: before the wait
        t.rings.kv_full[stage_of(tile)][0].wait(phase_of(tile));
        t.profiler.mark(Event::kKeysArrived);
        start_scores<C::kHalf, false, true>(s, first);
        wgmma_commit();
        start_scores<1, true, false>(s, operands(tile, C::kRopeSegment));
        start_scores<C::kHalf, false, false>(s, operands(tile, other));
        wgmma_commit();
        wgmma_wait<1>();
        if (t.lane == 0) smem.transposition.scored[stage_of(tile)][0].arrive();
        wgmma_wait<0>();
        pin_registers(s);
        if (t.lane == 0) smem.transposition.scored[stage_of(tile)][1].arrive();
        t.profiler.mark(Event::kScores);
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

    // Computes P, the maxima that it is relative to, and its sums over this thread's tokens. Two chains for each row.
    __device__ void softmax(Scores& s, Probabilities& probabilities, PerRow& tops, PerRow& sums,
                            const RowScale (&rows)[2]) {
        float most[2][2] = {{s[0], s[1]}, {s[2], s[3]}}, sum[2][2] = {}, base[2];
#pragma unroll
        for (int i = 4; i < kScores; ++i) {
            float& of = most[output.row_of(i)][i % 2];
            of = fmaxf(of, s[i]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) most[r][0] = fmaxf(most[r][0], most[r][1]);
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
            const float first = __shfl_xor_sync(~0u, most[0][0], distance);
            const float second = __shfl_xor_sync(~0u, most[1][0], distance);
            most[0][0] = fmaxf(most[0][0], first);
            most[1][0] = fmaxf(most[1][0], second);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            tops[r] = fmaxf(most[r][0] * rows[r].factor - kHeadroom, rows[r].least);
            base[r] = finite(tops[r]);
        }
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
            const int r = output.row_of(i);
            s[i] = exp2_approx(fmaf(s[i], rows[r].factor, -base[r]));
            sum[r][i % 2] += s[i];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) sums[r] = sum[r][0] + sum[r][1];
        // The order of tokens in V^T is such that a thread's scores are those of its fragments.
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float* of = s + i / 2 * 8 + i % 2 * 2;  // register i % 4 of fragment i / 4
            probabilities[i / 4][i % 4] = pack_e4m3(of[0], of[1]) | pack_e4m3(of[4], of[5]) << 16;
        }
    }
    static __device__ uint32_t pack_e4m3(float low, float high) {
        return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
    }

    // Leaves P for both consumers, in place of the rotary columns.
    __device__ void share(const Probabilities& probabilities, const PerRow& tops, uint32_t tile) {
        // All warps have multiplied by these.
        smem.transposition.scored[stage_of(tile)][1].wait(phase_of(tile));
#pragma unroll
        for (int i = 0; i < 2; ++i) shared_probabilities(tile, i) = reinterpret_cast<const uint4&>(probabilities[i]);
        if (t.lane % 4 == 0) {
            smem.tops[stage_of(tile)][output.row()] = tops[0];
            smem.tops[stage_of(tile)][output.row() + 8] = tops[1];
        }
        __syncwarp();  // lane 0 arrives for all lanes
        if (t.lane == 0) smem.p_is_there[stage_of(tile)][t.warp].arrive();
        t.profiler.mark(Event::kSoftmax);
    }

    __device__ void take(Probabilities& probabilities, PerRow& tops, uint32_t tile) {
        smem.p_is_there[stage_of(tile)][t.warp].wait(phase_of(tile));
#pragma unroll
        for (int i = 0; i < 2; ++i) reinterpret_cast<uint4&>(probabilities[i]) = shared_probabilities(tile, i);
#pragma unroll
        for (int r = 0; r < 2; ++r) tops[r] = smem.tops[stage_of(tile)][output.row() + r * 8];
    }

    // Weights of a tile's products, relative to the maxima of O. If one would be too large, O gets the tile's maximum.
    __device__ void weigh(const PerRow& tops, PerRow& weights) {
        if (__any_sync(~0u, tops[0] > output.m[0] + kFar || tops[1] > output.m[1] + kFar)) {
            float factor[2] = {1.f, 1.f};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (!(tops[r] > output.m[r] + kFar)) continue;
                factor[r] = exp2_approx(output.m[r] - tops[r]);
                output.m[r] = tops[r];
                output.l[r] *= factor[r];
            }
            output.rescale(factor);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) weights[r] = exp2_approx(tops[r] - finite(output.m[r]));
    }

    // Of this consumer's half of the columns.
    __device__ uint64_t value_descriptor(uint32_t tile) const {
        return uniform(make_descriptor(keys_of(tile) + t.consumer * (C::kHalf * C::kSegmentBytes), 0,
                                       C::kTokenGroupBytes, Swizzle::k64B));
    }
    // Starts T = P V over a tile for the `step`-th 32 columns of this consumer.
    __device__ void start_product(float (&sums)[kSums], const Probabilities& probabilities, uint64_t values, int step) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; ++i)
            WgmmaE4m3<kSums * 2>::mma(sums, probabilities[i], advance(values, step * kSums * 2 * 64 + i * 32), i > 0);
        wgmma_commit();
    }

    // O += weights * P V over a tile, and releases it.
    __device__ void multiply_values(const Probabilities& probabilities, const PerRow& weights, uint64_t values,
                                    uint32_t tile) {
        smem.transposition.values_are_there[stage_of(tile)][t.consumer].wait(phase_of(tile));
        t.profiler.mark(Event::kProbabilitiesArrived);
        float sums[kBuffers][kSums];
#pragma unroll
        for (int step = 0; step < kBuffers - 1; ++step) start_product(sums[step], probabilities, values, step);
        fence_async_proxy();  // P was read where keys will be loaded again
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int next = step + kBuffers - 1, pending = min(kBuffers - 1, kSteps - 1 - step);
            if (next < kSteps) start_product(sums[next % kBuffers], probabilities, values, next);
            if (pending == 2)
                wgmma_wait<2>();
            else if (pending == 1)
                wgmma_wait<1>();
            else
                wgmma_wait<0>();
            pin_registers(sums[step % kBuffers]);
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                float& o = output.o[step * kSums + i];
                o = fmaf(sums[step % kBuffers][i], weights[output.row_of(i)], o);
            }
        }
        __syncwarp();  // lane 0 arrives for all lanes
        if (t.lane == 0) t.release_keys(stage_of(tile), 0);
        t.profiler.mark(Event::kValues);
    }

    // Computes scores and P of one of this consumer's tiles. Returns the sums of P.
    __device__ void attend(const WorkTile& work, uint32_t tile, int tile_token, int least_limit, bool last,
                           PerRow& sums) {
        Scores s;
        Probabilities probabilities;
        PerRow tops;
        const RowScale rows[2] = {smem.scales[output.row()], smem.scales[output.row() + 8]};
        compute_scores(s, tile);
        if (last) t.release_queries(0);
        if (const auto unnamed = t.rings.unnamed.of(stage_of(tile))) mask_unnamed(s, t.rings.unnamed.tokens(unnamed));
        mask(s, work, tile_token, least_limit);
        softmax(s, probabilities, tops, sums, rows);
        share(probabilities, tops, tile);
    }

    // Computes a work tile, whose first tile is number `first_tile` of this CTA. An iteration covers two tiles of the
    // schedule above: the scores of this consumer's own, then the values of the other consumer's tile before it, and
    // its own values.
    __device__ void compute_work_tile(const WorkTile& work, uint32_t first_tile, int tiles) {
        const int least_limit = key_limit<C>(t.p, work, 0);
        if (t.consumer >= tiles) t.release_queries(0);
#pragma unroll 1
        for (int i = t.consumer; i <= tiles; i += 2) {
            PerRow sums = {};
            if (i < tiles)
                attend(work, first_tile + i, work.token_begin + i * C::kTile, least_limit, i + 2 >= tiles, sums);
            // The tile before, and this one.
#pragma unroll 1
            for (int j = max(i - 1, 0); j <= min(i, tiles - 1); ++j) {
                Probabilities probabilities;
                PerRow tops, weights;
                const uint64_t values = value_descriptor(first_tile + j);
                take(probabilities, tops, first_tile + j);
                weigh(tops, weights);
                if (j == i) {
#pragma unroll
                    for (int r = 0; r < 2; ++r) output.l[r] += sums[r] * weights[r];
                }
                multiply_values(probabilities, weights, values, first_tile + j);
            }
        }
    }

    __device__ void finish_pair(const WorkTile&, const Offsets& offsets) {
        output.finish_pair(offsets, smem.states[0]);
    }
    template <bool kInRegisters>
    __device__ void combine_two(const Buffers& buffers, const Offsets& offsets) {
        output.template combine_two<kInRegisters>(buffers, offsets);
    }

    __device__ void prepare_queries(const Offsets& offsets) {
        const float cache_scale = *t.p.kv_scale;
        if (threadIdx.x == 128) smem.cache_scale = cache_scale;
        Queries::convert(t, smem.scales, offsets, t.p.scale_log2 * cache_scale);
        fence_async_proxy();
        t.sync_consumers();
        t.profiler.mark(Event::kQueriesArrived);
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
            prepare_queries(t.rings.offsets[offset_buffer(work_index)]);
            reset_state();
            const int tiles = (work.token_end - work.token_begin + C::kTile - 1) / C::kTile;
            compute_work_tile(work, first_tile, tiles);
            first_tile += tiles;
            output.rescale({smem.cache_scale, smem.cache_scale});
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
__global__ void __launch_bounds__(kThreads + 128, 1)
    many_rows_fp8_products_decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ BoxOf<C> box) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& smem = *reinterpret_cast<ManyRowsFp8ProductsMemory<C>*>(bytes);
    run_kernel<C, ManyRowsFp8ProductsConsumer<C>, ManyRowsQuads<C>, 8 * C::kRangeCtas>(p, box, smem, [&] {
        smem.transposition.init();
        for (auto& of_warps : smem.p_is_there)
            for (Barrier& barrier : of_warps) barrier.init(1);
    });
}

}  // namespace mla::hopper
