"""Checkpoints as ModelOpt writes them: an fp8 cache with scales of its own, and fp8 weights if wanted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

INPUT_SCALE = 0.05
"""Of activations with a variance of about 1."""


def modelopt_checkpoint(source: Path, folder: Path, k_scales: list[float], *, fp8_weights: bool) -> Path:
    """Copy a checkpoint, and give it `kv_cache_quant_algo: FP8` and a k_scale and v_scale in each layer.

    Args:
        k_scales: of the layers. Latent attention has no values of its own: v_scale is the same.
        fp8_weights: also quantize linear layers, per tensor. Otherwise they are excluded.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "ignore": ["lm_head"] if fp8_weights else ["*"],
    }
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    weights = load_file(folder / "model.safetensors")
    if fp8_weights:
        weights = {n: t for name, weight in weights.items() for n, t in _quantized(name, weight).items()}
    for i, scale in enumerate(k_scales):
        for which in "kv":
            name = f"model.layers.{i}.self_attn.{which}_proj.{which}_scale"
            weights[name] = torch.tensor(scale, dtype=torch.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _quantized(name: str, weight: Tensor) -> dict[str, Tensor]:
    if "_proj" not in name or not name.endswith(".weight"):
        return {name: weight}
    scale = weight.float().abs().max() / 448
    return {
        name: (weight.float() / scale).to(torch.float8_e4m3fn),
        name.replace(".weight", ".weight_scale"): scale,
        name.replace(".weight", ".input_scale"): torch.tensor(INPUT_SCALE),
    }
