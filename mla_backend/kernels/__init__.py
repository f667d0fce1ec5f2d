"""CUDA implementations of absorbed attention, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from mla_backend.errors import UnsupportedError
from mla_backend.jit import KernelVariant, arch_name, capability_of
from mla_backend.kernels import append, head_product, hopper, merge, portable, prefill
from mla_backend.kernels.base import DIMENSIONS, FIRST_CAPABILITY, Config, configs_of
from mla_backend.spec import DecoderSpec, Implementation

__all__ = ["NAMES", "choose", "largest_query_len", "select", "shipped_variants", "variants_of"]


class _Family(NamedTuple):
    """Kernels that make an implementation.

    Attributes:
        make: makes the implementation for a spec.
        refusal: why it cannot serve a spec on a device of a compute capability, or None.
        config_of: the kernel for a spec, a number of query rows and an architecture.
    """

    make: Callable[[DecoderSpec], Implementation]
    refusal: Callable[[DecoderSpec, tuple[int, int]], str | None]
    config_of: Callable[[DecoderSpec, int, str], Config]


# The first one that can serve a spec is the best.
_FAMILIES = {
    "hopper": _Family(hopper.HopperDecode, hopper.refusal, hopper.config_of),
    "portable": _Family(portable.PortableDecode, portable.refusal, portable.config_of),
}

NAMES = tuple(_FAMILIES)
"""The names of the implementations, for `MLADecoder(implementation=...)`."""


def largest_query_len(num_heads: int) -> int:
    """The number of query tokens of a request up to which the choice of kernel depends on that number."""
    return -(-max(hopper.CLUSTER_ROWS, portable.MAX_ROWS) // num_heads)


def choose(spec: DecoderSpec, capability: tuple[int, int], wanted: str = "auto") -> tuple[str | None, str]:
    """The name of the implementation for ``spec``, and one line saying why; or (None, why there is none).

    Args:
        spec: of the decoder; its device need not exist here.
        capability: compute capability of the device that it will run on.
        wanted: "auto", or one of `NAMES`.
    """
    reason = f"compute capability {capability[0]}.{capability[1]}"
    for name in NAMES if wanted == "auto" else [wanted]:
        why_not = _FAMILIES[name].refusal(spec, capability)
        if why_not is None:
            return name, reason
        reason = why_not
    return None, reason


def select(spec: DecoderSpec, wanted: str) -> tuple[Implementation | None, str]:
    """The implementation for ``spec``, and one line saying why it was taken, or (None, why there is none).

    Args:
        spec: a spec on a CUDA device.
        wanted: as for `choose`.

    Raises:
        UnsupportedError: the implementation ``wanted`` by name cannot serve ``spec``.
    """
    name, reason = choose(spec, torch.cuda.get_device_capability(spec.device), wanted)
    if name is not None:
        return _FAMILIES[name].make(spec), reason
    if wanted != "auto":
        raise UnsupportedError(f"implementation {wanted!r} cannot serve this: {reason}")
    return None, reason


def variants_of(
    spec: DecoderSpec, capability: tuple[int, int], *, with_append: bool = False
) -> list[KernelVariant]:
    """The kernels that decoders of ``spec`` load with ``auto``; none if no kernel serves it.

    Creates no CUDA context.

    Args:
        spec, capability: as for `choose`.
        with_append: also the kernel of a `RotaryAppend`.
    """
    name, _ = choose(spec, capability)
    if name is None:
        return []
    arch = arch_name(capability)
    config_of = _FAMILIES[name].config_of
    variants = [config.variant() for config in configs_of(spec, lambda rows: config_of(spec, rows, arch))]
    return variants + [append.variant(arch)] * with_append


def shipped_variants(arch: str | None = None) -> list[KernelVariant]:
    """Every kernel variant that common models need, for ``mla-backend build`` and the compile tests.

    Args:
        arch: only variants for this architecture, for which "90" is "90a". If none is listed for it and it is
            8.0 or newer, these are the portable kernels in bf16 for DeepSeek's dimensions.
    """
    arch = arch and arch_name(capability_of(arch))
    variants = hopper.shipped_variants() + portable.shipped_variants()
    of_arch = [variant for variant in variants if arch is None or variant.arch == arch]
    if arch is not None and not of_arch and capability_of(arch) >= FIRST_CAPABILITY:
        of_arch = portable.variants(arch, torch.bfloat16, DIMENSIONS[0])
    archs = sorted({variant.arch for variant in of_arch})
    for_all = [make(name) for name in archs for make in (append.variant, merge.variant)]
    if arch in (None, "90a"):
        for_all += head_product.shipped_variants()
    return of_arch + for_all + [v for name in archs for v in prefill.shipped_variants(name)]
