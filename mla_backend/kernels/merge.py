"""The kernel that merges two states of attention in one launch: `csrc/small/merge_states.cuh`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mla_backend import jit
from mla_backend.jit import KernelVariant
from mla_backend.kernels.base import ELEMENT_NAMES, ELEMENTS


def variant(arch: str) -> KernelVariant:
    """The kernels for both dtypes. They serve all dimensions that are multiples of 8."""
    exports = [
        f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, (mla::ffi::merge_states<{ELEMENTS[dtype]}>));"
        for dtype, name in ELEMENT_NAMES.items()
    ]
    return KernelVariant("merge_states", "\n".join(['#include "ffi/merge_states.cuh"', *exports, ""]), arch)


def serves(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> bool:
    """Whether a kernel serves tensors on one device: outputs [T, H, d] of one 16-bit dtype, d a multiple of
    8, whose rows are contiguous and aligned to 16 bytes, and lse [T, H] in fp32."""
    return (
        out_a.device == lse_a.device == out_b.device == lse_b.device
        and out_a.dtype == out_b.dtype
        and out_a.dtype in ELEMENTS
        and lse_a.dtype == lse_b.dtype == torch.float32
        and out_a.ndim == 3
        and out_a.shape == out_b.shape
        and lse_a.shape == lse_b.shape == out_a.shape[:2]
        and out_a.shape[2] % 8 == 0
        and all(_has_aligned_rows(out) for out in (out_a, out_b))
    )


def _has_aligned_rows(out: Tensor) -> bool:
    return out.stride(2) == 1 and not (out.stride(0) % 8 or out.stride(1) % 8 or out.data_ptr() % 16)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """As `mla_backend.torch_attention.merge_states`, for what `serves` accepts."""
    out = torch.empty_like(out_a, memory_format=torch.contiguous_format)
    lse = out_a.new_empty(out_a.shape[:2], dtype=torch.float32)
    merge = getattr(module(out_a.device), ELEMENT_NAMES[out_a.dtype])
    merge(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


@functools.cache
def module(device: torch.device) -> Any:
    """The kernels on a GPU.

    Raises:
        KernelBuildError, InvalidInputError: as in `jit.load`.
    """
    return jit.load(variant(jit.arch_of(device)))
