// Splits: the m-blocks that several CTAs share, their split buffers, and the combine at the end of the same launch.
//
//   each CTA of the m-block
//   ------------------------------------------------------------------------------------------------------------
//   attend to its own keys, with weights relative to the maximum of these keys' scores
//   write a split buffer: unnormalized output, maximum and sum of each row
//   do the rest of its own work, and raise its flag
//   wait for the flags of the other CTAs
//   combine its part of the output, of all splits, and write it
//
// combine.cuh has the combine of any number of splits. Some kernels combine two in another way: each CTA combines half
// of every thread's accumulators (`weights_of_two`); its own half stays in registers where possible.
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
#include "numbers/arithmetic.cuh"
#include "params.cuh"
#include "ptx/memory_order.cuh"

namespace mla {

// Where the rows of an m-block go: offsets in out and lse, -1 for a row that does not exist.
template <int kRows>
struct OutputOffsets {
    int64_t out[kRows], lse[kRows];
};

// Rows and columns of quad `i` of a row pair: four accumulators as a thread has them. Rows on the M side of the
// products (`kTransposed` false): columns d and d + 1 of row r, then of row r + 8. Quads of columns d and d + 8 are
// neighbours, as a thread has both. Rows on the N side: rows r and r + 1 of column d, then of column d + 8, or, with
// `kColumnPairs`, of column d + 1.
//
// kFp16: whether splits are in fp16. They are where bringing their rows to its range (`fp16_exponent`) takes less time
// than writing and reading twice as many bytes: on Hopper, in m-blocks of 64 rows and with fp8 keys.
template <int kRows_, int kDimLatent, bool kTransposed, bool kColumnPairs = !kTransposed, bool kFp16_ = !kTransposed>
struct Quads {
    static constexpr int kRows = kRows_;
    static constexpr int kPairs = kRows / 2;
    static constexpr int kPairQuads = kDimLatent / 2;
    static constexpr int kCount = kPairs * kPairQuads;
    static constexpr bool kFp16 = kFp16_;
    using Stored = std::conditional_t<kFp16, uint2, float4>;  // in a split buffer

    // Row pairs that hold the first `rows` rows.
    static __device__ int pairs(int rows) { return kTransposed ? (rows + 1) / 2 : (rows + 15) / 16 * 8; }
    static __device__ int row(uint32_t row_pair) {
        return kTransposed ? row_pair * 2 : row_pair / 8 * 16 + row_pair % 8;
    }
    static constexpr int kNextRow = kTransposed ? 1 : 8;
    static __device__ int column(uint32_t quad) {
        if constexpr (!kTransposed) return quad / 8 * 16 + quad % 2 * 8 + quad % 8 / 2 * 2;
        return kColumnPairs ? quad * 2 : quad / 8 * 16 + quad % 8;
    }
    static constexpr int kNextColumn = kColumnPairs ? 1 : 8;

    // Converts a quad to what a split buffer holds, and back.
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

    // A word is 16 bytes of a split: one quad in fp32 (`next` is not used), two quads in fp16. If quads are counted
    // across words, `loaded(word, i)` is quad i, which is in this word.
    using Word = std::conditional_t<kFp16, uint4, float4>;
    static constexpr int kWordQuads = sizeof(Word) / sizeof(Stored);
    static __device__ Word word(const float4& first, const float4& next) {
        if constexpr (kFp16) {
            const uint2 a = stored(first), b = stored(next);
            return make_uint4(a.x, a.y, b.x, b.y);
        } else {
            return first;
        }
    }
    static __device__ const float4& loaded(const float4& quad, int) { return quad; }
    static __device__ float4 loaded(const uint4& two, int i) {
        return loaded(i % 2 ? make_uint2(two.z, two.w) : make_uint2(two.x, two.y));
    }

    // The columns of a quad's first row, and of its next row.
    static __device__ float2 first(const float4& quad) {
        return kTransposed ? make_float2(quad.x, quad.z) : make_float2(quad.x, quad.y);
    }
    static __device__ float2 next(const float4& quad) {
        return kTransposed ? make_float2(quad.y, quad.w) : make_float2(quad.z, quad.w);
    }
    // sum += quad * weights, one weight a row.
    static __device__ void add(float4& sum, const float4& quad, const float2& weights) {
        const float2 w = kTransposed ? weights : make_float2(weights.x, weights.x);
        const float2 v = kTransposed ? weights : make_float2(weights.y, weights.y);
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

    // The state of the row when its weights are divided by 2^exponent: the maximum to which they are relative grows.
    __device__ RowState divided(int exponent) const {
        return {top + static_cast<float>(exponent), total * power_of_two(127 - exponent)};
    }
};

// The power of two by which a row of a split and its state are divided, to suit the range of fp16. No absolute value in
// the row exceeds `magnitude`, which becomes less than 2^15. Values 2^29 times smaller begin to lose bits. Output
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

// These store two columns of a row, and both rows of a quad.
template <typename Element, typename Layout>
__device__ __forceinline__ void store_output(const DecodeParams& p, int64_t offset, int column, const float2& values) {
    if (offset < 0) return;
    auto* out = static_cast<Element*>(p.out) + offset + column;
    if constexpr (Layout::kNextColumn == 1) {
        *reinterpret_cast<uint32_t*>(out) = pack<Element>(values.x, values.y);
    } else {
        out[0] = static_cast<Element>(values.x);
        out[Layout::kNextColumn] = static_cast<Element>(values.y);
    }
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
    const int quads;  // of rows that exist; 0 or less if none does, as in the second m-block of some clusters

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
    // To be called by at least as many threads as there are row pairs.
    template <typename StateOf>
    static __device__ void write_states(Stored* buffer, int row_pair, StateOf state_of) {
        if (row_pair < Layout::kPairs) __stcg(states_in(buffer) + row_pair, states_of(row_pair, state_of));
    }

    __device__ void wait_for(int i, uint32_t flag_before) const {
        const Patience patience;
        while (load_acquire(flag_of(p, splits.first + i)) == flag_before) patience.check();
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
};

}  // namespace mla
