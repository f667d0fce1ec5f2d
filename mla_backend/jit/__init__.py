"""Builds and loads kernels just in time.

A `KernelVariant` is one CUDA translation unit for one architecture. `load` returns it as a
`tvm_ffi.Module`: from this process, from the kernels shipped inside the package, from the user's
cache, or else by one call of nvcc.
"""

from mla_backend.jit.builder import (
    BuildResult,
    build,
    cache_dir,
    compile_report,
    find_entry,
    load,
    prebuilt_dir,
)
from mla_backend.jit.report import CompileReport, KernelResources
from mla_backend.jit.toolchain import Toolchain, find_toolchain
from mla_backend.jit.variant import KernelVariant, arch_of, csrc_dir

__all__ = [
    "BuildResult",
    "CompileReport",
    "KernelResources",
    "KernelVariant",
    "Toolchain",
    "arch_of",
    "build",
    "cache_dir",
    "compile_report",
    "csrc_dir",
    "find_entry",
    "find_toolchain",
    "load",
    "prebuilt_dir",
]
