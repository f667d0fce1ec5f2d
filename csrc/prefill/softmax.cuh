// The softmax of a tile's scores in the accumulators of the warps that multiplied them.
//
// Exponentials use a maximum that may be stale by up to 8 (log2): P then stays below 2^8, so fp32 sums keep their
// relative precision, and so does P, in fp16 from 2^-14 on. So warps with the same rows exchange maxima only when a
// score exceeds the bound, which a barrier tells all of them.
#pragma once
#include "config.cuh"
#include "numbers/arithmetic.cuh"
#include "ptx/named_barrier.cuh"

namespace mla::prefill {

template <typename C>
struct PrefillSoftmax {
    using Element = typename C::Element;
    using Scores = float[C::kRowBlocks][C::kTokens / 8][4];

    PrefillMemory<C>& smem;
    const PrefillParams& p;
    float sum[C::kRowBlocks][2];  // of P, over this thread's tokens alone until `finish`

    __device__ PrefillSoftmax(const PrefillParams& p, PrefillMemory<C>& smem) : smem(smem), p(p) {
        for_each_row<C>([&](int m, int h) { sum[m][h] = 0.f; });
        if constexpr (C::kStoresSums) save_sums();
    }

    __device__ static uint32_t thread() { return thread_index<C>(); }
    __device__ static int row_group(uint32_t tid) { return tid / (C::kColumnGroups * 32); }
    __device__ static int column_group(uint32_t tid) { return tid / 32 % C::kColumnGroups; }
    // A thread's first row of the CTA's rows, and its first token of the tile.
    __device__ static int first_row(uint32_t tid) { return row_group(tid) * C::kGroupRows + tid % 32 / 4; }
    __device__ static int first_token(uint32_t tid) { return column_group(tid) * C::kTokens + tid % 4 * 2; }

    // Masks the scores of a tile, whose first token is `token`, in rows that do not see them.
    __device__ void mask(int token, Scores& s) const {
        const uint32_t tid = thread();
        const int row = first_row(tid), begin = token + first_token(tid);
        for_each_row<C>([&](int m, int h) {
            const int limit = smem.block.key_limit(row + m * 16 + h * 8) - begin;
#pragma unroll
            for (int octet = 0; octet < C::kTokens / 8; ++octet)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    if (octet * 8 + i >= limit) s[m][octet][h * 2 + i] = -INFINITY;
        });
    }

    __device__ void synchronize_row_group() const {
        if constexpr (C::kColumnGroups == 1)
            __syncwarp();
        else
            barrier(false);
    }

    // Replaces scores by P. If a maximum had to be refreshed, `rescale(m, h, factor)` is called for all rows.
    template <typename Rescale>
    __device__ void exponentiate(Scores& s, Rescale rescale) {
        float tile_top[C::kRowBlocks][2];
        const float* const top = smem.top + first_row(thread());
        bool exceeds = false;
        for_each_row<C>([&](int m, int h) {
            tile_top[m][h] = s[m][0][h * 2];
#pragma unroll
            for (int i = 1; i < C::kTokens / 4; ++i) tile_top[m][h] = fmaxf(tile_top[m][h], s[m][i / 2][h * 2 + i % 2]);
            exceeds |= (tile_top[m][h] - top[m * 16 + h * 8]) * p.scale_log2 > kStaleBound;
        });
        if (any_of_row_group(exceeds))
            refresh(tile_top, rescale);
        else if constexpr (C::kStoresSums)
            restore_sums();
        const float* const new_top = smem.top + first_row(thread());
        for_each_row<C>([&](int m, int h) {
            const float offset = finite(new_top[m * 16 + h * 8]) * p.scale_log2;
#pragma unroll
            for (int i = 0; i < C::kTokens / 4; ++i) {
                float& score = s[m][i / 2][h * 2 + i % 2];
                score = exp2_approx(score * p.scale_log2 - offset);
                sum[m][h] += score;
            }
        });
        if constexpr (C::kStoresSums) save_sums();
    }

    // Writes P to shared memory, for the other warps of the row group.
    __device__ void store(const Scores& s, unsigned char* probabilities) const {
        const uint32_t tid = thread();
        const int row = first_row(tid), token = first_token(tid);
        for_each_row<C>([&](int m, int h) {
#pragma unroll
            for (int octet = 0; octet < C::kTokens / 8; ++octet) {
                const int vector = token / 8 + octet;
                unsigned char* to = probabilities + vector / 8 * C::kQueryBlockBytes +
                                    swizzled_offset(row + m * 16 + h * 8, vector % 8) + tid % 4 * 4;
                *reinterpret_cast<uint32_t*>(to) = pack<Element>(s[m][octet][h * 2], s[m][octet][h * 2 + 1]);
            }
        });
    }

    // After the last tile: adds up the sums of all tokens, in the same order in all lanes of a row.
    __device__ void finish() {
        if constexpr (C::kStoresSums) restore_sums();
        add_over_lanes();
        if constexpr (C::kColumnGroups > 1) over_column_groups(sum, [](float a, float b) { return a + b; });
    }

    __device__ float log_sum_exp(int row, float sum) const {
        return sum == 0.f ? -INFINITY : (smem.top[row] * p.scale_log2 + log2_approx(sum)) * static_cast<float>(kLnOf2);
    }

  private:
    __device__ void add_over_lanes() {
        for_each_row<C>([&](int m, int h) { sum[m][h] = sum_over_lanes<4>(sum[m][h]); });
    }

    // Between tiles, one lane of a row has its warp's sum; with a single column group, each lane keeps its own.
    static constexpr bool kLeaderKeeps = C::kColumnGroups > 1;
    __device__ float* saved_sums(uint32_t tid) const {
        return smem.sums +
               (kLeaderKeeps ? column_group(tid) * C::kRows + first_row(tid) : first_row(tid) * 4 + tid % 4);
    }
    static constexpr int kSumStride = kLeaderKeeps ? 1 : 4;  // from row to row
    __device__ void save_sums() {
        if constexpr (kLeaderKeeps) add_over_lanes();
        const uint32_t tid = thread();
        for_each_row<C>([&](int m, int h) {
            if (!kLeaderKeeps || tid % 4 == 0) saved_sums(tid)[(m * 16 + h * 8) * kSumStride] = sum[m][h];
        });
    }
    __device__ void restore_sums() {
        const uint32_t tid = thread();
        for_each_row<C>([&](int m, int h) {
            sum[m][h] = !kLeaderKeeps || tid % 4 == 0 ? saved_sums(tid)[(m * 16 + h * 8) * kSumStride] : 0.f;
        });
    }

    template <int kGroup = 0>
    __device__ bool barrier(bool value) const {
        if constexpr (kGroup + 1 < C::kRowGroups)
            if (row_group(threadIdx.x) != kGroup) return barrier<kGroup + 1>(value);
        return named_barrier_any<kGroup + 1, C::kColumnGroups * 32>(value);
    }
    __device__ bool any_of_row_group(bool value) const {
        if constexpr (C::kColumnGroups == 1)
            return __any_sync(~0u, value);
        else
            return barrier(value);
    }

    template <typename Rescale>
    __device__ void refresh(float (&tile_top)[C::kRowBlocks][2], Rescale rescale) {
        const uint32_t tid = thread();
        float* const top = smem.top + first_row(tid);
        for_each_row<C>(
            [&](int m, int h) { tile_top[m][h] = max_over_lanes<4>(fmaxf(tile_top[m][h], top[m * 16 + h * 8])); });
        if constexpr (C::kColumnGroups > 1) over_column_groups(tile_top, [](float a, float b) { return fmaxf(a, b); });
        if constexpr (C::kStoresSums) restore_sums();
        const bool leads = tid % 4 == 0 && column_group(tid) == 0;
        for_each_row<C>([&](int m, int h) {
            const float factor = exp2_approx((top[m * 16 + h * 8] - finite(tile_top[m][h])) * p.scale_log2);
            sum[m][h] *= factor;
            rescale(m, h, factor);
        });
        synchronize_row_group();  // all of its threads have read the old maxima
        for_each_row<C>([&](int m, int h) {
            if (leads) top[m * 16 + h * 8] = tile_top[m][h];
        });
        synchronize_row_group();
    }

    // Reduces a value of each row over the warps with this row.
    template <typename Operation>
    __device__ void over_column_groups(float (&values)[C::kRowBlocks][2], Operation operation) const {
        const uint32_t tid = thread();
        float* const own = smem.exchange + first_row(tid);
        for_each_row<C>([&](int m, int h) {
            if (tid % 4 == 0) own[column_group(tid) * C::kRows + m * 16 + h * 8] = values[m][h];
        });
        synchronize_row_group();
        for_each_row<C>([&](int m, int h) {
            values[m][h] = own[m * 16 + h * 8];
#pragma unroll
            for (int group = 1; group < C::kColumnGroups; ++group)
                values[m][h] = operation(values[m][h], own[group * C::kRows + m * 16 + h * 8]);
        });
    }
};

}  // namespace mla::prefill
