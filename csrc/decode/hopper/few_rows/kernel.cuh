// MLA decode for Hopper, up to 24 rows (query heads x query tokens) an m-block, or 32 with latents of 256 columns: the
// operands are swapped.
//
//   S^T[tokens x rows] = K[tokens x d] * Q^T        A = K, B = Q^T: wgmma's 64-row side holds tokens, and N is
//   O^T[d_c x rows]   += V^T[d_c x tokens] * P^T    the number of rows rounded up to 8: few heads waste nothing.
//
// grid   at most one persistent CTA per multiprocessor, walking the range that the planner gave it (schedule/work.cuh);
//        in clusters of two where there may be pairs (hopper/pair.cuh) or keys are shared
// block  3 warpgroups: a loader (load/loader.cuh) and two consumers, which take alternate tiles of kTile tokens, each
//        with its own O^T, maximum m and sum l
//
//   loader                       consumer 0                           consumer 1
//   ---------------------------  -----------------------------------  -----------------------------------
//   queries --> q_full           wait q_full                          wait q_full
//   tile 0 --> kv_full[0]        wait kv_full[0][segment]             -
//   tile 1 --> kv_full[1]        S^T = K Q^T                          wait kv_full[1][segment]
//   wait kv_empty[0]             P^T = exp2(S^T - m), l += P^T        S^T = K Q^T
//   -                            sync: p_is_there                     P^T = exp2(S^T - m), l += P^T
//   -                            O^T += V^T P^T, arrive kv_empty[0]   sync: p_is_there
//   tile 2 --> kv_full[0]        tile 2 ...                           O^T += V^T P^T, arrive kv_empty[1]
//   ...                          ...                                  ...
//   queries of the next work     arrive q_empty                       arrive q_empty
//   tile                         finish_work_tile: see merge.cuh
//
// clusters   With kRangeCtas = 2 (fp8 keys by TMA) the CTAs of a cluster compute two neighbouring m-blocks from the
//            same keys; the second m-block may have no rows. See many_rows/kernel.cuh.
//
// shared memory (FewRowsMemory)
//   kv       kStages tiles of kTile tokens, in kSegments segments of their columns, each in groups of 8 tokens:
//            [column block][8][128 B], swizzled by 128 B. The same bytes are K (K-major: a group is 8 rows of M) and
//            V^T (MN-major: a group is 8 steps of wgmma's K dimension).
//   q        kQueryBuffers x [column block][N][128 B], K-major, swizzled
//   weights  P^T of tiles, kWeightBuffers per consumer. 16-bit keys: [N / 8][kTile / 8] core matrices of 8 x 8,
//            K-major, not swizzled; fp8 keys: see keys_e4m3.cuh. At the end of a work tile, the consumers' exchange
//            takes their place
//
// e4m3 keys take half the space: [column block][8][64 B], swizzled by 64 B. Records lie 656 B apart in memory, so a box
// with rows of 64 B would read half of the 32-byte sectors that it touches twice. Their column blocks therefore have
// 128 columns, which share a scale, and 128 B; the last segment has scales and rotary columns
// (keys_records.cuh). With fp8 keys, queries and P are sums of two e4m3 terms (keys_e4m3.cuh).
//
// softmax  The tokens of each row are spread over all four warps of a consumer. Exponentials use a maximum that may be
//          stale by up to 8 (in log2; with fp8 keys, 4): P then stays below 2^8, and fp32 sums and 16-bit P keep their
//          relative precision (with fp8 keys: two_terms.cuh). One barrier per tile both publishes P and tells all warps
//          whether any score exceeded that bound; only then is the maximum refreshed and O rescaled. With fp8 keys, the
//          maximum may be lowered after a tile that refreshed it, if a quarter of that tile (one warp's tokens) has far
//          lower scores. Otherwise a dominant key, with a far greater score than others, would leave no bits for the
//          probabilities of all later keys.
//
// invariants
//   * keys outside [token_begin, token_end) are loaded only if they share a box with a key inside; they are masked in S
//     and zeroed in V (0 x NaN is NaN). For tokens whose entries name no key, a stage holds zeros (UnnamedTokens)
//   * CTAs that share an m-block wait for each other (schedule/splits.cuh; pairs: hopper/pair.cuh) only after all
//     their own work
//   * a consumer writes P of a tile when all of its warps have multiplied by what the buffer held. With two buffers,
//     they have since passed the barrier of the tile in the other one; with one (kWeightBuffers), there is a barrier
//     for that
//   * a warp may zero values that other warps still read as keys: their scores are masked, whatever they are
//   * a fixed order everywhere: the same inputs and plan give the same bits
#pragma once
#include "keys.cuh"

namespace mla::hopper {

// Column blocks of a segment. Three warps copy keys of small pages, equally many column blocks each; with TMA, few
// boxes are best.
template <typename Layout, int kBlocksOf64, bool kTma>
constexpr int few_rows_segment = Layout::kScales > 0            ? Layout::kScales / 2
                                 : kBlocksOf64 % 3 == 0         ? kBlocksOf64 / 3
                                 : kTma && kBlocksOf64 % 2 == 0 ? 2
                                                                : 1;
template <typename Layout, int kBlocksOf64, bool kTma, int kSegment = few_rows_segment<Layout, kBlocksOf64, kTma>>
using FewRowsStage = TransposedStage<Layout, kBlocksOf64, kTma, kSegment, (kBlocksOf64 / kSegment + 2) / 3>;

template <typename Element, DecodeConfig kConfig, typename Base = KernelConfig<Element, kConfig>>
struct FewRowsConfig : Base, FewRowsStage<typename Base::Layout, column_blocks(Base::kDim), kConfig.tma> {
    using Layout = typename Base::Layout;
    static constexpr int kMBlockCost = 2;
    static constexpr bool kTwoTerms = Layout::kElementBytes == 1;  // queries and P are sums of two e4m3
    static constexpr bool kByTokens = false;
    static constexpr int kSlotStride = kConfig.lists ? 0 : kConfig.tma ? 8 : 1;

    // Consumers get the rest of kRegisters. With fp8 keys, most need more than a loader with 72 leaves them. A loader
    // of shared keys needs more than 40.
    static constexpr int kTmaRegisters = kConfig.range_ctas == 2 ? 56 : 40;
    static constexpr int kLoaderRegisters = !kTwoTerms ? 72 : kConfig.tma ? kTmaRegisters : Layout::kHasTail ? 72 : 56;
    static constexpr int kBlocks = kConfig.dim_latent / 64;  // m64 blocks of O^T
    static constexpr bool kConsumersMerge = true, kCombinesTwo = false;
    // What a CTA of a pair receives (pair.cuh) may be larger than queries without rotary columns.
    static constexpr int kQueryBytes = Base::kQueryBytes + (kConfig.dim_rope == 0) * Base::kQueryColumnBlockBytes;
    static constexpr float kStaleBound = kTwoTerms ? 4.f : mla::kStaleBound;
    static constexpr bool kFallingMaximum = kTwoTerms;
    // With fp8 keys, exponentials, at most 2^kStaleBound, are multiplied by this. Errors of two terms have a least
    // size, so the larger P is, the smaller is their relative error.
    static constexpr float kWeightScale = kE4m3Max / (1 << static_cast<int>(kStaleBound));
    // Bytes of P^T of a tile: 16 bits per element; with records, as many for each scale of a token.
    static constexpr int kWeightBytes =
        kTransposedTile * kConfig.rows * 2 * (Layout::kScales > 0 ? Layout::kScales : 1);
    // Of a consumer. With two, no barrier is needed before it writes P^T. With records, shared memory has no room for
    // two; with two terms of 24 rows, no register is free for the address.
    static constexpr int kWeightBuffers = Layout::kScales > 0 || (kTwoTerms && kConfig.rows == 24) ? 1 : 2;
    // Of query column blocks, those that are multiplied with e4m3 keys.
    static constexpr int kFp8Blocks = Layout::kHasTail ? kBlocks : column_blocks(kConfig.dim_latent + kConfig.dim_rope);
    static constexpr int kQueryTermBytes = kFp8Blocks * kConfig.rows * 128;

    static_assert(kConfig.rows % 8 == 0 && kConfig.rows * kBlocks <= 24 * 8);  // O^T has to fit in registers
    // Within a work tile, each stage belongs to one consumer. With an odd number of stages, a consumer would wait for
    // only every other phase of a kv_full, and the parity cannot distinguish the awaited phase from the one two phases
    // earlier. (Consumers of many_rows_fp8 know by other means that the phase in between is complete.)
    static_assert(kConfig.stages % 2 == 0);
    static_assert((kConfig.dim_latent + kConfig.dim_rope) % 32 == 0 && kConfig.dim_latent % 128 == 0);
};

template <typename C, typename Keys>
struct FewRowsMemory {
    RingMemory<C> rings;
    alignas(1024) union {
        typename Keys::Memory keys;
        MergeExchange<C> exchange;  // at the end of a work tile
    } scratch;
    typename Keys::Scales scales;
    OutputMemory<C> output;
    CtaRange range;
    PairMemory pair;
};

template <typename C, FewRowsKeys<C> Keys>
struct FewRowsConsumer {
    using Buffers = SplitBuffers<TransposedQuads<C>>;
    static constexpr int kThreadRows = C::kRows / 4, kScores = C::kRows / 2;
    // In log2: scores that are lower than the maximum by kFar are far below it; the maximum falls by kFall. O stays in
    // the range of fp32 through all falls of a work tile.
    static constexpr float kFar = 8.f, kFall = 12.f;
    static constexpr int kMostFalls = 6;

    ConsumerThread<C>& t;
    FewRowsMemory<C, Keys>& smem;
    Keys keys;
    FewRowsOutput<C> output;
    int falls;  // twice their number in this work tile, plus 1 if the maximum falls with the next tile

    __device__ FewRowsConsumer(ConsumerThread<C>& t, FewRowsMemory<C, Keys>& smem)
        : t(t), smem(smem), keys(t, smem.scratch.keys, smem.scales), output(t, smem.scratch.exchange, smem.output) {}

    __device__ void reset_state() {
#pragma unroll
        for (int b = 0; b < C::kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < kScores; ++i) output.blocks.o[b][i] = 0.f;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            output.m[i] = -INFINITY;
            output.l[i] = 0.f;
        }
    }

    __device__ void mask(float (&s)[kScores], WorkTile work, int tile_token) {
        // Pinned: otherwise all rows' limits would be computed before the loop over tiles, and held in registers.
        if constexpr (!C::kForOneMBlock) work.m_block = pinned(work.m_block);
        const int token = tile_token + t.warp * 16 + t.lane / 4;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            int limit = key_limit<C>(t.p, work, row_of(t.lane, i));
#pragma unroll
            for (int k = 0; k < 2; ++k)  // the thread's two tokens, 8 apart
                if (token + k * 8 >= limit) s[i / 2 * 4 + k * 2 + i % 2] = -INFINITY;
        }
    }

    // Writes P^T = exp2(S^T - m) to shared memory, as core matrices [row][token], and sums it over the thread's tokens.
    __device__ void store_weights(const float (&s)[kScores], unsigned char* target, float (&sums)[kThreadRows]) {
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            float e[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                e[i] = exp2_approx(s[j * 4 + i] - finite(output.m[j * 2 + i % 2]));
            }
            sums[j * 2] = e[0] + e[2];
            sums[j * 2 + 1] = e[1] + e[3];
            keys.store_weights(target, j, e);
        }
    }

    // The new maximum is the greater of this tile's and the one in use, which is first lowered by `fall`. Rescales O
    // and l to it. True if this warp's scores of some row are far below it.
    __device__ bool refresh_maximum(const float (&s)[kScores], bool first, float fall) {
        float tops[kThreadRows];
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) tops[i] = fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + 2 + i % 2]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)  // rows innermost: their shuffles overlap
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) tops[i] = fmaxf(tops[i], __shfl_xor_sync(~0u, tops[i], distance));
        if (t.lane < 4) {
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i)
                output.blocks.memory.warp_rows[t.consumer][t.warp][row_of(t.lane, i)] = tops[i];
        }
        t.sync_consumer();  // every warp's maxima are written
        bool far = false;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            float top = C::kFallingMaximum ? output.m[i] - fall : output.m[i];
#pragma unroll
            for (int w = 0; w < 4; ++w)
                top = fmaxf(top, output.blocks.memory.warp_rows[t.consumer][w][row_of(t.lane, i)]);
            float factor = exp2_approx(output.m[i] - finite(top));
            output.m[i] = top;
            if constexpr (C::kFallingMaximum) far |= tops[i] < top - kFar;
            if (first) continue;  // O and l are zero
            output.l[i] *= factor;
#pragma unroll
            for (int b = 0; b < C::kBlocks; ++b) {
                output.blocks.o[b][i / 2 * 4 + i % 2] *= factor;
                output.blocks.o[b][i / 2 * 4 + 2 + i % 2] *= factor;
            }
        }
        return far;
    }

    // After a refresh: counts it if it was a fall. If `far` (some warp's scores of some row are far below the maximum),
    // the maximum falls with the next tile, at most kMostFalls times in a work tile.
    __device__ void count_fall(bool first, bool far) {
        falls = first ? 0 : falls + (falls & 1);
        falls += far && falls < 2 * kMostFalls;
    }

    // The barrier after which this consumer's P^T of a tile is in shared memory. Also returns, to every thread, whether
    // any of them passed true.
    __device__ bool p_is_there(bool value) const { return t.any_in_consumer(value); }

    // P^T of a tile, with the maximum in use. If a score exceeds it by too much, refreshes the maximum and computes P^T
    // again. If there is none yet, or it falls with this tile, refreshes it first.
    __device__ void softmax(const float (&s)[kScores], unsigned char* weights, bool first) {
        float sums[kThreadRows] = {};
        const bool fall = C::kFallingMaximum && !first && falls & 1;
        bool refresh = first || fall, exceeds = false, far = false;
        do {
            if (refresh)
                far = refresh_maximum(s, first, fall ? kFall : 0.f);
            else {
                // All warps have multiplied by P^T of this consumer's previous tile.
                if constexpr (C::kWeightBuffers == 1) t.sync_consumer();
#pragma unroll
                for (int i = 0; i < kScores; ++i) exceeds |= s[i] > output.m[row_of_score(i)] + C::kStaleBound;
            }
            store_weights(s, weights, sums);
            keys.publish_weights();
            if constexpr (C::kFallingMaximum) {  // what is voted on depends on whether there was a refresh
                const bool any = p_is_there(refresh ? far : exceeds);
                if (refresh) count_fall(first, any);
                exceeds = any && !refresh;
            } else {
                exceeds = p_is_there(exceeds && !refresh);
            }
            refresh = true;
        } while (exceeds);
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) output.l[i] += sums[i];
        t.profiler.mark(Event::kSoftmax);
    }

    // Computes one of this consumer's tiles, which begins at token `tile_token`. `first`: its first one of a work tile.
    // All rows see the keys below `least_limit`; some rows see more.
    __device__ void compute_tile(const WorkTile& work, int tile_token, int least_limit,
                                 const PipelineState<C::kStages>& ring, int q_buffer, unsigned char* weights,
                                 bool first) {
        unsigned char* kv = t.rings.kv[ring.stage];
        float s[kScores];
        keys.scores(s, ring, q_buffer);
        const int valid = work.token_end - tile_token;
        keys.scores_are_known(kv, valid);
        const bool past_a_limit = !C::kLists && tile_token + C::kTile > least_limit;  // no limit is past the last key
        // One branch for all that few tiles need; what only one of the two reasons calls for does no harm.
        if (past_a_limit || t.rings.unnamed.of(ring.stage, t.warp) != 0) {
            output.blocks.mask_unnamed(s, ring.stage);
            if constexpr (!C::kLists) {
                if (valid < C::kTile) keys.zero_values(kv, valid);
                mask(s, work, tile_token);
            }
        }
        softmax(s, weights, first);
        keys.accumulate(output.blocks.o, kv, weights);
        if (t.lane == 0) t.release_keys(ring.stage, 0);
    }

    // Computes a work tile. Consumer 0 takes the first tile, so that the bits of an m-block do not depend on the
    // m-blocks before it.
    __device__ void compute_work_tile(const WorkTile& work, int q_buffer, PipelineState<C::kStages>& ring) {
        const int least_limit = key_limit<C>(t.p, work, 0);
        uint32_t tile = 0;
        for (int token = work.token_begin; token < work.token_end; token += C::kTile, ++tile) {
            if (tile % 2 == t.consumer)
                compute_tile(work, token, least_limit, ring, q_buffer,
                             smem.scratch.keys.weights[t.consumer][tile / 2 % C::kWeightBuffers], tile < 2);
            ring.advance();
        }
    }

    __device__ void finish_pair(const WorkTile& work, const OutputOffsets<C::kRows>& offsets) {
        output.finish_pair(keys, work, offsets);
    }

    __device__ void run() {
        PipelineState<C::kStages> ring;
        WorkCursor<C> cursor(t.p, t.range);
        WorkTile work;
        bool announced = false;
        int work_index = 0;
        t.begin_launch();
        for (; !announced && cursor.next(work); ++work_index) {
            reset_state();
            const int q_buffer = work_index % C::kQueryBuffers;
            const float cache_scale = keys.cache_scale();
            t.rings.q_full[q_buffer].wait(work_index / C::kQueryBuffers % 2);
            keys.prepare_queries(q_buffer, cache_scale);
            t.profiler.mark(Event::kQueriesArrived);
            compute_work_tile(work, q_buffer, ring);
            t.release_queries(q_buffer);
            if (t.paired()) break;
            output.finish_work_tile(keys, work, t.rings.offsets[offset_buffer(work_index)]);
            announced = cursor.at_end();
            if (announced) t.announce_splits(true);
        }
        end_launch<TransposedQuads<C>>(t, *this, work, work_index, announced, false);
    }
};

template <typename C, typename Keys>
__global__ void __launch_bounds__(kThreads, 1)
    few_rows_decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ BoxOf<C> box) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& smem = *reinterpret_cast<FewRowsMemory<C, Keys>*>(bytes);
    run_kernel<C, FewRowsConsumer<C, Keys>, TransposedQuads<C>, 4 * C::kRangeCtas>(p, box, smem, [] {});
}

}  // namespace mla::hopper
