// What many_rows_fp8 asks of the part that knows the format of the keys: keys_e4m3.cuh, keys_e4m3_products.cuh or
// keys_records.cuh.
#pragma once
#include <concepts>

#include "values.cuh"

namespace mla::hopper {

template <typename Keys, typename C>
concept ManyRowsFp8Keys = requires(Keys keys, float (&s)[C::kRows / 2], float (&o)[C::kBlocks / 2][C::kRows / 2],
                                   uint32_t tile, int remaining) {
    // `Memory` is its shared memory, besides ProductMemory.
    requires std::constructible_from<Keys, ConsumerThread<C>&, ProductMemory<C>&, typename Keys::Memory&>;
    { keys.values } -> std::same_as<ManyRowsFp8Values<C>&>;
    // The scale of the whole cache. Called before the queries of a work tile arrive, since reading it takes as long.
    { keys.cache_scale() } -> std::same_as<float>;
    // Called by both consumers when the queries have arrived: prepares them. Products of these with unscaled keys,
    // times the given factor, are scores.
    keys.prepare_queries(0.f);
    // S^T = K Q^T over a tile, as its keys arrive. `remaining` as in ManyRowsFp8Values::remaining_at_token.
    keys.scores(s, tile, remaining);
    // O^T += V^T P^T over a tile, and releases it. Meanwhile, registers hold the scores of the next tile, unless the
    // tile is this consumer's own.
    keys.template accumulate<true>(o, tile);
    keys.template accumulate<false>(o, tile);
    // How P^T is stored and rounded: see ExactWeights.
    typename Keys::Weights;
    // Whether each token has a unit, a power of two above its scales, by which its scores are multiplied. Then
    // `unit(k)` is that of this thread's k-th token in the last tile with scores, and units are at least
    // 2^(kLeastExponent - 127).
    { Keys::kHasUnits } -> std::convertible_to<bool>;
    requires !Keys::kHasUnits || requires {
        { keys.unit(0) } -> std::same_as<float>;
        { Keys::kLeastExponent } -> std::convertible_to<int>;
    };
};

}  // namespace mla::hopper
