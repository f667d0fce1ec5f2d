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
    // The scale of the whole cache, read before the queries of a work tile arrive, as it takes as long; and when they
    // have arrived, by both consumers: prepares the queries of a buffer.
    { keys.cache_scale() } -> std::same_as<float>;
    keys.prepare_queries(0, 0.f);
    // S^T = K Q^T over the tile of a stage, in log2, as its keys arrive.
    keys.scores(s, ring, 0);
    // When these are known, of the tile's first tokens, as many as exist.
    keys.scores_are_known(kv, 0);
    // Zeroes the values of tokens from a number on: what was not loaded may be NaN.
    keys.zero_values(kv, 0);
    // Stores a warp's 16 tokens of 8 rows of P^T, of which a thread has two tokens, 8 apart, of two rows; and by all
    // threads, before the barrier after which P^T is multiplied.
    keys.store_weights(kv, 0, e);
    keys.publish_weights();
    // O^T += V^T P^T over a tile.
    keys.accumulate(o, kv, kv);
};

}  // namespace mla::hopper
