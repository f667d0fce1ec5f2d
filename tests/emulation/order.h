// The order that CUDA guarantees, told to ThreadSanitizer, which finds accesses that nothing orders (races/).
// Without -fsanitize=thread all of this is empty.
//
// An actor is what ThreadSanitizer takes for a thread: each thread of a grid is one, and so is what the hardware does
// beside them. They take turns on one OS thread; that one goes on where another stopped orders nothing. Only these do,
// as in PTX's memory model:
//   barriers, __syncwarp    what the participants did before them comes before what they do after. Shuffles, votes,
//                           ldmatrix and other instructions of a whole warp order nothing
//   mbarrier                what came before the arrivals of a phase, before what follows a wait that saw its end
//   st.release, ld.acquire  as in C++
//   TMA                     an actor per copy, behind what its thread did; before the end of the mbarrier's phase
//   cp.async                an actor per thread, which writes when the copy is issued; before what follows the wait for
//                           its group, or its arrival on an mbarrier
//   st.async                an actor per thread, behind what that did; before the end of the mbarrier's phase
//   wgmma                   an actor per warp, which reads when the product is issued; before what follows a wait, by
//                           any warp of its warpgroup. It comes behind what threads wrote only through a proxy fence,
//                           on either side of the barrier between them: barriers and mbarriers carry on what the actors
//                           of the threads' warps know, beside what the threads know. That a wait of one warp is one
//                           for its warpgroup is not PTX's, but follows from their issuing a wgmma together. With
//                           WARPS_ALONE, a wait is one for its own warp's products alone
//   launches                what the host did before comes before all of it, and that before what the host does next
// Not seen: a missing proxy fence before TMA, registers that wgmma still uses, and all but the last four to access 8
// bytes.
#pragma once
#include <string>
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_write_range(void* begin, unsigned long bytes);
#endif

// For functions that write the emulation's own state: ThreadSanitizer does not see what these do.
#define EMULATES __attribute__((no_sanitize("thread")))

namespace emulation {

#ifdef __SANITIZE_THREAD__
// What one actor did before `release` comes before what another one does after `acquire` of the same address.
EMULATES inline void release(const void* address) { __tsan_release(const_cast<void*>(address)); }
EMULATES inline void acquire(const void* address) { __tsan_acquire(const_cast<void*>(address)); }
// A write that takes place when no bytes change.
EMULATES inline void note_write(void* begin, unsigned long bytes) { __tsan_write_range(begin, bytes); }
EMULATES inline void* new_actor(const std::string& name) {
    void* made = __tsan_create_fiber(0);
    __tsan_set_fiber_name(made, name.c_str());
    return made;
}
EMULATES inline void delete_actor(void* actor) { __tsan_destroy_fiber(actor); }
EMULATES inline void* current_actor() { return __tsan_get_current_fiber(); }
EMULATES inline void go_on_as(void* actor) { __tsan_switch_to_fiber(actor, __tsan_switch_to_fiber_no_sync); }
#else
inline void release(const void*) {}
inline void acquire(const void*) {}
inline void note_write(void*, unsigned long) {}
inline void* new_actor(const std::string&) { return nullptr; }
inline void delete_actor(void*) {}
inline void* current_actor() { return nullptr; }
inline void go_on_as(void*) {}
#endif

struct Actor {
    void* handle = nullptr;

    Actor() = default;
    Actor(const Actor&) = delete;
    EMULATES ~Actor() {
        if (handle) delete_actor(handle);
    }
    // Behind all that the current actor has done.
    EMULATES void begin(const std::string& name) { handle = new_actor(name); }
};

// While it exists, everything is done by another actor.
class Acting {
  public:
    EMULATES explicit Acting(const Actor& actor) : before_(current_actor()) { go_on_as(actor.handle); }
    EMULATES ~Acting() { go_on_as(before_); }
    Acting(const Acting&) = delete;

  private:
    void* const before_;
};

// Where threads, and beside them the actors of their warps, meet: two addresses.
struct Point {
    char of_threads, of_wgmma;
};

}  // namespace emulation
