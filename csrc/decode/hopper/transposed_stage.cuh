// A stage of the ring of few_rows/kernel.cuh and many_rows_fp8/kernel.cuh.
#pragma once
#include "config.cuh"

namespace mla::hopper {

constexpr int kTransposedTile = 64;  // tokens

// Of a fragment with tokens or columns on the M side and query rows on the N side: the i-th row of a lane, and which of
// the lane's rows accumulator i is of.
__device__ __forceinline__ int row_of(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
__device__ __forceinline__ constexpr int row_of_score(int i) { return i / 4 * 2 + i % 2; }

// In segments of kSegmentColumnBlocks_ column blocks, released as a whole. kBlocksOf64: columns of a token, by 64.
// kWaitSegments: for how many segments consumers wait at once where threads copy keys, since each wait needs a fence.
template <typename Layout, int kBlocksOf64, bool kTma, int kSegmentColumnBlocks_, int kWaitSegments>
struct TransposedStage {
    static constexpr int kTile = kTransposedTile;
    // If groups of columns have scales, a column block is a group.
    static constexpr int kBlockColumns = Layout::kScale == Scale::kGroup ? Layout::kScaleColumns : 64;
    static constexpr int kBlockBytes = kBlockColumns * Layout::kElementBytes;
    static_assert(kBlockBytes == 64 || kBlockBytes == 128);  // swizzles
    // The tails of keys, with the rotary columns, are one more segment.
    static constexpr int kKeyColumnBlocks = Layout::kHasTail ? Layout::kScaleOffset / kBlockBytes : kBlocksOf64;
    static constexpr int kSegmentColumnBlocks = kSegmentColumnBlocks_;
    static constexpr int kSegments = kKeyColumnBlocks / kSegmentColumnBlocks + Layout::kHasTail;
    static_assert(kKeyColumnBlocks % kSegmentColumnBlocks == 0);
    // The number of the latents' segments, and so the one after them: with rotary columns, if there are any.
    static constexpr int kRopeSegment = Layout::kScaleOffset / (kSegmentColumnBlocks * kBlockBytes);
    static constexpr int kBarrierSegments = kTma ? 1 : Layout::kHasTail ? kSegments : kWaitSegments;
    static constexpr int kFullBarriers = (kSegments + kBarrierSegments - 1) / kBarrierSegments;
    static constexpr int kReleases = 1, kPrefetchTiles = 0, kFirstRelease = kSegments;
    static constexpr int kTokenGroupBytes = kSegmentColumnBlocks * 8 * kBlockBytes,
                         kSegmentBytes = kTile / 8 * kTokenGroupBytes;
    static constexpr int kStageBytes =
        Layout::kHasTail ? (kSegments - 1) * kSegmentBytes + kTile * Layout::kTailBytes : kSegments * kSegmentBytes;

    // Tails come first: all products need their scales.
    static __device__ constexpr int segment_in_turn(int, int i) {
        return Layout::kHasTail ? (i + kSegments - 1) % kSegments : i;
    }
    static __device__ int full_barrier_of(int segment) { return segment / kBarrierSegments; }
    static __device__ int release_of(int) { return 0; }
};

}  // namespace mla::hopper
