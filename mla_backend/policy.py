"""The choice between absorbed and vanilla attention, made for each request separately by a cost model.

For s new tokens on a prefix of P tokens (L = P + s keys), FLOPs per layer and head:

- Vanilla expands all L latents into keys and values, ``2·L·d_c·(d_nope + d_v)``, and attends with
  ``2·s·(L - s/2)·(d_nope + d_rope + d_v)``.
- Absorbed multiplies only the s queries and outputs by the same weights, ``2·s·d_c·(d_nope + d_v)``, but
  attends with ``2·s·(L - s/2)·(2·d_c + d_rope)``.

For P much larger than s, both need equally many FLOPs at
``s* = d_c·(d_nope + d_v) / (2·d_c - d_nope - d_v)`` for any number of heads: 171 new tokens for DeepSeek, 85
for MiniCPM3, 398 for GLM-4.7-Flash. Achieved rates (:class:`Rates`) and the bytes of the expanded keys move
this crossover.
"""

from __future__ import annotations

import json
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from mla_backend import costs
from mla_backend.checks import is_number
from mla_backend.costs import Cost
from mla_backend.device import with_index
from mla_backend.errors import InvalidInputError
from mla_backend.geometry import MLAGeometry

# A prefix of so many tokens that a longer one changes the crossover by less than one token.
_LONG_PREFIX = 1 << 20


@dataclass(frozen=True, slots=True)
class Rates:
    """Achieved rates, not peaks, of one GPU or of the CPU. Only their ratios decide.

    Attributes:
        gemm_flops: FLOP/s of the projections.
        absorbed_flops: FLOP/s of absorbed attention with several query tokens per request.
        vanilla_flops: FLOP/s of vanilla attention.
        bytes_per_s: memory bandwidth.

    Raises:
        InvalidInputError: a rate is not a number greater than 0. (inf means that something costs nothing.)
    """

    gemm_flops: float
    absorbed_flops: float
    vanilla_flops: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            rate = getattr(self, name)
            if not is_number(rate) or not rate > 0:
                raise InvalidInputError(f"Rates.{name} must be a positive number, got {rate!r}")


SHIPPED_RATES = {
    # Plain torch on one AVX-512 core. More cores scale all rates, and only their ratios matter.
    "cpu": Rates(gemm_flops=2.0e11, absorbed_flops=1.0e11, vanilla_flops=0.6e11, bytes_per_s=2.0e10),
    # benchmarks/results/crossover-h200.json: 128 to 1,536 new tokens on 2,048 and 16,384 keys.
    "H200": Rates(gemm_flops=2.55e14, absorbed_flops=6.04e14, vanilla_flops=5.24e14, bytes_per_s=4.54e12),
}
"""In bf16, of the CPU and of the GPU that were measured."""

FLOPS_ALONE = Rates(gemm_flops=1.0, absorbed_flops=1.0, vanilla_flops=1.0, bytes_per_s=math.inf)
"""Every product at the same rate, and bytes for free: for GPUs of which nothing is known."""


def default_rates(device: torch.device | str) -> Rates:
    """The rates of a device, from the file that MLA_BACKEND_RATES names, or else :func:`shipped_rates`.

    Raises:
        InvalidInputError: that file cannot be read, or was not measured on this device in a 16-bit dtype; or
            no device is called that.
        UnsupportedError: torch sees no such GPU.
    """
    return default_rates_and_origin(device)[0]


def default_rates_and_origin(device: torch.device | str) -> tuple[Rates, str]:
    """:func:`default_rates`, and where they come from in words."""
    if path := os.environ.get("MLA_BACKEND_RATES"):
        return _read_rates(path, device_name(device)), f"MLA_BACKEND_RATES={path}"
    return _shipped(device)


def shipped_rates(device: torch.device | str) -> Rates:
    """A device's rates without measuring on it: those of :func:`rates_of` its compute capability."""
    return _shipped(device)[0]


def rates_of(capability: tuple[int, int]) -> tuple[Rates, str]:
    """Rates of the GPUs of a compute capability, and where they come from in words.

    Hopper GPUs have the rates measured on an H200. On other GPUs nothing was measured, so there the choice is
    by FLOPs alone.
    """
    if capability[0] == 9:
        return SHIPPED_RATES["H200"], "rates measured on an H200"
    return FLOPS_ALONE, "FLOPs of both alone; `mla-backend bench crossover` measures a GPU's rates"


def device_name(device: torch.device | str) -> str:
    """The device's name in results files."""
    device = with_index(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def _shipped(device: torch.device | str) -> tuple[Rates, str]:
    device = with_index(device)
    if device.type != "cuda":
        return SHIPPED_RATES["cpu"], "shipped rates of one CPU core"
    return rates_of(torch.cuda.get_device_capability(device))


def _read_rates(path: str, device: str) -> Rates:
    """Rates from a file that `mla-backend bench crossover -o` wrote on a device of this name."""
    try:
        written = json.loads(Path(path).read_text())
        measured_on, dtype, rates = written["machine"]["device"], written["dtype"], Rates(**written["rates"])
    except OSError as error:
        problem = str(error)
    except (ValueError, KeyError, TypeError) as error:
        problem = f"not a results file of that command ({type(error).__name__}: {error})"
    else:
        if measured_on != device:
            problem = f"measured on {measured_on}, not on {device}"
        elif dtype not in ("bfloat16", "float16"):
            problem = f"measured in {dtype}, not in bfloat16 or float16"
        else:
            return rates
    raise InvalidInputError(
        f"MLA_BACKEND_RATES={path}: {problem}; name a file that `mla-backend bench crossover -o FILE` wrote "
        "on this machine, or unset the variable"
    )


@dataclass(frozen=True)
class Policy:
    """Chooses for each request between absorbed attention (:class:`MLADecoder`) and vanilla attention
    (:func:`mla_backend.prefill.prefill`), for one model on one device.

    The choice depends only on the request, so the rest of a batch cannot change a request's tokens.

    Args:
        geometry: of one rank.
        rates: of the device, for example from :func:`default_rates`.
    """

    geometry: MLAGeometry
    rates: Rates

    def vanilla_seconds(self, query_len: float, prefix_len: float) -> float:
        """Modelled seconds of one layer's vanilla attention for a request, with the expansion of its keys."""
        kv_len = query_len + prefix_len
        return self._seconds(costs.expand_keys(self.geometry, kv_len), self.rates.gemm_flops) + self._seconds(
            costs.vanilla_attention(self.geometry, query_len, kv_len), self.rates.vanilla_flops
        )

    def absorbed_seconds(self, query_len: float, prefix_len: float) -> float:
        """Modelled seconds of one layer's absorbed attention for a request, with the absorption."""
        return self._seconds(costs.absorb(self.geometry, query_len), self.rates.gemm_flops) + self._seconds(
            costs.absorbed_attention(self.geometry, query_len, query_len + prefix_len),
            self.rates.absorbed_flops,
        )

    def absorbed(self, query_len: float, prefix_len: float) -> bool:
        """True if absorbed attention is modelled to be at least as fast for this request."""
        return self.absorbed_seconds(query_len, prefix_len) <= self.vanilla_seconds(query_len, prefix_len)

    def crossover(self, prefix_len: int) -> float:
        """The number of new tokens s* on a prefix from which vanilla is faster.

        0.0 if vanilla is always faster, inf if absorbed is still faster at a million new tokens.
        """
        low, high = 0.0, float(_LONG_PREFIX)
        if not self.absorbed(1, prefix_len):
            return 0.0
        if self.absorbed(high, prefix_len):
            return float("inf")
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.absorbed(middle, prefix_len) else (low, middle)
        return (low + high) / 2

    def absorbed_query_limit(self, prefix_len: int = _LONG_PREFIX) -> int:
        """The most new tokens for which absorbed is chosen on a long prefix. At least 1: decode is absorbed.

        For an engine that splits its batch by query length alone (vLLM's reorder threshold).
        """
        return max(1, int(min(self.crossover(prefix_len), _LONG_PREFIX)))

    def _seconds(self, cost: Cost, flops_per_s: float) -> float:
        # A sum, not a maximum: one kernel writes the expanded keys and others read them back.
        return cost.flops / flops_per_s + cost.bytes / self.rates.bytes_per_s
