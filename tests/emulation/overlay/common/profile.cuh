#pragma once
#include <cstdint>

namespace mla {

enum class Event : uint32_t {
    kStart,
    kTableRead,
    kKeysRequested,
    kQueriesArrived,
    kKeysArrived,
    kScores,
    kSoftmax,
    kValues,
    kJoined,
    kEntryWritten,
    kReduced,
};

template <bool kEnabled>
struct Profiler {
    Profiler(uint64_t*, int, bool) {}
    void mark(Event) {}
};

}  // namespace mla
