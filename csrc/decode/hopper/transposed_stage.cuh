// A stage of the ring of few_rows/kernel.cuh and many_rows_fp8/kernel.cuh.
#pragma once

namespace mla::hopper {

constexpr int kTransposedTile = 64;  // tokens
constexpr int column_blocks(int columns) { return (columns + 63) / 64; }

// Segments of one column block each; the last one has the rotary columns. kBlocksOf64: columns of a token, by 64.
template <typename Layout, int kBlocksOf64>
constexpr int block_segments = Layout::kIsRecord ? Layout::kScales + 1 : kBlocksOf64;

// In kSegments segments, released as a whole.
template <typename Layout, int kBlocksOf64, bool kTma, int kSegments_ = block_segments<Layout, kBlocksOf64>>
struct TransposedStage {
    static constexpr int kTile = kTransposedTile, kSegments = kSegments_;
    static constexpr int kRopeSegment = kSegments - 1;
    static constexpr int kBlockBytes = Layout::kFp8 && !Layout::kIsRecord ? 64 : 128;
    static constexpr int kBlockColumns = kBlockBytes / Layout::kElementBytes;
    static constexpr int kKeyColumnBlocks = Layout::kIsRecord ? Layout::kScales : kBlocksOf64;
    // Of records, the last segment has the tails, with the rotary columns, and a column block has a scale.
    static constexpr int kSegmentColumnBlocks =
        Layout::kIsRecord ? Layout::kScales / (kSegments - 1) : (kBlocksOf64 + kSegments - 1) / kSegments;
    // Consumers wait for keys by segments. Where threads copy keys, each wait needs a fence: consumers wait for each
    // half of the segments before the last one, then for the last one; or for whole records.
    static constexpr int kBarrierSegments = kTma ? 1 : Layout::kIsRecord ? kSegments : kRopeSegment / 2;
    static constexpr int kFullBarriers = kRopeSegment / kBarrierSegments + 1;
    static constexpr int kReleases = 1, kPrefetchTiles = 0, kFirstRelease = kSegments;
    static constexpr int kTokenGroupBytes = kSegmentColumnBlocks * 8 * kBlockBytes,
                         kSegmentBytes = kTile / 8 * kTokenGroupBytes;
    static constexpr int kStageBytes =
        Layout::kIsRecord ? (kSegments - 1) * kSegmentBytes + kTile * Layout::kTailBytes : kSegments * kSegmentBytes;

    // The tails of records come first: all products need their scales.
    static __device__ constexpr int segment_in_turn(int, int i) {
        return Layout::kIsRecord ? (i + kSegments - 1) % kSegments : i;
    }
    static __device__ int full_barrier_of(int segment) { return segment / kBarrierSegments; }
    static __device__ int release_of(int) { return 0; }
    static __device__ constexpr int releasing_lanes(int) { return 1; }
};

}  // namespace mla::hopper
