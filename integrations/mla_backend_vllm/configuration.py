"""Checks of an engine's configuration, in addition to those that vLLM makes when it selects a backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform

from mla_backend.cache_format import CacheFormat
from mla_backend_vllm import BACKEND_NAME
from mla_backend_vllm.sharding import reason_against_connector


def reasons_against(vllm_config: Any, kv_format: CacheFormat | None) -> Iterator[str]:
    """Why layers with a cache in ``kv_format`` (None if it is unknown) cannot be served, and what to type."""
    if getattr(vllm_config.parallel_config, "enable_elastic_ep", False):
        yield (
            f"{BACKEND_NAME} leaves the absorbed weights out of state_dict, but elastic expert parallelism "
            "pairs weights by their order there: leave --enable-elastic-ep off, or choose another "
            "--attention-backend"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):  # gone by vLLM 0.29
        yield (
            f"{BACKEND_NAME} takes the scale of an fp8 cache from the checkpoint (1 if it has none) and does "
            "not calculate one from the first batch: leave --calculate-kv-scales off"
        )
    if getattr(vllm_config.model_config.hf_text_config, "learnable_sink", False):
        # HY-V4's layers do not mention sinks when a backend is selected, and drop them if it supports none.
        yield (
            f"{BACKEND_NAME} does not implement attention sinks, which this model has: choose another "
            "--attention-backend"
        )
    if (reason := reason_against_connector(vllm_config)) is not None:
        yield reason
    if kv_format is not None and kv_format.takes_scale:
        yield from _reasons_against_scale(vllm_config)


def _reasons_against_scale(vllm_config: Any) -> Iterator[str]:
    """Why the cache cannot have one scale."""
    # vLLM's prefill in fp8, on GPUs of compute capability 10.x, does not apply the scale to context: with
    # vLLM's own backends the scale is always 1 (see `mla_backend_vllm.scales`).
    quantizes = getattr(vllm_config.attention_config, "use_prefill_query_quantization", False)
    if quantizes and current_platform.is_device_capability_family(100):
        yield (
            "with use_prefill_query_quantization vLLM reads context without the scale of the fp8 cache, "
            f"which {BACKEND_NAME} loads from the checkpoint: leave it out of --attention-config"
        )
    # Without prefill in fp8, these layers stop the engine at the first long prompt. Kimi-Linear has them from
    # vLLM 0.28 on.
    model = ModelRegistry.models.get(str(vllm_config.model_config.architecture))
    if "kimi_k3" in getattr(model, "module_name", ""):
        yield (
            "vLLM's Kimi-K3 and Kimi-Linear need prefill in fp8 if the cache is e4m3 with one scale, but "
            f"{BACKEND_NAME} has none: use --kv-cache-dtype fp8_ds_mla or bfloat16"
        )
