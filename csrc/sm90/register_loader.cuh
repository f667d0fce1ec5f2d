// fp8 keys by way of registers, where they become 16-bit, for the kernel of rows64.cuh. Which tokens a warp loads and
// how it finds them: token_loader.cuh.
//
// A lane has two tokens, 8 apart, and of each column block the same quarter: 16 of 64 columns. Four lanes read a
// token's column block at once, and 8 lanes store to all banks.
//
// Timeline of a tile. It is loaded in steps of one vector a lane and token; registers hold the next kHalf + 1 of them,
// on their way or arrived, so that keys are stored as soon as their segments are given back:
//
//   wait kv_empty of the half that is first in turn
//   each of its segments: store it, arrive kv_full, load a later step to its registers
//   wait kv_empty of the rope segment, then likewise
//   find the rows of a later tile
//   wait kv_empty of the other half, then likewise
//
// Records. The tensor cores' operands are fp16 for latents and bf16 for rope columns. Scales may be anything, and
// differ between tokens, so each tile has a unit, a power of two, in which its keys are stored: latents times their
// scale over the unit, rope columns over the unit. The consumers multiply scores and outputs by it.
#pragma once
#include <utility>

#include "../common/math.cuh"
#include "token_loader.cuh"
#include "wgmma.cuh"

namespace mla::sm90 {

constexpr int kLoaderBarrier = 4;  // behind those of the consumers

// What else the shared memory of a kernel with this loader has: of fp8 keys, what turns products with a row of queries
// into scores in log2; of records, the unit of a tile's keys, and the largest scale of each warp's tokens (tiles take
// turns).
template <typename C>
struct Fp8Factors {
    float score_scales[C::Layout::kFp8 ? C::kRows : 1];
    float units[C::Layout::kIsRecord ? C::kStages : 1];
    float largest[C::Layout::kIsRecord ? 2 : 1][4];
};

template <typename C, typename S>
struct RegisterKeyLoader : TokenKeyLoader<C, S, 4> {
    using Base = TokenKeyLoader<C, S, 4>;
    using Base::p, Base::smem, Base::lane, Base::policy, Base::thread, Base::warp, Base::loaded, Base::rows;
    using Base::stage, Base::wait_for_release, Base::kTokens, Base::kWarpTokens, Base::kRopeVectors;
    static constexpr bool kRecords = C::Layout::kIsRecord;
    // Steps of a tile: the segments of the half that is first in turn, the rope segment, those of the other half.
    static constexpr int kRopeSteps = kRecords ? 2 : 1;
    static constexpr int kOtherHalf = C::kHalf + kRopeSteps, kSteps = kOtherHalf + C::kHalf;
    static constexpr int kBuffers = C::kHalf + 1;
    static constexpr int kKeyArrivals = 4;  // a warp
    using Vectors = uint4[kTokens];         // of a step
    static_assert(kRopeSteps == 1 || kSteps % kBuffers == 0);

    // Where a step's vectors are held, and which step is next there: of the next tile unless it is a later one.
    static constexpr int buffer_of(int step) {
        return kRopeSteps == 2 ? step % kBuffers : step < kOtherHalf ? step : step - kOtherHalf;
    }
    static constexpr int step_after(int step) {
        if (kRopeSteps == 2) return (step + kBuffers) % kSteps;
        return step < C::kHalf ? step + kOtherHalf : step < kOtherHalf ? step : step - kOtherHalf;
    }

    const int quarter = lane % 4;
    Vectors buffers[kBuffers];
    // Of records, lane l has two scales of its token, lane l + 16 the other two.
    float2 scales;     // of the tile at hand or, once its unit is chosen, of the next one
    uint32_t factors;  // these scales in the unit of the tile at hand, in fp16
    float inverse;     // of the unit

    __device__ RegisterKeyLoader(const LoaderThread<C, S>& thread) : Base(thread) {}

    __device__ void take_next_rows() {
        Base::take_next_rows();
        if constexpr (kRecords)
            scales =
                *reinterpret_cast<const float2*>(Base::next_row + C::Layout::kScaleOffset + lane / kWarpTokens * 8);
    }

    // Of a token's rope columns, the vector that a lane has in a step. Neighbouring tokens begin with different ones,
    // so that they are stored to different banks. Where there are fewer vectors, lanes load some again, but products
    // with them are not computed.
    __device__ int rope_vector(int step) const {
        return (kRopeVectors > 4 ? quarter + (step + lane / 4) % 2 * 4 : quarter) % kRopeVectors;
    }
    // Starts loading a step of a tile in which half `first` is first in turn.
    template <int kStep>
    __device__ void load_step(int first) {
        constexpr bool kRope = kStep >= C::kHalf && kStep < kOtherHalf;
        const int segment = kStep < C::kHalf ? first * C::kHalf + kStep : (1 - first) * C::kHalf + kStep - kOtherHalf;
        const int offset = kRope ? C::Layout::kRopeOffset + rope_vector(kStep) * 16 : segment * 64 + quarter * 16;
#pragma unroll
        for (int i = 0; i < kTokens; ++i) buffers[buffer_of(kStep)][i] = load_16(rows[i] + offset, policy);
    }

    // Chooses the unit of a tile's keys: the largest scale is below 128 in it, so that latents fit fp16. Tiny scales do
    // not count, as rope columns are divided by the unit, too.
    __device__ void choose_unit() {
        float* largest = smem.fp8.largest[loaded % 2];
        const float most = warp_max(fmaxf(fabsf(scales.x), fabsf(scales.y)));
        if (lane == 0) largest[warp] = most;
        named_barrier_sync<kLoaderBarrier, 128>();
        const float all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
        const int exponent = max(__float_as_int(all) >> 23, 127 - 60) - 6;
        inverse = __int_as_float((254 - exponent) << 23);
        factors = pack<__half>(scales.x * inverse, scales.y * inverse);
    }

    // Puts a vector of the lane's i-th token to its place in a segment.
    __device__ void put(int segment, int i, int vector, const uint4& words) const {
        unsigned char* group =
            smem.kv[stage()] + segment * C::kSegmentBytes + (warp * kTokens + i) * C::kTokenGroupBytes;
        *reinterpret_cast<uint4*>(group + vector_offset<C::kBlockBytes>(lane / 4, vector)) = words;
    }
    // Puts 16 columns of each token in fp16. Of records, they are times their scale, which is that of the segment.
    __device__ void put_widened(int segment, const Vectors& vectors, int segment_of_half = 0) const {
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
            const uint32_t bytes[4] = {vectors[i].x, vectors[i].y, vectors[i].z, vectors[i].w};
            uint2 words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) halves_in_order(bytes[j], words[j].x, words[j].y);
            if constexpr (kRecords) {
                const uint32_t two = Base::of_token(factors, i, segment / C::kHalf * kWarpTokens);
                const uint32_t factor = __byte_perm(two, 0, segment_of_half < 2 ? 0x1010 : 0x3232);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    words[j] = {multiplied<__half2>(words[j].x, factor), multiplied<__half2>(words[j].y, factor)};
            }
            put(segment, i, quarter * 2, make_uint4(words[0].x, words[0].y, words[1].x, words[1].y));
            put(segment, i, quarter * 2 + 1, make_uint4(words[2].x, words[2].y, words[3].x, words[3].y));
        }
    }
    // Puts 8 rope columns of each token of records.
    __device__ void put_rope(const Vectors& vectors, int vector) const {
        const uint32_t factor = pack<__nv_bfloat16>(inverse, inverse);
#pragma unroll
        for (int i = 0; i < kTokens; ++i)
            put(C::kRopeSegment, i, vector,
                make_uint4(multiplied<__nv_bfloat162>(vectors[i].x, factor),
                           multiplied<__nv_bfloat162>(vectors[i].y, factor),
                           multiplied<__nv_bfloat162>(vectors[i].z, factor),
                           multiplied<__nv_bfloat162>(vectors[i].w, factor)));
    }
    // By the warp, when it has put all that it has of a segment.
    __device__ void announce(int segment) const {
        __syncwarp();  // lane 0 arrives for all lanes
        if (lane == 0) smem.kv_full[stage()][segment].arrive();
    }
    // Stores a step, and begins to load the one that is next in its buffer.
    template <int kStep>
    __device__ void store_step(int first) {
        const Vectors& vectors = buffers[buffer_of(kStep)];
        constexpr bool kRope = kStep >= C::kHalf && kStep < kOtherHalf;
        constexpr int kSegmentOfHalf = kStep < C::kHalf ? kStep : kStep - kOtherHalf;
        const int segment =
            kRope ? C::kRopeSegment : (kStep < C::kHalf ? first : 1 - first) * C::kHalf + kSegmentOfHalf;
        if constexpr (kRecords && kRope) {
            put_rope(vectors, rope_vector(kStep));
            if (thread == 0) smem.fp8.units[stage()] = __int_as_float((254 << 23) - __float_as_int(inverse));
        } else {
            put_widened(segment, vectors, kSegmentOfHalf);
        }
        if (!kRope || kStep == kOtherHalf - 1) announce(segment);
        constexpr int kNext = step_after(kStep);
        load_step<kNext>(kNext > kStep ? first : 1 - first);
    }
    template <int kBegin, int kEnd>
    __device__ void store_steps(int first) {
        if constexpr (kBegin < kEnd) {
            store_step<kBegin>(first);
            store_steps<kBegin + 1, kEnd>(first);
        }
    }

    // The keys of a tile, whose first steps are in the buffers.
    __device__ void load_tile(int tile, int tile_token) {
        constexpr int kNextRows = kRopeSteps == 2 ? kSteps - kBuffers : C::kHalf;  // first step behind which they load
        const int first = tile % 2;
        if constexpr (kRecords) choose_unit();
        wait_for_release(first);
        if constexpr (C::kLists) Base::tell_named();
        store_steps<0, C::kHalf>(first);
        wait_for_release(C::kRopeRelease);
        store_steps<C::kHalf, kNextRows>(first);
        take_next_rows();
        Base::find_rows(tile_token + 2 * C::kTile);
        store_steps<kNextRows, kOtherHalf>(first);
        wait_for_release(1 - first);
        store_steps<kOtherHalf, kSteps>(first);
    }
    template <int... kStep>
    __device__ void load_first_steps(std::integer_sequence<int, kStep...>) {
        (load_step<kStep>(0), ...);
    }

    __device__ void run() {
        Base::for_each_tile(
            [&] {
                take_next_rows();
                load_first_steps(std::make_integer_sequence<int, kBuffers>());
            },
            [&](int tile, int tile_token) { load_tile(tile, tile_token); });
    }
};

}  // namespace mla::sm90
