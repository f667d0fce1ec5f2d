// The query loader: the loading warps that do not load keys copy the queries of every work tile and say where the work
// tile's outputs go.
#pragma once
#include "loader.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"
#include "ptx/registers.cuh"

namespace mla::hopper {

// Queries; rows and columns that do not exist become zeros. A thread copies the same 16 bytes of all column blocks of
// its rows.
template <typename C>
struct QueryLoader {
    static constexpr int kQueryThreads = LoaderThread<C>::kQueryThreads;
    using Element = typename C::Element;
    static constexpr int kRowsAtOnce = kQueryThreads / 8;

    const LoaderThread<C>& t;
    const int first = threadIdx.x % 128 - LoaderThread<C>::kKeyWarps * 32;
    const int thread = LoaderThread<C>::kFewRegisters ? pinned(first) : first;
    const int vector = thread % 8;
    const Element* q_nope = static_cast<const Element*>(t.p.q_nope) + vector * 8;
    const Element* q_rope = static_cast<const Element*>(t.p.q_rope) + vector * 8;

    __device__ QueryLoader(const LoaderThread<C>& t) : t(t) {}

    // Row r of an m-block.
    __device__ void load_row(const WorkTile& work, int r, uint32_t buffer, OutputOffsets<C::kRows>& offsets) const {
        const int row = work.m_block * C::kRows + r, token = row / t.p.num_heads, head = row - token * t.p.num_heads;
        const uint32_t in_batch = query_token(t.p, work, token);
        const bool exists = in_batch < t.p.num_tokens;
        const int64_t index = in_batch;
        const int64_t nope = exists ? index * t.p.q_nope_token_stride + head * t.p.q_nope_head_stride : 0;
        const int64_t rope = exists ? index * t.p.q_rope_token_stride + head * t.p.q_rope_head_stride : 0;
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
            offsets.out[r] = exists ? index * t.p.out_token_stride + head * t.p.out_head_stride : -1;
            offsets.lse[r] = exists ? index * t.p.lse_token_stride + head * t.p.lse_head_stride : -1;
        }
    }

    __device__ void run() {
        PipelineState<C::kQueryBuffers> ring;
        WorkCursor<C> cursor(t.p, t.range_to_walk());
        WorkTile work;
        for (int work_index = 0; cursor.next(work); ++work_index) {
            t.rings.q_empty[ring.stage].wait(ring.phase ^ 1);
            const uint32_t buffer = smem_address(t.rings.q[ring.stage]);
            auto& offsets = t.rings.offsets[offset_buffer(work_index)];
#pragma unroll 1
            for (int r = thread / 8; r < C::kRows; r += kRowsAtOnce) load_row(work, r, buffer, offsets);
            if (work_index == 0 && thread == kQueryThreads - 1) {  // it has the least work: the last rows may not exist
                wait_for_predecessor();
                t.rings.flag = read_flag(t.p, planned_cta<C>());
            }
            t.rings.q_full[ring.stage].arrive();  // for the flag and the offsets; the queries' own arrival follows
            t.rings.q_full[ring.stage].arrive_after_cp_async();
            ring.advance();
        }
    }
};

}  // namespace mla::hopper
