// Entry point of the kernel that scatters rows.
#pragma once
#include <algorithm>
#include <climits>

#include "launch.cuh"
#include "small/scatter_rows.cuh"
#include "tensors.cuh"

namespace mla::ffi {

inline int64_t bytes_between(const TensorView& tensor, int dimension) {
    return tensor.size(dimension) > 1 ? tensor.stride(dimension) * tensor.dtype().bits / 8 : 0;
}

// rows [tokens, width], cache [pages, page_size, width] of one dtype, whose last dimension is contiguous; slots
// int32/int64 [tokens], contiguous.
inline void scatter_rows(TensorView rows, TensorView cache, TensorView slots) {
    ScatterParams p = {};
    p.rows = data<const unsigned char>(rows), p.stride = bytes_between(rows, 0);
    p.row_bytes = static_cast<int>(rows.size(1) * rows.dtype().bits / 8);
    p.cache = data<unsigned char>(cache);
    p.cache_page_bytes = bytes_between(cache, 0), p.cache_row_bytes = bytes_between(cache, 1);
    p.page_size = Divisor(static_cast<int>(cache.size(1)));
    p.num_slots = std::min(cache.size(0) * cache.size(1), int64_t{INT_MAX});
    p.slots = data<const void>(slots);
    p.slots_64 = slots.dtype().bits == 64;
    const DeviceScope device(rows.device().device_id);
    const Launch how = {stream_of(rows), static_cast<int>(rows.size(0)), kScatterThreads};
    if (how.grid == 0) return;
    const auto places = reinterpret_cast<uintptr_t>(p.rows) | reinterpret_cast<uintptr_t>(p.cache);
    const bool aligned = (places | p.stride | p.row_bytes | p.cache_page_bytes | p.cache_row_bytes) % 16 == 0;
    launch<false>(aligned ? scatter_rows_kernel<uint4> : scatter_rows_kernel<unsigned char>, how, p);
}

}  // namespace mla::ffi
