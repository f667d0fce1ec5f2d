// MLA decode by mma.sync, for sm_80 and everything newer without a kernel of its own. The latent columns are divided
// among the warps, so that shared memory holds keys alone and each key is read from it once, however many rows.
//
//   S[rows x tokens]  = Q * K^T     each warp over its own columns; the partial sums meet in shared memory
//   O[rows x columns] += P * V      each warp its own columns, which are those of the keys that it multiplied
//
// grid   one persistent CTA per SM, walking the range that the planner gave it (common/work.cuh)
// block  8 warps, all the same: d_c / 8 latent columns (and 8 rotary ones, while there are any) of Q and O in the
//        registers of each. All copy keys by cp.async, up to kStages tiles ahead and across entries.
//
// a tile of kTile tokens, between the two barriers that it takes:
//   barrier  the partial scores of the tile are written; its predecessor's stage is free
//   phase 1  copy a later tile into that stage. Sum the scores over the warps and exponentiate: warp w has rows w and
//            w + 8 of every 16, a lane one token of one of the two rows in every 16 tokens
//   barrier  P is written, and the next tile has landed
//   phase 2  O += P * V; partial scores of the next tile
//
// shared memory (SharedMemoryPlan)
//   kv       kStages tiles: [d / 64][kTile][128 B], 16-byte pieces swizzled: piece p of token t lies at p ^ t % 8. So
//            eight tokens' pieces (K) and, transposed, eight tokens' columns (V) come without bank conflicts.
//   scores   [warp][16 tokens][16 rows] accumulator fragments, the second eight tokens' with their halves of 128 B
//            exchanged: a warp's two rows then lie in different banks for both
//   p        [16 tokens][16 rows] operand fragments
//
// softmax  Exponentials use a maximum that may be stale by up to 8 (log2): P then stays below 2^8, and fp32 sums and
//          16-bit P keep their relative precision. A row's maximum and sum live in the warp that owns the row; only
//          when a score exceeds the bound is the maximum refreshed, and the second barrier tells all warps to rescale.
//
// invariants
//   * keys outside [token_begin, token_end) are not read: their bytes in a stage are zeros, their scores are masked
//   * every share of an entry that a cut goes through leaves an fp32 partial (common/reduce.cuh); a CTA waits for
//     others only after all its own work
//   * a fixed order everywhere: the same inputs and plan give the same bits
#pragma once
#include "../common/copy.cuh"
#include "../common/params.cuh"
#include "../common/reduce.cuh"
#include "../common/sync.cuh"
#include "mma.cuh"

namespace mla::sm80 {

// kDependentLaunch: the launch may overlap its predecessor (sm_90 and newer).
template <typename Element_, int kDimLatent_, int kDimRope_, int kRows_, int kTile_, int kStages_,
          bool kDependentLaunch_>
struct DecodeConfig {
    using Element = Element_;
    static constexpr int kDimLatent = kDimLatent_;
    static constexpr int kDimRope = kDimRope_;
    static constexpr int kDim = kDimLatent + kDimRope;
    static constexpr int kRows = kRows_;
    static constexpr int kTile = kTile_;
    static constexpr int kStages = kStages_;
    static constexpr bool kDependentLaunch = kDependentLaunch_;
    static constexpr int kUnit = 16;

    static constexpr int kWarps = 8;
    static constexpr int kBlocks = kRows / 16;            // of 16 rows
    static constexpr int kGroups = kTile / 16;            // of 16 tokens
    static constexpr int kColumns = kDimLatent / kWarps;  // of a warp
    static constexpr int kRopeWarps = kDimRope / 8;       // warps that have 8 rotary columns
    static constexpr int kChunks = (kDim + 63) / 64;      // of 64 columns = 128 B
    static constexpr int kChunkBytes = kTile * 128;
    static constexpr int kTileBytes = kChunks * kChunkBytes;

    static_assert(kRows % 16 == 0 && kTile % 16 == 0 && kTile <= 64);
    static_assert(kDimLatent % 64 == 0 && kColumns % 32 == 0 && kDimRope % 8 == 0 && kRopeWarps <= kWarps);
    static_assert(kStages >= 3);
};

constexpr int kThreads = 256;
constexpr float kStaleBound = 8.f;

template <typename C>
struct SharedMemoryPlan {
    alignas(128) unsigned char kv[C::kStages][C::kTileBytes];
    // What ends an entry takes the place of its scores.
    union {
        alignas(128) float4 scores[C::kWarps][C::kGroups][C::kBlocks][2][32];
        struct {
            RowTable<C::kRows> rows;
            RowState states[C::kRows];
        } end;
    };
    alignas(128) uint4 p[C::kGroups][C::kBlocks][32];
    float top[C::kRows];     // the maximum that exponentials of a row use; known to the row's warp alone
    float factor[C::kRows];  // by which a refreshed maximum scales O
    CtaRange range;
    uint32_t flag;  // this CTA's, when the launch began
    // Here, because 64 rows leave no registers for them:
    WorkItem item;     // whose keys are being multiplied
    int unmasked_end;  // all its rows see the keys before this one
    int splits;        // items so far of entries that others share
};

// Copies keys tile by tile, in the order in which the CTA needs them. A thread copies part of one row of each tile,
// whose place it looks up one tile before.
template <typename C>
struct Keys {
    static constexpr int kLanes = kThreads / C::kTile;  // threads of a row
    static constexpr int kPieces = C::kDim / 8;         // of 16 bytes

    const DecodeParams& p;
    const uint32_t stages;  // address of this thread's first piece in stage 0
    const uint64_t policy;
    WorkCursor<C::kRows, C::kUnit> cursor;
    const int* table = nullptr;
    int token = 0, token_end = 0;  // where the next tile begins, and where its item ends
    int entry = 0;                 // what the table says of this thread's row of the tile
    bool exists = true;            // whether there is a next tile

    __device__ Keys(const DecodeParams& p, SharedMemoryPlan<C>& smem)
        : p(p),
          stages(smem_address(smem.kv) + piece() / 8 * C::kChunkBytes + row() * 128 + (piece() % 8 ^ row() % 8) * 16),
          policy(cache_policy(p.num_heads * p.lengths.query_len <= C::kRows)),
          cursor(p.lengths, p.num_heads, smem.range) {
        look_up();
    }

    // This thread's row of a tile, and its first piece of it.
    __device__ static int row() { return threadIdx.x / kLanes; }
    __device__ static int piece() { return threadIdx.x % kLanes; }

    // Division by the page size, most often a shift.
    __device__ int page_of(int token) const {
        const int size = p.page_size;
        return (size & size - 1) == 0 ? token >> 31 - __clz(size) : token / size;
    }

    __device__ void look_up() {
        while (token >= token_end) {
            WorkItem item;
            exists = cursor.next(item);
            if (!exists) return;
            table = p.table_row(item.request);
            token = item.token_begin;
            token_end = item.token_end;
        }
        const int own = token + row();
        if (own < token_end) entry = table[p.token_table ? own : page_of(own)];
    }

    // One more tile, as one group of copies (an empty one behind the last tile).
    __device__ void copy(int stage) {
        if (exists) {
            const int own = token + row(), index = p.token_table ? entry : own, page = page_of(index);
            const bool valid = own < token_end;
            const auto* source = static_cast<const typename C::Element*>(p.cache) + piece() * 8;
            if (valid)
                source += (p.token_table ? page : entry) * p.page_stride + (index - page * p.page_size) * p.row_stride;
            const uint32_t destination = stages + stage * C::kTileBytes;
#pragma unroll
            for (int i = 0; i < (kPieces + kLanes - 1) / kLanes; ++i)
                if ((i + 1) * kLanes <= kPieces || piece() < kPieces % kLanes)
                    cp_async_16(destination + i * (kLanes / 8 * C::kChunkBytes), source + i * kLanes * 8,
                                valid ? 16 : 0, policy);
            token += C::kTile;
            look_up();
        }
        cp_async_commit();
    }
};

template <typename C>
struct Decoder {
    using Element = typename C::Element;
    using OutputPieces = Pieces<C::kRows, C::kDimLatent, false>;
    static constexpr int kBlocks = C::kBlocks;
    static constexpr int kEarlyGroups = kBlocks <= 3 ? 1 : 0;  // groups of 16 tokens whose values are loaded early

    const DecodeParams& p;
    SharedMemoryPlan<C>& smem;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    // In fragments (mma.cuh): of 16 rows, this warp's columns.
    uint32_t q[kBlocks][C::kColumns / 16][4], q_rope[kBlocks][2];
    float o[kBlocks][C::kColumns / 8][4];
    float l[kBlocks];  // sum of the weights of `row_of`, over this lane's tokens alone

    __device__ Decoder(const DecodeParams& p, SharedMemoryPlan<C>& smem) : p(p), smem(smem) {}

    // Offsets within a stage of this lane's row of the matrices that it loads; other pieces are an exclusive or away.
    __device__ uint32_t piece_offset(int token, int piece) const {
        return warp * C::kColumns / 64 * C::kChunkBytes + token * 128 +
               (((warp * C::kColumns / 8 + piece) ^ token) % 8) * 16;
    }
    __device__ uint32_t key_offset() const { return piece_offset(lane % 8, lane / 8); }
    __device__ uint32_t value_offset() const { return piece_offset(lane % 16, lane / 16); }
    __device__ uint32_t rope_offset() const {
        return C::kDimLatent / 64 * C::kChunkBytes + lane % 8 * 128 + (warp ^ lane % 8) * 16;
    }

    // Rows that do not exist are zeros.
    __device__ void load_queries(const WorkItem& item) {
#pragma unroll
        for (int i = 0; i < kBlocks * 2; ++i) {
            const int row = item.block * C::kRows + i * 8 + lane / 4;
            const int token = row / p.num_heads, head = row - token * p.num_heads;
            const int64_t index = item.query_begin + token;
            const bool exists = token < item.query_len;
            const auto* nope = reinterpret_cast<const uint32_t*>(static_cast<const Element*>(p.q_nope) +
                                                                 index * p.q_nope_token_stride +
                                                                 head * p.q_nope_head_stride + warp * C::kColumns) +
                               lane % 4;
            const auto* rope =
                reinterpret_cast<const uint32_t*>(static_cast<const Element*>(p.q_rope) +
                                                  index * p.q_rope_token_stride + head * p.q_rope_head_stride) +
                warp * 4 + lane % 4;
#pragma unroll
            for (int piece = 0; piece < C::kColumns / 8; ++piece)
                q[i / 2][piece / 2][piece % 2 * 2 + i % 2] = exists ? nope[piece * 4] : 0;
            q_rope[i / 2][i % 2] = exists && warp < C::kRopeWarps ? *rope : 0;
        }
    }

    __device__ void reset_state() {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            if (first_of_row()) smem.top[row_of(block)] = -INFINITY;
            l[block] = 0.f;
#pragma unroll
            for (int i = 0; i < C::kColumns / 8; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k) o[block][i][k] = 0.f;
        }
    }

    // Adds to s this warp's part of the scores of kHalves times 8 tokens.
    template <int kHalves>
    __device__ void score(float (&s)[kHalves][kBlocks][4], uint32_t keys, uint32_t rope_keys) {
#pragma unroll
        for (int pieces = 0; pieces < C::kColumns / 8; pieces += 4)
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                uint32_t k[4];
                load_matrices(k, (keys + half * 1024) ^ pieces * 16);
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    mma<Element>(s[half][block], q[block][pieces / 2], k[0], k[1]);
                    mma<Element>(s[half][block], q[block][pieces / 2 + 1], k[2], k[3]);
                }
            }
        if (C::kRopeWarps == C::kWarps || warp < C::kRopeWarps)
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                uint32_t k;
                load_matrix(k, rope_keys + half * 1024);
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) mma<Element>(s[half][block], q_rope[block], k);
            }
    }

    template <int kHalves>
    __device__ void store_scores(const float (&s)[kHalves][kBlocks][4], int eight) {
#pragma unroll
        for (int i = 0; i < kHalves; ++i)
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                const int group = (eight + i) / 2, half = (eight + i) % 2;
                smem.scores[warp][group][block][half][lane ^ half * 4] =
                    make_float4(s[i][block][0], s[i][block][1], s[i][block][2], s[i][block][3]);
            }
    }

    // This warp's part of the scores of a tile, and other multiplications that may go beside it: between this one's
    // products and their storing if there are registers for that, before it otherwise.
    template <typename Beside>
    __device__ void score_tile(uint32_t kv, Beside beside) {
        constexpr int kEights = C::kTile / 8, kTogether = kBlocks * kEights <= 4 ? kEights : 1;
        const uint32_t keys = kv + key_offset(), rope_keys = kv + rope_offset();
        if constexpr (kTogether == 1) beside();
#pragma unroll
        for (int eight = 0; eight < kEights; eight += kTogether) {
            float s[kTogether][kBlocks][4] = {};
            score(s, keys + eight * 1024, rope_keys + eight * 1024);
            if constexpr (kTogether > 1) beside();
            store_scores(s, eight);
        }
    }

    // The row and, of every 16, the token that this lane has in the softmax. (Lanes count the elements that the warp
    // writes to P, in the order of their addresses.)
    __device__ int row_of(int block) const { return block * 16 + lane / 2 % 2 * 8 + warp; }
    __device__ bool first_of_row() const { return (lane & ~2) == 0; }
    __device__ int token_of() const { return lane / 4 % 2 * 8 + lane / 8 * 2 + lane % 2; }

    // One more than the last key that a row of the block may see.
    __device__ int key_limit(const WorkItem& item, int row) const {
        if (!p.causal) return item.token_end;
        const int query = (item.block * C::kRows + row) / p.num_heads;
        return min(item.token_end, item.seq_len - item.query_len + query + 1);
    }

    // Writes P and the factors for O; true if they are not all 1.
    __device__ bool exponentiate(int tile_token) {
        float s[C::kGroups][kBlocks], m[kBlocks];
        bool exceeds = false;
        const int half = lane / 4 % 2;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) m[block] = smem.top[row_of(block)];
#pragma unroll
        for (int group = 0; group < C::kGroups; ++group)
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                float part[C::kWarps];
#pragma unroll
                for (int w = 0; w < C::kWarps; ++w)
                    part[w] = reinterpret_cast<const float*>(
                        &smem.scores[w][group][block][half][warp * 4 + lane / 8 ^ half * 4])[lane % 4];
                s[group][block] =
                    ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
                s[group][block] *= p.scale_log2;
            }
        if (tile_token + C::kTile > smem.unmasked_end) {
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                const int limit = key_limit(smem.item, row_of(block)) - tile_token - token_of();
#pragma unroll
                for (int group = 0; group < C::kGroups; ++group)
                    if (group * 16 >= limit) s[group][block] = -INFINITY;
            }
        }
#pragma unroll
        for (int group = 0; group < C::kGroups; ++group)
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) exceeds |= s[group][block] > m[block] + kStaleBound;

        const bool refresh = __any_sync(~0u, exceeds);
        float factor[kBlocks];
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) factor[block] = 1.f;
        if (refresh) {
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                float top = m[block];
#pragma unroll
                for (int group = 0; group < C::kGroups; ++group) top = fmaxf(top, s[group][block]);
                // over the lanes of the row: all bits of the lane's number but the second
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 4));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
                factor[block] = exp2_approx(m[block] - finite(top));
                l[block] *= factor[block];
                m[block] = top;
                __syncwarp();
                if (first_of_row()) smem.top[row_of(block)] = top;
            }
        }
        if (first_of_row())
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) smem.factor[row_of(block)] = factor[block];
#pragma unroll
        for (int group = 0; group < C::kGroups; ++group)
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                const float weight = exp2_approx(s[group][block] - finite(m[block]));
                l[block] += weight;
                reinterpret_cast<Element*>(smem.p[group][block])[warp * 32 + lane] = static_cast<Element>(weight);
            }
        return refresh;
    }

    __device__ void rescale() {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            const float low = smem.factor[block * 16 + lane / 4], high = smem.factor[block * 16 + 8 + lane / 4];
#pragma unroll
            for (int i = 0; i < C::kColumns / 8; ++i)
                o[block][i][0] *= low, o[block][i][1] *= low, o[block][i][2] *= high, o[block][i][3] *= high;
        }
    }

    // Values of 16 tokens, 16 columns.
    __device__ void load_values(uint32_t (&v)[4], uint32_t kv, int group, int i) const {
        load_matrices_transposed(v, (kv + value_offset() + group * 2048) ^ i * 32);
    }

    // O += P * V. `ready` holds values that were loaded before P was there, as far as registers allow.
    __device__ void accumulate(uint32_t kv, const uint32_t (&ready)[kEarlyGroups + 1][C::kColumns / 16][4]) {
#pragma unroll
        for (int group = 0; group < C::kGroups; ++group) {
            uint32_t weights[kBlocks][4];
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                const uint4 four = smem.p[group][block][lane];
                weights[block][0] = four.x, weights[block][1] = four.y;
                weights[block][2] = four.z, weights[block][3] = four.w;
            }
#pragma unroll
            for (int i = 0; i < C::kColumns / 16; ++i) {
                uint32_t v[4];
                if (group < kEarlyGroups) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) v[k] = ready[group][i][k];
                } else {
                    load_values(v, kv, group, i);
                }
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    mma<Element>(o[block][i * 2], weights[block], v[0], v[1]);
                    mma<Element>(o[block][i * 2 + 1], weights[block], v[2], v[3]);
                }
            }
        }
    }

    // Where the rows of an entry go; a barrier must follow.
    __device__ void fill(RowTable<C::kRows>& rows, const WorkItem& item, int tid) const {
        if (tid >= C::kRows) return;
        const int row = item.block * C::kRows + tid, token = row / p.num_heads, head = row - token * p.num_heads;
        const int64_t index = item.query_begin + token;
        const bool exists = token < item.query_len;
        rows.out[tid] = exists ? index * p.out_token_stride + head * p.out_head_stride : -1;
        rows.lse[tid] = exists ? index * p.lse_token_stride + head * p.lse_head_stride : -1;
    }

    // Writes the output of an entry, or a partial of it.
    __device__ void finish_entry(const WorkItem& item) {
        __syncthreads();  // no warp may have begun the last tile's softmax late: entries without keys have none
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            l[block] += __shfl_xor_sync(~0u, l[block], 1);
            l[block] += __shfl_xor_sync(~0u, l[block], 4);
            l[block] += __shfl_xor_sync(~0u, l[block], 8);
            l[block] += __shfl_xor_sync(~0u, l[block], 16);
            if (first_of_row()) smem.end.states[row_of(block)] = {smem.top[row_of(block)], l[block]};
        }
        if (!item.split()) fill(smem.end.rows, item, threadIdx.x);
        __syncthreads();
        if (item.split()) {
            const Partials<OutputPieces> partials(p, item, smem.range);
            float4* slot = partials.slot(blockIdx.x, item.whole_begin);
            float4* piece = slot + lane / 4 * OutputPieces::kPairPieces + warp * (C::kColumns / 2) + lane % 4;
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
#pragma unroll
                for (int i = 0; i < C::kColumns / 8 && block * 8 * OutputPieces::kPairPieces < partials.pieces; ++i)
                    __stcg(piece + block * 8 * OutputPieces::kPairPieces + i * 4,
                           make_float4(o[block][i][0], o[block][i][1], o[block][i][2], o[block][i][3]));
            int tid = threadIdx.x;
            asm volatile("" : "+r"(tid));  // or else indices would be computed ahead of the entries, and kept
            partials.write_states(slot, tid, kThreads, [&](int row) { return smem.end.states[row]; });
        } else {
#pragma unroll
            for (int i = 0; i < kBlocks * 2; ++i) {
                const int row = i * 8 + lane / 4;
                const float total = smem.end.states[row].total, inverse = total > 0.f ? 1.f / total : 0.f;
                const int64_t offset = smem.end.rows.out[row];
                if (offset < 0) continue;
                auto* out = static_cast<Element*>(p.out) + offset + warp * C::kColumns + lane % 4 * 2;
#pragma unroll
                for (int piece = 0; piece < C::kColumns / 8; ++piece)
#pragma unroll
                    for (int k = 0; k < 2; ++k)
                        out[piece * 8 + k] = static_cast<Element>(o[i / 2][piece][i % 2 * 2 + k] * inverse);
            }
            if (threadIdx.x < C::kRows) store_lse(p, smem.end.rows, threadIdx.x, smem.end.states[threadIdx.x]);
        }
        __syncthreads();
    }

    __device__ void run() {
        Keys<C> keys(p, smem);
#pragma unroll 1
        for (int i = 0; i < C::kStages - 1; ++i) keys.copy(i);

        const uint32_t kv = smem_address(smem.kv);
        int stage = 0;
        WorkCursor<C::kRows, C::kUnit> cursor(p.lengths, p.num_heads, smem.range);
        const WorkItem& item = smem.item;
        while (true) {
            WorkItem next;
            if (!cursor.next(next)) break;
            if (threadIdx.x == 0) {
                smem.item = next;
                smem.unmasked_end = key_limit(next, 0);
                smem.splits += next.split();
            }
            load_queries(next);
            reset_state();
            cp_async_wait<C::kStages - 2>();  // for the CTA's first tile; others' were waited for before
            __syncthreads();
            if (item.token_begin < item.token_end) score_tile(kv + stage * C::kTileBytes, [] {});
            for (int token = item.token_begin; token < item.token_end; token += C::kTile) {
                __syncthreads();
                keys.copy(stage == 0 ? C::kStages - 1 : stage - 1);
                const bool refreshed = exponentiate(token);
                const uint32_t current = kv + stage * C::kTileBytes;
                uint32_t v[kEarlyGroups + 1][C::kColumns / 16][4];
#pragma unroll
                for (int group = 0; group < kEarlyGroups; ++group)
#pragma unroll
                    for (int i = 0; i < C::kColumns / 16; ++i) load_values(v[group][i], current, group, i);
                cp_async_wait<C::kStages - 2>();
                if (__syncthreads_or(refreshed)) rescale();
                stage = stage + 1 == C::kStages ? 0 : stage + 1;
                // Behind the last tile, the scores are those of the tile at hand once more, and nobody reads them.
                score_tile(token + C::kTile < item.token_end ? kv + stage * C::kTileBytes : current,
                           [&] { accumulate(current, v); });
            }
            finish_entry(item);
        }
        if (threadIdx.x == 0) raise_flag(p, smem.flag);
        // Two split entries, at the range's two ends, take half of the warps each; a single one takes all. The ring is
        // free to be their scratch.
        if (smem.splits > 0) reduce(smem.splits == 1);
    }

    // Two split entries, at the range's two ends, take half of the warps each; a single one takes all. The ring is free
    // to be their scratch.
    __device__ void reduce(bool together) {
        struct Scratch {
            RowTable<C::kRows> rows;
            float4 sums[2 * kThreads];
        };
        static_assert(2 * sizeof(Scratch) <= sizeof(smem.kv));
        const int team = together ? 0 : warp / 4, threads = together ? kThreads : kThreads / 2;
        const int tid = together ? threadIdx.x : threadIdx.x % threads;
        auto& scratch = *reinterpret_cast<Scratch*>(smem.kv[0] + team * sizeof(Scratch));
        auto sync_team = [&] {
            if (together)
                __syncthreads();
            else if (team == 0)
                named_barrier_sync<1, kThreads / 2>();
            else
                named_barrier_sync<2, kThreads / 2>();
        };
        int index = 0;
        WorkCursor<C::kRows, C::kUnit> cursor(p.lengths, p.num_heads, smem.range);
        WorkItem item;
        while (cursor.next(item)) {
            if (item.split() && index++ == team) {
                fill(scratch.rows, item, tid);
                sync_team();
                Partials<OutputPieces>(p, item, smem.range)
                    .template reduce<Element>(smem.flag, scratch.rows, scratch.sums, tid, threads, sync_team);
            }
        }
    }
};

template <typename C>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) unsigned char bytes[];
    auto& smem = *reinterpret_cast<SharedMemoryPlan<C>*>(bytes);
    if constexpr (C::kDependentLaunch) {
        wait_for_predecessor();
        allow_successor();
    }
    if (threadIdx.x < sizeof(CtaRange) / 4)
        reinterpret_cast<int*>(&smem.range)[threadIdx.x] =
            reinterpret_cast<const int*>(p.ranges + blockIdx.x)[threadIdx.x];
    if (threadIdx.x == 0) {
        smem.flag = read_flag(p);
        smem.splits = 0;
    }
    if (threadIdx.x == 32) smem.flag = read_flag(p);
    __syncthreads();
    Decoder<C>(p, smem).run();
}

}  // namespace mla::sm80
