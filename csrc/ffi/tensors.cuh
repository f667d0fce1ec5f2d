// From tensors to what kernels read. Shapes and dtypes are checked in Python.
#pragma once
#include <algorithm>
#include <climits>
#include <string>

#include "schedule/params.cuh"
#include "tvm.cuh"

namespace mla::ffi {

template <typename T>
T* data(const TensorView& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}

// The most tokens that a request may have, of all shards, for a row of the table to have an entry for each of them that
// is in this shard. Without a table: any number, as long as sums with it fit in 32 bits.
inline int longest_request(const Optional<TensorView>& table, int64_t page_size, bool token_table, int64_t rank,
                           int64_t shards, int64_t interleave) {
    constexpr int64_t kMost = INT_MAX - kPlanTile;
    int64_t longest = kMost;
    if (table.has_value()) {
        const int64_t width = (*table).size(1), keys = width * page_size;
        longest =
            token_table ? width : keys / interleave * (shards * interleave) + rank * interleave + keys % interleave;
    }
    return static_cast<int>(std::min(longest, kMost));
}

inline Shard shard(int64_t rank, int64_t shards, int64_t interleave) {
    return {Divisor(static_cast<int>(shards * interleave)), static_cast<int>(interleave),
            static_cast<int>(rank * interleave)};
}

// table int32 [rows, width] or None, for a planner that looks nothing up; table_rows int32/int64 [batch] or None; see
// `DecodeBatch` for those of a shard.
inline PageTable page_table(const Optional<TensorView>& table, const Optional<TensorView>& table_rows,
                            int64_t page_size, bool token_table, int64_t rank, int64_t shards) {
    return {table.has_value() ? data<const int>(*table) + (token_table ? rank : 0) : nullptr,
            table.has_value() ? (*table).stride(0) : 0,
            table.has_value() ? (*table).size(0) : 0,
            table_rows.has_value() ? data<const void>(*table_rows) : nullptr,
            table_rows.has_value() && (*table_rows).dtype().bits == 64,
            token_table,
            Divisor(static_cast<int>(page_size)),
            Divisor(static_cast<int>(shards))};
}

// Raises unless all rows of the tensor, whose last dimension is contiguous, begin at multiples of `bytes`.
inline void check_alignment(const char* name, const TensorView& tensor, int64_t bytes) {
    if (tensor.size(tensor.ndim() - 1) == 0) return;  // nothing of it is read
    const int64_t elements = bytes * 8 / tensor.dtype().bits;
    bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % bytes == 0;
    for (int i = 0; i < tensor.ndim() - 1; ++i) aligned &= tensor.size(i) <= 1 || tensor.stride(i) % elements == 0;
    if (aligned) return;
    std::string strides;
    for (int i = 0; i < tensor.ndim() - 1; ++i) strides += (i ? ", " : "") + std::to_string(tensor.stride(i));
    TVM_FFI_THROW(ValueError) << name << " must be aligned to " << bytes << " bytes and its strides multiples of "
                              << elements << " elements, got strides " << strides;
}

}  // namespace mla::ffi
