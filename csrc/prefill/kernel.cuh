// Attention over ragged requests (prefill) by mma.sync, for sm_80 and all newer GPUs. Keys and values may have
// different head dimensions, up to 1024.
//
//   S[rows x tokens]  = Q * K^T   each warp its own tokens of the tile
//   O[rows x columns] += P * V    each warp its own columns; P of the other warps comes through shared memory
//
// grid   a CTA per block of kRows query rows of a request and a head; see QueryBlock for their order
// block  kRowGroups * kColumnGroups warps, all alike. O stays in registers; Q, where it fits, in shared memory
//
// Besides mma.sync, the reads of fragments limit the kernel: shared memory delivers 128 bytes per cycle. Their cost in
// cycles of a multiprocessor per mma (of 2,048 products), which itself takes 2 on an A100 and about 1.6 on Hopper:
//
//   a warp's scores, 32 rows x 32 tokens    16 columns of Q and of K are 1 KB each, for 8 products           2
//                    32 rows x 64 tokens    1 KB and 2 KB for 16                                             1.5
//   a warp's output, 32 rows x 128 columns  16 tokens of P and of V are 1 KB and 4 KB, for 32 products       1.25
//                    32 rows x 128 columns, P in registers (a single column group)                           1
//   cp.async of K and V at 64 query rows    16 tokens x 16 columns are 512 bytes, for 8 products             0.5
//
// Registers: O of 64 rows x 512 columns is half of the register file. So a CTA has 128 rows up to 256 columns, 64 up to
// 768 and 48 up to 1024. At 64 rows, each byte that comes from the L2 cache serves 64 operations.
//
// What each warp does for a tile of kTile tokens. A slice is some columns of the tile's keys, or some tokens of its
// values, and fills a stage of the ring.
//
//   for each slice of keys    wait for its copies; S += Q * K^T, and, after the first products, copy a later slice
//   softmax (softmax.cuh), P to registers, or to shared memory if kColumnGroups > 1
//   for each slice of values  wait for its copies; O += P * V, and, after the first products, copy a later slice
//
// A slice costs some 400 cycles besides its products, so slices are large, even if only two stages then fit. All that a
// copy needs is known at compile time or in registers, so it does not delay the products after it.
//
// shared memory (PrefillMemory): all of it in column blocks [row][128 B], 16-byte vectors swizzled (swizzled_offset)
//   ring     kStages slices
//   queries  [column block][kRows], absent if they are streamed
//   probabilities  P, [64 tokens][kRows], absent if there is one column group. It overwrites queries in the ring if
//            these are streamed and slices are large enough
//   exchange maxima and sums
//
// invariants
//   * keys outside [0, kv_len) are not read: their bytes are zeros, their scores are masked
//   * a warp skips tiles that none of its rows sees
//   * a fixed order everywhere: the same inputs give the same bits, whatever else is in the batch
#pragma once
#include "loader.cuh"
#include "softmax.cuh"

namespace mla::prefill {

template <typename C>
struct Prefill {
    using Element = typename C::Element;
    using Softmax = PrefillSoftmax<C>;
    using Scores = typename Softmax::Scores;
    // P of a tile, as A fragments; those of one step of 16 tokens if P comes from shared memory.
    static constexpr bool kOwnsProbabilities = C::kColumnGroups == 1;
    static constexpr int kAhead = SliceLoader<C>::kAhead;
    using Probabilities = uint32_t[kOwnsProbabilities ? C::kTile / 16 : 1][C::kRowBlocks][4];

    const PrefillParams& p;
    PrefillMemory<C>& smem;
    SliceLoader<C> loader;
    Softmax softmax;
    float o[C::kRowBlocks][C::kFragments][2][4];

    __device__ Prefill(const PrefillParams& p, PrefillMemory<C>& smem)
        : p(p), smem(smem), loader(p, smem), softmax(p, smem) {
#pragma unroll
        for (int m = 0; m < C::kRowBlocks; ++m)
#pragma unroll
            for (int i = 0; i < C::kFragments; ++i)
#pragma unroll
                for (int k = 0; k < 8; ++k) o[m][i][k / 4][k % 4] = 0.f;
    }

    // Offsets of this lane's row of the first matrices that it loads: of queries or P, of keys, of values.
    __device__ static uint32_t row_offset() {
        const uint32_t tid = Softmax::thread();
        return swizzled_offset(Softmax::row_group(tid) * C::kGroupRows + tid % 16, tid / 16 % 2);
    }
    __device__ static uint32_t key_offset() {
        const uint32_t tid = Softmax::thread();
        return swizzled_offset(Softmax::column_group(tid) * C::kTokens + tid / 16 % 2 * 8 + tid % 8, tid / 8 % 2);
    }
    __device__ static uint32_t value_offset() {
        const uint32_t tid = Softmax::thread(), fragment = Softmax::column_group(tid);
        return fragment / 4 * C::kValueBlockBytes + swizzled_offset(tid % 16, fragment % 4 * 2 + tid / 16 % 2);
    }

    __device__ void run() {
        unrolled<0, kAhead>([&](auto slice) { loader.template copy<slice>(0); });
#pragma unroll 1
        for (int token = 0; token < loader.block.key_end; token += C::kTile) {
            const bool sees = this->sees(token);
            Scores s;
            multiply_keys(token, sees, s);
            Probabilities probabilities;
            if (sees) {
                if (token + C::kTile > key_limit(0)) softmax.mask(token, s);
                softmax.exponentiate(s, [&](int m, int h, float factor) { rescale(m, h, factor); });
                keep_probabilities(token, s, probabilities);
            }
            multiply_values(token, this->sees(token), probabilities);
        }
        if (C::kMbarriers) cp_async_commit();  // copies that mbarriers track are in no group yet
        cp_async_wait<0>();                    // for copies past the last tile
        softmax.finish();
        store();
    }

  private:
    // Where the keys end that a row of the row group sees.
    __device__ int key_limit(int row) const {
        return smem.block.key_limit(Softmax::row_group(Softmax::thread()) * C::kGroupRows + row);
    }

    // Whether a row of the row group sees a key of the tile.
    __device__ bool sees(int token) const { return token < key_limit(C::kGroupRows - 1); }

    __device__ void multiply_keys(int token, bool sees, Scores& s) {
#pragma unroll
        for (int m = 0; m < C::kRowBlocks; ++m)
#pragma unroll
            for (int octet = 0; octet < C::kTokens / 8; ++octet)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[m][octet][i] = 0.f;
        // With each of the first kFirst slices, a later one of the keys is copied.
        constexpr int kFirst = C::kKeySlices > kAhead ? C::kKeySlices - kAhead : 0;
#pragma unroll 1
        for (int slice = 0; slice < kFirst; ++slice)
            multiply_key_slice<C::kKeySteps>(token, slice, sees, s, [&] { loader.copy_keys(token, slice + kAhead); });
        unrolled<kFirst, C::kKeySlices>([&](auto slice) {
            constexpr bool kTail = C::kTailSteps > 0 && slice == C::kKeySlices - 1;
            multiply_key_slice<kTail ? C::kTailSteps : C::kKeySteps>(
                token, slice, sees, s, [&] { loader.template copy<slice + kAhead>(token); });
        });
    }

    template <int kSteps, typename Copy>
    __device__ __forceinline__ void multiply_key_slice(int token, int slice, bool sees, Scores& s, Copy copy) {
        const uint32_t keys = loader.wait(token, slice);
        if (C::kCopiesFirst || !sees) copy();
        if (sees)
            add_scores<kSteps>(smem_address(smem.queries) + slice * (C::kKeyBlocks * C::kQueryBlockBytes), keys, s,
                               copy);
        loader.release(token, slice);
    }

    // S += Q * K^T over kSteps * 16 columns of a slice.
    template <int kSteps, typename Copy>
    __device__ __forceinline__ void add_scores(uint32_t queries, uint32_t slice, Scores& s, Copy copy) {
        if constexpr (C::kStreamsQueries) queries = slice + C::kKeyBytes;
        queries += row_offset();
        const uint32_t keys = slice + key_offset();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t a[C::kRowBlocks][4];
#pragma unroll
            for (int m = 0; m < C::kRowBlocks; ++m)
                load_matrices(a[m], (queries + step / 4 * C::kQueryBlockBytes + m * 2048) ^ step % 4 * 32);
#pragma unroll
            for (int octet = 0; octet < C::kTokens / 8; octet += 2) {
                uint32_t b[4];
                load_matrices(b, (keys + step / 4 * C::kKeyBlockBytes + octet * 1024) ^ step % 4 * 32);
#pragma unroll
                for (int m = 0; m < C::kRowBlocks; ++m) {
                    mma<Element>(s[m][octet], a[m], b[0], b[1]);
                    mma<Element>(s[m][octet + 1], a[m], b[2], b[3]);
                }
            }
            if (!C::kCopiesFirst && step == 0) copy();
        }
    }

    __device__ void rescale(int m, int h, float factor) {
#pragma unroll
        for (int i = 0; i < C::kFragments; ++i)
#pragma unroll
            for (int k = 0; k < 4; ++k) o[m][i][k / 2][h * 2 + k % 2] *= factor;
    }

    // The accumulators of two octets of tokens are, element by element, an A fragment of 16 tokens.
    __device__ void keep_probabilities(int token, const Scores& s, Probabilities& probabilities) const {
        if constexpr (kOwnsProbabilities) {
#pragma unroll
            for (int step = 0; step < C::kTile / 16; ++step)
#pragma unroll
                for (int m = 0; m < C::kRowBlocks; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float (&quad)[4] = s[m][step * 2 + i / 2];
                        probabilities[step][m][i] = pack<Element>(quad[i % 2 * 2], quad[i % 2 * 2 + 1]);
                    }
        } else {
            softmax.store(s, loader.probabilities(token));
            if (C::kMbarriers) softmax.synchronize_row_group();
        }
    }

    __device__ void multiply_values(int token, bool sees, Probabilities& probabilities) {
        // With each of the first kFirst slices, a later one of the values is copied. kFirst is 0 with P in registers,
        // as these cannot be indexed.
        constexpr int kFirst = kOwnsProbabilities || C::kValueSlices < kAhead ? 0 : C::kValueSlices - kAhead;
#pragma unroll 1
        for (int index = 0; index < kFirst; ++index)
            multiply_value_slice(token, index, sees, probabilities,
                                 [&] { loader.copy_values(token, C::kKeySlices + index + kAhead); });
        unrolled<kFirst, C::kValueSlices>([&](auto index) {
            multiply_value_slice(token, index, sees, probabilities,
                                 [&] { loader.template copy<C::kKeySlices + index + kAhead>(token); });
        });
    }

    // O += P * V over the tokens of a slice; `index` counts the slices of the tile's values.
    template <typename Copy>
    __device__ __forceinline__ void multiply_value_slice(int token, int index, bool sees, Probabilities& probabilities,
                                                         Copy copy) {
        constexpr int kSteps = C::kValueTokens / 16;
        const int slice = C::kKeySlices + index;
        const uint32_t values = loader.wait(token, slice) + value_offset();
        if (C::kCopiesFirst || !sees) copy();
        if (sees) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const int from = kOwnsProbabilities ? index * kSteps + step : 0;
                if constexpr (!kOwnsProbabilities) load_probabilities(token, index * kSteps + step, probabilities[0]);
                add_values(probabilities[from], values + step * 2048, [&] {
                    if (!C::kCopiesFirst && step == 0) copy();
                });
            }
        }
        loader.release(token, slice);
    }

    // Loads P of 16 tokens.
    __device__ void load_probabilities(int token, int step, uint32_t (&a)[C::kRowBlocks][4]) const {
        const uint32_t from = smem_address(loader.probabilities(token)) + step / 4 * C::kQueryBlockBytes + row_offset();
#pragma unroll
        for (int m = 0; m < C::kRowBlocks; ++m) load_matrices(a[m], (from + m * 2048) ^ step % 4 * 32);
    }

    // O += P * V over 16 tokens; `copy` is called after the first products.
    template <typename Copy>
    __device__ __forceinline__ void add_values(const uint32_t (&a)[C::kRowBlocks][4], uint32_t values, Copy copy) {
#pragma unroll
        for (int i = 0; i < C::kFragments; ++i) {
            constexpr int kGroups = C::kColumnGroups;
            uint32_t b[4];
            load_matrices_transposed(b, (values + i * kGroups / 4 * C::kValueBlockBytes) ^ i * kGroups % 4 * 32);
#pragma unroll
            for (int m = 0; m < C::kRowBlocks; ++m) {
                mma<Element>(o[m][i][0], a[m], b[0], b[1]);
                mma<Element>(o[m][i][1], a[m], b[2], b[3]);
            }
            if (i == (C::kFragments > 1)) copy();
        }
    }

    __device__ void store() const {
        const QueryBlock<C>& block = smem.block;
        const uint32_t tid = Softmax::thread();
        const int column_group = Softmax::column_group(tid);
        for_each_row<C>([&](int m, int h) {
            const int row = Softmax::first_row(tid) + m * 16 + h * 8;
            if (row >= block.rows()) return;
            const int token = block.query_begin + block.first_row + row;
            store_row(m, h,
                      static_cast<Element*>(p.out) + wide_product(token, p.out_token_stride) +
                          block.head * p.out_head_stride + column_group * 16 + tid % 4 * 2);
            if (column_group == 0 && tid % 4 == 0)
                p.lse[token * p.lse_token_stride + block.head * p.lse_head_stride] =
                    softmax.log_sum_exp(row, softmax.sum[m][h]);
        });
    }

    // Stores this thread's columns of a row, the first of which goes to `to`.
    __device__ void store_row(int m, int h, Element* to) const {
        const float factor = inverse(softmax.sum[m][h]);
        const int column_group = Softmax::column_group(Softmax::thread());
#pragma unroll
        for (int i = 0; i < C::kFragments * 2; ++i) {
            const int column = i / 2 * C::kColumnGroups * 16 + i % 2 * 8;
            const bool exists =
                C::kDimV == C::kFragments * C::kColumnGroups * 16 || column + column_group * 16 < C::kDimV;
            const float (&quad)[4] = o[m][i / 2][i % 2];
            if (exists)
                *reinterpret_cast<uint32_t*>(to + column) =
                    pack<Element>(quad[h * 2] * factor, quad[h * 2 + 1] * factor);
        }
    }
};

template <typename C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas) prefill_kernel(const __grid_constant__ PrefillParams p) {
    extern __shared__ __align__(128) unsigned char bytes[];
    auto& smem = *reinterpret_cast<PrefillMemory<C>*>(bytes);
    if (threadIdx.x == 0) smem.block.find(p, blockIdx.x);
    if (threadIdx.x < C::kRows) smem.top[threadIdx.x] = -INFINITY;
    if (C::kMbarriers && threadIdx.x < C::kStages) {
        smem.full[threadIdx.x].init(C::kThreads);
        smem.empty[threadIdx.x].init(C::kThreads / 32);
    }
    __syncthreads();
    if (smem.block.exists()) Prefill<C>(p, smem).run();
}

}  // namespace mla::prefill
