"""Sparse attention (DSA) of DeepSeek-V3.2 and GLM-5: a token attends to the keys that vLLM's indexer chose.

The indexer is vLLM's own: it writes the positions of each token's top-k keys to a buffer that the layers
share, -1 where a token has fewer keys. Each layer converts positions to slots of the cache, and every token
is a request of the decoder, with a list of its own (`TableKind.LIST`). Lengths follow from the token's
position, so they are known once a step.

vLLM decides which prompts take its regular prefill instead: those whose context is within the top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import vllm
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import sparse_mla_attention
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index

from mla_backend import DecodeBatch, DecodePlan, MLADecoder, Policy, TableKind, counters, engines
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


class SparseStep:
    """The sparse attention of a step, planned once for all layers.

    Attributes:
        decoder: the decoder of these layers.
        lengths: int32 [tokens], how many entries of each token's list count.
    """

    def __init__(self, decoder: MLADecoder, lengths: Tensor):
        self.decoder, self.lengths = decoder, lengths
        self._plan = self._plan_rows(len(lengths))

    def plan_for(self, rows: int) -> DecodePlan:
        """The plan for the first ``rows`` tokens: all, or those without vLLM's regular prefill."""
        if not self._plan.is_current or self._plan.batch.batch_size != rows:
            self._plan = self._plan_rows(rows)
        return self._plan

    def _plan_rows(self, rows: int) -> DecodePlan:
        page_size = self.decoder.spec.page_size
        return self.decoder.plan(DecodeBatch(self.lengths[:rows], None, page_size, None, 1, TableKind.LIST))


@dataclass(kw_only=True)
class SparseMetadata(_CommonMetadata):  # type: ignore[misc, valid-type]
    """What vLLM's builder gives in any version, and the planned step."""

    block_table: Tensor
    req_id_per_token: Tensor
    seq_lens: Tensor
    block_size: int
    topk_tokens: int
    prefill_max_seq_len: int = 0
    cp_kv_cache_interleave_size: int = 1
    step: SparseStep | None = None

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
        self._tokens = torch.arange(spec.max_batch, dtype=torch.int32, device=device)
        self._lengths = torch.zeros_like(self._tokens)  # at one address, for captured graphs
        line = engines.start_line(
            engines.VLLM,
            vllm.__version__,
            self.decoder,
            kernels=kernels,
            prefill_library=self._prefill_backend.get_name() if self._prefill_backend else "none",
            absorbed=f"sparse attention to the top {self.topk_tokens} keys",
        )
        logger.info_once("%s", line)

    def build(self, *args: Any, **kwargs: Any) -> SparseMetadata:
        metadata = super().build(*args, **kwargs)
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
        metadata.step = SparseStep(self.decoder, self._lengths[:tokens])
        return metadata

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


def slots_of(metadata: SparseMetadata, positions: Tensor) -> Tensor:
    """Slots of the cache for positions [T, topk] in the tokens' requests; -1 for those that do not exist."""
    requests = metadata.req_id_per_token[: len(positions)]
    page_size, table = metadata.block_size, metadata.block_table
    if positions.device.type == "cuda":
        return triton_convert_req_index_to_global_index(
            requests, table, positions, BLOCK_SIZE=page_size, NUM_TOPK_TOKENS=positions.shape[1]
        )
    index = positions.long() // page_size
    exists = (index >= 0) & (index < table.shape[1])
    pages = table[requests.long()[:, None], index.where(exists, 0)]
    return torch.where(exists, pages * page_size + positions % page_size, -1)


class SparseImpl(CheckedLayer, sparse_mla_attention.SparseMLACommonImpl[SparseMetadata]):
    """The sparse attention of one layer."""

    # No context parallelism. The version of vLLM decides which of these it reads.
    can_return_lse_for_decode: bool = False
    supports_dcp: bool = False
    supports_pcp: bool = False

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
        step, positions = attn_metadata.step, self.topk_indices_buffer
        assert step is not None and positions is not None
        slots = slots_of(attn_metadata, positions[:rows])
        return step.decoder.run(
            q_nope,
            q_rope,
            kv_c_and_k_pe_cache,
            step.plan_for(rows),
            self.scale,
            table=slots,
            kv_scale=layer._k_scale if self.kv_format.takes_scale else None,
        )

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
        return [64]  # the indexer's

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
