#pragma once

namespace mla {

inline void wait_for_predecessor() { emulation::current->waited = true; }
inline void allow_successor() {}

}  // namespace mla
