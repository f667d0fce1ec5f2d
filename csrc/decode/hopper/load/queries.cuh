// The query loader: the loading warps that do not load keys copy the queries of every work tile and say where the work
// tile's outputs go. Timeline and shared memory: keys.cuh.
#pragma once
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/pdl.cuh"
#include "ptx/registers.cuh"
#include "schedule/params.cuh"
#include "schedule/splits.cuh"

namespace mla::hopper {

// A position in a ring of stages. A consumer waits for `phase`; a producer, which finds a fresh ring empty, waits for
// `phase ^ 1`.
template <int kStages>
struct PipelineState {
    uint32_t stage = 0;
    uint32_t phase = 0;

    __device__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// The query loader writes OutputOffsets for each work tile. Those of the first and of the last work tile are still
// there for the combine: the first work tile has a buffer of its own, the others take turns, and no buffer is written
// again before its work tile is finished.
constexpr int kOffsetBuffers = 4;
__device__ __forceinline__ int offset_buffer(int work_index) {
    return work_index == 0 ? 0 : 1 + work_index % (kOffsetBuffers - 1);
}

// What the roles of the warpgroup share.
template <typename C, typename S>
struct LoaderThread {
    static constexpr int kKeyWarps = C::kByTokens ? 0 : C::kTma ? 1 : 3;  // that load no queries
    static constexpr int kQueryThreads = (4 - kKeyWarps) * 32;
    // If registers are few, cheap values that are needed once in a work tile are computed again instead of kept.
    static constexpr bool kFewRegisters = C::kByTokens || C::kLoaderRegisters < 72;
    static constexpr int kQueryArrivals = 2 * kQueryThreads;  // at each q_full

    const DecodeParams& p;
    S& smem;
    const int planned_slot;  // that the planner has looked up for this lane
    const CtaRange range;

    __device__ LoaderThread(const DecodeParams& p, S& smem, const CtaPlan& plan)
        : p(p), smem(smem), planned_slot(C::kSlotStride == 0 ? -1 : plan.slots[threadIdx.x % 32]), range(plan.range) {}

    // The range, for all work tiles.
    __device__ const CtaRange& range_to_walk() const {
        if constexpr (kFewRegisters)
            return p.plans[planned_cta<C>()].range;
        else
            return range;
    }
};

// Queries; rows and columns that do not exist become zeros. A thread copies the same 16 bytes of all column blocks of
// its rows.
template <typename C, typename S>
struct QueryLoader : LoaderThread<C, S> {
    using Base = LoaderThread<C, S>;
    using Base::p, Base::smem, Base::range, Base::kKeyWarps, Base::kQueryThreads;
    using Element = typename C::Element;
    static constexpr int kRowsAtOnce = kQueryThreads / 8;

    const int thread =
        Base::kFewRegisters ? pinned(threadIdx.x % 128 - kKeyWarps * 32) : threadIdx.x % 128 - kKeyWarps * 32;
    const int vector = thread % 8;
    const Element* q_nope = static_cast<const Element*>(p.q_nope) + vector * 8;
    const Element* q_rope = static_cast<const Element*>(p.q_rope) + vector * 8;

    __device__ QueryLoader(const Base& thread) : Base(thread) {}

    // Row r of an m-block.
    __device__ void load_row(const WorkTile& work, int r, uint32_t buffer, OutputOffsets<C::kRows>& offsets) const {
        const int row = work.m_block * C::kRows + r, token = row / p.num_heads, head = row - token * p.num_heads;
        const uint32_t in_batch = query_token(p, work, token);
        const bool exists = in_batch < p.num_tokens;
        const int64_t index = in_batch;
        const int64_t nope = exists ? index * p.q_nope_token_stride + head * p.q_nope_head_stride : 0;
        const int64_t rope = exists ? index * p.q_rope_token_stride + head * p.q_rope_head_stride : 0;
        const uint32_t target = buffer + r * 128 + (vector ^ r % 8) * 16;
        // Not earlier: the first addresses are computed while the predecessor ends.
        wait_for_predecessor();
#pragma unroll
        for (int column_block = 0; column_block < C::kQueryColumnBlocks; ++column_block) {
            const int column = column_block * 64;
            const bool latent = column < C::kDimLatent;
            const auto* source = latent ? q_nope + nope + column : q_rope + rope + (column - C::kDimLatent);
            const bool valid = exists && (C::kDim % 64 == 0 || column + vector * 8 < C::kDim);
            cp_async_16_or_zero(target + column_block * C::kQueryColumnBlockBytes, valid ? source : q_nope, valid);
        }
        if (vector == 0) {
            offsets.out[r] = exists ? index * p.out_token_stride + head * p.out_head_stride : -1;
            offsets.lse[r] = exists ? index * p.lse_token_stride + head * p.lse_head_stride : -1;
        }
    }

    __device__ void run() {
        PipelineState<C::kQueryBuffers> ring;
        WorkCursor<C> cursor(p, Base::range_to_walk());
        WorkTile work;
        for (int work_index = 0; cursor.next(work); ++work_index) {
            smem.q_empty[ring.stage].wait(ring.phase ^ 1);
            const uint32_t buffer = smem_address(smem.q[ring.stage]);
            auto& offsets = smem.offsets[offset_buffer(work_index)];
#pragma unroll 1
            for (int r = thread / 8; r < C::kRows; r += kRowsAtOnce) load_row(work, r, buffer, offsets);
            if (work_index == 0 && thread == kQueryThreads - 1) {  // no other thread has fewer rows; it may have none
                wait_for_predecessor();
                smem.flag = read_flag(p, planned_cta<C>());
            }
            smem.q_full[ring.stage].arrive();  // for the flag and the offsets; the queries' own arrival follows
            smem.q_full[ring.stage].arrive_after_cp_async();
            ring.advance();
        }
    }
};

}  // namespace mla::hopper
