// MLA decode for Hopper from fp8 caches, up to 64 rows (query heads x query tokens) an m-block: the operands are
// swapped.
//
//   S^T[tokens x 64] = K[tokens x d] * Q^T        A = K, B = Q: keys_e4m3.cuh or keys_records.cuh
//   O^T[d_c x 64]   += V^T[d_c x tokens] * P^T    A = V^T, B = P, in fp16: values.cuh
//
// grid, block, loading, pairs   as in few_rows/kernel.cuh
//   consumers  The consumers own alternate tiles (64 tokens): a tile's owner computes its scores and softmax. Both
//              consumers multiply the values of every tile, each for its half of the d_c columns, so nothing has to be
//              merged at the end. P^T goes through shared memory.
//
//   consumer 0 (first half of the columns)   consumer 1 (second half)
//   ---------------------------------------  ---------------------------------------
//   S^T = K Q^T of tile 0                    S^T = K Q^T of tile 1
//   softmax of tile 0      --> p_full        wait p_full of tile 0
//   O^T += V^T P^T of tile 0                 O^T += V^T P^T of tile 0
//   S^T = K Q^T of tile 2                    softmax of tile 1      --> p_full
//   wait p_full of tile 1                    O^T += V^T P^T of tile 1
//   O^T += V^T P^T of tile 1                 S^T = K Q^T of tile 3
//   softmax of tile 2      --> p_full        wait p_full of tile 2
//   ...                                      ...
//
//   A tile is released when both consumers have read its values. While one computes its softmax, the tensor cores work
//   for the other.
//
// clusters   kRangeCtas = 2 only if the longest request has 65 rows or more. The CTAs of a cluster compute two
//            neighbouring m-blocks from the same keys; the second m-block may have no rows. See many_rows/kernel.cuh.
//
// shared memory (ManyRowsFp8SharedMemory)
//   kv       kStages tiles, as in few_rows/kernel.cuh
//   q        e4m3: terms, [column block][64 rows of high ones, then of low ones][64 B], K-major, swizzled; records:
//            [column block][64][128 B], K-major, swizzled, in the order in which keys' columns are multiplied
//   p        two tiles of P^T, which take turns: [8][kTile / 8] core matrices of 8 x 8, K-major, not swizzled
//   maxima   per row, the maximum that P^T is relative to and the scale of its scores: in use, and previous
//
// softmax  As in few_rows/kernel.cuh, the maximum may be stale by up to 8 (in log2). Both consumers use the same one:
//          an owner begins with that of the previous tile. If the owner refreshes it, each consumer rescales its O^T
//          before it adds the tile's values.
//
// invariants
//   * tiles are computed in order, and consumer 0 owns the first tile of each work tile, so the order of sums does not
//     depend on earlier work tiles
//   * P^T of tile t is written only when both consumers have multiplied by P^T of t - 2. The other consumer has: the
//     owner has taken P^T of t - 1, which the other shared only after its products with t - 2. All warps of the owner
//     have, too: they meet at a barrier before P^T is written
//   * ratios of tile t are written once its keys have arrived, where those of t - 3 lay. Ratios of the two previous
//     tiles may still be read then, by threads of either consumer. Three buffers would suffice; four is a power of two
//   * maxima alternate between two buffers. A consumer that refreshes them has taken P^T of the previous tile, which
//     the other consumer shared only when it no longer needed the maxima that are now overwritten
//   * keys outside [token_begin, token_end), splits, order of sums: as in few_rows/kernel.cuh
#pragma once
#include "keys_e4m3.cuh"
#include "keys_records.cuh"

namespace mla::hopper {

template <typename Element_, CacheFormat kFormat, int kDimLatent_, int kDimRope_, int kStages_, int kRangeCtas_,
          bool kTma_, bool kProfile_, bool kLists_ = false>
struct ManyRowsFp8Config : TransposedStage<CacheLayout<kFormat, kDimLatent_, kDimRope_>,
                                           column_blocks(kDimLatent_ + kDimRope_), kTma_, 1, kDimLatent_ / 128> {
    using Element = Element_;
    static constexpr int kDimLatent = kDimLatent_;
    static constexpr int kDimRope = kDimRope_;
    static constexpr int kDim = kDimLatent + kDimRope;
    static constexpr int kRows = 64, kRangeCtas = kRangeCtas_, kMBlockCost = 3;
    static constexpr bool kForOneMBlock = false;
    using Layout = CacheLayout<kFormat, kDimLatent, kDimRope>;
    static constexpr int kStages = kStages_;
    static constexpr int kQueryBuffers = 1;
    static constexpr bool kTma = kTma_, kLists = kLists_, kByTokens = !kTma;
    static constexpr int kSlotStride = kTma ? 8 : 0;
    static constexpr bool kProfile = kProfile_;

    static constexpr int kQueryColumnBlocks = column_blocks(kDim);
    static constexpr int kLoaderRegisters = 40;      // consumers get the rest of kRegisters: 232
    static constexpr int kBlocks = kDimLatent / 64;  // m64 blocks of O^T
    static constexpr bool kConsumersMerge = false;
    static constexpr int kWeightBytes = kTransposedTile * kRows * 2;  // of P^T of a tile
    static constexpr int kQueryColumnBlockBytes = kRows * 128;
    static constexpr int kQueryBytes = kQueryColumnBlocks * kQueryColumnBlockBytes;

    static_assert(Layout::kFp8 && kDim % 32 == 0 && kDimLatent % 256 == 0);
};

// The maxima that P^T is relative to, the same for both consumers. The scales of scores are copied next to them, so
// that one load gets both.
template <typename C>
struct Maxima {
    // For two neighbouring rows: the maxima, in log2, and the factors that bring scores to log2.
    struct alignas(16) RowPair {
        float2 tops, scales;
    };
    RowPair pairs[C::kRows / 2];
    float reference;  // of records: a power of two above all units so far

    __device__ float& top(int row) { return reinterpret_cast<float*>(&pairs[row / 2].tops)[row % 2]; }
    __device__ float& scale(int row) { return reinterpret_cast<float*>(&pairs[row / 2].scales)[row % 2]; }
    __device__ const RowPair& pair_of(int row) const { return pairs[row / 2]; }
};

// State that both consumers keep in shared memory while they compute a work tile, as registers are short.
struct Progress {
    WorkTile work;
    int keys;             // of the work tile
    Place next;           // where the next work tile begins
    int work_index;       // of this work tile
    uint32_t first_tile;  // number of its first tile
    float cache_scale;
};

template <typename C>
struct ManyRowsFp8SharedMemory {
    alignas(1024) unsigned char kv[C::kStages][C::kStageBytes];
    alignas(1024) unsigned char q[C::kQueryBuffers][C::kQueryBytes];
    alignas(1024) unsigned char p[2][C::kWeightBytes];
    Maxima<C> maxima[2];                         // those in use and the previous ones
    bool refreshed[4];                           // of the last four tiles: whether P^T has new maxima
    alignas(8) float warp_rows[2][5][C::kRows];  // per consumer: a value per warp and row; [4]: one per row
    alignas(8) float output_factors[2][C::kRows];
    RowState split_states[C::kRows];
    alignas(8) float score_scales[C::kRows];
    alignas(8) int hidden[C::kRows];  // how many of the work tile's last keys a row does not see
    // In fp16: see keys_records.cuh. ThreadSanitizer does not see that a __half is stored.
    alignas(16) uint16_t ratios[C::Layout::kIsRecord ? 4 : 1][4][4][8][2];
    float largest_units[2][4];  // per consumer and warp
    Progress progress;
    OutputOffsets<C::kRows> offsets[kOffsetBuffers];
    CtaRange range;
    uint32_t flag;  // this CTA's, when the launch began
    Barrier kv_full[C::kStages][C::kFullBarriers], kv_empty[C::kStages][C::kReleases];
    Barrier q_full[C::kQueryBuffers], q_empty[C::kQueryBuffers];
    // P^T of a tile is in shared memory. Tiles alternate between two barriers, so that a consumer, which waits for
    // every other tile of a work tile, skips no phase. Of a kv_full it may skip phases: with three stages, the phase
    // before tile t's is that of tile t - 3, which the other consumer owns. A skipped phase is complete: the consumer
    // has taken P^T of tile t - 3, or both consumers have synchronized after the work tile.
    Barrier p_full[2];
    PairBarriers pair;
    UnnamedTokens<C> unnamed;
};

template <typename C>
using ManyRowsFp8Scores = std::conditional_t<C::Layout::kIsRecord, ManyRowsFp8Records<C, ManyRowsFp8SharedMemory<C>>,
                                             ManyRowsFp8E4m3<C, ManyRowsFp8SharedMemory<C>>>;

template <typename C>
struct ManyRowsFp8Consumer : ManyRowsFp8Scores<C> {
    using Base = ManyRowsFp8Scores<C>;
    using Base::Base;
    using Base::kThreadRows, Base::kScores, Base::kConsumerBlocks, Base::kOctets;
    using Base::p, Base::smem, Base::consumer, Base::thread, Base::warp, Base::lane, Base::profiler, Base::o;
    using Base::sync_consumer, Base::any_in_consumer, Base::row_of;
    using typename Base::Buffers, typename Base::Offsets, typename Base::Scores;

    using Sums = float[kThreadRows];          // of P^T, over this thread's tokens
    static constexpr float kNoKeys = -1e30f;  // the maximum of no scores: any score exceeds it
    static constexpr bool kRecords = C::Layout::kIsRecord;
    static constexpr float kLargestWeight = 1 << static_cast<int>(kStaleBound);

    // This thread's share of the sums: of its warp's tokens, in rows own_row() and the next.
    float l[2];
    uint32_t refreshes = 0;  // of the maxima, by both consumers

    __device__ int own_row() const { return lane / 4 * 8 + lane % 4 * 2; }
    __device__ Maxima<C>& maxima() const { return smem.maxima[refreshes % 2]; }
    __device__ Maxima<C>& maxima_before() const { return smem.maxima[(refreshes - 1) % 2]; }

    __device__ void reset_state() {
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b)
#pragma unroll
            for (int i = 0; i < kScores; ++i) o[b][i] = 0.f;
        l[0] = l[1] = 0.f;
    }

    // Combines a value of each row over all lanes that hold the row. Leaves a lane own_row() and the next.
    template <int kCount = kThreadRows, typename Combine>
    __device__ float2 combine_rows(float (&values)[kThreadRows], Combine combine) const {
        if constexpr (kCount == 2) {
            return make_float2(values[0], values[1]);
        } else {
            const bool upper = lane & kCount;  // a lane keeps half of the rows, its partner the others
#pragma unroll
            for (int i = 0; i < kCount / 2; ++i) {
                const float kept = upper ? values[i + kCount / 2] : values[i];
                const float sent = upper ? values[i] : values[i + kCount / 2];
                values[i] = combine(kept, __shfl_xor_sync(~0u, sent, kCount));
            }
            return combine_rows<kCount / 2>(values, combine);
        }
    }

    // Rescales O and l to the maxima in use from those before.
    __device__ void rescale() {
        const Maxima<C>&before = maxima_before(), &after = maxima();
        auto factors = [&](int row) {
            const float2 old = before.pair_of(row).tops, now = after.pair_of(row).tops;
            return make_float2(exp2_approx(old.x - now.x), exp2_approx(old.y - now.y));
        };
        const float unit = kRecords ? before.reference * over_power(after.reference) : 1.f;
#pragma unroll
        for (int j = 0; j < kOctets; ++j) {
            float2 factor = factors(row_of(j * 2));
            if constexpr (kRecords) factor.x *= unit, factor.y *= unit;
#pragma unroll
            for (int b = 0; b < kConsumerBlocks; ++b) {
                o[b][j * 4] *= factor.x, o[b][j * 4 + 1] *= factor.y;
                o[b][j * 4 + 2] *= factor.x, o[b][j * 4 + 3] *= factor.y;
            }
        }
        const float2 factor = factors(own_row());
        l[0] *= factor.x, l[1] *= factor.y;
    }

    // The maximum in use of a row before any keys.
    __device__ float least_maximum(int row) const {
        return smem.offsets[offset_buffer(smem.progress.work_index)].out[row] < 0 ? kNoRow : kNoKeys;
    }

    // Refreshes the maxima with this tile's scores, and rescales O and l to them. `first`: of a work tile.
    __device__ void refresh_maxima(const Scores& s, bool first) {
        ++refreshes;
        Maxima<C>& before = maxima_before();
        Maxima<C>& after = maxima();
        float tops[kThreadRows];
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) tops[i] = fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + 2 + i % 2]);
        const float2 top = combine_rows(tops, [](float a, float b) { return fmaxf(a, b); });
        auto& of_warps = smem.warp_rows[consumer];
        *reinterpret_cast<float2*>(&of_warps[warp][own_row()]) = top;
        if constexpr (kRecords) {
            const float largest = warp_max(fmaxf(Base::units.units[0], Base::units.units[1]));
            if (lane == 0) smem.largest_units[consumer][warp] = largest;
        }
        sync_consumer();  // every warp's maxima are written
        if (thread < C::kRows) {
            const float most =
                fmaxf(fmaxf(of_warps[0][thread], of_warps[1][thread]), fmaxf(of_warps[2][thread], of_warps[3][thread]));
            const float scale = smem.score_scales[thread];
            after.scale(thread) = scale;
            after.top(thread) = fmaxf(most * scale, first ? least_maximum(thread) : before.top(thread));
        }
        if (kRecords && thread == 0) {
            const float (&units)[4] = smem.largest_units[consumer];
            const float largest = fmaxf(fmaxf(units[0], units[1]), fmaxf(units[2], units[3]));
            after.reference = !first && largest <= before.reference
                                  ? before.reference
                                  : reference_above(largest, TokenUnits<C>::kLeastExponent);
        }
        sync_consumer();
        if (!first) rescale();
    }

    // Writes P^T = exp2(S^T - tops) to shared memory, as 8 x 8 core matrices [row][token], and sums it over the
    // thread's tokens. True if a weight is too large for these maxima.
    __device__ bool store_probabilities(const Scores& s, unsigned char* target, Sums& sums) {
        const Maxima<C>& maxima = this->maxima();
        constexpr int kAtOnce = 4;                       // octets: what they need is loaded together
        constexpr int kOctetBytes = C::kTile / 8 * 128;  // of P^T
        const uint32_t address =
            smem_address(target) + lane / 16 * kOctetBytes + (warp * 2 + lane / 8 % 2) * 128 + lane % 8 * 16;
        bool exceeds = false;
        float units[2] = {1.f, 1.f};  // of P^T of the two tokens
        if constexpr (kRecords) {
            const float inverse = over_power<kUnitExponent>(maxima.reference);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                units[k] = Base::units.units[k] * inverse;
                exceeds |= Base::units.units[k] > maxima.reference;
            }
        }
#pragma unroll
        for (int first = 0; first < kOctets; first += kAtOnce) {
            typename Maxima<C>::RowPair pairs[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) pairs[j] = maxima.pair_of(row_of((first + j) * 2));
            uint32_t weights[kAtOnce][2];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const auto [top, scale] = pairs[j];
                float e[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    e[i] =
                        exp2_approx(fmaf(s[(first + j) * 4 + i], i % 2 ? scale.y : scale.x, i % 2 ? -top.y : -top.x));
                float* sum = sums + (first + j) * 2;
                sum[0] = e[0] + e[2], sum[1] = e[1] + e[3];
                exceeds |= fmaxf(sum[0], sum[1]) > kLargestWeight;
                weights[j][0] = pack<__half>(e[0] * units[0], e[1] * units[0]);
                weights[j][1] = pack<__half>(e[2] * units[1], e[3] * units[1]);
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; j += 2)
                store_matrices_transposed(address + (first + j) * kOctetBytes, weights[j][0], weights[j][1],
                                          weights[j + 1][0], weights[j + 1][1]);
        }
        return exceeds;
    }

    // Computes P^T of this consumer's own tile, for both. The other consumer has multiplied by P^T of the tile two
    // before, since this one has taken P^T of the tile in between. `first`: of a work tile.
    __device__ void softmax(const Scores& s, uint32_t tile, bool first) {
        Sums sums;
        bool refresh = first;
        for (;; refresh = true) {
            if (refresh)
                refresh_maxima(s, first);
            else
                sync_consumer();  // all warps have multiplied by P^T of the tile two before, as in `refresh_maxima`
            if (thread == 0) smem.refreshed[tile % 4] = refresh;
            const bool exceeds = store_probabilities(s, smem.p[tile % 2], sums);
            fence_async_proxy();
            if (!any_in_consumer(exceeds && !refresh)) break;  // the barrier also publishes P^T
        }
        if (thread == 0) smem.p_full[tile % 2].arrive();
        const float2 sum = combine_rows(sums, [](float a, float b) { return a + b; });
        l[0] += sum.x, l[1] += sum.y;
        profiler.mark(Event::kSoftmax);
    }

    // Waits for P^T of a tile of the other consumer, and rescales O to its maxima.
    __device__ void take_probabilities(uint32_t tile) {
        smem.p_full[tile % 2].wait(tile / 2 % 2);
        profiler.mark(Event::kProbabilitiesArrived);
        if (!smem.refreshed[tile % 4]) return;
        ++refreshes;
        if (tile != smem.progress.first_tile) rescale();
    }

    // Masks a tile's scores; those of records are first brought to one unit. `left` as in left_of_token. Row 0 has the
    // most hidden keys.
    __device__ void mask_scores(Scores& s, uint32_t tile, int left) {
        if constexpr (kRecords) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) s[i] *= Base::units.units[i / 2 % 2];
        }
        Base::mask_unnamed(s, Base::stage_of(tile));
        if (!C::kLists && left - C::kTile < smem.hidden[0]) {
            const int left_of_token = Base::left_of_token(left);
#pragma unroll
            for (int j = 0; j < kOctets; ++j) {
                const auto hidden = *reinterpret_cast<const int2*>(smem.hidden + row_of(j * 2));
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (left_of_token - i / 2 * 8 <= (i % 2 ? hidden.y : hidden.x)) s[j * 4 + i] = -INFINITY;
            }
        }
    }

    // Computes a work tile. An iteration covers two tiles of the schedule above: the other consumer's tile, then the
    // next one, which is this consumer's own. `left` as in left_of_token, for the own tile.
    __device__ void compute_work_tile() {
        int left = smem.progress.keys - static_cast<int>(consumer) * C::kTile;
        uint32_t own = smem.progress.first_tile + consumer;
        if (left <= 0) Base::release_queries(0);
#pragma unroll 1
        for (; left > -C::kTile; left -= 2 * C::kTile, own += 2) {
            Scores s;
            if (left > 0) {
                Base::compute_scores(s, own, left);
                if (left <= 2 * C::kTile) Base::release_queries(0);  // these were its last scores
                if (!C::kLists && left < C::kTile) Base::zero_values(own, left);
                mask_scores(s, own, left);
            }
            if (own != smem.progress.first_tile) {
                take_probabilities(own - 1);
                Base::multiply_values(own - 1);
            }
            if (left <= 0) break;
            softmax(s, own, own == smem.progress.first_tile);
            Base::multiply_values(own);
        }
    }

    // Brings O to what is written, and makes this consumer's part of the rows' state available to `state_of`.
    __device__ void finish_outputs() {
        const bool empty = smem.progress.keys == 0;
        float unit = smem.progress.cache_scale, largest = kE4m3Max * unit;
        if constexpr (kRecords) {
            const float reference = empty ? 1.f : maxima().reference;
            unit = output_unit_of(reference), largest = kE4m3Max * reference;
        }
        if (warp == 0) {
            float tops[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                tops[k] = empty ? -INFINITY : maxima().top(own_row() + k);
                if (consumer == 0) count_sink<C>(p, smem.progress.work, own_row() + k, tops[k], l[k]);
            }
            *reinterpret_cast<float2*>(&smem.warp_rows[consumer][4][own_row()]) = make_float2(tops[0], tops[1]);
        }
        *reinterpret_cast<float2*>(&smem.warp_rows[consumer][warp][own_row()]) = make_float2(l[0], l[1]);
        Base::sync_consumers();
        Base::prepare_output(unit, largest, smem.progress.work.split());
        Base::scale_output();
    }

    // Only the first and the last work tile of a CTA may be splits.
    __device__ void count_splits(const WorkTile& last, int work_tiles) {
        if (work_tiles > 0) Base::count_split(last);
        WorkTile first;
        if (work_tiles > 1 && WorkCursor<C>(p, smem.range).next(first)) Base::count_split(first);
    }

    // Computes O, maxima and sums of the work tile that `progress` describes.
    __device__ void attend(int work_index, const WorkTile& work) {
        const float cache_scale = Base::cache_scale();
        smem.q_full[0].wait(work_index % 2);
        Base::convert_queries(p.scale_log2 * cache_scale);
        reset_state();
        if (consumer == 0 && thread == 0) smem.progress.cache_scale = cache_scale;
        if (consumer == 0 && thread < C::kRows) smem.hidden[thread] = work.token_end - key_limit<C>(p, work, thread);
        fence_async_proxy();
        Base::sync_consumers();
        profiler.mark(Event::kQueriesArrived);
        compute_work_tile();
    }

    __device__ void run() {
        WorkCursor<C> cursor(p, smem.range);
        WorkTile work;
        int work_index = 0;
        uint32_t first_tile = 0;
        if (C::kRangeCtas == 1 && smem.range.paired) Base::begin_pair();
        if constexpr (C::kRangeCtas == 2) cluster_wait();  // the partner's barriers are initialized
        while (cursor.next(work)) {
            if (threadIdx.x == 128)
                smem.progress = {work, work.token_end - work.token_begin, cursor.place, work_index, first_tile, 0.f};
            attend(work_index, work);
            finish_outputs();
            work = smem.progress.work;
            cursor.place = smem.progress.next;
            work_index = smem.progress.work_index;
            first_tile = smem.progress.first_tile + (smem.progress.keys + C::kTile - 1) / C::kTile;
            ++work_index;
            if (C::kRangeCtas == 1 && smem.range.paired) break;
            Base::write_work_tile(Buffers(p, work, smem.range, Base::cta), work,
                                  smem.offsets[offset_buffer(work_index - 1)],
                                  Base::stays_in_registers(work, cursor.at_end()));
        }
        if constexpr (C::kRangeCtas == 2) cluster_leave();
        count_splits(work, work_index);
        const bool in_registers = work_index > 0 && Base::stays_in_registers(work, true);
        // A pair's code comes last, as in few_rows/kernel.cuh.
        if (C::kRangeCtas == 2 || !smem.range.paired) {
            Base::announce_splits(work_index > 0);
            if (in_registers)
                Base::template combine_two<true>(Buffers(p, work, smem.range, Base::cta),
                                                 smem.offsets[offset_buffer(work_index - 1)]);
            Base::combine(work, work_index - 1, [&](bool last, const Buffers& buffers, const Offsets& offsets) {
                if (!(last && in_registers)) Base::template combine_two<false>(buffers, offsets);
            });
        } else {
            Base::count_launch();
            Base::send_states();
            Base::finish_pair(smem.offsets[0]);
        }
        if constexpr (C::kRangeCtas == 2) cluster_wait();  // until then the partner may access this shared memory
        profiler.mark(Event::kCombined);
    }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, 1)
    many_rows_fp8_decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ BoxOf<C> box) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& smem = *reinterpret_cast<ManyRowsFp8SharedMemory<C>*>(bytes);
    run_kernel<C, ManyRowsFp8SharedMemory<C>, ManyRowsFp8Consumer<C>, 8 * C::kRangeCtas>(p, box, smem, [&] {
        for (Barrier& full : smem.p_full) full.init(1);
    });
}

}  // namespace mla::hopper
