// Which key loader a kernel has.
#pragma once
#include <type_traits>

#include "keys.cuh"
#include "token_keys.cuh"

namespace mla::hopper {

template <typename C, typename S>
using KeyLoaderOf = std::conditional_t<C::kTma, TmaKeyLoader<C, S>,
                                       std::conditional_t<C::kByTokens, TokenKeyLoader<C, S>, GatherKeyLoader<C, S>>>;

template <typename C, typename S>
__device__ __forceinline__ void run_loader(const LoaderThread<C, S>& thread, const BoxOf<C>& box) {
    if (!C::kByTokens && threadIdx.x / 32 >= thread.kKeyWarps)
        QueryLoader<C, S>(thread).run();
    else if constexpr (C::kTma)
        KeyLoaderOf<C, S>(thread, box).run();
    else
        KeyLoaderOf<C, S>(thread).run();
}

}  // namespace mla::hopper
