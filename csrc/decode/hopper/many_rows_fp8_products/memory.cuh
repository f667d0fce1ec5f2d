// What the scorer and the consumers of many_rows_fp8_products share.
#pragma once
#ifndef OVERLAP
#define OVERLAP 1
#endif
#ifndef VREGS
#define LREGS 32
#define VREGS 184
#endif
#include "decode/hopper/transposed_output.cuh"

namespace mla::hopper {

// P^T of tiles, from the scorer to the consumers. Tiles take turns, across all work tiles of the CTA.
template <typename C>
struct SharedWeights {
    // [kRows / 8][kTile / 16] core matrices of 8 rows of 16 B, e4m3: tokens 0, 8, 1, 9 and so on of 16.
    alignas(128) unsigned char tiles[C::kWeightBuffers][C::kWeightBytes];
    alignas(8) float factors[C::kWeightBuffers][C::kRows];  // by which older sums are multiplied
    bool rescales[C::kWeightBuffers];                       // whether they are
    Barrier full[C::kWeightBuffers], free[C::kWeightBuffers];
};

// The end of a work tile, from the scorer to the consumers; the rows' maxima and sums are in OutputMemory.
struct SharedEnd {
    float cache_scale;
    Barrier full, free;
};

// What consumers keep in shared memory while they compute a work tile, as registers are short.
struct ConsumerProgress {
    WorkTile work;
    int keys;             // of the work tile
    Place next;           // where the next work tile begins
    int work_index;       // of this work tile
    uint32_t first_tile;  // number of its first tile
};

// What the scorer's threads share with each other.
template <typename C>
struct ScorerMemory {
    // Of two neighbouring rows: what P is relative to, in log2, and the factors that bring products to log2.
    struct alignas(16) RowPair {
        float2 references, scales;
    };
    RowPair pairs[C::kRows / 2];
    alignas(8) float limits[C::kRows];  // the largest product of which P has a place in e4m3
    alignas(8) int hidden[C::kRows];        // how many of the work tile's last keys a row does not see
    // While a work tile is computed, as registers are short: the work tile, and where the next one begins.
    WorkTile work;
    Place next;

    __device__ float& reference(int row) { return reinterpret_cast<float*>(&pairs[row / 2].references)[row % 2]; }
    __device__ float& scale(int row) { return reinterpret_cast<float*>(&pairs[row / 2].scales)[row % 2]; }
};

template <typename C>
struct ManyRowsFp8ProductsMemory {
    RingMemory<C> rings;
    SharedWeights<C> weights;
    ScorerMemory<C> scorer;
    SharedEnd end;
    ConsumerProgress progress;
    OutputMemory<C> output;
    CtaRange range;
    PairMemory pair;
};

}  // namespace mla::hopper
