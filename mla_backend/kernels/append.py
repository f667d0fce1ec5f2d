"""The kernel that appends a layer's new tokens to the latent cache: `csrc/small/append.cuh`."""

from __future__ import annotations

from mla_backend.jit import KernelVariant
from mla_backend.kernels.base import ELEMENT_NAMES, ELEMENTS, dependent_launch


def variant(arch: str) -> KernelVariant:
    """The kernels for both dtypes. They serve all dimensions that are multiples of 8."""
    overlaps = dependent_launch(arch)
    exports = [
        f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, (mla::ffi::append<{ELEMENTS[dtype]}, {overlaps}>));"
        for dtype, name in ELEMENT_NAMES.items()
    ]
    return KernelVariant("append", "\n".join(['#include "ffi/append.cuh"', *exports, ""]), arch)
