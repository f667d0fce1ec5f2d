// Copies of queries, keys and values to shared memory by cp.async, slice by slice, in the order in which they are
// multiplied: the slices of a tile's keys, then those of its values.
#pragma once
#include "prefill_config.cuh"

namespace mla::sm80 {

// Copies kRows rows of kBlocks column blocks; zeros where rows or columns do not exist. Eight threads copy 128 bytes.
template <typename C, int kRows, int kBlocks, bool kWhole>
__device__ __forceinline__ void copy_rows(uint32_t destination, const typename C::Element* source, int stride, int rows,
                                          int columns) {
    constexpr int kAtOnce = C::kThreads / 8;                              // rows of a block
    constexpr int kBlocksAtOnce = kAtOnce > kRows ? kAtOnce / kRows : 1;  // where blocks have few rows
    constexpr int kRowsAtOnce = kAtOnce / kBlocksAtOnce;
    static_assert(kRowsAtOnce % 8 == 0 && (kBlocksAtOnce == 1 || kRowsAtOnce == kRows));
    const int tid = thread_index<C>(), vector = tid % 8;
    const int first_row = tid / 8 % kRowsAtOnce, first_block = tid / 8 / kRowsAtOnce;
    destination += first_block * (kRows * 128) + swizzled_offset(first_row, vector);
    source += wide_product(first_row, stride) + first_block * 64 + vector * 8;
    const int64_t step = wide_product(kRowsAtOnce, stride);
#pragma unroll
    for (int row = 0; row < kRows; row += kRowsAtOnce) {
        if (kRows % kRowsAtOnce != 0 && first_row + row >= kRows) break;
#pragma unroll
        for (int block = 0; block < kBlocks; block += kBlocksAtOnce) {
            if (kBlocks % kBlocksAtOnce != 0 && first_block + block >= kBlocks) break;
            const bool exists = first_row + row < rows && (kWhole || (first_block + block) * 64 + vector * 8 < columns);
            cp_async_16(destination + block * (kRows * 128) + row * 128, source + block * 64, exists);
        }
        source = pinned(source + step);  // one address at a time
    }
}

template <typename C>
struct SliceLoader {
    using Element = typename C::Element;
    // Whether no slice has columns that do not exist.
    static constexpr bool kWholeKeys = C::kDimQk % C::kKeyColumns == 0;
    static constexpr bool kWholeValues = C::kDimV == C::kPartColumns * C::kValueParts && C::kPartColumns % 64 == 0;

    const PrefillParams& p;
    PrefillMemory<C>& smem;
    uint32_t next = 0;  // slice

    __device__ SliceLoader(const PrefillParams& p, PrefillMemory<C>& smem) : p(p), smem(smem) {
        if constexpr (!C::kStreamsQueries)
            copy_rows<C, C::kRows, C::kQkBlocks, C::kDimQk % 64 == 0>(smem_address(smem.queries), smem.block.q,
                                                                      p.q_token_stride, smem.block.rows(), C::kDimQk);
    }

    // Slices ahead of the one at hand that are on their way.
    static constexpr int kAhead = C::kStages - 1;

    // Copies the next slice to the stage of the one before the slice at hand; nothing behind the last slice.
    __device__ void copy() {
        constexpr uint32_t kSlices = C::kKeySlices + C::kValueSlices;
        const int tile = next / kSlices, token = tile * C::kTile, slice = next - tile * kSlices;
        if (token < smem.block.key_end()) {
            const uint32_t stage = next % C::kStages;
            // A new barrier's previous phase counts as complete.
            if constexpr (C::kMbarriers) smem.empty[stage].wait(next / C::kStages % 2 ^ 1);
            const uint32_t destination = smem_address(smem.ring) + stage * C::kStageBytes;
            if (slice < C::kKeySlices)
                copy_keys(destination, token, slice);
            else
                copy_values(destination, token, slice - C::kKeySlices);
            if constexpr (C::kMbarriers) smem.full[stage].arrive_after_cp_async();
        }
        ++next;
        if constexpr (!C::kMbarriers) cp_async_commit();
    }

    // Waits for the slice at hand, whose address it returns. `copy` must follow, and then `release`.
    __device__ uint32_t wait() {
        const uint32_t slice = next - kAhead, stage = slice % C::kStages;
        if constexpr (C::kMbarriers) {
            smem.full[stage].wait(slice / C::kStages % 2);
        } else {
            cp_async_wait<kAhead - 1>();
            __syncthreads();
        }
        return smem_address(smem.ring) + stage * C::kStageBytes;
    }

    // By each warp that has read the slice at hand.
    __device__ void release() {
        if constexpr (!C::kMbarriers) return;  // the next slice's barrier tells
        __syncwarp();
        if (threadIdx.x % 32 == 0) smem.empty[(next - 1 - kAhead) % C::kStages].arrive();
    }

  private:
    __device__ void copy_keys(uint32_t destination, int token, int slice) const {
        const int column = slice * C::kKeyColumns, columns = C::kDimQk - column;
        const Element* k = smem.block.k + wide_product(token, p.k_token_stride);
        copy_rows<C, C::kTile, C::kKeyBlocks, kWholeKeys>(destination, k + column, p.k_token_stride,
                                                          smem.block.key_end() - token, columns);
        if constexpr (C::kStreamsQueries)
            copy_rows<C, C::kRows, C::kKeyBlocks, kWholeKeys>(destination + C::kKeyBlocks * C::kKeyBlockBytes,
                                                              smem.block.q + column, p.q_token_stride,
                                                              smem.block.rows(), columns);
    }

    __device__ void copy_values(uint32_t destination, int token, int slice) const {
        const int first = token + slice / C::kValueParts * C::kValueTokens;
        const int column = slice % C::kValueParts * C::kPartColumns;
        const Element* v = smem.block.v + wide_product(first, p.v_token_stride);
        copy_rows<C, C::kValueTokens, C::kValueBlocks, kWholeValues>(destination, v + column, p.v_token_stride,
                                                                     smem.block.key_end() - first,
                                                                     min(C::kDimV - column, C::kPartColumns));
    }
};

}  // namespace mla::sm80
