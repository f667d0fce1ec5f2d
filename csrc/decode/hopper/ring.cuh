// What loaders and consumers share: rings of KV tiles and of queries, in shared memory.
//
// A kernel's configuration C fixes the layout:
//   C::kTile                 tokens of a stage
//   C::Layout                of the cache (numbers/cache_format.cuh)
//   C::kBlockBytes           bytes of a column block, per token: 128 (64 columns of 16 bits, or 128 of a record) or 64
//                            (64 columns of e4m3). It has kBlockColumns columns
//   C::kKeyColumnBlocks      column blocks of a token; of a record, without the tail
//   C::kQueryColumnBlocks    column blocks of a query row, 64 columns each
//   C::kLists                keys are named by a list of slots. Each layer has its own list, so it is read only after
//                            the wait for the predecessor
//   C::kByTokens             all warps load token by token (load/token_keys.cuh)
//   C::kSlotStride           which of the first tokens the planner looks up: every 8th (8: TMA), each (1), none (0)
//   C::kRangeCtas            2: the CTAs of a cluster have the same ranges. Each loads every other segment for both,
//                            once the consumers of both have released it
//   C::kReleases             the number of parts in which consumers release a stage: 1 (the whole stage), or 3, or 2
//                            without rotary columns
//   C::release_of(segment)   the part that the segment belongs to
//   C::full_barrier_of(segment)  which of a stage's kFullBarriers barriers says that the segment has arrived
//   C::segment_in_turn(t, i) the i-th segment to load of a work tile's t-th tile: first the kFirstRelease segments of
//                            one part, then the one segment of another if there are three, then those of the last
//   C::kPrefetchTiles        how many tiles ahead of its load a tile is prefetched to the L2 cache; 0: no prefetch.
//                            Only for requests with one m-block
#pragma once
#include "numbers/cache_format.cuh"
#include "ptx/descriptor.cuh"
#include "ptx/mbarrier.cuh"
#include "schedule/splits.cuh"

namespace mla::hopper {

constexpr int kConsumerThreads = 256;

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

// With records, the last segment of a stage holds the tails, [token][kTailBytes], and the others the e4m3 columns.
template <typename C>
__device__ constexpr bool has_tails(int segment) {
    return C::Layout::kHasTail && segment == C::kRopeSegment;
}
template <typename C>
constexpr int kTailGroupBytes = 8 * C::Layout::kTailBytes;

// Offset in a stage of the column block that contains a column, for the first group of tokens.
template <typename C>
__device__ constexpr uint32_t column_block_offset(uint32_t column) {
    const uint32_t column_block = column / C::kBlockColumns;
    return column_block / C::kSegmentColumnBlocks * C::kSegmentBytes +
           column_block % C::kSegmentColumnBlocks * (8 * C::kBlockBytes);
}
// Offset of the column within that column block, for the first token.
template <typename C>
__device__ constexpr uint32_t offset_in_block(uint32_t column) {
    return column % C::kBlockColumns * C::Layout::kElementBytes;
}
// `place` is the address of a 16-byte vector among a token's first 64 columns; `columns` is a multiple of 64. Returns
// the address of the vector `columns` columns further on. In a record's column block, a step of 64 columns flips bit 6
// of the swizzled address: hence the exclusive or.
template <typename C>
__device__ constexpr uint32_t vector_further_on(uint32_t place, uint32_t columns) {
    return (place ^ offset_in_block<C>(columns)) + column_block_offset<C>(columns);
}
// The swizzle of keys in shared memory.
template <typename C>
constexpr Swizzle kKeySwizzle = C::kBlockBytes == 64 ? Swizzle::k64B : Swizzle::k128B;

// Tokens of each stage whose entry in the page table or the list names no key, because it lies outside of the cache.
// The stage holds zeros for them, and their scores are masked. With TMA, a bit for each group of 8 tokens, by the lane
// that expects the bytes of a stage's first segment; groups past the last key may have bits, too, and hold anything.
// Otherwise a bit for each token; with lists, tokens past the last one count as unnamed.
template <typename C>
struct UnnamedTokens {
    using Bits = std::conditional_t<C::kTma, uint32_t, uint64_t>;
    alignas(8) uint32_t words[C::kStages][C::kTma ? 1 : 2];
    static_assert(C::kTile == 64);

    // Of the whole stage, or of a warp's 16 tokens.
    __device__ Bits of(int stage) const { return reinterpret_cast<const Bits&>(words[stage]); }
    __device__ uint32_t of(int stage, int warp) const {
        if constexpr (C::kTma) return words[stage][0] >> warp * 2 & 0b11;
        return reinterpret_cast<const uint16_t*>(words[stage])[warp];
    }

    // A bit for each token.
    static __device__ uint64_t tokens(Bits bits) {
        if constexpr (!C::kTma) return bits;
        return static_cast<uint64_t>(tokens_of_half(bits >> 4)) << 32 | tokens_of_half(bits & 0xf);
    }
    static __device__ uint32_t tokens_of_half(uint32_t bits) {
        return C::kTma ? (bits * 0x00204081 & 0x01010101) * 0xff : bits;  // bit i becomes byte i
    }
};

// Written by loaders, except for the barriers of what is free again.
template <typename C>
struct RingMemory {
    // kSegments segments of kSegmentColumnBlocks column blocks; each segment in groups of 8 tokens: [column
    // block][8][kBlockBytes], swizzled by kBlockBytes. With records, the last segment has the tails,
    // [token][kTailBytes].
    alignas(1024) unsigned char kv[C::kStages][C::kStageBytes];
    // [column block][kRows][128 B], swizzled by 128 B.
    alignas(1024) unsigned char q[C::kQueryBuffers][C::kQueryBytes];
    OutputOffsets<C::kRows> offsets[kOffsetBuffers];
    uint32_t flag;  // this CTA's, when the launch began (schedule/splits.cuh)
    int cta;        // this CTA's number in the plan. Not kept in a register, where it would be spilled
    UnnamedTokens<C> unnamed;
    Barrier kv_full[C::kStages][C::kFullBarriers], kv_empty[C::kStages][C::kReleases];
    Barrier q_full[C::kQueryBuffers], q_empty[C::kQueryBuffers];
};

}  // namespace mla::hopper
