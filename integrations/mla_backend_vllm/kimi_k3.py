"""Kimi-K3's and Kimi-Linear's layers with an e4m3 cache: queries, and keys and values of prefill, in 16 bits.

These layers of vLLM append and attend in methods of their own (Kimi-Linear's from vLLM 0.28 on). If the
cache is e4m3 with one scale, these methods round queries to e4m3 and demand prefill in fp8, which vLLM allows
on GPUs of compute capability 10.x alone: elsewhere the first long prompt stops the engine. Nothing here needs
that, so both methods are replaced on layers of this backend, by the steps that other models take.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_backend import UnsupportedError
from mla_backend_vllm import BACKEND_NAME


def keep_in_16_bits(layer: Any) -> None:
    """Replace what rounds to e4m3 in a layer of Kimi-K3's class whose cache is e4m3 with one scale.

    Layers with rotary embeddings, which are those of drafts, keep their methods: they have no prefill.

    Raises:
        UnsupportedError: this vLLM's class has other methods.
    """
    if "kimi_k3" not in type(layer).__module__ or not layer.impl.kv_format.takes_scale:
        return
    if layer.rotary_emb is not None:
        return
    ours: dict[str, Callable[..., Any]] = {
        "_forward_prefill_fused": _prefill,
        "_decode_concat_cache": _append_decode,
    }
    for name, function in ours.items():
        known = list(inspect.signature(function).parameters)[1:]
        method = getattr(layer, name, None)
        if method is None or list(inspect.signature(method).parameters) != known:
            raise UnsupportedError(
                f"{BACKEND_NAME} does not know this vLLM's layers of Kimi-K3 and Kimi-Linear, which need "
                "prefill in fp8 if the cache is e4m3 with one scale: use --kv-cache-dtype fp8_ds_mla or "
                "bfloat16"
            )
        setattr(layer, name, types.MethodType(function, layer))


def _prefill(
    layer: Any,
    q: Tensor,
    kv_c_normed: Tensor,
    k_pe: Tensor,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    slot_mapping: Tensor,
    attn_metadata: Any,
    out: Tensor,
) -> None:
    """Append, and attend to the new tokens in 16 bits and to the dequantized context."""
    _append(layer, kv_c_normed, k_pe, slot_mapping)
    cache = layer._attn_read_kv_cache()
    layer.impl.forward_mha(q, kv_c_normed, k_pe, cache, attn_metadata, layer._k_scale, output=out)


def _append_decode(
    layer: Any,
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_c_normed: Tensor,
    k_pe: Tensor,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    slot_mapping: Tensor,
) -> Tensor:
    """Append, and return the queries for absorbed attention, [T, H, d_c + d_rope]."""
    _append(layer, kv_c_normed, k_pe, slot_mapping)
    return torch.cat([ql_nope, q_pe], dim=-1)


def _append(layer: Any, kv_c_normed: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
    layer.impl.do_kv_cache_update(
        kv_c_normed, k_pe, layer.kv_cache, slot_mapping, layer.kv_cache_dtype, layer._k_scale
    )
