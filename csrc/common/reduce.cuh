// Entries that several CTAs share: their partials, and the reduction inside the same launch.
//
// Each contributor leaves an unnormalized fp32 partial of its share, relative to the share's own maximum, and then
// reduces one slice of the entry's output. Partials announce themselves: between launches every word of the workspace
// is `kAbsent`, a NaN that arithmetic does not produce. A writer stores the values, whoever needs them polls until no
// word is `kAbsent` any more and puts `kAbsent` back for the next launch. So there are no counters to reset, no fence
// between data and flag, and no order is needed among the stores. (The idea of flags inside the data: NCCL's LL
// protocol.)
//
// A piece is a float4 of two rows and two columns, in a fixed order that suits the accumulators of the kernel (Pieces).
// A slot, one share's partial, holds
//   [kPairs][kPairPieces]    pieces
//   [kPairs + contributors]  (m, l) of both rows of a pair, a copy for every contributor that has the pair in its slice
//
// invariants
//   * a piece is read by one thread, which resets it; a copy of (m, l) is read by one CTA, which resets it at its end
//   * a CTA writes all its own partials before it waits for others, so the wait ends while the grid is resident
//   * every sum has a fixed order: the same partials give the same bits
#pragma once
#include "params.cuh"

namespace mla {

constexpr uint32_t kAbsent = 0xffffffffu;

__device__ __forceinline__ void store_relaxed(float4* at, float4 value) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(value.x), "f"(value.y),
                 "f"(value.z), "f"(value.w)
                 : "memory");
}
__device__ __forceinline__ float4 load_relaxed(const float4* at) {
    float4 value;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "l"(at)
                 : "memory");
    return value;
}
__device__ __forceinline__ bool absent(const float4& value) {
    return __float_as_uint(value.x) == kAbsent || __float_as_uint(value.y) == kAbsent ||
           __float_as_uint(value.z) == kAbsent || __float_as_uint(value.w) == kAbsent;
}
__device__ __forceinline__ void poll(float4& value, const float4* at) {
    while (absent(value)) value = load_relaxed(at);
}
__device__ __forceinline__ void reset(float4* at) {
    const float value = __uint_as_float(kAbsent);
    store_relaxed(at, make_float4(value, value, value, value));
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
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
template <typename P>
struct Slice {
    static constexpr int kMaxTeam = 256;
    int size, begin, end;
    __device__ Slice(int contributors, int rank) {
        size = (P::kCount + contributors - 1) / contributors;
        // Threads that share a piece need a power of two. (Not by the team's size, which may differ between CTAs.)
        if (size < kMaxTeam) size = 1 << (32 - __clz(size - 1));
        begin = rank * size;
        end = min(begin + size, P::kCount);
    }
};

template <typename P>
struct Partials {
    const DecodeParams& p;
    const Contributors who;
    const int count = who.last - who.first + 1;

    __device__ Partials(const DecodeParams& p, const Contributors& who) : p(p), who(who) {}

    __device__ float4* slot(int cta, bool entry_begins_here) const {
        return p.partials + static_cast<int64_t>(2 * cta + entry_begins_here) *
                                (P::kCount + P::kPairs + static_cast<int>(gridDim.x));
    }

    // Gives the states of this share's rows to everyone who reduces pieces of them.
    template <typename StateOf>
    __device__ void write_states(float4* slot, int tid, int threads, StateOf state_of) const {
        const int size = Slice<P>(count, 0).size, readers = P::kPairPieces / size + 2;
        for (int i = tid; i < P::kPairs * readers; i += threads) {
            const int pair = i % P::kPairs, reader = pair * P::kPairPieces / size + i / P::kPairs;
            if (reader * size >= min((pair + 1) * P::kPairPieces, P::kCount)) continue;
            const RowState a = state_of(P::row(pair)), b = state_of(P::row(pair) + P::kNextRow);
            store_relaxed(slot + P::kCount + reader + pair, make_float4(a.top, a.total, b.top, b.total));
        }
    }

    // Reduces this CTA's slice, by a team of `threads` threads numbered by `tid`; `scratch` holds 2 * threads.
    template <typename Element, typename SyncTeam>
    __device__ void reduce(const RowTable<P::kRows>& rows, float4* scratch, int tid, int threads,
                           SyncTeam sync_team) const {
        constexpr int kAhead = 8;  // pieces that a thread has in flight
        const int rank = static_cast<int>(blockIdx.x) - who.first;
        const Slice<P> slice(count, rank);
        if (slice.begin >= slice.end) return;
        // The team walks [piece][contributor]. If the slice is small, groups of threads share its pieces and take
        // contributors in turn.
        const int groups = max(threads / slice.size, 1), group = groups > 1 ? tid / slice.size : 0;
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
        auto slot_of = [&](int i) { return slot(who.first + i, i == 0); };
        auto state_at = [&](const Walk& at) {
            return slot_of(at.contributor) + P::kCount + rank + at.piece / P::kPairPieces;
        };

        RowState a{-INFINITY, 0.f}, b{-INFINITY, 0.f};
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        auto add = [&](const float4& value, const float4& state) {
            const float top_a = fmaxf(a.top, state.x), top_b = fmaxf(b.top, state.z);
            const float keep_a = exp2_approx(a.top - finite(top_a)), keep_b = exp2_approx(b.top - finite(top_b));
            const float take_a = exp2_approx(state.x - finite(top_a)), take_b = exp2_approx(state.z - finite(top_b));
            a = {top_a, a.total * keep_a + state.y * take_a};
            b = {top_b, b.total * keep_b + state.w * take_b};
            sum.x = sum.x * keep_a + value.x * take_a, sum.y = sum.y * keep_a + value.y * take_a;
            sum.z = sum.z * keep_b + value.z * take_b, sum.w = sum.w * keep_b + value.w * take_b;
        };
        auto finish = [&](int piece) {
            const int pair = piece / P::kPairPieces, column = P::column(piece % P::kPairPieces);
            const int first = P::row(pair), next = first + P::kNextRow;
            const float scale_a = a.total > 0.f ? 1.f / a.total : 0.f, scale_b = b.total > 0.f ? 1.f / b.total : 0.f;
            store_output<Element, P>(p, rows.out[first], column, sum.x * scale_a, sum.y * scale_a);
            store_output<Element, P>(p, rows.out[next], column, sum.z * scale_b, sum.w * scale_b);
            if (piece % P::kPairPieces == 0) {
                store_lse(p, rows, first, a);
                store_lse(p, rows, next, b);
            }
        };

        Walk loading{slice.begin + (groups > 1 ? tid % slice.size : tid), group}, adding = loading;
        while (adding.piece < slice.end) {
            float4 values[kAhead], states[kAhead];
            Walk polling = loading;
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                values[i] = make_float4(0.f, 0.f, 0.f, 0.f);
                states[i] = make_float4(-INFINITY, 0.f, -INFINITY, 0.f);
                if (loading.piece < slice.end) {
                    values[i] = load_relaxed(slot_of(loading.contributor) + loading.piece);
                    states[i] = load_relaxed(state_at(loading));
                    advance(loading);
                }
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
                if (polling.piece < slice.end) {
                    float4* at = slot_of(polling.contributor) + polling.piece;
                    poll(values[i], at);
                    poll(states[i], state_at(polling));
                    reset(at);
                    advance(polling);
                }
            if (groups > 1) {
#pragma unroll
                for (int i = 0; i < kAhead; ++i) add(values[i], states[i]);
                adding = loading;
            } else {
#pragma unroll
                for (int i = 0; i < kAhead; ++i) {
                    if (adding.piece >= slice.end) break;
                    add(values[i], states[i]);
                    const int piece = adding.piece;
                    if (!advance(adding)) continue;
                    finish(piece);
                    a = b = {-INFINITY, 0.f};
                    sum = make_float4(0.f, 0.f, 0.f, 0.f);
                }
            }
        }

        if (groups > 1) {
            scratch[tid] = sum;
            scratch[threads + tid] = make_float4(a.top, a.total, b.top, b.total);
            sync_team();
            if (tid < slice.size && slice.begin + tid < slice.end) {
#pragma unroll 4
                for (int other = 1; other < groups; ++other)
                    add(scratch[other * slice.size + tid], scratch[threads + other * slice.size + tid]);
                finish(slice.begin + tid);
            }
        } else {
            sync_team();  // all have read the states
        }
        const int pair = slice.begin / P::kPairPieces, pairs = (slice.end - 1) / P::kPairPieces - pair + 1;
        for (int i = tid; i < count * pairs; i += threads)
            reset(slot_of(i / pairs) + P::kCount + rank + pair + i % pairs);
    }
};

}  // namespace mla
