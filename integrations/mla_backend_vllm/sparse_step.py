"""The sparse attention of a step: where the listed keys lie, and the plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index

from mla_backend import DecodeBatch, DecodePlan, MLADecoder, TableKind
from mla_backend.cache_format import CacheFormat, Scale
from mla_backend.spec import DecoderSpec

PAGE_SIZE = 64
"""The indexer's, unless it pools keys. Of copies of prompts, in any case."""
# With more heads than this, tokens attend to records more slowly than to 16-bit keys
# (benchmarks/results/sparse-h200.json). One copy serves all tokens of a prompt; in decode, a request has too
# few tokens for a copy to pay off.
MOST_HEADS_ON_RECORDS = 32


def copies_prompts(kv_format: CacheFormat, num_heads: int) -> bool:
    """Whether prompts attend to a 16-bit copy of their context."""
    return kv_format.scale is Scale.GROUP and num_heads > MOST_HEADS_ON_RECORDS


def specs_of(spec: DecoderSpec) -> list[DecoderSpec]:
    """``spec`` of a layer's decoder and, if prompts attend to copies, the spec of the decoder for these."""
    copies = copies_prompts(spec.kv_format, spec.num_heads)
    return [spec, replace(spec, kv_dtype=spec.dtype, page_size=PAGE_SIZE)] if copies else [spec]


def pool_of(vllm_config: Any) -> int:
    """How many neighbouring keys the model's indexer chooses together."""
    return getattr(vllm_config.model_config.hf_text_config, "index_kpool", None) or 1


class SparseStep:
    """The sparse attention of some tokens of a step: its plan, and the slots of their keys. Layers share it.

    Args:
        decoder: the decoder of these layers.
        tokens: which tokens.
        lengths: int32 [tokens of the step], how many entries of each token's list count.
        requests: int32 [tokens of the step], each token's row of ``table``.
        table: int32 [requests, width], the pages of the requests' keys.
        has_pools: whether lists may have entries of -1 before their last key.
    """

    def __init__(
        self,
        decoder: MLADecoder,
        tokens: slice,
        lengths: Tensor,
        requests: Tensor,
        table: Tensor,
        *,
        has_pools: bool = False,
    ):
        self.decoder, self.tokens = decoder, tokens
        self._lengths, self._requests, self._table = lengths, requests, table
        self._has_pools = has_pools
        self._write: Callable[[], None] | None = None
        self._plan: DecodePlan | None = None
        self._forward_of_plan: Callable[[], ForwardContext | None] = lambda: None  # a weak reference

    def write_in_pass(self, write: Callable[[], None]) -> None:
        """Make the next layer plan. Before each plan, ``write`` writes ``requests`` and ``lengths``."""
        self._write, self._plan = write, None

    def plan_for(self, num_tokens: int) -> DecodePlan:
        """The plan for the first ``num_tokens`` tokens: all, or those that take no regular prefill of vLLM's.

        The first layer of each forward pass plans. So a CUDA graph of the pass contains the planning, and a
        replay needs no further launches.
        """
        plan, forward = self._plan, get_forward_context()
        is_of_pass, is_last = self._forward_of_plan() is forward, self.decoder.current_plan is plan
        if plan is None or not (is_of_pass and is_last and plan.batch.batch_size == num_tokens):
            if self._write is not None:
                self._write()
            page_size, lengths = self.decoder.spec.page_size, self._of_first(num_tokens, self._lengths)
            plan = self.decoder.plan(DecodeBatch(lengths, None, page_size, table_kind=TableKind.LIST))
            self._plan, self._forward_of_plan = plan, weakref.ref(forward)
        return plan

    def _of_first(self, num_tokens: int, of_step: Tensor) -> Tensor:
        """The elements of a tensor of the step's tokens that belong to the first ``num_tokens`` tokens."""
        return of_step[self.tokens.start : self.tokens.start + num_tokens]

    def slots(self, positions: Tensor) -> Tensor:
        """Slots of keys for positions [T, width] of the first T tokens; -1 for those that do not exist.

        These come last if lists have pools, and else where the positions have them.
        """
        requests, table = self._of_first(len(positions), self._requests), self._table
        page_size = self.decoder.spec.page_size
        if positions.device.type == "cuda":
            if requests.data_ptr() % 16:  # Triton would compile another kernel for such a pointer
                requests = requests.clone()
            sizes = {"BLOCK_SIZE": page_size, "NUM_TOPK_TOKENS": positions.shape[1]}
            if not self._has_pools:
                return triton_convert_req_index_to_global_index(requests, table, positions, **sizes)
            # With counts, which are not needed here, it moves the entries of -1.
            slots, _ = triton_convert_req_index_to_global_index(
                requests, table, positions, **sizes, return_valid_counts=True
            )
            return slots
        index = positions.long() // page_size
        exists = (index >= 0) & (index < table.shape[1])
        pages = table[requests.long()[:, None], index.where(exists, 0)]
        slots = torch.where(exists, pages * page_size + positions % page_size, -1)
        return slots.gather(1, (slots < 0).int().argsort(dim=1, stable=True)) if self._has_pools else slots


class CopiedPrompts(SparseStep):
    """Prompts whose contexts together fit the buffer of 16-bit keys, in which they have consecutive pages.

    If a step has several such parts, each layer plans each of them again, because they share a decoder.

    Args:
        requests: int32 [tokens of the step], each token's row of ``table``.
        table: int32 [prompts, width], the prompts' pages in the cache, which may be larger than the buffer's.
        keys: int32 [prompts], how many keys each prompt has.
        pages: how many pages the prompts take in the buffer.
        most_pages: the most pages of a prompt in the buffer. Only in vLLM's dummy runs may one seem to have
            more.
    """

    def __init__(
        self,
        decoder: MLADecoder,
        tokens: slice,
        lengths: Tensor,
        requests: Tensor,
        table: Tensor,
        *,
        has_pools: bool,
        keys: Tensor,
        pages: int,
        most_pages: int,
    ):
        ends = pages_of(keys, most_pages).cumsum(0).int()
        self._starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
        self._cache_table, self.pages = table, pages
        numbers = torch.arange(most_pages, dtype=torch.int32, device=table.device)
        consecutive = self._starts[:, None] + numbers
        super().__init__(decoder, tokens, lengths, requests, consecutive, has_pools=has_pools)

    def copy(self, cache: Tensor, copied: Tensor) -> None:
        """Dequantize the prompts' keys from a cache of records to ``copied``, bf16 [pages, 64, 576]."""
        starts = self._starts * PAGE_SIZE
        _custom_ops.cp_gather_and_upconvert_fp8_kv_cache(
            cache, copied.flatten(0, 1), self._cache_table, starts, len(starts)
        )


def pages_of(keys: Tensor, most: int) -> Tensor:
    """How many pages prompts with ``keys`` keys take, at most ``most`` each."""
    return (-(-keys // PAGE_SIZE)).clamp(max=most)
