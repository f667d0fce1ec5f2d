"""Vanilla attention on the fastest library that is installed.

- FlashAttention-3 on Hopper: its own package, or the copy in a serving engine. Only this one accepts keys and
  values of different widths.
- FlashAttention-2, which torch contains, on Ampere and newer. Values are padded to the width of the keys.
- Plain torch (:func:`mla_backend.torch_attention.prefill_attention`) anywhere else.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_backend import torch_attention

_FLASH_DTYPES = (torch.bfloat16, torch.float16)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    softmax_scale: float,
    causal: bool,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Vanilla attention over ragged requests, for new tokens (causal) or a chunk of context (not causal).

    Args:
        q: [T, H, d_qk].
        k: [S, H, d_qk].
        v: [S, H, d_v]; may be strided, the last dimension contiguous.
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], offsets of the requests' tokens, starting at 0.
        max_q, max_k: tokens of the longest request, known on the host.
        softmax_scale: factor on the scores.
        causal: bottom-right aligned.
        return_lse: also return the log-sum-exp, for :func:`mla_backend.torch_attention.merge_states`.

    Returns:
        out [T, H, d_v] in the dtype of q; with ``return_lse`` also lse [T, H], fp32, natural logarithm.
        Queries without keys are 0 and -inf.

    Raises:
        InvalidInputError: shapes, dtypes or offsets do not fit together.
    """
    torch_attention.check_prefill(q, k, v, cu_seqlens_q, cu_seqlens_k)
    flash = _flash_of(q.device, q.dtype, q.shape[2], v.shape[2])
    if flash is None or not len(k):  # a chunk of context may be empty, which the libraries do not allow
        out, lse = torch_attention.prefill_attention(
            q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal=causal
        )
    else:
        out, lse = flash.attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, softmax_scale, causal)
        # The lse of FlashAttention-2 is +inf for queries without keys.
        lse = lse.masked_fill(lse.isposinf(), float("-inf")).transpose(0, 1)
    return (out, lse) if return_lse else out


def library(device: torch.device | str, dtype: torch.dtype, qk_head_dim: int, v_head_dim: int) -> str:
    """The library that :func:`prefill` calls: "FlashAttention-3", "FlashAttention-2" or "torch"."""
    flash = _flash_of(torch.device(device), dtype, qk_head_dim, v_head_dim)
    return flash.name if flash else "torch"


class _Flash(NamedTuple):
    """A FlashAttention, which returns out [T, H, d_v] and lse [H, T]."""

    name: str
    attend: Callable[..., tuple[Tensor, Tensor]]


def _flash_of(device: torch.device, dtype: torch.dtype, qk_head_dim: int, v_head_dim: int) -> _Flash | None:
    fits = dtype in _FLASH_DTYPES and v_head_dim <= qk_head_dim <= 256 and qk_head_dim % 8 == 0
    return _flash(device) if fits else None


@functools.cache
def _flash(device: torch.device) -> _Flash | None:
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability[0] == 9 and (flash3 := _flash3_function()) is not None:
        return _Flash("FlashAttention-3", functools.partial(_flash3, flash3))
    if capability >= (8, 0) and torch.backends.cuda.is_flash_attention_available():
        return _Flash("FlashAttention-2", _flash2)
    return None


@functools.cache
def _flash3_function() -> Callable[..., tuple[Tensor, ...]] | None:
    """``flash_attn_varlen_func``, with the arguments that make it return the log-sum-exp."""
    for name in ("flash_attn_interface", "sgl_kernel.flash_attn", "vllm.vllm_flash_attn"):
        if name.startswith("vllm") and "vllm" not in sys.modules:
            continue  # importing an engine takes seconds
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        versions = getattr(module, "is_fa_version_supported", None)
        if versions is not None and not versions(3):
            continue
        # The name of the argument differs; early releases have none and always return the log-sum-exp.
        arguments = {"return_attn_probs": True, "return_softmax_lse": True, "fa_version": 3}
        attend = module.flash_attn_varlen_func
        known = inspect.signature(attend).parameters
        return functools.partial(attend, **{key: arguments[key] for key in arguments if key in known})
    return None


def _flash3(
    function: Callable[..., tuple[Tensor, ...]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = function(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        softmax_scale=softmax_scale,
        causal=causal,
    )
    return out, lse


def _flash2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    padded = F.pad(v, (0, q.shape[2] - v.shape[2]))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, padded, cu_seqlens_q, cu_seqlens_k, max_q, max_k, 0.0, causal, False, scale=softmax_scale
    )
    return out[:, :, : v.shape[2]], lse
