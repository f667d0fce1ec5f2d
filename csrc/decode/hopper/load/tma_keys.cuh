// Loads keys of pages of a multiple of 8 tokens by TMA.
#pragma once
#include <cuda.h>

#include "decode/hopper/profile.cuh"
#include "loader.cuh"
#include "ptx/cluster.cuh"
#include "ptx/pdl.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"

namespace mla::hopper {

// The cache as TMA sees it. A box covers `groups` groups of 8 tokens of one page: all column blocks of a segment if
// rows are whole column blocks; otherwise one column block, where columns past the row's end read as zero.
struct KeyBox {
    CUtensorMap map;
    int groups;  // a power of two
    // Of 32 groups in a row, a bit for the first one of each box; and a bit for each group of one box.
    uint32_t first_groups, all_groups;
};
// For records, `map` covers the e4m3 columns and `tails` the bytes after them, in boxes of equally many tokens.
struct RecordBox : KeyBox {
    CUtensorMap tails;
};
template <typename C>
using BoxOf = std::conditional_t<C::kTma && C::Layout::kHasTail, RecordBox, KeyBox>;

// Groups of the largest box that divides both stages and pages evenly.
template <typename C>
constexpr int box_groups(int page_size) {
    static_assert(kPlanTile % C::kTile == 0);  // work tiles begin where stages do
    int groups = 1;
    while (C::kDim % 64 == 0 && groups < C::kTile / 8 && page_size % (groups * 16) == 0) groups *= 2;
    return groups;
}

// One warp loads keys by TMA. It looks up a window of 32 groups of 8 tokens at a time, one per lane; one lane issues
// the boxes of a stage. The planner has looked up the first window, so the first keys are requested at once.
template <typename C>
struct TmaKeyLoader {
    static constexpr int kGroups = C::kTile / 8, kWindowStages = 32 / kGroups;
    static constexpr int kKeyArrivals = C::kSegments / C::kFullBarriers;  // at each kv_full: one for a segment
    static_assert(C::kSegments % C::kFullBarriers == 0);

    // Where this lane's group of a window lies in the cache. Outside of it, where the copy engine reads zeros, if the
    // page is kNoPage.
    struct CachePlace {
        int page, row;
    };
    static constexpr int kNoPage = -1;

    const LoaderThread<C>& t;
    const BoxOf<C>& box;
    KeyRing<C> keys{t};
    const int lane = threadIdx.x % 32;
    const uint64_t policy = cache_policy(t.range.same_m_block);
    const bool issues = elect_one();
    const int cluster_cta = blockIdx.x % C::kRangeCtas;
    uint32_t unnamed;  // groups of the window
    Profiler<C::kProfile> profiler;

    __device__ TmaKeyLoader(const LoaderThread<C>& t, const BoxOf<C>& box)
        : t(t), box(box), profiler(t.p.profile, 0, lane == 0) {}

    // Groups to load for `count` keys of a stage. Boxes are loaded whole; tokens past the last key are masked.
    __device__ int groups_of(int count) const {
        const int tokens = box.groups * 8;
        return ((count + tokens - 1) & -tokens) / 8;
    }

    __device__ int page_of(int page) const { return static_cast<uint32_t>(page) < t.p.num_pages ? page : kNoPage; }
    // Which groups of the window have no page, a bit for each; a box lies where its first group does. Groups past the
    // last key may be among them. No branch: at the start of a launch, the code behind it would be fetched from memory.
    __device__ uint32_t unnamed_groups(const CachePlace& place) const {
        const uint32_t groups = __ballot_sync(~0u, place.page == kNoPage);
        return groups | (groups & box.first_groups) * box.all_groups;
    }

    // Of a segment without tails.
    static __device__ int column_blocks_of(int segment) {
        if constexpr (C::Layout::kHasTail) return C::kSegmentColumnBlocks;
        return min(C::kSegmentColumnBlocks, C::kKeyColumnBlocks - segment * C::kSegmentColumnBlocks);
    }
    static __device__ int group_bytes_of(int segment) {
        return has_tails<C>(segment) ? kTailGroupBytes<C> : column_blocks_of(segment) * 8 * C::kBlockBytes;
    }
    __device__ const CUtensorMap* map_of(int segment) const {
        if constexpr (C::Layout::kHasTail)
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
        for (int tile = 0; tile * C::kTile < keys.prefetched_keys(); ++tile) {
            const int count = min(keys.prefetched_keys() - tile * C::kTile, C::kTile);
            for_each_box<0, 0, C::kSegments>(groups_of(count), place, tile, place_of(place, tile),
                                             [&](int segment, int, const auto& coordinates) {
                                                 if (coordinates.page != kNoPage)
                                                     tma_prefetch(map_of(segment), policy, coordinates);
                                             });
        }
    }

    // Prefetches a later tile to the L2 cache: its load then takes half as long. CTAs that share keys take turns.
    __device__ void prefetch(int tile, int groups, const CachePlace& place, int window_stage) const {
        if (t.p.row_stride != C::kDim || tile % C::kRangeCtas != cluster_cta) return;
#pragma unroll 1
        for (int group = 0; group < groups; group += box.groups) {
            const CachePlace at = place_of(place, window_stage, group);
            // With a token table that names no whole groups, a box may reach past the page.
            if (issues && at.page != kNoPage && at.row + box.groups * 8 <= t.p.table.page_size)
                bulk_prefetch(row_in_cache<C>(t.p, at.page * t.p.page_stride + int64_t{at.row} * C::kDim),
                              box.groups * 8 * C::Layout::kTokenBytes, policy);
        }
    }

    // Loads segments kBegin to kEnd - 1 of a tile's loading order, which consumers release together.
    template <int kOdd, int kBegin, int kEnd>
    __device__ void load_segments(int groups, const CachePlace& place, int window_stage, CachePlace first) {
        Barrier* full = t.rings.kv_full[keys.ring.stage];
        keys.wait_for_release(C::release_of(C::segment_in_turn(kOdd, kBegin)));
        if (lane < kEnd - kBegin) {
            const int segment = C::segment_in_turn(kOdd, kBegin + lane);
            if (kBegin == 0 && lane == 0)
                t.rings.unnamed.words[keys.ring.stage][0] = unnamed >> window_stage * kGroups & ((1 << kGroups) - 1);
            full[C::full_barrier_of(segment)].arrive_expect(groups * group_bytes_of(segment));
        }
        __syncwarp();
        for_each_box<kOdd, kBegin, kEnd>(
            groups, place, window_stage, first, [&](int segment, int offset, const auto& coordinates) {
                unsigned char* target = t.rings.kv[keys.ring.stage] + offset;
                if constexpr (C::kRangeCtas == 1)
                    tma_load(target, map_of(segment), &full[C::full_barrier_of(segment)], policy, coordinates);
                else if ((segment + kOdd) % 2 == cluster_cta)
                    tma_multicast(target, map_of(segment), &full[C::full_barrier_of(segment)], policy, coordinates);
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

    // Loads `count` keys into the ring's stage: tile number `tile` of the work tile and `window_stage` of the window.
    __device__ void load(int tile, int count, const CachePlace& place, int window_stage) {
        if ((C::kReleases > 1 || C::kRangeCtas == 2) && tile % 2)
            load_tile<1>(groups_of(count), place, window_stage);
        else
            load_tile<0>(groups_of(count), place, window_stage);
        profiler.mark(Event::kLoadsIssued);
    }

    __device__ void run() {
        CachePlace place, next_place;  // of this window and of the next one
        t.p.table.page_size.split(t.planned_slot, next_place.page, next_place.row);
        next_place.page = page_of(next_place.page);  // slot -1 is divided as 2^32 - 1: past any cache
        bool loaded = keys.first_keys() > 0;  // whether the current tile is already loaded, as the first of all is
        prefetch_first_keys(next_place);
        unnamed = unnamed_groups(next_place);
        wait_for_predecessor();
        if constexpr (C::kRangeCtas == 2) cluster_wait();  // the partner's barriers are initialized
        if (loaded) load(0, min(keys.first_keys(), C::kTile), next_place, 0);

        WorkCursor<C> cursor(t.p, t.range_to_walk());
        WorkTile work;
        while (cursor.next(work)) {
            const int* table = t.p.table.row_of(work.request);
            auto look_up = [&](int window_token) {
                const int token = window_token + lane * 8;
                if constexpr (LoaderThread<C>::kFewRegisters) table = t.p.table.row_of(pinned(work.request));
                if (token >= work.token_end) return;
                t.p.table.locate(table, token, next_place.page, next_place.row);
                next_place.page = page_of(next_place.page);
            };
            if (!loaded) look_up(work.token_begin);
            // If a request has several m-blocks, other CTAs bring its keys to the L2 cache, too.
            const bool prefetches = C::kPrefetchTiles > 0 && work.query_len * t.p.num_heads <= kPlanRows<C>;
            int window_stage = kWindowStages;
            for (int token = work.token_begin; token < work.token_end; token += C::kTile, ++window_stage) {
                if (window_stage == kWindowStages) {
                    window_stage = 0;
                    place = next_place;
                    unnamed = unnamed_groups(place);
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
                keys.ring.advance();
            }
            keys.first_ring = false;
        }
    }
};

}  // namespace mla::hopper
