"""From vLLM's batches to planned steps of the decoder.

In each step vLLM puts requests with few new tokens first. They use absorbed attention, the others regular
prefill. `MetadataBuilder` sets the threshold between them, from the policy's cost model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import vllm
from torch import Tensor
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from mla_backend import (
    DecodeBatch,
    DecodePlan,
    MLADecoder,
    MLAGeometry,
    Policy,
    RotaryAppend,
    TableKind,
    counters,
    engines,
    prefill,
)
from mla_backend.batch import WHOLE
from mla_backend.policy import default_rates
from mla_backend.spec import DecoderSpec
from mla_backend_vllm import BACKEND_NAME, head_products
from mla_backend_vllm.draft_lengths import with_added_tokens, with_sampled_tokens
from mla_backend_vllm.kimi_k3 import keep_in_16_bits
from mla_backend_vllm.prefill_backend import MLAPrefill, library_of
from mla_backend_vllm.sharding import shard_of, with_lengths_of

logger = init_logger(f"vllm.{__name__}")  # vLLM prints only the logs below its own name


@dataclass
class DecodeMetadata(MLACommonDecodeMetadata):
    """The absorbed attention of a step, planned once for all layers."""

    decoder: MLADecoder
    plan: DecodePlan
    path: counters.AttentionPath


@dataclass
class Metadata(MLACommonMetadata[DecodeMetadata]):
    """A step's metadata, without vLLM's check of the width of latent rows."""

    def __post_init__(self) -> None:
        pass  # vLLM's check accepts only latent rows of 320, 512 and 576; MiniCPM3's have 288


def absorbs_prompts(vllm_config: Any) -> bool:
    """Whether prompts (requests with several new tokens that are not drafts) may use absorbed attention.

    Not in batch-invariant mode, because vLLM may put a short prompt on either side of the threshold,
    depending on the rest of the batch. Not if vLLM splits steps in two (DBO): it does not split a step in
    which a prompt hits pages that another prompt writes, but it does not look for such hits in requests
    within the threshold, which it takes for decodes.
    """
    return not (envs.VLLM_BATCH_INVARIANT or vllm_config.parallel_config.use_ubatching)


class MetadataBuilder(MLACommonMetadataBuilder[Metadata]):
    """Makes a `DecodeBatch` from vLLM's batch and plans it.

    Requests with at most `reorder_batch_threshold` new tokens use absorbed attention. The threshold is the
    longest query for which the policy prefers it on a long prefix, or 1 if prompts may not be absorbed.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    supports_non_causal_multi_token_decode: ClassVar[bool] = True  # vLLM reads it from 0.29 on

    _prefill_backend: Any  # vLLM's base class sets it

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        **kwargs: Any,
    ):
        static_context = vllm_config.compilation_config.static_forward_context
        layers = [static_context[name] for name in layer_names]
        impl = layers[0].impl
        policy = Policy(impl.geometry, default_rates(device))
        self.reorder_batch_threshold = policy.absorbed_query_limit() if absorbs_prompts(vllm_config) else 1
        self._shard = shard_of(vllm_config, impl, kv_cache_spec.block_size)
        # Without `supports_dcp_with_varlen`, drafts would be verified by prefill on a sharded cache.
        super().__init__(
            kv_cache_spec, layer_names, vllm_config, device, Metadata, supports_dcp_with_varlen=True, **kwargs
        )
        self.layer_names = layer_names  # vLLM's builders for MLA leave it out
        # vLLM reads this from 0.29 on. On a shard, it does not advance the lengths that decoding reads.
        self.supports_draft_decode_metadata_update = self._shard is WHOLE
        if device.type == "cpu":
            self._prefill_on_the_cpu(vllm_config)
        for layer in layers:
            layer.register_state_dict_post_hook(leave_out_absorbed_weights)
            keep_in_16_bits(layer)
        spec = self._decoder_spec(impl, vllm_config, kv_cache_spec.block_size, device)
        kernels, why_not_products = _launch_around_attention(layers, spec, vllm_config)
        self.decoder = engines.make_decoder(spec, BACKEND_NAME)
        library = self._prepare_prefill(impl.geometry)
        self._log_start(kernels, library, impl.why_not_fused, why_not_products)

    def _prefill_on_the_cpu(self, vllm_config: Any) -> None:
        """Use our prefill backend instead of that of vLLM's CPU platform."""
        self._prefill_backend = _with_our_prefill(self._prefill_backend, vllm_config)
        # With records, vLLM's buffer for context is in bf16. Converted in place: others hold the tensor.
        workspace = self.chunked_prefill_workspace
        workspace.data = workspace.to(vllm_config.model_config.dtype)

    def _decoder_spec(self, impl: Any, vllm_config: Any, page_size: int, device: torch.device) -> DecoderSpec:
        geometry: MLAGeometry = impl.geometry
        return DecoderSpec(
            num_heads=geometry.num_heads * self._shard.size,  # vLLM gathers the queries of all ranks
            kv_lora_rank=geometry.kv_lora_rank,
            qk_rope_head_dim=geometry.qk_rope_head_dim,
            dtype=vllm_config.model_config.dtype,
            kv_dtype=impl.kv_format.name,
            page_size=page_size,
            table_kind=TableKind.BLOCK,
            device=device,
            max_batch=with_graph_padding(vllm_config, vllm_config.scheduler_config.max_num_seqs),
            max_query_len=self.reorder_batch_threshold,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )

    def _prepare_prefill(self, geometry: MLAGeometry) -> str:
        """Compile what regular prefill runs on, if that is ours to choose. Returns the library's name."""
        if isinstance(self._prefill_backend, MLAPrefill):
            spec = self.decoder.spec
            widths = (geometry.qk_head_dim, geometry.v_head_dim)
            self._prefill_backend.library = prefill.prepare(
                spec.device, spec.dtype, *widths, batch_invariant=spec.batch_invariant
            )
        return library_of(self._prefill_backend)

    def _log_start(
        self, kernels: str | None, library: str, why_not_fused: str | None, why_not_products: str | None
    ) -> None:
        counters.open_file()
        line = engines.start_line(
            engines.VLLM,
            vllm.__version__,
            self.decoder,
            kernels=kernels,
            prefill_library=library,
            absorbed=engines.describe_threshold(self.reorder_batch_threshold),
            shard=self._shard,
            appended="one launch normalizes, rotates and appends new tokens"
            if why_not_fused is None
            else f"vLLM's kernels append new tokens ({why_not_fused})",
            products="small steps multiply by W_UK and W_UV in launches that begin early"
            if why_not_products is None
            else f"torch multiplies by W_UK and W_UV ({why_not_products})",
        )
        logger.info_once("%s", line)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **kwargs: Any
    ) -> Metadata:
        common_attn_metadata = with_sampled_tokens(self.layer_names, common_attn_metadata, fast_build)
        common_attn_metadata = with_lengths_of(self._shard, common_attn_metadata)
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build, **kwargs)
        merge_all_context(metadata.prefill)
        return metadata

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Metadata:
        return super().build_for_drafting(with_added_tokens(common_attn_metadata), draft_index)

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Plan a draft model's next step: on the device, lengths have changed since ``metadata`` was built.

        vLLM captures a draft model's steps after its first in one CUDA graph, with this call before each.
        """
        if metadata.decode is not None:
            metadata.decode.plan = self.decoder.plan(metadata.decode.plan.batch)

    def _build_decode(
        self,
        *,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
        **unused: Any,
    ) -> DecodeMetadata:
        query_lens = query_start_loc_cpu.diff()
        max_query_len = max(1, int(query_lens.max()))
        is_uniform = _is_uniform(query_lens, max_query_len, num_decode_tokens)
        # On a rank of a shard, `seq_lens_device` has lengths that vLLM derives on the host. They may count
        # drafts that the device has rejected since.
        whole_seq_lens = seq_lens_device if dcp_tot_seq_lens_device is None else dcp_tot_seq_lens_device
        batch = DecodeBatch(
            seq_lens=whole_seq_lens,
            table=block_table_tensor,
            page_size=self.decoder.spec.page_size,
            query_start_loc=None if is_uniform else query_start_loc_device,
            max_query_len=max_query_len,
            shard=self._shard,
        )
        return DecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            decoder=self.decoder,
            plan=self.decoder.plan(batch),
            path="absorbed_decode" if max_query_len == 1 else "absorbed_extend",
        )


def _launch_around_attention(
    layers: list[Any], spec: DecoderSpec, vllm_config: Any
) -> tuple[str | None, str | None]:
    """Install the launches around attention on the layers that they serve, and build their kernels.

    Returns:
        How many kernels the layers load, the decoder's included, as of `engines.describe_kernels`; and why
        vLLM multiplies by the absorbed weights of a layer, None if it does so in no layer.
    """
    fused = [layer.impl.fused_append for layer in layers if layer.impl.fused_append]
    suited, why_not_products = head_products.suited(layers, vllm_config)
    products = head_products.kernels_of(suited)
    kernels = engines.describe_kernels(spec, with_append=bool(fused), others=products)
    if fused:
        launch = RotaryAppend(spec.dtype, spec.device)
        for append in fused:
            append.launch = launch
    head_products.install(suited)
    return kernels, why_not_products


def merge_all_context(prefill_metadata: Any) -> None:
    """Keep vLLM 0.26 from losing the context of a chunked prompt.

    vLLM 0.26 merges context only into the first ``prefill_tokens_with_context`` rows, as if requests with
    context came first. But its runner sorts by new tokens: the last chunk of a long prompt can come after
    prompts without context, and would lose its own. Without the bound, vLLM merges context into all rows;
    rows without context give it a weight of 0.

    Args:
        prefill_metadata: what vLLM's builder made for the batch's regular prefill, or None.
    """
    context = prefill_metadata.chunked_context if prefill_metadata is not None else None
    if context is not None and hasattr(context, "prefill_tokens_with_context"):
        context.prefill_tokens_with_context = None


def _is_uniform(query_lens: Tensor, max_query_len: int, num_tokens: int) -> bool:
    """Whether each request has ``max_query_len`` query tokens, counting the padding of a graph's batch.

    vLLM pads a graph's batch with requests of seq_len 0. According to query_start_loc these have no tokens,
    but the queries have rows for them. Only a batch described as uniform assigns these rows to a request.
    """
    if num_tokens != query_lens.shape[0] * max_query_len:
        return False
    if max_query_len == 1:
        return True
    # A ragged batch may have been padded to the same number of tokens.
    return bool(((query_lens == max_query_len) | (query_lens == 0)).all())


def with_graph_padding(vllm_config: Any, largest_batch: int) -> int:
    """The largest batch, in requests or tokens, when vLLM pads it to a size that it captures graphs for."""
    return max(largest_batch, vllm_config.compilation_config.max_cudagraph_capture_size or 0)


def _with_our_prefill(stock: Any, vllm_config: Any) -> MLAPrefill:
    """Our prefill backend for the same layers as ``stock``, which vLLM's CPU platform chose."""
    return MLAPrefill(
        num_heads=stock.num_heads,
        scale=stock.scale,
        kv_lora_rank=stock.kv_lora_rank,
        qk_nope_head_dim=stock.qk_nope_head_dim,
        qk_rope_head_dim=stock.qk_rope_head_dim,
        v_head_dim=stock.v_head_dim,
        vllm_config=vllm_config,
    )


def leave_out_absorbed_weights(
    layer: torch.nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """A hook that removes W_UK_T and W_UV, and what ranks gather of them, from a layer's ``state_dict``.

    vLLM derives them from kv_b_proj when it loads a model, and registers them as parameters. If they are
    views, `save_sharded_state` fails on them. If they are copies, it saves names that no model can load.
    """
    for name in ("W_UK_T", "W_UV", "W_UK_T_dcp_qrep"):
        state_dict.pop(prefix + name, None)
