"""The first part of an attention call: append the latents of its new tokens to the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache import memory_pool
from torch import Tensor

from mla_backend import cache
from mla_backend.batch import Shard
from mla_backend.errors import UnsupportedError
from mla_backend.rotary import RotaryAppend
from mla_backend_sglang.fused_append import Deferred, FusedAppend
from mla_backend_sglang.shard import rows_here


@dataclass(frozen=True)
class NewTokens:
    """An absorbed attention call of SGLang's: the queries and keys of a step's new tokens in one layer.

    Attributes:
        layer: SGLang's ``RadixAttention``.
        forward_batch: the step.
        q_nope: [T, H, d_c], a view of SGLang's queries.
        q_rope: [T, H, d_rope], likewise.
        k: [T, 1, d_c], with ``k_rope``; or [T, 1, d_c + d_rope] alone. None if nothing is to be appended,
            because the cache already holds the new tokens.
        v: [T, 1, d_c], the first columns of k.
        k_rope: [T, 1, d_rope], or None.
        has_split_queries: whether SGLang passed the two parts of the queries separately.
    """

    layer: Any
    forward_batch: Any
    q_nope: Tensor
    q_rope: Tensor
    k: Tensor | None
    v: Tensor | None
    k_rope: Tensor | None
    has_split_queries: bool = True

    @classmethod
    def of_call(
        cls,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        **others: Any,
    ) -> NewTokens:
        """Make it from the arguments of SGLang's ``forward_decode`` or ``forward_extend``. Without ``q_rope``
        [T, H, d_rope], ``q`` is [T, H, d_c + d_rope]; with it, [T, H, d_c].

        Raises:
            UnsupportedError: one of the ``others`` is set.
        """
        refuse_arguments(layer, others)
        is_split = q_rope is not None
        q_nope, q_rope = _split_queries(q, q_rope, layer)
        return cls(layer, forward_batch, q_nope, q_rope, k if save_kv_cache else None, v, k_rope, is_split)


def refuse_arguments(layer: Any, others: dict[str, Any]) -> None:
    """Refuse an attention call of ``layer`` with arguments that mla_backend does not know.

    Raises:
        UnsupportedError: one of the ``others`` is set.
    """
    if given := [name for name, value in others.items() if value is not None]:
        raise UnsupportedError(
            f"layer {layer.layer_id} calls attention with {', '.join(given)}, which mla_backend does not "
            "implement: choose another --attention-backend"
        )


class Appender:
    """Appends new tokens in the layers of one model.

    Args:
        fused: the layers that leave norm and rotary embedding to the appender, by their ``layer_id``.
        shard: this rank's part of the cache.
        kv_scale: the scale of the cache, if its format has one.
        dtype: the dtype of the model.
        device: the device of the cache.
    """

    def __init__(
        self,
        fused: dict[int, FusedAppend],
        shard: Shard,
        kv_scale: Tensor | None,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.fused = fused
        self._shard, self._kv_scale = shard, kv_scale
        self._launch = RotaryAppend(dtype, device)

    def append(self, tokens: NewTokens, latent_cache: Tensor, pool: Any) -> None:
        """Append the tokens' latents, unless the cache already holds them.

        If the layer's forward skipped norm and rotary embedding (:class:`FusedAppend`), do both first; the
        rotary embedding of ``tokens.q_rope`` in place.

        Args:
            tokens: the attention call.
            latent_cache: the layer's cache, [pages, page_size, d_c + d_rope].
            pool: SGLang's pool, of which ``latent_cache`` is a part.

        Raises:
            UnsupportedError: the layer skipped norm and rotary embedding and passes no keys.
        """
        fused = self.fused.get(tokens.layer.layer_id)
        deferred = fused.take(tokens.forward_batch) if fused is not None else None
        if tokens.k is None:
            if deferred is not None:
                raise UnsupportedError(
                    f"mla_backend does not fit this version of SGLang: layer {tokens.layer.layer_id} left "
                    "its norm to the attention call, but passes no keys: use a supported version of SGLang, "
                    "or another --attention-backend"
                )
        elif deferred is None:
            self._append_prepared(tokens, tokens.k, latent_cache, pool)
        else:
            self._append_deferred(tokens, tokens.k, latent_cache, deferred)

    def _append_prepared(self, tokens: NewTokens, k: Tensor, latent_cache: Tensor, pool: Any) -> None:
        """Append keys that are normalized and rotated."""
        location = _write_location(tokens.forward_batch)
        if tokens.k_rope is None:
            pool.set_kv_buffer(tokens.layer, location, k, tokens.v)
        elif latent_cache.is_cuda:
            pool.set_mla_kv_buffer(tokens.layer, location, k, tokens.k_rope)
        else:
            # set_mla_kv_buffer is a GPU kernel.
            slots = rows_here(tokens.forward_batch.out_cache_loc, self._shard)
            cache.append(latent_cache, k.flatten(1), tokens.k_rope.flatten(1), slots, self._kv_scale)

    def _append_deferred(
        self, tokens: NewTokens, k: Tensor, latent_cache: Tensor, deferred: Deferred
    ) -> None:
        """Normalize latents, rotate keys and, in place, queries; append the keys."""
        q_rope, k_rope = tokens.q_rope, tokens.k_rope
        if k_rope is None:
            k, k_rope = k.tensor_split([k.shape[-1] - q_rope.shape[-1]], dim=-1)
        location = _write_location(deferred.forward_batch)
        slots = getattr(location, "loc", location)
        self._launch(
            q_rope,
            k.flatten(1),
            k_rope.flatten(1),
            latent_cache,
            slots.contiguous(),  # the slots of several draft steps are interleaved
            deferred.positions,
            deferred.rotary.cos_sin_cache,
            interleaved=not deferred.rotary.is_neox_style,
            norm_weight=deferred.norm.weight.data,
            norm_eps=deferred.norm.variance_epsilon,
            kv_scale=self._kv_scale,
        )


def _split_queries(q: Tensor, q_rope: Tensor | None, layer: Any) -> tuple[Tensor, Tensor]:
    heads, d_c = layer.tp_q_head_num, layer.v_head_dim
    if q_rope is not None:
        q_nope = q.view(-1, heads, d_c)
        return q_nope, q_rope.view(len(q_nope), heads, layer.head_dim - d_c)
    q_nope, q_rope = q.view(-1, heads, layer.head_dim).tensor_split([d_c], dim=-1)
    return q_nope, q_rope


def _write_location(forward_batch: Any) -> Any:
    """The slots of the new tokens as the pool's writers expect them: before 0.5.22 as a plain tensor."""
    if hasattr(getattr(memory_pool, "KVWriteLoc", None), "for_batch"):
        return memory_pool.KVWriteLoc.for_batch(forward_batch)
    return forward_batch.out_cache_loc
