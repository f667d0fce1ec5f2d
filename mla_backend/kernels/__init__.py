"""CUDA implementations of absorbed attention, and which one serves what."""

from __future__ import annotations

import torch

from mla_backend.decode import DecoderSpec, Implementation
from mla_backend.errors import UnsupportedError
from mla_backend.jit import KernelVariant
from mla_backend.kernels import sm90

__all__ = ["select", "shipped_variants"]


def select(spec: DecoderSpec, wanted: str) -> tuple[Implementation | None, str]:
    """The implementation for ``spec``, and one line saying why it was taken, or (None, why there is none).

    Args:
        spec: a spec on a CUDA device.
        wanted: "auto" or "sm90".

    Raises:
        UnsupportedError: the implementation asked for by name cannot serve ``spec``.
    """
    capability = torch.cuda.get_device_capability(spec.device)
    why_not = sm90.refusal(spec, capability)
    if why_not is None:
        return sm90.Sm90Decode(spec), f"compute capability {capability[0]}.{capability[1]}"
    if wanted != "auto":
        raise UnsupportedError(f"implementation {wanted!r} cannot serve this: {why_not}")
    return None, why_not


def shipped_variants(arch: str | None = None) -> list[KernelVariant]:
    """Every kernel variant that common models need, for ``mla-backend build`` and the compile tests."""
    variants = sm90.shipped_variants()
    return [variant for variant in variants if arch is None or variant.arch == arch]
