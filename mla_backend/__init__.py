"""Attention backend for models with Multi-head Latent Attention (MLA).

Names are imported where they are first used, so that `mla-backend --help` need not import torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_backend import prefill
    from mla_backend.batch import DecodeBatch, Shard, TableKind
    from mla_backend.cache import append
    from mla_backend.decode import DecodePlan, MLADecoder
    from mla_backend.errors import InvalidInputError, KernelBuildError, MLABackendError, UnsupportedError
    from mla_backend.geometry import MLAGeometry
    from mla_backend.policy import Policy, Rates, default_rates
    from mla_backend.rotary import RotaryAppend
    from mla_backend.weights import AbsorbedWeights

__version__: str

__all__ = [
    "AbsorbedWeights",
    "DecodeBatch",
    "DecodePlan",
    "InvalidInputError",
    "KernelBuildError",
    "MLABackendError",
    "MLADecoder",
    "MLAGeometry",
    "Policy",
    "Rates",
    "RotaryAppend",
    "Shard",
    "TableKind",
    "UnsupportedError",
    "__version__",
    "append",
    "default_rates",
    "prefill",
]

_MODULES = {
    "AbsorbedWeights": "weights",
    "DecodeBatch": "batch",
    "DecodePlan": "decode",
    "InvalidInputError": "errors",
    "KernelBuildError": "errors",
    "MLABackendError": "errors",
    "MLADecoder": "decode",
    "MLAGeometry": "geometry",
    "Policy": "policy",
    "Rates": "policy",
    "RotaryAppend": "rotary",
    "Shard": "batch",
    "TableKind": "batch",
    "UnsupportedError": "errors",
    "append": "cache",
    "default_rates": "policy",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            value: Any = importlib.metadata.version("mla-backend")
        except importlib.metadata.PackageNotFoundError:
            value = "0+checkout"  # that is not installed
    elif name in _MODULES:
        value = getattr(importlib.import_module(f"mla_backend.{_MODULES[name]}"), name)
    elif name == "prefill":
        value = importlib.import_module("mla_backend.prefill")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
