// How a consumer of many_rows ends a work tile: writes its columns of O to the output or to a split buffer, or
// combines them with those of the only other split. Both consumers do the same, each for its half of the columns:
//
//   publish sums (and consumer 0 the maxima) of all rows; of a split, also magnitudes
//   sync_consumers
//   write the output and the LSE, or bring O to the range of fp16 and write a split buffer
//   after the last work tile: sync_consumers, raise the CTA's flag
#pragma once
#include "decode/hopper/kernel.cuh"
#include "numbers/arithmetic.cuh"

namespace mla::hopper {

// C::kFourColumns: of each 16 columns, the columns of O that a thread has in two neighbouring n8 blocks are not those
// of wgmma's fragment, d, d + 1, d + 8 and d + 9, but four neighbours: the even ones in the first block.
template <typename C>
struct ManyRowsQuads : Quads<C::kRows, C::kDimLatent, false> {
    static __device__ int column(uint32_t quad) {
        return C::kFourColumns ? quad * 2 : Quads<C::kRows, C::kDimLatent, false>::column(quad);
    }
};

// The softmax state of a work tile's rows; of the sums each consumer has a part. Of a split, also each consumer's part
// of a row's magnitude, which is the sum of its absolute values.
template <typename C>
struct RowStates {
    float tops[C::kRows], sums[2][C::kRows], magnitudes[2][C::kRows];

    __device__ RowState operator()(int row) const { return {tops[row], sums[0][row] + sums[1][row]}; }
    __device__ int exponent(int row) const {
        return fp16_exponent(magnitudes[0][row] + magnitudes[1][row], (*this)(row).total);
    }
    __device__ RowState of_split(int row) const { return (*this)(row).divided(exponent(row)); }
};

template <typename C>
struct ManyRowsOutput {
    using Element = typename C::Element;
    using OutputQuads = ManyRowsQuads<C>;
    using Buffers = SplitBuffers<OutputQuads>;
    using Weights = typename Buffers::Weights;
    using Offsets = OutputOffsets<C::kRows>;
    static constexpr int kColumns = C::kDimLatent / 2;  // of O, that a consumer has
    static constexpr int kOutputs = kColumns / 2;       // accumulators of O that a thread has
    static constexpr int kQuads = kOutputs / 4;         // of a thread
    static constexpr int kSplitQuads = kQuads / 2;      // of them, what one of two splits combines

    ConsumerThread<C>& t;
    // This thread's rows are row() and row() + 8; accumulator i, of O or of scores, is of row() + 8 * row_of(i).
    // m is the maximum in use (in log2), the same in both consumers; l is this thread's own share of the sum.
    float o[kOutputs];
    float m[2], l[2];

    __device__ ManyRowsOutput(ConsumerThread<C>& t) : t(t) {}

    __device__ int row() const { return t.warp * 16 + t.lane / 4; }
    static constexpr __device__ int row_of(int i) { return i / 2 % 2; }

    __device__ void rescale(const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) o[i] *= factor[row_of(i)];
    }

    // A quad is four accumulators: two columns of two rows.
    __device__ float& accumulator(int quad, int i) {
        return C::kFourColumns ? o[(quad / 2 * 2 + i % 2) * 4 + i / 2 * 2 + quad % 2] : o[quad * 4 + i];
    }
    __device__ float4 get_quad(int i) {
        return make_float4(accumulator(i, 0), accumulator(i, 1), accumulator(i, 2), accumulator(i, 3));
    }
    __device__ void set_quad(int i, const float4& from) {
        accumulator(i, 0) = from.x, accumulator(i, 1) = from.y;
        accumulator(i, 2) = from.z, accumulator(i, 3) = from.w;
    }
    // Quad of what split 0 or 1 of two combines: registers cannot be indexed by the split's number.
    __device__ float4 quad_of_split(int split, int i) { return split ? get_quad(kSplitQuads + i) : get_quad(i); }

    // Place of this thread's first quad in a split buffer. Quads 2i and 2i + 1 are neighbours; two such pairs lie 8
    // apart.
    __device__ int64_t first_quad() const {
        return (t.warp * 8 + t.lane / 4) * OutputQuads::kPairQuads + t.consumer * (kColumns / 2) + t.lane % 4 * 2;
    }
    __device__ bool has_rows(const Buffers& buffers) const {
        return t.warp * 8 * OutputQuads::kPairQuads < buffers.quads;
    }

    // Whether the part of an m-block of two splits that this CTA combines stays in registers until then.
    __device__ bool stays_in_registers(const WorkTile& work, bool last) const {
        return last && is_two_way_split(work, t.range, t.cta());
    }

    // Writes the first kCount of this thread's quads, as those from `quad` on of the output.
    template <int kCount>
    __device__ void write_output(const Offsets& offsets, int quad, const float (&scale)[2]) {
        const bool odd = t.lane % 2;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int64_t offset = offsets.out[row() + r * 8];
            if constexpr (C::kFourColumns) {
                auto* out = static_cast<Element*>(t.p.out) + offset + t.consumer * kColumns + quad * 8 + t.lane % 4 * 4;
                auto two = [&](int i) {
                    return pack<Element>(accumulator(i, r * 2) * scale[r], accumulator(i, r * 2 + 1) * scale[r]);
                };
#pragma unroll
                for (int i = 0; i < kCount; i += 2)
                    if (offset >= 0) *reinterpret_cast<uint2*>(out + i * 8) = make_uint2(two(i), two(i + 1));
                continue;
            }
            auto* out =
                static_cast<Element*>(t.p.out) + offset + t.consumer * kColumns + (quad + odd) * 8 + t.lane % 4 / 2 * 4;
#pragma unroll
            for (int i = 0; i < kCount; i += 2) {
                // Two lanes exchange halves of two quads, so that each has 8 B of one.
                const uint32_t first =
                    pack<Element>(accumulator(i, r * 2) * scale[r], accumulator(i, r * 2 + 1) * scale[r]);
                const uint32_t second =
                    pack<Element>(accumulator(i + 1, r * 2) * scale[r], accumulator(i + 1, r * 2 + 1) * scale[r]);
                const uint32_t received = __shfl_xor_sync(~0u, odd ? first : second, 1);
                if (offset >= 0)
                    *reinterpret_cast<uint2*>(out + i * 8) =
                        odd ? make_uint2(received, second) : make_uint2(first, received);
            }
        }
    }

    // Writes what this CTA's split of two combines, which is in the first half of this thread's quads.
    __device__ void write_combined(const Offsets& offsets, int split, const Weights& weights) {
        write_output<kSplitQuads>(offsets, split * kSplitQuads, {1.f, 1.f});
        if (split == 0 && t.consumer == 0 && t.lane % 4 == 0) {
            store_lse(t.p, offsets, row(), weights.states[0]);
            store_lse(t.p, offsets, row() + 8, weights.states[1]);
        }
    }

    // With two splits, each CTA combines half of every thread's quads. Its own are in registers or in its split buffer.
    template <bool kInRegisters>
    __device__ void combine_two(const Buffers& buffers, const Offsets& offsets) {
        const int split = buffers.splits.index(), quad = split * kSplitQuads;
        buffers.wait_for(1 - split, t.rings.flag);
        if (!has_rows(buffers)) return;
        auto load = [&](int of_split, int i) {  // two quads
            return __ldcg(reinterpret_cast<const uint4*>(buffers.buffer_of_split(of_split) + first_quad() + quad * 4) +
                          i * 4);
        };
        uint4 own[kSplitQuads / 2], other[kSplitQuads / 2];
#pragma unroll
        for (int i = 0; i < kSplitQuads / 2; ++i) {
            other[i] = load(1 - split, i);
            if constexpr (!kInRegisters) own[i] = load(split, i);
        }
        const auto weights = buffers.weights_of_two(t.warp * 8 + t.lane / 4);
#pragma unroll
        for (int i = 0; i < kSplitQuads; ++i)
            set_quad(i, weights.sum(kInRegisters ? quad_of_split(split, i) : OutputQuads::loaded(own[i / 2], i),
                                    OutputQuads::loaded(other[i / 2], i)));
        write_combined(offsets, split, weights);
    }

    // Ends the m-block of a pair: `combine_two` without split buffers.
    __device__ void finish_pair(const Offsets& offsets, const RowStates<C>& states) {
        const Pair<OutputQuads, ConsumerThread<C>> pair{t};
        const int split = t.cta() % 2;
        auto state_of = [&](int row) { return states.of_split(row); };
        pair.send_states(state_of);
        scale_split(states);
        pair.send_quads([&](int i) { return quad_of_split(1 - split, i); });
        t.profiler.mark(Event::kWorkTileWritten);
        const auto weights = pair.weights(t.warp * 8 + t.lane / 4, state_of);
        pair.wait_for_quads();
#pragma unroll
        for (int i = 0; i < kSplitQuads; ++i) set_quad(i, weights.sum(quad_of_split(split, i), pair.received.quad(i)));
        write_combined(offsets, split, weights);
    }

    // Gathers the state of a work tile's rows, for all threads to read; magnitudes only of a split.
    __device__ void publish_state(RowStates<C>& states, const WorkTile& work) {
        float magnitudes[2] = {};
        if (work.split()) {
#pragma unroll
            for (int i = 0; i < kOutputs; ++i) magnitudes[row_of(i)] += fabsf(o[i]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            l[r] = sum_over_lanes<4>(l[r]);
            magnitudes[r] = sum_over_lanes<4>(magnitudes[r]);
            if (t.lane % 4 == 0) {
                states.sums[t.consumer][row() + r * 8] = l[r];
                states.magnitudes[t.consumer][row() + r * 8] = magnitudes[r];
                if (t.consumer == 0) states.tops[row() + r * 8] = m[r];
            }
        }
        t.sync_consumers();
        if (t.p.sinks) {
            const int own_row = threadIdx.x - 128;
            if (own_row < C::kRows) count_sink<C>(t.p, work, own_row, states.tops[own_row], states.sums[0][own_row]);
            t.sync_consumers();
        }
        t.profiler.mark(Event::kMerged);
    }

    // Brings O, of a split, to the range of fp16.
    __device__ void scale_split(const RowStates<C>& states) {
        rescale({power_of_two(127 - states.exponent(row())), power_of_two(127 - states.exponent(row() + 8))});
    }

    // Writes this consumer's columns of a split. Not those that stay in registers.
    __device__ void write_split(const WorkTile& work, const RowStates<C>& states, bool in_registers) {
        const Buffers buffers(t.p, work, t.range, t.cta());
        uint2* buffer = buffers.own_buffer(work.has_first_key);
        buffers.write_states(buffer, threadIdx.x - 128, [&](int row) { return states.of_split(row); });
        scale_split(states);
        const int half_in_registers = in_registers ? buffers.splits.index() : -1;
#pragma unroll
        for (int i = 0; i < kQuads && has_rows(buffers); i += 2)
            if (i / kSplitQuads != half_in_registers)
                __stcg(reinterpret_cast<uint4*>(buffer + first_quad() + i * 4),
                       OutputQuads::word(get_quad(i), get_quad(i + 1)));
    }

    __device__ void finish_work_tile(const WorkTile& work, const Offsets& offsets, const RowStates<C>& states,
                                     bool in_registers) {
        if (work.split()) {
            write_split(work, states, in_registers);
        } else {
            float scale[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float total = states(row() + r * 8).total;
                scale[r] = total > 0.f ? 1.f / total : 0.f;
            }
            write_output<kQuads>(offsets, 0, scale);
            if (t.consumer == 0 && t.thread < C::kRows) store_lse(t.p, offsets, t.thread, states(t.thread));
        }
        t.profiler.mark(Event::kWorkTileWritten);
    }
};

}  // namespace mla::hopper
