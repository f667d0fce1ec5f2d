"""A copy of a small checkpoint with quantized weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

Change = Callable[[str, Tensor], dict[str, Tensor]]
"""Of a weight, by its name: the tensors that take its place."""


def quantized_checkpoint(
    source: Path, folder: Path, quantization: dict, change: Change, further: dict[str, Tensor] | None = None
) -> Path:
    """Copy a checkpoint, give it a ``quantization_config``, and change its weights.

    Args:
        further: tensors that are added.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    weights = load_file(folder / "model.safetensors")
    changed = {n: t for name, weight in weights.items() for n, t in change(name, weight).items()}
    save_file(changed | (further or {}), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
