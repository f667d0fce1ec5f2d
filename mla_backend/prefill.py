"""Vanilla (non-absorbed) attention on the best library present."""

from __future__ import annotations

from torch import Tensor

from mla_backend import reference


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
    out, lse = reference.prefill_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal=causal)
    return (out, lse) if return_lse else out
