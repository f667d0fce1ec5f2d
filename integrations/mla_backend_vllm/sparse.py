"""Sparse attention (DSA) of DeepSeek-V3.2 and GLM-5: a token attends to the keys that vLLM's indexer chose.

The indexer is vLLM's own: it writes the positions of each token's top-k keys to a buffer that the layers
share, -1 where a token has fewer keys. Each layer converts positions to slots of the cache, and every token
is a request of the decoder, with a list of its own (`TableKind.LIST`). Lengths follow from the token's
position, so they are known once a step.

vLLM decides which prompts take its regular prefill instead: those whose context is within the top-k. With
many heads, other prompts attend to a copy of their context in 16 bits if the cache has records.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import vllm
from torch import Tensor
from vllm import _custom_ops
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import sparse_mla_attention
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index
from vllm.v1.attention.backends.utils import split_prefill_chunks
from vllm.v1.worker.workspace import current_workspace_manager

from mla_backend import DecodeBatch, DecodePlan, MLADecoder, Policy, TableKind, counters, engines
from mla_backend.cache_format import RECORD_656
from mla_backend.policy import default_rates
from mla_backend.spec import DecoderSpec
from mla_backend_vllm import BACKEND_NAME
from mla_backend_vllm.backend import VllmMLABackend, divides_cache
from mla_backend_vllm.impl import CheckedLayer
from mla_backend_vllm.metadata import (
    leave_out_absorbed_weights,
    make_decoder,
    merge_all_context,
    with_added_tokens,
)

logger = init_logger(f"vllm.{__name__}")  # vLLM prints only the logs below its own name

# vLLM before 0.30 has no common metadata for its sparse backends.
_CommonMetadata = getattr(sparse_mla_attention, "SparseMLACommonMetadata", MLACommonMetadata)

PAGE_SIZE = 64  # the indexer's
# With more heads than this, tokens attend to records more slowly than to 16-bit keys
# (benchmarks/results/sparse-h200.json). One copy serves all tokens of a prompt; decode has too few for one.
MOST_HEADS_ON_RECORDS = 32


class SparseStep:
    """The sparse attention of some tokens of a step, planned once for all layers.

    Args:
        decoder: the decoder of these layers.
        tokens: which tokens.
        lengths: int32 [tokens of the step], how many entries of each one's list count.
        requests: int32 [tokens of the step], each one's row of ``table``.
        table: int32 [requests, width], the pages of the requests' keys.
    """

    def __init__(self, decoder: MLADecoder, tokens: slice, lengths: Tensor, requests: Tensor, table: Tensor):
        self.decoder, self.tokens = decoder, tokens
        self._lengths, self._requests, self._table = lengths[tokens], requests[tokens], table
        self._plan = self._plan_rows(len(self._lengths))

    def plan_for(self, rows: int) -> DecodePlan:
        """The plan for the first ``rows`` tokens: all, or those without vLLM's regular prefill."""
        if not self._plan.is_current or self._plan.batch.batch_size != rows:
            self._plan = self._plan_rows(rows)
        return self._plan

    def _plan_rows(self, rows: int) -> DecodePlan:
        page_size = self.decoder.spec.page_size
        return self.decoder.plan(DecodeBatch(self._lengths[:rows], None, page_size, None, 1, TableKind.LIST))

    def slots(self, positions: Tensor) -> Tensor:
        """Slots of keys for positions [T, topk] of the first T tokens; -1 for those that do not exist."""
        requests, table = self._requests[: len(positions)], self._table
        page_size = self.decoder.spec.page_size
        if positions.device.type == "cuda":
            return triton_convert_req_index_to_global_index(
                requests, table, positions, BLOCK_SIZE=page_size, NUM_TOPK_TOKENS=positions.shape[1]
            )
        index = positions.long() // page_size
        exists = (index >= 0) & (index < table.shape[1])
        pages = table[requests.long()[:, None], index.where(exists, 0)]
        return torch.where(exists, pages * page_size + positions % page_size, -1)


class CopiedPrompts(SparseStep):
    """Prompts whose contexts fit the buffer of 16-bit keys together. There they have consecutive pages.

    Args:
        requests, table: as above, of these prompts in the cache.
        keys: int32 [prompts], how many each prompt has.
        pages: how many of the buffer the prompts take.
    """

    def __init__(
        self,
        decoder: MLADecoder,
        tokens: slice,
        lengths: Tensor,
        requests: Tensor,
        table: Tensor,
        keys: Tensor,
        pages: int,
    ):
        ends = (-(-keys // PAGE_SIZE)).cumsum(0).int()
        self._starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
        self._cache_table, self._pages = table, pages
        numbers = torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
        super().__init__(decoder, tokens, lengths, requests, self._starts[:, None] + numbers)

    def copy(self, cache: Tensor, buffer: Tensor) -> Tensor:
        """The used part of the buffer [pages, 64, 576], filled with the prompts' keys of the cache."""
        keys = buffer[: self._pages]
        starts = self._starts * PAGE_SIZE
        _custom_ops.cp_gather_and_upconvert_fp8_kv_cache(
            cache, keys.flatten(0, 1), self._cache_table, starts, len(starts)
        )
        return keys


@dataclass(kw_only=True)
class SparseMetadata(_CommonMetadata):  # type: ignore[misc, valid-type]
    """What vLLM's builder gives in any version, and the planned parts of the step, in the tokens' order."""

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
    """Adds to vLLM's metadata the lengths of the tokens' lists, and plans the step."""

    metadata_cls = SparseMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

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
        geometry = impl.geometry
        # Longer prompts take regular prefill if their context is within the top-k.
        threshold = Policy(geometry, default_rates(device)).absorbed_query_limit(self.topk_tokens)
        self._init_reorder_batch_threshold(threshold, supports_spec_as_decode=True)
        for name in layer_names:
            layers[name].register_state_dict_post_hook(leave_out_absorbed_weights)
        graph_batch = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        spec = DecoderSpec(
            num_heads=geometry.num_heads,
            kv_lora_rank=geometry.kv_lora_rank,
            qk_rope_head_dim=geometry.qk_rope_head_dim,
            dtype=vllm_config.model_config.dtype,
            kv_dtype=impl.kv_format.name,
            page_size=kv_cache_spec.block_size,
            table_kind=TableKind.LIST,
            device=device,
            max_batch=max(vllm_config.scheduler_config.max_num_batched_tokens, graph_batch),
            max_query_len=1,
            batch_invariant=False,
        )
        kernels = engines.describe_kernels(spec)
        self.decoder = make_decoder(spec)
        self.copied_pages = impl.copied_pages
        if self.copied_pages:
            self.copy_decoder = make_decoder(replace(spec, kv_dtype=spec.dtype))
        self._tokens = torch.arange(spec.max_batch, dtype=torch.int32, device=device)
        self._lengths = torch.zeros_like(self._tokens)  # at one address, for captured graphs
        absorbed = f"sparse attention to the top {self.topk_tokens} keys"
        if self.copied_pages:
            absorbed += f", of more than {self.reorder_batch_threshold} new tokens in a 16-bit copy"
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
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> SparseMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        merge_all_context(metadata.prefill)
        tokens = metadata.num_actual_tokens
        lengths = list_lengths(
            self._tokens[:tokens],
            metadata.req_id_per_token[:tokens],
            metadata.query_start_loc,
            metadata.seq_lens,
            self.topk_tokens,
        )
        self._lengths[:tokens].copy_(lengths)
        requests, table = metadata.req_id_per_token, metadata.block_table
        copied = self._copied_prompts(metadata, common_attn_metadata) if self.copied_pages else []
        others = slice(0, metadata.num_decode_tokens if copied else tokens)
        metadata.parts = copied
        if others.stop:
            metadata.parts = [SparseStep(self.decoder, others, self._lengths, requests, table), *copied]
        return metadata

    def _copied_prompts(self, metadata: SparseMetadata, batch: Any) -> list[SparseStep]:
        """The step's prompts, in as few parts as the buffer allows. They follow the other requests."""
        first_prompt, end_prompt = metadata.num_decodes, metadata.num_decodes + metadata.num_prefills
        if first_prompt == end_prompt:
            return []
        # For prompts these bounds are exact.
        pages = -(-batch.seq_lens_cpu_upper_bound[first_prompt:end_prompt] // PAGE_SIZE)
        first_tokens = batch.query_start_loc_cpu.tolist()
        first_tokens[end_prompt] = metadata.num_actual_tokens  # padding has lists of length 0
        return [
            CopiedPrompts(
                self.copy_decoder,
                slice(first_tokens[first], first_tokens[end]),
                self._lengths,
                (metadata.req_id_per_token - first).clamp(min=0),
                metadata.block_table[first:end],
                metadata.seq_lens[first:end],
                int(pages[first - first_prompt : end - first_prompt].sum()),
            )
            for first, end in split_prefill_chunks(pages, self.copied_pages, first_prompt)
        ]

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> SparseMetadata:
        return super().build_for_drafting(with_added_tokens(common_attn_metadata), draft_index)


def list_lengths(
    tokens: Tensor, requests: Tensor, query_start_loc: Tensor, seq_lens: Tensor, topk: int
) -> Tensor:
    """How many keys each token attends to: those up to its own, and at most ``topk``. Never synchronizes.

    Args:
        tokens: int32 [T], 0 to T - 1.
        requests: int32 [T], the request of each token; anything in range for padding.
        query_start_loc: int32 [requests + 1], offsets of the requests' tokens; those behind are padding.
        seq_lens: int32 [requests], keys of each request.

    Returns:
        int32 [T], 0 for padding.
    """
    requests = requests.long()
    keys = seq_lens[requests] - query_start_loc[requests + 1] + tokens + 1
    return keys.clamp(0, topk).masked_fill(tokens >= query_start_loc[-1], 0).int()


class SparseImpl(CheckedLayer, sparse_mla_attention.SparseMLACommonImpl[SparseMetadata]):
    """The sparse attention of one layer."""

    # No context parallelism. The version of vLLM decides which of these it reads.
    can_return_lse_for_decode: bool = False
    supports_dcp: bool = False
    supports_pcp: bool = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.copied_pages = 0  # of the buffer for copies of prompts
        config = get_current_vllm_config()
        # With two batches at a time vLLM has a buffer for each, of which only one can be reserved here.
        if config.parallel_config.use_ubatching:
            return
        if self.kv_format is RECORD_656 and self.num_heads > MOST_HEADS_ON_RECORDS:
            # A prompt, whose last page may have few tokens, and one token of a draft model.
            self.copied_pages = config.model_config.max_model_len // PAGE_SIZE + 2
            self._copy_buffer()  # reserved before vLLM measures what is left for the cache

    def _copy_buffer(self) -> Tensor:
        """bf16 [copied_pages, 64, d_c + d_rope], memory that vLLM's layers share: each may overwrite it."""
        shape = (self.copied_pages, PAGE_SIZE, self.kv_lora_rank + self.qk_rope_head_dim)
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
            q: q_nope [T, H, d_c] and q_rope [T, H, d_rope], or both in one tensor [T, H, d_c + d_rope]. T may
                be smaller than the batch: the tokens that come first.
            kv_c_and_k_pe_cache: [pages, page_size, d_c + d_rope], or records.
            attn_metadata: the step's metadata.
            layer: vLLM's layer, which has the cache's scale.

        Returns:
            the output [T, H, d_c], and the lse [T, H] (natural logarithm).
        """
        q_nope, q_rope = self.split_queries(q)
        rows = q_nope.shape[0]
        counters.add("sparse", rows)
        out = q_nope.new_empty(rows, q_nope.shape[1], self.kv_lora_rank)
        lse = q_nope.new_empty(out.shape[:2], dtype=torch.float32)
        for part in attn_metadata.parts:
            if part.tokens.start >= rows:
                break
            tokens = slice(part.tokens.start, min(part.tokens.stop, rows))
            keys, scale = kv_c_and_k_pe_cache, layer._k_scale if self.kv_format.takes_scale else None
            if isinstance(part, CopiedPrompts):
                keys = part.copy(keys, self._copy_buffer())
            positions = self.topk_indices_buffer[tokens]
            part.decoder.run(
                q_nope[tokens],
                q_rope[tokens],
                keys,
                part.plan_for(len(positions)),
                self.scale,
                kv_scale=scale,
                table=part.slots(positions),
                out=out[tokens],
                lse=lse[tokens],
            )
        return out, lse

    def forward_mha(self, q: Tensor, *args: Any, **kwargs: Any) -> None:
        """vLLM's regular prefill."""
        counters.add("vanilla_prefill", q.shape[0])
        super().forward_mha(q, *args, **kwargs)


class SparseBackend(VllmMLABackend):
    """What MLA_BACKEND is for layers with sparse attention."""

    table_kind = TableKind.LIST

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:  # type: ignore[override]
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:  # type: ignore[override]
        return SparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [PAGE_SIZE]

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False  # whether a prompt takes regular prefill depends on the longest one of its batch

    @classmethod
    def validate_configuration(cls, **selection: Any) -> list[str]:
        """The reasons why this configuration cannot be served; an empty list if it can."""
        reasons = super().validate_configuration(**selection)
        capability = selection.get("device_capability")
        if capability is None:
            reasons.append("vLLM has no indexer for sparse attention (DSA) on the CPU: use a GPU")
        elif (capability.major, capability.minor) < engines.FIRST_INDEXER_CAPABILITY:
            reasons.append(
                "vLLM's indexer for sparse attention (DeepGEMM) needs compute capability 9.0 or higher, but "
                f"this GPU has {capability.major}.{capability.minor}: use a newer GPU"
            )
        if divides_cache():
            reasons.append(
                f"{BACKEND_NAME} does not implement decode context parallelism (DCP) of sparse layers: leave "
                "out --decode-context-parallel-size"
            )
        config = get_current_vllm_config_or_none()
        if config is not None and config.model_config is not None:
            if (getattr(config.model_config.hf_text_config, "index_kpool", None) or 1) > 1:
                reasons.append(
                    f"{BACKEND_NAME} does not implement pooled keys in the indexer (index_kpool): "
                    "choose another --attention-backend"
                )
            if getattr(config.attention_config, "hisparse_config", None) is not None:
                reasons.append(
                    f"{BACKEND_NAME} does not implement HiSparse: leave hisparse_config out of "
                    "--attention-config"
                )
        return reasons
