// Parameters that all decode kernels have in common. Strides count elements; the last dimension of every tensor is
// contiguous.
#pragma once
#include "work.cuh"

namespace mla {

// A positive divisor that is known when a kernel is launched. Division becomes a multiplication: see Granlund and
// Montgomery, "Division by invariant integers using multiplication" (1994), for dividends below 2^31.
class Divisor {
    int value_ = 1, shift_ = 31;
    uint32_t multiplier_ = 1u << 31;

  public:
    Divisor() = default;
    explicit Divisor(int value) : value_(value) {
        int bits = 0;
        while (int64_t{1} << bits < value) ++bits;
        shift_ = 31 + bits;
        multiplier_ = static_cast<uint32_t>((uint64_t{1} << shift_) / value + 1);
    }
    __host__ __device__ operator int() const { return value_; }
    friend __device__ __forceinline__ int operator/(int dividend, const Divisor& divisor) {
        const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(dividend)) * divisor.multiplier_;
        return static_cast<int>(product >> divisor.shift_);
    }
    __device__ __forceinline__ void split(int dividend, int& quotient, int& remainder) const {
        quotient = dividend / *this;
        remainder = dividend - quotient * value_;
    }
};

// Index i of int64 or int32 indices.
__device__ __forceinline__ int64_t index_at(const void* indices, bool are_64, int i) {
    return are_64 ? static_cast<const int64_t*>(indices)[i] : static_cast<const int*>(indices)[i];
}

// Where the keys of requests lie: a block table, or a token table (`of_tokens`).
struct PageTable {
    const int* entries;  // [rows, width]: the pages of a request, or the slots of its tokens
    int64_t stride;      // from row to row
    const void* rows;    // [batch] row of each request, int32 or int64 (`rows_64`); null: row = request
    bool rows_64;
    bool of_tokens;
    Divisor page_size;

    __device__ const int* row_of(int request) const {
        int64_t row = request;
        if (rows) row = index_at(rows, rows_64, request);
        return entries + row * stride;
    }

    // The page of a token, and its row of that page.
    __device__ void locate(const int* row_of_table, int token, int& page, int& row) const {
        if (of_tokens) {
            page_size.split(row_of_table[token], page, row);
        } else {
            int index;
            page_size.split(token, index, row);
            page = row_of_table[index];
        }
    }
};

// Words from one CTA's flag to the next. Each flag has a cache line of its own: when all CTAs watch all flags, flags
// that share a line are seen 1 us later (H200).
constexpr int kFlagStride = 32;

struct DecodeParams {
    const void* q_nope;  // [tokens, heads, d_c]
    int64_t q_nope_token_stride, q_nope_head_stride;
    const void* q_rope;  // [tokens, heads, d_rope]
    int64_t q_rope_token_stride, q_rope_head_stride;

    const void* cache;  // [pages, page_size, d_c + d_rope]
    int64_t page_stride, row_stride;
    PageTable table;

    Lengths lengths;
    Divisor num_heads;
    bool causal;
    float scale_log2;  // softmax scale * log2(e)

    void* out;  // [tokens, heads, d_c]
    int64_t out_token_stride, out_head_stride;
    float* lse;  // [tokens, heads], natural log
    int64_t lse_token_stride, lse_head_stride;

    const CtaPlan* plans;   // [most_ctas]; a launch of fewer CTAs uses the first ones, of flags likewise
    float4* split_buffers;  // [2 * most_ctas], see common/combine.cuh
    uint32_t* flags;        // [most_ctas][kFlagStride]; those of a launch are equal between launches

    uint64_t* profile;  // see sm90/profile.cuh; used by profiling variants only
};

}  // namespace mla
