"""Builds and loads kernels just in time.

A `KernelVariant` is one CUDA translation unit for one architecture. `load` returns it as a
`tvm_ffi.Module`: from this process, from the kernels shipped inside the package, from the user's
cache, or else by one call of nvcc. `load_all` and `prepare` compile missing variants in parallel.
`why_unavailable` says in advance whether they can.
"""

from mla_backend.jit.builder import (
    BuildResult,
    build,
    compile_report,
    load,
    load_all,
    prepare,
    why_unavailable,
)
from mla_backend.jit.report import CompileReport, KernelResources
from mla_backend.jit.store import (
    StoredKernel,
    cache_dir,
    find_entry,
    is_writable,
    prebuilt_dir,
    shipped_dirs,
    stored_kernels,
)
from mla_backend.jit.toolchain import Toolchain, find_toolchain
from mla_backend.jit.variant import KernelVariant, arch_name, arch_of, capability_of, csrc_dir
from mla_backend.jit.wheel import write_wheel

__all__ = [
    "BuildResult",
    "CompileReport",
    "KernelResources",
    "KernelVariant",
    "StoredKernel",
    "Toolchain",
    "arch_name",
    "arch_of",
    "build",
    "cache_dir",
    "capability_of",
    "compile_report",
    "csrc_dir",
    "find_entry",
    "find_toolchain",
    "is_writable",
    "load",
    "load_all",
    "prebuilt_dir",
    "prepare",
    "shipped_dirs",
    "stored_kernels",
    "why_unavailable",
    "write_wheel",
]
