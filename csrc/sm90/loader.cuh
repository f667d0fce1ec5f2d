// The warpgroup that loads: keys into a ring of tiles, queries of every work tile, and where an work tile's rows go.
//
// Its kernel's config C and shared-memory plan S fix the layout:
//   C::kSlotStride        8 with TMA, else 1: of which the planner looks up the first
//   S::kv[kStages]        kTile tokens: kSegments segments of kSegmentColumnBlocks column blocks of 64 columns, each in
//   groups of
//                         8 tokens, [column block][8][128 B], swizzled by 128 B
//   S::q[kQueryBuffers]   [d / 64][kRows][128 B], swizzled by 128 B
//   S::rows               see RowTable
//   S::flag               this CTA's (common/combine.cuh), when the launch began
//   S::kv_full[kStages][C::kSegments]   initialized with `kKeyArrivals`: scores can begin before all of a tile is there
//   S::kv_empty, q_full, q_empty        one barrier a buffer; q_full is initialized with `kQueryArrivals`
// Consumers take kStep tokens at a time: whole tiles, of which the last of an work tile may be empty.
// Pages of a multiple of 8 tokens: warp 0 issues TMA boxes, warps 1-3 load queries.
// Small pages: warps 0-2 copy keys with cp.async, warp 3 loads queries.
#pragma once
#include <cuda.h>

#include "../common/combine.cuh"
#include "../common/cp_async.cuh"
#include "../common/params.cuh"
#include "profile.cuh"
#include "tma.cuh"

namespace mla::sm90 {

// A position in a ring of `kStages` barriers. A consumer waits for `parity()`; a producer, which finds a fresh
// ring empty, for `parity() ^ 1`.
template <int kStages>
struct PipelineState {
    uint32_t stage = 0;
    uint32_t phase = 0;

    __device__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// TMA boxes of `groups` groups of 8 tokens, which lie in one page: all columns of a segment where rows are a multiple
// of 64 columns wide; otherwise 64 columns, and columns behind the row read as zero.
struct KeyBox {
    CUtensorMap map;
    int groups;  // a power of two
};
// Groups of the largest boxes that tiles and pages can be cut into.
template <typename C>
constexpr int box_groups(int page_size) {
    static_assert(kPlanTile % C::kStageTokens == 0);  // work tiles begin where tiles do
    int groups = 1;
    while (C::kDim % 64 == 0 && groups < C::kStageTokens / 8 && page_size % (groups * 16) == 0) groups *= 2;
    return groups;
}

// Where a column block of 64 columns of a tile's first group lies in the tile, in bytes.
template <typename C>
__device__ constexpr uint32_t column_block_offset(int column_block) {
    return column_block / C::kSegmentColumnBlocks * C::kSegmentBytes + column_block % C::kSegmentColumnBlocks * 1024;
}

// The query loader fills a RowTable per work tile. The first work tile's stays until the end, as the last one's does,
// for the combine; the others take turns, and a table is not filled again before the work tile that used it is
// finished.
constexpr int kRowTables = 4;
__device__ __forceinline__ int row_table(int ordinal) { return ordinal == 0 ? 0 : 1 + ordinal % (kRowTables - 1); }

// From so many keys on, more of an work tile than its first tile is brought to the second-level cache while the
// predecessor ends. Where work tiles are shorter, all CTAs usually take segment in the predecessor's combine, and more
// would be in its way.
constexpr int kLongItem = 768;

template <typename C, typename S>
struct Loader {
    static constexpr int kKeyWarps = C::kTma ? 1 : 3;
    static constexpr int kQueryThreads = (4 - kKeyWarps) * 32;
    static constexpr int kKeyArrivals = C::kTma ? 1 : kKeyWarps * 32 / C::kSegments;
    static_assert(C::kSegments == 1 || C::kSegments == 3);
    static constexpr int kQueryArrivals = 2 * kQueryThreads;

    const DecodeParams& p;
    S& smem;
    const int first_slot;  // of this lane, what the planner has looked up
    const CtaRange range;

    __device__ Loader(const DecodeParams& p, S& smem, const CtaPlan& plan)
        : p(p), smem(smem), first_slot(plan.slots[threadIdx.x % 32]), range(plan.range) {}

    // How many keys the first work tile has; the planner has looked up the first kPlannedSlots.
    __device__ int first_keys() const {
        const bool cut = range.request == range.end_request && range.m_block == range.end_m_block;
        return (cut ? min(range.end_tile * kPlanTile, range.seq_len) : range.seq_len) - range.tile * kPlanTile;
    }
    // How many of them are brought to the second-level cache while the predecessor ends (of small pages at most 96).
    __device__ int keys_ahead() const {
        return min(first_keys(), first_keys() < kLongItem ? C::kStageTokens : 2 * C::kStageTokens);
    }

    // The first work tile's queries would come late behind a whole ring of keys: half of it is asked for before they
    // have arrived.
    bool at_start = true;
    __device__ void let_queries_pass(const PipelineState<C::kStages>& ring) {
        if (!at_start || ring.stage < C::kStages / 2) return;
        at_start = false;
        smem.q_full[0].wait(0);
    }

    static __device__ int padded_end(const WorkTile& work) {
        return work.token_begin + (work.token_end - work.token_begin + C::kTile - 1) / C::kTile * C::kTile;
    }

    // Keys by TMA: lane l looks up group l of the next 32 groups, and one lane issues the boxes of a tile in its turn.
    // The planner has looked up the first ones, so that the first tile is asked for before all else.
    __device__ void keys(const KeyBox& box) {
        constexpr int kGroups = C::kStageTokens / 8, kTilesAhead = 32 / kGroups;
        const int lane = threadIdx.x % 32;
        const bool issues = elect_one();
        PipelineState<C::kStages> ring;
        int page, row, next_page, next_row;
        p.table.page_size.split(first_slot, next_page, next_row);
        const uint64_t policy = cache_policy(range.single_m_block);
        Profiler<C::kProfile> profiler(p.profile, 0, lane == 0);

        // Groups of a tile that has so many keys, in whole boxes: what they hold behind the last key is masked.
        auto groups_of = [&](int keys) {
            const int tokens = box.groups * 8;
            return ((keys + tokens - 1) & -tokens) / 8;
        };
        // By one lane, for each box of such a tile: use(segment, its place in the tile, its place in the map ...). Lane
        // kGroups * turn and the next ones know where the tile is.
        auto boxes = [&](int groups, int page, int row, int turn, auto use) {
#pragma unroll 1
            for (int segment = 0; segment < C::kSegments; ++segment) {
                const int first = segment * C::kSegmentColumnBlocks,
                          column_blocks = min(C::kSegmentColumnBlocks, C::kColumnBlocks - first);
#pragma unroll 1
                for (int group = 0; group < groups; group += box.groups) {
                    const int page_of_box = __shfl_sync(~0u, page, turn * kGroups + group);
                    const int row_of_box = __shfl_sync(~0u, row, turn * kGroups + group);
                    if (!issues) continue;
                    const int place = segment * C::kSegmentBytes + group * C::kTokenGroupBytes;
                    if constexpr (C::kDim % 64 == 0) {
                        use(segment, place, 0, 0, first, row_of_box / 8, page_of_box);
                    } else {
                        for (int column_block = 0; column_block < column_blocks; ++column_block)
                            use(segment, place + column_block * 1024, (first + column_block) * 64, row_of_box,
                                page_of_box);
                    }
                }
            }
        };
        auto issue = [&](int keys, int page, int row, int turn) {
            const int groups = groups_of(keys);
            if (lane < C::kSegments) {
                const int column_blocks =
                    min(C::kSegmentColumnBlocks, C::kColumnBlocks - lane * C::kSegmentColumnBlocks);
                smem.kv_full[ring.stage][lane].arrive_expect(groups * column_blocks * 1024);
            }
            __syncwarp();
            boxes(groups, page, row, turn, [&](int segment, int place, auto... at) {
                tma_load(smem.kv[ring.stage] + place, &box.map, &smem.kv_full[ring.stage][segment], policy, at...);
            });
            __syncwarp();
            profiler.mark(Event::kLoadsIssued);
        };
        bool requested = first_keys() > 0;
#pragma unroll 1
        for (int turn = 0; turn * C::kStageTokens < keys_ahead(); ++turn)
            boxes(groups_of(min(keys_ahead() - turn * C::kStageTokens, C::kStageTokens)), next_page, next_row, turn,
                  [&](int, int, auto... at) { tma_prefetch(&box.map, policy, at...); });
        wait_for_predecessor();
        if (requested) issue(min(first_keys(), C::kStageTokens), next_page, next_row, 0);

        WorkCursor<C::kRows> cursor(p.lengths, p.num_heads, range);
        WorkTile work;
        while (cursor.next(work)) {
            const int* table = p.table.row_of(work.request);
            auto look_up = [&](int tile_token) {
                int token = tile_token + lane * 8;
                if (token < work.token_end) p.table.locate(table, token, next_page, next_row);
            };
            if (!requested) look_up(work.token_begin);
            int turn = kTilesAhead;
            for (int token = work.token_begin; token < padded_end(work); token += C::kStageTokens, ++turn) {
                if (turn == kTilesAhead) {
                    turn = 0;
                    page = next_page;
                    row = next_row;
                    profiler.mark(Event::kTableRead);
                }
                if (!requested) {
                    smem.kv_empty[ring.stage].wait(ring.phase ^ 1);
                    let_queries_pass(ring);
                    issue(min(C::kStageTokens, max(work.token_end - token, 0)), page, row, turn);
                }
                requested = false;
                if (turn == 0) look_up(token + 256);
                ring.advance();
            }
            at_start = false;
        }
    }

    // Keys of small pages, row by row: lane l looks up row l; each warp copies its own column blocks, 4 rows x 128 B at
    // a time.
    __device__ void keys_by_row() {
        constexpr int kColumnBlocksPerWarp = (C::kColumnBlocks + kKeyWarps - 1) / kKeyWarps;
        const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
        const uint64_t policy = cache_policy(range.single_m_block);
        const auto* cache = static_cast<const typename C::Element*>(p.cache);
        PipelineState<C::kStages> ring;
        auto offset_of = [&](int page, int row) { return page * p.page_stride + row * p.row_stride; };
        int64_t ahead = -1;
        {
            int page, row;
            if (first_slot >= 0) {
                p.table.page_size.split(first_slot, page, row);
                ahead = offset_of(page, row);
            }
            if (const int key = warp * 32 + lane; key < keys_ahead()) {  // each warp others
                if (warp > 0) p.table.locate(p.table.row_of(range.request), range.tile * kPlanTile + key, page, row);
                bulk_prefetch(cache + offset_of(page, row), C::kDim * 2, policy);
            }
        }
        wait_for_predecessor();
        bool looked_up = first_keys() > 0;
        WorkCursor<C::kRows> cursor(p.lengths, p.num_heads, range);
        WorkTile work;
        while (cursor.next(work)) {
            const int* table = p.table.row_of(work.request);
            auto look_up = [&](int token) {
                int page, row;
                if (token >= work.token_end) return int64_t{-1};
                p.table.locate(table, token, page, row);
                return offset_of(page, row);
            };
            if (!looked_up) ahead = look_up(work.token_begin + lane);
            looked_up = false;
            for (int token = work.token_begin; token < padded_end(work); token += C::kStageTokens) {
                smem.kv_empty[ring.stage].wait(ring.phase ^ 1);
                let_queries_pass(ring);
                const uint32_t tile =
                    smem_address(smem.kv[ring.stage]) + column_block_offset<C>(warp * kColumnBlocksPerWarp);
#pragma unroll
                for (int half = 0; half < C::kStageTokens / 32; ++half) {
                    int64_t offset = ahead;
                    ahead = look_up(token + half * 32 + 32 + lane);
#pragma unroll
                    for (int quarter = 0; quarter < 2; ++quarter) {
                        int64_t offsets[4];  // gathered first, so that the copies are issued without pause
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            offsets[i] = __shfl_sync(~0u, offset, quarter * 16 + i * 4 + lane / 8);
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const int row = quarter * 16 + i * 4 + lane / 8, vector = lane % 8;
                            if (offsets[i] < 0) continue;
                            const auto* source = cache + offsets[i] + warp * kColumnBlocksPerWarp * 64 + vector * 8;
                            const uint32_t destination = tile + (half * 4 + row / 8) * C::kTokenGroupBytes +
                                                         row % 8 * 128 + (vector ^ row % 8) * 16;
#pragma unroll
                            for (int column_block = 0; column_block < kColumnBlocksPerWarp; ++column_block) {
                                const int column = (warp * kColumnBlocksPerWarp + column_block) * 64 + vector * 8;
                                if (C::kDim % (kKeyWarps * 64) == 0 || column < C::kDim)
                                    cp_async_16(destination + column_block * 1024, source + column_block * 64, policy);
                            }
                        }
                    }
                }
                smem.kv_full[ring.stage][warp * C::kSegments / kKeyWarps].arrive_after_cp_async();
                ring.advance();
            }
            at_start = false;
        }
    }

    // Queries of every work tile; rows and columns that do not exist become zeros. A thread copies the same vector of
    // 16 bytes of all column blocks of its rows.
    __device__ void queries() {
        constexpr int kRowsAtOnce = kQueryThreads / 8;
        const int thread = threadIdx.x % 128 - kKeyWarps * 32, vector = thread % 8;
        PipelineState<C::kQueryBuffers> ring;
        WorkCursor<C::kRows> cursor(p.lengths, p.num_heads, range);
        WorkTile work;
        const auto* q_nope = static_cast<const typename C::Element*>(p.q_nope) + vector * 8;
        const auto* q_rope = static_cast<const typename C::Element*>(p.q_rope) + vector * 8;
        for (int ordinal = 0; cursor.next(work); ++ordinal) {
            smem.q_empty[ring.stage].wait(ring.phase ^ 1);
            const uint32_t base = smem_address(smem.q[ring.stage]);
            auto& rows = smem.rows[row_table(ordinal)];
#pragma unroll 1
            for (int r = thread / 8; r < C::kRows; r += kRowsAtOnce) {
                const int row = work.m_block * C::kRows + r, token = row / p.num_heads,
                          head = row - token * p.num_heads;
                const bool exists = token < work.query_len;
                const int64_t index = work.query_begin + token;
                const int64_t nope = exists ? index * p.q_nope_token_stride + head * p.q_nope_head_stride : 0;
                const int64_t rope = exists ? index * p.q_rope_token_stride + head * p.q_rope_head_stride : 0;
                const uint32_t target = base + r * 128 + (vector ^ r % 8) * 16;
                // Here, so that the first addresses are known by then.
                wait_for_predecessor();
#pragma unroll
                for (int column_block = 0; column_block < C::kColumnBlocks; ++column_block) {
                    const int column = column_block * 64;
                    const bool latent = column < C::kDimLatent;
                    const auto* source = latent ? q_nope + nope + column : q_rope + rope + (column - C::kDimLatent);
                    const bool valid = exists && (C::kDim % 64 == 0 || column + vector * 8 < C::kDim);
                    cp_async_16(target + column_block * C::kQueryColumnBlockBytes, valid ? source : q_nope, valid);
                }
                if (vector == 0) {
                    rows.out[r] = exists ? index * p.out_token_stride + head * p.out_head_stride : -1;
                    rows.lse[r] = exists ? index * p.lse_token_stride + head * p.lse_head_stride : -1;
                }
            }
            if (ordinal == 0 && thread == kQueryThreads - 1) {  // who had no more rows to copy than others, or none
                wait_for_predecessor();
                smem.flag = read_flag(p);
            }
            smem.q_full[ring.stage].arrive();  // for these and the table; the queries' own arrival follows
            smem.q_full[ring.stage].arrive_after_cp_async();
            ring.advance();
        }
    }

    __device__ void run(const KeyBox& box) {
        if (threadIdx.x / 32 >= kKeyWarps)
            queries();
        else if constexpr (C::kTma)
            keys(box);
        else
            keys_by_row();
    }
};

}  // namespace mla::sm90
