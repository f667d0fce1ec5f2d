// What csrc/ffi/project.cuh does on a GPU; `project` has its template arguments.
// clang-format off: it comes first, since it says what the others' keywords mean
#include "cuda_on_cpu.h"
// clang-format on
#include "sm80/project.cuh"

template <typename Element, int kDimIn, int kDimOut, bool kWide, bool kDependentLaunch, int kRowWarps>
bool launch(const mla::sm80::ProjectParams& p) {
    using C = mla::sm80::ProjectConfig<Element, kDimIn, kDimOut, kWide ? 64 : 16, kRowWarps, kWide ? 8 / kRowWarps : 1,
                                       kDependentLaunch>;
    const int blocks = (p.num_tokens + C::kRows - 1) / C::kRows;
    return emulation::launch(C::kSlices * p.num_heads * blocks, C::kThreads, [&] { mla::sm80::project_kernel<C>(p); });
}

// Status 0: done; 1: all threads wait for each other.
template <typename Element, int kDimIn, int kDimOut, bool kWide, bool kDependentLaunch>
int project(const mla::sm80::ProjectParams& p) {
    if (p.num_tokens <= 16) return !launch<Element, kDimIn, kDimOut, kWide, kDependentLaunch, 1>(p);
    if (p.num_tokens <= 32) return !launch<Element, kDimIn, kDimOut, kWide, kDependentLaunch, 2>(p);
    return !launch<Element, kDimIn, kDimOut, kWide, kDependentLaunch, 4>(p);
}
template <typename Element, int kDimIn, int kDimOut, bool kDependentLaunch>
int absorb(const mla::sm80::ProjectParams& p) {
    return project<Element, kDimIn, kDimOut, true, kDependentLaunch>(p);
}
template <typename Element, int kDimIn, int kDimOut, bool kDependentLaunch>
int expand(const mla::sm80::ProjectParams& p) {
    return project<Element, kDimIn, kDimOut, false, kDependentLaunch>(p);
}

#define ENTRY(name, ...)                                                                                              \
    extern "C" int name(void* x, int64_t x_token, int64_t x_head, void* w, void* out, int64_t out_token,              \
                        int64_t out_head, int64_t num_tokens, int64_t num_heads, void* latent, int64_t latent_stride, \
                        void* rope, int64_t rope_stride, int64_t dim_rope, int64_t* slots, int64_t num_slots,         \
                        void* cache, int64_t page_stride, int64_t row_stride, int64_t page_size) {                    \
        return __VA_ARGS__({x,                                                                                        \
                            x_token,                                                                                  \
                            x_head,                                                                                   \
                            w,                                                                                        \
                            out,                                                                                      \
                            out_token,                                                                                \
                            out_head,                                                                                 \
                            int(num_tokens),                                                                          \
                            int(num_heads),                                                                           \
                            {latent, rope, latent_stride, rope_stride, slots, cache, page_stride, row_stride,         \
                             int(page_size), int(dim_rope), int(num_slots)}});                                        \
    }
