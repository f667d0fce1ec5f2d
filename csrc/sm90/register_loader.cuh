// Keys by way of registers, for the kernel of rows64.cuh: all four warps of the loading warpgroup read fp8 keys,
// convert them to 16 bits and store them as the copy engine stores 16-bit keys. A key is an address, so pages of any
// size and lists of slots are alike.
//
// Which part of a tile a lane has. A warp has 16 neighbouring tokens, a lane two of them, 8 apart, and of each column
// block the same quarter: 16 of 64 columns. Four lanes read a token's column block, 64 B, at once, and 8 lanes store to
// all banks.
//
//   token    warp * 16 + i * 8 + lane / 4   (i = 0, 1)
//   columns  lane % 4 * 16 ... + 15         of every column block
//
// Timeline of a tile. Registers hold what is loaded next, so that keys are stored as soon as their segments are given
// back. Loads begin only behind the fence that announces stores, which waits for loads, too:
//
//   wait kv_empty of the half that is first in turn and of the rope segment
//   store them, arrive kv_full of each segment
//   start loading the other half
//   rows of a later tile to the L2 cache, entries of the table for a still later one
//   wait kv_empty of the other half
//   store it, arrive kv_full of each segment
//   start loading the next tile's half that is first in turn, and its rope columns
//
// Queries are loaded, and converted in place, between work tiles.
#pragma once
#include "global.cuh"
#include "loader.cuh"
#include "wgmma.cuh"

namespace mla::sm90 {

// Four e4m3 as fp16, in their order.
__device__ __forceinline__ uint2 widened(uint32_t bytes) {
    uint2 halves;
#ifdef __CUDA_ARCH__
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}\n"
        : "=r"(halves.x), "=r"(halves.y)
        : "r"(bytes));
#else
    const __half2_raw first = __nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(bytes), __NV_E4M3);
    const __half2_raw second = __nv_cvt_fp8x2_to_halfraw2(static_cast<uint16_t>(bytes >> 16), __NV_E4M3);
    halves = {first.x | static_cast<uint32_t>(first.y) << 16, second.x | static_cast<uint32_t>(second.y) << 16};
#endif
    return halves;
}

// In place of keys that do not exist.
alignas(16) __device__ const unsigned char no_row[656] = {};

// What else the shared memory of a kernel with this loader has.
template <typename C>
struct Fp8Factors {
    float
        score_scales[C::Layout::kFp8 ? C::kRows : 1];  // what turns products with a row of queries into scores in log2
};

template <typename C, typename S>
struct RegisterKeyLoader : KeyLoader<C, S> {
    using Base = KeyLoader<C, S>;
    using Base::p, Base::smem, Base::range, Base::lane, Base::policy;
    static constexpr int kWarpTokens = C::kTile / 4;       // of a tile, that a warp has
    static constexpr int kTokens = 2;                      // of these, that a lane has
    static constexpr int kLineBytes = 128;                 // of the L2 cache
    static constexpr int kQueryRows = 128 / 8;             // that are loaded at once
    static constexpr int kRopeVectors = C::kDimRope / 16;  // of a token's rope columns
    using Vectors = uint4[kTokens];                        // of a column block of a lane's tokens
    static_assert(C::kTile == 64 && C::kSegmentColumnBlocks == 1 && C::kReleases == 3);

    const int thread = threadIdx.x % 128, warp = thread / 32, quarter = lane % 4;
    uint32_t loaded = 0;  // tiles
    const int* table;     // entries of the work tile's request
    int token_end;        // of the work tile
    // Lanes l and l + 16 find the warp's token number l: an entry of the table, and a row of the cache a tile earlier.
    // In place of a token that does not exist, or that a list does not name, they find a row of zeros.
    int entry;
    const unsigned char* next_row;
    const unsigned char* rows[kTokens];  // of this lane's own tokens
    Vectors latents[C::kHalf], rope;     // loaded, or on their way

    __device__ RegisterKeyLoader(const LoaderThread<C, S>& thread) : Base(thread) {}

    __device__ uint32_t stage() const { return loaded % C::kStages; }
    __device__ int token_of(int tile_token) const { return tile_token + warp * kWarpTokens + lane % kWarpTokens; }
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
        next_row = row_in_cache<C>(p, page * p.page_stride + row * p.row_stride);
    }
    // Brings the row that this lane has found to the L2 cache.
    __device__ void prefetch() const {
        if (next_row == no_row) return;
#pragma unroll
        for (int line = 0; line < C::Layout::kTokenBytes; line += 2 * kLineBytes)
            if (const int at = line + lane / kWarpTokens * kLineBytes; at < C::Layout::kTokenBytes)
                prefetch_line(next_row + at);
    }
    __device__ void take_next_rows() {
#pragma unroll
        for (int i = 0; i < kTokens; ++i)
            rows[i] = reinterpret_cast<const unsigned char*>(
                __shfl_sync(~0u, reinterpret_cast<int64_t>(next_row), i * 8 + lane / 4));
    }

    // Starts loading 16 bytes of each token.
    __device__ void load(Vectors& to, int offset) const {
#pragma unroll
        for (int i = 0; i < kTokens; ++i) to[i] = load_16(rows[i] + offset, policy);
    }
    __device__ void load_half(int half) {
#pragma unroll
        for (int i = 0; i < C::kHalf; ++i) load(latents[i], (half * C::kHalf + i) * 64 + quarter * 16);
    }
    // Lanes that have no rope columns load some again: products with them are not computed.
    __device__ void load_rope() { load(rope, C::Layout::kRopeOffset + quarter % kRopeVectors * 16); }

    __device__ void wait_for_release(int release) const {
        smem.kv_empty[stage()][release].wait(loaded / C::kStages % 2 ^ 1);
    }

    // Stores a segment of this warp's tokens.
    __device__ void store(int segment, const Vectors& vectors) const {
        const int row = lane / 4;
        unsigned char* to = smem.kv[stage()] + segment * C::kSegmentBytes + warp * kTokens * C::kTokenGroupBytes +
                            vector_offset<C::kBlockBytes>(row, quarter * 2);
        unsigned char* next = smem.kv[stage()] + segment * C::kSegmentBytes + warp * kTokens * C::kTokenGroupBytes +
                              vector_offset<C::kBlockBytes>(row, quarter * 2 + 1);
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
            const uint2 a = widened(vectors[i].x), b = widened(vectors[i].y);
            const uint2 c = widened(vectors[i].z), d = widened(vectors[i].w);
            *reinterpret_cast<uint4*>(to + i * C::kTokenGroupBytes) = make_uint4(a.x, a.y, b.x, b.y);
            *reinterpret_cast<uint4*>(next + i * C::kTokenGroupBytes) = make_uint4(c.x, c.y, d.x, d.y);
        }
    }
    // By the warp: what it has stored of segments is there.
    __device__ void announce(int segment, int count) const {
        fence_async_proxy();
        __syncwarp();  // one lane arrives for all
        if (lane < count) smem.kv_full[stage()][segment + lane].arrive();
    }
    // Two segments at a time: the consumers begin with the first ones, and fences take time.
    __device__ void store_half(int half) const {
#pragma unroll
        for (int i = 0; i < C::kHalf; ++i) {
            const int segment = half * C::kHalf + i;
            store(segment, latents[i]);
            if (i % 2) announce(segment - 1, 2);
        }
    }

    // Tells consumers which entries of a list name keys.
    __device__ void tell_named() const {
        const int own = (rows[0] != no_row) | (rows[1] != no_row) << 1;
        // Lane l < 16 votes for the warp's token l.
        const uint32_t named = __ballot_sync(~0u, __shfl_sync(~0u, own, lane % 8 * 4) >> lane / 8 % 2 & 1);
        if (lane == 0) reinterpret_cast<uint16_t*>(smem.listed.words[stage()])[warp] = named;
    }

    // The keys of a tile. Registers hold its rope columns and the half that is first in turn; the next tile's rows have
    // been found.
    __device__ void load_tile(int tile, int tile_token) {
        const int first = tile % 2;  // half of the segments
        wait_for_release(first);
        if constexpr (C::kLists) tell_named();
        store_half(first);
        wait_for_release(C::kRopeRelease);
        store(C::kRopeSegment, rope);
        announce(C::kRopeSegment, 1);
        load_half(1 - first);
        take_next_rows();
        find_next_row(tile_token + 2 * C::kTile);
        prefetch();
        look_up(tile_token + 3 * C::kTile);
        wait_for_release(1 - first);
        store_half(1 - first);
        load_half(1 - first);  // the next tile's first half in turn
        load_rope();
        ++loaded;
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
    }

    // Converts the queries that this thread has copied: 8 threads a row, of which each has a vector of 16 B of every
    // column block.
    __device__ void convert_queries() const {
        using Element = typename C::Element;
        cp_async_commit();
        cp_async_wait<0>();
        const float scale = p.scale_log2 * *p.kv_scale;
        const int thread = pinned(this->thread);  // no registers to keep addresses in
#pragma unroll 1
        for (int r = thread / 8; r < C::kRows; r += kQueryRows) {
            auto* row = reinterpret_cast<uint4*>(smem.q[0] + vector_offset<128>(r % 8, thread % 8) + r / 8 * 1024);
            constexpr int kStride = C::kQueryColumnBlockBytes / 16;
            float most = 0.f;
#pragma unroll 3
            for (int block = 0; block < C::kColumnBlocks; ++block) {
                const uint4 words = row[block * kStride];
                most = fmaxf(most, fmaxf(largest_of<Element>(words.x), largest_of<Element>(words.y)));
                most = fmaxf(most, fmaxf(largest_of<Element>(words.z), largest_of<Element>(words.w)));
            }
#pragma unroll
            for (int distance = 1; distance < 8; distance *= 2)
                most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
            const QueryScale factor = QueryScale::of(most);
            if (thread % 8 == 0) smem.fp8.score_scales[r] = scale * factor.inverse;
#pragma unroll 3
            for (int block = 0; block < C::kColumnBlocks; ++block) {
                uint4 words = row[block * kStride];
                for (uint32_t* word : {&words.x, &words.y, &words.z, &words.w}) {
                    const float2 pair = floats_of<Element>(*word);
                    *word = pack<__half>(pair.x * factor.factor, pair.y * factor.factor);
                }
                row[block * kStride] = words;
            }
        }
        smem.q_full[0].arrive();
    }

    __device__ void run() {
        if constexpr (C::kLists) wait_for_predecessor();
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
            find_next_row(tile_token + C::kTile);
            prefetch();
            look_up(tile_token + 2 * C::kTile);
            convert_queries();
            load_half(0);
            load_rope();
#pragma unroll 1
            for (int tile = 0; tile_token < token_end; ++tile, tile_token += C::kTile) load_tile(tile, tile_token);
        }
    }
};

template <typename C, typename S>
__device__ __forceinline__ void run_loader(const LoaderThread<C, S>& thread, const KeyBox& box) {
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
