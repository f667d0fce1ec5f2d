// MLA decode for Hopper from e4m3 caches, with both products in e4m3, up to 64 rows (query heads x query tokens) an
// m-block: the operands are swapped.
//
//   S^T[tokens x 64] = K[tokens x d] * Q^T        A = K, B = Q^T, both from shared memory: scorer.cuh
//   O^T[d_c x 64]   += V^T[d_c x tokens] * P^T    A = V^T, from registers, B = P^T
//
// Unlike those of many_rows_fp8, these products round: Q, but for the last kTwoTermBlocks column blocks, to one e4m3,
// and P likewise. They take the tensor cores half as long.
//
// grid   as in few_rows/kernel.cuh
// block  4 warpgroups: a loader (load/loader.cuh), two consumers, and a scorer. The scorer computes scores and P^T of
//        all tiles. Each consumer multiplies the values of half of the d_c columns.
//
//   scorer                                     consumers
//   -----------------------------------------  -----------------------------------------
//   load queries, round them                   -
//   start S^T = K Q^T of tile 0                -
//   wait for it, start S^T of tile 1           -
//   P^T of tile 0                -->  full[0]  wait full[0]
//   wait for S^T of tile 1, start tile 2       T = V^T P^T of tile 0, O^T += T
//   P^T of tile 1                -->  full[1]  release tile 0, arrive free[0]
//   ...                                        ...
//   maxima and sums of rows      --> end.full  wait end.full, write the outputs
//   the next work tile                         arrive end.free
//
// clusters, loading  as in many_rows_fp8, but queries are loaded by the scorer
//
// shared memory (ManyRowsFp8ProductsMemory)
//   kv       kStages tiles, as in few_rows/kernel.cuh
//   q        e4m3: [column block][64 rows][64 B], K-major, swizzled; then the remainders of the last kTwoTermBlocks
//            column blocks likewise
//   weights  P^T of kWeightBuffers tiles
//
// sums     The tensor cores cut off bits of e4m3's products (ptx/wgmma.cuh). So T, the product of a tile's values, is
//          a sum of its own, which is added to O^T in fp32.
// softmax  P is relative to a reference, so that it takes the whole range of e4m3. Of a row, this is 2^-kHeadroom times
//          the maximum when it was last found, and is found again when a weight would exceed that range. It may fall, as
//          in few_rows. The consumers then rescale O^T before they add the tile's values.
//
// invariants
//   * the scorer writes P^T and factors of tile t when both consumers have used those of t - kWeightBuffers
//   * it writes the state of work tile w when both consumers have written the outputs of w - 1
//   * a tile is released when both consumers have read its values. The scorer has read its keys before it shares P^T
//   * the loader writes output offsets of work tile w when the scorer has computed the last scores of w - 1, and both
//     consumers have begun with w - 1
//   * keys outside [token_begin, token_end), splits, order of sums: as in few_rows/kernel.cuh
#pragma once
#include "decode/hopper/many_rows_fp8/output.cuh"
#include "numbers/two_terms.cuh"
#include "scorer.cuh"

namespace mla::hopper {

template <typename Element, DecodeConfig kConfig, typename Base = KernelConfig<Element, kConfig>>
struct ManyRowsFp8ProductsConfig
    : Base,
      TransposedStage<typename Base::Layout, column_blocks(Base::kDim), kConfig.tma, 1, kConfig.dim_latent / 128> {
    using Layout = typename Base::Layout;
    static constexpr int kMBlockCost = 3;
    static constexpr bool kByTokens = !kConfig.tma;
    static constexpr int kSlotStride = kConfig.tma ? 8 : 0;

    static constexpr int kThreads = 512;
    static constexpr int kLoaderRegisters = kConfig.tma ? LREGS : 40, kConsumerRegisters = VREGS,
                         kScorerRegisters = 512 - kLoaderRegisters - 2 * kConsumerRegisters;
    static constexpr int kBlocks = kConfig.dim_latent / 64;  // m64 blocks of O^T
    static constexpr bool kConsumersMerge = false, kCombinesTwo = true;
    static constexpr bool kLoadsQueries = false;
    static constexpr int kQueryReaders = 4, kQueryReleases = 4 + 8;
    static constexpr int kWeightBuffers = 3;
    static constexpr int kWeightBytes = kTransposedTile * kConfig.rows;  // of P^T of a tile

    // Column blocks of queries that are sums of two e4m3. They are the last ones, with the rotary columns.
    static constexpr int kTwoTermBlocks = kConfig.two_term_blocks;
    static constexpr int kFirstTwoTermBlock = Base::kQueryColumnBlocks - kTwoTermBlocks;
    static constexpr int kTermsBytes = (Base::kQueryColumnBlocks + kTwoTermBlocks) * kConfig.rows * 64;
    // What a CTA of a pair receives (pair.cuh) takes the place of queries.
    static constexpr int kReceivedBytes = kConfig.rows * (kConfig.dim_latent + 16);
    static constexpr int kQueryBytes = kTermsBytes > kReceivedBytes ? kTermsBytes : (kReceivedBytes + 1023) / 1024 * 1024;

    static_assert(kConfig.rows == 64 && kConfig.query_buffers == 1 && !kConfig.for_one_m_block && Layout::kFp8);
    static_assert(!Layout::kIsRecord && kTwoTermBlocks <= Base::kQueryColumnBlocks);
    static_assert((kConfig.dim_latent + kConfig.dim_rope) % 32 == 0 && kConfig.dim_latent % 256 == 0);
};

template <typename C>
struct ManyRowsFp8ProductsConsumer {
    using Buffers = SplitBuffers<TransposedQuads<C>>;
    static constexpr int kScores = C::kRows / 2, kOctets = C::kRows / 8;
    static constexpr int kConsumerBlocks = C::kBlocks / 2;
    using Product = WgmmaE4m3<C::kRows>;

    ConsumerThread<C>& t;
    ManyRowsFp8ProductsMemory<C>& smem;
    ManyRowsFp8Output<C> output;

    __device__ ManyRowsFp8ProductsConsumer(ConsumerThread<C>& t, ManyRowsFp8ProductsMemory<C>& smem)
        : t(t), smem(smem), output(t, smem.output) {}

    __device__ void reset() {
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b)
#pragma unroll
            for (int i = 0; i < kScores; ++i) output.blocks.o[b][i] = 0.f;
    }

    __device__ void rescale(int buffer) {
#pragma unroll
        for (int j = 0; j < kOctets; ++j) {
            const auto two = *reinterpret_cast<const float2*>(&smem.weights.factors[buffer][row_of(t.lane, j * 2)]);
#pragma unroll
            for (int b = 0; b < kConsumerBlocks; ++b)
#pragma unroll
                for (int i = 0; i < 4; ++i) multiply_in_place(output.blocks.o[b][j * 4 + i], i % 2 ? two.y : two.x);
        }
    }

    // O^T += V^T P^T over a tile, and releases both.
    __device__ void multiply_values(uint32_t tile, int buffer) {
        const int stage = tile % C::kStages;
        const uint32_t values = smem_address(t.rings.kv[stage]) +
                                t.consumer * (kConsumerBlocks * 64 / C::kBlockColumns * C::kSegmentBytes) +
                                t.lane / 8 * C::kTokenGroupBytes + vector_offset<C::kBlockBytes>(t.lane % 8, t.warp);
        const uint64_t weights = uniform(
            make_descriptor(smem.weights.tiles[buffer], 128, C::kTile / 16 * 128, Swizzle::kNone));
        uint32_t words[2][4];
        auto load = [&](int block) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                load_matrices_transposed(words[half],
                                         vector_further_on<C>(values, block * 64) + half * 4 * C::kTokenGroupBytes);
        };
        load(0);
#pragma unroll
        for (int b = 0; b < kConsumerBlocks; ++b) {
            float sums[kScores];
            uint32_t fragments[2][4];  // of 32 tokens each
            make_value_fragment(fragments[0], words[0]);
            make_value_fragment(fragments[1], words[1]);
            wgmma_fence();
#pragma unroll
            for (int half = 0; half < 2; ++half)
                Product::mma(sums, fragments[half], advance(weights, half * 256), half > 0);
            wgmma_commit();
            if (b + 1 < kConsumerBlocks) {
                load(b + 1);
            } else {
                __syncwarp();  // lane 0 arrives for all lanes
                if (t.lane == 0) t.release_keys(stage, 0);
            }
            wgmma_wait<0>();
            pin_registers(sums);
#pragma unroll
            for (int i = 0; i < kScores; ++i) output.blocks.o[b][i] += sums[i];
        }
        __syncwarp();
        if (t.lane == 0) smem.weights.free[buffer].arrive();
    }

    __device__ void compute_work_tile() {
        uint32_t tile = smem.progress.first_tile;
#pragma unroll 1
        for (int remaining = smem.progress.keys; remaining > 0; remaining -= C::kTile, ++tile) {
            const int buffer = tile % C::kWeightBuffers;
            smem.weights.full[buffer].wait(tile / C::kWeightBuffers % 2);
            t.profiler.mark(Event::kProbabilitiesArrived);
            if (smem.weights.rescales[buffer]) rescale(buffer);
            multiply_values(tile, buffer);
            t.profiler.mark(Event::kValues);
        }
    }

    // Brings O to what is written.
    __device__ void finish_outputs() {
        smem.end.full.wait(smem.progress.work_index % 2);
        const float unit = smem.end.cache_scale;
        output.blocks.prepare(unit, kE4m3Max * unit, smem.progress.work.split());
        output.blocks.scale();
    }

    __device__ void write_work_tile(const WorkTile& work, int work_index) {
        const Buffers buffers(t.p, work, t.range, t.cta());
        output.blocks.write_work_tile(buffers, work, t.rings.offsets[offset_buffer(work_index)]);
    }

    __device__ void finish_pair(const WorkTile&, const OutputOffsets<C::kRows>& offsets) {
        output.blocks.send_states();
        output.blocks.finish_pair(offsets);
    }
    template <bool kInRegisters>
    __device__ void combine_two(const Buffers& buffers, const OutputOffsets<C::kRows>& offsets) {
        output.template combine_two<kInRegisters>(buffers, offsets);
    }

    __device__ void run() {
        WorkCursor<C> cursor(t.p, t.range);
        WorkTile work;
        int work_index = 0;
        uint32_t first_tile = 0;
        t.begin_launch();
        while (cursor.next(work)) {
            if (threadIdx.x == 128)
                smem.progress = {work, work.token_end - work.token_begin, cursor.place, work_index, first_tile};
            t.rings.q_full[0].wait(work_index % 2);
            if (t.lane == 0) t.rings.q_empty[0].arrive();
            reset();
            t.sync_consumers();
            compute_work_tile();
            finish_outputs();
            work = smem.progress.work;
            work_index = smem.progress.work_index + 1;
            if (t.paired()) break;
            write_work_tile(work, work_index - 1);
            cursor.place = smem.progress.next;
            first_tile = smem.progress.first_tile + (smem.progress.keys + C::kTile - 1) / C::kTile;
            t.sync_consumers();  // all have read `progress`
            if (threadIdx.x == 128) smem.end.free.arrive();
        }
        end_launch<TransposedQuads<C>>(t, *this, work, work_index, false, false);
    }
};

template <typename C>
__global__ void __launch_bounds__(C::kThreads, 1)
    many_rows_fp8_products_decode_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ BoxOf<C> box) {
    extern __shared__ __align__(1024) unsigned char bytes[];
    using Memory = ManyRowsFp8ProductsMemory<C>;
    auto& smem = *reinterpret_cast<Memory*>(bytes);
    static_assert(offsetof(Memory, rings) == 0);
    const CtaPlan& plan = p.plans[planned_cta<C>()];
    const int warpgroup = threadIdx.x / 128;
    if (warpgroup == 0) {
        run_as_loader<C>(p, box, smem.rings, plan);
    } else if (warpgroup == 3) {
        sync_cta();
        cluster_arrive();
        lower_register_limit<C::kScorerRegisters>();
        wait_for_predecessor();
        ConsumerThread<C> t(p, smem);
        Scorer<C>(t, smem, C::kRangeCtas == 1 && plan.range.paired && has_partner()).run(plan.range);
    } else {
        run_as_consumer<C, ManyRowsFp8ProductsConsumer<C>, TransposedQuads<C>, 8 * C::kRangeCtas,
                        C::kConsumerRegisters>(p, box, smem, plan, [&] {
            for (int i = 0; i < C::kWeightBuffers; ++i) {
                smem.weights.full[i].init(4);
                smem.weights.free[i].init(kConsumerThreads / 32);
            }
            smem.end.full.init(1);
            smem.end.free.init(1);
        });
    }
}

}  // namespace mla::hopper
