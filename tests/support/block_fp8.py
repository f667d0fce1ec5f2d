"""Checkpoints with weights in fp8 blocks, as DeepSeek-V3's own are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128


def block_fp8_checkpoint(source: Path, folder: Path) -> Path:
    """A copy of a small checkpoint with linear layers in e4m3: each 128 x 128 weights have a scale."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    quantization["weight_block_size"] = [BLOCK, BLOCK]
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    weights = load_file(folder / "model.safetensors")
    quantized = {n: t for name, weight in weights.items() for n, t in _quantized(name, weight).items()}
    save_file(quantized, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _quantized(name: str, weight: Tensor) -> dict[str, Tensor]:
    if "_proj" not in name or not name.endswith(".weight") or "eh_proj" in name:
        return {name: weight}
    rows, columns = weight.shape
    padded = pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    values = (blocks / scales).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return {
        name: values.to(torch.float8_e4m3fn).contiguous(),
        f"{name}_scale_inv": scales[:, 0, :, 0].contiguous(),
    }
