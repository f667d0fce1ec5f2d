"""Norm, rotary embedding and cache append of new tokens in one launch instead of three.

SGLang's MLA forward normalizes latents and rotates queries and keys in ``forward_absorb_prepare``. Its
attention call then appends the result to the cache. :class:`FusedAppend` wraps that method on a model's
layers. In steps that this backend serves, it makes the method skip the norm and the rotary embedding, and
records both. The attention call then does exactly the skipped work. A missing attention call is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding
from torch import Tensor

from mla_backend.errors import UnsupportedError
from mla_backend_sglang.settings import Settings

logger = logging.getLogger(__name__)

_PREPARE = "forward_absorb_prepare"


@dataclass(frozen=True)
class Deferred:
    """The work that one layer's forward left to its attention call.

    Attributes:
        forward_batch: the step.
        positions: int64 [T], the positions that the model passed to its rotary embedding.
        rotary: the rotary embedding that was skipped.
        norm: the norm of the latents that was skipped.
    """

    forward_batch: Any
    positions: Tensor
    rotary: RotaryEmbedding
    norm: RMSNorm


class FusedAppend:
    """Wraps ``forward_absorb_prepare`` of one attention layer, for the lifetime of the layer.

    Args:
        attention: an SGLang attention layer for which :func:`why_not_fused` is None.
        applies: whether this backend will receive the attention calls of a ``ForwardBatch``, with the same
            number of query tokens for each request.
    """

    def __init__(self, attention: Any, applies: Callable[[Any], bool]):
        self._attention = attention
        self._applies = applies
        self._prepare = getattr(attention, _PREPARE)
        self._deferred: Deferred | None = None
        setattr(attention, _PREPARE, self._prepare_deferring)

    def take(self, forward_batch: Any) -> Deferred | None:
        """The work that the layer's forward left to this attention call; None if there is none.

        Raises:
            UnsupportedError: the layer left work to the attention call of another step.
        """
        deferred, self._deferred = self._deferred, None
        if deferred is not None and deferred.forward_batch is not forward_batch:
            raise self._mismatch("makes the attention call for another batch than it prepared")
        return deferred

    def _prepare_deferring(
        self, positions: Tensor, hidden_states: Tensor, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._deferred is not None:
            self._deferred = None
            raise self._mismatch("made no attention call for the batch that it prepared")
        attention = self._attention
        norm, rotary = attention.kv_a_layernorm, attention.rotary_emb
        # Checked in each step, because SGLang installs --forward-hooks only after it creates its backends.
        if not self._applies(forward_batch) or _is_wrapped(norm) or _is_wrapped(rotary):
            return self._prepare(positions, hidden_states, forward_batch, *args, **kwargs)
        skipped: list[tuple[str, Any]] = []

        def skip_rotary(positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            skipped.append(("rotary_emb", positions))
            return query, key

        def skip_norm(latents: Tensor) -> Tensor:
            skipped.append(("kv_a_layernorm", None))
            return latents

        # Python finds attributes of the instance before submodules of the same name.
        vars(attention).update(kv_a_layernorm=skip_norm, rotary_emb=skip_rotary)
        try:
            prepared = self._prepare(positions, hidden_states, forward_batch, *args, **kwargs)
        finally:
            del vars(attention)["kv_a_layernorm"], vars(attention)["rotary_emb"]
        arguments = dict(skipped)
        if len(skipped) == len(arguments) == 2:
            self._deferred = Deferred(forward_batch, arguments["rotary_emb"], rotary, norm)
        elif skipped:
            names = ", ".join(name for name, _ in skipped)
            raise self._mismatch(f"calls {names} instead of kv_a_layernorm and rotary_emb, once each")
        return prepared

    def _mismatch(self, problem: str) -> UnsupportedError:
        return UnsupportedError(
            f"mla_backend does not fit this version of SGLang: layer {self._attention.layer_id} {problem}: "
            "use a supported version of SGLang, or another --attention-backend"
        )


def fuse_appends(model: Any, dtype: torch.dtype, applies: Callable[[Any], bool]) -> dict[int, FusedAppend]:
    """Wrap the layers of a model whose new tokens one launch can normalize, rotate and append.

    A model is wrapped once, however many backends it has. In deterministic inference no layer is wrapped: its
    prefill uses SGLang's kernels, and keys must have the same bits in prefill and decode.

    Args:
        model: a model whose weights are adopted.
        dtype: the dtype of the model.
        applies: see :class:`FusedAppend`.

    Returns:
        the wrapped layers by their ``layer_id``.
    """
    if not hasattr(model, "mla_backend_fused"):
        fused: dict[int, FusedAppend] = {}
        refused: dict[str, list[int]] = {}
        for layer_id, layer in model.mla_backend_layers.items():
            if why_not := why_not_fused(layer.attention, dtype):
                refused.setdefault(why_not, []).append(layer_id)
            elif not Settings().is_deterministic:
                fused[layer_id] = FusedAppend(layer.attention, applies)
        for why_not, layer_ids in refused.items():
            logger.warning(
                "mla_backend leaves norm, rotary embedding and cache append of %d layers to SGLang's slower "
                "kernels: %s",
                len(layer_ids),
                why_not,
            )
        model.mla_backend_fused = fused
    return model.mla_backend_fused


def why_not_fused(attention: Any, dtype: torch.dtype) -> str | None:
    """Why SGLang must append a layer's new tokens itself; None if :class:`FusedAppend` can wrap the layer.

    Args:
        attention: an SGLang attention layer.
        dtype: the dtype of the model.
    """
    if not hasattr(attention, _PREPARE):
        return f"{type(attention).__name__} has no {_PREPARE}"
    norm: Any = getattr(attention, "kv_a_layernorm", None)
    if type(norm) is not RMSNorm or _is_wrapped(norm):
        return f"the norm is {_describe(norm)}"
    if (
        norm.weight.dtype != dtype
        or norm.cast_x_before_out_mul
        or norm.variance_size_override is not None
        or norm.override_orig_dtype is not None
        or getattr(norm, "_quant_linear", None) is not None  # quantizes its output
    ):
        return "the norm has options or a dtype that mla_backend does not implement"
    rotary: Any = getattr(attention, "rotary_emb", None)
    if type(rotary) not in (RotaryEmbedding, DeepseekScalingRotaryEmbedding) or _is_wrapped(rotary):
        return f"the rotary embedding is {_describe(rotary)}"
    if (
        rotary.rotary_dim != attention.qk_rope_head_dim
        or rotary.cos_sin_cache.dtype != torch.float32
        or getattr(rotary, "use_fallback_kernel", False)  # which may replace that tensor
        or getattr(rotary, "position_start", 0) != 0  # of the tensor's first row
    ):
        return "the rotary embedding has options that mla_backend does not implement"
    return None


def _is_wrapped(module: torch.nn.Module) -> bool:
    return "forward" in vars(module) or bool(module._forward_hooks or module._forward_pre_hooks)


def _describe(module: torch.nn.Module | None) -> str:
    if module is None:
        return "missing"
    return f"a {'wrapped ' if _is_wrapped(module) else ''}{type(module).__name__}"
