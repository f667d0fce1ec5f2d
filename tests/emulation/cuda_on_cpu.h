// Runs CUDA kernels on the CPU, for tests: every thread of a grid is a fiber of one OS thread, and the fibers take
// turns at every point where a thread waits for others. Shared memory is poisoned before a launch. The PTX of csrc is
// replaced by the headers in `overlay`, which follow the PTX ISA's description of each instruction.
//
// What it shows: indices, fragments, descriptors, barriers that fit each other, masks, what is read and written; with
// ThreadSanitizer also accesses that nothing orders (order.h), without which TMA and wgmma, done at once, seem to need
// no wait. What it does not: anything about speed.
#pragma once
#undef _FORTIFY_SOURCE  // for which a jump to another stack is a mistake
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <setjmp.h>
#include <ucontext.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "order.h"

#undef __device__
#undef __global__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __global__
#define __shared__ static  // of the planner, which is one CTA
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulation {

constexpr uint32_t kSharedBytes = 227 << 10;

struct Barrier {  // bar.sync and its relatives
    int arrived = 0;
    uint32_t generation = 0;
    bool any = false, result = false;
    Point points[2];  // generations take turns
};

struct Warp {
    alignas(16) unsigned char values[2][32][16];  // what lanes exchange; two, so that a fast lane cannot overwrite
    Barrier barrier;
    uint32_t exchanges[32] = {};
    Actor wgmma;
    char fence;
    char groups[8];  // of wgmma
};

// Whether the tensor cores start a warpgroup's wgmma only when all four warps have issued it, so that a wait of one
// warp is one for the products of all four. Hardware does so, but PTX does not promise it.
#ifdef WARPS_ALONE
constexpr bool kWarpsTogether = false;
#else
constexpr bool kWarpsTogether = true;
#endif

struct Warpgroup {
    Barrier barrier;
    char groups[8];  // of wgmma, of all four warps
};

struct Cta {
    uint3 index;
    std::unique_ptr<unsigned char[]> storage;
    unsigned char* shared;
    Barrier barriers[16];
    std::vector<Warp> warps;
    Warpgroup warpgroups[8];
    Barrier cluster, cluster_end;  // of the first CTA of two, for both
    Cta* partner = nullptr;        // the other one
    char accesses[1024];           // by each of the partner's threads to this CTA's memory
    uint32_t ended = 0;            // threads
    char end;
};

struct Fiber {
    ucontext_t start;
    bool started = false;
    jmp_buf stopped;  // where it waits: swapcontext would do, but calls the system each time, for the signal mask
    std::unique_ptr<unsigned char[]> stack;
    Cta* cta;
    uint3 thread;
    bool done = false;
    bool waited = false;  // for the grid's predecessor
    bool left = false;    // the cluster: it does nothing more in the partner's memory
    Actor actor, copier, sender;
    std::vector<std::function<void()>> copies;              // cp.async: not committed yet
    std::deque<std::vector<std::function<void()>>> groups;  // committed, oldest first
    uint32_t wgmma_groups = 0;                              // committed
};

inline Fiber* current = nullptr;
inline jmp_buf scheduler;
inline dim3 grid, block;
inline std::function<void()>* body = nullptr;
inline uint64_t progress = 0;  // changes whenever something happened that may let others go on
inline void* host;             // the actor that launches
inline bool overlaps = false;  // whether the grid begins before its predecessor has ended

EMULATES inline void progressed() { ++progress; }
EMULATES inline void yield() {
    if (_setjmp(current->stopped)) return;
    go_on_as(host);
    _longjmp(scheduler, 1);
}
inline void fail(const char* what) {
    std::fprintf(stderr, "emulation: %s (CTA %u, thread %u)\n", what, current->cta->index.x, current->thread.x);
    std::abort();
}

// Before anything that an earlier grid may still be writing.
inline void need_predecessor() {
    if (overlaps && !current->waited) fail("did not wait for the predecessor");
}

inline int lane() { return current->thread.x % 32; }
inline Warp& warp() { return current->cta->warps[current->thread.x / 32]; }
inline Warpgroup& warpgroup() { return current->cta->warpgroups[current->thread.x / 128]; }
using Groups = char[8];
inline Groups& wgmma_groups() { return kWarpsTogether ? warpgroup().groups : warp().groups; }

EMULATES inline void release(const Point& point) {
    release(&point.of_threads);
    const Acting acting(warp().wgmma);
    release(&point.of_wgmma);
}
EMULATES inline void acquire(const Point& point) {
    acquire(&point.of_threads);
    const Acting acting(warp().wgmma);
    acquire(&point.of_wgmma);
}

// Waits until `count` threads are here, which orders nothing; true if any of them passed true.
EMULATES inline bool meet(Barrier& barrier, int count, bool value = false) {
    barrier.any |= value;
    const uint32_t generation = barrier.generation;
    if (++barrier.arrived == count) {
        barrier.arrived = 0;
        barrier.result = barrier.any;
        barrier.any = false;
        ++barrier.generation;
        ++progress;
    } else {
        while (barrier.generation == generation) yield();
    }
    return barrier.result;
}
inline void meet_warp() { meet(warp().barrier, 32); }

// A barrier that orders.
EMULATES inline bool wait(Barrier& barrier, int count, bool value = false) {
    const Point& point = barrier.points[barrier.generation % 2];
    release(point);
    const bool any = meet(barrier, count, value);
    acquire(point);
    return any;
}

// Each lane gives a value and may then look at everyone's, until its next exchange.
template <typename T>
EMULATES const unsigned char (*exchange(const T& value))[16] {
    static_assert(sizeof(T) <= 16);
    Warp& all = warp();
    auto& values = all.values[all.exchanges[lane()]++ % 2];
    std::memcpy(values[lane()], &value, sizeof(T));
    meet_warp();
    return values;
}
template <typename T>
T shuffle(const T& value, int from) {
    T result;
    std::memcpy(&result, exchange(value)[from], sizeof(T));
    return result;
}

// cp.async: the copier writes now, and `copy` is done when it is waited for.
inline void copy_later(unsigned char* to, unsigned long bytes, std::function<void()> copy) {
    Fiber& self = *current;
    self.copies.push_back(std::move(copy));
    if (!self.copier.handle) self.copier.begin("cp.async of thread " + std::to_string(self.thread.x));
    release(&self.copier);
    const Acting acting(self.copier);
    acquire(&self.copier);
    note_write(to, bytes);
}
inline void release_copies(const void* address) {
    if (!current->copier.handle) return;
    const Acting acting(current->copier);
    release(address);
}

// When the last thread of a CTA ends, its shared memory does: the partner must not access it at the same time.
EMULATES inline void end_thread(Cta& cta) {
    release(&cta.end);
    if (++cta.ended < block.x) return;
    acquire(&cta.end);
    note_write(cta.accesses, sizeof(cta.accesses));
}

EMULATES inline void run_fiber() {
    (*body)();
    end_thread(*current->cta);
    release_copies(body);  // a kernel may end while it copies what nobody reads
    release(body);
    current->done = true;
    ++progress;
    go_on_as(host);
    _longjmp(scheduler, 1);
}

// Runs a fiber until it waits or ends.
EMULATES inline void go_on(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    current = &fiber;
    go_on_as(fiber.actor.handle);
    if (fiber.started) _longjmp(fiber.stopped, 1);
    fiber.started = true;
    setcontext(&fiber.start);
}

// Runs all fibers to their end. Returns false if they wait for each other forever.
EMULATES inline bool run(const std::vector<std::unique_ptr<Fiber>>& fibers) {
    for (size_t left = fibers.size(), idle = 0; left > 0;) {
        const uint64_t before = progress;
        left = 0;
        for (auto& fiber : fibers) {
            if (fiber->done) continue;
            ++left;
            go_on(*fiber);
        }
        idle = progress == before ? idle + 1 : 0;
        if (idle > 1000) return false;
    }
    return true;
}

// Runs the kernel to its end; CTAs are all resident, in clusters of one or two. Returns false if the fibers wait for
// each other forever.
template <typename Kernel>
bool launch(unsigned num_ctas, unsigned num_threads, int cluster, Kernel kernel) {
    constexpr size_t kStack = 256 << 10;
    grid = dim3(num_ctas), block = dim3(num_threads);
    std::vector<Cta> ctas(num_ctas);
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::function<void()> function = kernel;
    body = &function;
    for (unsigned c = 0; c < num_ctas; ++c) {
        Cta& cta = ctas[c];
        cta.index = {c, 0, 0};
        if (cluster == 2) cta.partner = &ctas[c ^ 1];
        cta.storage.reset(new unsigned char[kSharedBytes + 1024]);
        cta.shared = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(cta.storage.get()) + 1023) & ~1023);
        std::memset(cta.shared, 0xff, kSharedBytes);  // NaN in every format
        cta.warps = std::vector<Warp>((num_threads + 31) / 32);
        for (unsigned t = 0; t < num_threads; ++t) {
            auto fiber = std::make_unique<Fiber>();
            fiber->cta = &cta;
            fiber->thread = {t, 0, 0};
            fiber->stack.reset(new unsigned char[kStack]);
            getcontext(&fiber->start);
            fiber->start.uc_stack.ss_sp = fiber->stack.get();
            fiber->start.uc_stack.ss_size = kStack;
            makecontext(&fiber->start, run_fiber, 0);
            fibers.push_back(std::move(fiber));
        }
    }
    host = current_actor();
    for (auto& fiber : fibers) {
        const std::string cta = " of CTA " + std::to_string(fiber->cta->index.x);
        const unsigned thread = fiber->thread.x, warp = thread / 32;
        fiber->actor.begin("thread " + std::to_string(thread) + cta);
        if (thread % 32 == 0) fiber->cta->warps[warp].wgmma.begin("wgmma of warp " + std::to_string(warp) + cta);
    }
    const bool finished = run(fibers);
    acquire(body);
    return finished;
}

inline unsigned char* shared_memory() { return current->cta->shared; }
inline unsigned char* at_shared(uint32_t address, uint32_t bytes, Cta& cta = *current->cta) {
    if (address + bytes > kSharedBytes) fail("shared memory is read or written behind its end");
    return cta.shared + address;
}

// A place in the shared memory of the cluster's other CTA.
template <typename T>
T& at_partner(T& place) {
    if (!current->cta->partner) fail("a cluster without a second CTA");
    if (current->left) fail("something in the partner's memory after leaving the cluster");
    note_write(&current->cta->partner->accesses[current->thread.x], 1);
    const auto offset = reinterpret_cast<unsigned char*>(&place) - shared_memory();
    return *reinterpret_cast<T*>(current->cta->partner->shared + offset);
}

}  // namespace emulation

#define threadIdx (emulation::current->thread)
#define blockIdx (emulation::current->cta->index)
#define gridDim (emulation::grid)
#define blockDim (emulation::block)

inline void __syncthreads() { emulation::wait(emulation::current->cta->barriers[0], blockDim.x); }
inline int __syncthreads_or(int value) {
    return emulation::wait(emulation::current->cta->barriers[0], blockDim.x, value != 0);
}
inline void __syncwarp(unsigned = ~0u) { emulation::wait(emulation::warp().barrier, 32); }
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
    return emulation::shuffle(value, from % 32);
}
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulation::shuffle(value, emulation::lane() ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int delta) {
    const int from = emulation::lane() - delta;
    return emulation::shuffle(value, from < 0 ? emulation::lane() : from);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int delta) {
    const int from = emulation::lane() + delta;
    return emulation::shuffle(value, from > 31 ? emulation::lane() : from);
}
template <typename T>  // int or unsigned
T __reduce_max_sync(unsigned, T value) {
    const auto values = emulation::exchange(value);
    for (int i = 0; i < 32; ++i) value = std::max(value, *reinterpret_cast<const T*>(values[i]));
    return value;
}
inline unsigned __ballot_sync(unsigned, int value) {
    const auto values = emulation::exchange(value);
    unsigned ballot = 0;
    for (int i = 0; i < 32; ++i) ballot |= (*reinterpret_cast<const int*>(values[i]) != 0) << i;
    return ballot;
}
inline int __any_sync(unsigned, int value) {
    const auto values = emulation::exchange(value);
    int any = 0;
    for (int i = 0; i < 32; ++i) any |= *reinterpret_cast<const int*>(values[i]) != 0;
    return any;
}
template <typename T>
T __ldcg(const T* at) {
    return *at;
}
template <typename T>
void __stcg(T* at, T value) {
    *at = value;
}
inline int atomicMax(int* at, int value) {
    const int old = __atomic_load_n(at, __ATOMIC_RELAXED);
    if (value > old) __atomic_store_n(at, value, __ATOMIC_RELAXED);
    return old;
}
// Of the selector's four numbers, each the byte that it names: 0 to 3 of a, 4 to 7 of b.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t both = a | static_cast<uint64_t>(b) << 32;
    uint32_t bytes = 0;
    for (int i = 0; i < 4; ++i) bytes |= static_cast<uint32_t>(both >> (selector >> i * 4 & 7) * 8 & 0xff) << i * 8;
    return bytes;
}
inline uint32_t __vimax3_u16x2(uint32_t a, uint32_t b, uint32_t c) {
    auto larger = [](uint32_t x, uint32_t y) {
        return std::max(x & 0xffff, y & 0xffff) | std::max(x >> 16, y >> 16) << 16;
    };
    return larger(larger(a, b), c);
}
inline float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline int __float_as_int(float value) {
    int bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(value); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
