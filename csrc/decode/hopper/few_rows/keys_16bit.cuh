// What a consumer of few_rows does with the keys of a tile, by their format. Here: keys of 16 bits, by wgmma. The
// others are in keys_e4m3.cuh and keys_records.cuh.
#pragma once
#include "merge.cuh"
#include "ptx/mma.cuh"
#include "ptx/wgmma.cuh"

namespace mla::hopper {

// Steps that only some formats need; here they do nothing, or what 16-bit keys need. Each format also has `cache_scale`
// and `prepare_queries`, called at the start of a work tile.
template <typename C, typename S>
struct FewRowsDefaults : FewRowsMerge<C, S> {
    using Base = FewRowsMerge<C, S>;
    using Base::Base;

    // Called when a tile's scores are known; its first `valid` tokens exist. See keys_records.cuh.
    __device__ void choose_units(const unsigned char*, int) const {}

    // Called before the barrier after which P^T is multiplied.
    __device__ void publish_probabilities() const { fence_async_proxy(); }
};

template <typename C, typename S>
struct FewRowsProducts16Bit : FewRowsDefaults<C, S> {
    using Base = FewRowsDefaults<C, S>;
    using Base::Base;
    using Base::kScores;
    using Base::p, Base::smem, Base::warp, Base::lane, Base::profiler, Base::o;
    using typename Base::Element;

    static __device__ float cache_scale() { return 1.f; }
    __device__ void prepare_queries(int, float) const { fence_async_proxy(); }

    // Stores a warp's 16 tokens of the j-th 8 rows of P^T, of which a thread has two tokens, 8 apart, of two rows.
    __device__ void store_weights(unsigned char* target, int j, const float (&e)[4]) const {
        const uint32_t address =
            smem_address(target) + (j * (C::kTile / 8) + warp * 2 + lane / 8 % 2) * 128 + lane % 8 * 16;
        store_matrices_transposed(address, pack<Element>(e[0], e[1]), pack<Element>(e[2], e[3]));
    }

    // S^T = K Q^T over a tile, in log2.
    __device__ void compute_scores(float (&s)[kScores], const PipelineState<C::kStages>& ring, int q_buffer) {
        const unsigned char* q = smem.q[q_buffer];
        using Scores = Wgmma<C::kRows, Element, Major::kK>;
        float odd[kScores];  // a second accumulator: a wgmma need not wait for the one before it
        const uint64_t k_descriptor = make_descriptor(smem.kv[ring.stage], 0, C::kTokenGroupBytes, Swizzle::k128B);
        const uint64_t q_descriptor = make_descriptor(q, 0, 1024, Swizzle::k128B);
#pragma unroll
        for (int column_block = 0; column_block < C::kQueryColumnBlocks; ++column_block) {
            constexpr int kAwaited = C::kBarrierSegments * C::kSegmentColumnBlocks;  // column blocks
            if (column_block % kAwaited == 0) {
                smem.kv_full[ring.stage][column_block / kAwaited].wait(ring.phase);
                if constexpr (!C::kTma) fence_async_proxy();
                if (column_block == 0) profiler.mark(Event::kKeysArrived);
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
        profiler.mark(Event::kScores);
#pragma unroll
        for (int i = 0; i < kScores; ++i) s[i] = (s[i] + odd[i]) * p.scale_log2;
    }

    // O^T += V^T P^T over a tile.
    __device__ void accumulate(const unsigned char* kv, const unsigned char* probabilities) {
        using Values = Wgmma<C::kRows, Element, Major::kMN>;
        const uint64_t v_descriptor = make_descriptor(kv, 0, C::kTokenGroupBytes, Swizzle::k128B);
        const uint64_t p_descriptor = make_descriptor(probabilities, 128, C::kTile / 8 * 128, Swizzle::kNone);
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
        profiler.mark(Event::kValues);
    }
};

}  // namespace mla::hopper
