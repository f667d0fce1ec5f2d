"""Attention backend for models with Multi-head Latent Attention (MLA)."""

from mla_backend import prefill
from mla_backend.batch import DecodeBatch, Shard, TableKind
from mla_backend.cache import append
from mla_backend.decode import DecodePlan, MLADecoder
from mla_backend.errors import InvalidInputError, KernelBuildError, MLABackendError, UnsupportedError
from mla_backend.geometry import MLAGeometry
from mla_backend.policy import Policy, Rates, default_rates
from mla_backend.rotary import RotaryAppend
from mla_backend.weights import AbsorbedWeights

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
    "append",
    "default_rates",
    "prefill",
]
