// Splits: the m-blocks that several CTAs share, their split buffers, and the combine at the end of the same launch.
//
//   each CTA of the m-block
//   ------------------------------------------------------------------------------------------------------------
//   attend to its own keys, with weights relative to the maximum of these keys' scores
//   write a split buffer: unnormalized output, maximum and sum of each row
//   do the rest of its own work, and raise its flag
//   wait for the flags of the other CTAs
//   combine its part of the output, of all splits (Division), and write it
//
// With two splits, each CTA instead combines half of every thread's accumulators (`weights_of_two`); its own half stays
// in registers where possible. In all other cases, `Combiner` does the work.
//
// A quad is a float4 of two rows and two columns; Quads defines which, to suit the kernel's accumulators. A split
// buffer holds [kPairs][kPairQuads] quads, in fp32 or fp16, then [kPairs] states: maximum and sum of both rows of a row
// pair. A flag counts the launches since its plan. All flags are equal between launches, so none has to be cleared.
//
// invariants
//   * a CTA raises its flag once in a launch, when all its split buffers are written, and waits for others only then.
//     So the wait ends once all CTAs of the grid have started (`Launch` in ffi/launch.cuh says why they do)
//   * every sum has a fixed order: the same split buffers give the same bits
#pragma once
#include "math.cuh"
#include "params.cuh"
#include "sync.cuh"
#include "values.cuh"

namespace mla {

// Where the rows of an m-block go: offsets in out and lse, -1 for a row that does not exist.
template <int kRows>
struct OutputOffsets {
    int64_t out[kRows], lse[kRows];
};

// Rows and columns of quad `i` of a row pair: four accumulators as a thread has them. Rows on the M side of the
// products (`kSwapped` false): columns d and d + 1 of row r, then of row r + 8. Quads of columns d and d + 8 are
// neighbours, as a thread has both. Rows on the N side: rows r and r + 1 of column d, then of column d + 8, or, with
// `kColumnPairs`, of column d + 1.
//
// kFp16: whether splits are in fp16. They are where bringing their rows to its range (`fp16_exponent`) takes less time
// than writing and reading twice as many bytes: on Hopper, in m-blocks of 64 rows and with fp8 keys.
template <int kRows_, int kDimLatent, bool kSwapped, bool kColumnPairs = !kSwapped, bool kFp16_ = !kSwapped>
struct Quads {
    static constexpr int kRows = kRows_;
    static constexpr int kPairs = kRows / 2;
    static constexpr int kPairQuads = kDimLatent / 2;
    static constexpr int kCount = kPairs * kPairQuads;
    static constexpr bool kFp16 = kFp16_;
    using Stored = std::conditional_t<kFp16, uint2, float4>;  // in a split buffer

    // Row pairs that hold the first `rows` rows.
    static __device__ int pairs(int rows) { return kSwapped ? (rows + 1) / 2 : (rows + 15) / 16 * 8; }
    static __device__ int row(uint32_t row_pair) { return kSwapped ? row_pair * 2 : row_pair / 8 * 16 + row_pair % 8; }
    static constexpr int kNextRow = kSwapped ? 1 : 8;
    static __device__ int column(uint32_t quad) {
        if constexpr (!kSwapped) return quad / 8 * 16 + quad % 2 * 8 + quad % 8 / 2 * 2;
        return kColumnPairs ? quad * 2 : quad / 8 * 16 + quad % 8;
    }
    static constexpr int kNextColumn = kColumnPairs ? 1 : 8;

    // A quad as a split buffer has it, and back.
    static __device__ Stored stored(const float4& quad) {
        if constexpr (kFp16)
            return make_uint2(pack<__half>(quad.x, quad.y), pack<__half>(quad.z, quad.w));
        else
            return quad;
    }
    static __device__ const float4& loaded(const float4& quad) { return quad; }
    static __device__ float4 loaded(const uint2& quad) {
        const float2 xy = __half22float2(reinterpret_cast<const __half2&>(quad.x));
        const float2 zw = __half22float2(reinterpret_cast<const __half2&>(quad.y));
        return make_float4(xy.x, xy.y, zw.x, zw.y);
    }

    // 16 bytes of fp16 have two quads. Back: the i-th of many, where `two` has quads i / 2 * 2 and the next.
    static __device__ uint4 stored(const float4& first, const float4& next) {
        const uint2 a = stored(first), b = stored(next);
        return make_uint4(a.x, a.y, b.x, b.y);
    }
    static __device__ float4 loaded(const uint4& two, int i) {
        return loaded(i % 2 ? make_uint2(two.z, two.w) : make_uint2(two.x, two.y));
    }

    // The columns of a quad's first row, and of its next row.
    static __device__ float2 first(const float4& quad) {
        return kSwapped ? make_float2(quad.x, quad.z) : make_float2(quad.x, quad.y);
    }
    static __device__ float2 next(const float4& quad) {
        return kSwapped ? make_float2(quad.y, quad.w) : make_float2(quad.z, quad.w);
    }
    // sum += quad * weights, one weight a row.
    static __device__ void add(float4& sum, const float4& quad, const float2& weights) {
        const float2 w = kSwapped ? weights : make_float2(weights.x, weights.x);
        const float2 v = kSwapped ? weights : make_float2(weights.y, weights.y);
        sum.x += quad.x * w.x, sum.y += quad.y * w.y;
        sum.z += quad.z * v.x, sum.w += quad.w * v.y;
    }
    static __device__ float4 scaled(const float4& quad, const float2& weights) {
        float4 product = make_float4(0.f, 0.f, 0.f, 0.f);
        add(product, quad, weights);
        return product;
    }
};

// The maximum of a row's scores (in log2), and the sum of its weights relative to that maximum. The sum is 0 without
// keys, NaN if a score is NaN.
struct RowState {
    float top, total;

    // Of a row whose weights are divided by 2^exponent: the maximum to which they are relative grows.
    __device__ RowState divided(int exponent) const {
        return {top + static_cast<float>(exponent), total * power_of_two(127 - exponent)};
    }
};

// By which power of two a row of a split and its state are divided, to suit the range of fp16: `magnitude`, which none
// of the row's absolute values exceeds, becomes less than 2^15. Values 2^29 times smaller begin to lose bits. Output
// and LSE stay the same, as the weights of the split do not change relative to others. (If magnitudes of two splits
// differ by 2^100 or more, the smaller one's weight may become 0.) The total stays below 2^118, so that all splits'
// totals add up to less than infinity.
__device__ __forceinline__ int fp16_exponent(float magnitude, float total) {
    auto exponent_above = [](float x) { return (__float_as_int(x) >> 23) - 126; };  // x < 2^exponent
    return magnitude == 0.f ? 0 : max(exponent_above(magnitude) - 15, exponent_above(total) - 118);
}

template <int kRows>
__device__ __forceinline__ void store_lse(const DecodeParams& p, const OutputOffsets<kRows>& offsets, int row,
                                          const RowState& state) {
    const int64_t offset = offsets.lse[row];
    if (offset >= 0)
        p.lse[offset] =
            state.total == 0.f ? -INFINITY : (state.top + log2_approx(state.total)) * static_cast<float>(kLnOf2);
}

// Store two columns of a row, or both rows of a quad.
template <typename Element, typename Layout>
__device__ __forceinline__ void store_output(const DecodeParams& p, int64_t offset, int column, const float2& values) {
    if (offset < 0) return;
    auto* out = static_cast<Element*>(p.out) + offset + column;
    out[0] = static_cast<Element>(values.x);
    out[Layout::kNextColumn] = static_cast<Element>(values.y);
}
template <typename Element, typename Layout>
__device__ __forceinline__ void store_output(const DecodeParams& p, const OutputOffsets<Layout::kRows>& offsets,
                                             int row, int column, const float4& quad) {
    store_output<Element, Layout>(p, offsets.out[row], column, Layout::first(quad));
    store_output<Element, Layout>(p, offsets.out[row + Layout::kNextRow], column, Layout::next(quad));
}

// A CTA's flag. One of its threads reads it before it is raised; one raises it, after a barrier of all threads that
// wrote split buffers.
__device__ __forceinline__ uint32_t* flag_of(const DecodeParams& p, int cta) { return p.flags + cta * kFlagStride; }
__device__ __forceinline__ uint32_t read_flag(const DecodeParams& p, int cta) { return load_relaxed(flag_of(p, cta)); }
__device__ __forceinline__ void raise_flag(const DecodeParams& p, int cta, uint32_t before) {
    store_release(flag_of(p, cta), before + 1);
}

// How the quads of an m-block are divided among its CTAs. With many splits, each CTA (or each of the first ones)
// combines one slice of 2^shift quads. With few, the warps of all CTAs take stripes of 32 or 64 quads in turn. The
// division does not depend on the number of threads in a team, which may differ between CTAs.
struct Division {
    static constexpr int kMaxShift = 7;
    int shift = 3;  // a slice of 8 quads is one line of memory
    bool sliced;
    __device__ Division(int quads, int splits) {
        while (shift < kMaxShift && splits << shift < quads) ++shift;
        sliced = splits << shift >= quads;
    }
};

// The splits of an m-block, as a CTA that has one of them sees them. Layout: Quads.
template <typename Layout>
struct SplitBuffers {
    using Stored = typename Layout::Stored;
    static constexpr int kBufferBytes = Layout::kCount * sizeof(Stored) + Layout::kPairs * sizeof(float4);
    // From the buffer of one split to that of the next, and between a CTA's two, in quads.
    static constexpr int kBufferQuads = kBufferBytes / sizeof(Stored), kSplitStride = 2 * kBufferQuads;

    const DecodeParams& p;
    const Splits splits;
    const int count = splits.count();
    const int quads;  // of rows that exist; not positive if there are none, as in the second m-block of some clusters

    __device__ SplitBuffers(const DecodeParams& p, const WorkTile& work, const CtaRange& range, int cta)
        : p(p),
          splits(work, range, cta),
          quads(Layout::pairs(min(work.query_len * p.num_heads - work.m_block * Layout::kRows, Layout::kRows)) *
                Layout::kPairQuads) {}

    // CTA c has buffer 2c + 1 for the m-block that begins in its range, buffer 2c for the one that began earlier.
    __device__ Stored* buffer(int cta, bool m_block_begins_here) const {
        return reinterpret_cast<Stored*>(p.split_buffers) + (2 * cta + m_block_begins_here) * kBufferQuads;
    }
    __device__ Stored* own_buffer(bool m_block_begins_here) const { return buffer(splits.cta, m_block_begins_here); }
    __device__ Stored* buffer_of_split(int i) const { return buffer(splits.first + i, i == 0); }
    static __device__ float4* states_in(Stored* buffer) { return reinterpret_cast<float4*>(buffer + Layout::kCount); }

    template <typename StateOf>
    static __device__ float4 states_of(int row_pair, StateOf state_of) {
        const int row = Layout::row(row_pair);
        const RowState a = state_of(row), b = state_of(row + Layout::kNextRow);
        return make_float4(a.top, a.total, b.top, b.total);
    }
    // By at least as many threads as there are row pairs.
    template <typename StateOf>
    static __device__ void write_states(Stored* buffer, int row_pair, StateOf state_of) {
        if (row_pair < Layout::kPairs) __stcg(states_in(buffer) + row_pair, states_of(row_pair, state_of));
    }

    __device__ void wait_for(int i, uint32_t flag_before) const {
        while (load_acquire(flag_of(p, splits.first + i)) == flag_before) {
        }
    }

    // With two splits: the weights of this CTA's and of the other's in a row pair, and the combined states of its rows.
    struct Weights {
        float2 own_weights, other_weights;
        RowState states[2];

        __device__ float4 sum(const float4& own, const float4& other) const {
            float4 product = Layout::scaled(own, own_weights);
            Layout::add(product, other, other_weights);
            return product;
        }
    };
    __device__ Weights weights_of_two(int row_pair) const {
        return weights_of_two(__ldcg(states_in(buffer_of_split(splits.index())) + row_pair),
                              __ldcg(states_in(buffer_of_split(1 - splits.index())) + row_pair));
    }
    static __device__ Weights weights_of_two(const float4& own, const float4& other) {
        const float2 top = make_float2(fmaxf(own.x, other.x), fmaxf(own.z, other.z));
        const float2 base = make_float2(finite(top.x), finite(top.y));
        const float2 weight = make_float2(exp2_approx(own.x - base.x), exp2_approx(own.z - base.y));
        const float2 other_weight = make_float2(exp2_approx(other.x - base.x), exp2_approx(other.z - base.y));
        const float2 total =
            make_float2(weight.x * own.y + other_weight.x * other.y, weight.y * own.w + other_weight.y * other.w);
        const float2 scale = make_float2(inverse(total.x), inverse(total.y));
        return {make_float2(weight.x * scale.x, weight.y * scale.y),
                make_float2(other_weight.x * scale.x, other_weight.y * scale.y),
                {{top.x, total.x}, {top.y, total.y}}};
    }

    // Combines this CTA's part, by a team of 128 or 256 threads that `sync_team` synchronizes. `scratch`, in shared
    // memory, holds 2 * threads float4.
    template <typename Element, typename SyncTeam>
    __device__ void combine(uint32_t flag_before, const OutputOffsets<Layout::kRows>& offsets, float4* scratch,
                            int thread, int threads, SyncTeam sync_team) const;
};

// A thread of a team that combines its CTA's part of an m-block.
//
//   a slice: many splits                              stripes: few splits
//   ------------------------------------------------  ----------------------------------------------------------
//   a thread of each group has a quad of the slice,   each warp has all splits of a stripe; a lane has one quad of
//   and the group has its share of the splits         it, or two, 32 apart
//   wait for the flags of the group's splits          wait for all flags
//   for each 8 or 16 of the group's splits:           for each stripe of the warp, for each 16 splits:
//     each lane loads a split's state                   as for a slice
//     each thread loads the splits' values
//     weigh the splits
//     accumulate the weighed values
//   add up the groups' sums in shared memory
//   store output and LSE                              store output and LSE
//
// Both cases share one copy of the code. Short code matters: it runs once per launch, and if other kernels ran in
// between, it is fetched from memory.
template <typename Element, typename Layout, typename SyncTeam>
struct Combiner {
    static constexpr int kLoads = 8;  // of a batch. A thread has two batches of loads in flight
    using Stored = typename Layout::Stored;
    static constexpr int kSplitStride = SplitBuffers<Layout>::kSplitStride;
    static_assert(Layout::kPairQuads % (1 << Division::kMaxShift) == 0, "a slice lies in one row pair");

    const SplitBuffers<Layout>& buffers;
    const OutputOffsets<Layout::kRows>& offsets;
    float4* const scratch;
    const int thread, threads;
    const SyncTeam sync_team;

    const int lane = thread & 31, warp = thread >> 5, warps = threads >> 5;
    const Division division{buffers.quads, buffers.count};
    const bool sliced = division.sliced;
    // A group has a thread for each quad of a slice, or is a warp. Groups that share a warp have `group_lanes` each.
    const int shift = sliced ? division.shift : 5, group_size = 1 << shift, group_lanes = min(group_size, 32);
    const int groups = sliced ? threads >> shift : 1;
    const int group_lane = lane & (group_lanes - 1);
    // Splits per group, of which the last groups may have fewer, and splits of this thread's group.
    const int group_splits = (buffers.count + groups - 1) >> exact_log2(groups);
    const int first_split = sliced ? (thread >> shift) * group_splits : 0;
    const int own_splits = min(group_splits, buffers.count - first_split);
    // In a pass a lane weighs one split. Its second batch of loads is for later splits, or for a second quad.
    const int pass_splits = min(group_lanes, 2 * kLoads);
    const bool two_quads_per_lane = !sliced && buffers.count < kLoads;
    const int second_batch_split = two_quads_per_lane ? 0 : kLoads;
    const int stripe_quads = two_quads_per_lane ? 64 : 32;

    Stored* values_of = pinned(buffers.buffer(buffers.splits.first + first_split, false));
    const float4* states_of = pinned(SplitBuffers<Layout>::states_in(values_of + group_lane * kSplitStride));
    float2* weights = reinterpret_cast<float2*>(scratch + threads);  // of the lanes' splits
    float2 *tops = weights + threads, *totals = tops + warps;        // of the warps' splits

    // Over all splits so far: maximum and total of the row pair, and the sums of this thread's quad or quads.
    float2 top, total;
    float4 sum, second_sum;

    __device__ int first_quad() const {
        const int split = buffers.splits.index();
        return sliced ? (split << shift) + (thread & (group_size - 1))
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
    // the last pass over a slice, the maximum is that of all groups.
    __device__ void weigh(const float4& state, bool last_pass) {
        const float2 before = top;
        top.x = warp_max(fmaxf(top.x, state.x)), top.y = warp_max(fmaxf(top.y, state.z));
        if (sliced && last_pass) {
            if (lane == 0) tops[warp] = top;
            sync_team();
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

    // Adds up the sums and totals of a slice's groups.
    __device__ void add_groups() {
#pragma unroll 1
        for (int distance = group_lanes; distance < 32; distance *= 2)
            add(sum, make_float4(__shfl_xor_sync(~0u, sum.x, distance), __shfl_xor_sync(~0u, sum.y, distance),
                                 __shfl_xor_sync(~0u, sum.z, distance), __shfl_xor_sync(~0u, sum.w, distance)));
        // Now one sum and one total belong to each group, or to each warp if it has several groups.
        const int sum_shift = max(shift, 5), sums = threads >> sum_shift, quad = thread & (group_size - 1);
        if (lane < group_size) scratch[(thread >> sum_shift << shift) + quad] = sum;
        if (lane == 0) totals[warp] = total;
        sync_team();
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
        if (!sliced || thread < group_size) {
#pragma unroll 1
            for (int i = 0;; ++i) {
                store_output<Element, Layout>(buffers.p, offsets, row, Layout::column(quad_in_pair + i * 32),
                                              Layout::scaled(sum, scale));
                if (i == 1 || !two_quads_per_lane) break;
                sum = second_sum;
            }
        }
        // Two threads store the LSEs of the pair's two rows: in stripes, those with the pair's first two quads; in the
        // slice that has these quads, the last two threads of the team, which usually store no output.
        const int row_in_pair = sliced ? threads - 1 - thread : quad_in_pair;
        const bool begins_pair = !sliced || quad_in_pair == (thread & (group_size - 1));
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
            if (sliced) add_groups();
            store(quad);
            if (sliced) return;
        }
    }

    static __device__ void add(float4& to, const float4& more) {
        to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w;
    }
};

template <typename Layout>
template <typename Element, typename SyncTeam>
__device__ void SplitBuffers<Layout>::combine(uint32_t flag_before, const OutputOffsets<Layout::kRows>& offsets,
                                              float4* scratch, int thread, int threads, SyncTeam sync_team) const {
    Combiner<Element, Layout, SyncTeam>{*this, offsets, scratch, thread, threads, sync_team}.run(flag_before);
}

}  // namespace mla
