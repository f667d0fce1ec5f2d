// What few_rows asks of the part that knows the format of the keys: keys_16bit.cuh, keys_e4m3.cuh or keys_records.cuh.
#pragma once
#include <concepts>

#include "merge.cuh"
#include "ptx/mma.cuh"

namespace mla::hopper {

template <typename Keys, typename C>
concept FewRowsKeys = requires(Keys keys, float (&s)[C::kRows / 2], float (&o)[C::kBlocks][C::kRows / 2],
                               const PipelineState<C::kStages>& ring, unsigned char* kv, float (&e)[4]) {
    // Shared memory: `weights` [consumer][kWeightBuffers][kWeightBytes] are P^T of a tile. MergeExchange takes the
    // place of Memory at the end of a work tile, but not that of Scales.
    typename Keys::Scales;
    requires sizeof(Keys::Memory::weights) == 2 * C::kWeightBuffers* C::kWeightBytes;
    // The scale of the whole cache. Called before the queries of a work tile arrive, since reading it takes as long.
    { keys.cache_scale() } -> std::same_as<float>;
    // Called by both consumers when queries have arrived: prepares those of a buffer.
    keys.prepare_queries(0, 0.f);
    // S^T = K Q^T over the tile of a stage, in log2, as its keys arrive.
    keys.scores(s, ring, 0);
    // Called when the scores are known; the number says how many of the tile's tokens exist.
    keys.scores_are_known(kv, 0);
    // Zeroes the values of tokens from a number on: what was not loaded may be NaN.
    keys.zero_values(kv, 0);
    // `store_weights` stores 8 rows of P^T of a warp's 16 tokens; a thread has two tokens, 8 apart, of two rows. All
    // threads then call `publish_weights`, before the barrier after which P^T is multiplied.
    keys.store_weights(kv, 0, e);
    keys.publish_weights();
    // O^T += V^T P^T over a tile.
    keys.accumulate(o, kv, kv);
};

}  // namespace mla::hopper
