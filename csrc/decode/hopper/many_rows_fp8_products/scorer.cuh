// The scorer of many_rows_fp8_products: the warpgroup that converts queries, and computes scores and P^T.
//
//   S^T[tokens x rows] = K Q^T     A = K, B = terms of the queries, both from shared memory
//
// Queries are rounded to e4m3, relative to a power of two for each row. Of the last kTwoTermBlocks column blocks, the
// remainders are rounded, too, and multiplied in the same sum.
#pragma once
#include "memory.cuh"
#include "numbers/query_scale.cuh"
#include "ptx/wgmma.cuh"

namespace mla::hopper {

// Four numbers as e4m3, and what this leaves of them.
struct RoundedToE4m3 {
    uint32_t rounded, remainders;

    // From two pairs of a query's neighbouring columns, times a factor.
    template <typename Element>
    static __device__ RoundedToE4m3 of(uint32_t first, uint32_t second, float factor) {
        const Pair a = pair_of(to_halves<Element>(first, factor)), b = pair_of(to_halves<Element>(second, factor));
        return {a.rounded | b.rounded << 16, a.remainders | b.remainders << 16};
    }

  private:
    struct Pair {
        uint32_t rounded, remainders;
    };
    static __device__ Pair pair_of(uint32_t halves) {
        const auto& numbers = reinterpret_cast<const __half2_raw&>(halves);
        const auto rounded = __nv_cvt_halfraw2_to_fp8x2(numbers, __NV_SATFINITE, __NV_E4M3);
        const __half2_raw rest = __hsub2(__half2(numbers), __half2(__nv_cvt_fp8x2_to_halfraw2(rounded, __NV_E4M3)));
        return {rounded, __nv_cvt_halfraw2_to_fp8x2(rest, __NV_SATFINITE, __NV_E4M3)};
    }
};

template <typename C>
struct Scorer {
    using Element = typename C::Element;
    static constexpr int kThreadRows = C::kRows / 4, kScores = C::kRows / 2, kOctets = C::kRows / 8;
    static constexpr int kTermBytes = C::kRows * 64;  // of a column block
    using Scores = float[kScores];
    static constexpr float kNoKeys = -1e30f;  // the reference of no scores: any score exceeds it
    static constexpr float kExists = 1e29f;   // the magnitude of other references is less
    // In log2. P is relative to a reference of kHeadroom below a row's maximum. e4m3 holds 2^8.8, so the maximum may
    // grow by kStaleBound before the reference is raised.
    static constexpr float kHeadroom = 7.f, kStaleBound = 1.75f;
    // In log2: see few_rows/kernel.cuh.
    static constexpr float kFar = 8.f, kFall = 12.f;
    static constexpr int kMostFalls = 6;

    ConsumerThread<C>& t;
    ManyRowsFp8ProductsMemory<C>& smem;
    const bool paired;
    float l[kThreadRows];    // sums of weights over this thread's tokens
    uint32_t tile = 0;       // of all work tiles
    int falls;               // twice their number in this work tile, plus 1 if the reference falls with the next tile

    __device__ Scorer(ConsumerThread<C>& t, ManyRowsFp8ProductsMemory<C>& smem, bool paired)
        : t(t), smem(smem), paired(paired) {}

    static __device__ void sync() { named_barrier_sync<kScorer, 128>(); }
    static __device__ bool sync_any(bool value) { return named_barrier_any<kScorer, 128>(value); }

    // After `combine_rows`, a lane has this row and the next.
    __device__ int own_row() const { return t.lane / 4 * 8 + t.lane % 4 * 2; }

    // Combines a value of each row over all lanes that hold the row. Leaves a lane own_row() and the next.
    template <int kCount = kThreadRows, typename Combine>
    __device__ float2 combine_rows(float (&values)[kThreadRows], Combine combine) const {
        if constexpr (kCount == 2) {
            return make_float2(values[0], values[1]);
        } else {
            const bool upper = t.lane & kCount;  // a lane keeps half of the rows, its partner the others
#pragma unroll
            for (int i = 0; i < kCount / 2; ++i) {
                const float kept = upper ? values[i + kCount / 2] : values[i];
                const float sent = upper ? values[i] : values[i + kCount / 2];
                values[i] = combine(kept, __shfl_xor_sync(~0u, sent, kCount));
            }
            return combine_rows<kCount / 2>(values, combine);
        }
    }

    // Whether row r of a work tile's m-block exists.
    __device__ bool exists(const WorkTile& work, int r) const {
        return query_token(t.p, work, (work.m_block * C::kRows + r) / t.p.num_heads) < t.p.num_tokens;
    }

    // Loads a thread's share of a query row: 16 B of every column block. 8 neighbouring threads share a row.
    __device__ void load_query_row(uint4 (&words)[C::kQueryColumnBlocks], const WorkTile& work, int r) const {
        const int row = work.m_block * C::kRows + r, token = row / t.p.num_heads, head = row - token * t.p.num_heads;
        const int64_t index = query_token(t.p, work, token);
        const bool exists = index < t.p.num_tokens;
        const int column = t.thread % 8 * 8;
        const auto* nope = static_cast<const Element*>(t.p.q_nope) + column;
        const auto* rope = static_cast<const Element*>(t.p.q_rope) + column;
        if (exists) {
            nope += index * t.p.q_nope_token_stride + head * t.p.q_nope_head_stride;
            rope += index * t.p.q_rope_token_stride + head * t.p.q_rope_head_stride;
        }
#pragma unroll
        for (int b = 0; b < C::kQueryColumnBlocks; ++b) {
            const auto* from = b * 64 < C::kDimLatent ? nope + b * 64 : rope + (b * 64 - C::kDimLatent);
            const bool valid = exists && (C::kDim % 64 == 0 || b * 64 + column < C::kDim);
            words[b] = valid ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
        }
    }

    // Converts a thread's share of query row r. `scale` turns products with unconverted keys into scores in log2.
    __device__ void convert_query_row(const uint4 (&words)[C::kQueryColumnBlocks], int r, float scale) const {
        uint32_t largest = 0;
#pragma unroll
        for (const uint4& eight : words) largest = largest_magnitudes(largest, eight);
        const float most = max_over_lanes<8>(largest_of<Element>(largest));
        const auto [factor, inverse] = QueryScale::of<7>(most);
        const int vector = t.thread % 8;
        unsigned char* to = t.rings.q[0] + r / 8 * 512 + vector_offset<64>(r % 8, vector / 2) + vector % 2 * 8;
#pragma unroll
        for (int b = 0; b < C::kQueryColumnBlocks; ++b) {
            const auto first = RoundedToE4m3::of<Element>(words[b].x, words[b].y, factor);
            const auto second = RoundedToE4m3::of<Element>(words[b].z, words[b].w, factor);
            *reinterpret_cast<uint2*>(to + b * kTermBytes) = make_uint2(first.rounded, second.rounded);
            if (b >= C::kFirstTwoTermBlock)
                *reinterpret_cast<uint2*>(to + (b + C::kTwoTermBlocks) * kTermBytes) =
                    make_uint2(first.remainders, second.remainders);
        }
        // Never 0: masked scores, -INFINITY, are multiplied by it, too. NaN if a query is infinite, as no e4m3 is.
        if (vector == 0) smem.scorer.scale(r) = most < INFINITY ? fmaxf(scale * inverse, 0x1p-126f) : NAN;
    }

    // Converts the queries of a work tile.
    __device__ void prepare_queries(const WorkTile& work) const {
        const float scale = t.p.scale_log2 * *t.p.kv_scale;
        sync();  // all warps have used those of the last work tile
#pragma unroll 1
        for (int r = t.thread / 8; r < C::kRows; r += 32) {
            uint4 words[2][C::kQueryColumnBlocks];
#pragma unroll
            for (int k = 0; k < 2; ++k) load_query_row(words[k], work, r + k * 16);
#pragma unroll
            for (int k = 0; k < 2; ++k) convert_query_row(words[k], r + k * 16, scale);
        }
        if (const int row = t.thread; row < C::kRows) {
            smem.scorer.hidden[row] = work.token_end - key_limit<C>(t.p, work, row);
            smem.scorer.reference(row) = exists(work, row) ? kNoKeys : kNoRow;
        }
        fence_async_proxy();
        sync();
        t.profiler.mark(Event::kQueriesArrived);
    }

    // Starts S^T = K Q^T of a tile, when its keys have arrived.
    __device__ void start_scores(Scores& s, uint32_t tile) const {
        const int stage = tile % C::kStages;
        const uint64_t keys = uniform(make_descriptor(t.rings.kv[stage], 0, C::kTokenGroupBytes, Swizzle::k64B));
        const uint64_t queries = uniform(make_descriptor(t.rings.q[0], 0, 512, Swizzle::k64B));
        using Product = WgmmaE4m3<C::kRows>;
#pragma unroll
        for (int b = 0; b < C::kQueryColumnBlocks; ++b) {
            if (b % C::kBarrierSegments == 0) {
                t.rings.kv_full[stage][C::full_barrier_of(b)].wait(tile / C::kStages % 2);
                if constexpr (!C::kTma) fence_async_proxy();
            }
            if (b == 0) t.profiler.mark(Event::kKeysArrived);
            wgmma_fence();
#pragma unroll
            for (int column = 0; column < min(C::kDim - b * 64, 64); column += 32) {
                const uint64_t a = advance(keys, b * C::kSegmentBytes + column);
                Product::mma(s, a, advance(queries, b * kTermBytes + column), b > 0 || column > 0);
                if (b >= C::kFirstTwoTermBlock)
                    Product::mma(s, a, advance(queries, (b + C::kTwoTermBlocks) * kTermBytes + column), true);
            }
        }
        wgmma_commit();
    }

    // Masks a tile's scores. `remaining`: keys of the work tile from the start of the tile on. Row 0 has the most
    // hidden keys.
    __device__ void mask_scores(Scores& s, int remaining) const {
        mask_unnamed(t, s, tile % C::kStages);
        if (!C::kLists && remaining - C::kTile < smem.scorer.hidden[0]) {
            const int at_token = remaining - t.warp * 16 - t.lane / 4;
#pragma unroll
            for (int j = 0; j < kOctets; ++j) {
                const auto hidden = *reinterpret_cast<const int2*>(smem.scorer.hidden + row_of(t.lane, j * 2));
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (at_token - i / 2 * 8 <= (i % 2 ? hidden.y : hidden.x)) s[j * 4 + i] = -INFINITY;
            }
        }
    }

    // Finds references for this tile: of what is in use and, if `fall`, is lowered first, and of this tile's maxima
    // minus kHeadroom, the greater. `first`: of a work tile. True if a warp's scores of some row are far below the
    // maximum.
    __device__ bool refresh(const Scores& s, int buffer, bool first, bool fall) {
        auto& memory = smem.scorer;
        // Of each warp, where P^T will be.
        auto& largest = reinterpret_cast<float (&)[4][C::kRows]>(smem.weights.tiles[buffer]);
        float tops[kThreadRows];
#pragma unroll
        for (int i = 0; i < kThreadRows; ++i) tops[i] = fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + 2 + i % 2]);
        *reinterpret_cast<float2*>(&largest[t.warp][own_row()]) =
            combine_rows(tops, [](float a, float b) { return fmaxf(a, b); });
        sync();  // every warp's maxima are written
        bool far = false;
        if (const int row = t.thread; row < C::kRows) {
            const float scale = memory.scale(row), before = memory.reference(row);
            const float most = fmaxf(fmaxf(largest[0][row], largest[1][row]), fmaxf(largest[2][row], largest[3][row]));
            const float least = fminf(fminf(largest[0][row], largest[1][row]), fminf(largest[2][row], largest[3][row]));
            const float now = fmaxf(most * scale - kHeadroom, before - (fall ? kFall : 0.f));
            memory.reference(row) = now;
            memory.limits[row] = (now + (kHeadroom + kStaleBound)) * reciprocal_approx(scale);
            smem.weights.factors[buffer][row] = first ? 1.f : exp2_approx(before - now);
            far = fabsf(now) < kExists && least * scale < now + (kHeadroom - kFar);
        }
        far = sync_any(far);
        if (first) return far;
#pragma unroll
        for (int j = 0; j < kOctets; ++j) {
            const auto factor = *reinterpret_cast<const float2*>(&smem.weights.factors[buffer][row_of(t.lane, j * 2)]);
            l[j * 2] *= factor.x, l[j * 2 + 1] *= factor.y;
        }
        return far;
    }

    // Whether this thread has a score whose weight e4m3 does not hold.
    __device__ bool exceeds(const Scores& s) const {
        bool exceeds = false;
#pragma unroll
        for (int j = 0; j < kOctets; ++j) {
            const auto limit = *reinterpret_cast<const float2*>(&smem.scorer.limits[row_of(t.lane, j * 2)]);
#pragma unroll
            for (int i = 0; i < 4; ++i) exceeds |= s[j * 4 + i] > (i % 2 ? limit.y : limit.x);
        }
        return exceeds;
    }

    // Writes P^T = exp2(S^T - references) to shared memory, and adds it to the sums, as rounded: where many weights are
    // alike, so are their errors, which then cancel in the output. (Sums of two are exact enough in fp16.)
    __device__ void store_weights(const Scores& s, unsigned char* target) {
        constexpr int kAtOnce = 4;                        // octets
        constexpr int kOctetBytes = C::kTile / 16 * 128;  // of P^T
        const uint32_t address = smem_address(target) + t.lane / 8 * kOctetBytes + t.warp * 128 + t.lane % 8 * 16;
        auto rounded = [](float first, float second) {
            return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, __NV_E4M3);
        };
        auto halves = [](__nv_fp8x2_storage_t pair) { return __half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)); };
#pragma unroll
        for (int first = 0; first < kOctets; first += kAtOnce) {
            uint32_t weights[kAtOnce];
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                const int j = first + k;
                const auto [reference, scale] = smem.scorer.pairs[row_of(t.lane, j * 2) / 2];
                float e[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    e[i] = exp2_approx(
                        fmaf(s[j * 4 + i], i % 2 ? scale.y : scale.x, i % 2 ? -reference.y : -reference.x));
                const auto first_token = rounded(e[0], e[1]), second_token = rounded(e[2], e[3]);
                const float2 sums = __half22float2(__hadd2(halves(first_token), halves(second_token)));
                l[j * 2] += sums.x, l[j * 2 + 1] += sums.y;
                weights[k] = __byte_perm(first_token, second_token, 0x5140);
            }
            store_matrices_transposed(address + first * kOctetBytes, weights[0], weights[1], weights[2], weights[3]);
        }
    }

    // P^T of a tile, for the consumers.
    __device__ void softmax(const Scores& s, bool first) {
        const int buffer = tile % C::kWeightBuffers;
        auto& weights = smem.weights;
        weights.free[buffer].wait(tile / C::kWeightBuffers % 2 ^ 1);
        const bool fall = !first && falls & 1;
        const bool refreshes = first || fall || sync_any(exceeds(s));
        if (refreshes) {
            const bool far = refresh(s, buffer, first, fall);
            falls = first ? 0 : falls + (falls & 1);
            falls += far && falls < 2 * kMostFalls;
        }
        if (t.thread == 0) weights.rescales[buffer] = refreshes && !first;
        store_weights(s, weights.tiles[buffer]);
        fence_async_proxy();
        __syncwarp();  // lane 0 arrives for all lanes
        if (t.lane == 0) weights.full[buffer].arrive();
        t.profiler.mark(Event::kSoftmax);
    }

    // By every warp, when it has computed its last scores of a work tile.
    __device__ void release_queries() const {
        if (t.lane != 0) return;
        t.rings.q_empty[0].arrive();
        if (paired) arrive_at_partner(t.pair.may_send);
    }

    // Waits for a tile's scores.
    static __device__ void take_scores(Scores& s) {
        wgmma_wait<0>();
        pin_registers(s);
    }

    // What follows a tile's scores.
    __device__ void weigh_tile(Scores& s, int remaining, bool first) {
        if (!C::kLists && remaining < C::kTile)
            zero_values_e4m3<C>(t.warp, t.lane, t.rings.kv[tile % C::kStages], remaining);
        mask_scores(s, remaining);
        softmax(s, first);
        ++tile;
    }

#if OVERLAP
    // A tile that is not the last one: while its weights are found, the next one's scores are computed.
    __device__ void compute_tile(Scores& s, Scores& next, int remaining, bool first) {
        take_scores(s);
        t.profiler.mark(Event::kScores);
        start_scores(next, tile + 1);
        weigh_tile(s, remaining, first);
    }
    __device__ void compute_last_tile(Scores& s, int remaining, bool first) {
        take_scores(s);
        t.profiler.mark(Event::kScores);
        release_queries();
        weigh_tile(s, remaining, first);
    }
    __device__ void compute_work_tile(int keys) {
        int remaining = keys;
#pragma unroll
        for (float& sum : l) sum = 0.f;
        if (remaining == 0) return release_queries();
        Scores s[2];
        start_scores(s[0], tile);
        bool first = true;
#pragma unroll 1
        while (true) {
            if (remaining <= C::kTile) return compute_last_tile(s[0], remaining, first);
            compute_tile(s[0], s[1], remaining, first);
            remaining -= C::kTile;
            if (remaining <= C::kTile) return compute_last_tile(s[1], remaining, false);
            compute_tile(s[1], s[0], remaining, false);
            remaining -= C::kTile;
            first = false;
        }
    }
#else
    __device__ void compute_work_tile(int keys) {
#pragma unroll
        for (float& sum : l) sum = 0.f;
#pragma unroll 1
        for (int remaining = keys; remaining > 0; remaining -= C::kTile) {
            Scores s;
            start_scores(s, tile);
            take_scores(s);
            t.profiler.mark(Event::kScores);
            if (remaining <= C::kTile) release_queries();  // these were the last scores
            weigh_tile(s, remaining, remaining == keys);
        }
        if (keys == 0) release_queries();
    }
#endif

    // Passes maxima and sums of a work tile on.
    __device__ void finish_work_tile(const WorkTile& work, int work_index) {
        float2 sums = combine_rows(l, [](float a, float b) { return a + b; });
        smem.end.free.wait(work_index % 2 ^ 1);
        auto& rows = smem.output.warp_rows;
        if (t.warp == 0) {
            const bool empty = work.token_begin == work.token_end;
            float tops[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                tops[k] = empty ? -INFINITY : smem.scorer.reference(own_row() + k);
                count_sink<C>(t.p, work, own_row() + k, tops[k], k ? sums.y : sums.x);
            }
            // Both consumers have all keys: for the output, the second one adds nothing.
#pragma unroll
            for (auto& of_consumer : rows)
                *reinterpret_cast<float2*>(&of_consumer[4][own_row()]) = make_float2(tops[0], tops[1]);
        }
        *reinterpret_cast<float2*>(&rows[0][t.warp][own_row()]) = sums;
        *reinterpret_cast<float2*>(&rows[1][t.warp][own_row()]) = make_float2(0.f, 0.f);
        if (t.thread == 0) smem.end.cache_scale = *t.p.kv_scale;
        sync();
        if (t.thread == 0) smem.end.full.arrive();
        t.profiler.mark(Event::kMerged);
    }

    __device__ void run(const CtaRange& range) {
        WorkCursor<C> cursor(t.p, range);
        WorkTile work;
        if (paired) cluster_wait();
        for (int work_index = 0; cursor.next(work); ++work_index) {
            if (t.thread == 0) smem.scorer.work = work, smem.scorer.next = cursor.place;
            prepare_queries(work);
            compute_work_tile(work.token_end - work.token_begin);
            work = smem.scorer.work;
            cursor.place = smem.scorer.next;
            finish_work_tile(work, work_index);
        }
    }
};

}  // namespace mla::hopper
