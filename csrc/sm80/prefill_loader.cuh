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
    int next = 0;  // slice

    __device__ SliceLoader(const PrefillParams& p, PrefillMemory<C>& smem) : p(p), smem(smem) {
        if constexpr (!C::kStreamsQueries)
            copy_rows<C, C::kRows, C::kQkBlocks, C::kDimQk % 64 == 0>(smem_address(smem.queries), smem.block.q,
                                                                      p.q_token_stride, smem.block.rows(), C::kDimQk);
    }

    // Copies the next slice to a stage, as one group of cp.async; nothing behind the last slice.
    __device__ void copy(int stage) {
        constexpr int kSlices = C::kKeySlices + C::kValueSlices;
        const int tile = next / kSlices, token = tile * C::kTile, slice = next - tile * kSlices;
        if (token < smem.block.key_end()) {
            const uint32_t destination = smem_address(smem.ring) + stage * C::kStageBytes;
            if (slice < C::kKeySlices)
                copy_keys(destination, token, slice);
            else
                copy_values(destination, token, slice - C::kKeySlices);
        }
        ++next;
        cp_async_commit();
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
