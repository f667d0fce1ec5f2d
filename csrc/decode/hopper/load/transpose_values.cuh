// A warpgroup that transposes values for products in 8 bits: wgmma requires 8-bit operands to be K-major, which V^T is
// not.
//
// A tile is transposed where it lies, once its scores are computed. Of a column block, 64 tokens of 64 columns, the 64
// rows of 64 bytes become columns instead of tokens. Two orders suit the products:
//   * of each 16 tokens, row bytes 4 t to 4 t + 3 are tokens 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. A thread that has a
//     fragment of scores then has an A fragment of probabilities
//   * of each 16 columns, the even ones are the first eight rows, then the odd ones follow (C::kFourColumns). Stores
//     then have no bank conflicts, and a thread of a product has four neighbouring columns
#pragma once
#include "decode/hopper/profile.cuh"
#include "loader.cuh"
#include "ptx/mma.cuh"

namespace mla::hopper {

// A phase of each barrier for every tile. Of both, the half of the column blocks that the tile's owner multiplies comes
// first.
template <typename C>
struct TranspositionMemory {
    Barrier scored[C::kStages][2];            // the owner's scores contain the products of its half; of all columns
    Barrier values_are_there[C::kStages][2];  // the column blocks of a consumer are transposed

    __device__ void init() {
        for (int i = 0; i < C::kStages; ++i) {
            for (Barrier& part : scored[i]) part.init(4);
            for (Barrier& half : values_are_there[i]) half.init(4);
        }
    }
};

// A column block consists of 4 x 4 squares of 16 tokens and 16 columns, each with 16 rows of 16 bytes. Squares i, j and
// j, i change places. A unit is two squares, which a warp transposes by one load and one store. Those of a block:
//   0, 1   squares 0, 0 and 1, 1; 2, 2 and 3, 3, which stay in their places
//   2-7    squares i, j and j, i for 0, 1; 2, 3; 0, 2; 1, 3; 0, 3; 1, 2
// What a tile takes is the number of instructions of a warp. So a warp has the same two units in all blocks, whose
// addresses differ by constants.
template <typename C>
struct ValueTransposer {
    static constexpr int kHalf = C::kDimLatent / 128;  // blocks of a consumer
    static_assert(C::kTile == 64 && C::kBlockBytes == 64 && C::kSegmentColumnBlocks == 1);

    const DecodeParams& p;
    RingMemory<C>& rings;
    TranspositionMemory<C>& memory;
    const CtaRange& range;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    // Where this lane's row of 16 bytes of a unit lies in a block.
    const uint32_t from[2] = {place(warp), place(warp + 4)};
    const uint32_t to[2] = {from[0] ^ change(warp), from[1] ^ change(warp + 4)};
    Profiler<C::kProfile> profiler;

    __device__ ValueTransposer(const DecodeParams& p, RingMemory<C>& rings, TranspositionMemory<C>& memory,
                               const CtaPlan& plan)
        : p(p), rings(rings), memory(memory), range(plan.range), profiler(p.profile, 3, threadIdx.x % 128 == 0) {}

    static __device__ int first_of(int unit) { return 0x10102020 >> unit * 4 & 3; }   // i
    static __device__ int second_of(int unit) { return 0x23323131 >> unit * 4 & 3; }  // j
    __device__ uint32_t place(int unit) const {
        const int i = first_of(unit), j = second_of(unit);
        const bool second = lane >= 16, stays = unit < 2;
        const int tokens = second ? j : i, columns = second != stays ? i : j;
        const uint32_t row = lane / 8 % 2 * C::kTokenGroupBytes + vector_offset<64>(lane % 8, 0);
        return (row ^ columns * 16) + tokens * 2 * C::kTokenGroupBytes;
    }
    // Tokens and columns change places: what the place in the unit's other square differs by.
    static __device__ uint32_t change(int unit) {
        return unit < 2 ? 0 : (first_of(unit) ^ second_of(unit)) * (2 * C::kTokenGroupBytes + 16);
    }

    static __device__ void store(uint32_t to, const uint32_t (&w)[4]) {
        store_matrices(to, __byte_perm(w[0], w[1], 0x6420), __byte_perm(w[0], w[1], 0x7531),
                       __byte_perm(w[2], w[3], 0x6420), __byte_perm(w[2], w[3], 0x7531));
    }

    // Transposes this warp's units of a consumer's blocks.
    __device__ void transpose(uint32_t blocks) const {
        uint32_t words[2][kHalf][4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
            for (int b = 0; b < kHalf; ++b)
                load_matrices_transposed(words[k][b], blocks + from[k] + b * C::kSegmentBytes);
            __syncwarp();  // all lanes have read
#pragma unroll
            for (int b = 0; b < kHalf; ++b) store(blocks + to[k] + b * C::kSegmentBytes, words[k][b]);
        }
    }
    // The same for a tile with fewer than kTile keys: those from `valid` on do not exist, and become zeros, as what was
    // not loaded may be NaN.
    __device__ void transpose_last(uint32_t blocks, int valid) const {
#pragma unroll 1
        for (int n = warp; n < 8 * kHalf; n += 4) {
            const int unit = n / kHalf;
            const uint32_t place = this->place(unit);
            const uint32_t block = blocks + n % kHalf * C::kSegmentBytes;
            uint32_t words[4];
            load_matrices_transposed(words, block + place);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int left = valid - (w < 2 ? first_of(unit) : second_of(unit)) * 16 - w % 2 * 8 - lane % 4 * 2;
                words[w] &= left <= 0 ? 0 : left == 1 ? 0xffff : ~0u;
            }
            __syncwarp();  // all lanes have read
            store(block + (place ^ change(unit)), words);
        }
    }

    // `owner`: the consumer that owns the tile. `left`: keys from the tile on.
    __device__ void transpose_tile(uint32_t tile, int owner, int left) {
        const uint32_t stage = tile % C::kStages, phase = tile / C::kStages % 2;
#pragma unroll 1
        for (int part = 0; part < 2; ++part) {
            const int consumer = part ^ owner;
            const uint32_t blocks = smem_address(rings.kv[stage]) + consumer * kHalf * C::kSegmentBytes;
            memory.scored[stage][part].wait(phase);
            if (part == 0) profiler.mark(Event::kScores);
            if (left < C::kTile)
                transpose_last(blocks, left);
            else
                transpose(blocks);
            fence_async_proxy();
            __syncwarp();  // lane 0 arrives for all lanes
            if (lane == 0) memory.values_are_there[stage][consumer].arrive();
            profiler.mark(part == 0 ? Event::kSoftmax : Event::kValues);
        }
    }

    __device__ void run() {
        WorkCursor<C> cursor(p, range);
        WorkTile work;
        uint32_t tile = 0;
        while (cursor.next(work)) {
#pragma unroll 1
            for (int i = 0, left = work.token_end - work.token_begin; left > 0; ++i, ++tile, left -= C::kTile)
                transpose_tile(tile, i % 2, left);
        }
    }
};

}  // namespace mla::hopper
