"""The kernels that append new tokens to the latent cache: `csrc/small/append.cuh`, and
`csrc/small/scatter_rows.cuh` for rows that are in the cache's format already."""

from __future__ import annotations

import functools
from typing import Any

import torch

from mla_backend import jit
from mla_backend.cache_format import FORMATS, CacheFormat
from mla_backend.jit import KernelVariant
from mla_backend.kernels.base import ELEMENT_NAMES, ELEMENTS, dependent_launch, format_argument


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
    exports.append("TVM_FFI_DLL_EXPORT_TYPED_FUNC(scatter_rows, mla::ffi::scatter_rows);")
    includes = ['#include "ffi/append.cuh"', '#include "ffi/scatter_rows.cuh"']
    return KernelVariant("append", "\n".join([*includes, *exports, ""]), arch)


@functools.cache
def module(device: torch.device) -> Any:
    """The kernels on a GPU.

    Raises:
        KernelBuildError, InvalidInputError: as in `jit.load`.
    """
    return jit.load(variant(jit.arch_of(device)))
