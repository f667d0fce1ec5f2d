"""Scales of fp8 caches from checkpoints, which vLLM drops in models with latent attention.

vLLM renames `self_attn.k_proj.k_scale` of a checkpoint to `self_attn.attn.k_scale`, the name of a regular
attention layer's parameter. In a layer with latent attention, the parameter is
`self_attn.mla_attn.mla_attn.k_scale`, or `self_attn.k_scale` if the layer holds its own projections
(DeepSeek-V3.2 and GLM-5 from 0.29 on; Kimi-K3, whose layer vLLM calls `self_attn`). So vLLM (0.26 to 0.33,
any backend) warns that the scale is not loaded, and uses 1. In models of vLLM's Transformers backend, the
parameter has the expected name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from mla_backend.cache_format import E4M3, RECORD_656

logger = init_logger(f"vllm.{__name__}")  # vLLM prints only the logs below its own name

FP8_FORMATS = {"fp8": E4M3, "fp8_e4m3": E4M3, "fp8_ds_mla": RECORD_656}
"""The formats of 8-bit caches, by vLLM's names."""

_LAYERS = (".self_attn.attn", ".self_attn")


def load_scales_of(vllm_config: Any, is_ours: Callable[[Any], bool]) -> None:
    """Make vLLM load k_scale and v_scale of the layers for whose ``impl`` ``is_ours`` is true.

    Extends the renaming of this engine's quantization, once.
    """
    quantization = vllm_config.quant_config
    if quantization is None or hasattr(quantization, "_mla_backend_scales"):
        return
    if vllm_config.model_config.using_transformers_backend():
        return
    if not hasattr(quantization, "get_cache_scale_mapper"):
        logger.warning_once(
            "The quantization of this vLLM (%s) does not rename scales of caches as known versions do. If "
            "the checkpoint has scales and vLLM warns that they are not loaded, fp8 caches use 1.",
            type(quantization).__name__,
        )
        return
    quantization._mla_backend_scales = True
    renaming = quantization.get_cache_scale_mapper
    layers = vllm_config.compilation_config.static_forward_context

    def with_latent_attention() -> Any:
        mapper = renaming()
        further = {
            re.compile(rf"^{re.escape(name.removesuffix('.attn'))}\.attn\.([kv])_scale$"): (
                f"{_module_of(name, layer)}.\\1_scale"
            )
            for name, layer in layers.items()
            if name.endswith(_LAYERS) and is_ours(getattr(layer, "impl", None))
        }
        return mapper | type(mapper)(orig_to_new_regex=further)

    quantization.get_cache_scale_mapper = with_latent_attention


def _module_of(name: str, layer: Any) -> str:
    """The path, in the model, of the layer that vLLM calls ``name``."""
    return name.removesuffix(".attn") + ("" if hasattr(layer, "o_proj") else ".mla_attn.mla_attn")
