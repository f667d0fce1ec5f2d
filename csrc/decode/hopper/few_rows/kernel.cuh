// MLA decode for Hopper, up to 24 rows (query heads x query tokens) an m-block, or 32 with latents of 256 columns: the
// operands are swapped.
//
//   S^T[tokens x rows] = K[tokens x d] * Q^T        A = K, B = Q: wgmma's 64-row side holds tokens, and N is the
//   O^T[d_c x rows]   += V^T[d_c x tokens] * P^T    number of rows rounded up to 8, so few heads waste nothing.
//
// grid   at most one persistent CTA per multiprocessor, walking the range that the planner gave it (schedule/work.cuh);
//        in clusters of two where there may be pairs (hopper/kernel.cuh) or keys are shared
// block  3 warpgroups: a loader (load/keys.cuh) and two consumers, which take alternate tiles of kTile tokens, each
//        with its own O^T, maximum m and sum l
//
//   loader                       consumer 0                           consumer 1
//   ---------------------------  -----------------------------------  -----------------------------------
//   queries --> q_full           wait q_full                          wait q_full
//   tile 0 --> kv_full[0]        wait kv_full[0][segment]             -
//   tile 1 --> kv_full[1]        S^T = K Q^T                          wait kv_full[1][segment]
//   wait kv_empty[0]             P^T = exp2(S^T - m), l += P^T        S^T = K Q^T
//   -                            any_in_consumer: P^T is written      P^T = exp2(S^T - m), l += P^T
//   -                            O^T += V^T P^T, arrive kv_empty[0]   any_in_consumer: P^T is written
//   tile 2 --> kv_full[0]        tile 2 ...                           O^T += V^T P^T, arrive kv_empty[1]
//   ...                          ...                                  ...
//   queries of the next work     arrive q_empty                       arrive q_empty
//   tile                         finish_work_tile: see merge.cuh
//
// clusters   With kRangeCtas = 2 (fp8 keys by TMA) the CTAs of a cluster compute two neighbouring m-blocks from the
//            same keys; the second m-block may have no rows. See many_rows/kernel.cuh.
//
// shared memory (FewRowsSharedMemory)
//   kv       kStages tiles of kTile tokens, in kSegments segments of their columns, each in groups of 8 tokens:
//            [column block][8][128 B], swizzled by 128 B. The same bytes are K (K-major: a group is 8 rows of M) and
//            V^T (MN-major: a group is 8 steps of wgmma's K dimension).
//   q        kQueryBuffers x [column block][N][128 B], K-major, swizzled
//   p        16-bit keys: per consumer 2 x [N / 8][kTile / 8] core matrices of 8 x 8, K-major, not swizzled; the same
//            bytes are the exchange buffer of `merge`
//
// e4m3 keys take half the space: [column block][8][64 B], swizzled by 64 B. Records lie 656 B apart in memory, so a box
// with rows of 64 B would read half of the 32-byte sectors that it touches twice. Their column blocks therefore have
// 128 columns, which share a scale, and 128 B; the last segment has scales and rotary columns
// (keys_records.cuh). With fp8 keys, queries and P are sums of two e4m3 terms, which lie in scratch.tile
// (keys_e4m3.cuh).
//
// softmax  The tokens of each row are spread over all four warps of a consumer. Exponentials use a maximum that may be
//          stale by up to 8 (in log2; with fp8 keys, 4): P then stays below 2^8, and fp32 sums and 16-bit P keep their
//          relative precision (with fp8 keys: two_terms.cuh). One barrier per tile both publishes P and tells all warps
//          whether any score exceeded that bound; only then is the maximum refreshed and O rescaled. With fp8 keys, the
//          maximum may be lowered after a tile that refreshed it, if a quarter of that tile (one warp's tokens) has far
//          lower scores. Otherwise a key with a far greater score than others (an attention sink) would leave no bits
//          for the probabilities of all later keys.
//
// invariants
//   * keys outside [token_begin, token_end) are loaded only if they share a box with a key inside; they are masked in S
//     and zeroed in V (0 x NaN is NaN). For tokens whose entries name no key, a stage holds zeros (UnnamedTokens)
//   * CTAs that share an m-block wait for each other (schedule/splits.cuh; pairs: hopper/kernel.cuh) only after all
//     their own work
//   * a consumer writes P of a tile when all warps have multiplied by what its buffer held. Of two buffers, they pass
//     the barrier of the other one's tile in between; with fp8 keys P has one, and a barrier of its own
//   * a warp may zero values that other warps still read as keys: their scores are masked, whatever they are
//   * a fixed order everywhere: the same inputs and plan give the same bits
#pragma once
#include "keys_records.cuh"

namespace mla::hopper {

// Column blocks of a segment. Three warps copy keys of small pages, equally many column blocks each; with TMA, few
// boxes are best.
template <typename Layout, int kBlocksOf64, bool kTma>
constexpr int few_rows_segment = Layout::kIsRecord              ? Layout::kScales / 2
                                 : kBlocksOf64 % 3 == 0         ? kBlocksOf64 / 3
                                 : kTma && kBlocksOf64 % 2 == 0 ? 2
                                                                : 1;
template <typename Layout, int kBlocksOf64, bool kTma, int kSegment = few_rows_segment<Layout, kBlocksOf64, kTma>>
using FewRowsStage = TransposedStage<Layout, kBlocksOf64, kTma, kSegment, (kBlocksOf64 / kSegment + 2) / 3>;

template <typename Element_, CacheFormat kFormat, int kDimLatent_, int kDimRope_, int kRows_, int kStages_,
          int kQueryBuffers_, int kRangeCtas_, bool kForOneMBlock_, bool kTma_, bool kProfile_, bool kLists_ = false>
struct FewRowsConfig
    : FewRowsStage<CacheLayout<kFormat, kDimLatent_, kDimRope_>, column_blocks(kDimLatent_ + kDimRope_), kTma_> {
    using Element = Element_;
    static constexpr int kDimLatent = kDimLatent_;
    static constexpr int kDimRope = kDimRope_;
    static constexpr int kDim = kDimLatent + kDimRope;
    static constexpr int kRows = kRows_;  // N
    static constexpr int kRangeCtas = kRangeCtas_, kMBlockCost = 2;
    static constexpr bool kForOneMBlock = kForOneMBlock_;
    using Layout = CacheLayout<kFormat, kDimLatent, kDimRope>;
    static constexpr int kStages = kStages_;
    static constexpr int kQueryBuffers = kQueryBuffers_;
    static constexpr bool kTma = kTma_, kLists = kLists_, kByTokens = false;
    static constexpr int kSlotStride = kLists ? 0 : kTma ? 8 : 1;
    static constexpr bool kProfile = kProfile_;

    static constexpr int kQueryColumnBlocks = column_blocks(kDim);
    // Consumers get the rest of kRegisters. With fp8 keys, most need more than a loader with 72 leaves them.
    static constexpr int kLoaderRegisters = !Layout::kFp8 ? 72 : kTma ? 40 : Layout::kIsRecord ? 72 : 56;
    static constexpr int kBlocks = kDimLatent / 64;  // m64 blocks of O^T
    static constexpr bool kConsumersMerge = true;
    static constexpr float kStaleBound = Layout::kFp8 ? 4.f : mla::kStaleBound;
    static constexpr bool kFallingMaximum = Layout::kFp8;
    // With fp8 keys, exponentials, at most 2^kStaleBound, are multiplied by this. Errors of two terms have a least
    // size, so the larger P is, the smaller is their relative error.
    static constexpr float kWeightScale = kE4m3Max / (1 << static_cast<int>(kStaleBound));
    // Bytes of P^T of a tile: 16 bits per element; with records, as many for each scale of a token.
    static constexpr int kWeightBytes = kTransposedTile * kRows * 2 * (Layout::kIsRecord ? Layout::kScales : 1);
    static constexpr int kWeightBuffers = Layout::kFp8 ? 1 : 2;  // of a consumer; 16-bit: two, as measured
    static constexpr int kQueryColumnBlockBytes = kRows * 128;
    // What a CTA of a pair receives (../kernel.cuh) may be larger than queries without rotary columns.
    static constexpr int kQueryBytes = (kQueryColumnBlocks + (kDimRope == 0)) * kQueryColumnBlockBytes;
    static constexpr int kFp8Blocks = Layout::kIsRecord ? kBlocks : kQueryColumnBlocks;  // of these with e4m3 keys
    static constexpr int kQueryTermBytes = Layout::kFp8 ? kFp8Blocks * kQueryColumnBlockBytes : 1;

    static_assert(kRows % 8 == 0 && kRows * kBlocks <= 24 * 8);  // O^T has to fit in registers
    // Within a work tile, each stage belongs to one consumer. With an odd number of stages, a consumer would wait for
    // only every other phase of a kv_full, and the parity cannot distinguish the awaited phase from the one two phases
    // earlier. (Consumers of many_rows_fp8 know by other means that the phase in between is complete.)
    static_assert(kStages % 2 == 0);
    static_assert(kDim % 32 == 0 && kDimLatent % 128 == 0);
};

template <typename C>
struct FewRowsSharedMemory {
    alignas(1024) unsigned char kv[C::kStages][C::kStageBytes];
    alignas(1024) unsigned char q[C::kQueryBuffers][C::kQueryBytes];
    alignas(1024) union {
        struct {
            unsigned char p[2][C::kWeightBuffers][C::kWeightBytes];
            alignas(1024) unsigned char query_terms[C::kQueryTermBytes];
        } tile;
        float4 exchange[2][C::kBlocks / 2 * C::kRows / 8][128];
    } scratch;
    float warp_rows[2][5][C::kRows];  // per consumer: a value per warp and row; [4]: one per row
    float score_scales[C::Layout::kFp8 ? C::kQueryBuffers : 1][C::kRows];
    OutputOffsets<C::kRows> offsets[kOffsetBuffers];
    CtaRange range;
    uint32_t flag;  // this CTA's, when the launch began
    Barrier kv_full[C::kStages][C::kFullBarriers], kv_empty[C::kStages][C::kReleases];
    Barrier q_full[C::kQueryBuffers], q_empty[C::kQueryBuffers];
    PairBarriers pair;
    UnnamedTokens<C> unnamed;
    // With fp8 keys.
    float kv_scale, largest_scales[2];
    alignas(8) float output_factors[2][C::kRows];
    RowState split_states[C::kRows];
};

template <typename C>
using FewRowsProducts =
    std::conditional_t<C::Layout::kIsRecord, FewRowsProductsRecords<C, FewRowsSharedMemory<C>>,
                       std::conditional_t<C::Layout::kFp8, FewRowsProductsE4m3<C, FewRowsSharedMemory<C>>,
                                          FewRowsProducts16Bit<C, FewRowsSharedMemory<C>>>>;

template <typename C>
struct FewRowsConsumer : FewRowsProducts<C> {
    using Base = FewRowsProducts<C>;
    using Base::Base;
    using Base::kThreadRows, Base::kScores;
    using Base::p, Base::smem, Base::consumer, Base::warp, Base::lane, Base::profiler, Base::o, Base::m, Base::l;
    using Base::sync_consumer, Base::any_in_consumer, Base::row_of, Base::row_of_score, Base::mask_unnamed;
    using typename Base::Element, typename Base::Buffers, typename Base::Offsets;
    // In log2: scores that are lower than the maximum by kFar are far below it; the maximum falls by kFall. O stays in
    // the range of fp32 through all falls of a work tile.
    static constexpr float kFar = 8.f, kFall = 12.f;
    static constexpr int kMostFalls = 6;

    int falls;  // twice their number in this work tile, plus 1 if the maximum falls with the next tile

    __device__ void reset_state() {
#pragma unroll
        for (int b = 0; b < C::kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < kScores; ++i) o[b][i] = 0.f;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            m[i] = -INFINITY;
            l[i] = 0.f;
        }
    }

    __device__ void mask(float (&s)[kScores], WorkTile work, int tile_token) {
        // Pinned: otherwise all rows' limits would be computed before the loop over tiles, and held in registers.
        if constexpr (!C::kForOneMBlock) work.m_block = pinned(work.m_block);
        const int token = tile_token + warp * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            int limit = key_limit<C>(p, work, row_of(i));
#pragma unroll
            for (int k = 0; k < 2; ++k)  // the thread's two tokens, 8 apart
                if (token + k * 8 >= limit) s[i / 2 * 4 + k * 2 + i % 2] = -INFINITY;
        }
    }

    // Writes P^T = exp2(S^T - m) to shared memory, as core matrices [row][token], and sums it over the thread's tokens.
    __device__ void store_probabilities(const float (&s)[kScores], unsigned char* target, float (&sums)[kThreadRows]) {
#pragma unroll
        for (int j = 0; j < C::kRows / 8; ++j) {
            float e[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                e[i] = exp2_approx(s[j * 4 + i] - finite(m[j * 2 + i % 2]));
            }
            sums[j * 2] = e[0] + e[2];
            sums[j * 2 + 1] = e[1] + e[3];
            Base::store_weights(target, j, e);
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
        if (lane < 4) {
#pragma unroll
            for (int i = 0; i < kThreadRows; ++i) smem.warp_rows[consumer][warp][row_of(i)] = tops[i];
        }
        sync_consumer();  // every warp's maxima are written
        bool far = false;
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) {
            float top = C::kFallingMaximum ? m[i] - fall : m[i];
#pragma unroll
            for (int w = 0; w < 4; ++w) top = fmaxf(top, smem.warp_rows[consumer][w][row_of(i)]);
            float factor = exp2_approx(m[i] - finite(top));
            m[i] = top;
            if constexpr (C::kFallingMaximum) far |= tops[i] < top - kFar;
            if (first) continue;  // O and l are zero
            l[i] *= factor;
#pragma unroll
            for (int b = 0; b < C::kBlocks; ++b) {
                o[b][i / 2 * 4 + i % 2] *= factor;
                o[b][i / 2 * 4 + 2 + i % 2] *= factor;
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

    // P^T of a tile, with the maximum in use. If a score exceeds it by too much, refreshes the maximum and computes P^T
    // again. If there is none yet, or it falls with this tile, refreshes it first.
    __device__ void softmax(const float (&s)[kScores], unsigned char* probabilities, bool first) {
        float sums[kThreadRows] = {};
        const bool fall = C::kFallingMaximum && !first && falls & 1;
        bool refresh = first || fall, exceeds = false, far = false;
        do {
            if (refresh)
                far = refresh_maximum(s, first, fall ? kFall : 0.f);
            else {
                if constexpr (C::kWeightBuffers == 1) sync_consumer();  // as in `refresh_maximum`
#pragma unroll
                for (int i = 0; i < kScores; ++i) exceeds |= s[i] > m[row_of_score(i)] + C::kStaleBound;
            }
            store_probabilities(s, probabilities, sums);
            Base::publish_probabilities();
            if constexpr (C::kFallingMaximum) {  // what is voted on depends on whether there was a refresh
                const bool any = any_in_consumer(refresh ? far : exceeds);
                if (refresh) count_fall(first, any);
                exceeds = any && !refresh;
            } else {
                exceeds = any_in_consumer(exceeds && !refresh);  // the barrier also publishes P^T
            }
            refresh = true;
        } while (exceeds);
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) l[i] += sums[i];
        profiler.mark(Event::kSoftmax);
    }

    // Computes one of this consumer's tiles, which begins at token `tile_token`. `first`: its first one of a work tile.
    // All rows see the keys below `least_limit`; some rows see more.
    __device__ void compute_tile(const WorkTile& work, int tile_token, int least_limit,
                                 const PipelineState<C::kStages>& ring, int q_buffer, unsigned char* probabilities,
                                 bool first) {
        unsigned char* kv = smem.kv[ring.stage];
        float s[kScores];
        Base::compute_scores(s, ring, q_buffer);
        const int valid = work.token_end - tile_token;
        Base::choose_units(kv, valid);
        mask_unnamed(s, ring.stage);
        if constexpr (!C::kLists) {
            if (valid < C::kTile) Base::zero_values(kv, valid);
            if (tile_token + C::kTile > least_limit) mask(s, work, tile_token);
        }
        softmax(s, probabilities, first);
        Base::accumulate(kv, probabilities);
        if (lane == 0) Base::release_keys(ring.stage, 0);
    }

    // Computes a work tile. Consumer 0 takes the first tile, so that the bits of an m-block do not depend on the
    // m-blocks before it.
    __device__ void compute_work_tile(const WorkTile& work, int q_buffer, PipelineState<C::kStages>& ring) {
        const int least_limit = key_limit<C>(p, work, 0);
        uint32_t tile = 0;
        for (int token = work.token_begin; token < work.token_end; token += C::kTile, ++tile) {
            if (tile % 2 == consumer)
                compute_tile(work, token, least_limit, ring, q_buffer,
                             smem.scratch.tile.p[consumer][tile / 2 % C::kWeightBuffers], tile < 2);
            ring.advance();
        }
    }

    __device__ void run() {
        PipelineState<C::kStages> ring;
        WorkCursor<C> cursor(p, smem.range);
        WorkTile work;
        // Where fp8 products leave no register free, the compiler spills a bool.
        using Flag = std::conditional_t<(C::Layout::kFp8 && C::kRows > 16), int, bool>;
        Flag last = false, in_registers = false;
        int work_index = 0;
        const bool paired = C::kRangeCtas == 1 && smem.range.paired;
        if (paired) Base::begin_pair();
        if constexpr (C::kRangeCtas == 2) cluster_wait();  // the partner's barriers are initialized
        for (; cursor.next(work); ++work_index) {
            reset_state();
            last = cursor.at_end();
            in_registers = Base::stays_in_registers(work, last);
            const int q_buffer = work_index % C::kQueryBuffers;
            const float cache_scale = Base::cache_scale();
            smem.q_full[q_buffer].wait(work_index / C::kQueryBuffers % 2);
            Base::prepare_queries(q_buffer, cache_scale);
            profiler.mark(Event::kQueriesArrived);
            compute_work_tile(work, q_buffer, ring);
            Base::release_queries(q_buffer);
            if (paired) break;
            Base::finish_work_tile(work, smem.offsets[offset_buffer(work_index)], in_registers);
            if (last) Base::announce_splits(true);
            Base::count_split(work);
        }
        if constexpr (C::kRangeCtas == 2) cluster_leave();
        // The code of pairs comes last. The code that runs without pairs is then contiguous, and loads sooner when it
        // comes from memory.
        if (!paired) {
            if (!last) Base::announce_splits(work_index > 0);  // the range is empty, or ends without queries
            if (in_registers)
                Base::template combine_two<true>(Buffers(p, work, smem.range, Base::cta),
                                                 smem.offsets[offset_buffer(work_index - 1)]);
            Base::combine(work, work_index - 1, [&](bool last, const Buffers& buffers, const Offsets& offsets) {
                if (!(last && in_registers)) Base::template combine_two<false>(buffers, offsets);
            });
        } else {
            Base::count_launch();
            Base::finish_pair(work, smem.offsets[0]);
        }
        if constexpr (C::kRangeCtas == 2) cluster_wait();  // until then the partner may access this shared memory
        profiler.mark(Event::kCombined);
    }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, 1)
    few_rows_decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ BoxOf<C> box) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& smem = *reinterpret_cast<FewRowsSharedMemory<C>*>(bytes);
    run_kernel<C, FewRowsSharedMemory<C>, FewRowsConsumer<C>, 4 * C::kRangeCtas>(p, box, smem, [] {});
}

}  // namespace mla::hopper
