// A stage of the ring of few_rows/kernel.cuh and many_rows_fp8/kernel.cuh.
#pragma once
#include "config.cuh"
#include "ptx/descriptor.cuh"
#include "ptx/registers.cuh"

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
    static constexpr int kBlockBytes = Layout::kFp8 && !Layout::kIsRecord ? 64 : 128;
    static constexpr int kBlockColumns = kBlockBytes / Layout::kElementBytes;
    static constexpr int kKeyColumnBlocks = Layout::kIsRecord ? Layout::kScales : kBlocksOf64;
    // A column block of a record has a scale; one more segment has the tails, with the rotary columns.
    static constexpr int kSegmentColumnBlocks = kSegmentColumnBlocks_;
    static constexpr int kSegments = kKeyColumnBlocks / kSegmentColumnBlocks + Layout::kIsRecord;
    // The number of the latents' segments, and so the one after them: with rotary columns, if there are any.
    static constexpr int kRopeSegment = Layout::kScaleOffset / (kSegmentColumnBlocks * kBlockBytes);
    static constexpr int kBarrierSegments = kTma ? 1 : Layout::kIsRecord ? kSegments : kWaitSegments;
    static constexpr int kFullBarriers = (kSegments + kBarrierSegments - 1) / kBarrierSegments;
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
};

// Masks the scores of a stage's tokens without keys. By a warp that has 16 tokens of the fragment.
template <typename Thread, int kScores>
__device__ __forceinline__ void mask_unnamed(const Thread& t, float (&s)[kScores], int stage) {
    uint32_t unnamed = t.rings.unnamed.of(stage, t.warp);
    if (unnamed == 0) return;
    unnamed = t.rings.unnamed.tokens_of_half(unnamed) >> t.lane / 4;
#pragma unroll
    for (int i = 0; i < kScores; ++i)
        if (unnamed >> i / 2 % 2 * 8 & 1) s[i] = -INFINITY;
}

// Zeroes the e4m3 values of this warp's tokens of a tile from `valid` on: what was not loaded may be NaN. Scores of
// these tokens, which another warp may still compute, are masked. The fence after the softmax also orders this before
// the next copy to the stage.
template <typename C>
__device__ __forceinline__ void zero_values_e4m3(int warp, int lane, unsigned char* keys, int valid) {
    constexpr int kBlockVectors = C::kBlockBytes / 16;
    __syncwarp();
#pragma unroll 1
    for (int token = max(valid, warp * 16); token < (warp + 1) * 16; ++token)
#pragma unroll 1
        for (int vector = pinned(lane); vector < C::kDimLatent / 16; vector += 32)
            *reinterpret_cast<uint4*>(keys + token / 8 * C::kTokenGroupBytes +
                                      vector / kBlockVectors * C::kSegmentBytes +
                                      vector_offset<C::kBlockBytes>(token % 8, vector % kBlockVectors)) =
                make_uint4(0, 0, 0, 0);
}

}  // namespace mla::hopper
