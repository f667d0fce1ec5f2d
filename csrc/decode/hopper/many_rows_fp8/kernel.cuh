// MLA decode for Hopper from fp8 caches, up to 64 rows (query heads x query tokens) an m-block: the operands are
// swapped.
//
//   S^T[tokens x 64] = K[tokens x d] * Q^T        A = K, B = Q^T: keys_e4m3.cuh or keys_records.cuh
//   O^T[d_c x 64]   += V^T[d_c x tokens] * P^T    A = V^T, B = P^T, in fp16: values.cuh
//
// grid, block, loading, pairs   as in few_rows/kernel.cuh
//   consumers  The consumers own alternate tiles (64 tokens): a tile's owner computes its scores and softmax. Both
//              consumers multiply the values of every tile, each for its half of the d_c columns, so nothing has to be
//              merged at the end. P^T goes through shared memory.
//
//   consumer 0 (first half of the columns)   consumer 1 (second half)
//   ---------------------------------------  ---------------------------------------
//   S^T = K Q^T of tile 0                    S^T = K Q^T of tile 1
//   softmax of tile 0      --> p_is_there    wait p_is_there of tile 0
//   O^T += V^T P^T of tile 0                 O^T += V^T P^T of tile 0
//   S^T = K Q^T of tile 2                    softmax of tile 1      --> p_is_there
//   wait p_is_there of tile 1                O^T += V^T P^T of tile 1
//   O^T += V^T P^T of tile 1                 S^T = K Q^T of tile 3
//   softmax of tile 2      --> p_is_there    wait p_is_there of tile 2
//   ...                                      ...
//
//   A tile is released when both consumers have read its values. While one computes its softmax, the tensor cores work
//   for the other.
//
// clusters   kRangeCtas = 2 only if the longest request has 65 rows or more. The CTAs of a cluster compute two
//            neighbouring m-blocks from the same keys; the second m-block may have no rows. See many_rows/kernel.cuh.
//
// shared memory (ManyRowsFp8Memory)
//   kv       kStages tiles, as in few_rows/kernel.cuh
//   q        e4m3: terms, [column block][64 rows of high ones, then of low ones][64 B], K-major, swizzled; records:
//            [column block][64][128 B], K-major, swizzled, in the order in which keys' columns are multiplied
//   weights  kWeightTiles tiles of P^T, which take turns: [8][kTile / 8] core matrices of 8 x 8, K-major, not swizzled
//   maxima   per row, the maximum that P^T is relative to and the scale of its scores: in use, and previous
//
// softmax  As in few_rows/kernel.cuh, the maximum may be stale by up to 8 (in log2). Both consumers use the same one:
//          an owner begins with that of the previous tile. If the owner refreshes it, each consumer rescales its O^T
//          before it adds the tile's values.
//
// invariants
//   * tiles are computed in order, and consumer 0 owns the first tile of each work tile, so the order of sums does not
//     depend on earlier work tiles
//   * P^T of tile t is written only when both consumers have multiplied by P^T of the tile whose place it takes:
//     - of three places (kWeightTiles), that is tile t - 3. The owner of t has shared P^T of t - 2, and the other
//       consumer that of t - 1, which the owner has taken. Each shared at a barrier that its warps reach only after
//       their products with t - 3
//     - of two, it is t - 2. The owner has taken P^T of t - 1, which the other consumer shared after its products with
//       t - 2. The owner's own warps synchronize before they write
//   * ratios of tile t are written once its keys have arrived, where those of t - 4 lay. Ratios of the two previous
//     tiles may still be read then, by threads of either consumer. Three buffers would suffice; four is a power of two
//   * maxima alternate between two buffers. A consumer that refreshes them has taken P^T of the previous tile, which
//     the other consumer shared only when it no longer needed the maxima that are now overwritten
//   * keys outside [token_begin, token_end), splits, order of sums: as in few_rows/kernel.cuh
#pragma once
#include "keys.cuh"
#include "numbers/record_units.cuh"
#include "output.cuh"

namespace mla::hopper {

template <typename Element, DecodeConfig kConfig, typename Base = KernelConfig<Element, kConfig>>
struct ManyRowsFp8Config
    : Base,
      TransposedStage<typename Base::Layout, column_blocks(Base::kDim), kConfig.tma, 1, kConfig.dim_latent / 128> {
    using Layout = typename Base::Layout;
    static constexpr int kMBlockCost = 3;
    static constexpr bool kByTokens = !kConfig.tma;
    static constexpr int kSlotStride = kConfig.tma ? 8 : 0;

    static constexpr int kLoaderRegisters = 40;              // consumers get the rest of kRegisters: 232
    static constexpr int kBlocks = kConfig.dim_latent / 64;  // m64 blocks of O^T
    static constexpr bool kConsumersMerge = false, kCombinesTwo = true;
    static constexpr int kWeightBytes = kTransposedTile * kConfig.rows * 2;  // of P^T of a tile
    // Places for P^T. With three, no barrier is needed before P^T is written; with records, shared memory has no room
    // for three.
    static constexpr int kWeightTiles = Layout::kScales > 0 ? 2 : 3;

    static_assert(kConfig.rows == 64 && kConfig.query_buffers == 1 && !kConfig.for_one_m_block);
    static_assert(Layout::kElementBytes == 1);
    static_assert((kConfig.dim_latent + kConfig.dim_rope) % 32 == 0 && kConfig.dim_latent % 256 == 0);
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
struct SoftmaxMemory {
    Maxima<C> maxima[2];              // those in use and the previous ones
    bool refreshed[4];                // of the last four tiles: whether P^T has new maxima
    alignas(8) int hidden[C::kRows];  // how many of the work tile's last keys a row does not see
    float largest_units[2][4];        // per consumer and warp
};

template <typename C, typename Keys>
struct ManyRowsFp8Memory {
    RingMemory<C> rings;
    ProductMemory<C> products;
    typename Keys::Memory keys;
    SoftmaxMemory<C> softmax;
    Progress progress;
    OutputMemory<C> output;
    // P^T of a tile is in shared memory. Tiles alternate between two barriers, so that a consumer, which waits for
    // every other tile of a work tile, skips no phase. Of a kv_full it may skip phases: with three stages, the phase
    // before tile t's is that of tile t - 3, which the other consumer owns. A skipped phase is complete: the consumer
    // has taken P^T of tile t - 3, or both consumers have synchronized after the work tile.
    Barrier p_is_there[2];
    CtaRange range;
    PairMemory pair;
};

template <typename C, ManyRowsFp8Keys<C> Keys>
struct ManyRowsFp8Consumer {
    using Buffers = SplitBuffers<TransposedQuads<C>>;
    static constexpr int kThreadRows = C::kRows / 4, kScores = C::kRows / 2, kOctets = C::kRows / 8;
    static constexpr int kConsumerBlocks = C::kBlocks / 2;
    using Scores = float[kScores];
    using Sums = float[kThreadRows];          // of P^T, over this thread's tokens
    static constexpr float kNoKeys = -1e30f;  // the maximum of no scores: any score exceeds it
    static constexpr float kLargestWeight = 1 << static_cast<int>(kStaleBound);

    ConsumerThread<C>& t;
    ManyRowsFp8Memory<C, Keys>& smem;
    Keys keys;
    ManyRowsFp8Output<C> output;

    __device__ ManyRowsFp8Consumer(ConsumerThread<C>& t, ManyRowsFp8Memory<C, Keys>& smem)
        : t(t), smem(smem), keys(t, smem.products, smem.keys), output(t, smem.output) {}

    // This thread's share of the sums: of its warp's tokens, in rows own_row() and the next.
    float l[2];
    uint32_t refreshes = 0;  // of the maxima, by both consumers

    // From threadIdx.x: with t.lane, the compiler would be short of a register.
    __device__ int own_row() const { return threadIdx.x % 32 / 4 * 8 + threadIdx.x % 4 * 2; }
    __device__ Maxima<C>& maxima() const { return smem.softmax.maxima[refreshes % 2]; }
    __device__ Maxima<C>& maxima_before() const { return smem.softmax.maxima[(refreshes - 1) % 2]; }

    __device__ void reset_state() {
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b)
#pragma unroll
            for (int i = 0; i < kScores; ++i) output.blocks.o[b][i] = 0.f;
        l[0] = l[1] = 0.f;
    }

    // Combines a value of each row over all lanes that hold the row. Leaves a lane own_row() and the next.
    template <int kCount = kThreadRows, typename Combine>
    __device__ float2 combine_rows(float (&values)[kThreadRows], Combine combine) const {
        if constexpr (kCount == 2) {
            return make_float2(values[0], values[1]);
        } else {
            const bool upper = t.lane & kCount;  // a lane keeps half of the rows, its partner the others
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
        const float unit = Keys::kHasUnits ? before.reference * over_power(after.reference) : 1.f;
#pragma unroll
        for (int j = 0; j < kOctets; ++j) {
            float2 factor = factors(row_of(t.lane, j * 2));
            if constexpr (Keys::kHasUnits) factor.x *= unit, factor.y *= unit;
#pragma unroll
            for (int b = 0; b < kConsumerBlocks; ++b) {
                output.blocks.o[b][j * 4] *= factor.x, output.blocks.o[b][j * 4 + 1] *= factor.y;
                output.blocks.o[b][j * 4 + 2] *= factor.x, output.blocks.o[b][j * 4 + 3] *= factor.y;
            }
        }
        const float2 factor = factors(own_row());
        l[0] *= factor.x, l[1] *= factor.y;
    }

    // The maximum in use of a row before any keys.
    __device__ float least_maximum(int row) const {
        return t.rings.offsets[offset_buffer(smem.progress.work_index)].out[row] < 0 ? kNoRow : kNoKeys;
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
        auto& of_warps = smem.output.warp_rows[t.consumer];
        *reinterpret_cast<float2*>(&of_warps[t.warp][own_row()]) = top;
        if constexpr (Keys::kHasUnits) {
            const float largest = warp_max(fmaxf(keys.unit(0), keys.unit(1)));
            if (t.lane == 0) smem.softmax.largest_units[t.consumer][t.warp] = largest;
        }
        t.sync_consumer();  // every warp's maxima are written
        if (t.thread < C::kRows) {
            const float most = fmaxf(fmaxf(of_warps[0][t.thread], of_warps[1][t.thread]),
                                     fmaxf(of_warps[2][t.thread], of_warps[3][t.thread]));
            const float scale = smem.products.score_scales[t.thread];
            after.scale(t.thread) = scale;
            after.top(t.thread) = fmaxf(most * scale, first ? least_maximum(t.thread) : before.top(t.thread));
        }
        if constexpr (Keys::kHasUnits) {
            if (t.thread == 0) {
                const float (&units)[4] = smem.softmax.largest_units[t.consumer];
                const float largest = fmaxf(fmaxf(units[0], units[1]), fmaxf(units[2], units[3]));
                after.reference = !first && largest <= before.reference
                                      ? before.reference
                                      : reference_above(largest, Keys::kLeastExponent);
            }
        }
        t.sync_consumer();
        if (!first) rescale();
    }

    // Writes P^T = exp2(S^T - tops) to shared memory, as 8 x 8 core matrices [row][token], and sums it over the
    // thread's tokens. True if a weight is too large for these maxima.
    __device__ bool store_probabilities(const Scores& s, unsigned char* target, Sums& sums) {
        const Maxima<C>& maxima = this->maxima();
        constexpr int kAtOnce = 4;                       // octets: what they need is loaded together
        constexpr int kOctetBytes = C::kTile / 8 * 128;  // of P^T
        const uint32_t address =
            smem_address(target) + t.lane / 16 * kOctetBytes + (t.warp * 2 + t.lane / 8 % 2) * 128 + t.lane % 8 * 16;
        bool exceeds = false;
        float units[2] = {1.f, 1.f};  // of P^T of the two tokens
        if constexpr (Keys::kHasUnits) {
            const float inverse = over_power<kUnitExponent>(maxima.reference);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                units[k] = keys.unit(k) * inverse;
                exceeds |= keys.unit(k) > maxima.reference;
            }
        }
#pragma unroll
        for (int first = 0; first < kOctets; first += kAtOnce) {
            typename Maxima<C>::RowPair pairs[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) pairs[j] = maxima.pair_of(row_of(t.lane, (first + j) * 2));
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

    // Computes P^T of this consumer's own tile, for both. `first`: of a work tile.
    __device__ void softmax(const Scores& s, uint32_t tile, bool first) {
        Sums sums;
        bool refresh = first;
        for (;; refresh = true) {
            if (refresh)
                refresh_maxima(s, first);
            else if constexpr (C::kWeightTiles == 2)
                t.sync_consumer();  // all warps have multiplied by P^T of the tile two before
            if (t.thread == 0) smem.softmax.refreshed[tile % 4] = refresh;
            const bool exceeds = store_probabilities(s, smem.products.weights[tile % C::kWeightTiles], sums);
            fence_async_proxy();
            if (!t.any_in_consumer(exceeds && !refresh)) break;  // the barrier also publishes P^T
        }
        if (t.thread == 0) smem.p_is_there[tile % 2].arrive();
        const float2 sum = combine_rows(sums, [](float a, float b) { return a + b; });
        l[0] += sum.x, l[1] += sum.y;
        t.profiler.mark(Event::kSoftmax);
    }

    // Waits for P^T of a tile of the other consumer, and rescales O to its maxima.
    __device__ void take_probabilities(uint32_t tile) {
        smem.p_is_there[tile % 2].wait(tile / 2 % 2);
        t.profiler.mark(Event::kProbabilitiesArrived);
        if (!smem.softmax.refreshed[tile % 4]) return;
        ++refreshes;
        if (tile != smem.progress.first_tile) rescale();
    }

    // Masks a tile's scores; those of records are first brought to one unit. `remaining` as in remaining_at_token. Row
    // 0 has the most hidden keys.
    __device__ void mask_scores(Scores& s, uint32_t tile, int remaining) {
        if constexpr (Keys::kHasUnits) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) s[i] *= keys.unit(i / 2 % 2);
        }
        output.blocks.mask_unnamed(s, keys.values.stage_of(tile));
        if (!C::kLists && remaining - C::kTile < smem.softmax.hidden[0]) {
            const int at_token = keys.values.remaining_at_token(remaining);
#pragma unroll
            for (int j = 0; j < kOctets; ++j) {
                const auto hidden = *reinterpret_cast<const int2*>(smem.softmax.hidden + row_of(t.lane, j * 2));
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (at_token - i / 2 * 8 <= (i % 2 ? hidden.y : hidden.x)) s[j * 4 + i] = -INFINITY;
            }
        }
    }

    // Computes a work tile. An iteration covers two tiles of the schedule above: the other consumer's tile, then the
    // next one, which is this consumer's own. `remaining` as in remaining_at_token, for the own tile.
    __device__ void compute_work_tile() {
        int remaining = smem.progress.keys - static_cast<int>(t.consumer) * C::kTile;
        uint32_t own = smem.progress.first_tile + t.consumer;
        if (remaining <= 0) t.release_queries(0);
#pragma unroll 1
        for (; remaining > -C::kTile; remaining -= 2 * C::kTile, own += 2) {
            Scores s;
            if (remaining > 0) {
                keys.scores(s, own, remaining);
                if (remaining <= 2 * C::kTile) t.release_queries(0);  // these were its last scores
                if (!C::kLists && remaining < C::kTile) keys.values.zero_values(own, remaining);
                mask_scores(s, own, remaining);
            }
            if (own != smem.progress.first_tile) {
                take_probabilities(own - 1);
                keys.accumulate(output.blocks.o, own - 1);
            }
            if (remaining <= 0) break;
            softmax(s, own, own == smem.progress.first_tile);
            keys.accumulate(output.blocks.o, own);
        }
    }

    // Brings O to what is written, and makes this consumer's part of the rows' state available to `state_of`.
    __device__ void finish_outputs() {
        const bool empty = smem.progress.keys == 0;
        float unit = smem.progress.cache_scale, largest = kE4m3Max * unit;
        if constexpr (Keys::kHasUnits) {
            const float reference = empty ? 1.f : maxima().reference;
            unit = output_unit_of(reference), largest = kE4m3Max * reference;
        }
        if (t.warp == 0) {
            float tops[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                tops[k] = empty ? -INFINITY : maxima().top(own_row() + k);
                if (t.consumer == 0) count_sink<C>(t.p, smem.progress.work, own_row() + k, tops[k], l[k]);
            }
            *reinterpret_cast<float2*>(&smem.output.warp_rows[t.consumer][4][own_row()]) =
                make_float2(tops[0], tops[1]);
        }
        *reinterpret_cast<float2*>(&smem.output.warp_rows[t.consumer][t.warp][own_row()]) = make_float2(l[0], l[1]);
        t.sync_consumers();
        output.blocks.prepare(unit, largest, smem.progress.work.split());
        output.blocks.scale();
    }

    // Computes O, maxima and sums of the work tile that `progress` describes.
    __device__ void attend(int work_index, const WorkTile& work) {
        const float cache_scale = keys.cache_scale();
        t.rings.q_full[0].wait(work_index % 2);
        keys.prepare_queries(t.p.scale_log2 * cache_scale);
        reset_state();
        if (t.consumer == 0 && t.thread == 0) smem.progress.cache_scale = cache_scale;
        if (t.consumer == 0 && t.thread < C::kRows)
            smem.softmax.hidden[t.thread] = work.token_end - key_limit<C>(t.p, work, t.thread);
        fence_async_proxy();
        t.sync_consumers();
        t.profiler.mark(Event::kQueriesArrived);
        compute_work_tile();
    }

    __device__ void finish_pair(const WorkTile&, const OutputOffsets<C::kRows>& offsets) {
        output.blocks.send_states();
        output.blocks.finish_pair(offsets);
    }
    template <bool kInRegisters>
    __device__ void combine_two(const Buffers& buffers, const OutputOffsets<C::kRows>& offsets) {
        output.template combine_two<kInRegisters>(buffers, offsets);
    }

    __device__ void run() {
        WorkCursor<C> cursor(t.p, t.range);
        WorkTile work;
        int work_index = 0;
        uint32_t first_tile = 0;
        t.begin_launch();
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
            if (t.paired()) break;
            const Buffers buffers(t.p, work, t.range, t.cta());
            const bool in_registers = output.stays_in_registers(work, cursor.at_end());
            output.blocks.write_work_tile(buffers, work, t.rings.offsets[offset_buffer(work_index - 1)],
                                          in_registers ? buffers.splits.index() : -1);
        }
        const bool in_registers = work_index > 0 && output.stays_in_registers(work, true);
        end_launch<TransposedQuads<C>>(t, *this, work, work_index, false, in_registers);
    }
};

template <typename C, typename Keys>
__global__ void __launch_bounds__(kThreads, 1)
    many_rows_fp8_decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ BoxOf<C> box) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    auto& smem = *reinterpret_cast<ManyRowsFp8Memory<C, Keys>*>(bytes);
    run_kernel<C, ManyRowsFp8Consumer<C, Keys>, TransposedQuads<C>, 8 * C::kRangeCtas>(p, box, smem, [&] {
        for (Barrier& barrier : smem.p_is_there) barrier.init(1);
    });
}

}  // namespace mla::hopper
