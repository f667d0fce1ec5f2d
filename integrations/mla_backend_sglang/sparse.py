"""Sparse attention (DSA) in SGLang: our kernels in place of those of its sub-backends.

DeepSeek-V3.2, GLM-5 and others run on SGLang's own ``dsa`` backend, which keeps the indexer, the metadata and
the graphs, and hands the attention itself to a sub-backend (``--dsa-decode-backend``,
``--dsa-prefill-backend``). With MLA_BACKEND_DSA=1, methods of ``DeepseekSparseAttnBackend`` are hooked:

- ``_forward_fa3`` takes exactly the inputs of our decoder of lists: queries in two parts, a table with one
  slot per entry, and lengths. With an fp8 cache its latents are records (`RECORD_656`), which
  FlashAttention-3 cannot read.
- ``_forward_tilelang`` takes whole queries and no lengths. If both phases run on it, SGLang stores fp8
  latents without scales, also those that have no rotary part.
- ``_forward_flashmla_sparse``, if the model has attention sinks, which SGLang passes to no other method.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mla_backend import DecodeBatch, DecodePlan, MLADecoder, TableKind, UnsupportedError, counters
from mla_backend.cache_format import RECORD_656, cache_format
from mla_backend.engines import SGLANG
from mla_backend_sglang import hooks
from mla_backend_sglang.names import DSA_VARIABLE
from mla_backend_sglang.refusals import check_sparse_backend, has_sinks

_CLASS = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
_MIN_CAPACITY = 1 << 14

logger = logging.getLogger(__name__)


def wrap_factory(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A factory of SGLang's ``dsa`` backend that also checks the configuration and hooks methods.

    The factory raises UnsupportedError, with a remedy, if the hooked methods could not serve it.
    """

    def create(runner: Any) -> Any:
        import sglang

        backend = original(runner)
        with_sinks = has_sinks(runner.model_config.hf_text_config)
        check_sparse_backend(backend, runner.server_args, with_sinks)
        for method in _methods_of(backend, with_sinks):
            hook(method)
        attention = _attention_of(backend)  # builds the kernels before the first request
        attention.check()
        counters.open_file()
        if unsupported := SGLANG.unsupported(sglang.__version__):
            logger.warning(unsupported)
        logger.info(
            "mla-backend in the place of %s in dsa: decode kernel: %s, cache: %s",
            ", ".join(_methods_of(backend, with_sinks)),
            attention.implementation,
            attention.cache_format.name,
        )
        return backend

    return create


class SparseAttention:
    """The attention of one ``dsa`` backend, planned once per step.

    SGLang calls the hooked method once per layer, without saying when a step begins. A step begins with other
    metadata of SGLang's, or when the layer in which the last plan was made comes again, because all captures
    of a graph have the same metadata. So a captured graph contains the planning, too.
    """

    def __init__(self, backend: Any):
        self._backend = backend
        self._decoders: dict[int, MLADecoder] = {}  # by capacity; captured graphs keep using theirs
        self._plan: DecodePlan | None = None
        self._metadata: Any = None  # of the planned step; kept, so that no other object has its id
        self._planned_for: tuple[int, ...] = ()
        self.cache_format = (
            RECORD_656 if backend.dsa_kv_cache_store_fp8 else cache_format(backend.kv_cache_dtype)
        )
        self._kv_scale: Tensor | None = None
        if self.cache_format.takes_scale:  # SGLang casts latents without dividing them
            self._kv_scale = torch.ones(1, dtype=torch.float32, device=backend.device)
        self.implementation = self._decoder(1).implementation

    def check(self) -> None:
        """Raises UnsupportedError if a GPU would run plain torch."""
        decoder = self._decoder(1)
        if decoder.spec.device.type == "cuda" and decoder.implementation == "torch":
            raise UnsupportedError(
                f"{DSA_VARIABLE}=1, but mla-backend has no kernel for these layers on this GPU "
                f"({decoder.reason}): use --kv-cache-dtype bfloat16, or unset {DSA_VARIABLE}"
            )

    def _decoder(self, num_tokens: int) -> MLADecoder:
        capacity = max(_MIN_CAPACITY, 1 << (num_tokens - 1).bit_length())
        if capacity not in self._decoders:
            backend = self._backend
            self._decoders[capacity] = MLADecoder(
                num_heads=backend.num_q_heads,
                kv_lora_rank=backend.kv_lora_rank,
                qk_rope_head_dim=backend.qk_rope_head_dim,
                dtype=torch.bfloat16 if self.cache_format.is_quantized else self.cache_format.rope,
                kv_dtype=self.cache_format.name,
                page_size=1,
                table_kind=TableKind.LIST,
                device=backend.device,
                max_batch=capacity,
                batch_invariant=backend.num_splits == 1,  # deterministic inference
            )
        return self._decoders[capacity]

    def run(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        cache: Tensor,
        slots: Tensor,
        lengths: Tensor,
        softmax_scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend with q_nope [T, H, d_c] and q_rope [T, H, d_rope] to a layer's lists; returns [T, H, d_c].

        ``slots``, int32 [T or more, width], are the lists in ``cache``; ``lengths``, int32 [T or more], count
        their entries. ``sinks``, fp32 [H], are scores of keys without values.
        """
        num_tokens = q_nope.shape[0]
        decoder = self._decoder(num_tokens)
        cache = cache.view(self.cache_format.storage)
        place = (cache.data_ptr(), lengths.data_ptr(), num_tokens)
        metadata = getattr(self._backend, "forward_metadata", None)
        same_step = (
            self._metadata is metadata
            and self._planned_for[1:] == place[1:]
            and self._planned_for[0] != place[0]
        )
        if self._plan is None or decoder.current_plan is not self._plan or not same_step:
            batch = DecodeBatch(lengths[:num_tokens], None, page_size=1, table_kind=TableKind.LIST)
            self._plan, self._metadata, self._planned_for = decoder.plan(batch), metadata, place
        counters.add("sparse", num_tokens, kernel=self.implementation, cache_format=self.cache_format.name)
        out, _ = decoder.run(
            q_nope,
            q_rope,
            cache,
            self._plan,
            softmax_scale,
            kv_scale=self._kv_scale,
            table=slots,
            sinks=sinks,
        )
        return out


def _attention_of(backend: Any) -> SparseAttention:
    attention = getattr(backend, "_mla_backend", None)
    if attention is None:
        attention = backend._mla_backend = SparseAttention(backend)
    return attention


def attend(
    original: Callable,
    backend: Any,
    *,
    q_rope: Tensor,
    kv_cache: Tensor,
    v_head_dim: int,
    q_nope: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    max_seqlen_q: int,
    sm_scale: float,
    logit_cap: float,
    page_size: int,
    **offsets: Any,
) -> Tensor:
    """Replace ``_forward_fa3``: each query token attends to its own list of slots.

    Raises:
        UnsupportedError: the arguments are for something other than one query token per list.
    """
    if max_seqlen_q != 1 or page_size != 1 or logit_cap:
        raise UnsupportedError(
            f"mla-backend serves one query token per list of slots, not {max_seqlen_q=}, {page_size=}, "
            f"{logit_cap=}: unset {DSA_VARIABLE}"
        )
    _check_width(backend, v_head_dim)
    cache = kv_cache.view(-1, 1, kv_cache.shape[-1])
    return _attention_of(backend).run(q_nope, q_rope, cache, page_table, cache_seqlens, sm_scale)


def attend_without_lengths(
    original: Callable,
    backend: Any,
    *,
    q_all: Tensor,
    kv_cache: Tensor,
    v_head_dim: int,
    page_table_1: Tensor,
    sm_scale: float,
    attn_sink: Tensor | None = None,
) -> Tensor:
    """Replace ``_forward_tilelang``: as `attend`, with the lengths that ``_forward_fa3`` would get."""
    _check_width(backend, v_head_dim)
    lengths = backend.forward_metadata.dsa_cache_seqlens_int32
    q_nope, q_rope = q_all.tensor_split([v_head_dim], dim=-1)
    cache = kv_cache.view(-1, 1, kv_cache.shape[-1])
    return _attention_of(backend).run(q_nope, q_rope, cache, page_table_1, lengths, sm_scale, attn_sink)


def attend_with_sinks(
    original: Callable,
    backend: Any,
    *,
    q_all: Tensor,
    kv_cache: Tensor,
    v_head_dim: int,
    page_table_1: Tensor,
    sm_scale: float,
    attn_sink: Tensor | None,
    **lengths: Any,
) -> Tensor:
    """Replace ``_forward_flashmla_sparse`` in layers that have sinks; its ``topk_length`` may be missing."""
    arguments = {
        "q_all": q_all,
        "kv_cache": kv_cache,
        "v_head_dim": v_head_dim,
        "page_table_1": page_table_1,
        "sm_scale": sm_scale,
        "attn_sink": attn_sink,
    }
    if attn_sink is None:
        return original(backend, **arguments, **lengths)
    return attend_without_lengths(original, backend, **arguments)


def _check_width(backend: Any, v_head_dim: int) -> None:
    if v_head_dim != backend.kv_lora_rank:
        raise UnsupportedError(
            f"mla-backend returns outputs of {backend.kv_lora_rank} columns, not {v_head_dim=}: "
            f"unset {DSA_VARIABLE}"
        )


_REPLACEMENTS: dict[str, Callable] = {
    "fa3": attend,
    "tilelang": attend_without_lengths,
    "flashmla_sparse": attend_with_sinks,
}
"""What replaces the methods of sub-backends."""


def target(method: str) -> str:
    """The dotted path of a sub-backend's method."""
    return f"{_CLASS}._forward_{method}"


def hook(method: str) -> None:
    """Replace the method of a sub-backend, one of `_REPLACEMENTS`.

    Raises:
        UnsupportedError: this version of SGLang lacks the method or one of its parameters, or the hook is not
            in place.
    """
    replacement = _REPLACEMENTS[method]
    hooks.require_parameters(target(method), _required(replacement))
    hooks.hook_and_check(target(method), replacement)


def _required(replacement: Callable) -> list[str]:
    """The parameters without which a replacement cannot do."""
    parameters = inspect.signature(replacement).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]


def _methods_of(backend: Any, with_sinks: bool) -> list[str]:
    """The sub-backends whose methods are replaced."""
    if with_sinks:
        return ["flashmla_sparse"]
    chosen = {backend.dsa_decode_impl, backend.dsa_prefill_impl}
    if getattr(backend, "dsa_index_kpool", 1) > 1:
        chosen.add("fa3")  # to which SGLang moves flashmla_sparse if keys are pooled
    return [method for method in ("fa3", "tilelang") if method in chosen]
