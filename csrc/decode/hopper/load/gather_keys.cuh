// Loads keys of small pages and of lists for few_rows, row by row.
#pragma once
#include "copy.cuh"
#include "ptx/pdl.cuh"
#include "ptx/tma.cuh"

namespace mla::hopper {

// Three warps copy keys of small pages or lists by cp.async. Each looks up a tile's tokens while it copies the previous
// tile, and copies the segments of one barrier (a third of every row's columns), or every third group of four records.
template <typename C>
struct GatherKeyLoader {
    static constexpr int kKeyWarps = LoaderThread<C>::kKeyWarps;
    static constexpr int kLanesPerRow = C::kBlockBytes / 16;                 // 16 bytes each: a column block
    static constexpr int kRowsAtOnce = 32 / kLanesPerRow;                    // by one instruction
    static constexpr int kRowsInFlight = (C::kLists ? 2 : 4) * kRowsAtOnce;  // whose offsets are gathered first
    static constexpr int kVectorElements = 16 / C::Layout::kElementBytes;    // of the cache
    static constexpr int kTokensPerLane = C::kTile / 32;
    static constexpr int kWarpColumnBlocks = C::kBarrierSegments * C::kSegmentColumnBlocks;  // that a warp copies
    // Arrivals at each kv_full: every lane, for its copies, of the warp that copies the segments (with records, of all
    // key warps); lane 0 of each of these warps once more, for `unnamed`.
    static constexpr int kKeyArrivals = (C::Layout::kHasTail ? kKeyWarps : 1) * 33;
    static_assert(C::kRangeCtas == 1 && C::kReleases == 1 && C::kFullBarriers <= kKeyWarps);

    // The table's entries for this lane's tokens of a tile, 32 apart. Their loads are in flight while the previous tile
    // is copied, so nothing is computed from them until then.
    using Entries = int[kTokensPerLane];
    using Offsets = int64_t[kTokensPerLane];  // of their rows in the cache; -1: no key
    // Of a token that does not exist. With lists, of one without a key, too.
    static constexpr int64_t kNoToken = C::kLists ? -1 : INT64_MIN;

    const LoaderThread<C>& t;
    KeyRing<C> keys{t};
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const uint64_t policy = cache_policy(t.range.same_m_block);

    __device__ GatherKeyLoader(const LoaderThread<C>& t) : t(t) {}

    // Each warp prefetches its own 32 tokens. Returns the entry of the token that the planner looked up for this lane.
    __device__ int prefetch_first_keys() const {
        const int of_table =
            t.p.table.of_tokens ? t.planned_slot * t.p.table.shard_size : t.planned_slot / t.p.table.page_size;
        const int planned = t.planned_slot < 0 ? -1 : of_table;
        if (const int key = warp * 32 + lane; key < keys.prefetched_keys()) {
            const int token = t.range.tile * kPlanTile + key;
            const int entry = warp > 0 ? t.p.table.entry_of(t.p.table.row_of(t.range.request), token) : planned;
            const int64_t offset = offset_in_cache<C>(t.p, entry, token);
            if (offset >= 0) bulk_prefetch(row_in_cache<C>(t.p, offset), C::Layout::kTokenBytes, policy);
        }
        return planned;
    }

    // What stands for a token without a key. With lists, -1: cp.async writes zeros and reads nothing. With records, -1:
    // `load_records` reads `no_row`. Otherwise the offset of `no_row`, from which zeros are copied.
    __device__ int64_t no_key() const {
        if constexpr (C::kLists || C::Layout::kHasTail) return -1;
        return (no_row - static_cast<const unsigned char*>(t.p.cache)) / C::Layout::kElementBytes;
    }

    // Looks up this lane's tokens of a tile, from the kBegin-th on.
    template <int kBegin>
    __device__ void look_up(Entries& entries, const int* table, int tile_token, int token_end) const {
#pragma unroll
        for (int i = kBegin; i < kTokensPerLane; ++i)
            if (const int token = tile_token + i * 32 + lane; token < token_end)
                entries[i] = t.p.table.entry_of(table, token);
    }

    // Copies this lane's 16 bytes of each of the warp's column blocks of a row; zeros if a list names no key for it.
    __device__ void copy_row(int64_t offset, uint32_t destination) const {
        constexpr int kWarpColumns = kWarpColumnBlocks * C::kBlockColumns;
        const int column = warp * kWarpColumns + lane % kLanesPerRow * kVectorElements;
        const auto* source = row_in_cache<C>(t.p, (C::kLists ? max(offset, int64_t{0}) : offset) + column);
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
            if (lane == 0) t.rings.unnamed.words[keys.ring.stage][i] = unnamed;
        }
    }

    // Copies this warp's segments of a tile.
    __device__ void load_segments(const Offsets& offsets) {
        if (C::kFullBarriers < kKeyWarps && warp >= C::kFullBarriers) return;  // few column blocks
        keys.wait_for_release(0);
        const uint32_t target =
            smem_address(t.rings.kv[keys.ring.stage]) + warp * (C::kBarrierSegments * C::kSegmentBytes);
#pragma unroll
        for (int i = 0; i < kTokensPerLane; ++i) copy_rows(offsets[i], target + i * 4 * C::kTokenGroupBytes);
        Barrier& full = t.rings.kv_full[keys.ring.stage][warp];
        if (warp == 0) tell_unnamed(offsets);
        if (lane == 0) full.arrive();
        full.arrive_after_cp_async();
    }

    // Copies this warp's records of the work tile's `tile`-th tile.
    __device__ void load_records(const Offsets& offsets, int tile) {
        const unsigned char* rows[kTokensPerLane];
#pragma unroll
        for (int i = 0; i < kTokensPerLane; ++i) rows[i] = offsets[i] < 0 ? no_row : row_in_cache<C>(t.p, offsets[i]);
        keys.wait_for_release(0);
        const uint32_t stage = smem_address(t.rings.kv[keys.ring.stage]);
#pragma unroll 2
        for (uint32_t token = (warp + tile) % kKeyWarps * 4 + lane / 8; token < C::kTile; token += kKeyWarps * 4) {
            const auto found = reinterpret_cast<int64_t>(token < 32 ? rows[0] : rows[1]);
            const auto row = reinterpret_cast<const unsigned char*>(__shfl_sync(~0u, found, token & 31));
            copy_record<C>(stage, token, row, policy);
        }
        if (warp == 0) tell_unnamed(offsets);
        Barrier& full = t.rings.kv_full[keys.ring.stage][0];
        if (lane == 0) full.arrive();
        full.arrive_after_cp_async();
    }

    // Copies this warp's part of the work tile's `tile`-th tile.
    __device__ void load(const Entries& entries, int tile, const WorkTile& work) {
        Offsets offsets;
#pragma unroll
        for (int i = 0; i < kTokensPerLane; ++i) {
            const int token = work.token_begin + tile * C::kTile + i * 32 + lane;
            offsets[i] = token < work.token_end ? offset_in_cache<C>(t.p, entries[i], token) : kNoToken;
            if (offsets[i] == -1) offsets[i] = no_key();
        }
        if constexpr (C::Layout::kHasTail)
            load_records(offsets, tile);
        else
            load_segments(offsets);
        keys.ring.advance();
    }

    __device__ void run() {
        Entries entries, next_entries;  // of this tile and of the next one
        if constexpr (!C::kLists) next_entries[0] = prefetch_first_keys();
        wait_for_predecessor();
        bool planned = !C::kLists && keys.first_keys() > 0;
        WorkCursor<C> cursor(t.p, t.range_to_walk());
        WorkTile work;
        while (cursor.next(work)) {
            const int* table = t.p.table.row_of(work.request);
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
            keys.first_ring = false;
        }
    }
};

}  // namespace mla::hopper
