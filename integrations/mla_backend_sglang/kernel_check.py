"""Checks in the process that launches an engine, before any weights are loaded."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig

from mla_backend import jit, kernels
from mla_backend.batch import TableKind
from mla_backend.cache_format import RECORD_656
from mla_backend.checkpoint import asks_for_fp8_cache
from mla_backend.errors import InvalidInputError, UnsupportedError
from mla_backend.geometry import MLAGeometry
from mla_backend.spec import DecoderSpec


def check_kernels(server_args: Any, settings: Any, table_kind: TableKind) -> None:
    """Check that the model's kernels are built already, or can be built.

    Args:
        server_args: SGLang's ``ServerArgs`` of an engine on CUDA.
        settings: the same arguments after SGLang's own choices.
        table_kind: TOKEN, or LIST for sparse layers.

    Raises:
        InvalidInputError: the heads cannot be split over the GPUs.
        UnsupportedError: a kernel is missing and cannot be built; the message names the remedy.
    """
    model_config = ModelConfig.from_server_args(server_args)
    try:
        geometry = MLAGeometry.from_hf_config(model_config.hf_text_config)
    except InvalidInputError:
        return  # not an MLA model: the workers refuse it
    geometry = geometry.per_rank(settings.tp_size // _attention_groups(settings))
    # SGLang gathers the queries of the GPUs that divide the cache.
    num_heads = geometry.num_heads * (getattr(settings, "dcp_size", None) or 1)
    cache_dtype = _cache_dtype(settings.kv_cache_dtype, model_config)
    is_sparse = table_kind is TableKind.LIST
    has_records = is_sparse and cache_dtype is torch.float8_e4m3fn
    spec = DecoderSpec(
        num_heads=num_heads,
        kv_lora_rank=geometry.kv_lora_rank,
        qk_rope_head_dim=geometry.qk_rope_head_dim,
        dtype=torch.bfloat16 if has_records else model_config.dtype,
        kv_dtype=RECORD_656.name if has_records else cache_dtype,
        page_size=1 if is_sparse else settings.page_size or 1,
        table_kind=table_kind,
        device=torch.device("cuda"),
        max_batch=1,
        max_query_len=1 if is_sparse else kernels.largest_query_len(num_heads),
        batch_invariant=settings.enable_deterministic_inference,
    )
    # Querying the GPU does no harm: SGLang has done so by now, to check its arguments.
    capability = torch.cuda.get_device_capability()
    if why_not := jit.why_unavailable(kernels.variants_of(spec, capability, with_append=not is_sparse)):
        raise UnsupportedError(f"mla_backend's kernels cannot be loaded: {why_not}")


def _attention_groups(settings: Any) -> int:
    """The number of groups into which data-parallel attention divides the GPUs, each for its own requests."""
    if settings.enable_dp_attention:
        return settings.dp_size
    return getattr(settings, "attn_dp_size", 1)  # from 0.5.23 on, also for the options above


def _cache_dtype(option: str, model_config: ModelConfig) -> torch.dtype:
    """The dtype of the cache; the model's dtype even if the workers are going to refuse the option."""
    quantization = getattr(model_config.hf_config, "quantization_config", None)
    if option == "fp8_e4m3" or (option == "auto" and asks_for_fp8_cache(quantization)):
        return torch.float8_e4m3fn
    return model_config.dtype
