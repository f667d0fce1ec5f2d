// How a consumer of many_rows_fp8 ends an m-block of two splits; for the rest, see transposed_output.cuh.
#pragma once
#include "decode/hopper/transposed_output.cuh"

namespace mla::hopper {

template <typename C>
struct ManyRowsFp8Output {
    using OutputQuads = TransposedQuads<C>;
    using Buffers = SplitBuffers<OutputQuads>;
    using Offsets = OutputOffsets<C::kRows>;
    static constexpr int kOctets = TransposedOutput<C>::kOctets, kOctetsAtOnce = TransposedOutput<C>::kOctetsAtOnce;
    static constexpr int kConsumerBlocks = TransposedOutput<C>::kConsumerBlocks;
    static constexpr int kSplitBlocks = TransposedOutput<C>::kSplitBlocks;

    ConsumerThread<C>& t;
    TransposedOutput<C> blocks;

    __device__ ManyRowsFp8Output(ConsumerThread<C>& t, OutputMemory<C>& memory) : t(t), blocks(t, memory) {}

    // Whether the part of an m-block of two splits that this CTA combines stays in registers until then.
    __device__ bool stays_in_registers(const WorkTile& work, bool last) const {
        return last && is_two_way_split(work, t.range, t.cta());
    }

    // With two splits, each CTA combines half of each consumer's blocks. Its own are in registers or a split buffer.
    template <bool kInRegisters>
    __device__ void combine_two(const Buffers& buffers, const Offsets& offsets) {
        const int split = buffers.splits.index(), block = t.consumer * kConsumerBlocks + split * kSplitBlocks;
        buffers.wait_for(1 - split, t.rings.flag);
        __syncwarp();  // each lane has waited for itself
        // Octets are read whole. The quads of rows that do not exist were never written; their sums stay
        // within these rows, which have no place in the output.
        auto exists = [&](int j) { return j * 4 * OutputQuads::kPairQuads < buffers.quads; };
#pragma unroll
        for (int first = 0; first < kOctets; first += kOctetsAtOnce) {
            float4 other[kOctetsAtOnce][kSplitBlocks], own[kOctetsAtOnce][kSplitBlocks];
#pragma unroll
            for (int i = 0; i < kOctetsAtOnce; ++i)
#pragma unroll
                for (int b = 0; b < kSplitBlocks; ++b) {
                    const int j = first + i;
                    if (!exists(j)) continue;
                    other[i][b] = OutputQuads::loaded(
                        __ldcg(buffers.buffer_of_split(1 - split) + blocks.place_of_quad(block + b, j)));
                    if constexpr (kInRegisters)
                        own[i][b] = blocks.quad_of_split(split, b, j);
                    else
                        own[i][b] = OutputQuads::loaded(
                            __ldcg(buffers.buffer_of_split(split) + blocks.place_of_quad(block + b, j)));
                }
#pragma unroll
            for (int i = 0; i < kOctetsAtOnce; ++i) {
                const int j = first + i;
                if (!exists(j)) continue;
                blocks.store_combined(offsets, split, j, own[i], other[i], buffers.weights_of_two(j * 4 + t.lane % 4));
            }
        }
    }
};

}  // namespace mla::hopper
