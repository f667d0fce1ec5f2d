// Copies keys to shared memory by cp.async, tile by tile, in the order in which the CTA needs them.
//
// A warp copies the keys of a few tokens (kWarpTokens) of each tile. It looks up a window of tiles at once in the page
// table, one token per lane. While one window is copied, the next one is looked up:
//
//   window w      lanes know the addresses of their tokens' keys; copy() passes them on by shuffles
//   window w + 1  lanes have read the table's entries (`entry`), which next_window() turns into addresses
//
// A window ends where its work tile ends. With fewer than kWindow tiles, only the last lanes are used.
#pragma once
#include "config.cuh"
#include "ptx/operands.cuh"
#include "ptx/registers.cuh"

namespace mla::portable {

template <typename C>
struct KeyLoader {
    static constexpr int kTokenLanes = kThreads / C::kTile;   // threads that copy a token's key
    static constexpr int kWarpTokens = C::kTile / C::kWarps;  // of a tile
    static constexpr int kWindow = 32 / kWarpTokens;          // tiles
    static constexpr int kWindowTokens = kWindow * C::kTile;
    // Vectors of 16 bytes of a key, without its tail.
    static constexpr int kVectors = (C::kHasTail ? C::Layout::kScaleOffset : C::Layout::kTokenBytes) / 16;
    static constexpr int kScaleVectors = C::Layout::kScales * 4 / 16, kRopeVectors = C::kRopeTokenBytes / 16;
    static_assert(C::Layout::kScales % 4 == 0);
    static constexpr int kBlockVectors = C::kBlockBytes / 16;  // in a column block
    static_assert(kTokenLanes % kBlockVectors == 0);           // copies of a thread are whole column blocks apart

    const DecodeParams& p;
    DecodeMemory<C>& smem;
    const uint64_t policy;
    int entry = 0;               // of the table, for this lane's token of the next window
    const uint4* key = nullptr;  // of this lane's token of this window; null if there is none
    int remaining = 0;           // tiles of this window; negative past the last one

    __device__ KeyLoader(const DecodeParams& p, DecodeMemory<C>& smem)
        : p(p), smem(smem), policy(cache_policy(smem.range.same_m_block)) {
        look_up(smem.next_windows[threadIdx.x / 32]);
    }

    __device__ static int first_vector() { return threadIdx.x % kTokenLanes; }
    __device__ static int tiles_of(const NextWindow& window) {
        return min(kWindow, (window.token_end - window.token + C::kTile - 1) / C::kTile);
    }
    __device__ static int own_token(const NextWindow& window) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, from_end = lane / kWarpTokens - kWindow;
        return window.token + (from_end + tiles_of(window)) * C::kTile + warp * kWarpTokens + lane % kWarpTokens;
    }
    __device__ static bool exists(const NextWindow& window, int token) {
        return window.token <= token && token < window.token_end;
    }

    // Reads the table for the next window, of this work tile or of the next one.
    __device__ void look_up(NextWindow window) {
        while (window.token >= window.token_end) {
            WorkCursor<C> cursor(p, smem.range, window.place);
            WorkTile work;
            if (!cursor.next(work)) {
                window.token_end = -1;
                break;
            }
            window.place = cursor.place;
            window.row = p.table.row_number(work.request);
            window.token = work.token_begin;
            window.token_end = work.token_end;
        }
        const int own = own_token(window);
        if (exists(window, own)) entry = p.table.entry_of(p.table.row(window.row), own);
        __syncwarp();  // all lanes have read the previous window
        if (threadIdx.x % 32 == 0) smem.next_windows[threadIdx.x / 32] = window;
        __syncwarp();
    }

    // Makes the window that was looked up the one to copy.
    __device__ void next_window() {
        NextWindow window = smem.next_windows[threadIdx.x / 32];
        if (window.token_end < 0) {
            key = nullptr;
            remaining = -1;
            return;
        }
        const int own = own_token(window);
        const int64_t offset = exists(window, own) ? offset_in_cache<C>(p, entry, own) : -1;
        const auto* cache = static_cast<const unsigned char*>(p.cache);
        key = offset >= 0 ? reinterpret_cast<const uint4*>(cache + offset * C::Layout::kElementBytes) : nullptr;
        remaining = tiles_of(window);
        window.token += kWindowTokens;
        look_up(window);
    }

    // To be called before each tile.
    __device__ void prepare() {
        if (remaining == 0) next_window();
    }

    // Copies the next tile as one group of cp.async; zeros past the last tile.
    __device__ void copy(int stage) {
        const int from = (kWindow - remaining--) * kWarpTokens + threadIdx.x % 32 / kTokenLanes;
        const auto* source = reinterpret_cast<const uint4*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(key), from));
        // Pinned: otherwise values derived from it would be kept in registers.
        const int tid = pinned(static_cast<int>(threadIdx.x)), vector = tid % kTokenLanes, token = tid / kTokenLanes;
        const uint32_t tile = smem_address(smem.kv) + stage * C::kTileBytes;
        const uint32_t destination = tile + vector_offset<C>(token, vector);
#pragma unroll
        for (int i = 0; i < (kVectors + kTokenLanes - 1) / kTokenLanes; ++i)
            if ((i + 1) * kTokenLanes <= kVectors || first_vector() < kVectors % kTokenLanes)
                cp_async_16_or_zero(destination + i * (kTokenLanes / kBlockVectors * C::kColumnBlockBytes),
                                    source + first_vector() + i * kTokenLanes, source != nullptr, policy);
        if constexpr (C::kHasTail) copy_tail(tile, token, vector, source);
        mark_invalid(stage);
        cp_async_commit();
    }

  private:
    // Tells the softmax which of the warp's tokens have no keys. To be called by whole warps, when `remaining` no
    // longer counts the tile.
    __device__ void mark_invalid(int stage) const {
        const uint32_t invalid = __ballot_sync(~0u, key == nullptr) >> (kWindow - 1 - remaining) * kWarpTokens;
        if (threadIdx.x % 32 == 0) smem.invalid.bits[stage][threadIdx.x / 32] = invalid & ((1 << kWarpTokens) - 1);
    }

    // Copies a key's tail: scales and rotary columns.
    __device__ void copy_tail(uint32_t tile, int token, int vector, const uint4* source) const {
        const uint32_t rope = tile + tail_rope_offset<C>(token, vector);
#pragma unroll
        for (int i = 0; i < kRopeVectors; i += kTokenLanes)
            if (kTokenLanes <= kRopeVectors || vector < kRopeVectors)
                cp_async_16_or_zero(rope ^ i * 16, source + kVectors + kScaleVectors + vector + i, source != nullptr,
                                    policy);
        if (vector < kScaleVectors)
            cp_async_16_or_zero(tile + C::kScaleOffset + (token * kScaleVectors + vector) * 16,
                                source + kVectors + vector, source != nullptr, policy);
    }
};

}  // namespace mla::portable
