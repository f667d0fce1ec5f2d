"""Checkpoints with weights in fp8 blocks, as DeepSeek-V3's own are."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from tests.support.quantized_checkpoint import quantized_checkpoint

BLOCK = 128


def block_fp8_checkpoint(source: Path, folder: Path) -> Path:
    """A copy of a small checkpoint with linear layers in e4m3: each 128 x 128 weights have a scale."""
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    quantization["weight_block_size"] = [BLOCK, BLOCK]
    return quantized_checkpoint(source, folder, quantization, _quantized)


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
