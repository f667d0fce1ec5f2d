// Entries that several CTAs share: their split buffers, and the combine inside the same launch.
//
// Each split leaves an unnormalized fp32 split of its share, relative to the share's own maximum, raises its
// flag, waits for the others' flags and then combines its part of the m-block's output (Division). Where there are two,
// kernels give each of them half of every thread's accumulators instead (`weights_of_two`), which need not leave its
// registers.
//
// A quad is a float4 of two rows and two columns, in a fixed order that suits the accumulators of the kernel (Quads).
// A slot, one share's split, holds [kPairs][kPairQuads] quads, then [kPairs] states: m and l of both rows of a
// pair. A flag counts the launches since its plan. All are equal between launches, so these have nothing to clear.
//
// invariants
//   * every CTA raises its flag once a launch, when all its own split buffers are written, and waits for others only
//   then:
//     the wait ends once all CTAs of the grid have started (`Launch` in ffi/launch.cuh says why they do)
//   * every sum has a fixed order: the same split buffers give the same bits
#pragma once
#include "math.cuh"
#include "params.cuh"
#include "sync.cuh"

namespace mla {

// The maximum of a row without keys is -inf; differences to it must not be NaN.
__device__ __forceinline__ float finite(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }
// What normalizes such a row, whose weights sum to 0, leaves zeros. (A division would be a call.)
__device__ __forceinline__ float inverse(float total) { return total > 0.f ? reciprocal_approx(total) : 0.f; }

// A value that the compiler has to have in a register: it would compute each address from the start.
template <typename T>
__device__ __forceinline__ T* pinned(T* at) {
    asm volatile("" : "+l"(at));
    return at;
}
__device__ __forceinline__ int pinned(int number) {
    asm volatile("" : "+r"(number));
    return number;
}

// Where the rows of an m-block go: offsets in out and lse, -1 for a row that does not exist.
template <int kRows>
struct OutputOffsets {
    int64_t out[kRows], lse[kRows];
};

// Rows and columns of quad `i` of a pair: four accumulators as a thread has them. Rows on the M side of the products
// (`kSwapped` false): columns d and d + 1 of row r, then of row r + 8; on the N side: rows r and r + 1 of column d,
// then of column d + 8.
template <int kRows_, int kDimLatent, bool kSwapped>
struct Quads {
    static constexpr int kRows = kRows_;
    static constexpr int kPairs = kRows / 2;
    static constexpr int kPairQuads = kDimLatent / 2;
    static constexpr int kCount = kPairs * kPairQuads;

    // Pairs that hold the first `rows` rows.
    static __device__ int pairs(int rows) { return kSwapped ? (rows + 1) / 2 : (rows + 15) / 16 * 8; }
    static __device__ int row(uint32_t pair) { return kSwapped ? pair * 2 : pair / 8 * 16 + pair % 8; }
    static constexpr int kNextRow = kSwapped ? 1 : 8;
    static __device__ int column(uint32_t quad) { return kSwapped ? quad / 8 * 16 + quad % 8 : quad * 2; }
    static constexpr int kNextColumn = kSwapped ? 8 : 1;

    // Of a quad, what is of its first row, and of its next.
    static __device__ float2 first(const float4& quad) {
        return kSwapped ? make_float2(quad.x, quad.z) : make_float2(quad.x, quad.y);
    }
    static __device__ float2 next(const float4& quad) {
        return kSwapped ? make_float2(quad.y, quad.w) : make_float2(quad.z, quad.w);
    }
    // sum += quad * weights, which are the two rows'.
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

// The maximum (log2 tiles) of a row, and the sum of its weights relative to it.
struct RowState {
    float top, total;
};

template <int kRows>
__device__ __forceinline__ void store_lse(const DecodeParams& p, const OutputOffsets<kRows>& rows, int row,
                                          const RowState& state) {
    const int64_t offset = rows.lse[row];
    if (offset >= 0)
        p.lse[offset] = state.total > 0.f ? (state.top + log2_approx(state.total)) * 0.6931471805599453f : -INFINITY;
}

// A row's two columns of a quad, and both rows'.
template <typename Element, typename P>
__device__ __forceinline__ void store_output(const DecodeParams& p, int64_t row, int column, const float2& values) {
    if (row < 0) return;
    auto* out = static_cast<Element*>(p.out) + row + column;
    out[0] = static_cast<Element>(values.x);
    out[P::kNextColumn] = static_cast<Element>(values.y);
}
template <typename Element, typename P>
__device__ __forceinline__ void store_output(const DecodeParams& p, const OutputOffsets<P::kRows>& rows, int row,
                                             int column, const float4& quad) {
    store_output<Element, P>(p, rows.out[row], column, P::first(quad));
    store_output<Element, P>(p, rows.out[row + P::kNextRow], column, P::next(quad));
}

// How the quads of an m-block are divided. If there are many splits, each (or each of the first ones) combines one
// slice of 2^shift quads. If there are few, their warps take chunks of 32 or 64 quads in turn. Not by the teams'
// sizes, which may differ between CTAs.
struct Division {
    static constexpr int kMaxShift = 7;
    int shift = 3;  // a slice of 8 quads is one line of memory
    bool sliced;
    __device__ Division(int quads, int contributors) {
        while (shift < kMaxShift && contributors << shift < quads) ++shift;
        sliced = contributors << shift >= quads;
    }
};

// A CTA's flag, read before it is raised: by one thread, behind a barrier of all that wrote split buffers.
__device__ __forceinline__ uint32_t* flag_of(const DecodeParams& p, int cta) { return p.flags + cta * kFlagStride; }
__device__ __forceinline__ uint32_t read_flag(const DecodeParams& p) { return load_relaxed(flag_of(p, blockIdx.x)); }
__device__ __forceinline__ void raise_flag(const DecodeParams& p, uint32_t before) {
    store_release(flag_of(p, blockIdx.x), before + 1);
}

template <typename P>
struct SplitBuffers {
    static constexpr int kBufferQuads = P::kCount + P::kPairs;

    const DecodeParams& p;
    const Splits splits;
    const int count = splits.count();
    const int quads;  // of rows that exist

    __device__ SplitBuffers(const DecodeParams& p, const WorkTile& work, const CtaRange& range)
        : p(p),
          splits(work, range),
          quads(P::pairs(min(work.query_len * p.num_heads - work.m_block * P::kRows, P::kRows)) * P::kPairQuads) {}

    // CTA c has slot 2c + 1 for the m-block that begins in it, slot 2c for the one that began before.
    __device__ float4* buffer(int cta, bool entry_begins_here) const {
        return p.split_buffers + (2 * cta + entry_begins_here) * kBufferQuads;
    }

    template <typename StateOf>
    static __device__ float4 states_of(int pair, StateOf state_of) {
        const RowState a = state_of(P::row(pair)), b = state_of(P::row(pair) + P::kNextRow);
        return make_float4(a.top, a.total, b.top, b.total);
    }

    // By as many threads as there are pairs, or more.
    template <typename StateOf>
    static __device__ void write_states(float4* buffer, int pair, StateOf state_of) {
        if (pair < P::kPairs) __stcg(buffer + P::kCount + pair, states_of(pair, state_of));
    }

    __device__ const float4* buffer_of_split(int i) const { return buffer(splits.first + i, i == 0); }

    __device__ void wait_for(int i, uint32_t flag_before) const {
        while (load_acquire(flag_of(p, splits.first + i)) == flag_before) {
        }
    }

    // For two splits who divide the quads of each thread: what this one and the other weigh in the rows of a
    // pair, and these rows' states.
    struct Weights {
        float2 mine, others;
        RowState states[2];

        __device__ float4 sum(const float4& own, const float4& other) const {
            float4 product = P::scaled(own, mine);
            P::add(product, other, others);
            return product;
        }
    };
    __device__ Weights weights_of_two(int pair) const {
        return weights_of_two(__ldcg(buffer_of_split(splits.index()) + P::kCount + pair),
                              __ldcg(buffer_of_split(1 - splits.index()) + P::kCount + pair));
    }
    static __device__ Weights weights_of_two(const float4& a, const float4& b) {
        const float2 top = make_float2(fmaxf(a.x, b.x), fmaxf(a.z, b.z));
        float2 mine = make_float2(exp2_approx(a.x - finite(top.x)), exp2_approx(a.z - finite(top.y)));
        float2 others = make_float2(exp2_approx(b.x - finite(top.x)), exp2_approx(b.z - finite(top.y)));
        const float2 total = make_float2(mine.x * a.y + others.x * b.y, mine.y * a.w + others.y * b.w);
        const float2 scale = make_float2(inverse(total.x), inverse(total.y));
        return {make_float2(mine.x * scale.x, mine.y * scale.y),
                make_float2(others.x * scale.x, others.y * scale.y),
                {{top.x, total.x}, {top.y, total.y}}};
    }

    // Reduces this CTA's part, by a team of `threads` threads numbered by `tid`: 128 or 256. `scratch` holds
    // 2 * threads.
    //
    // Groups of threads share the quads of a slice, each with its share of the splits; else a warp takes all
    // splits of its quads. A thread loads up to 2 * kLoads values at a time, and meanwhile each lane weighs one
    // of its group's splits. Short code matters: it runs once, and where other kernels run in between it comes
    // from memory.
    template <typename Element, typename SyncTeam>
    __device__ void combine(uint32_t flag_before, const OutputOffsets<P::kRows>& rows, float4* scratch, int tid,
                            int threads, SyncTeam sync_team) const {
        constexpr int kLoads = 8;
        constexpr int kStride = 2 * kBufferQuads;  // from one split to the next, behind the first
        static_assert(P::kPairQuads % (1 << Division::kMaxShift) == 0, "a slice is of one pair of rows");
        const int lane = tid & 31, warp = tid >> 5, warps = threads >> 5;
        const Division division(quads, count);
        const bool sliced = division.sliced;
        const int shift = sliced ? division.shift : 5, size = 1 << shift, width = min(size, 32);
        const int groups = sliced ? threads >> shift : 1;
        const int share = (count + groups - 1) >> (31 - __clz(groups));  // splits of a group
        const int first = sliced ? (tid >> shift) * share : 0, here = min(share, count - first);
        const int position = lane & (width - 1), batch = min(width, 2 * kLoads);
        // A thread's later values are of other splits, or (`later` zero) of a quad of its own.
        const int later = sliced || count >= kLoads ? kLoads : 0, chunk = later ? 32 : 64;
        uint32_t quad =
            sliced ? (splits.index() << shift) + (tid & (size - 1)) : (splits.index() + warp * count) * chunk + lane;

        const float4* values_of = pinned(buffer(splits.first + first, false));
        const float4* states_of = pinned(values_of + position * kStride + P::kCount);
        float2* weights = reinterpret_cast<float2*>(scratch + threads);  // of the lanes' splits
        float2 *tops = weights + threads, *totals = tops + warps;        // of the warps' splits

        if (quad < quads)
            for (int i = position; i < here; i += width) wait_for(first + i, flag_before);
        __syncwarp();

        for (; quad < quads; quad += warps * count * chunk) {
            const uint32_t pair = quad / P::kPairQuads;
            float2 top = make_float2(-INFINITY, -INFINITY), total = make_float2(0.f, 0.f);
            float4 sum = make_float4(0.f, 0.f, 0.f, 0.f), beside = sum;
            for (int begin = 0; begin < share; begin += batch) {
                const int left = min(here - begin, batch);
                float4 state = make_float4(-INFINITY, 0.f, -INFINITY, 0.f);
                const int skew = first + begin == 0 ? kBufferQuads : 0;  // of the first split's slot
                if (position < left) state = __ldcg(states_of + (begin * kStride + pair + (position == 0 ? skew : 0)));

                float4 values[2][kLoads];
                const float4* from = pinned(values_of + (begin * kStride + quad));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float4* at = half == 0 ? from : pinned(from + (later ? kLoads * kStride : 32));
                    const float4* at_first = pinned(at + (half == 0 || later == 0 ? skew : 0));
                    const int number = pinned(half == 0 ? left : left - later);
#pragma unroll
                    for (int i = 0; i < kLoads; ++i)
                        if (i < number) values[half][i] = __ldcg(i == 0 ? at_first : at + i * kStride);
                }

                const float2 before = top;
                top.x = warp_max(fmaxf(top.x, state.x)), top.y = warp_max(fmaxf(top.y, state.z));
                if (sliced && begin + batch >= share) {  // and of the team
                    if (lane == 0) tops[warp] = top;
                    sync_team();
                    const float2 other = tops[lane & (warps - 1)];
                    top.x = warp_max(other.x), top.y = warp_max(other.y);
                }
                const float2 base = make_float2(finite(top.x), finite(top.y));
                const float2 factor = make_float2(exp2_approx(before.x - base.x), exp2_approx(before.y - base.y));
                const float2 weight = make_float2(exp2_approx(state.x - base.x), exp2_approx(state.z - base.y));
                weights[tid] = weight;
                float2 more = make_float2(weight.x * state.y, weight.y * state.w);
#pragma unroll
                for (int distance = 16; distance > 0; distance /= 2) {
                    more.x += __shfl_xor_sync(~0u, more.x, distance);
                    more.y += __shfl_xor_sync(~0u, more.y, distance);
                }
                total.x = total.x * factor.x + more.x, total.y = total.y * factor.y + more.y;
                sum = P::scaled(sum, factor);
                __syncwarp();

#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if (half == 1 && min(share, batch) <= later) break;
                    const int number = pinned(half == 0 ? left : left - later);
                    const auto* of =
                        reinterpret_cast<const float4*>(weights + tid - position + (half == 0 ? 0 : later));
                    float4 twos[kLoads / 2];  // of two splits each
#pragma unroll
                    for (int i = 0; i < kLoads / 2; ++i) twos[i] = of[i];
                    float4& to = half == 0 ? sum : beside;
#pragma unroll
                    for (int i = 0; i < kLoads; ++i) {
                        const float2 w = i % 2 ? make_float2(twos[i / 2].z, twos[i / 2].w)
                                               : make_float2(twos[i / 2].x, twos[i / 2].y);
                        if (i < number) P::add(to, values[half][i], w);
                    }
                }
                if (later) {
                    add(sum, beside);
                    beside = make_float4(0.f, 0.f, 0.f, 0.f);
                }
                __syncwarp();  // the weights have been read
            }

            if (sliced) {
#pragma unroll 1
                for (int distance = width; distance < 32; distance *= 2)
                    add(sum, make_float4(__shfl_xor_sync(~0u, sum.x, distance), __shfl_xor_sync(~0u, sum.y, distance),
                                         __shfl_xor_sync(~0u, sum.z, distance), __shfl_xor_sync(~0u, sum.w, distance)));
                // One sum and total per group, or per warp if it has several groups.
                const int row_shift = max(shift, 5), row = tid >> row_shift;
                if (lane < size) scratch[(row << shift) + (tid & (size - 1))] = sum;
                if (lane == 0) totals[warp] = total;
                sync_team();
                sum = make_float4(0.f, 0.f, 0.f, 0.f), total = make_float2(0.f, 0.f);
                const int number = threads >> row_shift;
#pragma unroll 1
                for (int i = 0; i < number; i += 4) {
                    float4 sums[4] = {};
                    float2 more[4] = {};
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        if (i + k < number) {
                            sums[k] = scratch[(i + k << shift) + (tid & (size - 1))];
                            more[k] = totals[i + k << row_shift - 5];
                        }
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        add(sum, sums[k]);
                        total.x += more[k].x, total.y += more[k].y;
                    }
                }
            }

            const float2 scale = make_float2(inverse(total.x), inverse(total.y));
            const int row = P::row(pair);
            const uint32_t place = quad % P::kPairQuads;
            if (!sliced || tid < size) {
#pragma unroll 1
                for (int half = 0;; ++half) {
                    store_output<Element, P>(p, rows, row, P::column(place + half * 32), P::scaled(sum, scale));
                    if (half == 1 || later) break;
                    sum = beside;
                }
            }
            // By whoever has the pair's first quads. In a slice of them, by the last threads: most have no output.
            const int number = sliced ? threads - 1 - tid : place;
            if (number < 2 && (!sliced || place == (tid & (size - 1))))
                store_lse(p, rows, row + number * P::kNextRow,
                          number == 0 ? RowState{top.x, total.x} : RowState{top.y, total.y});
            if (sliced) return;
        }
    }

    static __device__ void add(float4& to, const float4& more) {
        to.x += more.x, to.y += more.y, to.z += more.z, to.w += more.w;
    }
};

}  // namespace mla
