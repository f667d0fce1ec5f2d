// Loads keys token by token, for the kernels with m-blocks of 64 rows (many_rows, many_rows_fp8). All four
// warps of the loading warpgroup load, each 16 neighbouring tokens of a tile. A key is found by its address, so pages
// of any size and lists of slots are treated alike. How far ahead of the current tile each step runs:
//
//   entries of the page table or of the list   three tiles ahead
//   rows of the cache                          two tiles ahead
//   keys, by segments or as whole records      when the consumers have released their place
//
// Lanes l and l + 16 find the warp's token number l. Other lanes copy it: kLanes lanes per token, each the same 16-byte
// vector of every column block, so that a lane's addresses differ by constants.
//
// Except for keys of records, tensor cores read what threads copy, so a fence is needed. Consumers issue it: in the
// loader, it would wait for everything that a warp has in flight.
//
// Queries are copied between work tiles, without conversion.
#pragma once
#include "copy.cuh"
#include "decode/hopper/profile.cuh"
#include "queries.cuh"

namespace mla::hopper {

// kv_full counts the threads whose copies have arrived.
//
// Timeline of a tile, if segments are released in parts (C::kReleases):
//   wait kv_empty of the half that is first in turn, copy its segments
//   wait kv_empty of the rope segment, if there is one, copy it
//   wait kv_empty of the other half, copy its segments
template <typename C>
struct TokenKeyLoader {
    // A thread for its copies, a warp for `unnamed`.
    static constexpr int kKeyArrivals = 128 + 4;
    static constexpr int kLanes = C::kBlockBytes / 16;
    static constexpr int kWarpTokens = C::kTile / 4;  // of a tile
    static constexpr int kAtOnce = 32 / kLanes;       // tokens that a warp copies with one instruction
    static constexpr int kTokens = kWarpTokens / kAtOnce;
    static constexpr int kRopeVectors = C::kDimRope * C::Layout::kRopeElementBytes / 16;  // of a token
    static constexpr int kRopeSegment = C::kRopeSegment;
    static_assert(C::kTile == 64 && C::kSegmentColumnBlocks == 1 && C::kRangeCtas == 1);
    static_assert(C::Layout::kTokenBytes <= sizeof(no_row));

    const LoaderThread<C>& t;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint64_t policy = cache_policy(t.range.same_m_block);
    Profiler<C::kProfile> profiler;
    uint32_t loaded = 0;  // tiles
    const int* table;     // entries of the work tile's request
    int token_end;        // of the work tile
    // Of the token that this lane finds. For a token that does not exist or has no key, next_row is a row of zeros.
    int entry;
    const unsigned char* next_row;
    const unsigned char* rows[kTokens];  // of the tokens that this lane copies
    uint32_t unnamed;                    // which of the warp's tokens have no key

    __device__ TokenKeyLoader(const LoaderThread<C>& t) : t(t), profiler(t.p.profile, 0, threadIdx.x == 0) {}

    __device__ uint32_t stage() const { return loaded % C::kStages; }
    __device__ int token_of(int tile_token) const { return tile_token + warp * kWarpTokens + lane % kWarpTokens; }
    __device__ void look_up(int tile_token) {
        if (const int token = token_of(tile_token); token < token_end) entry = t.p.table.entry_of(table, token);
    }
    __device__ void find_next_row(int tile_token) {
        const int token = token_of(tile_token);
        next_row = no_row;
        if (token >= token_end) return;
        const int64_t offset = offset_in_cache<C>(t.p, entry, token);
        if (offset >= 0) next_row = reinterpret_cast<const unsigned char*>(row_in_cache<C>(t.p, offset));
    }
    // Of the tile that begins at `tile_token`.
    __device__ void take_next_rows(int tile_token) {
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
            const auto found = reinterpret_cast<int64_t>(next_row);  // by the lane that finds this lane's i-th token
            rows[i] = reinterpret_cast<const unsigned char*>(__shfl_sync(~0u, found, i * kAtOnce + lane / kLanes));
        }
        unnamed = __ballot_sync(~0u, next_row == no_row && (C::kLists || token_of(tile_token) < token_end));
    }
    // Finds this lane's row of a tile, whose entry it has looked up; looks up the next tile's entry.
    __device__ void find_rows(int tile_token) {
        find_next_row(tile_token);
        look_up(tile_token + C::kTile);
    }

    __device__ void wait_for_release(int release) const {
        t.rings.kv_empty[stage()][release].wait(loaded / C::kStages % 2 ^ 1);
    }

    // Tells consumers which tokens have no keys.
    __device__ void tell_unnamed() const {
        if (lane == 0) reinterpret_cast<uint16_t*>(t.rings.unnamed.words[stage()])[warp] = unnamed;
    }

    // Starts copying the queries of a work tile.
    __device__ void load_queries(const WorkTile& work, int work_index) const {
        t.rings.q_empty[0].wait(work_index % 2 ^ 1);
        const QueryLoader<C> queries(t);
        auto& offsets = t.rings.offsets[offset_buffer(work_index)];
#pragma unroll 1
        for (int r = queries.thread / 8; r < C::kRows; r += queries.kRowsAtOnce)
            queries.load_row(work, r, smem_address(t.rings.q[0]), offsets);
        if (work_index == 0 && queries.thread == 0) t.rings.flag = read_flag(t.p, planned_cta<C>());
        t.rings.q_full[0].arrive();  // for the flag and the offsets
        t.rings.q_full[0].arrive_after_cp_async();
    }

    __device__ void announce(int segment) const {
        Barrier& full = t.rings.kv_full[stage()][C::full_barrier_of(segment)];
        if (lane == 0) full.arrive();
        full.arrive_after_cp_async();
    }

    // Copies `kSegments` segments, those of a barrier, from `segment` on.
    template <int kSegments>
    __device__ void copy(int segment) const {
        constexpr int kAlike = 8 / kAtOnce;  // tokens i and i + kAlike have the same place in their groups of 8
        const int vector = lane % kLanes, token = lane / kLanes;
        const uint32_t to =
            smem_address(t.rings.kv[stage()]) + segment * C::kSegmentBytes + warp * 2 * C::kTokenGroupBytes;
        uint32_t places[kAlike];
#pragma unroll
        for (int i = 0; i < kAlike; ++i) places[i] = to + vector_offset<C::kBlockBytes>(token + i * kAtOnce, vector);
        const bool exists = segment != kRopeSegment || vector < kRopeVectors;
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
            if (exists) {
#pragma unroll
                for (int i = 0; i < kTokens; ++i)
                    copy_16<C>(places[i % kAlike] + s * C::kSegmentBytes + i / kAlike * C::kTokenGroupBytes,
                               rows[i] + (segment + s) * C::kBlockBytes + vector * 16, policy);
            }
        }
        announce(segment);
    }

    // Loads a tile of records, whose rows are known.
    __device__ void load_records() const {
        wait_for_release(0);
        tell_unnamed();
#pragma unroll
        for (int i = 0; i < kTokens; ++i)
            copy_record<C>(smem_address(t.rings.kv[stage()]), warp * kWarpTokens + i * kAtOnce + lane / kLanes, rows[i],
                           policy);
        announce(0);
    }

    // Loads a tile, the `tile`-th of its work tile, whose rows are known.
    __device__ void load(int tile) const {
        constexpr int kHalf = kRopeSegment / 2;
        const int first = C::kReleases > 1 ? tile % 2 : 0;
        wait_for_release(first);
        tell_unnamed();
        copy<kHalf>(first * kHalf);
        if constexpr (C::kReleases == 3) wait_for_release(C::kRopeRelease);
        if constexpr (C::kDimRope > 0) copy<1>(kRopeSegment);
        if constexpr (C::kReleases > 1) wait_for_release(1 - first);
        copy<kHalf>((1 - first) * kHalf);
    }

    __device__ void run() {
        if constexpr (C::kLists) wait_for_predecessor();
        WorkCursor<C> cursor(t.p, t.range_to_walk());
        WorkTile work;
        for (int work_index = 0; cursor.next(work); ++work_index) {
            table = t.p.table.row_of(work.request);
            token_end = work.token_end;
            int tile_token = work.token_begin;
            look_up(tile_token);
            find_rows(tile_token);
            load_queries(work, work_index);
            take_next_rows(tile_token);
            find_rows(tile_token + C::kTile);
#pragma unroll 1
            for (int tile = 0; tile_token < token_end; ++tile, tile_token += C::kTile) {
                if constexpr (C::Layout::kHasTail)
                    load_records();
                else
                    load(tile);
                profiler.mark(Event::kLoadsIssued);
                take_next_rows(tile_token + C::kTile);
                find_rows(tile_token + 2 * C::kTile);
                ++loaded;
            }
        }
    }
};

}  // namespace mla::hopper
