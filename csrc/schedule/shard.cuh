// Which tokens of a request this GPU has in its cache, where several GPUs divide the requests among them.
#pragma once
#include <cstdint>

namespace mla {

// A positive divisor that is known when a kernel is launched. Division becomes a multiplication: see Granlund and
// Montgomery, "Division by invariant integers using multiplication" (1994), for dividends below 2^31; of -1, taken
// as 2^32 - 1, the quotient may be off by one.
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

// Tokens are dealt out in runs of `interleave`: of `size` ranks, rank r has the runs r, r + size, r + 2 * size, ... A
// cache that has all tokens is a shard of one.
struct Shard {
    Divisor period;  // tokens of one run of each rank: size * interleave
    int interleave;
    int first_token;  // rank * interleave

    // How many of a request's first `tokens` tokens are here.
    __device__ __forceinline__ int keys_of(int tokens) const {
        int periods, rest;
        period.split(max(tokens, 0), periods, rest);
        return periods * interleave + min(max(rest - first_token, 0), interleave);
    }
};

}  // namespace mla
