// MLA decode by mma.sync, for sm_80 and everything newer without a kernel of its own. The latent columns are divided
// among the warps, so that shared memory holds keys alone: queries and outputs stay in registers, and each key is read
// from shared memory once for O and once or twice for S, however many rows there are.
//
//   S^T[tokens x rows]  = K * Q^T     each warp over its own columns; the split sums meet in shared memory
//   O^T[columns x rows] += V^T * P^T  each warp its own columns
//
// Rows are on the n side of the products, so that a block of rows may be any multiple of 8.
//
// grid   at most one persistent CTA per SM, walking the range that the planner gave it (common/work.cuh)
// block  8 warps, all the same. Each has d_c / 8 columns of O in registers, and of Q as many, or twice as many of half
//        of the rows (kRowGroups; 16 rotary columns more, while there are any). All copy keys by cp.async, up to
//        kStages - 1 tiles ahead and across m-blocks.
//
// a tile of kTile tokens, with the two barriers that it takes:
//   barrier  the split scores of the tile are written; its predecessor's stage is free
//   phase 1  sum the scores over the warps and exponentiate. Copy a later tile into that stage
//   barrier  P is written, and the next tile has landed
//   phase 2  split scores of the next tile; O += P * V
// Two warps a scheduler hide little, so what a tile takes is the length of a warp's instruction stream. Hence few
// branches, and copies between the loads of the scores and their use.
//
// shared memory (SharedMemoryPlan)
//   kv       kStages tiles: [d / 64][kTile][128 B], 16-byte vectors swizzled: vector p of token t lies at p ^ t % 8. So
//            eight tokens' vectors (K) and, transposed, eight tokens' columns (V) come without bank conflicts.
//   scores   [column group][8 rows][16 tokens] accumulator fragments (mma.cuh) of 4 floats a lane; see score_place
//   p        [16 tokens][8 rows] as two matrices of 8 tokens x 8 rows, which ldmatrix transposes
//
// softmax  Exponentials use a maximum that may be stale by up to 8 (log2): P then stays below 2^8, and fp32 sums and
//          16-bit P keep their relative precision. A row's maximum and sum live in the warp that owns the row; only
//          when a score exceeds the bound is the maximum refreshed, and all warps rescale O behind the second barrier.
//
// invariants
//   * keys outside [token_begin, token_end) are not read: their bytes in a stage are zeros, their scores are masked
//   * every share of an m-block that a cut goes through leaves an fp32 split (common/combine.cuh); a CTA waits for
//     others only after all its own work
//   * a fixed order everywhere: the same inputs and plan give the same bits
#pragma once
#include "../common/combine.cuh"
#include "../common/cp_async.cuh"
#include "../common/params.cuh"
#include "../common/sync.cuh"
#include "mma.cuh"

namespace mla::sm80 {

// kDependentLaunch: the launch may overlap its predecessor (sm_90 and newer).
template <typename Element_, int kDimLatent_, int kDimRope_, int kRows_, int kTile_, int kStages_, int kRowGroups_,
          bool kDependentLaunch_>
struct DecodeConfig {
    using Element = Element_;
    static constexpr int kDimLatent = kDimLatent_;
    static constexpr int kDimRope = kDimRope_;
    static constexpr int kDim = kDimLatent + kDimRope;
    static constexpr int kRows = kRows_;
    static constexpr int kSlotStride = 0;  // looks up all by itself
    static constexpr int kTile = kTile_;
    static constexpr int kStages = kStages_;
    static constexpr int kRowGroups = kRowGroups_;
    static constexpr bool kDependentLaunch = kDependentLaunch_;

    static constexpr int kWarps = 8;
    static constexpr int kBlocks = kRows / 8;             // of 8 rows
    static constexpr int kSteps = kTile / 16;             // of 16 tokens
    static constexpr int kColumns = kDimLatent / kWarps;  // of O, of a warp
    static constexpr int kColumnGroups = kWarps / kRowGroups;
    static constexpr int kScoreColumns = kDimLatent / kColumnGroups;  // of Q and K, of a warp
    static constexpr int kScoreBlocks = kBlocks / kRowGroups;         // of Q, of a warp
    static constexpr int kRopeSteps = kDimRope / 16;                  // column groups with 16 rotary columns
    static constexpr int kColumnBlocks = (kDim + 63) / 64;            // of 64 columns = 128 B
    static constexpr int kColumnBlockBytes = kTile * 128;
    static constexpr int kTileBytes = kColumnBlocks * kColumnBlockBytes;

    static_assert(kRows % 8 == 0 && kRows <= 64 && (kTile == 16 || kTile == 32));
    static_assert(kBlocks % kRowGroups == 0 && kWarps % kRowGroups == 0);
    static_assert(kDimLatent % 64 == 0 && kColumns % 32 == 0 && kDimRope % 16 == 0 && kRopeSteps <= kColumnGroups);
    static_assert(kStages >= 3);
};

constexpr int kThreads = 256;
constexpr float kStaleBound = 8.f;

// A place in the work of a CTA.
struct Position {
    int request, m_block, tile;
};

// What a warp copies behind its window.
struct Ahead {
    Position position;     // of the work tile behind this one
    const int* table;      // of this work tile
    int token, token_end;  // where the next window begins, and where its work tile ends; -1 behind the last
};

template <typename C>
struct SharedMemoryPlan {
    alignas(128) unsigned char kv[C::kStages][C::kTileBytes];
    // What ends an m-block takes the place of its scores.
    union {
        alignas(128) float4 scores[C::kColumnGroups][C::kBlocks][C::kSteps][32];
        struct {
            OutputOffsets<C::kRows> rows;
            RowState states[C::kRows];
            WorkTile kept;  // the work tile, if `keeps`
        } end;
    };
    alignas(128) uint4 p[C::kSteps][C::kBlocks][2][8];
    float top[C::kRows];     // the maximum that exponentials of a row use; known to the row's warp alone
    float factor[C::kRows];  // by which a refreshed maximum scales O
    CtaRange range;
    uint32_t flag;  // this CTA's, when the launch began
    // Here, because 64 rows leave no registers for them:
    Ahead ahead[C::kWarps];
    Position position;  // of the next work tile
    WorkTile work;      // whose keys are being multiplied
    bool more;          // there is such an work tile
    int masked;         // a tile holds keys that some row does not see if fewer tokens than these are left
    int refreshed;      // how many tokens were left when last a maximum was refreshed
    int shared_by_two, shared_by_more;  // work tiles so far of m-blocks that others share
    bool keeps;                         // the work tile is the last one, of an m-block of two: see combine_two
};

__device__ __forceinline__ Position first_position(const CtaRange& range) {
    return {range.request, range.m_block, range.tile};
}

template <typename C>
struct Cursor : WorkCursor<C::kRows> {
    __device__ Cursor(const DecodeParams& p, const CtaRange& range, const Position& position)
        : WorkCursor<C::kRows>(p.lengths, p.num_heads, range) {
        this->request = position.request, this->m_block = position.m_block, this->tile = position.tile;
    }
    __device__ Position position() const { return {this->request, this->m_block, this->tile}; }
};

// Copies keys tile by tile, in the order in which the CTA needs them. A warp copies a few rows of each tile; each of
// its lanes knows where one of the warp's rows is, of a window of kWindow tiles (fewer at an work tile's end: its last
// lanes then), and has looked up another one of the next window.
template <typename C>
struct Keys {
    static constexpr int kLanes = kThreads / C::kTile;        // threads of a row
    static constexpr int kWarpRows = C::kTile / C::kWarps;    // of a tile
    static constexpr int kWindow = 32 / kWarpRows;            // tiles
    static constexpr int kWindowTokens = kWindow * C::kTile;  // of an work tile
    static constexpr int kVectors = C::kDim / 8;              // of 16 bytes

    const DecodeParams& p;
    SharedMemoryPlan<C>& smem;
    const uint64_t policy;
    int entry = 0;               // what the table says of this lane's row of the next window
    const uint4* row = nullptr;  // this lane's row of this window; null if there is none
    int remaining = 0;           // tiles of this window; negative behind the last one

    __device__ Keys(const DecodeParams& p, SharedMemoryPlan<C>& smem)
        : p(p), smem(smem), policy(cache_policy(smem.range.single_m_block)) {
        look_up(smem.ahead[threadIdx.x / 32]);
    }

    __device__ static int first_vector() { return threadIdx.x % kLanes; }
    // This lane's row of the next window.
    __device__ static int own_token(const Ahead& ahead) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, from_end = lane / kWarpRows - kWindow;
        return ahead.token + (from_end + tiles_of(ahead)) * C::kTile + warp * kWarpRows + lane % kWarpRows;
    }
    __device__ static int tiles_of(const Ahead& ahead) {
        return min(kWindow, (ahead.token_end - ahead.token + C::kTile - 1) / C::kTile);
    }
    __device__ static bool exists(const Ahead& ahead, int own) { return ahead.token <= own && own < ahead.token_end; }

    // Looks up the next window, of the work tile at hand or the one behind it.
    __device__ void look_up(Ahead ahead) {
        while (ahead.token >= ahead.token_end) {
            Cursor<C> cursor(p, smem.range, ahead.position);
            WorkTile work;
            if (!cursor.next(work)) {
                ahead.token_end = -1;
                break;
            }
            ahead.position = cursor.position();
            ahead.table = p.table.row_of(work.request);
            ahead.token = work.token_begin;
            ahead.token_end = work.token_end;
        }
        const int own = own_token(ahead);
        if (exists(ahead, own)) entry = ahead.table[p.table.of_tokens ? own : own / p.table.page_size];
        __syncwarp();  // all lanes have read what was there
        if (threadIdx.x % 32 == 0) smem.ahead[threadIdx.x / 32] = ahead;
        __syncwarp();
    }

    // Makes the window that was looked up the one to copy.
    __device__ void next_window() {
        Ahead ahead = smem.ahead[threadIdx.x / 32];
        if (ahead.token_end < 0) {
            row = nullptr;
            remaining = -1;
            return;
        }
        const int own = own_token(ahead), index = p.table.of_tokens ? entry : own, page = index / p.table.page_size;
        const int64_t offset =
            (p.table.of_tokens ? page : entry) * p.page_stride + (index - page * p.table.page_size) * p.row_stride;
        const auto* cache = static_cast<const typename C::Element*>(p.cache);
        row = exists(ahead, own) ? reinterpret_cast<const uint4*>(cache + offset) : nullptr;
        remaining = tiles_of(ahead);
        ahead.token += kWindowTokens;
        look_up(ahead);
    }

    // To be called before each tile.
    __device__ void prepare() {
        if (remaining == 0) next_window();
    }

    // One more tile, as one group of copies (zeros behind the last tile).
    __device__ void copy(int stage) {
        const int from = (kWindow - remaining--) * kWarpRows + threadIdx.x % 32 / kLanes;
        const auto* source = reinterpret_cast<const uint4*>(__shfl_sync(~0u, reinterpret_cast<uint64_t>(row), from));
        int tid = threadIdx.x;
        asm volatile("" : "+r"(tid));  // or else a register would be kept for what comes of it
        const int token = tid / kLanes, vector = tid % kLanes;
        const uint32_t destination = smem_address(smem.kv) + stage * C::kTileBytes + vector / 8 * C::kColumnBlockBytes +
                                     token * 128 + (vector ^ token) % 8 * 16;
#pragma unroll
        for (int i = 0; i < (kVectors + kLanes - 1) / kLanes; ++i)
            if ((i + 1) * kLanes <= kVectors || first_vector() < kVectors % kLanes)
                cp_async_16(destination + i * (kLanes / 8 * C::kColumnBlockBytes), source + first_vector() + i * kLanes,
                            source != nullptr, policy);
        cp_async_commit();
    }
};

template <typename C>
struct Decoder {
    using Element = typename C::Element;
    using OutputQuads = Quads<C::kRows, C::kDimLatent, true>;

    // The softmax: of a fragment a thread takes kVector elements: all 4, those of one token, or one; kRounds times.
    static constexpr int kElements = (C::kRows * C::kTile + kThreads - 1) / kThreads;
    static constexpr int kVector = kElements > 2 ? 4 : kElements;
    static constexpr int kRounds = kElements > 4 ? 2 : 1;
    static constexpr int kRowsOwned = kVector == 1 ? 1 : 2;                // adjacent rows of a thread
    static constexpr int kTokensOwned = kVector == 4 ? 2 : 1;              // in a round: t and t + 8
    static constexpr int kPairLanes = C::kSteps / kRounds * 32 / kVector;  // lanes that share two adjacent rows

    const DecodeParams& p;
    SharedMemoryPlan<C>& smem;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    // In fragments (mma.cuh), rows on the n side.
    uint32_t q[C::kScoreBlocks][C::kScoreColumns / 16 + 1][2];
    float o[C::kBlocks][C::kColumns / 16][4];
    float l[kRowsOwned];  // sum of the weights of `row_of`, over this thread's tokens alone

    __device__ Decoder(const DecodeParams& p, SharedMemoryPlan<C>& smem) : p(p), smem(smem) {}

    __device__ int column_group() const { return warp / C::kRowGroups; }
    __device__ int first_block() const { return warp % C::kRowGroups * C::kScoreBlocks; }

    // Offsets within a stage of this lane's row of the matrices that it loads; other vectors are an exclusive or away.
    static __device__ uint32_t vector_offset(int token, int vector) {
        return vector / 8 * C::kColumnBlockBytes + token * 128 + (vector ^ token) % 8 * 16;
    }
    __device__ uint32_t key_offset() const {
        return vector_offset(lane % 16, column_group() * (C::kScoreColumns / 8) + lane / 16);
    }
    __device__ uint32_t rope_offset() const {
        return vector_offset(lane % 16, C::kDimLatent / 8 + column_group() % C::kRopeSteps * 2 + lane / 16);
    }
    __device__ uint32_t value_offset() const {
        return vector_offset(lane / 16 * 8 + lane % 8, warp * (C::kColumns / 8) + lane / 8 % 2);
    }

    // Rows that do not exist are zeros.
    __device__ void load_queries(const WorkTile& work) {
#pragma unroll
        for (int block = 0; block < C::kScoreBlocks; ++block) {
            const int row = work.m_block * C::kRows + (first_block() + block) * 8 + lane / 4;
            const int token = row / p.num_heads, head = row - token * p.num_heads;
            const int64_t index = work.query_begin + token;
            const bool exists = token < work.query_len;
            const auto* nope = static_cast<const Element*>(p.q_nope) + index * p.q_nope_token_stride +
                               head * p.q_nope_head_stride + column_group() * C::kScoreColumns + lane % 4 * 2;
            const auto* rope = static_cast<const Element*>(p.q_rope) + index * p.q_rope_token_stride +
                               head * p.q_rope_head_stride + column_group() * 16 + lane % 4 * 2;
            auto load = [](const Element* at, bool exists) {
                return exists ? *reinterpret_cast<const uint32_t*>(at) : 0;
            };
#pragma unroll
            for (int i = 0; i < C::kScoreColumns / 8; ++i) q[block][i / 2][i % 2] = load(nope + i * 8, exists);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                q[block][C::kScoreColumns / 16][i] = load(rope + i * 8, exists && column_group() < C::kRopeSteps);
        }
    }

    __device__ void reset_state() {
#pragma unroll
        for (int i = 0; i < kRowsOwned; ++i) {
            if (owns_rows() && first_of_row()) smem.top[row_of(i)] = -INFINITY;
            l[i] = 0.f;
        }
#pragma unroll
        for (int block = 0; block < C::kBlocks; ++block)
#pragma unroll
            for (int i = 0; i < C::kColumns / 16; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k) o[block][i][k] = 0.f;
    }

    // This warp's part of the scores of a tile, and other multiplications that may go beside it: between this one's
    // products and their storing if there are registers for that, before it otherwise.
    template <typename Beside>
    __device__ void score_tile(uint32_t kv, Beside beside) {
        constexpr bool kRoomy = C::kRows * C::kColumns <= 48 * 64;
        constexpr int kTogether = kRoomy ? C::kSteps : 1;
        const uint32_t keys = kv + key_offset(), rope_keys = kv + rope_offset();
        if constexpr (!kRoomy) beside();
#pragma unroll
        for (int step = 0; step < C::kSteps; step += kTogether) {
            float s[kTogether][C::kScoreBlocks][4] = {};
            auto add = [&](int i, uint32_t row, int columns) {
                uint32_t k[4];
                load_matrices(k, row);
#pragma unroll
                for (int block = 0; block < C::kScoreBlocks; ++block)
                    mma<Element>(s[i][block], k, q[block][columns][0], q[block][columns][1]);
            };
#pragma unroll
            for (int columns = 0; columns < C::kScoreColumns / 16; ++columns)
#pragma unroll
                for (int i = 0; i < kTogether; ++i)
                    add(i, (keys + columns / 4 * C::kColumnBlockBytes + (step + i) * 2048) ^ columns % 4 * 32, columns);
            // Where the warp has no rotary columns, its queries are zeros: less time than a branch.
#pragma unroll
            for (int i = 0; i < kTogether; ++i) add(i, rope_keys + (step + i) * 2048, C::kScoreColumns / 16);
            if constexpr (kRoomy) beside();
#pragma unroll
            for (int i = 0; i < kTogether; ++i)
#pragma unroll
                for (int block = 0; block < C::kScoreBlocks; ++block) {
                    const float* sum = s[i][block];
                    smem.scores[column_group()][first_block() + block][step + i][score_place(lane)] =
                        make_float4(sum[0], sum[1], sum[2], sum[3]);
                }
        }
    }

    // Where a lane's four scores lie: no bank conflicts for eight lanes in turn, nor for the eight of one pair of rows.
    static __device__ int score_place(int lane) { return lane % 4 * 8 + (lane / 4 ^ lane % 4 * 2); }

    // What this thread has in the softmax: kVector elements from element() on, of the scores of two adjacent rows,
    // pair(), and of token() and eight behind it.
    __device__ int pair_lane() const { return lane % kPairLanes; }
    __device__ int pair() const { return warp * (32 / kPairLanes) + lane / kPairLanes; }
    __device__ bool owns_rows() const { return 32 / kPairLanes * C::kWarps == C::kRows / 2 || pair() < C::kRows / 2; }
    __device__ int place() const { return pair_lane() / (4 / kVector) % 8; }
    __device__ int element() const { return pair_lane() % (4 / kVector) * kVector; }
    __device__ int row_of(int i) const { return pair() * 2 + element() % 2 + i; }
    __device__ int step_of(int round) const { return round * (C::kSteps / kRounds) + pair_lane() / (32 / kVector); }
    __device__ int token() const { return place() ^ pair() % 4 * 2; }
    __device__ int half_of(int k) const { return element() / 2 + k; }
    __device__ int token_of(int round, int k) const { return step_of(round) * 16 + half_of(k) * 8 + token(); }
    // One lane of those that share a row.
    __device__ bool first_of_row() const { return pair_lane() < 3 - kRowsOwned; }

    // Where the keys end that a row of the block may see.
    __device__ int key_limit(const WorkTile& work, int row) const {
        if (!p.causal) return work.token_end;
        const int query = (work.m_block * C::kRows + row) / p.num_heads;
        return min(work.token_end, work.seq_len - work.query_len + query + 1);
    }

    // Combines a value over the lanes that share this thread's rows.
    template <typename Operation>
    __device__ float over_row(float value, Operation operation) const {
#pragma unroll
        for (int distance = 3 - kRowsOwned; distance < kPairLanes; distance *= 2)
            value = operation(value, __shfl_xor_sync(~0u, value, distance));
        return value;
    }

    // Writes P and the factors for O, of the tile that `left` tokens of the work tile begin with. `beside` runs while
    // scores are on their way.
    template <typename Beside>
    __device__ void exponentiate(int left, Beside beside) {
        if (!owns_rows()) return beside();  // nor does any lane of the warp
        using Vector = std::conditional_t<kVector == 4, float4, std::conditional_t<kVector == 2, float2, float>>;
        union {
            Vector vector;
            float element[kVector];
        } part[C::kColumnGroups];
        float s[kRounds][kRowsOwned][kTokensOwned], m[kRowsOwned];
        auto load = [&](int round) {
#pragma unroll
            for (int group = 0; group < C::kColumnGroups; ++group)
                part[group].vector = *reinterpret_cast<const Vector*>(
                    reinterpret_cast<const float*>(
                        &smem.scores[group][pair() / 4][step_of(round)][pair() % 4 * 8 + place()]) +
                    element());
        };
        auto add = [&](int round) {
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                float sum = (part[0].element[k] + part[1].element[k]) + (part[2].element[k] + part[3].element[k]);
                if constexpr (C::kColumnGroups == 8)
                    sum += (part[4].element[k] + part[5].element[k]) + (part[6].element[k] + part[7].element[k]);
                s[round][k % kRowsOwned][k / kRowsOwned] = sum * p.scale_log2;
            }
        };
        const int masked = smem.masked;
#pragma unroll
        for (int i = 0; i < kRowsOwned; ++i) m[i] = smem.top[row_of(i)];
        load(0);
        beside();
        add(0);
        if constexpr (kRounds == 2) {
            load(1);
            add(1);
        }
        if (__builtin_expect(left < masked, 0)) {
#pragma unroll
            for (int i = 0; i < kRowsOwned; ++i) {
                const int limit = key_limit(smem.work, row_of(i)) - smem.work.token_end + left;
#pragma unroll
                for (int round = 0; round < kRounds; ++round)
#pragma unroll
                    for (int k = 0; k < kTokensOwned; ++k)
                        if (token_of(round, k) >= limit) s[round][i][k] = -INFINITY;
            }
        }
        float top[kRowsOwned];
        bool exceeds = false;
#pragma unroll
        for (int i = 0; i < kRowsOwned; ++i) {
            top[i] = s[0][i][0];
#pragma unroll
            for (int round = 0; round < kRounds; ++round)
#pragma unroll
                for (int k = 0; k < kTokensOwned; ++k) top[i] = fmaxf(top[i], s[round][i][k]);
            exceeds |= top[i] > m[i] + kStaleBound;
        }
        float factor[kRowsOwned];
#pragma unroll
        for (int i = 0; i < kRowsOwned; ++i) factor[i] = 1.f;
        if (__builtin_expect(__any_sync(~0u, exceeds), 0)) {
            __syncwarp();  // all lanes of a row have read its maximum
#pragma unroll
            for (int i = 0; i < kRowsOwned; ++i) {
                top[i] = over_row(fmaxf(top[i], m[i]), [](float a, float b) { return fmaxf(a, b); });
                factor[i] = exp2_approx(m[i] - finite(top[i]));
                l[i] *= factor[i];
                m[i] = top[i];
                if (first_of_row()) smem.top[row_of(i)] = top[i];
            }
            smem.refreshed = left;
        }
#pragma unroll
        for (int i = 0; i < kRowsOwned; ++i) {
            smem.factor[row_of(i)] = factor[i];  // the same of all lanes that share the row
            m[i] = finite(m[i]);
        }
#pragma unroll
        for (int round = 0; round < kRounds; ++round)
#pragma unroll
            for (int k = 0; k < kTokensOwned; ++k) {
                union {
                    Element element[kRowsOwned];
                    std::conditional_t<kRowsOwned == 2, uint32_t, uint16_t> word;
                } weights;
#pragma unroll
                for (int i = 0; i < kRowsOwned; ++i) {
                    const float weight = exp2_approx(s[round][i][k] - m[i]);
                    l[i] += weight;
                    weights.element[i] = static_cast<Element>(weight);
                }
                auto* eight = reinterpret_cast<Element*>(&smem.p[step_of(round)][pair() / 4][half_of(k)][token()]);
                *reinterpret_cast<decltype(weights.word)*>(eight + row_of(0) % 8) = weights.word;
            }
    }

    __device__ void rescale() {
#pragma unroll
        for (int block = 0; block < C::kBlocks; ++block) {
            const float* factor = &smem.factor[block * 8 + lane % 4 * 2];
            const float first = factor[0], next = factor[1];
#pragma unroll
            for (int i = 0; i < C::kColumns / 16; ++i)
                o[block][i][0] *= first, o[block][i][1] *= next, o[block][i][2] *= first, o[block][i][3] *= next;
        }
    }

    // O += P * V, of the tile that `left` tokens of the work tile begin with.
    __device__ void accumulate(uint32_t kv, int left) {
        const uint32_t weights_row = smem_address(smem.p) + lane * 16, values = kv + value_offset();
        const int refreshed = smem.refreshed;
        uint32_t v[4];
        auto load = [&](int step, int i) { load_matrices_transposed(v, (values + step * 2048) ^ i * 32); };
#pragma unroll
        for (int step = 0; step < C::kSteps; ++step) {
            uint32_t weights[C::kBlocks][2];
#pragma unroll
            for (int block = 0; block < C::kBlocks; block += 2) {
                const uint32_t row = weights_row + (step * C::kBlocks + block) * 256;
                if (block + 1 < C::kBlocks) {
                    uint32_t four[4];
                    load_matrices_transposed(four, row);
                    weights[block][0] = four[0], weights[block][1] = four[1];
                    weights[block + 1][0] = four[2], weights[block + 1][1] = four[3];
                } else {
                    load_matrices_transposed(weights[block], row);
                }
            }
            load(step, 0);
            if (step == 0 && __builtin_expect(refreshed == left, 0)) rescale();
#pragma unroll
            for (int i = 0; i < C::kColumns / 16; ++i) {
                if (i > 0) load(step, i);
#pragma unroll
                for (int block = 0; block < C::kBlocks; ++block)
                    mma<Element>(o[block][i], v, weights[block][0], weights[block][1]);
            }
        }
    }

    // Where the rows of an m-block go; a barrier must follow.
    __device__ void fill(OutputOffsets<C::kRows>& rows, const WorkTile& work, int tid) const {
        if (tid >= C::kRows) return;
        const int row = work.m_block * C::kRows + tid, token = row / p.num_heads, head = row - token * p.num_heads;
        const int64_t index = work.query_begin + token;
        const bool exists = token < work.query_len;
        rows.out[tid] = exists ? index * p.out_token_stride + head * p.out_head_stride : -1;
        rows.lse[tid] = exists ? index * p.lse_token_stride + head * p.lse_head_stride : -1;
    }

    // A thread's quads of 8 rows: kQuads, one of each 16 columns. This is the first.
    static constexpr int kQuads = C::kColumns / 16;
    __device__ int first_quad() const { return warp * (C::kColumns / 2) + lane / 4; }
    __device__ float4 quad(int block, int i) const {
        return make_float4(o[block][i][0], o[block][i][1], o[block][i][2], o[block][i][3]);
    }

    // Writes the output of an m-block, or a split of it.
    __device__ void finish_entry(const WorkTile& work) {
        __syncthreads();  // the states take the place of the scores
#pragma unroll
        for (int i = 0; i < kRowsOwned; ++i) {
            l[i] = over_row(l[i], [](float a, float b) { return a + b; });
            if (owns_rows() && first_of_row()) smem.end.states[row_of(i)] = {smem.top[row_of(i)], l[i]};
        }
        if (!work.split()) fill(smem.end.rows, work, threadIdx.x);
        if (threadIdx.x == 0) smem.end.kept = work;
        __syncthreads();
        if (work.split()) {
            const SplitBuffers<OutputQuads> buffers(p, work, smem.range);
            float4* buffer = buffers.buffer(blockIdx.x, work.has_first_key);
            const int kept_half = smem.keeps ? buffers.splits.index() : -1;
#pragma unroll
            for (int block = 0; block < C::kBlocks; ++block) {
                const int pair = block * 4 + lane % 4;
                if (pair * OutputQuads::kPairQuads >= buffers.quads) break;
#pragma unroll
                for (int i = 0; i < kQuads; ++i)
                    if (i / (kQuads / 2) != kept_half)
                        __stcg(buffer + pair * OutputQuads::kPairQuads + first_quad() + i * 8, quad(block, i));
            }
            int tid = threadIdx.x;
            asm volatile("" : "+r"(tid));  // or else indices would be computed ahead of the m-blocks, and kept
            buffers.write_states(buffer, tid, [&](int row) { return smem.end.states[row]; });
        } else {
#pragma unroll
            for (int i = 0; i < C::kBlocks * 2; ++i) {
                const int row = i / 2 * 8 + lane % 4 * 2 + i % 2;
                const float scale = inverse(smem.end.states[row].total);
                const int64_t offset = smem.end.rows.out[row];
                if (offset < 0) continue;
                auto* out = static_cast<Element*>(p.out) + offset + warp * C::kColumns + lane / 4;
#pragma unroll
                for (int k = 0; k < C::kColumns / 8; ++k)
                    out[k * 8] = static_cast<Element>(o[i / 2][k / 2][k % 2 * 2 + i % 2] * scale);
            }
            if (threadIdx.x < C::kRows) store_lse(p, smem.end.rows, threadIdx.x, smem.end.states[threadIdx.x]);
        }
        __syncthreads();
    }

    __device__ void run() {
        Keys<C> keys(p, smem);
#pragma unroll 1
        for (int i = 0; i < C::kStages - 1; ++i) {
            keys.prepare();
            keys.copy(i);
        }

        const uint32_t kv = smem_address(smem.kv);
        int stage = 0;
        const WorkTile& work = smem.work;
        while (true) {
            if (threadIdx.x == 0) {
                Cursor<C> cursor(p, smem.range, smem.position);
                smem.more = cursor.next(smem.work);
                if (smem.more) {
                    smem.position = cursor.position();
                    smem.masked = work.token_end - key_limit(work, 0) + C::kTile;
                    if (work.split()) ++(is_two_way_split(work, smem.range) ? smem.shared_by_two : smem.shared_by_more);
                    smem.keeps = is_two_way_split(work, smem.range) && cursor.at_end();
                }
            }
            __syncthreads();
            if (!smem.more) break;
            load_queries(work);
            reset_state();
            cp_async_wait<C::kStages - 2>();  // for the CTA's first tile; others' were waited for before
            __syncthreads();
            int left = work.token_end - work.token_begin;
            if (left > 0) score_tile(kv + stage * C::kTileBytes, [] {});
            for (; left > 0; left -= C::kTile) {
                keys.prepare();
                __syncthreads();
                exponentiate(left, [&] { keys.copy(stage == 0 ? C::kStages - 1 : stage - 1); });
                cp_async_wait<C::kStages - 2>();
                __syncthreads();
                const uint32_t current = kv + stage * C::kTileBytes;
                stage = stage + 1 == C::kStages ? 0 : stage + 1;
                // Behind the last tile, the scores are those of the tile at hand once more, and nobody reads them.
                score_tile(left > C::kTile ? kv + stage * C::kTileBytes : current, [&] { accumulate(current, left); });
            }
            finish_entry(work);
        }
        if (threadIdx.x == 0) raise_flag(p, smem.flag);
        if (smem.shared_by_two + smem.shared_by_more == 0) return;
        cp_async_wait<0>();  // for zeros behind the last tile, before the ring becomes scratch
        __syncthreads();
        combine();
    }

    // Two splits combine half of every thread's quads each. What one combines of its last work tile has stayed in
    // registers (`kKept`).
    template <bool kKept>
    __device__ void combine_two(const WorkTile& work, OutputOffsets<C::kRows>& rows) {
        constexpr int kMine = kQuads / 2, kAhead = 4;  // blocks whose loads are in flight
        const SplitBuffers<OutputQuads> buffers(p, work, smem.range);
        const int rank = buffers.splits.index(), last_pair = buffers.quads / OutputQuads::kPairQuads - 1;
        fill(rows, work, threadIdx.x);
        buffers.wait_for(1 - rank, smem.flag);
        __syncthreads();
#pragma unroll
        for (int begin = 0; begin < C::kBlocks; begin += kAhead) {
            float4 own[kAhead][kMine], other[kAhead][kMine];
            typename SplitBuffers<OutputQuads>::Weights weights[kAhead];
#pragma unroll
            for (int k = 0; k < kAhead && begin + k < C::kBlocks; ++k) {
                const int pair = min((begin + k) * 4 + lane % 4, last_pair);
                const int at = pair * OutputQuads::kPairQuads + first_quad() + rank * kMine * 8;
                weights[k] = buffers.weights_of_two(pair);
#pragma unroll
                for (int i = 0; i < kMine; ++i) {
                    other[k][i] = __ldcg(buffers.buffer_of_split(1 - rank) + at + i * 8);
                    if constexpr (kKept)  // registers cannot be indexed by the rank
                        own[k][i] = rank ? quad(begin + k, kMine + i) : quad(begin + k, i);
                    else
                        own[k][i] = __ldcg(buffers.buffer_of_split(rank) + at + i * 8);
                }
            }
#pragma unroll
            for (int k = 0; k < kAhead && begin + k < C::kBlocks; ++k) {
                const int row = (begin + k) * 8 + lane % 4 * 2;
#pragma unroll
                for (int i = 0; i < kMine; ++i) {
                    const int column = OutputQuads::column(first_quad() + (rank * kMine + i) * 8);
                    store_output<Element, OutputQuads>(p, rows, row, column, weights[k].sum(own[k][i], other[k][i]));
                }
                if (rank == 0 && warp == 0 && lane < 4) {
                    store_lse(p, rows, row, weights[k].states[0]);
                    store_lse(p, rows, row + 1, weights[k].states[1]);
                }
            }
        }
        __syncthreads();  // the table of rows is free
    }

    // Of m-blocks with more splits, at the range's two ends, two take half of the warps each; a single one takes
    // all. The ring is free to be their scratch.
    __device__ void combine() {
        struct Scratch {
            OutputOffsets<C::kRows> rows;
            float4 sums[2 * kThreads];
        };
        static_assert(2 * sizeof(Scratch) <= sizeof(smem.kv));
        auto* scratches = reinterpret_cast<Scratch*>(smem.kv[0]);
        if (smem.keeps) combine_two<true>(smem.end.kept, scratches[0].rows);

        const bool together = smem.shared_by_more == 1;
        const int threads = together ? kThreads : kThreads / 2;
        const int half = threadIdx.x / threads, tid = threadIdx.x % threads;
        auto sync = [&] {
            if (together)
                __syncthreads();
            else if (half == 0)
                named_barrier_sync<1, kThreads / 2>();
            else
                named_barrier_sync<2, kThreads / 2>();
        };
        int index = 0;
        WorkCursor<C::kRows> cursor(p.lengths, p.num_heads, smem.range);
        WorkTile work;
        while (cursor.next(work)) {
            if (!work.split()) continue;
            if (is_two_way_split(work, smem.range)) {
                if (!cursor.at_end()) combine_two<false>(work, scratches[0].rows);
            } else if (index++ == half) {
                Scratch& scratch = scratches[half];
                fill(scratch.rows, work, tid);
                sync();
                SplitBuffers<OutputQuads>(p, work, smem.range)
                    .template combine<Element>(smem.flag, scratch.rows, scratch.sums, tid, threads, sync);
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
            reinterpret_cast<const int*>(&p.plans[blockIdx.x].range)[threadIdx.x];
    if (threadIdx.x == 32) smem.flag = read_flag(p);
    __syncthreads();
    if (threadIdx.x % 32 == 0) smem.ahead[threadIdx.x / 32] = {first_position(smem.range), nullptr, 0, 0};
    if (threadIdx.x == 0) {
        smem.position = first_position(smem.range);
        smem.refreshed = 0;
        smem.shared_by_two = smem.shared_by_more = 0;
        smem.keeps = false;
    }
    __syncwarp();
    Decoder<C>(p, smem).run();
}

}  // namespace mla::sm80
