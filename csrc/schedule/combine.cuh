// The combine of an m-block's splits; of two splits, some kernels have a combine of their own. In each of the m-block's
// CTAs, a team of threads combines some of the quads (splits.cuh), of all splits: a ShareCombiner if there are few
// splits of 64 rows, otherwise a Combiner.
#pragma once
#include "numbers/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/operands.cuh"
#include "ptx/registers.cuh"
#include "splits.cuh"

namespace mla {

// A thread of a team of 128 or 256 threads, which `sync` synchronizes. Its scratch memory, in shared memory, has 2
// float4 for each thread, or Shares::kScratchBytes where a ShareCombiner serves.
template <typename Sync>
struct CombineTeam {
    unsigned char* scratch;
    int thread, threads;
    Sync sync;
};
template <typename Sync>
CombineTeam(unsigned char*, int, int, Sync) -> CombineTeam<Sync>;

// Which m-blocks a ShareCombiner serves: those of 64 rows with at most kMostSplits splits, in fp16.
template <typename Layout>
struct Shares {
    static constexpr bool kServed = Layout::kRows == 64 && Layout::kFp16;
    static constexpr int kMostSplits = 8, kLineWords = 128 / sizeof(typename Layout::Word);
    // A CTA's share of all splits has as many words as one split, but for rounding.
    static constexpr int kMostWords = Layout::kCount / Layout::kWordQuads + kMostSplits * kLineWords;
    static constexpr int kScratchBytes =
        kMostWords * sizeof(typename Layout::Word) + kMostSplits * (Layout::kPairs + 1) * sizeof(float2);
};

// Every CTA combines a share: equally many neighbouring words (splits.cuh), in whole lines of memory. The last CTA may
// have fewer.
//
//   wait for the flags of all splits
//   start to copy the share of every split to shared memory
//   meanwhile find the weights of all splits in each row pair, and store LSEs
//   for each word of the share: add up the splits, store the output
//
// So all loads are in flight at once, and no thread waits for memory again.
template <typename Element, typename Layout, typename Team>
struct ShareCombiner {
    using Word = typename Layout::Word;
    static constexpr int kMostSplits = Shares<Layout>::kMostSplits, kLineWords = Shares<Layout>::kLineWords;
    static constexpr int kPairWords = Layout::kPairQuads / Layout::kWordQuads;

    const SplitBuffers<Layout>& buffers;
    const OutputOffsets<Layout::kRows>& offsets;
    const Team& team;

    // The words of the share: from `first` on, in row pairs from `first_pair` on.
    const int count = buffers.count, all_words = buffers.quads / Layout::kWordQuads;
    const int share = (all_words + kLineWords * count - 1) / (kLineWords * count) * kLineWords;
    const int first = buffers.splits.index() * share, words = min(share, all_words - first);
    const int first_pair = first / kPairWords;

    // In scratch memory: the share's words of each split, then the weights of each split in each row pair.
    Word* const values = reinterpret_cast<Word*>(team.scratch);
    float2* const weights = reinterpret_cast<float2*>(values + count * words);

    __device__ void start_to_copy() const {
#pragma unroll 1
        for (int split = 0; split < count; ++split) {
            const auto* from = reinterpret_cast<const Word*>(buffers.buffer_of_split(split)) + first;
            const uint32_t to = smem_address(values + split * words);
            for (int i = team.thread; i < words; i += team.threads)
                cp_async_16_or_zero(to + i * sizeof(Word), from + i, true);
        }
        cp_async_commit();
    }

    // Finds the normalized weights of all splits, and stores the LSEs of the rows whose first words are in the share.
    // kMostSplits lanes share a row pair; each has one split, and the first two of them have an LSE each.
    __device__ void weigh() const {
        const int split = team.thread % kMostSplits, last_pair = (first + words - 1) / kPairWords;
#pragma unroll 1
        for (int begin = first_pair; begin <= last_pair; begin += team.threads / kMostSplits) {
            const int pair = begin + team.thread / kMostSplits;
            float4 state = make_float4(-INFINITY, 0.f, -INFINITY, 0.f);
            if (split < count && pair <= last_pair)
                state = __ldcg(buffers.states_in(buffers.buffer_of_split(split)) + pair);
            const float2 top = make_float2(max_over_lanes<kMostSplits>(state.x), max_over_lanes<kMostSplits>(state.z));
            const float2 weight =
                make_float2(exp2_approx(state.x - finite(top.x)), exp2_approx(state.z - finite(top.y)));
            const float2 total = make_float2(sum_over_lanes<kMostSplits>(weight.x * state.y),
                                             sum_over_lanes<kMostSplits>(weight.y * state.w));
            if (pair > last_pair) continue;
            if (split < count)
                weights[(pair - first_pair) * count + split] =
                    make_float2(weight.x * inverse(total.x), weight.y * inverse(total.y));
            if (split < 2 && pair * kPairWords >= first)
                store_lse(buffers.p, offsets, Layout::row(pair) + split * Layout::kNextRow,
                          split == 0 ? RowState{top.x, total.x} : RowState{top.y, total.y});
        }
    }

    __device__ void add_splits() const {
        static_assert(128 % kPairWords == 0, "all words of a thread have the same columns");
        constexpr int kAtOnce = 4;  // splits, the last of which may not exist
        const int quad = (first + team.thread) % kPairWords * Layout::kWordQuads;
#pragma unroll 1
        for (int i = team.thread; i < words; i += team.threads) {
            const int pair = (first + i) / kPairWords;
            const float2* weight = weights + (pair - first_pair) * count;
            float4 sums[Layout::kWordQuads] = {};
#pragma unroll 1
            for (int begin = 0; begin < count; begin += kAtOnce) {
                Word split_words[kAtOnce] = {};
                float2 split_weights[kAtOnce] = {};
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j)
                    if (begin + j < count)
                        split_words[j] = values[(begin + j) * words + i], split_weights[j] = weight[begin + j];
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
                    for (int k = 0; k < Layout::kWordQuads; ++k)
                        Layout::add(sums[k], Layout::loaded(split_words[j], k), split_weights[j]);
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int64_t offset = offsets.out[Layout::row(pair) + r * Layout::kNextRow];
#pragma unroll
                for (int k = 0; k < Layout::kWordQuads; ++k)
                    store_output<Element, Layout>(buffers.p, offset, Layout::column(quad + k),
                                                  r == 0 ? Layout::first(sums[k]) : Layout::next(sums[k]));
            }
        }
    }

    __device__ void run(uint32_t flag_before) const {
        if (words <= 0) return;  // all of the team
        for (int i = team.thread % 32; i < count; i += 32) buffers.wait_for(i, flag_before);
        __syncwarp();
        start_to_copy();
        weigh();
        cp_async_wait<0>();
        team.sync();  // all values and weights are there
        add_splits();
    }
};

// How the quads of an m-block are divided among the CTAs of a Combiner. With many splits, each CTA (or each of the
// first ones) combines one section of 2^shift quads. With few, the warps of all CTAs take stripes of 32 or 64 quads in
// turn. The division does not depend on the number of threads in a team, which may differ between CTAs.
struct Division {
    static constexpr int kMaxShift = 7;
    int shift = 3;  // a section of 8 quads is one line of memory
    bool in_sections;
    __device__ Division(int quads, int splits) {
        while (shift < kMaxShift && splits << shift < quads) ++shift;
        in_sections = splits << shift >= quads;
    }
};

// A thread of a team that combines its CTA's part of an m-block that no ShareCombiner serves.
//
//   sections: many splits                             stripes: few splits
//   ------------------------------------------------  ----------------------------------------------------------
//   each group of threads has some of the splits, a   each warp has all splits of a stripe; a lane has one quad of
//   thread of the group one quad of the section       it, or two, 32 apart
//   wait for the flags of the group's splits          wait for all flags
//   for each 8 or 16 of the group's splits:           for each stripe of the warp, for each 16 splits:
//     each lane loads a split's state                   as for sections
//     each thread loads the splits' values
//     weigh the splits
//     accumulate the weighed values
//   add up the groups' sums in shared memory
//   store output and LSE                              store output and LSE
//
// Both cases share one copy of the code. Short code matters: it runs once per launch, and if other kernels ran in
// between, it is fetched from memory.
template <typename Element, typename Layout, typename Team>
struct Combiner {
    static constexpr int kLoads = 8;  // of a batch. A thread has two batches of loads in flight
    using Stored = typename Layout::Stored;
    static constexpr int kSplitStride = SplitBuffers<Layout>::kSplitStride;
    static_assert(Layout::kPairQuads % (1 << Division::kMaxShift) == 0, "a section lies in one row pair");

    const SplitBuffers<Layout>& buffers;
    const OutputOffsets<Layout::kRows>& offsets;
    const Team& team;

    const int thread = team.thread, threads = team.threads;
    const int lane = thread & 31, warp = thread >> 5, warps = threads >> 5;
    const Division division{buffers.quads, buffers.count};
    const bool in_sections = division.in_sections;
    // A group has a thread for each quad of a section, or is a warp. Groups that share a warp have `group_lanes` each.
    const int shift = in_sections ? division.shift : 5, group_size = 1 << shift, group_lanes = min(group_size, 32);
    const int groups = in_sections ? threads >> shift : 1;
    const int group_lane = lane & (group_lanes - 1);
    // Splits per group, of which the last groups may have fewer, and splits of this thread's group.
    const int group_splits = (buffers.count + groups - 1) >> exact_log2(groups);
    const int first_split = in_sections ? (thread >> shift) * group_splits : 0;
    const int own_splits = min(group_splits, buffers.count - first_split);
    // In a pass a lane weighs one split. Its second batch of loads is for later splits, or for a second quad.
    const int pass_splits = min(group_lanes, 2 * kLoads);
    const bool two_quads_per_lane = !in_sections && buffers.count < kLoads;
    const int second_batch_split = two_quads_per_lane ? 0 : kLoads;
    const int stripe_quads = two_quads_per_lane ? 64 : 32;

    Stored* values_of = pinned(buffers.buffer(buffers.splits.first + first_split, false));
    const float4* states_of = pinned(SplitBuffers<Layout>::states_in(values_of + group_lane * kSplitStride));
    float4* const scratch = reinterpret_cast<float4*>(team.scratch);
    float2* weights = reinterpret_cast<float2*>(scratch + threads);  // of the lanes' splits
    float2 *tops = weights + threads, *totals = tops + warps;        // of the warps' splits

    // Over all splits so far: maximum and total of the row pair, and the sums of this thread's quad or quads.
    float2 top, total;
    float4 sum, second_sum;

    __device__ int first_quad() const {
        const int split = buffers.splits.index();
        return in_sections ? (split << shift) + (thread & (group_size - 1))
                           : (split + warp * buffers.count) * stripe_quads + lane;
    }

    __device__ void wait_for_splits(uint32_t flag_before) const {
        for (int i = group_lane; i < own_splits; i += group_lanes) buffers.wait_for(first_split + i, flag_before);
    }

    // The m-block begins in the first split's CTA, so that split has its CTA's odd buffer; the others have even ones.
    __device__ int buffer_skew(int begin) const {
        return first_split + begin == 0 ? SplitBuffers<Layout>::kBufferQuads : 0;
    }

    // Loads the state of this lane's split, in a pass over `num_splits` splits from `begin` on.
    __device__ float4 load_state(uint32_t pair, int begin, int num_splits) const {
        if (group_lane >= num_splits) return make_float4(-INFINITY, 0.f, -INFINITY, 0.f);
        constexpr int kStateQuads = sizeof(float4) / sizeof(Stored);
        return __ldcg(states_of + (begin * (kSplitStride / kStateQuads) + pair +
                                   (group_lane == 0 ? buffer_skew(begin) / kStateQuads : 0)));
    }

    __device__ void load_values(Stored (&values)[2][kLoads], uint32_t quad, int begin, int num_splits) const {
        const Stored* from = pinned(values_of + (begin * kSplitStride + quad));
#pragma unroll
        for (int batch = 0; batch < 2; ++batch) {
            const Stored* at = batch == 0 ? from : pinned(from + (two_quads_per_lane ? 32 : kLoads * kSplitStride));
            const Stored* at_first = pinned(at + (batch == 0 || two_quads_per_lane ? buffer_skew(begin) : 0));
            const int loads = pinned(batch == 0 ? num_splits : num_splits - second_batch_split);
#pragma unroll
            for (int i = 0; i < kLoads; ++i)
                if (i < loads) values[batch][i] = __ldcg(i == 0 ? at_first : at + i * kSplitStride);
        }
    }

    // Leaves the weights of a pass's splits in shared memory, for the warp, and rescales the sum to the new maximum. In
    // the last pass over a section, the maximum is that of all groups.
    __device__ void weigh(const float4& state, bool last_pass) {
        const float2 before = top;
        top.x = warp_max(fmaxf(top.x, state.x)), top.y = warp_max(fmaxf(top.y, state.z));
        if (in_sections && last_pass) {
            if (lane == 0) tops[warp] = top;
            team.sync();
            const float2 other = tops[lane & (warps - 1)];
            top.x = warp_max(other.x), top.y = warp_max(other.y);
        }
        const float2 base = make_float2(finite(top.x), finite(top.y));
        const float2 factor = make_float2(exp2_approx(before.x - base.x), exp2_approx(before.y - base.y));
        const float2 weight = make_float2(exp2_approx(state.x - base.x), exp2_approx(state.z - base.y));
        weights[thread] = weight;
        float2 pass_total = make_float2(weight.x * state.y, weight.y * state.w);
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
            pass_total.x += __shfl_xor_sync(~0u, pass_total.x, distance);
            pass_total.y += __shfl_xor_sync(~0u, pass_total.y, distance);
        }
        total.x = total.x * factor.x + pass_total.x, total.y = total.y * factor.y + pass_total.y;
        // second_sum is still zero: two quads a lane mean fewer splits than one pass takes.
        sum = Layout::scaled(sum, factor);
        __syncwarp();
    }

    // sum += weight * value over a pass.
    __device__ void accumulate(const Stored (&values)[2][kLoads], int num_splits) {
#pragma unroll
        for (int batch = 0; batch < 2; ++batch) {
            if (batch == 1 && min(group_splits, pass_splits) <= second_batch_split) break;
            const int first = batch == 0 ? 0 : second_batch_split;
            const int loads = pinned(num_splits - first);
            const auto* from = reinterpret_cast<const float4*>(weights + thread - group_lane + first);
            float4 weights_of_two[kLoads / 2];  // splits
#pragma unroll
            for (int i = 0; i < kLoads / 2; ++i) weights_of_two[i] = from[i];
            float4& to = batch == 0 ? sum : second_sum;
#pragma unroll
            for (int i = 0; i < kLoads; ++i) {
                const float4& two = weights_of_two[i / 2];
                if (i < loads)
                    Layout::add(to, Layout::loaded(values[batch][i]),
                                i % 2 ? make_float2(two.z, two.w) : make_float2(two.x, two.y));
            }
        }
        if (!two_quads_per_lane) {
            add(sum, second_sum);
            second_sum = make_float4(0.f, 0.f, 0.f, 0.f);
        }
        __syncwarp();  // the weights have been read
    }

    // Adds up the sums and totals of a section's groups.
    __device__ void add_groups() {
#pragma unroll 1
        for (int distance = group_lanes; distance < 32; distance *= 2)
            add(sum, make_float4(__shfl_xor_sync(~0u, sum.x, distance), __shfl_xor_sync(~0u, sum.y, distance),
                                 __shfl_xor_sync(~0u, sum.z, distance), __shfl_xor_sync(~0u, sum.w, distance)));
        // Now one sum and one total belong to each group, or to each warp if it has several groups.
        const int sum_shift = max(shift, 5), sums = threads >> sum_shift, quad = thread & (group_size - 1);
        if (lane < group_size) scratch[(thread >> sum_shift << shift) + quad] = sum;
        if (lane == 0) totals[warp] = total;
        team.sync();
        sum = make_float4(0.f, 0.f, 0.f, 0.f), total = make_float2(0.f, 0.f);
#pragma unroll 1
        for (int begin = 0; begin < sums; begin += 4) {
            float4 next_sums[4] = {};
            float2 next_totals[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (begin + i < sums) {
                    next_sums[i] = scratch[(begin + i << shift) + quad];
                    next_totals[i] = totals[begin + i << sum_shift - 5];
                }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                add(sum, next_sums[i]);
                total.x += next_totals[i].x, total.y += next_totals[i].y;
            }
        }
    }

    __device__ void store(uint32_t quad) {
        const float2 scale = make_float2(inverse(total.x), inverse(total.y));
        const int row = Layout::row(quad / Layout::kPairQuads);
        const uint32_t quad_in_pair = quad % Layout::kPairQuads;
        if (!in_sections || thread < group_size) {
#pragma unroll 1
            for (int i = 0;; ++i) {
                store_output<Element, Layout>(buffers.p, offsets, row, Layout::column(quad_in_pair + i * 32),
                                              Layout::scaled(sum, scale));
                if (i == 1 || !two_quads_per_lane) break;
                sum = second_sum;
            }
        }
        // Two threads store the LSEs of the pair's two rows: in stripes, those with the pair's first two quads; in the
        // section that has these quads, the last two threads of the team, which usually store no output.
        const int row_in_pair = in_sections ? threads - 1 - thread : quad_in_pair;
        const bool begins_pair = !in_sections || quad_in_pair == (thread & (group_size - 1));
        if (row_in_pair < 2 && begins_pair)
            store_lse(buffers.p, offsets, row + row_in_pair * Layout::kNextRow,
                      row_in_pair == 0 ? RowState{top.x, total.x} : RowState{top.y, total.y});
    }

    __device__ void run(uint32_t flag_before) {
        int quad = first_quad();
        if (quad < buffers.quads) wait_for_splits(flag_before);
        __syncwarp();
        for (; quad < buffers.quads; quad += warps * buffers.count * stripe_quads) {
            top = make_float2(-INFINITY, -INFINITY), total = make_float2(0.f, 0.f);
            sum = second_sum = make_float4(0.f, 0.f, 0.f, 0.f);
            for (int begin = 0; begin < group_splits; begin += pass_splits) {
                const int num_splits = min(own_splits - begin, pass_splits);
                const float4 state = load_state(quad / Layout::kPairQuads, begin, num_splits);
                Stored values[2][kLoads];
                load_values(values, quad, begin, num_splits);
                weigh(state, begin + pass_splits >= group_splits);
                accumulate(values, num_splits);
            }
            if (in_sections) add_groups();
            store(quad);
            if (in_sections) return;
        }
    }

    static __device__ void add(float4& to, const float4& more) {
        to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w;
    }
};

// By all threads of a team; `flag_before`: this CTA's flag when the launch began.
template <typename Element, typename Layout, typename Team>
__device__ __forceinline__ void combine_splits(const SplitBuffers<Layout>& buffers, uint32_t flag_before,
                                               const OutputOffsets<Layout::kRows>& offsets, const Team& team) {
    if constexpr (Shares<Layout>::kServed)
        if (buffers.count <= Shares<Layout>::kMostSplits)
            return ShareCombiner<Element, Layout, Team>{buffers, offsets, team}.run(flag_before);
    Combiner<Element, Layout, Team>{buffers, offsets, team}.run(flag_before);
}

}  // namespace mla
