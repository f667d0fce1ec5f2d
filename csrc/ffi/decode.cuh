// Arguments that every decode kernel splits.
#pragma once
#include "launch.cuh"

namespace mla::ffi {

// q_nope [tokens, heads, d_c], q_rope [tokens, heads, d_rope], cache [pages, page_size, d_c + d_rope],
// table, table_rows: see `page_table`; seq_lens int32 [batch], query_start_loc int32 [batch + 1] or None; plans: by
// `plan`, of the same batch; split buffers, flags: see common/combine.cuh; out [tokens, heads, d_c], lse fp32 [tokens,
// heads]; profile int64 or None: stamps of a profiling variant.
inline DecodeParams decode_params(const TensorView& q_nope, const TensorView& q_rope, const TensorView& cache,
                                  const TensorView& table, const Optional<TensorView>& table_rows,
                                  const TensorView& seq_lens, const Optional<TensorView>& query_start_loc,
                                  const TensorView& plans, const TensorView& split_buffers, const TensorView& flags,
                                  const TensorView& out, const TensorView& lse, const Optional<TensorView>& profile,
                                  int64_t query_len, bool token_table, bool causal, double softmax_scale) {
    // Queries and keys are read up to 16 bytes at a time, outputs written up to 8 at a time.
    check_alignment("q_nope", q_nope, 16);
    check_alignment("q_rope", q_rope, 16);
    check_alignment("latent_cache", cache, 16);
    check_alignment("out", out, 8);
    DecodeParams p = {};
    p.q_nope = data<void>(q_nope);
    p.q_nope_token_stride = q_nope.stride(0);
    p.q_nope_head_stride = q_nope.stride(1);
    p.q_rope = data<void>(q_rope);
    p.q_rope_token_stride = q_rope.stride(0);
    p.q_rope_head_stride = q_rope.stride(1);
    p.cache = data<void>(cache);
    p.row_stride = cache.stride(1);
    // The stride of a single page may be anything.
    p.page_stride = cache.size(0) > 1 ? cache.stride(0) : cache.size(1) * cache.stride(1);
    p.table = page_table(table, table_rows, cache.size(1), token_table);
    p.lengths = lengths(seq_lens, query_start_loc, query_len);
    p.num_heads = Divisor(static_cast<int>(q_nope.size(1)));
    p.causal = causal;
    p.scale_log2 = static_cast<float>(softmax_scale * 1.4426950408889634);
    p.out = data<void>(out);
    p.out_token_stride = out.stride(0);
    p.out_head_stride = out.stride(1);
    p.lse = data<float>(lse);
    p.lse_token_stride = lse.stride(0);
    p.lse_head_stride = lse.stride(1);
    p.plans = data<CtaPlan>(plans);
    p.split_buffers = data<float4>(split_buffers);
    p.flags = data<uint32_t>(flags);
    p.profile = profile.has_value() ? data<uint64_t>(*profile) : nullptr;
    return p;
}

// The launch of a step planned for `num_ctas` CTAs; each kernel adds its block, cluster and shared memory. `may_wait`:
// whether CTAs may share work, and then wait for one another.
inline Launch decode_launch(const TensorView& plans, int64_t num_ctas, bool may_wait, bool overlaps,
                            cudaStream_t stream) {
    const int here = num_ctas_of(plans, stream);
    if (num_ctas != here)
        TVM_FFI_THROW(ValueError) << "the plan was made for " << num_ctas << " CTAs, but a launch on this stream has "
                                  << here << ": call plan() on this stream, or on another of the same green context";
    Launch how = {stream, here};
    how.waits = may_wait;
    how.overlaps = overlaps;
    return how;
}

}  // namespace mla::ffi
