// Entries that several CTAs share: their partials, and the reduction inside the same launch.
//
// Each contributor leaves an unnormalized fp32 partial of its share, relative to the share's own maximum, raises its
// flag, waits for the others' flags and then reduces one slice of the entry's output. Where there are two, kernels give
// each of them half of every thread's accumulators instead (`weights_of_two`), which need not leave its registers.
//
// A piece is a float4 of two rows and two columns, in a fixed order that suits the accumulators of the kernel (Pieces).
// A slot, one share's partial, holds [kPairs][kPairPieces] pieces, then [kPairs] states: m and l of both rows of a
// pair. A flag counts launches. All of them are equal between launches, so nothing has to be cleared.
//
// invariants
//   * every CTA raises its flag once a launch, when all its own partials are written, and waits for others only then:
//     the wait ends while the grid is resident
//   * every sum has a fixed order: the same partials give the same bits
#pragma once
#include "math.cuh"
#include "params.cuh"
#include "sync.cuh"

namespace mla {

// The maximum of a row without keys is -inf; differences to it must not be NaN.
__device__ __forceinline__ float finite(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

// Where the rows of an entry go: offsets in out and lse, -1 for a row that does not exist.
template <int kRows>
struct RowTable {
    int64_t out[kRows], lse[kRows];
};

// Rows and columns of piece `i` of a pair. Rows on the M side of the products (`kSwapped` false): rows r and r + 8,
// columns d and d + 1 of an accumulator; on the N side: rows r and r + 1, columns d and d + 8.
template <int kRows_, int kDimLatent, bool kSwapped>
struct Pieces {
    static constexpr int kRows = kRows_;
    static constexpr int kPairs = kRows / 2;
    static constexpr int kPairPieces = kDimLatent / 2;
    static constexpr int kCount = kPairs * kPairPieces;

    // Pairs that hold the first `rows` rows.
    static __device__ int pairs(int rows) { return kSwapped ? (rows + 1) / 2 : (rows + 15) / 16 * 8; }
    static __device__ int row(int pair) { return kSwapped ? pair * 2 : pair / 8 * 16 + pair % 8; }
    static constexpr int kNextRow = kSwapped ? 1 : 8;
    static __device__ int column(int piece) { return kSwapped ? piece / 8 * 16 + piece % 8 : piece * 2; }
    static constexpr int kNextColumn = kSwapped ? 8 : 1;
};

// The maximum (log2 units) of a row, and the sum of its weights relative to it.
struct RowState {
    float top, total;
};

template <int kRows>
__device__ __forceinline__ void store_lse(const DecodeParams& p, const RowTable<kRows>& rows, int row,
                                          const RowState& state) {
    const int64_t offset = rows.lse[row];
    if (offset >= 0)
        p.lse[offset] = state.total > 0.f ? (state.top + log2f(state.total)) * 0.6931471805599453f : -INFINITY;
}

template <typename Element, typename P>
__device__ __forceinline__ void store_output(const DecodeParams& p, int64_t row, int column, float first, float next) {
    if (row < 0) return;
    auto* out = static_cast<Element*>(p.out) + row + column;
    out[0] = static_cast<Element>(first);
    out[P::kNextColumn] = static_cast<Element>(next);
}

// How the pieces of an entry are divided: contributor `rank` reduces [begin, end).
struct Slice {
    static constexpr int kMaxTeam = 256;
    int size, shift, begin, end;  // size = 1 << shift if below kMaxTeam
    __device__ Slice(int pieces, int contributors, int rank) {
        size = (pieces + contributors - 1) / contributors;
        // Threads that share a piece need a power of two. (Not by the team's size, which may differ between CTAs.)
        shift = 32 - __clz(size - 1);
        if (size < kMaxTeam) size = 1 << shift;
        begin = rank * size;
        end = min(begin + size, pieces);
    }
};

// A CTA's flag, read when the launch begins and raised by one thread, behind a barrier of all that wrote partials.
__device__ __forceinline__ uint32_t read_flag(const DecodeParams& p) { return p.flags[blockIdx.x]; }
__device__ __forceinline__ void raise_flag(const DecodeParams& p, uint32_t before) {
    store_release(p.flags + blockIdx.x, before + 1);
}

template <typename P>
struct Partials {
    static constexpr int kSlot = P::kCount + P::kPairs;

    const DecodeParams& p;
    const Contributors who;
    const int count = who.count();
    const int pieces;  // of rows that exist

    __device__ Partials(const DecodeParams& p, const WorkItem& item, const CtaRange& range)
        : p(p),
          who(item, range),
          pieces(P::pairs(min(item.query_len * p.num_heads - item.block * P::kRows, P::kRows)) * P::kPairPieces) {}

    // CTA c has slot 2c + 1 for the entry that begins in it, slot 2c for the one that began before.
    __device__ float4* slot(int cta, bool entry_begins_here) const {
        return p.partials + (2 * cta + entry_begins_here) * kSlot;
    }

    template <typename StateOf>
    static __device__ float4 states_of(int pair, StateOf state_of) {
        const RowState a = state_of(P::row(pair)), b = state_of(P::row(pair) + P::kNextRow);
        return make_float4(a.top, a.total, b.top, b.total);
    }

    // By as many threads as there are pairs, or more.
    template <typename StateOf>
    static __device__ void write_states(float4* slot, int pair, StateOf state_of) {
        if (pair < P::kPairs) __stcg(slot + P::kCount + pair, states_of(pair, state_of));
    }

    __device__ const float4* contribution(int i) const { return slot(who.first + i, i == 0); }

    __device__ void wait_for(int i, uint32_t flag_before) const {
        while (load_acquire(p.flags + who.first + i) == flag_before) {
        }
    }

    // For two contributors who divide the pieces of each thread: what this one and the other weigh in the rows of a
    // pair, and these rows' states.
    struct Weights {
        float2 mine, others;
        RowState states[2];
    };
    __device__ Weights weights_of_two(int pair) const {
        return weights_of_two(__ldcg(contribution(who.rank()) + P::kCount + pair),
                              __ldcg(contribution(1 - who.rank()) + P::kCount + pair));
    }
    static __device__ Weights weights_of_two(const float4& a, const float4& b) {
        const float2 top = make_float2(fmaxf(a.x, b.x), fmaxf(a.z, b.z));
        float2 mine = make_float2(exp2_approx(a.x - finite(top.x)), exp2_approx(a.z - finite(top.y)));
        float2 others = make_float2(exp2_approx(b.x - finite(top.x)), exp2_approx(b.z - finite(top.y)));
        const float2 total = make_float2(mine.x * a.y + others.x * b.y, mine.y * a.w + others.y * b.w);
        const float2 scale = make_float2(total.x > 0.f ? 1.f / total.x : 0.f, total.y > 0.f ? 1.f / total.y : 0.f);
        return {make_float2(mine.x * scale.x, mine.y * scale.y),
                make_float2(others.x * scale.x, others.y * scale.y),
                {{top.x, total.x}, {top.y, total.y}}};
    }

    // Reduces this CTA's slice, by a team of `threads` threads numbered by `tid`; `scratch` holds 2 * threads.
    template <typename Element, typename SyncTeam>
    __device__ void reduce(uint32_t flag_before, const RowTable<P::kRows>& rows, float4* scratch, int tid, int threads,
                           SyncTeam sync_team) const {
        constexpr int kAhead = 8;  // pieces that a thread has in flight
        constexpr int kStateLoads = kMaxCtas / 32;
        const int warp = tid / 32, lane = tid % 32;
        const Slice slice(pieces, count, who.rank());
        if (slice.begin >= slice.end) return;
        const int first_pair = slice.begin / P::kPairPieces, pairs = (slice.end - 1) / P::kPairPieces - first_pair + 1;
        float2* weights = reinterpret_cast<float2*>(scratch + threads);  // [pairs][count]

        // The team walks [piece][contributor]. If the slice is small, groups of threads share its pieces and take
        // contributors in turn.
        const bool shared = slice.size < threads;
        const int groups = shared ? threads >> slice.shift : 1, group = shared ? tid >> slice.shift : 0;
        struct Walk {
            int piece, contributor;
        };
        auto advance = [&](Walk& at) {
            at.contributor += groups;
            if (at.contributor < count) return false;
            at.contributor = group;
            at.piece += threads;  // beyond the slice if groups share it
            return true;
        };
        Walk loading{slice.begin + (shared ? tid & (slice.size - 1) : tid), group};
        if (group >= count) loading.piece = slice.end;
        Walk adding = loading;

        for (int i = tid; i < count; i += threads) wait_for(i, flag_before);
        sync_team();

        // Weights exp2(m_i - m) / l, a warp per pair of rows. The first pieces are on their way meanwhile.
        float4 states[kStateLoads];
        auto load_states = [&](int pair) {
#pragma unroll
            for (int i = 0; i < kStateLoads; ++i) {
                states[i] = make_float4(-INFINITY, 0.f, -INFINITY, 0.f);
                if (i * 32 + lane < count)
                    states[i] = __ldcg(contribution(i * 32 + lane) + P::kCount + first_pair + pair);
            }
        };
        if (warp < pairs) load_states(warp);

        float4 values[kAhead];
        auto load = [&] {
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
                if (loading.piece < slice.end) {
                    values[i] = __ldcg(contribution(loading.contributor) + loading.piece);
                    advance(loading);
                }
        };
        load();

        for (int pair = warp; pair < pairs; pair += threads / 32) {
            if (pair != warp) load_states(pair);
            float2 top = make_float2(-INFINITY, -INFINITY), total = make_float2(0.f, 0.f);
#pragma unroll
            for (int i = 0; i < kStateLoads; ++i) {
                top.x = fmaxf(top.x, states[i].x);
                top.y = fmaxf(top.y, states[i].z);
            }
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                top.x = fmaxf(top.x, __shfl_xor_sync(~0u, top.x, distance));
                top.y = fmaxf(top.y, __shfl_xor_sync(~0u, top.y, distance));
            }
#pragma unroll
            for (int i = 0; i < kStateLoads; ++i) {
                states[i].x = exp2_approx(states[i].x - finite(top.x));
                states[i].z = exp2_approx(states[i].z - finite(top.y));
                total.x += states[i].x * states[i].y;
                total.y += states[i].z * states[i].w;
            }
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                total.x += __shfl_xor_sync(~0u, total.x, distance);
                total.y += __shfl_xor_sync(~0u, total.y, distance);
            }
            const float2 scale = make_float2(total.x > 0.f ? 1.f / total.x : 0.f, total.y > 0.f ? 1.f / total.y : 0.f);
#pragma unroll
            for (int i = 0; i < kStateLoads; ++i)
                if (i * 32 + lane < count)
                    weights[pair * count + i * 32 + lane] = make_float2(states[i].x * scale.x, states[i].z * scale.y);
            const int row = P::row(first_pair + pair);
            if (lane == 0 && (first_pair + pair) * P::kPairPieces >= slice.begin) {
                store_lse(p, rows, row, {top.x, total.x});
                store_lse(p, rows, row + P::kNextRow, {top.y, total.y});
            }
        }
        sync_team();

        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        auto finish = [&](int piece) {
            const int row = P::row(piece / P::kPairPieces), column = P::column(piece % P::kPairPieces);
            store_output<Element, P>(p, rows.out[row], column, sum.x, sum.y);
            store_output<Element, P>(p, rows.out[row + P::kNextRow], column, sum.z, sum.w);
        };
        while (adding.piece < slice.end) {
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
                if (adding.piece < slice.end) {
                    const int piece = adding.piece;
                    const float2 weight = weights[(piece / P::kPairPieces - first_pair) * count + adding.contributor];
                    sum.x += values[i].x * weight.x, sum.y += values[i].y * weight.x;
                    sum.z += values[i].z * weight.y, sum.w += values[i].w * weight.y;
                    if (advance(adding) && groups == 1) {
                        finish(piece);
                        sum = make_float4(0.f, 0.f, 0.f, 0.f);
                    }
                }
            load();
        }
        if (groups > 1) {
            scratch[tid] = sum;
            sync_team();
            if (tid < slice.size && slice.begin + tid < slice.end) {
#pragma unroll 4
                for (int other = 1; other < groups; ++other) {
                    const float4 more = scratch[other * slice.size + tid];
                    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
                }
                finish(slice.begin + tid);
            }
        }
    }
};

}  // namespace mla
