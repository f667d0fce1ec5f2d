// The append kernel and the product of queries with W_UK in one launch: neither depends on the other.
//
// grid   the product's CTAs, then those of the append
#pragma once
#include "append.cuh"
#include "head_product.cuh"

namespace mla {

template <typename Append, typename Product>
__global__ void __launch_bounds__(kAppendThreads)
    append_and_multiply_kernel(const __grid_constant__ AppendParams append, const __grid_constant__ HeadProductParams p,
                               int product_ctas) {
    static_assert(Product::kThreads == kAppendThreads);
    extern __shared__ __align__(128) unsigned char bytes[];
    const int cta = blockIdx.x;
    if (cta < product_ctas)
        multiply_head<Product>(p, cta, *reinterpret_cast<typename Product::SharedMemory*>(bytes));
    else
        append_vectors<Append>(append, cta - product_ctas);
}

}  // namespace mla
