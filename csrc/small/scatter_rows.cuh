// Copies rows that are in a cache's format already to their slots. For slots outside of the cache nothing is written.
//
// grid   one CTA for each row
// block  each thread copies units of 16 bytes, or single bytes of rows that are not aligned to 16
#pragma once
#include "numbers/arithmetic.cuh"
#include "schedule/params.cuh"

namespace mla {

constexpr int kScatterThreads = 128;

struct ScatterParams {
    const unsigned char* rows;  // [tokens, row_bytes]
    int64_t stride;             // bytes from one to the next
    int row_bytes;
    unsigned char* cache;                       // [pages, page_size, row_bytes]
    int64_t cache_page_bytes, cache_row_bytes;  // from one to the next
    Divisor page_size;
    int64_t num_slots;
    const void* slots;  // [tokens] page * page_size + offset, int32 or int64 (`slots_64`)
    bool slots_64;
};

template <typename Unit>
__global__ void __launch_bounds__(kScatterThreads) scatter_rows_kernel(const __grid_constant__ ScatterParams p) {
    const int64_t slot = index_at(p.slots, p.slots_64, blockIdx.x);
    if (static_cast<uint64_t>(slot) >= static_cast<uint64_t>(p.num_slots)) return;
    int page, row;
    p.page_size.split(static_cast<int>(slot), page, row);
    const auto* from = reinterpret_cast<const Unit*>(p.rows + blockIdx.x * p.stride);
    auto* to = reinterpret_cast<Unit*>(p.cache + page * p.cache_page_bytes + row * p.cache_row_bytes);
    for (int i = threadIdx.x; i < p.row_bytes / static_cast<int>(sizeof(Unit)); i += kScatterThreads) to[i] = from[i];
}

}  // namespace mla
