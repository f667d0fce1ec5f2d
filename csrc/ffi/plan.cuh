// Entry point of the planner.
#pragma once
#include "launch.cuh"
#include "schedule/planner.cuh"
#include "tensors.cuh"

namespace mla::ffi {

// seq_lens int32 [batch]; query_start_loc int32 [batch + 1] or None; table, table_rows: see `page_table`;
// plans int32 [most CTAs, words of a CtaPlan]; flags int32 [most CTAs, kFlagStride]; ends int64 [>= 2 * batch];
// requests int32 [>= batch, words of a PlannedRequest].
// `generation`: of the plan, above 0. Returns the number of CTAs that it planned for.
template <typename C>
int64_t plan(TensorView seq_lens, Optional<TensorView> query_start_loc, Optional<TensorView> table,
             Optional<TensorView> table_rows, TensorView plans, TensorView flags, TensorView ends, TensorView requests,
             int64_t query_len, int64_t rank, int64_t shards, int64_t interleave, int64_t num_heads, int64_t page_size,
             bool token_table, bool whole, int64_t generation) {
    const DeviceScope device(seq_lens.device().device_id);
    const cudaStream_t stream = stream_of(seq_lens);
    const int num_ctas = num_ctas_of(plans, stream);
    if (num_ctas < C::kRangeCtas)
        TVM_FFI_THROW(ValueError) << "so many query rows of a request need at least " << C::kRangeCtas
                                  << " CTAs, which share keys, but there may be only " << num_ctas
                                  << ": raise the decoder's num_ctas, or give the stream more multiprocessors";
    PlanParams params{
        {data<const int>(seq_lens), query_start_loc.has_value() ? data<const int>(*query_start_loc) : nullptr,
         static_cast<int>(query_len), shard(rank, shards, interleave),
         longest_request(table, page_size, token_table, rank, shards, interleave)},
        static_cast<int>(seq_lens.size(0)),
        Divisor(static_cast<int>(num_heads)),
        num_ctas,
        static_cast<int>(plans.size(0)),
        whole,
        static_cast<int>(generation),
        page_table(table, table_rows, page_size, token_table, rank, shards),
        data<int64_t>(ends),
        data<PlannedRequest>(requests),
        data<CtaPlan>(plans),
        data<uint32_t>(flags)};
    launch<false>(plan_kernel<C>, {stream, 1, kPlanThreads}, params);
    return num_ctas;
}

}  // namespace mla::ffi
