"""Sparse attention (DSA) in SGLang: our kernels in place of FlashAttention-3.

DeepSeek-V3.2 and GLM-5 run on SGLang's own ``dsa`` backend, which keeps the indexer, the metadata and the
graphs, and hands the attention itself to a sub-backend (``--dsa-decode-backend``, ``--dsa-prefill-backend``).
The sub-backend "fa3" takes exactly the inputs of our decoder of lists: queries in two parts, a table with one
slot per entry, and lengths. With MLA_BACKEND_DSA=1, only its method is hooked,
``DeepseekSparseAttnBackend._forward_fa3``.

SGLang keeps fp8 latents of these layers as records (`RECORD_656`). FlashAttention-3 cannot read these, but
our kernels can.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from mla_backend import DecodeBatch, DecodePlan, MLADecoder, TableKind, UnsupportedError, counters
from mla_backend.cache_format import RECORD_656, cache_format
from mla_backend.engines import SGLANG
from mla_backend_sglang import hooks
from mla_backend_sglang.names import DSA_VARIABLE
from mla_backend_sglang.refusals import check_sparse_backend

TARGET = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend._forward_fa3"
_MIN_CAPACITY = 1 << 14

logger = logging.getLogger(__name__)


def wrap_factory(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A factory of SGLang's ``dsa`` backend that also checks the configuration and hooks the method.

    The factory raises UnsupportedError, with a remedy, if the hooked method could not serve it.
    """

    def create(runner: Any) -> Any:
        import sglang

        backend = original(runner)
        check_sparse_backend(backend, runner.server_args)
        hooks.require_parameters(TARGET, _parameters())
        hooks.hook_and_check(TARGET, attend)
        attention = _attention_of(backend)  # builds the kernels before the first request
        attention.check()
        counters.open_file()
        if unsupported := SGLANG.unsupported(sglang.__version__):
            logger.warning(unsupported)
        logger.info(
            "mla-backend in the place of fa3 in dsa: decode kernel: %s, cache: %s",
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
                dtype=self.cache_format.rope,
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
    ) -> Tensor:
        """Attend with q_nope [T, H, d_c] and q_rope [T, H, d_rope] to a layer's lists; returns [T, H, d_c].

        ``slots``, int32 [T or more, width], are the lists in ``cache``; ``lengths``, int32 [T or more], count
        their entries.
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
        counters.add("sparse", num_tokens)
        return decoder.run(q_nope, q_rope, cache, self._plan, softmax_scale, table=slots)[0]


def _attention_of(backend: Any) -> SparseAttention:
    attention = getattr(backend, "_mla_backend", None)
    if attention is None:
        attention = backend._mla_backend = SparseAttention(backend)
    return attention


def _parameters() -> list[str]:
    """The parameters that :func:`attend` takes by name."""
    parameters = inspect.signature(attend).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]


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
    if max_seqlen_q != 1 or page_size != 1 or logit_cap or v_head_dim != backend.kv_lora_rank:
        raise UnsupportedError(
            f"mla-backend serves one query token per list of slots, not {max_seqlen_q=}, {page_size=}, "
            f"{logit_cap=}, {v_head_dim=}: unset {DSA_VARIABLE}"
        )
    cache = kv_cache.view(-1, 1, kv_cache.shape[-1])
    return _attention_of(backend).run(q_nope, q_rope, cache, page_table, cache_seqlens, sm_scale)
