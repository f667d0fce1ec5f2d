"""Checkpoints whose kv_b_proj is quantized to int4 as by GPTQ, which leaves no `weight`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.support.quantized_checkpoint import quantized_checkpoint

BITS, GROUP = 4, 128
PER_WORD = 32 // BITS
ZERO = 8  # the integer that stands for 0

QUANTIZATION = {"quant_method": "gptq", "bits": BITS, "group_size": GROUP, "sym": True, "desc_act": False}
# All modules but kv_b_proj keep their weights.
QUANTIZATION |= {"dynamic": {r"-:^(?!.*kv_b_proj).*$": {}}}


def gptq_checkpoint(source: Path, folder: Path) -> Path:
    """A copy of a small checkpoint with kv_b_proj in int4: each 128 inputs of an output have a scale."""
    return quantized_checkpoint(source, folder, QUANTIZATION, _packed)


def dequantized(name: str, weight: Tensor) -> Tensor:
    """What the copy's weight ``name`` stands for."""
    if "kv_b_proj" not in name:
        return weight
    values, scales = _quantized(weight)
    return ((values - ZERO) * scales).flatten(0, 1).T.to(weight.dtype).contiguous()


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers [groups, 128, outputs] and scales [groups, 1, outputs]."""
    groups = weight.float().T.unflatten(0, (-1, GROUP))
    scales = (groups.abs().amax(1, keepdim=True) / (ZERO - 1)).half().float()
    return (groups / scales).round().clamp(-ZERO, ZERO - 1) + ZERO, scales


def _packed(name: str, weight: Tensor) -> dict[str, Tensor]:
    if "kv_b_proj" not in name:
        return {name: weight}
    values, scales = _quantized(weight)
    zeros = torch.full((values.shape[0], weight.shape[0]), ZERO - 1)  # GPTQ stores one less
    tensors = {
        "qweight": _words(values.flatten(0, 1).long(), 0),
        "qzeros": _words(zeros, 1),
        "scales": scales[:, 0].half(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return {f"{name.removesuffix('weight')}{kind}": tensor for kind, tensor in tensors.items()}


def _words(values: Tensor, dim: int) -> Tensor:
    """Eight consecutive integers along ``dim`` in one int32, the first in the lowest bits."""
    shifts = torch.arange(0, 32, BITS)
    values = values.unflatten(dim, (-1, PER_WORD)).movedim(dim + 1, -1)
    words = (values << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()
