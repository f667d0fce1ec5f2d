"""The kernel that appends a layer's new tokens to the latent cache: `csrc/small/append.cuh`."""

from __future__ import annotations

import torch

from mla_backend.cache_format import FORMATS, CacheFormat
from mla_backend.jit import KernelVariant
from mla_backend.kernels.base import (
    ELEMENT_NAMES,
    ELEMENTS,
    dependent_launch,
    format_argument,
)


def formats_of(dtype: torch.dtype) -> list[CacheFormat]:
    """The formats of caches that take new tokens in ``dtype``."""
    return [kv_format for kv_format in FORMATS if kv_format.is_quantized or kv_format.storage is dtype]


def function_name(dtype: torch.dtype, kv_format: CacheFormat) -> str:
    """The module's function for new tokens in ``dtype``; a cache that is not quantized has the same dtype."""
    return f"{ELEMENT_NAMES[dtype]}_{kv_format.short or 'cache'}"


def variant(arch: str) -> KernelVariant:
    """The kernels for both dtypes and every format. They serve all dimensions that are multiples of 8."""
    overlaps = str(dependent_launch(arch)).lower()
    exports = [
        f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({function_name(dtype, kv_format)}, (mla::ffi::append<"
        f"{element}, {format_argument(kv_format if kv_format.is_quantized else None)}, {overlaps}>));"
        for dtype, element in ELEMENTS.items()
        for kv_format in formats_of(dtype)
    ]
    return KernelVariant("append", "\n".join(['#include "ffi/append.cuh"', *exports, ""]), arch)
