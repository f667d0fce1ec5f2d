// Entry point of the decode kernels. A `Kernel` (portable_decode.cuh, hopper_decode.cuh) says what its launch needs:
//
//   Config        its template arguments
//   SharedMemory  the layout of its shared memory
//   SplitBuffers  its split buffers
//   kThreads      of a CTA
//   kKernel       the `__global__` function
//   kMostCluster  CTAs of the largest clusters in which it is launched
//   launch(how, params, sizes)  launches it; `how` is complete but for what only this kernel needs, such as clusters
#pragma once
#include "launch.cuh"
#include "numbers/arithmetic.cuh"
#include "schedule/splits.cuh"
#include "tensors.cuh"

namespace mla::ffi {

// The most shared memory that a CTA may have (CUDA C++ Programming Guide, technical specifications) on the architecture
// that device code is being compiled for. Host code is the same for every architecture.
#ifdef __CUDA_ARCH__
constexpr int kArch = __CUDA_ARCH__ / 10;
#else
constexpr int kArch = 90;
#endif
constexpr bool kHasOnly99k = kArch == 86 || kArch == 89 || kArch == 120 || kArch == 121;
constexpr size_t kMaxSharedBytes = (kHasOnly99k ? 99 : kArch < 90 ? 163 : 227) << 10;

struct DecodeSizes {
    int64_t batch, query_len;
    bool uniform;   // all requests have `query_len` query tokens
    int64_t pages;  // of the cache
};

// The launch of a step planned for `num_ctas` CTAs. `may_wait`: whether CTAs may share work, and then wait for one
// another.
template <typename Kernel>
Launch decode_launch(const TensorView& plans, int64_t num_ctas, bool may_wait, bool overlaps, cudaStream_t stream) {
    static_assert(sizeof(typename Kernel::SharedMemory) <= kMaxSharedBytes);
    const int available = num_ctas_of(plans, stream);
    if (num_ctas != available)
        TVM_FFI_THROW(ValueError) << "the plan was made for " << num_ctas << " CTAs, but a launch on this stream has "
                                  << available
                                  << ": call plan() on this stream, or on another of the same green context";
    Launch how = {stream, available, Kernel::kThreads, static_cast<int>(sizeof(typename Kernel::SharedMemory))};
    how.waits = may_wait;
    how.overlaps = overlaps;
    return how;
}

// Sizes of what Python allocates: CTAs of a launch at most, 32-bit words of a CTA's and of a request's plan, words from
// one CTA's flag to the next, 32-bit words of a split buffer.
template <typename Kernel>
Shape workspace() {
    static_assert(Kernel::SplitBuffers::kBufferBytes % 16 == 0);
    return Shape{kMaxCtas, sizeof(CtaPlan) / 4, sizeof(PlannedRequest) / 4, kFlagStride,
                 Kernel::SplitBuffers::kBufferBytes / 4};
}

// How many CTAs of a launch can be resident at once on a device if nothing else runs there; with clusters and without.
template <typename Kernel>
int64_t resident(int64_t device) {
    const DeviceScope scope(static_cast<int>(device));
    Launch how = {nullptr, 1, Kernel::kThreads, static_cast<int>(sizeof(typename Kernel::SharedMemory))};
    int ctas = resident_ctas(Kernel::kKernel, how);
    for (how.cluster = 2; how.cluster <= Kernel::kMostCluster; how.cluster *= 2)
        ctas = std::min(ctas, resident_ctas(Kernel::kKernel, how));
    return ctas;
}

// q_nope [tokens, heads, d_c], q_rope [tokens, heads, d_rope], cache [pages, page_size, ...] in the format of the
// kernel (numbers/cache_format.cuh), kv_scale fp32 [1] or None, sinks fp32 [heads] or None;
// table, table_rows: see `page_table`; requests int32 [batch, words of a PlannedRequest], plans: by `plan`, of the same
// batch; uniform: whether all requests have `query_len` query tokens, and not at most as many; generation, failure: see
// `check_plan`; split_buffers int32 [2 * CTAs, ...] and flags: see schedule/splits.cuh; out [tokens, heads, d_c]; lse
// fp32 [tokens, heads]; profile int64 or None: stamps of a profiling variant.
template <typename Kernel>
void decode(TensorView q_nope, TensorView q_rope, TensorView cache, Optional<TensorView> kv_scale,
            Optional<TensorView> sinks, Optional<TensorView> table, Optional<TensorView> table_rows,
            TensorView requests, bool uniform, TensorView plans, TensorView split_buffers, TensorView flags,
            TensorView out, TensorView lse, Optional<TensorView> profile, int64_t query_len, int64_t rank,
            int64_t shards, int64_t interleave, bool token_table, bool causal, double softmax_scale, int64_t num_ctas,
            int64_t generation, int64_t failure, bool may_wait, bool overlaps) {
    // Queries and keys are read up to 16 bytes at a time, outputs written up to 8 at a time.
    check_alignment("q_nope", q_nope, 16);
    check_alignment("q_rope", q_rope, 16);
    check_alignment("latent_cache", cache, 16);
    check_alignment("out", out, 8);
    DecodeParams p = {};
    p.num_tokens = static_cast<uint32_t>(q_nope.size(0));
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
    p.num_pages = static_cast<uint32_t>(cache.size(0));
    p.num_slots = static_cast<uint32_t>(std::min(cache.size(0) * cache.size(1), int64_t{INT_MAX}));
    p.table = page_table(table, table_rows, cache.size(1), token_table, rank, shards);
    p.requests = data<const PlannedRequest>(requests);
    p.shard = shard(rank, shards, interleave);
    p.longest = longest_request(table, cache.size(1), token_table, rank, shards, interleave);
    p.num_heads = Divisor(static_cast<int>(q_nope.size(1)));
    p.causal = causal;
    p.scale_log2 = static_cast<float>(softmax_scale * kLog2OfE);
    p.out = data<void>(out);
    p.out_token_stride = out.stride(0);
    p.out_head_stride = out.stride(1);
    p.lse = data<float>(lse);
    p.lse_token_stride = lse.stride(0);
    p.lse_head_stride = lse.stride(1);
    p.generation = static_cast<int>(generation);
    p.failure = reinterpret_cast<int*>(failure);
    p.plans = data<CtaPlan>(plans);
    p.split_buffers = data<void>(split_buffers);
    p.flags = data<uint32_t>(flags);
    p.profile = profile.has_value() ? data<uint64_t>(*profile) : nullptr;
    p.kv_scale = kv_scale.has_value() ? data<float>(*kv_scale) : nullptr;
    p.sinks = sinks.has_value() ? data<float>(*sinks) : nullptr;

    const DeviceScope device(q_nope.device().device_id);
    const Launch how = decode_launch<Kernel>(plans, num_ctas, may_wait, overlaps, stream_of(q_nope));
    Kernel::launch(how, p, {requests.size(0), query_len, uniform, cache.size(0)});
}

}  // namespace mla::ffi
