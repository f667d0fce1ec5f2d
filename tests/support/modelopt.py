"""Checkpoints as ModelOpt writes them: an fp8 cache with scales of its own, and fp8 weights if wanted."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.support.quantized_checkpoint import quantized_checkpoint

INPUT_SCALE = 0.05
"""Of activations with a variance of about 1."""


def modelopt_checkpoint(source: Path, folder: Path, k_scales: list[float], *, fp8_weights: bool) -> Path:
    """Copy a checkpoint, and give it `kv_cache_quant_algo: FP8` and a k_scale and v_scale in each layer.

    Args:
        k_scales: of the layers. Latent attention has no values of its own: v_scale is the same.
        fp8_weights: also quantize linear layers, per tensor. Otherwise they are excluded.
    """
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "ignore": ["lm_head"] if fp8_weights else ["*"],
    }
    change = _quantized if fp8_weights else lambda name, weight: {name: weight}
    scales = {
        f"model.layers.{i}.self_attn.{which}_proj.{which}_scale": torch.tensor(scale, dtype=torch.float32)
        for i, scale in enumerate(k_scales)
        for which in "kv"
    }
    return quantized_checkpoint(source, folder, quantization, change, scales)


def _quantized(name: str, weight: Tensor) -> dict[str, Tensor]:
    if "_proj" not in name or not name.endswith(".weight"):
        return {name: weight}
    scale = weight.float().abs().max() / 448
    return {
        name: (weight.float() / scale).to(torch.float8_e4m3fn),
        name.replace(".weight", ".weight_scale"): scale,
        name.replace(".weight", ".input_scale"): torch.tensor(INPUT_SCALE),
    }
