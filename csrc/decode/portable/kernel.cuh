// MLA decode by mma.sync, for sm_80 and all newer GPUs without a kernel of their own. The latent columns are divided
// among the warps. So queries and outputs stay in registers, shared memory holds only keys, and each key is read from
// shared memory once for O and once or twice for S, whatever the number of rows.
//
//   S^T[tokens x rows]  = K * Q^T     each warp over its own columns; partial scores are added via shared memory
//   O^T[columns x rows] += V^T * P^T  each warp its own columns
//
// Rows are on the n side of the products, so an m-block may have any multiple of 8 rows. column_products.cuh implements
// this. With 16 rows, keys in 8 bits and tiles of 64 tokens, warps divide S differently: see token_products.cuh.
//
// grid   at most one persistent CTA per multiprocessor; each walks the range that the planner gave it
//        (schedule/work.cuh)
// block  8 warps, all alike. Each holds d_c / 8 columns of O in registers, and as many of Q, or, with two row groups,
//        twice as many for half of the rows; some warps also hold 16 rotary columns of Q
//
// What each warp does, for tile i of a work tile, which lies in stage i % kStages:
//
//   multiplies                    softmax and copies                            tiles in flight after this step
//   --------------------------------------------------------------------------------------------------------------
//   partial scores of tile 0      -                                             1 .. kStages - 2
//   == barrier: the partial scores of tile i are complete, the stage of tile i - 1 is free =======================
//   -                             load scores of i                              i + 1 .. i + kStages - 2
//   -                             issue copies of i + kStages - 1               i + 1 .. i + kStages - 1
//   -                             add scores over warps, exponentiate, write P
//   -                             wait for the copies of i + 1                  i + 2 .. i + kStages - 1
//   == barrier: P of tile i is complete, tile i + 1 has landed ===================================================
//   partial scores of tile i + 1  -
//   O += P * V of tile i          -
//   (back to the first barrier with i + 1)
//
// Copies run ahead across work tiles. With two warps per scheduler, little latency is hidden, and a tile takes as long
// as a warp's instruction stream. So there are few branches, and copies are issued between the loads of scores and
// their use.
//
// shared memory (DecodeMemory)
//   kv       kStages tiles: [column block][token][128 B]; with keys in 8 bits, 64 B. 16-byte vectors are swizzled:
//            vector v of token t lies at v ^ t % 8; with keys in 8 bits, at v ^ t / 2 % 4. So eight tokens' vectors (K)
//            and, transposed, eight tokens' columns (V) are read without bank conflicts. If keys have a tail
//            (numbers/cache_format.cuh), the blocks hold latents; after them come the rotary columns, [token][128 B],
//            and the scales, C::Layout::kScales floats for each token.
//   scores   [column group][octet][token block] accumulator fragments (mma.cuh) of 4 floats a lane; see quad_index
//   p        [token block][octet] as two matrices of 8 tokens x 8 rows, which ldmatrix transposes. Between work tiles,
//            this holds the queries that warps share (token_queries.cuh)
//   invalid  which tokens of a stage have no key
//
// invariants
//   * keys outside [token_begin, token_end) are not read: their bytes in a stage are zeros, their scores are masked
//   * each of several work tiles of an m-block leaves an fp32 split (schedule/splits.cuh); a CTA waits for others only
//     after all its own work tiles
//   * a fixed order everywhere: the same inputs and plan give the same bits
#pragma once
#include "column_products.cuh"
#include "config.cuh"
#include "key_loader.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/pdl.cuh"
#include "schedule/combine.cuh"
#include "token_products.cuh"

namespace mla::portable {

template <typename C>
using Products = std::conditional_t<C::kWholeScores, TokenProducts<C>, ColumnProducts<C>>;

template <typename C>
struct Decoder {
    using Element = typename C::Element;
    using OutputQuads = Quads<C::kRows, C::kDimLatent, true, C::kWidens>;
    using Buffers = SplitBuffers<OutputQuads>;
    static constexpr int kThreadQuads = C::kColumns / 16;  // of O, in each octet: one of 16 columns

    const DecodeParams& p;
    DecodeMemory<C>& smem;
    Products<C> products{p, smem};

    __device__ void run() {
        KeyLoader<C> loader(p, smem);
#pragma unroll 1
        for (int i = 0; i < C::kStages - 1; ++i) {
            loader.prepare();
            loader.copy(i);
        }
        while (true) {
            if (threadIdx.x == 0) next_work_tile();
            __syncthreads();
            if (!smem.has_work) break;
            products.begin(smem.work);
            cp_async_wait<C::kStages - 2>();  // for the CTA's first tile; later ones have been waited for
            __syncthreads();
            products.attend(loader);
            finish(smem.work);
        }
        if (threadIdx.x == 0) raise_flag(p, blockIdx.x, smem.flag);
        cp_async_wait<0>();  // for zeros past the last tile, before the stages become scratch memory or the CTA ends
        if (smem.two_way_splits + smem.other_splits == 0) return;
        __syncthreads();
        combine();
    }

    // To be called by one thread.
    __device__ void next_work_tile() {
        const WorkTile& work = smem.work;
        WorkCursor<C> cursor(p, smem.range, smem.place);
        smem.has_work = cursor.next(smem.work);
        if (!smem.has_work) return;
        smem.place = cursor.place;
        smem.masked = work.token_end - key_limit<C>(p, work, 0) + C::kTile;
        if (work.split()) ++(is_two_way_split(work, smem.range, blockIdx.x) ? smem.two_way_splits : smem.other_splits);
        smem.keeps_half = is_two_way_split(work, smem.range, blockIdx.x) && cursor.at_end();
    }

    // Writes the output of a work tile, or its split.
    __device__ void finish(const WorkTile& work) {
        if constexpr (C::kWidens) {
            const float unit = products.output_unit() * kE4m3Unit;
            products.scale_output([&](int, int) { return unit; });
        }
        __syncthreads();  // the states overwrite the scores
        products.write_states();
        if (p.sinks) count_sinks(work);
        if (!work.split()) fill(smem.end.rows, work, threadIdx.x);
        __syncthreads();
        if (work.split())
            write_split(work);
        else
            write_output();
        __syncthreads();
    }

    // A barrier must follow.
    __device__ void count_sinks(const WorkTile& work) {
        __syncthreads();  // the states are written
        if (threadIdx.x >= C::kRows) return;
        RowState& state = smem.end.states[threadIdx.x];
        count_sink<C>(p, work, threadIdx.x, state.top, state.total);
    }

    // Fills in where the rows of an m-block go; a barrier must follow.
    __device__ void fill(OutputOffsets<C::kRows>& rows, const WorkTile& work, int tid) const {
        if (tid >= C::kRows) return;
        const QueryRow row = query_row<C>(p, work, tid);
        rows.out[tid] = row.exists ? row.token * p.out_token_stride + row.head * p.out_head_stride : -1;
        rows.lse[tid] = row.exists ? row.token * p.lse_token_stride + row.head * p.lse_head_stride : -1;
    }

    // quad(octet, i) of this thread is number first_quad() + i * 8 of its row pair.
    __device__ int lane() const { return products.lane; }
    __device__ int first_quad() const { return products.warp * (C::kColumns / 2) + lane() / 4; }
    __device__ float4 quad(int octet, int i) const {
        const auto& o = products.o;
        return make_float4(o[octet][i][0], o[octet][i][1], o[octet][i][2], o[octet][i][3]);
    }

    __device__ void write_split(const WorkTile& work) {
        const Buffers buffers(p, work, smem.range, blockIdx.x);
        float4* buffer = buffers.own_buffer(work.has_first_key);
        const int kept_half = smem.keeps_half ? buffers.splits.index() : -1;
#pragma unroll
        for (int octet = 0; octet < C::kOctets; ++octet) {
            const int pair = octet * 4 + lane() % 4;
            if (pair * OutputQuads::kPairQuads >= buffers.quads) break;
#pragma unroll
            for (int i = 0; i < kThreadQuads; ++i)
                if (i / (kThreadQuads / 2) != kept_half)
                    __stcg(buffer + pair * OutputQuads::kPairQuads + first_quad() + i * 8, quad(octet, i));
        }
        // Pinned: otherwise indices would be computed before the loop over work tiles, and kept.
        buffers.write_states(buffer, pinned(static_cast<int>(threadIdx.x)),
                             [&](int row) { return smem.end.states[row]; });
    }

    __device__ void write_output() {
#pragma unroll
        for (int i = 0; i < C::kOctets * 2; ++i) {
            const int row = i / 2 * 8 + lane() % 4 * 2 + i % 2;
            const float scale = inverse(smem.end.states[row].total);
            const int64_t offset = smem.end.rows.out[row];
            if (offset < 0) continue;
            auto* out = static_cast<Element*>(p.out) + offset + OutputQuads::column(first_quad());
#pragma unroll
            for (int k = 0; k < C::kColumns / 8; ++k)
                out[k / 2 * 16 + k % 2 * OutputQuads::kNextColumn] =
                    static_cast<Element>(products.o[i / 2][k / 2][k % 2 * 2 + i % 2] * scale);
        }
        if (threadIdx.x < C::kRows) store_lse(p, smem.end.rows, threadIdx.x, smem.end.states[threadIdx.x]);
    }

    // Combines the m-blocks of which other CTAs have splits, too. All warps combine those with two splits, one after
    // another. At most two m-blocks, at the ends of the range, have more splits: half of the warps combine each, or all
    // warps if there is only one. The stages serve as scratch memory.
    __device__ void combine() {
        struct Scratch {
            OutputOffsets<C::kRows> rows;
            float4 sums[2 * kThreads];
        };
        static_assert(2 * sizeof(Scratch) <= sizeof(smem.kv) && !Shares<OutputQuads>::kServed);
        auto* scratches = reinterpret_cast<Scratch*>(smem.kv[0]);
        if (smem.keeps_half) combine_two<true>(smem.work, scratches[0].rows);

        const bool takes_all_warps = smem.other_splits == 1;
        const int threads = takes_all_warps ? kThreads : kThreads / 2;
        const int half = threadIdx.x / threads, tid = threadIdx.x % threads;
        auto sync = [&] {
            if (takes_all_warps)
                __syncthreads();
            else if (half == 0)
                named_barrier_sync<1, kThreads / 2>();
            else
                named_barrier_sync<2, kThreads / 2>();
        };
        int index = 0;
        WorkCursor<C> cursor(p, smem.range);
        WorkTile work;
        while (cursor.next(work)) {
            if (!work.split()) continue;
            if (is_two_way_split(work, smem.range, blockIdx.x)) {
                if (!cursor.at_end()) combine_two<false>(work, scratches[0].rows);
            } else if (index++ == half) {
                Scratch& scratch = scratches[half];
                fill(scratch.rows, work, tid);
                sync();
                const CombineTeam team{reinterpret_cast<unsigned char*>(scratch.sums), tid, threads, sync};
                combine_splits<Element>(Buffers(p, work, smem.range, blockIdx.x), smem.flag, scratch.rows, team);
            }
        }
    }

    // With two splits, each CTA combines half of every thread's quads: the CTA of split `index` combines half `index`.
    // If `kKeepsHalf`, its own quads have stayed in registers.
    template <bool kKeepsHalf>
    __device__ void combine_two(const WorkTile& work, OutputOffsets<C::kRows>& rows) {
        constexpr int kAtOnce = 4;  // octets whose loads are in flight
        const Buffers buffers(p, work, smem.range, blockIdx.x);
        fill(rows, work, threadIdx.x);
        buffers.wait_for(1 - buffers.splits.index(), smem.flag);
        __syncthreads();
#pragma unroll
        for (int begin = 0; begin < C::kOctets; begin += kAtOnce) {
            HalfOctet halves[kAtOnce];
#pragma unroll
            for (int k = 0; k < kAtOnce && begin + k < C::kOctets; ++k)
                load_half<kKeepsHalf>(buffers, begin + k, halves[k]);
#pragma unroll
            for (int k = 0; k < kAtOnce && begin + k < C::kOctets; ++k) store_half(buffers, begin + k, halves[k], rows);
        }
        __syncthreads();  // `rows` may be filled again
    }

    static constexpr int kHalfQuads = kThreadQuads / 2;
    struct HalfOctet {
        float4 own[kHalfQuads], other[kHalfQuads];
        typename Buffers::Weights weights;
    };

    template <bool kKeepsHalf>
    __device__ void load_half(const Buffers& buffers, int octet, HalfOctet& half) const {
        const int index = buffers.splits.index(), last_pair = buffers.quads / OutputQuads::kPairQuads - 1;
        const int pair = min(octet * 4 + lane() % 4, last_pair);
        const int at = pair * OutputQuads::kPairQuads + first_quad() + index * kHalfQuads * 8;
        half.weights = buffers.weights_of_two(pair);
#pragma unroll
        for (int i = 0; i < kHalfQuads; ++i) {
            half.other[i] = __ldcg(buffers.buffer_of_split(1 - index) + at + i * 8);
            if constexpr (kKeepsHalf)  // registers cannot be indexed
                half.own[i] = index ? quad(octet, kHalfQuads + i) : quad(octet, i);
            else
                half.own[i] = __ldcg(buffers.buffer_of_split(index) + at + i * 8);
        }
    }

    __device__ void store_half(const Buffers& buffers, int octet, const HalfOctet& half,
                               const OutputOffsets<C::kRows>& rows) const {
        const int index = buffers.splits.index(), row = octet * 8 + lane() % 4 * 2;
#pragma unroll
        for (int i = 0; i < kHalfQuads; ++i) {
            const int column = OutputQuads::column(first_quad() + (index * kHalfQuads + i) * 8);
            store_output<Element, OutputQuads>(p, rows, row, column, half.weights.sum(half.own[i], half.other[i]));
        }
        if (index == 0 && products.warp == 0 && lane() < 4) {
            store_lse(p, rows, row, half.weights.states[0]);
            store_lse(p, rows, row + 1, half.weights.states[1]);
        }
    }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) unsigned char bytes[];
    auto& smem = *reinterpret_cast<DecodeMemory<C>*>(bytes);
    if constexpr (C::kDependentLaunch) {
        wait_for_predecessor();
        allow_successor();
    }
    if (threadIdx.x < sizeof(CtaRange) / 4)
        reinterpret_cast<int*>(&smem.range)[threadIdx.x] =
            reinterpret_cast<const int*>(&p.plans[blockIdx.x].range)[threadIdx.x];
    if (threadIdx.x == 32) smem.flag = read_flag(p, blockIdx.x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) smem.next_windows[threadIdx.x / 32] = {smem.range.begin(), 0, 0, 0};
    if (threadIdx.x == 0) {
        smem.place = smem.range.begin();
        smem.refreshed = 0;
        smem.two_way_splits = smem.other_splits = 0;
        smem.keeps_half = false;
        if constexpr (C::kWholeScores) smem.stage = 0;
    }
    __syncwarp();
    check_plan(p, p.plans[blockIdx.x]);  // by all threads: a branch of one would take registers
    Decoder<C>{p, smem}.run();
}

}  // namespace mla::portable
