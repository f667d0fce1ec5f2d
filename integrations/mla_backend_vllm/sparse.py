"""Sparse attention (DSA) of DeepSeek-V3.2 and GLM-5: a token attends to the keys that vLLM's indexer chose.

The indexer is vLLM's own: it writes the positions of each token's top-k keys to a buffer that the layers
share, -1 where a token has fewer keys. Each layer converts positions to slots of the cache. To the decoder,
every token is a request with its own list (`TableKind.LIST`). A list's length follows from the token's
position, so lengths are counted, and planned for, once in each forward pass.

GLM-5.3-Flash's indexer chooses pools of `index_kpool` neighbouring keys, and always the keys of the last pool
while that is not complete: a list has up to top-k + index_kpool - 1 keys, and may have entries of -1 between
them. The conversion to slots moves those behind the keys. How many keys there are also depends on what was
chosen, so a length is the most that the position allows, and the entries of -1 within it have no weight.

vLLM decides which prompts take its regular prefill instead: those whose context is within the top-k. With
many heads and a cache of records, other prompts attend to a 16-bit copy of their context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import vllm
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import sparse_mla_attention
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.utils import split_prefill_chunks
from vllm.v1.worker.workspace import current_workspace_manager

from mla_backend import Policy, TableKind, counters, engines
from mla_backend.policy import default_rates
from mla_backend.spec import DecoderSpec
from mla_backend_vllm import BACKEND_NAME, refusals
from mla_backend_vllm.backend import VllmMLABackend
from mla_backend_vllm.draft_lengths import with_added_tokens, with_sampled_tokens
from mla_backend_vllm.impl import CheckedImpl
from mla_backend_vllm.metadata import (
    absorbs_prompts,
    leave_out_absorbed_weights,
    merge_all_context,
    with_graph_padding,
)
from mla_backend_vllm.sparse_step import (
    PAGE_SIZE,
    CopiedPrompts,
    SparseStep,
    copies_prompts,
    pages_of,
    pool_of,
    specs_of,
)

logger = init_logger(f"vllm.{__name__}")  # vLLM prints only the logs below its own name

# vLLM before 0.30 has no common metadata for its sparse backends.
_CommonMetadata = getattr(sparse_mla_attention, "SparseMLACommonMetadata", MLACommonMetadata)


@dataclass(kw_only=True)
class SparseMetadata(_CommonMetadata):  # type: ignore[misc, valid-type]
    """The metadata of vLLM's builder in any version, and the parts of the step, in the tokens' order."""

    block_table: Tensor
    req_id_per_token: Tensor
    seq_lens: Tensor
    block_size: int
    topk_tokens: int
    prefill_max_seq_len: int = 0
    cp_kv_cache_interleave_size: int = 1
    parts: list[SparseStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        pass  # vLLM's check accepts only some widths of latent rows


class SparseMetadataBuilder(sparse_mla_attention.SparseMLACommonMetadataBuilder[SparseMetadata]):
    """Adds to vLLM's metadata the lengths of the tokens' lists, and the parts that plan the step."""

    metadata_cls = SparseMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update = True  # vLLM reads it from 0.29 on

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        **kwargs: Any,
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **kwargs)
        layers = vllm_config.compilation_config.static_forward_context
        impl = layers[layer_names[0]].impl
        # Longer prompts take regular prefill if their context is within the top-k.
        limit = Policy(impl.geometry, default_rates(device)).absorbed_query_limit(self.topk_tokens)
        threshold = limit if absorbs_prompts(vllm_config) else 1
        self._init_reorder_batch_threshold(threshold, supports_spec_as_decode=True)
        for name in layer_names:
            layers[name].register_state_dict_post_hook(leave_out_absorbed_weights)
        spec = _decoder_spec(impl, vllm_config, kv_cache_spec.block_size, device)
        self._buffer_pages = impl.buffer_pages
        specs = specs_of(spec) if self._buffer_pages else [spec]
        kernels = engines.describe_kernels(*specs)
        self.decoder, *self._copy_decoders = (engines.make_decoder(spec, BACKEND_NAME) for spec in specs)
        self._pool = pool_of(vllm_config)
        # At a fixed address, for captured graphs. Holds nothing between steps: vLLM 0.26 makes builders in
        # memory that it discards when it sleeps.
        self._lengths = torch.zeros(spec.max_batch, dtype=torch.int32, device=device)
        self._log_start(kernels)

    @property
    def _most_keys(self) -> int:
        """The most keys of a list: the top-k, and those of a pool that is not complete."""
        return self.topk_tokens + self._pool - 1

    def _log_start(self, kernels: str | None) -> None:
        absorbed = f"sparse attention to the top {self.topk_tokens} keys"
        if self._copy_decoders:
            absorbed += (
                f" (more than {self.reorder_batch_threshold} new tokens: in a 16-bit copy of the context)"
            )
        counters.open_file()
        line = engines.start_line(
            engines.VLLM,
            vllm.__version__,
            self.decoder,
            kernels=kernels,
            prefill_library=self._prefill_backend.get_name() if self._prefill_backend else "none",
            absorbed=absorbed,
        )
        logger.info_once("%s", line)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **kwargs: Any
    ) -> SparseMetadata:
        common_attn_metadata = with_sampled_tokens(self.layer_names, common_attn_metadata, fast_build)
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build, **kwargs)
        merge_all_context(metadata.prefill)
        tokens = metadata.num_actual_tokens
        one_token_each = _have_one_token_each(common_attn_metadata)
        if not one_token_each:
            self._count_keys(metadata, common_attn_metadata)
        if self._copy_decoders and metadata.num_prefills:
            metadata.parts = self._copied_prompts(metadata, common_attn_metadata)
            tokens = metadata.num_decode_tokens
        if tokens:
            step = SparseStep(
                self.decoder,
                slice(0, tokens),
                self._lengths,
                metadata.req_id_per_token,
                metadata.block_table,
                has_pools=self._pool > 1,
            )
            if one_token_each:
                step.write_in_pass(self._writer(metadata))
            metadata.parts.insert(0, step)
        return metadata

    def _build_req_id_per_token(self, common_attn_metadata: Any) -> Tensor:
        # If requests have one token each, the forward pass writes the ids: this takes the host less time.
        if _have_one_token_each(common_attn_metadata):
            return self.req_id_per_token_buffer[: common_attn_metadata.num_actual_tokens]
        return super()._build_req_id_per_token(common_attn_metadata)

    def _writer(self, metadata: SparseMetadata) -> Callable[[], None]:
        """A function that writes the tokens' requests and lengths if each request has one token.

        A CUDA graph can capture it, because it reads lengths at addresses that vLLM keeps.
        """
        tokens = metadata.num_actual_tokens
        requests, lengths = metadata.req_id_per_token[:tokens], self._lengths[:tokens]
        seq_lens = metadata.seq_lens[:tokens]

        def write() -> None:
            torch.arange(tokens, out=requests)
            torch.clamp(seq_lens, 0, self._most_keys, out=lengths)

        return write

    def _count_keys(self, metadata: SparseMetadata, common_attn_metadata: Any) -> None:
        """Write how long each token's list is: as its keys up to its own, up to a limit. Asynchronous."""
        lengths = self._lengths[: metadata.num_actual_tokens]
        tokens = int(common_attn_metadata.query_start_loc_cpu[-1])
        requests = metadata.req_id_per_token[:tokens]
        keys = (metadata.seq_lens - metadata.query_start_loc[1:]).index_select(0, requests)
        keys += torch.arange(1, tokens + 1, dtype=torch.int32, device=keys.device)
        torch.clamp(keys, 0, self._most_keys, out=lengths[:tokens])
        lengths[tokens:].zero_()  # of padding

    def _copied_prompts(self, metadata: SparseMetadata, common_attn_metadata: Any) -> list[SparseStep]:
        """The step's prompts, which follow its other requests, in as few parts as the buffer allows."""
        (copy_decoder,) = self._copy_decoders
        first_prompt, end_prompt = metadata.num_decodes, metadata.num_decodes + metadata.num_prefills
        # Exact for prompts: only other requests have drafts that may have been rejected.
        lengths = common_attn_metadata.seq_lens_cpu_upper_bound[first_prompt:end_prompt]
        longest = metadata.block_table.shape[1] * self.decoder.spec.page_size
        most_pages = min(self._buffer_pages, -(-longest // PAGE_SIZE))
        pages = pages_of(lengths, most_pages)
        first_tokens = common_attn_metadata.query_start_loc_cpu.tolist()
        return [
            CopiedPrompts(
                copy_decoder,
                slice(first_tokens[first], first_tokens[end]),
                self._lengths,
                metadata.req_id_per_token - first,
                metadata.block_table[first:end],
                has_pools=self._pool > 1,
                keys=metadata.seq_lens[first:end],
                pages=int(pages[first - first_prompt : end - first_prompt].sum()),
                most_pages=most_pages,
            )
            for first, end in split_prefill_chunks(pages, self._buffer_pages, first_prompt)
        ]

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> SparseMetadata:
        common_attn_metadata = with_added_tokens(common_attn_metadata)
        # vLLM 0.32 and 0.33 keep these indices of the target's tokens even when they add tokens.
        if getattr(common_attn_metadata, "_token_to_req_indices_cache", None) is not None:
            common_attn_metadata = replace(common_attn_metadata, _token_to_req_indices_cache=None)
        return super().build_for_drafting(common_attn_metadata, draft_index)

    def update_draft_decode_metadata(self, metadata: SparseMetadata) -> None:
        """See `MetadataBuilder.update_draft_decode_metadata`.

        Raises:
            UnsupportedError: requests have several tokens (from 0.33 on, vLLM allows that in such steps).
        """
        refusals.refuse(refusals.reasons_against_sparse_drafts(metadata.max_query_len))
        for step in metadata.parts:
            step.write_in_pass(self._writer(metadata))


def _have_one_token_each(batch: Any) -> bool:
    """Whether each request of vLLM's ``batch``, including padding, has one token."""
    return batch.max_query_len == 1 and len(batch.seq_lens) == batch.num_actual_tokens


def _decoder_spec(impl: Any, vllm_config: Any, page_size: int, device: torch.device) -> DecoderSpec:
    """The specification of the decoder for layers whose attention is ``impl``."""
    return DecoderSpec(
        num_heads=impl.geometry.num_heads,
        kv_lora_rank=impl.geometry.kv_lora_rank,
        qk_rope_head_dim=impl.geometry.qk_rope_head_dim,
        dtype=vllm_config.model_config.dtype,
        kv_dtype=impl.kv_format.name,
        page_size=page_size,
        table_kind=TableKind.LIST,
        device=device,
        max_batch=with_graph_padding(vllm_config, vllm_config.scheduler_config.max_num_batched_tokens),
        max_query_len=1,
        batch_invariant=False,
    )


class SparseImpl(CheckedImpl, sparse_mla_attention.SparseMLACommonImpl[SparseMetadata]):
    """The sparse attention of one layer."""

    # No context parallelism. Versions of vLLM differ in which of these attributes they read.
    can_return_lse_for_decode: bool = False
    supports_dcp: bool = False
    supports_pcp: bool = False

    sinks: Tensor | None = None

    def __init__(self, *args: Any, sinks: Tensor | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        refusals.refuse(refusals.reasons_against_indexer(config))  # again, like those in `CheckedImpl`
        self.sinks = sinks  # HY-V4's parameter, fp32 [H], which is loaded later
        if sinks is not None:
            refusals.refuse(refusals.reasons_against_sinks(config))
        self.buffer_pages = 0  # of the buffer for copies of prompts
        # With two batches at a time, vLLM has a workspace for each, but only one can be reserved here.
        if copies_prompts(self.kv_format, self.num_heads) and not config.parallel_config.use_ubatching:
            # For the longest prompt: its last page may have few tokens, and a draft model adds one.
            self.buffer_pages = config.model_config.max_model_len // PAGE_SIZE + 2
            self._buffer(self.buffer_pages)  # reserved before vLLM measures what is left for the cache

    def _buffer(self, pages: int) -> Tensor:
        """bf16 [pages, 64, d_c + d_rope], in memory that vLLM's layers share and may overwrite."""
        shape = (pages, PAGE_SIZE, self.kv_lora_rank + self.qk_rope_head_dim)
        return current_workspace_manager().get_simultaneous((shape, torch.bfloat16))[0]

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: SparseMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor]:
        """Absorbed attention of each token to its own list.

        Args:
            q: q_nope [T, H, d_c] and q_rope [T, H, d_rope], or both in one tensor [T, H, d_c + d_rope], for
                the first T tokens of the batch, possibly not all.
            kv_c_and_k_pe_cache: [pages, page_size, d_c + d_rope], or records.
            attn_metadata: the step's metadata.
            layer: vLLM's layer, which has the cache's scale.

        Returns:
            the output [T, H, d_c], and the lse [T, H] (natural logarithm).
        """
        q_nope, q_rope = self.split_queries(q)
        num_tokens = q_nope.shape[0]
        kernel = attn_metadata.parts[0].decoder.implementation
        counters.add("sparse", num_tokens, kernel=kernel, cache_format=self.kv_format.name)
        assert num_tokens <= attn_metadata.parts[-1].tokens.stop
        sinks = None if self.sinks is None else self.sinks.detach()
        out = q_nope.new_empty(num_tokens, q_nope.shape[1], self.kv_lora_rank)
        lse = q_nope.new_empty(out.shape[:2], dtype=torch.float32)
        for part in attn_metadata.parts:
            if part.tokens.start >= num_tokens:
                break
            tokens = slice(part.tokens.start, min(part.tokens.stop, num_tokens))
            keys = kv_c_and_k_pe_cache
            if isinstance(part, CopiedPrompts):
                keys = self._buffer(part.pages)
                part.copy(kv_c_and_k_pe_cache, keys)
            positions = self.topk_indices_buffer[tokens]
            part.decoder.run(
                q_nope[tokens],
                q_rope[tokens],
                keys,
                part.plan_for(len(positions)),
                self.scale,
                kv_scale=self._scale(layer._k_scale),
                table=part.slots(positions),
                sinks=sinks,
                out=out[tokens],
                lse=lse[tokens],
            )
        return out, lse

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: SparseMetadata,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """vLLM's regular prefill."""
        self._count_prefill(q.shape[0], attn_metadata)
        super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, *args, **kwargs)


class SparseBackend(VllmMLABackend):
    """The attention backend that MLA_BACKEND names for layers with sparse attention."""

    table_kind = TableKind.LIST

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:  # type: ignore[override]
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:  # type: ignore[override]
        return SparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE_SIZE)]  # the indexer may need pages of one size

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False  # whether a prompt takes regular prefill depends on the longest one of its batch
