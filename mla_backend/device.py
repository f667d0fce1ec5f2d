"""Devices, named as tensors name them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from mla_backend.errors import InvalidInputError, UnsupportedError


def with_index(device: torch.device | str) -> torch.device:
    """The device as tensors have it: "cuda" means the current GPU with its index, "cpu:0" the CPU.

    Raises:
        InvalidInputError: no device is called that.
        UnsupportedError: torch sees no such GPU, or the device is neither a CUDA GPU nor the CPU.
    """
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInputError(
            f"device must be one of torch's, such as cuda, cuda:1 or cpu, got {device!r}"
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise UnsupportedError(f"mla_backend runs on CUDA GPUs and on the CPU, not on {str(device)!r}")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        built = "" if torch.version.cuda else ", because it is built without CUDA"
        raise UnsupportedError(f"there is no device {str(device)!r}: torch sees {count} GPUs{built}")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which products keep the dtype of their operands, also under ``torch.autocast``."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def is_captured(device: torch.device) -> bool:
    """Whether launches on a device go to a CUDA graph, instead of running now."""
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():  # nearly always; then nothing need be switched
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
