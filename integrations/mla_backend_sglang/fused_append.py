"""Norm, rotary embedding and cache append of new tokens in one launch, instead of three.

SGLang's MLA forward normalizes latents and rotates queries and keys in ``forward_absorb_prepare``, and its
attention call appends the result to the cache. :class:`FusedAppend` wraps that method on a model's layers. In
steps that our backend serves, it lets the method run without both and notes what was left out; our attention
call does exactly that. What was not left out is not done again, and what nobody fetches is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding
from torch import Tensor

from mla_backend.errors import UnsupportedError

_PREPARE = "forward_absorb_prepare"


@dataclass(frozen=True)
class Deferred:
    """What one layer's forward left to its attention call.

    Attributes:
        forward_batch: the step.
        positions: int64 [T], as the model gave them to its rotary embedding.
        rotary: that embedding.
        norm: of the latents.
    """

    forward_batch: Any
    positions: Tensor
    rotary: RotaryEmbedding
    norm: RMSNorm


class FusedAppend:
    """Wraps ``forward_absorb_prepare`` of one attention layer, for as long as the layer lives.

    Args:
        attention: an SGLang attention layer for which :func:`why_not_fused` is None.
        applies: given a ``ForwardBatch``, whether the attention call of this step will be our backend's, with
            as many query rows for each request.
    """

    def __init__(self, attention: torch.nn.Module, applies: Callable[[Any], bool]):
        self._attention = attention
        self._applies = applies
        self._prepare = getattr(attention, _PREPARE)
        self._deferred: Deferred | None = None
        setattr(attention, _PREPARE, self._prepare_without_append)

    def take(self, forward_batch: Any) -> Deferred | None:
        """What the layer's forward left to this attention call; None if it did everything itself.

        Raises:
            UnsupportedError: it left something to the attention call of another step.
        """
        deferred, self._deferred = self._deferred, None
        if deferred is not None and deferred.forward_batch is not forward_batch:
            raise self._broken("makes the attention call for another batch than it prepared")
        return deferred

    def _prepare_without_append(
        self, positions: Tensor, hidden_states: Tensor, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._deferred is not None:
            raise self._broken("made no attention call for the batch that it prepared")
        if not self._applies(forward_batch):
            return self._prepare(positions, hidden_states, forward_batch, *args, **kwargs)
        attention, calls = self._attention, []

        def rotate_later(positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            calls.append(("rotary_emb", positions))
            return query, key

        def normalize_later(latents: Tensor) -> Tensor:
            calls.append(("kv_a_layernorm", None))
            return latents

        norm, rotary = attention.kv_a_layernorm, attention.rotary_emb
        # An instance's own attributes come before its submodules of the same name.
        vars(attention).update(kv_a_layernorm=normalize_later, rotary_emb=rotate_later)
        try:
            prepared = self._prepare(positions, hidden_states, forward_batch, *args, **kwargs)
        finally:
            del vars(attention)["kv_a_layernorm"], vars(attention)["rotary_emb"]
        called = dict(calls)
        if len(calls) == len(called) == 2:
            self._deferred = Deferred(forward_batch, called["rotary_emb"], rotary, norm)
        elif calls:
            names = ", ".join(name for name, _ in calls)
            raise self._broken(f"calls {names} instead of kv_a_layernorm and rotary_emb, once each")
        return prepared

    def _broken(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"this version of SGLang does not fit mla_backend: layer {self._attention.layer_id} {what}: "
            "use a tested version of SGLang, or another --attention-backend"
        )


def why_not_fused(attention: torch.nn.Module, dtype: torch.dtype) -> str | None:
    """Why a layer's new tokens must be left to SGLang, or None.

    Args:
        attention: an SGLang attention layer.
        dtype: of the latent cache.
    """
    rotary, norm = getattr(attention, "rotary_emb", None), getattr(attention, "kv_a_layernorm", None)
    if not hasattr(attention, _PREPARE):
        return f"{type(attention).__name__} has no {_PREPARE}"
    if type(norm) is not RMSNorm or _is_wrapped(norm):
        return f"its norm is {_describe(norm)}"
    if norm.weight.dtype != dtype or norm.cast_x_before_out_mul or norm.variance_size_override is not None:
        return "its norm computes in a way of its own"
    if type(rotary) not in (RotaryEmbedding, DeepseekScalingRotaryEmbedding) or _is_wrapped(rotary):
        return f"its rotary embedding is {_describe(rotary)}"
    if (
        rotary.rotary_dim != attention.qk_rope_head_dim
        or rotary.cos_sin_cache.dtype != torch.float32
        or getattr(rotary, "use_fallback_kernel", False)  # which may replace that tensor
    ):
        return "its rotary embedding computes in a way of its own"
    return None


def _is_wrapped(module: torch.nn.Module) -> bool:
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def _describe(module: torch.nn.Module | None) -> str:
    return f"a {'wrapped ' if module is not None and _is_wrapped(module) else ''}{type(module).__name__}"
