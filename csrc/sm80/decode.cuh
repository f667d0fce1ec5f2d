// MLA decode by mma.sync, for sm_80 and everything newer without a kernel of its own. The latent columns are divided
// among the warps, so that shared memory holds keys alone: queries and outputs stay in registers, and each key is read
// from shared memory once for each product, however many rows there are.
//
//   S[rows x tokens]  = Q * K^T     each warp over its own columns; the partial sums meet in shared memory
//   O[rows x columns] += P * V      each warp its own columns, which are those of the keys that it multiplied
//
// grid   one persistent CTA per SM, walking the range that the planner gave it (common/work.cuh)
// block  8 warps, all the same: d_c / 8 latent columns (and 8 rotary ones, while there are any) of Q and O in the
//        registers of each. All copy keys by cp.async, up to kStages - 1 tiles ahead and across entries.
//
// a tile of kTile tokens, with the two barriers that it takes:
//   barrier  the partial scores of the tile are written; its predecessor's stage is free
//   phase 1  copy a later tile into that stage. Sum the scores over the warps and exponentiate
//   barrier  P is written, and the next tile has landed
//   phase 2  partial scores of the next tile; O += P * V
//
// shared memory (SharedMemoryPlan)
//   kv       kStages tiles: [d / 64][kTile][128 B], 16-byte pieces swizzled: piece p of token t lies at p ^ t % 8. So
//            eight tokens' pieces (K) and, transposed, eight tokens' columns (V) come without bank conflicts.
//   scores   [warp][16 rows][8 tokens] accumulator fragments (mma.cuh) of 4 floats a lane; of every second eight tokens
//            halves of 128 B are exchanged, so that 8 lanes read those of two adjacent eights without bank conflicts
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
    static constexpr int kEights = kTile / 8;             // of 8 tokens
    static constexpr int kSteps = kTile / 16;             // of 16 tokens
    static constexpr int kColumns = kDimLatent / kWarps;  // of a warp
    static constexpr int kRopeWarps = kDimRope / 8;       // warps that have 8 rotary columns
    static constexpr int kChunks = (kDim + 63) / 64;      // of 64 columns = 128 B
    static constexpr int kChunkBytes = kTile * 128;
    static constexpr int kTileBytes = kChunks * kChunkBytes;

    static_assert((kRows == 16 || kRows == 32 || kRows == 64) && (kTile == 16 || kTile == 32));
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
        alignas(128) float4 scores[C::kWarps][C::kBlocks][C::kEights][32];
        struct {
            RowTable<C::kRows> rows;
            RowState states[C::kRows];
        } end;
    };
    alignas(128) uint4 p[C::kSteps][C::kBlocks][32];
    float top[C::kRows];     // the maximum that exponentials of a row use; known to the row's warp alone
    float factor[C::kRows];  // by which a refreshed maximum scales O
    CtaRange range;
    uint32_t flag;  // this CTA's, when the launch began
    // Here, because 64 rows leave no registers for them:
    WorkItem item;     // whose keys are being multiplied
    int unmasked_end;  // all its rows see the keys before this one
    int splits;        // items so far of entries that others share
};

// Copies keys tile by tile, in the order in which the CTA needs them. A warp copies a few rows of each tile; each of
// its lanes knows where one of the warp's rows is, of a window of kWindow tiles, and has looked up another one of the
// next window.
template <typename C>
struct Keys {
    static constexpr int kLanes = kThreads / C::kTile;        // threads of a row
    static constexpr int kWarpRows = C::kTile / C::kWarps;    // of a tile
    static constexpr int kWindow = 32 / kWarpRows;            // tiles
    static constexpr int kWindowTokens = kWindow * C::kTile;  // of an item
    static constexpr int kPieces = C::kDim / 8;               // of 16 bytes

    const DecodeParams& p;
    const uint32_t stages;  // address of this thread's first piece in stage 0
    const uint64_t policy;
    WorkCursor<C::kRows, C::kUnit> cursor;
    const int* table = nullptr;    // of the item with the next window
    int token = 0, token_end = 0;  // where the next window begins, and where its item ends
    int entry = 0;                 // what the table says of this lane's row of the next window
    int64_t row = 0;               // offset of this lane's row of this window; negative if there is none
    int turn = 0, tiles = 0;       // within this window

    __device__ Keys(const DecodeParams& p, SharedMemoryPlan<C>& smem)
        : p(p),
          stages(smem_address(smem.kv) + first_piece() / 8 * C::kChunkBytes + threadIdx.x / kLanes * 128 +
                 (first_piece() % 8 ^ threadIdx.x / kLanes % 8) * 16),
          policy(cache_policy(p.num_heads * p.lengths.query_len <= C::kRows)),
          cursor(p.lengths, p.num_heads, smem.range) {
        look_up();
    }

    __device__ static int first_piece() { return threadIdx.x % kLanes; }
    // This lane's row of the next window.
    __device__ int own_token() const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        return token + lane / kWarpRows * C::kTile + warp * kWarpRows + lane % kWarpRows;
    }

    // Looks up the next window, which begins at `token` of the item at hand or with another item.
    __device__ void look_up() {
        while (token >= token_end) {
            WorkItem item;
            if (!cursor.next(item)) {
                token_end = -1;
                return;
            }
            table = p.table_row(item.request);
            token = item.token_begin;
            token_end = item.token_end;
        }
        if (own_token() < token_end) entry = table[p.token_table ? own_token() : own_token() / p.page_size];
    }

    // Makes the window that was looked up the one to copy.
    __device__ void next_window() {
        if (token_end < 0) {
            tiles = -1;
            return;
        }
        const int index = p.token_table ? entry : own_token(), page = index / p.page_size;
        row = own_token() < token_end
                  ? (p.token_table ? page : entry) * p.page_stride + (index - page * p.page_size) * p.row_stride
                  : -1;
        turn = 0;
        tiles = min(kWindow, (token_end - token + C::kTile - 1) / C::kTile);
        token += kWindowTokens;
        look_up();
    }

    // One more tile, as one group of copies (an empty one behind the last tile).
    __device__ void copy(int stage) {
        if (turn == tiles) next_window();
        if (tiles > 0) {
            const int64_t offset = __shfl_sync(~0u, row, turn * kWarpRows + threadIdx.x % 32 / kLanes);
            const auto* source = static_cast<const typename C::Element*>(p.cache) + offset + first_piece() * 8;
            const uint32_t destination = stages + stage * C::kTileBytes;
            auto for_own_pieces = [&](auto action) {
#pragma unroll
                for (int i = 0; i < (kPieces + kLanes - 1) / kLanes; ++i)
                    if ((i + 1) * kLanes <= kPieces || first_piece() < kPieces % kLanes)
                        action(destination + i * (kLanes / 8 * C::kChunkBytes), source + i * kLanes * 8);
            };
            if (__builtin_expect(offset >= 0, 1))
                for_own_pieces([&](uint32_t to, const void* from) { cp_async_16(to, from, policy); });
            else
                for_own_pieces([&](uint32_t to, const void*) { store_zeros(to); });
            ++turn;
        }
        cp_async_commit();
    }
};

template <typename C>
struct Decoder {
    using Element = typename C::Element;
    using OutputPieces = Pieces<C::kRows, C::kDimLatent, false>;
    static constexpr int kBlocks = C::kBlocks;
    static constexpr bool kRoomy = kBlocks * C::kColumns <= 128;  // Q and O leave registers for products side by side

    // The softmax: of a fragment a thread takes kVector elements: all 4, those of one row, or one; kUnits times.
    static constexpr int kElements = C::kRows * C::kTile / kThreads;
    static constexpr int kVector = kElements < 4 ? kElements : 4;
    static constexpr int kUnits = kElements / kVector;
    static constexpr int kRowsOwned = kVector == 4 ? 2 : 1;                   // rows of a thread in a unit: r and r + 8
    static constexpr int kTokensOwned = kVector == 1 ? 1 : 2;                 // adjacent ones
    static constexpr int kPairLanes = C::kEights * 4 / kUnits * 4 / kVector;  // lanes that share r and r + 8

    const DecodeParams& p;
    SharedMemoryPlan<C>& smem;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    // In fragments (mma.cuh): of 16 rows, this warp's columns.
    uint32_t q[kBlocks][C::kColumns / 16][4], q_rope[kBlocks][2];
    float o[kBlocks][C::kColumns / 8][4];
    float l[kRowsOwned];  // sum of the weights of `row_of`, over this thread's tokens alone

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
        for (int i = 0; i < kRowsOwned; ++i) {
            if (first_of_row()) smem.top[row_of(i)] = -INFINITY;
            l[i] = 0.f;
        }
#pragma unroll
        for (int block = 0; block < kBlocks; ++block)
#pragma unroll
            for (int i = 0; i < C::kColumns / 8; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k) o[block][i][k] = 0.f;
    }

    // Adds to s this warp's part of the scores of kEights times 8 tokens, in kChains sums.
    template <int kEights, int kChains>
    __device__ void score(float (&s)[kEights][kBlocks][kChains][4], uint32_t keys, uint32_t rope_keys) {
#pragma unroll
        for (int pieces = 0; pieces < C::kColumns / 8; pieces += 4)
#pragma unroll
            for (int eight = 0; eight < kEights; ++eight) {
                uint32_t k[4];
                load_matrices(k, (keys + eight * 1024) ^ pieces * 16);
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    mma<Element>(s[eight][block][0], q[block][pieces / 2], k[0], k[1]);
                    mma<Element>(s[eight][block][kChains - 1], q[block][pieces / 2 + 1], k[2], k[3]);
                }
            }
        if (C::kRopeWarps == C::kWarps || warp < C::kRopeWarps)
#pragma unroll
            for (int eight = 0; eight < kEights; ++eight) {
                uint32_t k;
                load_matrix(k, rope_keys + eight * 1024);
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) mma<Element>(s[eight][block][0], q_rope[block], k);
            }
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight)
#pragma unroll
            for (int block = 0; block < kBlocks; ++block)
#pragma unroll
                for (int k = 0; kChains == 2 && k < 4; ++k) s[eight][block][0][k] += s[eight][block][1][k];
    }

    // This warp's part of the scores of a tile, and other multiplications that may go beside it: between this one's
    // products and their storing if there are registers for that, before it otherwise.
    template <typename Beside>
    __device__ void score_tile(uint32_t kv, Beside beside) {
        constexpr int kTogether = !kRoomy ? 1 : kBlocks * C::kEights <= 4 ? C::kEights : 2;
        constexpr int kChains = kBlocks * kTogether <= 2 ? 2 : 1;
        constexpr bool kFirst = kTogether == C::kEights;
        const uint32_t keys = kv + key_offset(), rope_keys = kv + rope_offset();
        if constexpr (!kFirst) beside();
#pragma unroll
        for (int eight = 0; eight < C::kEights; eight += kTogether) {
            float s[kTogether][kBlocks][kChains][4] = {};
            score(s, keys + eight * 1024, rope_keys + eight * 1024);
            if constexpr (kFirst) beside();
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    const float* sum = s[i][block][0];
                    smem.scores[warp][block][eight + i][lane ^ (eight + i) % 2 * 4] =
                        make_float4(sum[0], sum[1], sum[2], sum[3]);
                }
        }
    }

    // What this thread has in the softmax: kVector elements from element() on, of lane pair() % 8 * 4 + quad() of the
    // score fragments of block() and eight_of(unit). The lanes that share a pair of rows count [eight][quad][element].
    __device__ int pair_lane() const { return lane % kPairLanes; }
    __device__ int pair() const { return warp * (32 / kPairLanes) + lane / kPairLanes; }
    __device__ int block() const { return pair() / 8; }
    __device__ int quad() const { return pair_lane() / (4 / kVector) % 4; }
    __device__ int eight_of(int unit) const { return unit * (C::kEights / kUnits) + pair_lane() / (16 / kVector); }
    __device__ int element() const { return pair_lane() % (4 / kVector) * kVector; }  // the first of them
    __device__ int row_of(int i) const { return block() * 16 + pair() % 8 + (element() / 2 + i) * 8; }
    __device__ int token_of(int unit) const { return eight_of(unit) * 8 + quad() * 2 + element() % 2; }
    // One lane of those that share a row.
    __device__ bool first_of_row() const { return pair_lane() / (4 / kVector) == 0 && element() % 2 == 0; }

    // Where the keys end that a row of the block may see.
    __device__ int key_limit(const WorkItem& item, int row) const {
        if (!p.causal) return item.token_end;
        const int query = (item.block * C::kRows + row) / p.num_heads;
        return min(item.token_end, item.seq_len - item.query_len + query + 1);
    }

    // Combines a value over the lanes that share this thread's rows: all of the pair's, but those with another row.
    template <typename Operation>
    __device__ float over_row(float value, Operation operation) const {
#pragma unroll
        for (int distance = kTokensOwned == 1 ? 1 : 4 / kVector; distance < kPairLanes; distance *= 2)
            if (kVector != 1 || distance != 2) value = operation(value, __shfl_xor_sync(~0u, value, distance));
        return value;
    }

    // Writes P and the factors for O; true if they are not all 1.
    __device__ bool exponentiate(int tile_token) {
        float s[kUnits][kRowsOwned][kTokensOwned], m[kRowsOwned];
#pragma unroll
        for (int i = 0; i < kRowsOwned; ++i) m[i] = smem.top[row_of(i)];
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            using Vector = std::conditional_t<kVector == 4, float4, std::conditional_t<kVector == 2, float2, float>>;
            const int eight = eight_of(unit);
            union {
                Vector vector;
                float element[kVector];
            } part[C::kWarps];
#pragma unroll
            for (int w = 0; w < C::kWarps; ++w)
                part[w].vector = *reinterpret_cast<const Vector*>(
                    reinterpret_cast<const float*>(
                        &smem.scores[w][block()][eight][pair() % 8 * 4 + quad() ^ eight % 2 * 4]) +
                    element());
#pragma unroll
            for (int k = 0; k < kVector; ++k)
                s[unit][k / kTokensOwned][k % kTokensOwned] =
                    (((part[0].element[k] + part[1].element[k]) + (part[2].element[k] + part[3].element[k])) +
                     ((part[4].element[k] + part[5].element[k]) + (part[6].element[k] + part[7].element[k]))) *
                    p.scale_log2;
        }
        if (__builtin_expect(tile_token + C::kTile > smem.unmasked_end, 0)) {
#pragma unroll
            for (int i = 0; i < kRowsOwned; ++i) {
                const int limit = key_limit(smem.item, row_of(i)) - tile_token;
#pragma unroll
                for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
                    for (int k = 0; k < kTokensOwned; ++k)
                        if (token_of(unit) + k >= limit) s[unit][i][k] = -INFINITY;
            }
        }
        float top[kRowsOwned];
        bool exceeds = false;
#pragma unroll
        for (int i = 0; i < kRowsOwned; ++i) {
            top[i] = s[0][i][0];
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit)
#pragma unroll
                for (int k = 0; k < kTokensOwned; ++k) top[i] = fmaxf(top[i], s[unit][i][k]);
            exceeds |= top[i] > m[i] + kStaleBound;
        }
        const bool refresh = __any_sync(~0u, exceeds);
        float factor[kRowsOwned];
#pragma unroll
        for (int i = 0; i < kRowsOwned; ++i) factor[i] = 1.f;
        if (__builtin_expect(refresh, 0)) {
            __syncwarp();  // all lanes of a row have read its maximum
#pragma unroll
            for (int i = 0; i < kRowsOwned; ++i) {
                top[i] = over_row(fmaxf(top[i], m[i]), [](float a, float b) { return fmaxf(a, b); });
                factor[i] = exp2_approx(m[i] - finite(top[i]));
                l[i] *= factor[i];
                m[i] = top[i];
                if (first_of_row()) smem.top[row_of(i)] = top[i];
            }
        }
#pragma unroll
        for (int i = 0; i < kRowsOwned; ++i) {
            if (first_of_row()) smem.factor[row_of(i)] = factor[i];
            m[i] = finite(m[i]);
        }
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            union {
                Element element[kRowsOwned][kTokensOwned];
                std::conditional_t<kVector == 4, uint2, std::conditional_t<kVector == 2, uint32_t, uint16_t>> word;
            } weights;
#pragma unroll
            for (int i = 0; i < kRowsOwned; ++i)
#pragma unroll
                for (int k = 0; k < kTokensOwned; ++k) {
                    const float weight = exp2_approx(s[unit][i][k] - m[i]);
                    l[i] += weight;
                    weights.element[i][k] = static_cast<Element>(weight);
                }
            const int eight = eight_of(unit);
            auto* fragment = reinterpret_cast<Element*>(&smem.p[eight / 2][block()][pair() % 8 * 4 + quad()]);
            *reinterpret_cast<decltype(weights.word)*>(fragment + eight % 2 * 4 + element()) = weights.word;
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

    // O += P * V
    __device__ void accumulate(uint32_t kv) {
#pragma unroll
        for (int step = 0; step < C::kSteps; ++step) {
            uint32_t weights[kBlocks][4];
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                const uint4 four = smem.p[step][block][lane];
                weights[block][0] = four.x, weights[block][1] = four.y;
                weights[block][2] = four.z, weights[block][3] = four.w;
            }
#pragma unroll
            for (int i = 0; i < C::kColumns / 16; ++i) {
                uint32_t v[4];
                load_matrices_transposed(v, (kv + value_offset() + step * 2048) ^ i * 32);
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
        __syncthreads();  // the states take the place of the scores
#pragma unroll
        for (int i = 0; i < kRowsOwned; ++i) {
            l[i] = over_row(l[i], [](float a, float b) { return a + b; });
            if (first_of_row()) smem.end.states[row_of(i)] = {smem.top[row_of(i)], l[i]};
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
            partials.write_states(slot, tid, [&](int row) { return smem.end.states[row]; });
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
                cp_async_wait<C::kStages - 2>();
                if (__builtin_expect(__syncthreads_or(refreshed), 0)) rescale();
                const uint32_t current = kv + stage * C::kTileBytes;
                stage = stage + 1 == C::kStages ? 0 : stage + 1;
                // Behind the last tile, the scores are those of the tile at hand once more, and nobody reads them.
                score_tile(token + C::kTile < item.token_end ? kv + stage * C::kTileBytes : current,
                           [&] { accumulate(current); });
            }
            finish_entry(item);
        }
        if (threadIdx.x == 0) raise_flag(p, smem.flag);
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
        const int threads = together ? kThreads : kThreads / 2;
        const int half = threadIdx.x / threads, tid = threadIdx.x % threads;
        auto& scratch = *reinterpret_cast<Scratch*>(smem.kv[0] + half * sizeof(Scratch));
        auto sync = [&] {
            if (together)
                __syncthreads();
            else if (half == 0)
                named_barrier_sync<1, kThreads / 2>();
            else
                named_barrier_sync<2, kThreads / 2>();
        };
        int index = 0;
        WorkCursor<C::kRows, C::kUnit> cursor(p.lengths, p.num_heads, smem.range);
        WorkItem item;
        while (cursor.next(item)) {
            if (item.split() && index++ == half) {
                fill(scratch.rows, item, tid);
                sync();
                Partials<OutputPieces>(p, item, smem.range)
                    .template reduce<Element>(smem.flag, scratch.rows, scratch.sums, tid, threads, sync);
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
