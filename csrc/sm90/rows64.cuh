// MLA decode for Hopper, up to 64 rows (query heads x query tokens) a block: rows on wgmma's 64-row side.
//
//   S[64 x tokens] = Q[64 x d] * K^T[d x tokens]      A = Q, B = K, both from shared memory
//   O[64 x d_c]   += P[64 x tokens] * V[tokens x d_c] A = P from registers, B = V: the same bytes as K
//
// grid, block, loading, pairs   as in decode.cuh
//   consumers  Scores and softmax of step t (64 tokens) are consumer t % 2's, which gives P to the other: the fragment
//              of S is the A fragment of P, so thread i of one writes 64 B that thread i of the other reads. Both
//              multiply every step, each into its half of the d_c columns, so nothing has to be joined at the end.
//
// shared memory (Rows64SharedMemory)
//   kv       kStages tiles of 32 tokens, two of which, side by side, are a step; in groups of 8 tokens:
//            [d / 64][8][128 B], swizzled by 128 B; K-major as K, MN-major as V. Each is given back by itself. The rope
//            columns, once the scores are there, carry P to the other consumer.
//   q        [d / 64][64][128 B], K-major, swizzled
//
// order    A consumer's own step t comes between two of the other's. It starts the scores of t before it waits for
//          P of t - 1, if the keys are there: the products with t - 1 then hide its softmax. If they are not, it
//          finishes t - 1 first, so that its buffers are loaded again as early as can be.
//
// softmax  As in decode.cuh, the maximum may be stale by up to 8 (log2). Four neighbouring lanes hold a row of S; a
//          warp decides alone for its 16 rows, and the same warp of the other consumer follows it one step later.
//
// invariants
//   * steps are consumed in order and change hands at every step, also from one m-block to the next: whoever writes
//     `tops` has read those before, so one buffer is enough. Which consumer had which step does not change any bit.
//   * keys outside [token_begin, token_end), split m-blocks, order of sums: as in decode.cuh
#pragma once
#include "consumer.cuh"

namespace mla::sm90 {

template <typename Element_, int kDimLatent_, int kDimRope_, int kStages_, bool kTma_, bool kProfile_>
struct Rows64Config {
    using Element = Element_;
    static constexpr int kDimLatent = kDimLatent_;
    static constexpr int kDimRope = kDimRope_;
    static constexpr int kDim = kDimLatent + kDimRope;
    static constexpr int kRows = 64;
    static constexpr int kStageTokens = 32;  // tokens of a buffer
    static constexpr int kTile = 64;         // that are computed at once
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

// The softmax state of an m-block's rows, sums by consumer.
template <typename C>
struct MBlockState {
    float tops[C::kRows], sums[2][C::kRows];
    __device__ RowState operator()(int row) const { return {tops[row], sums[0][row] + sums[1][row]}; }
};

template <typename C>
struct Rows64SharedMemory {
    alignas(1024) unsigned char kv[C::kStages][C::kStageBytes];
    alignas(1024) unsigned char q[C::kQueryBuffers][C::kQueryBytes];
    float2 tops[128];          // the maxima that P is relative to, per thread of a consumer
    MBlockState<C> states[2];  // m-blocks take turns
    OutputOffsets<C::kRows> offsets[kOffsetBuffers];
    CtaRange range;
    uint32_t flag;  // this CTA's, when the launch began
    Barrier kv_full[C::kStages][C::kSegments], kv_empty[C::kStages];
    Barrier q_full[C::kQueryBuffers], q_empty[C::kQueryBuffers];
    Barrier p_full[4];  // per warp of a consumer; a phase a step
    PairBarriers pair;
};

template <typename C>
using Rows64Quads = Quads<C::kRows, C::kDimLatent, false>;

template <typename C>
struct Rows64Consumer : ConsumerThread<C, Rows64SharedMemory<C>, Rows64Quads<C>> {
    using Element = typename C::Element;
    using OutputQuads = Rows64Quads<C>;
    using Rows = OutputOffsets<C::kRows>;
    static constexpr int kTiles = C::kTile / C::kStageTokens;
    static constexpr int kScores = C::kTile / 2;             // accumulators of S a thread holds
    static constexpr int kProducts = C::kTile / 16;          // P V, of 16 tokens each
    static constexpr int kBlocks = C::kDimLatent / 2 / 128;  // of 128 columns of O
    static constexpr int kOutputs = 64;                      // accumulators of a block
    static constexpr int kQuads = kBlocks * kOutputs / 4;    // of a thread

    using Base = ConsumerThread<C, Rows64SharedMemory<C>, Rows64Quads<C>>;
    using Base::any_of_own, Base::sync_own, Base::sync_both, Base::key_limit, Base::zero_values;
    using Base::Base;
    using Base::p, Base::smem, Base::consumer, Base::thread, Base::warp, Base::lane, Base::profiler;

    // This thread's rows are row() and row() + 8. m is the maximum in use (log2 tiles), the same in both consumers; l
    // this thread's own share of the sum.
    float o[kBlocks][kOutputs];
    float m[2], l[2];

    __device__ int row() const { return warp * 16 + lane / 4; }

    // The buffers of a step, which lie side by side.
    static __device__ int stage_of(uint32_t turn) { return turn % (C::kStages / kTiles) * kTiles; }
    static __device__ uint32_t phase_of(uint32_t turn) { return turn / (C::kStages / kTiles) % 2; }
    __device__ unsigned char* keys_of(uint32_t turn) const { return smem.kv[stage_of(turn)]; }
    // Where P of a step lies for the other consumer: in the rope columns of the keys, which nobody reads any more.
    __device__ uint4& shared_probabilities(uint32_t turn, int product) const {
        return reinterpret_cast<uint4*>(keys_of(turn) + (product * 2 + thread / 64) * C::kTokenGroupBytes +
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

    static constexpr __device__ int half(int i) { return i / 2 % 2; }  // which of the two rows accumulator i is of

    __device__ void rescale(const float (&factor)[2]) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int i = 0; i < kOutputs; ++i) o[b][i] *= factor[half(i)];
    }

    // Whether the keys of a step have arrived, asked by all warps of this consumer.
    __device__ bool arrived(uint32_t turn) const {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) missing |= !smem.kv_full[stage_of(turn) + i][0].has_completed(phase_of(turn));
        return !any_of_own(missing);
    }
    __device__ void wait_for_keys(uint32_t turn) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) smem.kv_full[stage_of(turn) + i][0].wait(phase_of(turn));
        profiler.mark(Event::kKeysArrived);
    }

    // Starts S = Q K^T over a step whose keys have arrived.
    __device__ void start_scores(float (&s)[kScores], uint32_t turn, int valid) {
        using Scores = Wgmma<C::kTile, Element, Major::kK>;
        unsigned char* kv = keys_of(turn);
        if constexpr (!C::kTma) fence_async_proxy();
        if (valid < C::kTile) {
            zero_values(kv, valid);
            fence_async_proxy();
            sync_own();
        }
        const uint64_t q_descriptor = make_descriptor(smem.q[0], 0, 1024, Swizzle::k128B);
        const uint64_t k_descriptor = uniform(make_descriptor(kv, 0, C::kTokenGroupBytes, Swizzle::k128B));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < C::kDim / 16; ++i)
            Scores::mma(s, advance(q_descriptor, i / 4 * C::kQueryColumnBlockBytes + i % 4 * 32),
                        advance(k_descriptor, i / 4 * 1024 + i % 4 * 32), i > 0);
        wgmma_commit();
    }

    // Starts O += P V over a step: a group of products for each of its buffers.
    __device__ void start_values(const uint32_t (&probabilities)[kProducts][4], uint32_t turn) {
        using Values = WgmmaFromRegisters<Element>;
        const uint64_t v_descriptor = uniform(
            make_descriptor(keys_of(turn) + consumer * (kBlocks * 2048), 1024, C::kTokenGroupBytes, Swizzle::k128B));
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) pin_registers(o[b]);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kProducts; ++i) {
#pragma unroll
            for (int b = 0; b < kBlocks; ++b)
                Values::mma(o[b], probabilities[i], advance(v_descriptor, i * 2 * C::kTokenGroupBytes + b * 2048));
            if ((i + 1) % (C::kStageTokens / 16) == 0) wgmma_commit();
        }
    }

    // Waits for them, and gives each buffer back as soon as it has been read.
    __device__ void finish_values(uint32_t turn) {
        static_assert(kTiles == 2);
        wgmma_wait<1>();
        __syncwarp();  // lane 0 speaks for all, which have read P from these buffers
        if (lane == 0) smem.kv_empty[stage_of(turn)].arrive();
        wgmma_wait<0>();
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) pin_registers(o[b]);
        if (lane == 0) smem.kv_empty[stage_of(turn) + 1].arrive();
        profiler.mark(Event::kValues);
    }

    // P from the scores of this consumer's own step, also to the other consumer. True if O must be rescaled.
    __device__ bool softmax(float (&s)[kScores], uint32_t (&probabilities)[kProducts][4], float (&factor)[2],
                            const WorkTile& work, int token, int first_limit, uint32_t turn) {
        profiler.mark(Event::kScores);
        sync_own();  // all warps have multiplied with the rope columns
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] *= p.scale_log2;
        if (token + C::kTile > first_limit) {
            const int limits[2] = {key_limit(work, row()), key_limit(work, row() + 8)};
#pragma unroll
            for (int i = 0; i < kScores; ++i)
                if (token + i / 4 * 8 + lane % 4 * 2 + i % 2 >= limits[half(i)]) s[i] = -INFINITY;
        }
        float tops[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int i = 0; i < kScores; ++i) tops[half(i)] = fmaxf(tops[half(i)], s[i]);
        const bool refresh = __any_sync(~0u, tops[0] > m[0] + kStaleBound || tops[1] > m[1] + kStaleBound);
        if (refresh) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float top = fmaxf(m[h], tops[h]);
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                factor[h] = exp2_approx(m[h] - finite(top));
                m[h] = top;
                l[h] *= factor[h];
            }
        }
        const float base[2] = {finite(m[0]), finite(m[1])};
#pragma unroll
        for (int i = 0; i < kScores; i += 2) {
            const float low = exp2_approx(s[i] - base[half(i)]), high = exp2_approx(s[i + 1] - base[half(i)]);
            l[half(i)] += low + high;
            probabilities[i / 8][i / 2 % 4] = pack<Element>(low, high);
        }
#pragma unroll
        for (int i = 0; i < kProducts; ++i)
            shared_probabilities(turn, i) = reinterpret_cast<const uint4&>(probabilities[i]);
        smem.tops[thread] = make_float2(m[0], m[1]);
        fence_async_proxy();  // the buffers are loaded again, and their tails may have been zeroed
        smem.p_full[warp].arrive();
        profiler.mark(Event::kSoftmax);
        return refresh;
    }

    // Takes P of a step of the other consumer's, and its maximum, and rescales O to it.
    __device__ void take_probabilities(uint32_t (&probabilities)[kProducts][4], uint32_t turn) {
        smem.p_full[warp].wait(turn % 2);
        if constexpr (!C::kTma) fence_async_proxy();
#pragma unroll
        for (int i = 0; i < kProducts; ++i) reinterpret_cast<uint4&>(probabilities[i]) = shared_probabilities(turn, i);
        const float2 top = smem.tops[thread];
        if (__any_sync(~0u, top.x != m[0] || top.y != m[1])) {
            const float factor[2] = {exp2_approx(m[0] - finite(top.x)), exp2_approx(m[1] - finite(top.y))};
            rescale(factor);
            m[0] = top.x, m[1] = top.y;
            l[0] *= factor[0], l[1] *= factor[1];
        }
    }

    // All steps of an work tile; its first one is step `turn` of this CTA.
    __device__ void attend(const WorkTile& work, uint32_t turn, int steps) {
        const int first_limit = key_limit(work, 0);
        const int first = (turn ^ consumer) % 2;
        if (first >= steps) Base::release_queries(0);
        // Step i is this consumer's own, i - 1 the other's.
        for (int i = first; i - 1 < steps; i += 2) {
            const bool follows = i > 0, owns = i < steps;
            const uint32_t own = turn + i, other = own - 1;
            const int token = work.token_begin + i * C::kTile, valid = work.token_end - token;
            float s[kScores], factor[2];
            uint32_t probabilities[kProducts][4], others[kProducts][4];
            bool refresh = false;
            if (follows && owns && arrived(own)) {
                start_scores(s, own, valid);
                take_probabilities(others, other);
                start_values(others, other);
                wgmma_wait<kTiles>();
                pin_registers(s);
                refresh = softmax(s, probabilities, factor, work, token, first_limit, own);
                finish_values(other);
            } else {
                if (follows) {
                    take_probabilities(others, other);
                    start_values(others, other);
                    finish_values(other);
                }
                if (owns) {
                    wait_for_keys(own);
                    start_scores(s, own, valid);
                    wgmma_wait<0>();
                    pin_registers(s);
                    refresh = softmax(s, probabilities, factor, work, token, first_limit, own);
                }
            }
            if (!owns) break;
            if (i + 2 >= steps) Base::release_queries(0);
            if (refresh) rescale(factor);
            start_values(probabilities, own);
            finish_values(own);
        }
    }

    // A quad is four accumulators, of 8 columns of this consumer's.
    __device__ float& accumulator(int quad, int i) { return o[quad / 16][quad % 16 * 4 + i]; }
    __device__ float4 get_quad(int i) {
        return make_float4(accumulator(i, 0), accumulator(i, 1), accumulator(i, 2), accumulator(i, 3));
    }
    __device__ void set_quad(int i, const float4& from) {
        accumulator(i, 0) = from.x, accumulator(i, 1) = from.y;
        accumulator(i, 2) = from.z, accumulator(i, 3) = from.w;
    }

    // Writes the first kCount of this thread's quads, as those from `quad` on of the output.
    template <int kCount>
    __device__ void write_output(const Rows& rows, int quad, const float (&scale)[2]) {
        const bool odd = lane % 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int64_t offset = rows.out[row() + h * 8];
            auto* out = static_cast<Element*>(p.out) + offset + consumer * (kBlocks * 128) + (quad + odd) * 8 +
                        lane % 4 / 2 * 4;
#pragma unroll
            for (int i = 0; i < kCount; i += 2) {
                // Two lanes exchange halves of two quads, so that each has 8 B of one.
                const uint32_t first =
                    pack<Element>(accumulator(i, h * 2) * scale[h], accumulator(i, h * 2 + 1) * scale[h]);
                const uint32_t second =
                    pack<Element>(accumulator(i + 1, h * 2) * scale[h], accumulator(i + 1, h * 2 + 1) * scale[h]);
                const uint32_t got = __shfl_xor_sync(~0u, odd ? first : second, 1);
                if (offset >= 0)
                    *reinterpret_cast<uint2*>(out + i * 8) = odd ? make_uint2(got, second) : make_uint2(first, got);
            }
        }
    }

    // This thread's quads in a slot, 4 apart.
    __device__ int64_t first_quad() const {
        return (warp * 8 + lane / 4) * OutputQuads::kPairQuads + consumer * (kBlocks * 64) + lane % 4;
    }
    __device__ bool has_rows(const SplitBuffers<OutputQuads>& buffers) const {
        return warp * 8 * OutputQuads::kPairQuads < buffers.quads;
    }

    using Weights = typename SplitBuffers<OutputQuads>::Weights;
    // Writes the first half of this thread's quads: sums of two splits, of whom this is number `rank`.
    __device__ void write_sums(const Rows& rows, int rank, const Weights& weights) {
        write_output<kQuads / 2>(rows, rank * (kQuads / 2), {1.f, 1.f});
        if (rank == 0 && consumer == 0 && lane % 4 == 0) {
            store_lse(p, rows, row(), weights.states[0]);
            store_lse(p, rows, row() + 8, weights.states[1]);
        }
    }

    // Whether what this CTA will combine of an m-block of two stays in registers.
    __device__ bool keeps(const WorkTile& work, bool last) const { return last && is_two_way_split(work, smem.range); }

    // Two splits combine half of every thread's quads each. `kKept`: this one's are in its registers.
    template <bool kKept>
    __device__ void combine_two(const SplitBuffers<OutputQuads>& buffers, const Rows& rows) {
        constexpr int kMine = kQuads / 2, kAhead = 8;  // loads in flight
        const int rank = buffers.splits.index(), quad = rank * kMine;
        buffers.wait_for(1 - rank, smem.flag);
        if (!has_rows(buffers)) return;
        const float4* mine = buffers.buffer_of_split(rank) + first_quad() + quad * 4;
        const float4* others = buffers.buffer_of_split(1 - rank) + first_quad() + quad * 4;
        const auto weights = buffers.weights_of_two(warp * 8 + lane / 4);
#pragma unroll
        for (int begin = 0; begin < kMine; begin += kAhead) {
            float4 own[kAhead], other[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                other[i] = __ldcg(others + (begin + i) * 4);
                if constexpr (kKept)  // registers cannot be indexed by the rank
                    own[i] = rank ? get_quad(kMine + begin + i) : get_quad(begin + i);
                else
                    own[i] = __ldcg(mine + (begin + i) * 4);
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) set_quad(begin + i, weights.sum(own[i], other[i]));
            __syncwarp();  // or else all loads would be moved to the front, and registers run out
        }
        write_sums(rows, rank, weights);
    }

    // Ends the m-block of a pair: `combine_two` without split buffers.
    __device__ void finish_pair(const Rows& rows, const MBlockState<C>& state) {
        constexpr int kMine = kQuads / 2;
        const int rank = blockIdx.x % 2;
        auto state_of = [&](int row) { return state(row); };
        auto quad = [&](int half, int i) {  // registers cannot be indexed by the rank
            return half ? get_quad(kMine + i) : get_quad(i);
        };
        Base::send_states(state_of);
        Base::send_quads([&](int i) { return quad(1 - rank, i); });
        const auto weights = Base::weights_in_pair(warp * 8 + lane / 4, state_of);
        Base::wait_for_quads();
#pragma unroll
        for (int i = 0; i < kMine; ++i) set_quad(i, weights.sum(quad(rank, i), Base::received().quads[i][thread]));
        write_sums(rows, rank, weights);
    }

    // Gathers the state of an m-block's share, for all to read.
    __device__ void publish_state(MBlockState<C>& state) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            l[h] += __shfl_xor_sync(~0u, l[h], 1);
            l[h] += __shfl_xor_sync(~0u, l[h], 2);
            if (lane % 4 == 0) {
                state.sums[consumer][row() + h * 8] = l[h];
                if (consumer == 0) state.tops[row() + h * 8] = m[h];
            }
        }
        Base::sync_both_to_read();
        profiler.mark(Event::kMerged);
    }

    // Ends an m-block's share.
    __device__ void finish_entry(const WorkTile& work, const Rows& rows, const MBlockState<C>& state, bool kept) {
        if (work.split()) {
            const SplitBuffers<OutputQuads> buffers(p, work, smem.range);
            float4* buffer = buffers.buffer(blockIdx.x, work.has_first_key);
            buffers.write_states(buffer, threadIdx.x - 128, [&](int row) { return state(row); });
            const int kept_half = kept ? buffers.splits.index() : -1;
#pragma unroll
            for (int i = 0; i < kQuads && has_rows(buffers); ++i)
                if (i / (kQuads / 2) != kept_half) __stcg(buffer + first_quad() + i * 4, get_quad(i));
        } else {
            float scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float total = state(row() + h * 8).total;
                scale[h] = total > 0.f ? 1.f / total : 0.f;
            }
            write_output<kQuads>(rows, 0, scale);
            if (consumer == 0 && thread < C::kRows) store_lse(p, rows, thread, state(thread));
        }
        profiler.mark(Event::kWorkTileWritten);
    }

    __device__ void run() {
        WorkCursor<C::kRows> cursor(p.lengths, p.num_heads, smem.range);
        WorkTile work;
        uint32_t turn = 0;  // steps so far
        bool kept = false;
        int ordinal = 0;
        const bool paired = smem.range.paired;
        if (paired) Base::begin_pair();
        for (; cursor.next(work); ++ordinal) {
            reset_state();
            smem.q_full[0].wait(ordinal % 2);
            fence_async_proxy();
            profiler.mark(Event::kQueriesArrived);
            const int steps = (work.token_end - work.token_begin + C::kTile - 1) / C::kTile;
            attend(work, turn, steps);
            turn += steps;
            MBlockState<C>& state = smem.states[ordinal % 2];
            publish_state(state);
            if (paired) break;
            kept = keeps(work, cursor.at_end());
            finish_entry(work, smem.offsets[offset_buffer(ordinal)], state, kept);
            Base::note(work);
        }
        // A pair's code comes last: what runs without pairs lies together then, and is there sooner when it comes from
        // memory.
        if (!paired) {
            sync_both();  // all split buffers are complete
            Base::announce(ordinal > 0);
            if (kept)
                combine_two<true>(SplitBuffers<OutputQuads>(p, work, smem.range),
                                  smem.offsets[offset_buffer(ordinal - 1)]);
            Base::combine(work, ordinal - 1, [&](bool last, const auto& buffers, const Rows& rows) {
                if (!(last && kept)) combine_two<false>(buffers, rows);
            });
        } else {
            Base::count_launch();
            finish_pair(smem.offsets[0], smem.states[0]);
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
