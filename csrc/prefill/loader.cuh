// Copies of queries, keys and values to shared memory by cp.async, slice by slice, in the order in which they are
// multiplied: the slices of a tile's keys, then those of its values.
#pragma once
#include "config.cuh"
#include "ptx/cp_async.cuh"

namespace mla::prefill {

// Copies kRows rows of kBlocks column blocks; zeros where rows or columns do not exist. Eight threads copy 128 bytes.
template <typename C, int kRows, int kBlocks, bool kWhole>
__device__ __forceinline__ void copy_rows(uint32_t destination, const typename C::Element* source, int stride, int rows,
                                          int columns) {
    constexpr int kAtOnce = C::kThreads / 8;                              // rows of a block
    constexpr int kBlocksAtOnce = kAtOnce > kRows ? kAtOnce / kRows : 1;  // where blocks have few rows
    constexpr int kRowsAtOnce = kAtOnce / kBlocksAtOnce;
    static_assert(kRowsAtOnce % 8 == 0 && (kBlocksAtOnce == 1 || kRowsAtOnce == kRows));
    const uint32_t tid = thread_index<C>();
    const int vector = tid % 8, first_row = tid / 8 % kRowsAtOnce, first_block = tid / 8 / kRowsAtOnce;
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
            cp_async_16_or_zero(destination + block * (kRows * 128) + row * 128, source + block * 64, exists);
        }
        source = pinned(source + step);  // one address at a time
    }
}

template <typename C>
struct SliceLoader {
    using Element = typename C::Element;
    // Reading shared memory takes long beside the products, so the block is in registers where they suffice.
    using Block = std::conditional_t<C::kTight, const QueryBlock<C>&, const QueryBlock<C>>;
    // How many slices after the current one are in flight.
    static constexpr int kAhead = C::kStages - 1;
    // Whether no slice has columns that do not exist.
    static constexpr bool kWholeKeys = C::kDimQk % C::kKeyColumns == 0;
    static constexpr bool kWholeValues = C::kDimV == C::kValueColumns && C::kValueColumns % 64 == 0;

    const PrefillParams& p;
    PrefillMemory<C>& smem;
    Block block;

    __device__ SliceLoader(const PrefillParams& p, PrefillMemory<C>& smem) : p(p), smem(smem), block(smem.block) {
        if constexpr (!C::kStreamsQueries)
            copy_rows<C, C::kRows, C::kQkBlocks, C::kDimQk % 64 == 0>(smem_address(smem.queries), block.q,
                                                                      p.q_token_stride, block.rows(), C::kDimQk);
    }

    // Copy a slice of the tile at `token`: of its keys, or of its values, which are numbered after those of the keys.
    // Past the last tile, these write zeros or nothing. The kind of slice is known at compile time: a branch would
    // delay the products that follow.
    __device__ void copy_keys(int token, int slice) {
        fill(own(token), slice, [&](uint32_t destination, int token) { write_keys(destination, token, slice); });
    }
    __device__ void copy_values(int token, int slice) {
        fill(own(token), slice,
             [&](uint32_t destination, int token) { write_values(destination, token, slice - C::kKeySlices); });
    }
    // Copies slice kSlice, counted over the tile at `token` and the next one.
    template <int kSlice>
    __device__ void copy(int token) {
        constexpr int kInTile = kSlice % C::kSlices;
        if constexpr (kInTile < C::kKeySlices)
            copy_keys(token + kSlice / C::kSlices * C::kTile, kInTile);
        else
            copy_values(token + kSlice / C::kSlices * C::kTile, kInTile);
    }

    // Waits for a slice and returns its address. After that, the slice that is kAhead slices later must be copied, and
    // then this one be released.
    __device__ uint32_t wait(int token, int slice) {
        const uint32_t number = number_of(token, slice), stage = number % C::kStages;
        if constexpr (C::kMbarriers) {
            smem.full[stage].wait(number / C::kStages % 2);
        } else {
            cp_async_wait<kAhead - 1>();
            __syncthreads();
        }
        return smem_address(smem.ring) + stage * C::kStageBytes;
    }

    // Address of P of a tile. In the ring, it lies in the stage of the tile's last slice, past all slices of values. A
    // row group overwrites only rows of queries that no other group reads.
    __device__ unsigned char* probabilities(int token) const {
        if constexpr (!C::kReplacesQueries) return smem.probabilities;
        const uint32_t stage = number_of(token, C::kSlices - 1) % C::kStages;
        return smem.ring + stage * C::kStageBytes + C::kKeyBytes;
    }

    // To be called by each warp that has read a slice.
    __device__ void release(int token, int slice) {
        if constexpr (!C::kMbarriers) return;  // the next slice's barrier implies it
        __syncwarp();
        if (threadIdx.x % 32 == 0) smem.empty[number_of(token, slice) % C::kStages].arrive();
    }

  private:
    // Returns its argument. If registers are short, the compiler then holds no values derived from it.
    __device__ static int own(int number) { return C::kTight ? pinned(number) : number; }

    // A slice's number among all slices, in the order of their copies.
    __device__ static uint32_t number_of(int token, int slice) { return token / C::kTile * C::kSlices + slice; }

    // Fills the slice's stage by write(destination, token).
    template <typename Write>
    __device__ void fill(int token, int slice, Write write) {
        const uint32_t number = number_of(token, slice), stage = number % C::kStages;
        // A new barrier's previous phase counts as complete.
        if constexpr (C::kMbarriers) smem.empty[stage].wait(number / C::kStages % 2 ^ 1);
        // Always true, except past the last tile; the branch saves registers.
        if (!C::kTight || token < block.key_end) write(smem_address(smem.ring) + stage * C::kStageBytes, token);
        if constexpr (C::kMbarriers)
            smem.full[stage].arrive_after_cp_async();
        else
            cp_async_commit();
    }

    __device__ void write_keys(uint32_t destination, int token, int slice) const {
        const int column = slice * C::kKeyColumns, columns = C::kDimQk - column;
        const Element* k = block.k + wide_product(token, p.k_token_stride);
        copy_rows<C, C::kTile, C::kKeyBlocks, kWholeKeys>(destination, k + column, p.k_token_stride,
                                                          block.key_end - token, columns);
        if constexpr (C::kStreamsQueries)
            copy_rows<C, C::kRows, C::kKeyBlocks, kWholeKeys>(destination + C::kKeyBytes, block.q + column,
                                                              p.q_token_stride, block.rows(), columns);
    }

    __device__ void write_values(uint32_t destination, int token, int slice) const {
        const int first = token + slice * C::kValueTokens;
        const Element* v = block.v + wide_product(first, p.v_token_stride);
        copy_rows<C, C::kValueTokens, C::kValueBlocks, kWholeValues>(destination, v, p.v_token_stride,
                                                                     block.key_end - first, C::kDimV);
    }
};

}  // namespace mla::prefill
