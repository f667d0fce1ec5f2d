"""Regular prefill for the CPU, and for head dimensions that vLLM's own prefill backends refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from mla_backend.prefill import merge_states, prefill
from mla_backend_vllm import BACKEND_NAME


class MLAPrefill(MLAPrefillBackend):
    """Prefill with any head dimensions, on the best attention library that is installed.

    Attributes:
        library: its name, once the metadata builder knows it.
    """

    library: str = BACKEND_NAME
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return BACKEND_NAME

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Causal attention among the new tokens of each request.

        Args:
            q, k: [T, H, d_qk].
            v: [T, H, d_v].
            return_softmax_lse: also return the log-sum-exp.
            out, output_scale: not used.

        Returns:
            the output [T, H, d_v]; with ``return_softmax_lse`` also the lse [H, T], natural logarithm.
        """
        metadata = self._prefill_metadata
        starts, longest = metadata.query_start_loc, metadata.max_query_len
        return self._attend(q, k, v, starts, starts, longest, longest, True, return_softmax_lse)

    def run_prefill_context_chunk(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chunk: Any = None,
        chunk_idx: int | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of the new tokens to a chunk of their context, without a mask.

        Args:
            q: [T, H, d_qk].
            k: [S, H, d_qk], of the chunk.
            v: [S, H, d_v], of the chunk.
            chunk: the chunk's offsets and lengths; None before vLLM 0.28.
            chunk_idx: the chunk's number in the batch; given before vLLM 0.28.
            out: not used. Kimi-K3's layers pass it.

        Returns:
            the output [T, H, d_v], and the lse [H, T], natural logarithm.
        """
        if chunk is None:
            metadata = self._prefill_metadata
            starts, longest = metadata.query_start_loc, metadata.max_query_len
            context_starts = metadata.chunked_context.cu_seq_lens[chunk_idx]
            longest_context = metadata.chunked_context.max_seq_lens[chunk_idx]
        else:
            starts, longest = chunk.query_start_loc, chunk.max_query_len
            context_starts, longest_context = chunk.cu_seq_lens, chunk.max_seq_len
        out, lse = self._attend(q, k, v, starts, context_starts, longest, longest_context, False, True)
        return out, lse

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_q: int,
        max_k: int,
        causal: bool,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        result = prefill(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_q,
            max_k,
            self.scale,
            causal,
            return_lse,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )
        if not return_lse:
            return result
        out, lse = result
        return out, lse.T.contiguous()


def library_of(prefill_backend: MLAPrefillBackend) -> str:
    """The name of what attends in a prefill."""
    if isinstance(prefill_backend, MLAPrefill):
        return prefill_backend.library
    name: str = prefill_backend.get_name()
    return name


def is_gathered_by_vllm(width: int, device_type: str) -> bool:
    """Whether vLLM gathers latent rows of this width from pages; its kernel for GPUs knows three widths."""
    return device_type == "cpu" or width in (320, 512, 576)


def attend_to_context(
    q: Tensor,
    kv_cache: Tensor,
    prefill_metadata: Any,
    expand: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Attention of new tokens to the context of their requests, for latent rows of any width.

    vLLM plans the chunks, and torch gathers each of them.

    Args:
        q: [T, H, d_qk].
        kv_cache: [pages, page_size, d_c + d_rope].
        prefill_metadata: of a batch with ``chunked_context``, by vLLM 0.28 or later.
        expand: makes keys [n, H, d_qk] and values [n, H, d_v] of gathered rows [n, d_c + d_rope].

    Returns:
        the output [T, H, d_v], and the lse [H, T], natural logarithm; -inf for tokens without context.
    """
    out = None
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    for chunk in prefill_metadata.chunked_context.chunks:
        tokens, table = chunk.token_slice, prefill_metadata.block_table[chunk.request_slice]
        key, value = expand(kv_cache[_places_of(chunk, table, kv_cache.shape[1])])
        chunk_out, chunk_lse = prefill_metadata.prefill_backend.run_prefill_context_chunk(
            chunk=chunk, q=q[tokens], k=key, v=value
        )
        if out is None:
            out = chunk_out.new_zeros(q.shape[0], *chunk_out.shape[1:])
        out[tokens], lse[tokens] = merge_states(out[tokens], lse[tokens], chunk_out, chunk_lse.T)
    return out, lse.T.contiguous()


def _places_of(chunk: Any, table: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """The page of each token of a chunk, and the token's row in that page."""
    request = chunk.token_to_seq[: chunk.num_context_tokens].long()
    index = torch.arange(len(request), device=table.device)
    position = index - chunk.cu_seq_lens[request] + chunk.starts[request]
    return table[request, position // page_size], position % page_size
