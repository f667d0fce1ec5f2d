"""The kernel that multiplies each head's rows by the head's weights, for few tokens: with W_UK and W_UV. See
`csrc/small/head_product.cuh`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mla_backend import jit
from mla_backend.geometry import MLAGeometry
from mla_backend.jit import KernelVariant
from mla_backend.kernels.base import ELEMENT_NAMES, ELEMENTS

CAPABILITY = (9, 0)
"""The compute capability that the kernel is for."""

MOST_TOKENS = 64

MOST_ROWS = 2048
"""Tokens times heads up to which the kernel is used. Every CTA of a head loads all rows of the head, so with
many rows cuBLAS is faster: on an H200, with 128 heads, from somewhere above 16 tokens."""


class HeadProduct:
    """The product ``x[t, h] @ weights[h]``, in a launch that loads weights before its predecessor has ended.

    Args:
        weights: [H, depth, columns], for which `why_not` is None. The kernel is for their dtype, depth and
            layout.

    Raises:
        KernelBuildError, InvalidInputError: as in `jit.load`.
    """

    def __init__(self, weights: Tensor):
        self._columns = weights.shape[2]
        self._kind = _kind(weights)
        self._function = _function(variant(weights))

    def reads(self, weights: Tensor) -> bool:
        """Whether the kernel is for such weights [H, depth, columns]."""
        return _kind(weights) == self._kind and weights.shape[2] == self._columns

    def serves(self, x: Tensor, weights: Tensor) -> bool:
        """Whether the kernel computes the product of x [T, H, depth], and faster than torch."""
        tokens, heads, depth = x.shape
        return (
            0 < tokens <= MOST_TOKENS
            and tokens * heads <= MOST_ROWS
            and self.reads(weights)
            and weights.shape[:2] == (heads, depth)
            and x.dtype is weights.dtype
            and x.device == weights.device
            and _has_aligned_rows(x)
        )

    def __call__(self, x: Tensor, weights: Tensor, out: Tensor) -> None:
        """Multiply what the kernel serves. Never synchronizes.

        Args:
            out: [T, H, columns] in the dtype of x, rows contiguous and aligned to 8 bytes.

        Raises:
            ValueError: rows are not aligned.
        """
        self._function(x, weights, out)


def why_not(weights: Tensor, capability: tuple[int, int]) -> str | None:
    """Why there is no kernel for ``weights`` on a GPU of this compute capability, or why it cannot be built
    here; None if it can be used."""
    return unsupported(weights, capability) or _why_unavailable(variant(weights))


def unsupported(weights: Tensor, capability: tuple[int, int]) -> str | None:
    """Why there is no kernel for ``weights`` on a GPU of this compute capability; None if there is one."""
    _, depth, columns = weights.shape
    if capability != CAPABILITY:
        return "its kernel is for compute capability 9.0"
    if weights.dtype not in ELEMENTS:
        return f"its kernel is not for {weights.dtype}"
    if depth % 64 or depth > 512 or columns % 64:
        return f"its kernel does not multiply {depth} by {columns} columns"
    if _kind(weights) is None:
        return f"its kernel does not read weights with strides {weights.stride()}"
    return None


def variant(weights: Tensor) -> KernelVariant:
    """The kernel for the dtype, the depth and the layout of ``weights``."""
    return _variant(weights.dtype, weights.shape[1], weights.stride(1) == 1)


def weights_in_vllm(geometry: MLAGeometry, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """W_UK [H, d_nope, d_c] and W_UV [H, d_c, d_v] in vLLM's layout, without memory: views of kv_b_proj's
    weight. If that is quantized, vLLM has copies, in another layout with some methods."""
    widths = (geometry.qk_nope_head_dim, geometry.v_head_dim)
    rows = geometry.num_heads, sum(widths)
    kv_b = torch.empty(*rows, geometry.kv_lora_rank, dtype=dtype, device="meta")
    w_uk, w_uv = kv_b.split(widths, dim=1)
    return w_uk, w_uv.transpose(1, 2)


def shipped_variants(dtype: torch.dtype = torch.bfloat16) -> list[KernelVariant]:
    """The kernels for DeepSeek's W_UK and W_UV, as vLLM keeps them."""
    return [_variant(dtype, 128, False), _variant(dtype, 512, True)]


def _variant(dtype: torch.dtype, depth: int, depth_contiguous: bool) -> KernelVariant:
    arguments = f"{ELEMENTS[dtype]}, {depth}, {str(depth_contiguous).lower()}"
    export = f"TVM_FFI_DLL_EXPORT_TYPED_FUNC(multiply, (mla::ffi::head_product<{arguments}>));\n"
    source = f'#include "ffi/head_product.cuh"\n{export}'
    contiguous = "depth" if depth_contiguous else "columns"
    return KernelVariant(f"head_product-{ELEMENT_NAMES[dtype]}-d{depth}-{contiguous}", source, "90a")


@functools.cache
def _why_unavailable(kernel: KernelVariant) -> str | None:
    """Once for all layers: it reads the kernel's sources."""
    return jit.why_unavailable([kernel])


@functools.cache
def _function(kernel: KernelVariant) -> Any:
    return jit.load(kernel).multiply


def _kind(weights: Tensor) -> tuple[torch.dtype, int, int] | None:
    """What a kernel is for: dtype, depth, and which dimension is contiguous. None if no kernel reads them."""
    contiguous = 1 if weights.stride(1) == 1 else 2
    others = (weights.stride(0), weights.stride(3 - contiguous))
    if weights.stride(contiguous) != 1 or any(stride % 8 for stride in others) or weights.data_ptr() % 16:
        return None
    return weights.dtype, weights.shape[1], contiguous


def _has_aligned_rows(x: Tensor) -> bool:
    return x.stride(2) == 1 and not (x.stride(0) % 8 or x.stride(1) % 8 or x.data_ptr() % 16)
