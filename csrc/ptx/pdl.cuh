// Programmatic dependent launch: launches of a stream overlap.
#pragma once

namespace mla {

// Nothing that an earlier kernel of the step wrote may be read before `wait_for_predecessor`, except the plan and the
// page table (KernelDecode.run in mla_backend/kernels/base.py says why). The wait covers the predecessor alone; what
// ran before it has ended only if the predecessor waits, too, as all kernels here do.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void allow_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace mla
