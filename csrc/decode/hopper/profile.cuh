// Timestamps from inside a kernel; only profiling variants contain them.
#pragma once
#include <cstdint>

namespace mla::hopper {

// What has ended when a stamp is taken. `mla_backend.kernels.trace` has their names.
enum class Event : uint32_t {
    kStart,
    kTableRead,
    kLoadsIssued,
    kQueriesArrived,
    kKeysArrived,
    kScores,
    kSoftmax,
    kProbabilitiesArrived,
    kValues,
    kMerged,
    kWorkTileWritten,
    kCombined,
};

constexpr int kProfileStamps = 512;  // per role; later ones are dropped
constexpr int kProfileRoles = 4;     // key loader, consumer 0, consumer 1, transposing warp

// buffer [ctas][kProfileRoles][kProfileStamps][2]: event, clock; stamp 0 holds the number of stamps and globaltimer.
template <bool kEnabled>
struct Profiler {
    __device__ Profiler(uint64_t*, int, bool) {}
    __device__ void mark(Event) {}
};

template <>
struct Profiler<true> {
    uint64_t* stamps;
    int count = 0;

    __device__ Profiler(uint64_t* buffer, int role, bool elected)
        : stamps(elected ? buffer + (static_cast<int64_t>(blockIdx.x) * kProfileRoles + role) * kProfileStamps * 2
                         : nullptr) {
        if (stamps) asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(stamps[1]));
        mark(Event::kStart);
    }

    __device__ void mark(Event event) {
        if (!stamps || count + 1 >= kProfileStamps) return;
        ++count;
        uint64_t clock;
        asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock));
        stamps[count * 2] = static_cast<uint64_t>(event);
        stamps[count * 2 + 1] = clock;
        stamps[0] = count;
    }
};

}  // namespace mla::hopper
