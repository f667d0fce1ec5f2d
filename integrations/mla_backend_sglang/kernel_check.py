"""Checks for kernels in the process that launches an engine, before any weights are loaded."""

from __future__ import annotations

from typing import Any

import torch

from mla_backend import jit, kernels
from mla_backend.batch import TableKind
from mla_backend.cache_format import RECORD_656
from mla_backend.checkpoint import asks_for_fp8_cache
from mla_backend.errors import UnsupportedError
from mla_backend.geometry import MLAGeometry
from mla_backend.spec import DecoderSpec
from mla_backend_sglang.names import DSA_VARIABLE, NAME
from mla_backend_sglang.refusals import stores_records


def check_kernels(model_config: Any, settings: Any, table_kind: TableKind) -> None:
    """Check that a model's heads can be split, and that on CUDA its kernels exist, and are or can be built.

    Args:
        model_config: SGLang's ``ModelConfig`` of a model with latent attention.
        settings: SGLang's ``ServerArgs`` after its own choices.
        table_kind: TOKEN, or LIST for sparse layers.

    Raises:
        InvalidInputError: the heads cannot be split over the GPUs.
        UnsupportedError: there is no kernel, or one is missing and cannot be built; the message names the
            remedy.
    """
    geometry = MLAGeometry.from_hf_config(model_config.hf_text_config)
    geometry = geometry.per_rank(settings.tp_size // _attention_groups(settings))
    if settings.device != "cuda":
        return
    # SGLang gathers the queries of the GPUs that divide the cache.
    num_heads = geometry.num_heads * (getattr(settings, "dcp_size", None) or 1)
    cache_dtype = _cache_dtype(settings.kv_cache_dtype, model_config)
    is_sparse = table_kind is TableKind.LIST
    is_fp8 = cache_dtype is torch.float8_e4m3fn
    has_records = (
        is_sparse and is_fp8 and stores_records(settings.dsa_decode_backend, settings.dsa_prefill_backend)
    )
    spec = DecoderSpec(
        num_heads=num_heads,
        kv_lora_rank=geometry.kv_lora_rank,
        qk_rope_head_dim=geometry.qk_rope_head_dim,
        dtype=torch.bfloat16 if is_sparse and is_fp8 else model_config.dtype,
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
    name, reason = kernels.choose(spec, capability)
    if name is None:
        remedy = f"leave {DSA_VARIABLE} unset" if is_sparse else "choose another --attention-backend"
        raise UnsupportedError(f"{NAME} has no kernel for this model on this GPU ({reason}): {remedy}")
    if why_not := jit.why_unavailable(kernels.variants_of(spec, capability, with_append=not is_sparse)):
        raise UnsupportedError(f"mla_backend's kernels cannot be loaded: {why_not}")


def _attention_groups(settings: Any) -> int:
    """The number of groups into which data-parallel attention divides the GPUs, each for its own requests."""
    if settings.enable_dp_attention:
        return settings.dp_size
    return getattr(settings, "attn_dp_size", 1)  # from 0.5.23 on, also for the options above


def _cache_dtype(option: str, model_config: Any) -> torch.dtype:
    """The dtype of the cache."""
    quantization = getattr(model_config.hf_config, "quantization_config", None)
    if option == "fp8_e4m3" or (option == "auto" and asks_for_fp8_cache(quantization)):
        return torch.float8_e4m3fn
    return model_config.dtype
