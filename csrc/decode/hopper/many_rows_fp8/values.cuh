// What consumers of many_rows_fp8 do with tiles of both formats: where these lie, and the products with values.
//
//   O^T  Values become fp16, which holds every e4m3, on their way from shared memory to registers. Four A fragments, 64
//        tokens and a warp's 16 columns of an m64 block, are made while the tensor cores multiply the four before; B is
//        P^T.
#pragma once
#include "decode/hopper/kernel.cuh"
#include "decode/hopper/transposed_stage.cuh"
#include "numbers/arithmetic.cuh"
#include "numbers/query_scale.cuh"
#include "ptx/mma.cuh"
#include "ptx/wgmma.cuh"

namespace mla::hopper {

// Two A fragments of V^T, 32 tokens of 16 columns: row g is column 2 g, and row g + 8 column 2 g + 1. `words` are those
// that `load_matrices_transposed` returns if each lane passes the address of one token.
__device__ __forceinline__ void widen_values(uint32_t (&first)[4], uint32_t (&second)[4], const uint32_t (&words)[4]) {
    halves_of_e4m3(words[0], first[0], first[1]);
    halves_of_e4m3(words[1], first[2], first[3]);
    halves_of_e4m3(words[2], second[0], second[1]);
    halves_of_e4m3(words[3], second[2], second[3]);
}

// Shared memory of what a consumer does with keys and values.
template <typename C>
struct ProductMemory {
    alignas(1024) unsigned char weights[C::kWeightTiles][C::kWeightBytes];  // P^T of a tile; tiles take turns
    alignas(8) float score_scales[C::kRows];  // what brings a product to log2, for each query row
};

template <typename C>
struct ManyRowsFp8Values {
    using Element = typename C::Element;
    static constexpr int kScores = C::kRows / 2, kConsumerBlocks = C::kBlocks / 2;
    using Blocks = float[kConsumerBlocks][kScores];
    using Scores = float[kScores];
    using Fragments = uint32_t[4][4];  // of four products
    static constexpr int kLatentBlocks = C::kDimLatent / 64;
    static constexpr int kBlockVectors = C::kBlockBytes / 16;
    template <typename T>
    using Product = WgmmaFromRegisters<C::kRows, T, Major::kK>;

    ConsumerThread<C>& t;
    ProductMemory<C>& memory;

    // Tiles are numbered across all work tiles of the CTA.
    static __device__ int stage_of(uint32_t tile) { return tile % C::kStages; }
    __device__ unsigned char* keys_of(uint32_t tile) const { return t.rings.kv[stage_of(tile)]; }
    __device__ void wait_for_segment(uint32_t tile, int segment) {
        t.rings.kv_full[stage_of(tile)][C::full_barrier_of(segment)].wait(tile / C::kStages % 2);
    }

    // `remaining`: keys of the work tile from the start of a tile on. Returns the same, counted from this thread's
    // first token of the tile.
    __device__ int remaining_at_token(int remaining) const { return remaining - t.warp * 16 - t.lane / 4; }

    // Zeroes the values of this warp's tokens of a tile from `valid` on: what was not loaded may be NaN. Scores of
    // these tokens, which another warp may still compute, are masked. The fence after the softmax also orders this
    // before the next copy to the stage.
    __device__ void zero_values(uint32_t tile, int valid) const {
        __syncwarp();
#pragma unroll 1
        for (int token = max(valid, t.warp * 16); token < (t.warp + 1) * 16; ++token)
#pragma unroll 1
            for (int vector = pinned(t.lane); vector < kLatentBlocks * 4; vector += 32)
                *reinterpret_cast<uint4*>(
                    keys_of(tile) + token / 8 * C::kTokenGroupBytes + vector / kBlockVectors * C::kSegmentBytes +
                    vector_offset<C::kBlockBytes>(token % 8, vector % kBlockVectors)) = make_uint4(0, 0, 0, 0);
    }

    // Loads a thread's share of a query row, which is then converted in place: the 16 B at `from` in every column
    // block. 8 neighbouring threads share a row. Returns the factor that brings the row's largest magnitude into
    // [2^kExponent, 2^(kExponent + 1)). `scale` turns products with unconverted keys into scores in log2.
    template <int kExponent>
    __device__ float load_query_row(uint4 (&words)[C::kQueryColumnBlocks], const unsigned char* from, int row,
                                    float scale) const {
        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < C::kQueryColumnBlocks; ++i) {
            words[i] = *reinterpret_cast<const uint4*>(from + i * C::kQueryColumnBlockBytes);
            largest = largest_magnitudes(largest, words[i]);
        }
        const float most = max_over_lanes<8>(largest_of<Element>(largest));
        const QueryScale factor = QueryScale::of<kExponent>(most);
        // Never 0: masked scores, -INFINITY, are multiplied by it, too. NaN if a query is infinite, as no e4m3 is.
        if (threadIdx.x % 8 == 0)
            memory.score_scales[row] = most < INFINITY ? fmaxf(scale * factor.inverse, 0x1p-126f) : NAN;
        return factor.factor;
    }

    // O^T += V^T P^T over a tile, and releases it. `scale(fragments, block)` scales the values of this consumer's
    // `block`-th m64 block.
    template <typename Scale>
    __device__ void multiply_values(Blocks& o, uint32_t tile, Scale scale) {
        const uint64_t p_descriptor =
            uniform(make_descriptor(memory.weights[tile % C::kWeightTiles], 128, C::kTile / 8 * 128, Swizzle::kNone));
        Fragments fragments[2];
        uint32_t words[2][4];
        load_values(words, tile, 0);
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b) pin_registers(o[b]);
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b) {
            Fragments& values = fragments[b % 2];
            if (b >= 2) wgmma_wait<1>();  // `values` have been multiplied
            widen_values(values[0], values[1], words[0]);
            widen_values(values[2], values[3], words[1]);
            scale(values, b);
            if (b + 1 < kConsumerBlocks)
                load_values(words, tile, b + 1);
            else
                release(tile);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < 4; ++step)
                Product<__half>::mma(o[b], values[step], advance(p_descriptor, step * 256), true);
            wgmma_commit();
        }
        wgmma_wait<0>();
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b) pin_registers(o[b]);
        t.profiler.mark(Event::kValues);
    }

  private:
    // Loads what a lane needs of this consumer's `block`-th m64 block: for each 32 tokens, four matrices of 8 x 8 pairs
    // of columns.
    __device__ void load_values(uint32_t (&words)[2][4], uint32_t tile, int block) const {
        const uint32_t first = smem_address(keys_of(tile)) +
                               t.consumer * (kConsumerBlocks * 64 / C::kBlockColumns * C::kSegmentBytes) +
                               t.lane / 8 * C::kTokenGroupBytes + vector_offset<C::kBlockBytes>(t.lane % 8, t.warp);
        const uint32_t values = vector_further_on<C>(first, block * 64);
        load_matrices_transposed(words[0], values);
        load_matrices_transposed(words[1], values + 4 * C::kTokenGroupBytes);
    }

    // By a warp that has read a tile for the last time.
    __device__ void release(uint32_t tile) {
        __syncwarp();  // lane 0 arrives for all lanes
        if (t.lane == 0) t.release_keys(stage_of(tile), 0);
    }
};

}  // namespace mla::hopper
