// The entry points of an emulated kernel: what csrc/ffi does on a GPU. KERNEL, CONFIG, HEADER, THREADS and MAP are
// defined by the file that includes this one. Status 0: done; 1: all threads wait for each other.
// clang-format off: it comes first, since it says what the others' keywords mean
#include "cuda_on_cpu.h"
// clang-format on
#include "common/cp_async.cuh"
#include "common/plan.cuh"
#include HEADER

using Config = CONFIG;

extern "C" int plan(int* seq_lens, int* query_start_loc, int64_t batch, int* table, int64_t table_stride,
                    void* table_rows, int64_t table_rows_64, int* plans, int64_t num_ctas, int64_t most_ctas,
                    uint32_t* flags, int64_t* ends, int64_t query_len, int64_t num_heads, int64_t page_size,
                    int64_t token_table, int64_t m_block_cost, int64_t whole) {
    const mla::PlanParams p{
        {seq_lens, query_start_loc, int(query_len)},
        int(batch),
        int(num_heads),
        int(num_ctas),
        int(most_ctas),
        int(m_block_cost),
        whole != 0,
        {table, table_stride, table_rows, table_rows_64 != 0, token_table != 0, mla::Divisor(int(page_size))},
        ends,
        reinterpret_cast<mla::CtaPlan*>(plans),
        flags};
    emulation::overlaps = false;
    return !emulation::launch(1, mla::kPlanThreads, [&] { mla::plan_kernel<Config>(p); });
}

extern "C" int divide(int64_t dividend, int64_t divisor) { return int(dividend) / mla::Divisor(int(divisor)); }

#if MAP
// As in csrc/ffi/sm90_decode.cuh.
mla::sm90::KeyBox key_box(const mla::DecodeParams& p, int64_t pages) {
    constexpr bool kWholeColumnBlocks = Config::kDim % 64 == 0;
    mla::sm90::KeyBox box = {{}, mla::sm90::box_groups<Config>(p.table.page_size)};
    const int64_t row = p.row_stride * 2, page = p.page_stride * 2;
    const mla::sm90::TensorMap tensor{
        static_cast<const unsigned char*>(p.cache),
        {kWholeColumnBlocks ? 64 : Config::kDim, kWholeColumnBlocks ? 8 : p.table.page_size,
         kWholeColumnBlocks ? Config::kColumnBlocks : pages, kWholeColumnBlocks ? p.table.page_size / 8 : 1,
         kWholeColumnBlocks ? pages : 1},
        {row, kWholeColumnBlocks ? 128 : page, row * 8, page},
        {64, 8, kWholeColumnBlocks ? Config::kSegmentColumnBlocks : 1, box.groups, 1}};
    static_assert(sizeof(tensor) <= sizeof(box.map));
    std::memcpy(&box.map, &tensor, sizeof(tensor));
    return box;
}
#endif

extern "C" int decode(void* q_nope, int64_t q_nope_token, int64_t q_nope_head, void* q_rope, int64_t q_rope_token,
                      int64_t q_rope_head, void* cache, int64_t page_stride, int64_t row_stride, int64_t pages,
                      int64_t page_size, int* table, int64_t table_stride, void* table_rows, int64_t table_rows_64,
                      int* seq_lens, int* query_start_loc, int* plans, int64_t num_ctas, float* split_buffers,
                      uint32_t* flags, void* out, int64_t out_token, int64_t out_head, float* lse, int64_t lse_token,
                      int64_t lse_head, int64_t num_heads, int64_t query_len, int64_t token_table, int64_t causal,
                      double scale) {
    mla::DecodeParams p = {};
    p.q_nope = q_nope, p.q_nope_token_stride = q_nope_token, p.q_nope_head_stride = q_nope_head;
    p.q_rope = q_rope, p.q_rope_token_stride = q_rope_token, p.q_rope_head_stride = q_rope_head;
    p.cache = cache, p.page_stride = page_stride, p.row_stride = row_stride;
    p.table = {table, table_stride, table_rows, table_rows_64 != 0, token_table != 0, mla::Divisor(int(page_size))};
    p.lengths = {seq_lens, query_start_loc, int(query_len)};
    p.num_heads = mla::Divisor(int(num_heads)), p.causal = causal, p.scale_log2 = float(scale * 1.4426950408889634);
    p.out = out, p.out_token_stride = out_token, p.out_head_stride = out_head;
    p.lse = lse, p.lse_token_stride = lse_token, p.lse_head_stride = lse_head;
    p.plans = reinterpret_cast<const mla::CtaPlan*>(plans);
    p.split_buffers = reinterpret_cast<float4*>(split_buffers), p.flags = flags;
#if MAP
    emulation::overlaps = true;
    const mla::sm90::KeyBox box = key_box(p, pages);
    return !emulation::launch(num_ctas, THREADS, [&] { KERNEL<Config>(p, box); });
#else
    emulation::overlaps = Config::kDependentLaunch;
    return !emulation::launch(num_ctas, THREADS, [&] { KERNEL<Config>(p); });
#endif
}
