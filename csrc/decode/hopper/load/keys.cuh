// The loading warpgroup loads keys into a ring of stages and each work tile's queries, and writes output offsets.
//
// Pages of a multiple of 8 tokens: warp 0 loads keys by TMA, warps 1-3 load queries.
// Smaller pages and lists of slots: warps 0-2 copy keys row by row with cp.async; each takes a third of the column
// blocks, or every third group of records. Warp 3 loads queries.
// In many_rows and many_rows_fp8, all four warps load small pages, lists and queries (token_keys.cuh). loaders.cuh
// selects the loader of a kernel.
//
//   key loader                                           query loader
//   ---------------------------------------------------  ---------------------------------------------------------
//   prefetch the first keys to the L2 cache (not those   compute the addresses of its first row
//   of lists)
//   wait for the predecessor kernel                      wait for the predecessor kernel
//   load the first stages, up to half of the ring        copy the queries of work tile 0, write its output offsets
//                                                        read this CTA's flag
//   wait q_full[0]                                  <--  arrive q_full[0]
//   for each later stage, across all work tiles:         for each later work tile:
//     wait kv_empty[stage][release] <-- consumers          wait q_empty[buffer]              <-- consumers
//     load KV tile                                         copy queries, write output offsets
//     arrive kv_full[stage] --> consumers                  arrive q_full[buffer]              --> consumers
//     look up the page table for later stages
//
// The kernel's configuration C and shared memory S fix the layout:
//   C::kTile                 tokens of a stage
//   C::Layout                of the cache (numbers/cache_format.cuh)
//   C::kBlockBytes           bytes of a column block, per token: 128 (64 columns of 16 bits, or 128 of a record) or 64
//                            (64 columns of e4m3). It has kBlockColumns columns
//   C::kKeyColumnBlocks      column blocks of a token; of a record, without the tail
//   C::kQueryColumnBlocks    column blocks of a query row, 64 columns each
//   C::kLists                keys are named by a list of slots. Each layer has its own list, so it is read only after
//                            the wait for the predecessor
//   C::kByTokens             all warps load token by token (token_keys.cuh)
//   C::kSlotStride           which of the first tokens the planner looks up: every 8th (8: TMA), each (1), none (0)
//   C::kRangeCtas            2: the CTAs of a cluster have the same ranges. Each loads every other segment for both,
//                            once the consumers of both have released it
//   C::kReleases             the number of parts in which consumers release a stage: 1 (the whole stage), or 3, or 2
//                            without rotary columns
//   C::release_of(segment)   the part that the segment belongs to
//   C::segment_in_turn(t, i) the i-th segment to load of a work tile's t-th tile: first the kFirstRelease segments of
//                            one part, then the one segment of another if there are three, then those of the last
//   C::kPrefetchTiles        how many tiles ahead of its load a tile is prefetched to the L2 cache; 0: no prefetch.
//                            Only for requests with one m-block
//   S::kv[kStages]           kSegments segments of kSegmentColumnBlocks column blocks; each segment in groups of 8
//                            tokens, [column block][8][kBlockBytes], swizzled by kBlockBytes
//   S::q[kQueryBuffers]      [column block][kRows][128 B], swizzled by 128 B
//   S::offsets               see OutputOffsets
//   S::flag                  this CTA's flag as it was when the launch began (schedule/splits.cuh)
//   S::unnamed               see UnnamedTokens
//   S::kv_full[kStages][kFullBarriers], kv_empty[kStages][kReleases], q_full[kQueryBuffers], q_empty[kQueryBuffers];
//                            a segment's barrier is kv_full[stage][C::full_barrier_of(segment)]
#pragma once
#include <cuda.h>

#include "decode/hopper/profile.cuh"
#include "numbers/cache_format.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/descriptor.cuh"
#include "ptx/tma.cuh"
#include "queries.cuh"
#include "schedule/params.cuh"
#include "schedule/splits.cuh"

namespace mla::hopper {

// The cache as TMA sees it. A box covers `groups` groups of 8 tokens of one page: all column blocks of a segment if
// rows are whole column blocks; otherwise one column block, where columns past the row's end read as zero.
struct KeyBox {
    CUtensorMap map;
    int groups;  // a power of two
};
// For records, `map` covers the e4m3 columns and `tails` the bytes after them, in boxes of equally many tokens.
struct RecordBox : KeyBox {
    CUtensorMap tails;
};
template <typename C>
using BoxOf = std::conditional_t<C::kTma && C::Layout::kIsRecord, RecordBox, KeyBox>;

// Groups of the largest box that divides both stages and pages evenly.
template <typename C>
constexpr int box_groups(int page_size) {
    static_assert(kPlanTile % C::kTile == 0);  // work tiles begin where stages do
    int groups = 1;
    while (C::kDim % 64 == 0 && groups < C::kTile / 8 && page_size % (groups * 16) == 0) groups *= 2;
    return groups;
}

// With records, the last segment of a stage holds the tails, [token][kTailBytes], and the others the e4m3 columns.
template <typename C>
__device__ constexpr bool has_tails(int segment) {
    return C::Layout::kIsRecord && segment == C::kRopeSegment;
}
template <typename C>
constexpr int kTailGroupBytes = 8 * C::Layout::kTailBytes;

// Offset in a stage of the column block that contains a column, for the first group of tokens.
template <typename C>
__device__ constexpr uint32_t column_block_offset(uint32_t column) {
    const uint32_t column_block = column / C::kBlockColumns;
    return column_block / C::kSegmentColumnBlocks * C::kSegmentBytes +
           column_block % C::kSegmentColumnBlocks * (8 * C::kBlockBytes);
}
// Offset of the column within that column block, for the first token.
template <typename C>
__device__ constexpr uint32_t offset_in_block(uint32_t column) {
    return column % C::kBlockColumns * C::Layout::kElementBytes;
}
// `place` is the address of a 16-byte vector among a token's first 64 columns; `columns` is a multiple of 64. Returns
// the address of the vector `columns` columns further on. In a record's column block, a step of 64 columns flips bit 6
// of the swizzled address: hence the exclusive or.
template <typename C>
__device__ constexpr uint32_t vector_further_on(uint32_t place, uint32_t columns) {
    return (place ^ offset_in_block<C>(columns)) + column_block_offset<C>(columns);
}
// Tokens of each stage whose entry in the page table or the list names no key, because it lies outside of the cache.
// The stage holds zeros for them, and their scores are masked. With TMA, a bit for each group of 8 tokens, by the lane
// that expects the bytes of a stage's first segment; otherwise a bit for each token. With lists, tokens past the last
// one count as unnamed.
template <typename C>
struct UnnamedTokens {
    using Bits = std::conditional_t<C::kTma, uint32_t, uint64_t>;
    alignas(8) uint32_t words[C::kStages][C::kTma ? 1 : 2];
    static_assert(C::kTile == 64);

    // Of the whole stage, or of a warp's 16 tokens.
    __device__ Bits of(int stage) const { return reinterpret_cast<const Bits&>(words[stage]); }
    __device__ uint32_t of(int stage, int warp) const {
        if constexpr (C::kTma) return words[stage][0] >> warp * 2 & 0b11;
        return reinterpret_cast<const uint16_t*>(words[stage])[warp];
    }

    // A bit for each token.
    static __device__ uint64_t tokens(Bits bits) {
        if constexpr (!C::kTma) return bits;
        return static_cast<uint64_t>(tokens_of_half(bits >> 4)) << 32 | tokens_of_half(bits & 0xf);
    }
    static __device__ uint32_t tokens_of_half(uint32_t bits) {
        return C::kTma ? (bits * 0x00204081 & 0x01010101) * 0xff : bits;  // bit i becomes byte i
    }
};

// The swizzle of keys in shared memory.
template <typename C>
constexpr Swizzle kKeySwizzle = C::kBlockBytes == 64 ? Swizzle::k64B : Swizzle::k128B;

// Address in the cache, `offset` elements from the start of the caller's tensor.
template <typename C>
__device__ const auto* row_in_cache(const DecodeParams& p, int64_t offset) {
    return static_cast<const std::conditional_t<C::Layout::kElementBytes == 1, uint8_t, uint16_t>*>(p.cache) + offset;
}

// Copies 16 bytes of the cache; with a list, writes zeros unless the key `exists`. Keys of a list have no cache policy,
// because other requests' lists may name them, too.
template <typename C>
__device__ void copy_16(uint32_t destination, const void* source, uint64_t policy, bool exists = true) {
    if constexpr (C::kLists)
        cp_async_16_or_zero(destination, source, exists);
    else
        cp_async_16(destination, source, policy);
}

// A row of zeros, read in place of keys that do not exist.
alignas(16) __device__ const unsigned char no_row[1152] = {};

// By 8 neighbouring lanes: copies a token's record to its places in a stage. Records are not aligned to cache lines
// (128 bytes). Each instruction copies one line's part of the record, so a lane copies every eighth vector.
template <typename C>
__device__ void copy_record(uint32_t stage, uint32_t token, const unsigned char* record, uint64_t policy) {
    constexpr int kVectors = C::Layout::kTokenBytes / 16, kLines = (kVectors + 7 + 7) / 8;
    const int first = threadIdx.x % 8 - reinterpret_cast<uintptr_t>(record) / 16 % 8;  // in the record's first line
    const unsigned char* from = record + first * 16;
    const uint32_t row = stage + token / 8 * C::kTokenGroupBytes + vector_offset<128>(token % 8, first & 7);
    const uint32_t tail = stage + C::kRopeSegment * C::kSegmentBytes + token * C::Layout::kTailBytes + (first & 7) * 16;
    auto place = [&](int block) {
        return block < C::Layout::kScales ? row + column_block_offset<C>(block * C::kBlockColumns)
                                          : tail + (block - C::Layout::kScales) * C::kBlockBytes;
    };
#pragma unroll
    for (int line = 0; line < kLines; ++line) {
        const int vector = first + line * 8;
        if ((line == 0 && vector < 0) || (line >= kVectors / 8 && vector >= kVectors)) continue;
        copy_16<C>(first < 0 ? place(line - 1) : place(line), from + line * 128, policy);
    }
}

// If the first work tile has at least this many keys, more than its first stage is prefetched while the predecessor
// ends. Otherwise, usually all CTAs still take part in the predecessor's combine, which this would disturb.
constexpr int kLongWorkTile = 768;

// What TmaKeyLoader and GatherKeyLoader share.
template <typename C, typename S>
struct KeyLoader : LoaderThread<C, S> {
    using Base = LoaderThread<C, S>;
    using Base::p, Base::smem, Base::range;

    const int lane = threadIdx.x % 32;
    const uint64_t policy = cache_policy(range.same_m_block);
    PipelineState<C::kStages> ring;
    bool first_ring = true;  // until the queries of the first work tile have arrived

    __device__ KeyLoader(const Base& thread) : Base(thread) {}

    // How many keys the first work tile has. The planner has looked up kPlannedSlots of them, every C::kSlotStride-th.
    __device__ int first_keys() const {
        const bool cut = range.request == range.end_request && range.m_block == range.end_m_block;
        const int keys =
            visible_keys<C>(p.shard, range.seq_len, range.keys, range.query_len, range.m_block, p.num_heads, p.causal);
        return (cut ? min(range.end_tile * kPlanTile, keys) : keys) - range.tile * kPlanTile;
    }
    // How many of these keys are prefetched (with small pages, at most 96).
    __device__ int prefetched_keys() const {
        return min(first_keys(), first_keys() < kLongWorkTile ? C::kTile : 2 * C::kTile);
    }

    // Waits until a release's segments may be loaded. If CTAs share keys, this waits for the consumers of both. It
    // reads nothing that the partner wrote, so the wait need not acquire at cluster scope. The second half of the first
    // ring also waits for the first queries, which would otherwise arrive late, after a whole ring of keys.
    __device__ void wait_for_release(int release) {
        smem.kv_empty[ring.stage][release].wait(ring.phase ^ 1);
        if (!first_ring || ring.stage < C::kStages / 2) return;
        first_ring = false;
        smem.q_full[0].wait(0);
    }
};

// One warp loads keys by TMA. It looks up a window of 32 groups of 8 tokens at a time, one per lane; one lane issues
// the boxes of a stage. The planner has looked up the first window, so the first keys are requested at once.
template <typename C, typename S>
struct TmaKeyLoader : KeyLoader<C, S> {
    using Base = KeyLoader<C, S>;
    using Base::first_keys, Base::prefetched_keys;
    using Base::p, Base::smem, Base::range, Base::planned_slot, Base::lane, Base::policy, Base::ring;
    static constexpr int kGroups = C::kTile / 8, kWindowStages = 32 / kGroups;
    static constexpr int kKeyArrivals = 1;  // at each kv_full

    // Where this lane's group of a window lies in the cache. Outside of it, where the copy engine reads zeros, if the
    // page is kNoPage.
    struct CachePlace {
        int page, row;
    };
    static constexpr int kNoPage = -1;

    const BoxOf<C>& box;
    const bool issues = elect_one();
    const int cluster_cta = blockIdx.x % C::kRangeCtas;
    Profiler<C::kProfile> profiler;

    __device__ TmaKeyLoader(const LoaderThread<C, S>& thread, const BoxOf<C>& box)
        : Base(thread), box(box), profiler(p.profile, 0, lane == 0) {}

    // Groups to load for `keys` keys of a stage. Boxes are loaded whole; tokens past the last key are masked.
    __device__ int groups_of(int keys) const {
        const int tokens = box.groups * 8;
        return ((keys + tokens - 1) & -tokens) / 8;
    }

    __device__ int page_of(int page) const { return static_cast<uint32_t>(page) < p.num_pages ? page : kNoPage; }
    // Which groups of a tile have no page. The tile is number `window_stage` of the window.
    __device__ uint32_t unnamed_groups(const CachePlace& place, int window_stage) const {
        constexpr uint32_t kAll = (1 << kGroups) - 1;
        uint32_t unnamed = __ballot_sync(~0u, place.page == kNoPage) >> window_stage * kGroups & kAll;
        if (unnamed != 0) {  // a box lies where its first group does
            const uint32_t of_box = (1 << box.groups) - 1, first = kAll / of_box;  // bits of one box; the first of each
            unnamed |= (unnamed & first) * of_box;
        }
        return unnamed;
    }

    // Of a segment without tails.
    static __device__ int column_blocks_of(int segment) {
        if constexpr (C::Layout::kIsRecord) return C::kSegmentColumnBlocks;
        return min(C::kSegmentColumnBlocks, C::kKeyColumnBlocks - segment * C::kSegmentColumnBlocks);
    }
    static __device__ int group_bytes_of(int segment) {
        return has_tails<C>(segment) ? kTailGroupBytes<C> : column_blocks_of(segment) * 8 * C::kBlockBytes;
    }
    __device__ const CUtensorMap* map_of(int segment) const {
        if constexpr (C::Layout::kIsRecord)
            if (has_tails<C>(segment)) return &box.tails;
        return &box.map;
    }

    // Where a tile's group lies. The tile is number `window_stage` of the window whose places the lanes hold.
    static __device__ CachePlace place_of(const CachePlace& place, int window_stage, int group = 0) {
        const int of = window_stage * kGroups + group;
        return {__shfl_sync(~0u, place.page, of), __shfl_sync(~0u, place.row, of)};
    }

    // The elected lane calls visit(segment, offset in the stage, coordinates) for each box of a tile's first `groups`
    // groups, in segments kBegin to kEnd - 1 of the loading order. kOdd: whether the tile's number in its work tile is
    // odd. `first` is the place of the tile's first group.
    template <int kOdd, int kBegin, int kEnd, typename Visit>
    __device__ void for_each_box(int groups, const CachePlace& place, int window_stage, CachePlace first,
                                 Visit visit) const {
        for (int group = 0; group < groups; group += box.groups) {
            const auto [page, row] = group == 0 ? first : place_of(place, window_stage, group);
            if (!issues) continue;
#pragma unroll
            for (int i = kBegin; i < kEnd; ++i) {
                const int segment = C::segment_in_turn(kOdd, i), column_block = segment * C::kSegmentColumnBlocks;
                const int offset = segment * C::kSegmentBytes + group * C::kTokenGroupBytes;
                if (has_tails<C>(segment)) {
                    visit(segment, segment * C::kSegmentBytes + group * kTailGroupBytes<C>,
                          PlainCoordinates{0, row, page});
                } else if constexpr (C::kDim % 64 == 0) {
                    const int column = 0, row_in_group = 0, token_group = row / 8;
                    visit(segment, offset, BlockedCoordinates{column, row_in_group, column_block, token_group, page});
                } else {
                    for (int j = 0; j < column_blocks_of(segment); ++j)
                        visit(segment, offset + j * 8 * C::kBlockBytes,
                              PlainCoordinates{(column_block + j) * C::kBlockColumns, row, page});
                }
            }
        }
    }

    __device__ void prefetch_first_keys(const CachePlace& place) const {
#pragma unroll 1
        for (int tile = 0; tile * C::kTile < prefetched_keys(); ++tile) {
            const int keys = min(prefetched_keys() - tile * C::kTile, C::kTile);
            for_each_box<0, 0, C::kSegments>(groups_of(keys), place, tile, place_of(place, tile),
                                             [&](int segment, int, const auto& coordinates) {
                                                 if (coordinates.page != kNoPage)
                                                     tma_prefetch(map_of(segment), policy, coordinates);
                                             });
        }
    }

    // Prefetches a later tile to the L2 cache: its load then takes half as long. CTAs that share keys take turns.
    __device__ void prefetch(int tile, int groups, const CachePlace& place, int window_stage) const {
        if (p.row_stride != C::kDim || tile % C::kRangeCtas != cluster_cta) return;
#pragma unroll 1
        for (int group = 0; group < groups; group += box.groups) {
            const CachePlace at = place_of(place, window_stage, group);
            // With a token table that names no whole groups, a box may reach past the page.
            if (issues && at.page != kNoPage && at.row + box.groups * 8 <= p.table.page_size)
                bulk_prefetch(row_in_cache<C>(p, at.page * p.page_stride + int64_t{at.row} * C::kDim),
                              box.groups * 8 * C::Layout::kTokenBytes, policy);
        }
    }

    // Loads segments kBegin to kEnd - 1 of a tile's loading order, which consumers release together.
    template <int kOdd, int kBegin, int kEnd>
    __device__ void load_segments(int groups, const CachePlace& place, int window_stage, CachePlace first) {
        Barrier* full = smem.kv_full[ring.stage];
        const uint32_t unnamed = kBegin == 0 ? unnamed_groups(place, window_stage) : 0;
        Base::wait_for_release(C::release_of(C::segment_in_turn(kOdd, kBegin)));
        if (lane < kEnd - kBegin) {
            const int segment = C::segment_in_turn(kOdd, kBegin + lane);
            if (kBegin == 0 && lane == 0) smem.unnamed.words[ring.stage][0] = unnamed;
            full[segment].arrive_expect(groups * group_bytes_of(segment));
        }
        __syncwarp();
        for_each_box<kOdd, kBegin, kEnd>(
            groups, place, window_stage, first, [&](int segment, int offset, const auto& coordinates) {
                unsigned char* target = smem.kv[ring.stage] + offset;
                if constexpr (C::kRangeCtas == 1)
                    tma_load(target, map_of(segment), &full[segment], policy, coordinates);
                else if ((segment + kOdd) % 2 == cluster_cta)
                    tma_multicast(target, map_of(segment), &full[segment], policy, coordinates);
            });
        __syncwarp();
    }

    // By the time segments are released, consumers are already waiting for new ones. So as much as possible is computed
    // before the wait: the first place is looked up here, and the order of segments and the CTA that loads each, which
    // depend on kOdd alone, are known at compile time.
    template <int kOdd>
    __device__ void load_tile(int groups, const CachePlace& place, int window_stage) {
        const CachePlace first = place_of(place, window_stage);
        load_segments<kOdd, 0, C::kFirstRelease>(groups, place, window_stage, first);
        constexpr int kNext = C::kFirstRelease + (C::kReleases == 3);
        if constexpr (C::kReleases == 3)
            load_segments<kOdd, C::kFirstRelease, kNext>(groups, place, window_stage, first);
        if constexpr (C::kReleases > 1) load_segments<kOdd, kNext, C::kSegments>(groups, place, window_stage, first);
    }

    // Loads `keys` keys into the ring's stage: tile number `tile` of the work tile and `window_stage` of the window.
    __device__ void load(int tile, int keys, const CachePlace& place, int window_stage) {
        if ((C::kReleases > 1 || C::kRangeCtas == 2) && tile % 2)
            load_tile<1>(groups_of(keys), place, window_stage);
        else
            load_tile<0>(groups_of(keys), place, window_stage);
        profiler.mark(Event::kLoadsIssued);
    }

    __device__ void run() {
        CachePlace place, next_place;  // of this window and of the next one
        p.table.page_size.split(planned_slot, next_place.page, next_place.row);
        if (lane * 8 < first_keys()) next_place.page = planned_slot < 0 ? kNoPage : page_of(next_place.page);
        bool loaded = first_keys() > 0;  // whether the current tile is already loaded, as the first of all is
        prefetch_first_keys(next_place);
        wait_for_predecessor();
        if constexpr (C::kRangeCtas == 2) cluster_wait();  // the partner's barriers are initialized
        if (loaded) load(0, min(first_keys(), C::kTile), next_place, 0);

        WorkCursor<C> cursor(p, Base::range_to_walk());
        WorkTile work;
        while (cursor.next(work)) {
            const int* table = p.table.row_of(work.request);
            auto look_up = [&](int window_token) {
                const int token = window_token + lane * 8;
                if constexpr (Base::kFewRegisters) table = p.table.row_of(pinned(work.request));
                if (token >= work.token_end) return;
                p.table.locate(table, token, next_place.page, next_place.row);
                next_place.page = page_of(next_place.page);
            };
            if (!loaded) look_up(work.token_begin);
            // If a request has several m-blocks, other CTAs bring its keys to the L2 cache, too.
            const bool prefetches = C::kPrefetchTiles > 0 && work.query_len * p.num_heads <= kPlanRows<C>;
            int window_stage = kWindowStages;
            for (int token = work.token_begin; token < work.token_end; token += C::kTile, ++window_stage) {
                if (window_stage == kWindowStages) {
                    window_stage = 0;
                    place = next_place;
                    profiler.mark(Event::kTableRead);
                }
                const int tile = (token - work.token_begin) / C::kTile;
                if (!loaded) load(tile, min(C::kTile, work.token_end - token), place, window_stage);
                const int ahead = token + C::kPrefetchTiles * C::kTile;
                if (prefetches && ahead < work.token_end) {
                    const int stage_ahead = window_stage + C::kPrefetchTiles;
                    const bool next = stage_ahead >= kWindowStages;
                    prefetch(tile + C::kPrefetchTiles, groups_of(min(C::kTile, work.token_end - ahead)),
                             {next ? next_place.page : place.page, next ? next_place.row : place.row},
                             stage_ahead % kWindowStages);
                }
                loaded = false;
                if (window_stage == 0) look_up(token + 32 * 8);
                ring.advance();
            }
            Base::first_ring = false;
        }
    }
};

// Three warps copy keys of small pages or lists by cp.async. Each looks up a tile's tokens while it copies the previous
// tile, and copies the segments of one barrier, a third of their rows, or every third group of four records.
template <typename C, typename S>
struct GatherKeyLoader : KeyLoader<C, S> {
    using Base = KeyLoader<C, S>;
    using Base::first_keys, Base::prefetched_keys, Base::kKeyWarps;
    using Base::p, Base::smem, Base::range, Base::planned_slot, Base::lane, Base::policy, Base::ring;
    static constexpr int kLanesPerRow = C::kBlockBytes / 16;                 // 16 bytes each: a column block
    static constexpr int kRowsAtOnce = 32 / kLanesPerRow;                    // by one instruction
    static constexpr int kRowsInFlight = (C::kLists ? 2 : 4) * kRowsAtOnce;  // whose offsets are gathered first
    static constexpr int kVectorElements = 16 / C::Layout::kElementBytes;    // of the cache
    static constexpr int kTokensPerLane = C::kTile / 32;
    static constexpr int kWarpColumnBlocks = C::kBarrierSegments * C::kSegmentColumnBlocks;  // that a warp copies
    // Arrivals at each kv_full: every lane, for its copies, of the warp that copies the segments (with records, of all
    // key warps); lane 0 of each of these warps once more, for `unnamed`.
    static constexpr int kKeyArrivals = (C::Layout::kIsRecord ? kKeyWarps : 1) * 33;
    static_assert(C::kRangeCtas == 1 && C::kReleases == 1 && C::kFullBarriers <= kKeyWarps);

    // The table's entries for this lane's tokens of a tile, 32 apart. Their loads are in flight while the previous tile
    // is copied, so nothing is computed from them until then.
    using Entries = int[kTokensPerLane];
    using Offsets = int64_t[kTokensPerLane];  // of their rows in the cache; -1: no key
    // Of a token that does not exist. With lists, of one without a key, too.
    static constexpr int64_t kNoToken = C::kLists ? -1 : INT64_MIN;

    const int warp = threadIdx.x % 128 / 32;

    __device__ GatherKeyLoader(const LoaderThread<C, S>& thread) : Base(thread) {}

    // Each warp prefetches its own 32 tokens. Returns the entry of the token that the planner looked up for this lane.
    __device__ int prefetch_first_keys() const {
        const int of_table = p.table.of_tokens ? planned_slot * p.table.shard_size : planned_slot / p.table.page_size;
        const int planned = planned_slot < 0 ? -1 : of_table;
        if (const int key = warp * 32 + lane; key < prefetched_keys()) {
            const int token = range.tile * kPlanTile + key;
            const int entry = warp > 0 ? p.table.entry_of(p.table.row_of(range.request), token) : planned;
            const int64_t offset = offset_in_cache<C>(p, entry, token);
            if (offset >= 0) bulk_prefetch(row_in_cache<C>(p, offset), C::Layout::kTokenBytes, policy);
        }
        return planned;
    }

    // The offset of a token without a key. Records have no sign for it but -1, and with lists nothing is copied;
    // otherwise zeros are copied from there.
    __device__ int64_t no_key() const {
        if constexpr (C::kLists || C::Layout::kIsRecord) return -1;
        return (no_row - static_cast<const unsigned char*>(p.cache)) / C::Layout::kElementBytes;
    }

    // Looks up this lane's tokens of a tile, from the kBegin-th on.
    template <int kBegin>
    __device__ void look_up(Entries& entries, const int* table, int tile_token, int token_end) const {
#pragma unroll
        for (int i = kBegin; i < kTokensPerLane; ++i)
            if (const int token = tile_token + i * 32 + lane; token < token_end)
                entries[i] = p.table.entry_of(table, token);
    }

    // Copies this lane's 16 bytes of each of the warp's column blocks of a row; zeros if a list names no key for it.
    __device__ void copy_row(int64_t offset, uint32_t destination) const {
        constexpr int kWarpColumns = kWarpColumnBlocks * C::kBlockColumns;
        const int column = warp * kWarpColumns + lane % kLanesPerRow * kVectorElements;
        const auto* source = row_in_cache<C>(p, (C::kLists ? max(offset, int64_t{0}) : offset) + column);
#pragma unroll
        for (int i = 0; i < kWarpColumnBlocks; ++i) {
            if constexpr (C::kDim % (kKeyWarps * kWarpColumns) != 0) {
                const int block = warp * kWarpColumnBlocks + i;
                if (C::kDim % 64 == 0 ? block >= C::kKeyColumnBlocks : column + i * C::kBlockColumns >= C::kDim)
                    continue;
            }
            copy_16<C>(destination + column_block_offset<C>(i * C::kBlockColumns), source + i * C::kBlockColumns,
                       policy, offset >= 0);
        }
    }

    // Copies the warp's column blocks of 32 rows to four groups of 8 tokens. Lane l holds the offset of row l.
    __device__ void copy_rows(int64_t offset, uint32_t destination) const {
        constexpr int kCopies = kRowsInFlight / kRowsAtOnce;
#pragma unroll
        for (int begin = 0; begin < 32; begin += kRowsInFlight) {
            int64_t offsets[kCopies];  // gathered first, so that the copies are issued without pause
#pragma unroll
            for (int i = 0; i < kCopies; ++i)
                offsets[i] = __shfl_sync(~0u, offset, begin + i * kRowsAtOnce + lane / kLanesPerRow);
#pragma unroll
            for (int i = 0; i < kCopies; ++i) {
                if (!C::kLists && offsets[i] >> 32 == kNoToken >> 32) continue;
                const int row = i * kRowsAtOnce + lane / kLanesPerRow;
                copy_row(offsets[i], destination + (begin + row) / 8 * C::kTokenGroupBytes +
                                         vector_offset<C::kBlockBytes>(row % 8, lane % kLanesPerRow));
            }
        }
    }

    // Tells consumers which tokens have no keys.
    __device__ void tell_unnamed(const Offsets& offsets) const {
#pragma unroll
        for (int i = 0; i < kTokensPerLane; ++i) {
            const uint32_t unnamed = __ballot_sync(~0u, offsets[i] == no_key());
            if (lane == 0) smem.unnamed.words[ring.stage][i] = unnamed;
        }
    }

    // Copies this warp's segments of a tile.
    __device__ void load_segments(const Offsets& offsets) {
        if (C::kFullBarriers < kKeyWarps && warp >= C::kFullBarriers) return;  // few column blocks
        Base::wait_for_release(0);
        const uint32_t target = smem_address(smem.kv[ring.stage]) + warp * (C::kBarrierSegments * C::kSegmentBytes);
#pragma unroll
        for (int i = 0; i < kTokensPerLane; ++i) copy_rows(offsets[i], target + i * 4 * C::kTokenGroupBytes);
        Barrier& full = smem.kv_full[ring.stage][warp];
        if (warp == 0) tell_unnamed(offsets);
        if (lane == 0) full.arrive();
        full.arrive_after_cp_async();
    }

    // Copies this warp's records of the work tile's `tile`-th tile.
    __device__ void load_records(const Offsets& offsets, int tile) {
        const unsigned char* rows[kTokensPerLane];
#pragma unroll
        for (int i = 0; i < kTokensPerLane; ++i) rows[i] = offsets[i] < 0 ? no_row : row_in_cache<C>(p, offsets[i]);
        Base::wait_for_release(0);
        const uint32_t stage = smem_address(smem.kv[ring.stage]);
#pragma unroll 2
        for (uint32_t token = (warp + tile) % kKeyWarps * 4 + lane / 8; token < C::kTile; token += kKeyWarps * 4) {
            const auto found = reinterpret_cast<int64_t>(token < 32 ? rows[0] : rows[1]);
            const auto row = reinterpret_cast<const unsigned char*>(__shfl_sync(~0u, found, token & 31));
            copy_record<C>(stage, token, row, policy);
        }
        if (warp == 0) tell_unnamed(offsets);
        Barrier& full = smem.kv_full[ring.stage][0];
        if (lane == 0) full.arrive();
        full.arrive_after_cp_async();
    }

    // Copies this warp's part of the work tile's `tile`-th tile.
    __device__ void load(const Entries& entries, int tile, const WorkTile& work) {
        Offsets offsets;
#pragma unroll
        for (int i = 0; i < kTokensPerLane; ++i) {
            const int token = work.token_begin + tile * C::kTile + i * 32 + lane;
            offsets[i] = token < work.token_end ? offset_in_cache<C>(p, entries[i], token) : kNoToken;
            if (offsets[i] == -1) offsets[i] = no_key();
        }
        if constexpr (C::Layout::kIsRecord)
            load_records(offsets, tile);
        else
            load_segments(offsets);
        ring.advance();
    }

    __device__ void run() {
        Entries entries, next_entries;  // of this tile and of the next one
        if constexpr (!C::kLists) next_entries[0] = prefetch_first_keys();
        wait_for_predecessor();
        bool planned = !C::kLists && first_keys() > 0;
        WorkCursor<C> cursor(p, Base::range_to_walk());
        WorkTile work;
        while (cursor.next(work)) {
            const int* table = p.table.row_of(work.request);
            if (planned)
                look_up<1>(next_entries, table, work.token_begin, work.token_end);
            else
                look_up<0>(next_entries, table, work.token_begin, work.token_end);
            planned = false;
            const int tiles = (work.token_end - work.token_begin + C::kTile - 1) / C::kTile;
            for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
                for (int i = 0; i < kTokensPerLane; ++i) entries[i] = next_entries[i];
                look_up<0>(next_entries, table, work.token_begin + (tile + 1) * C::kTile, work.token_end);
                load(entries, tile, work);
            }
            Base::first_ring = false;
        }
    }
};

}  // namespace mla::hopper
