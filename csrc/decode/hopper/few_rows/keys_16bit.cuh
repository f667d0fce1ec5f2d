// What a consumer of few_rows does with keys of 16 bits: wgmma multiplies them as they are.
#pragma once
#include "keys.cuh"
#include "ptx/wgmma.cuh"

namespace mla::hopper {

template <typename C>
struct FewRowsKeys16Bit {
    using Element = typename C::Element;
    using Blocks = float[C::kBlocks][C::kRows / 2];
    static constexpr int kScores = C::kRows / 2;
    struct Memory {
        unsigned char weights[2][C::kWeightBuffers][C::kWeightBytes];
    };

    struct Scales {};

    ConsumerThread<C>& t;

    __device__ FewRowsKeys16Bit(ConsumerThread<C>& t, Memory&, Scales&) : t(t) {}

    static __device__ float cache_scale() { return 1.f; }
    __device__ void prepare_queries(int, float) const { fence_async_proxy(); }
    __device__ void scores_are_known(const unsigned char*, int) const {}
    __device__ void publish_weights() const { fence_async_proxy(); }

    // Stores a warp's 16 tokens of the j-th 8 rows of P^T, of which a thread has two tokens, 8 apart, of two rows.
    __device__ void store_weights(unsigned char* target, int j, const float (&e)[4]) const {
        const uint32_t address =
            smem_address(target) + (j * (C::kTile / 8) + t.warp * 2 + t.lane / 8 % 2) * 128 + t.lane % 8 * 16;
        store_matrices_transposed(address, pack<Element>(e[0], e[1]), pack<Element>(e[2], e[3]));
    }

    // S^T = K Q^T over a tile, in log2.
    __device__ void scores(float (&s)[kScores], const PipelineState<C::kStages>& ring, int q_buffer) {
        const unsigned char* q = t.rings.q[q_buffer];
        using Scores = Wgmma<C::kRows, Element, Major::kK>;
        float odd[kScores];  // a second accumulator: a wgmma need not wait for the one before it
        const uint64_t k_descriptor = make_descriptor(t.rings.kv[ring.stage], 0, C::kTokenGroupBytes, Swizzle::k128B);
        const uint64_t q_descriptor = make_descriptor(q, 0, 1024, Swizzle::k128B);
#pragma unroll
        for (int column_block = 0; column_block < C::kQueryColumnBlocks; ++column_block) {
            constexpr int kAwaited = C::kBarrierSegments * C::kSegmentColumnBlocks;  // column blocks
            if (column_block % kAwaited == 0) {
                t.rings.kv_full[ring.stage][column_block / kAwaited].wait(ring.phase);
                if constexpr (!C::kTma) fence_async_proxy();
                if (column_block == 0) t.profiler.mark(Event::kKeysArrived);
                wgmma_fence();
            }
#pragma unroll
            for (int step = 0; step < 4; ++step)
                if (column_block * 4 + step < C::kDim / 16)
                    Scores::mma(step % 2 ? odd : s,
                                advance(k_descriptor, column_block_offset<C>(column_block * 64) + step * 32),
                                advance(q_descriptor, column_block * C::kQueryColumnBlockBytes + step * 32),
                                column_block > 0 || step >= 2);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin_registers(s);
        pin_registers(odd);
        t.profiler.mark(Event::kScores);
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = (s[i] + odd[i]) * t.p.scale_log2;
    }

    __device__ void zero_values(unsigned char* kv, int valid) const { zero_values_16bit(t, kv, valid); }

    // O^T += V^T P^T over a tile.
    __device__ void accumulate(Blocks& o, const unsigned char* kv, const unsigned char* weights) const {
        using Values = Wgmma<C::kRows, Element, Major::kMN>;
        const uint64_t v_descriptor = make_descriptor(kv, 0, C::kTokenGroupBytes, Swizzle::k128B);
        const uint64_t p_descriptor = make_descriptor(weights, 128, C::kTile / 8 * 128, Swizzle::kNone);
#pragma unroll
        for (int b = 0; b < C::kBlocks; ++b) pin_registers(o[b]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < C::kTile / 16; ++step)
#pragma unroll
            for (int b = 0; b < C::kBlocks; ++b)
                Values::mma(o[b],
                            advance(v_descriptor, step * 2 * C::kTokenGroupBytes + column_block_offset<C>(b * 64)),
                            advance(p_descriptor, step * 256), true);
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int b = 0; b < C::kBlocks; ++b) pin_registers(o[b]);
        t.profiler.mark(Event::kValues);
    }
};

}  // namespace mla::hopper
