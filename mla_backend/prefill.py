"""Vanilla attention on the best library present.

- FlashAttention-3 on Hopper, its own package or the copy in a serving engine: the only one that takes
  different widths of keys and values as they are.
- FlashAttention-2, which torch contains, on Ampere and newer; values are padded to the width of the keys.
- Plain torch (:func:`mla_backend.torch_attention.prefill_attention`) anywhere else.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable

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
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], offsets of the requests' rows, starting at 0.
        max_q, max_k: the longest request's rows, known on the host.
        softmax_scale: factor on the scores.
        causal: bottom-right aligned.
        return_lse: also return the log-sum-exp, for :func:`mla_backend.torch_attention.merge_states`.

    Returns:
        out [T, H, d_v] in the dtype of q; with ``return_lse`` also lse [T, H], fp32, natural logarithm. Rows
        without keys are 0 and -inf.

    Raises:
        InvalidInputError: shapes, dtypes or offsets that do not fit together.
    """
    torch_attention.check_prefill(q, k, v, cu_seqlens_q, cu_seqlens_k)
    # An empty chunk of context is no case for a kernel.
    flash = _flash(q.device) if _fits_flash(q.dtype, q.shape[2], v.shape[2]) and len(k) else None
    if flash is None:
        out, lse = torch_attention.prefill_attention(
            q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal=causal
        )
    else:
        out, lse = flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, softmax_scale, causal)
        # FlashAttention-2 marks rows without keys by +inf.
        lse = lse.masked_fill(lse.isposinf(), float("-inf")).transpose(0, 1)
    return (out, lse) if return_lse else out


def library(device: torch.device | str, dtype: torch.dtype, qk_head_dim: int, v_head_dim: int) -> str:
    """The name of what :func:`prefill` runs on: "FlashAttention-3", "FlashAttention-2" or "torch"."""
    flash = _flash(torch.device(device)) if _fits_flash(dtype, qk_head_dim, v_head_dim) else None
    return {_flash3: "FlashAttention-3", _flash2: "FlashAttention-2", None: "torch"}[flash]


def _fits_flash(dtype: torch.dtype, qk_head_dim: int, v_head_dim: int) -> bool:
    return dtype in _FLASH_DTYPES and v_head_dim <= qk_head_dim <= 256 and qk_head_dim % 8 == 0


@functools.cache
def _flash(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]] | None:
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability[0] == 9 and _flash3_function() is not None:
        return _flash3
    return _flash2 if capability >= (8, 0) and torch.backends.cuda.is_flash_attention_available() else None


@functools.cache
def _flash3_function() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """``flash_attn_varlen_func``, asked to return the log-sum-exp."""
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
        # Early releases return the log-sum-exp always.
        arguments = {"return_attn_probs": True, "return_softmax_lse": True, "fa_version": 3}
        attend = module.flash_attn_varlen_func
        known = inspect.signature(attend).parameters
        return functools.partial(attend, **{key: arguments[key] for key in arguments if key in known})
    return None


def _flash3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, softmax_scale, causal
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _flash3_function()(
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
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, softmax_scale, causal
) -> tuple[Tensor, Tensor]:
    padded = F.pad(v, (0, q.shape[2] - v.shape[2]))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, padded, cu_seqlens_q, cu_seqlens_k, max_q, max_k, 0.0, causal, False, scale=softmax_scale
    )
    return out[:, :, : v.shape[2]], lse
