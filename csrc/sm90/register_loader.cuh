// Keys by way of registers, for the kernel of rows64.cuh: all four warps of the loading warpgroup read keys and store
// them as the copy engine stores 16-bit keys. On their way fp8 keys become 16-bit, and in a cluster of two (kRangeCtas)
// each CTA loads half of a tile's tokens and stores them in both. A key is an address, so pages of any size and lists
// of slots are alike.
//
// Which part of a tile a lane has. A warp has 16 neighbouring tokens, a lane two of them, 8 apart, and of each column
// block the same quarter: 16 of 64 columns. Four lanes read a token's column block at once, and 8 lanes store to all
// banks.
//
//   token    warp * 16 + i * 8 + lane / 4   (i = 0, 1); in a cluster rank * 32 + warp * 8 + lane / 4
//   columns  lane % 4 * 16 ... + 15         of every column block; 16-bit keys: two vectors of 8
//
// Timeline of a tile. It is loaded in steps of one or two vectors a lane; registers hold the next kHalf + 1 of them, on
// their way or arrived, so that keys are stored as soon as their segments are given back:
//
//   wait kv_empty of the half that is first in turn
//   each of its segments: store it, arrive kv_full, load a later step to its registers
//   wait kv_empty of the rope segment, then likewise
//   rows of a later tile to the L2 cache, entries of the table for a still later one
//   wait kv_empty of the other half, then likewise
//
// What is stored by threads is read by tensor cores behind a fence, which is the consumers': here it would wait for all
// that a warp has on its way. What the partner stores, by st.async, kv_full counts in bytes.
//
// Records. The tensor cores' operands are fp16 for latents and bf16 for rope columns. Scales may be anything, and
// differ between tokens, so each tile has a unit, a power of two, in which its keys are stored: latents times their
// scale over the unit, rope columns over the unit. The consumers multiply scores and outputs by it.
//
// Queries are copied between work tiles, as they are.
#pragma once
#include <utility>

#include "../common/math.cuh"
#include "../common/sync.cuh"
#include "global.cuh"
#include "loader.cuh"
#include "wgmma.cuh"

namespace mla::sm90 {

// In place of keys that do not exist.
alignas(16) __device__ const unsigned char no_row[1152] = {};

// The product of two pairs of fp16 or of bf16.
template <typename Pair>
__device__ __forceinline__ uint32_t multiplied(uint32_t a, uint32_t b) {
    const Pair product = __hmul2(reinterpret_cast<const Pair&>(a), reinterpret_cast<const Pair&>(b));
    return reinterpret_cast<const uint32_t&>(product);
}

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
struct RegisterKeyLoader : KeyLoader<C, S> {
    using Base = KeyLoader<C, S>;
    using Base::p, Base::smem, Base::range, Base::lane, Base::policy;
    static constexpr bool kRecords = C::Layout::kIsRecord, kShared = C::kRangeCtas == 2;
    static constexpr int kFoundTokens = C::kTile / 4;       // of a tile, whose rows a warp finds
    static constexpr int kTokens = kShared ? 1 : 2;         // of a tile, that a lane has
    static constexpr int kParts = C::Layout::kFp8 ? 1 : 2;  // vectors of 16 B of a token's segment, that a lane has
    static constexpr int kLineBytes = 128;                  // of the L2 cache
    static constexpr int kQueryRows = 128 / 8;              // that are loaded at once
    static constexpr int kRopeVectors = C::kDimRope * C::Layout::kRopeElementBytes / 16;  // of a token
    // Steps of a tile: the segments of the half that is first in turn, the rope segment, those of the other half.
    static constexpr int kRopeSteps = kRecords ? 2 : 1;
    static constexpr int kOtherHalf = C::kHalf + kRopeSteps, kSteps = kOtherHalf + C::kHalf;
    static constexpr int kBuffers = C::kHalf + 1;
    using Vectors = uint4[kTokens * kParts];  // of a step
    static_assert(C::kTile == 64 && C::kSegmentColumnBlocks == 1 && C::kReleases == 3);
    static_assert(C::Layout::kTokenBytes <= sizeof(no_row));
    static_assert(kRopeSteps == 1 || kSteps % kBuffers == 0);

    // Where a step's vectors are held, and which step is next there: of the next tile unless it is a later one.
    static constexpr int buffer_of(int step) {
        return kRopeSteps == 2 ? step % kBuffers : step < kOtherHalf ? step : step - kOtherHalf;
    }
    static constexpr int step_after(int step) {
        if (kRopeSteps == 2) return (step + kBuffers) % kSteps;
        return step < C::kHalf ? step + kOtherHalf : step < kOtherHalf ? step : step - kOtherHalf;
    }

    Profiler<C::kProfile> profiler;
    const int thread = threadIdx.x % 128, warp = thread / 32, quarter = lane % 4, rank = blockIdx.x % C::kRangeCtas;
    uint32_t loaded = 0;  // tiles
    const int* table;     // entries of the work tile's request
    int token_end;        // of the work tile
    // Lanes l and l + 16 find the warp's token number l: an entry of the table, and a row of the cache a tile earlier.
    // In place of a token that does not exist, or that a list does not name, they find a row of zeros.
    int entry;
    const unsigned char* next_row;
    const unsigned char* rows[kTokens];  // of this lane's own tokens
    uint32_t named;                      // which of the tokens that the warp has found a list names
    Vectors buffers[kBuffers];
    // Of records, lane l has two scales of its token, lane l + 16 the other two.
    float2 scales;     // of the tile at hand or, once its unit is chosen, of the next one
    uint32_t factors;  // these scales in the unit of the tile at hand, in fp16
    float inverse;     // of the unit

    __device__ RegisterKeyLoader(const LoaderThread<C, S>& thread)
        : Base(thread), profiler(p.profile, 0, threadIdx.x == 0) {}

    __device__ uint32_t stage() const { return loaded % C::kStages; }
    __device__ int token_of(int tile_token) const {
        const int found = lane % kFoundTokens;
        return tile_token + (kShared ? found / 8 * 32 + warp * 8 + found % 8 : warp * kFoundTokens + found);
    }
    __device__ void look_up(int tile_token) {
        if (const int token = token_of(tile_token); token < token_end) entry = p.table.entry_of(table, token);
    }
    __device__ void find_next_row(int tile_token) {
        const int token = token_of(tile_token);
        next_row = no_row;
        if (token >= token_end || (C::kLists && entry < 0)) return;
        int page, row;
        if constexpr (C::kLists)
            p.table.page_size.split(entry, page, row);
        else
            p.table.locate(entry, token, page, row);
        next_row =
            reinterpret_cast<const unsigned char*>(row_in_cache<C>(p, page * p.page_stride + row * p.row_stride));
    }
    // Brings the row that this lane has found to the L2 cache.
    __device__ void prefetch() const {
        if (next_row == no_row || (kShared && lane % kFoundTokens / 8 != rank)) return;
#pragma unroll
        for (int line = 0; line < C::Layout::kTokenBytes; line += 2 * kLineBytes)
            if (const int at = line + lane / kFoundTokens * kLineBytes; at < C::Layout::kTokenBytes)
                prefetch_line(next_row + at);
    }
    // What the lane that finds a lane's i-th token has.
    template <typename T>
    __device__ T of_token(T found, int i, int other_lanes = 0) const {
        return __shfl_sync(~0u, found, (kShared ? rank : i) * 8 + lane / 4 + other_lanes);
    }
    __device__ void take_next_rows() {
#pragma unroll
        for (int i = 0; i < kTokens; ++i)
            rows[i] = reinterpret_cast<const unsigned char*>(of_token(reinterpret_cast<int64_t>(next_row), i));
        if constexpr (C::kLists) named = __ballot_sync(~0u, next_row != no_row);
        if constexpr (kRecords)
            scales = *reinterpret_cast<const float2*>(next_row + C::Layout::kScaleOffset + lane / kFoundTokens * 8);
    }

    // Of the 8 vectors of a token's segment, where that has so many, the one that a lane has in a part or step.
    // Neighbouring tokens begin with different ones, so that they are stored to different banks.
    __device__ int vector_of(int part) const { return quarter + (part + lane / 4) % 2 * 4; }
    // Rope columns may have fewer: then lanes load some again, but products with them are not computed.
    __device__ int rope_vector(int part) const { return (kRopeVectors > 4 ? vector_of(part) : quarter) % kRopeVectors; }
    // Starts loading a step of a tile in which half `first` is first in turn.
    template <int kStep>
    __device__ void load_step(int first) {
        constexpr bool kRope = kStep >= C::kHalf && kStep < kOtherHalf;
        const int segment = kStep < C::kHalf ? first * C::kHalf + kStep : (1 - first) * C::kHalf + kStep - kOtherHalf;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int vector = kRope ? rope_vector(kRecords ? kStep : part) : kParts == 2 ? vector_of(part) : quarter;
            const int offset = (kRope ? C::Layout::kRopeOffset : segment * kParts * 64) + vector * 16;
#pragma unroll
            for (int i = 0; i < kTokens; ++i) buffers[buffer_of(kStep)][i + part] = load_16(rows[i] + offset, policy);
        }
    }

    __device__ void wait_for_release(int release) const {
        smem.kv_empty[stage()][release].wait(loaded / C::kStages % 2 ^ 1);
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

    // Puts a vector of the lane's i-th token to its place in a segment, of both CTAs if they share keys.
    __device__ void put(int segment, int i, int vector, const uint4& words) const {
        const int group = kShared ? rank * 4 + warp : warp * kTokens + i;
        unsigned char* to = smem.kv[stage()] + segment * C::kSegmentBytes + group * C::kTokenGroupBytes +
                            vector_offset<C::kBlockBytes>(lane / 4, vector);
        *reinterpret_cast<uint4*>(to) = words;
        if constexpr (kShared)
            send_to_partner(reinterpret_cast<float4*>(to), reinterpret_cast<const float4&>(words),
                            smem.kv_full[stage()][segment]);
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
                const uint32_t two = of_token(factors, i, segment / C::kHalf * kFoundTokens);
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
        if (lane != 0) return;
        Barrier& full = smem.kv_full[stage()][segment];
        if (kShared && warp == 0)
            full.arrive_expect(C::kSegmentBytes / 2);  // by the partner
        else
            full.arrive();
    }
    // Stores a step, and begins to load the one that is next in its buffer.
    template <int kStep>
    __device__ void store_step(int first) {
        const Vectors& vectors = buffers[buffer_of(kStep)];
        constexpr bool kRope = kStep >= C::kHalf && kStep < kOtherHalf;
        constexpr int kSegmentOfHalf = kStep < C::kHalf ? kStep : kStep - kOtherHalf;
        const int segment =
            kRope ? C::kRopeSegment : (kStep < C::kHalf ? first : 1 - first) * C::kHalf + kSegmentOfHalf;
        if constexpr (!C::Layout::kFp8) {
#pragma unroll
            for (int part = 0; part < kParts; ++part)
                put(segment, 0, kRope ? rope_vector(part) : vector_of(part), vectors[part]);
        } else if constexpr (kRecords && kRope) {
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

    // Tells consumers which entries of a list name keys.
    __device__ void tell_named() const {
        if (lane != 0) return;
        auto* bytes = reinterpret_cast<uint8_t*>(smem.listed.words[stage()]);  // of 8 tokens each
#pragma unroll
        for (int i = 0; i < 2; ++i) bytes[kShared ? i * 4 + warp : warp * 2 + i] = named >> i * 8;
    }

    // The keys of a tile, whose first steps are in the buffers.
    __device__ void load_tile(int tile, int tile_token) {
        constexpr int kNextRows = kRopeSteps == 2 ? kSteps - kBuffers : C::kHalf;  // first step behind which they load
        const int first = tile % 2;
        if constexpr (kRecords) choose_unit();
        wait_for_release(first);
        if constexpr (C::kLists) tell_named();
        store_steps<0, C::kHalf>(first);
        wait_for_release(C::kRopeRelease);
        store_steps<C::kHalf, kNextRows>(first);
        take_next_rows();
        find_next_row(tile_token + 2 * C::kTile);
        prefetch();
        look_up(tile_token + 3 * C::kTile);
        store_steps<kNextRows, kOtherHalf>(first);
        wait_for_release(1 - first);
        store_steps<kOtherHalf, kSteps>(first);
        profiler.mark(Event::kLoadsIssued);
        ++loaded;
    }
    template <int... kStep>
    __device__ void load_first_steps(std::integer_sequence<int, kStep...>) {
        (load_step<kStep>(0), ...);
    }

    // Starts copying the queries of a work tile.
    __device__ void load_queries(const WorkTile& work, int work_index) const {
        smem.q_empty[0].wait(work_index % 2 ^ 1);
        const QueryLoader<C, S> queries(*this);
        auto& offsets = smem.offsets[offset_buffer(work_index)];
#pragma unroll 1
        for (int r = thread / 8; r < C::kRows; r += kQueryRows)
            queries.load_row(work, r, smem_address(smem.q[0]), offsets);
        if (work_index == 0 && thread == 0) smem.flag = read_flag(p, planned_cta<C>());
        smem.q_full[0].arrive();  // for the flag and the offsets
        smem.q_full[0].arrive_after_cp_async();
    }

    __device__ void run() {
        if constexpr (C::kLists) wait_for_predecessor();
        if constexpr (kShared) cluster_wait();  // the partner's barriers are initialized
        // Read again for each work tile, as there are no registers for it.
        WorkCursor<C> cursor(p, p.plans[planned_cta<C>()].range);
        WorkTile work;
        for (int work_index = 0; cursor.next(work); ++work_index) {
            table = p.table.row_of(work.request);
            token_end = work.token_end;
            int tile_token = work.token_begin;
            look_up(tile_token);
            find_next_row(tile_token);
            prefetch();
            look_up(tile_token + C::kTile);
            load_queries(work, work_index);
            take_next_rows();
            load_first_steps(std::make_integer_sequence<int, kBuffers>());
            find_next_row(tile_token + C::kTile);
            prefetch();
            look_up(tile_token + 2 * C::kTile);
#pragma unroll 1
            for (int tile = 0; tile_token < token_end; ++tile, tile_token += C::kTile) load_tile(tile, tile_token);
        }
    }
};

template <typename C, typename S>
__device__ __forceinline__ void run_loader(const LoaderThread<C, S>& thread, const BoxOf<C>& box) {
    if constexpr (C::kByRegisters)
        RegisterKeyLoader<C, S>(thread).run();
    else if (threadIdx.x / 32 >= thread.kKeyWarps)
        QueryLoader<C, S>(thread).run();
    else if constexpr (C::kTma)
        TmaKeyLoader<C, S>(thread, box).run();
    else
        GatherKeyLoader<C, S>(thread).run();
}

}  // namespace mla::sm90
