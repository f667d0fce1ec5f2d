// Keys token by token, for the kernel of rows64.cuh: all four warps of the loading warpgroup load, each 16 neighbouring
// tokens of a tile. A key is an address, so pages of any size and lists of slots are alike.
//
// Two loaders: 16-bit keys are copied to shared memory, below; fp8 keys become 16-bit on their way
// (register_loader.cuh). What both share finds the tokens:
//
//   entries of the page table or of the list   three tiles ahead
//   rows of the cache                          two tiles ahead; those of fp8 keys also go to the L2 cache
//   keys, segment by segment                   when the consumers have given back their place
//
// Lanes l and l + 16 find the warp's token number l. Others load it: kLanes lanes a token, with the same 16-byte
// vector, or two, of each of its column blocks, so that its addresses differ by constants.
//
// What threads store or copy is read by tensor cores behind a fence, which is the consumers': here it would wait for
// all that a warp has on its way.
//
// Queries are copied between work tiles, as they are.
#pragma once
#include "../common/sync.cuh"
#include "global.cuh"
#include "loader.cuh"

namespace mla::sm90 {

// In place of keys that do not exist.
alignas(16) __device__ const unsigned char no_row[1152] = {};

template <typename C, typename S, int kLanes>
struct TokenKeyLoader : KeyLoader<C, S> {
    using Base = KeyLoader<C, S>;
    using Base::p, Base::smem, Base::range, Base::lane;
    static constexpr int kWarpTokens = C::kTile / 4;  // of a tile
    static constexpr int kAtOnce = 32 / kLanes;       // tokens that a warp loads with one instruction
    static constexpr int kTokens = kWarpTokens / kAtOnce;
    static constexpr int kLineBytes = 128;                                                // of the L2 cache
    static constexpr int kQueryRows = 128 / 8;                                            // that are loaded at once
    static constexpr int kRopeVectors = C::kDimRope * C::Layout::kRopeElementBytes / 16;  // of a token
    static_assert(C::kTile == 64 && C::kSegmentColumnBlocks == 1 && C::kReleases == 3 && C::kRangeCtas == 1);
    static_assert(C::Layout::kTokenBytes <= sizeof(no_row));

    Profiler<C::kProfile> profiler;
    const int thread = threadIdx.x % 128, warp = thread / 32;
    uint32_t loaded = 0;  // tiles
    const int* table;     // entries of the work tile's request
    int token_end;        // of the work tile
    // Of the token that this lane finds. In place of one that does not exist, or that a list does not name, it finds a
    // row of zeros.
    int entry;
    const unsigned char* next_row;
    const unsigned char* rows[kTokens];  // of the tokens that this lane loads
    uint32_t named;                      // which of the tokens that the warp has found a list names

    __device__ TokenKeyLoader(const LoaderThread<C, S>& thread)
        : Base(thread), profiler(p.profile, 0, threadIdx.x == 0) {}

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
        next_row =
            reinterpret_cast<const unsigned char*>(row_in_cache<C>(p, page * p.page_stride + row * p.row_stride));
    }
    // Brings the row that this lane has found to the L2 cache. Copies became slower with that: enough of them are on
    // their way.
    __device__ void prefetch() const {
        if constexpr (C::Layout::kFp8) {
            if (next_row == no_row) return;
#pragma unroll
            for (int line = 0; line < C::Layout::kTokenBytes; line += 2 * kLineBytes)
                if (const int at = line + lane / kWarpTokens * kLineBytes; at < C::Layout::kTokenBytes)
                    prefetch_line(next_row + at);
        }
    }
    // What the lane that finds this lane's i-th token has.
    template <typename T>
    __device__ T of_token(T found, int i, int other_lanes = 0) const {
        return __shfl_sync(~0u, found, i * kAtOnce + lane / kLanes + other_lanes);
    }
    __device__ void take_next_rows() {
#pragma unroll
        for (int i = 0; i < kTokens; ++i)
            rows[i] = reinterpret_cast<const unsigned char*>(of_token(reinterpret_cast<int64_t>(next_row), i));
        if constexpr (C::kLists) named = __ballot_sync(~0u, next_row != no_row);
    }
    // Of a tile whose entry this lane has looked up; looks up the next tile's.
    __device__ void find_rows(int tile_token) {
        find_next_row(tile_token);
        prefetch();
        look_up(tile_token + C::kTile);
    }

    __device__ void wait_for_release(int release) const {
        smem.kv_empty[stage()][release].wait(loaded / C::kStages % 2 ^ 1);
    }

    // Tells consumers which entries of a list name keys.
    __device__ void tell_named() const {
        if (lane == 0) reinterpret_cast<uint16_t*>(smem.listed.words[stage()])[warp] = named;
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

    // For each work tile calls begin(), when the rows of its first tile are known, and for each of its tiles
    // load(number, first token).
    template <typename Begin, typename Load>
    __device__ void for_each_tile(Begin begin, Load load) {
        if constexpr (C::kLists) wait_for_predecessor();
        // Read again for each work tile, as there are no registers for it.
        WorkCursor<C> cursor(p, p.plans[planned_cta<C>()].range);
        WorkTile work;
        for (int work_index = 0; cursor.next(work); ++work_index) {
            table = p.table.row_of(work.request);
            token_end = work.token_end;
            int tile_token = work.token_begin;
            look_up(tile_token);
            find_rows(tile_token);
            load_queries(work, work_index);
            begin();
            find_rows(tile_token + C::kTile);
#pragma unroll 1
            for (int tile = 0; tile_token < token_end; ++tile, tile_token += C::kTile) {
                load(tile, tile_token);
                profiler.mark(Event::kLoadsIssued);
                ++loaded;
            }
        }
    }
};

// 16-bit keys, by cp.async. A lane copies one of the 8 vectors of each column block, of four tokens.
//
// Timeline of a tile:
//   wait kv_empty of the half that is first in turn, copy its segments
//   wait kv_empty of the rope segment, copy it
//   wait kv_empty of the other half, copy its segments; kv_full[segment] counts the threads whose copies have arrived
//   find the rows of a later tile
template <typename C, typename S>
struct TokenKeyCopier : TokenKeyLoader<C, S, 8> {
    using Base = TokenKeyLoader<C, S, 8>;
    using Base::kTokens, Base::kRopeVectors;
    using Base::smem, Base::lane, Base::warp, Base::policy, Base::rows, Base::stage, Base::wait_for_release;
    // A thread for its copies, a warp for `listed`.
    static constexpr int kKeyArrivals = 128 + (C::kLists ? 4 : 0);

    __device__ TokenKeyCopier(const LoaderThread<C, S>& thread) : Base(thread) {}

    // Copies `kSegments` segments from `segment` on.
    template <int kSegments>
    __device__ void copy(int segment) const {
        const int vector = lane % 8, token = lane / 8;
        const uint32_t to =
            smem_address(smem.kv[stage()]) + segment * C::kSegmentBytes + warp * 2 * C::kTokenGroupBytes;
        // Tokens of even and of odd i lie in different halves of a group of 8.
        const uint32_t places[2] = {to + vector_offset<128>(token, vector), to + vector_offset<128>(token + 4, vector)};
        const bool exists = segment != C::kRopeSegment || vector < kRopeVectors;
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
            if (exists) {
#pragma unroll
                for (int i = 0; i < kTokens; ++i) {
                    const uint32_t place = places[i % 2] + s * C::kSegmentBytes + i / 2 * C::kTokenGroupBytes;
                    const auto* source = rows[i] + segment * 128 + vector * 16 + s * 128;
                    if constexpr (C::kLists)  // without a policy: other requests' lists may name the same keys
                        cp_async_16(place, source, true);
                    else
                        cp_async_16(place, source, policy);
                }
            }
            Barrier& full = smem.kv_full[stage()][segment + s];
            if (C::kLists && lane == 0) full.arrive();
            full.arrive_after_cp_async();
        }
    }

    __device__ void run() {
        Base::for_each_tile([&] { Base::take_next_rows(); },
                            [&](int tile, int tile_token) {
                                const int first = tile % 2;
                                wait_for_release(first);
                                if constexpr (C::kLists) Base::tell_named();
                                copy<C::kHalf>(first * C::kHalf);
                                wait_for_release(C::kRopeRelease);
                                copy<1>(C::kRopeSegment);
                                wait_for_release(1 - first);
                                copy<C::kHalf>((1 - first) * C::kHalf);
                                Base::take_next_rows();
                                Base::find_rows(tile_token + 2 * C::kTile);
                            });
    }
};

}  // namespace mla::sm90
