// The planner's entry point.
#pragma once
#include "../common/plan.cuh"
#include "launch.cuh"

namespace mla::ffi {

// seq_lens int32 [batch]; query_start_loc int32 [batch + 1] or None; table, table_rows: see `page_table`;
// plans int32 [num_ctas, 48]; ends int64 [>= 2 * batch].
template <typename C>
void plan(TensorView seq_lens, Optional<TensorView> query_start_loc, TensorView table, Optional<TensorView> table_rows,
          TensorView plans, TensorView ends, int64_t query_len, int64_t num_heads, int64_t page_size, bool token_table,
          int64_t entry_cost, bool whole) {
    if (plans.size(0) > kMaxCtas) TVM_FFI_THROW(ValueError) << "at most " << kMaxCtas << " CTAs, got " << plans.size(0);
    PlanParams params{lengths(seq_lens, query_start_loc, query_len),
                      static_cast<int>(seq_lens.size(0)),
                      static_cast<int>(num_heads),
                      static_cast<int>(plans.size(0)),
                      static_cast<int>(entry_cost),
                      whole,
                      page_table(table, table_rows, page_size, token_table),
                      data<int64_t>(ends),
                      data<CtaPlan>(plans)};
    plan_kernel<C><<<1, kPlanThreads, 0, stream_of(seq_lens)>>>(params);
    check(cudaGetLastError(), "planner launch");
}

}  // namespace mla::ffi
