"""Absorbed or vanilla attention, chosen for each request on its own from a cost model.

For s new tokens on a prefix of P (L = P + s keys), per layer and head:

- vanilla expands all L latents into keys and values, ``2·L·d_c·(d_nope + d_v)`` FLOPs, and attends for
  ``2·s·(L - s/2)·(d_nope + d_rope + d_v)``;
- absorbed multiplies only the s queries and outputs by the same weights, ``2·s·d_c·(d_nope + d_v)``, but
  attends for ``2·s·(L - s/2)·(2·d_c + d_rope)``.

Counting FLOPs alone they meet, for P much larger than s, at
``s* = d_c·(d_nope + d_v) / (2·d_c - d_nope - d_v)`` whatever the number of heads: 171 for DeepSeek, 85 for
MiniCPM3, 398 for GLM-4.7-Flash. Achieved rates (:class:`Rates`) and the bytes of the expanded keys move it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_backend import costs
from mla_backend.costs import Cost
from mla_backend.errors import InvalidInputError
from mla_backend.geometry import MLAGeometry

# Long enough that a longer prefix changes the crossover by less than one token.
_LONG_PREFIX = 1 << 20


@dataclass(frozen=True, slots=True)
class Rates:
    """What the hardware achieves (not its peak), per GPU or for the whole CPU.

    Attributes:
        gemm_flops: FLOP/s of the projections.
        absorbed_flops: FLOP/s of absorbed attention with several query rows.
        vanilla_flops: FLOP/s of vanilla attention.
        bytes_per_s: memory bandwidth.
    """

    gemm_flops: float
    absorbed_flops: float
    vanilla_flops: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise InvalidInputError(f"Rates.{name} must be positive, got {getattr(self, name)!r}")


# For bf16. Measured by `mla-backend bench crossover` where a file is named, otherwise starting points for it.
DEFAULTS = {
    # The torch reference in bf16 on one AVX-512 core; more cores scale all of it, and only ratios matter.
    "cpu": Rates(gemm_flops=2.0e11, absorbed_flops=1.0e11, vanilla_flops=0.6e11, bytes_per_s=2.0e10),
    # A100: about 3/4 of the 312 TFLOP/s peak in GEMMs, half in FlashAttention-2, 1.6 of 2.0 TB/s.
    "sm80": Rates(gemm_flops=2.3e14, absorbed_flops=1.2e14, vanilla_flops=1.6e14, bytes_per_s=1.6e12),
    # L40S and RTX 4090: 165-180 TFLOP/s dense with fp32 accumulation, 0.9 TB/s.
    "sm89": Rates(gemm_flops=1.4e14, absorbed_flops=0.9e14, vanilla_flops=1.2e14, bytes_per_s=0.8e12),
    # H200, benchmarks/results/crossover-h200.json: 64 to 384 new tokens on 2,048 and 16,384 keys.
    "sm90": Rates(gemm_flops=2.65e14, absorbed_flops=3.54e14, vanilla_flops=2.85e14, bytes_per_s=4.65e12),
}


def default_rates(device: torch.device | str) -> Rates:
    """The :data:`DEFAULTS` entry for a device; a GPU newer than those listed counts as the newest of them."""
    device = torch.device(device)
    if device.type != "cuda":
        return DEFAULTS["cpu"]
    capability = torch.cuda.get_device_capability(device)
    if capability >= (9, 0):
        return DEFAULTS["sm90"]
    return DEFAULTS["sm89"] if capability == (8, 9) else DEFAULTS["sm80"]


@dataclass(frozen=True)
class Policy:
    """The choice for one model on one device. It depends on the request alone, never on the rest of its
    batch, so that batch mates and cache hits of others cannot change a request's tokens.

    Args:
        geometry: of this rank.
        rates: achieved rates; see :func:`default_rates`.
    """

    geometry: MLAGeometry
    rates: Rates

    def vanilla_seconds(self, query_len: float, prefix_len: float) -> float:
        """Modelled time of a layer's vanilla attention for one request, expansion of its keys included."""
        kv_len = query_len + prefix_len
        return self._seconds(costs.expand_keys(self.geometry, kv_len), self.rates.gemm_flops) + self._seconds(
            costs.vanilla_attention(self.geometry, query_len, kv_len), self.rates.vanilla_flops
        )

    def absorbed_seconds(self, query_len: float, prefix_len: float) -> float:
        """Modelled time of a layer's absorbed attention for one request, absorption included."""
        return self._seconds(costs.absorb(self.geometry, query_len), self.rates.gemm_flops) + self._seconds(
            costs.absorbed_attention(self.geometry, query_len, query_len + prefix_len),
            self.rates.absorbed_flops,
        )

    def absorbed(self, query_len: int, prefix_len: int) -> bool:
        """True if absorbed attention is modelled to be at least as fast for this request."""
        return self.absorbed_seconds(query_len, prefix_len) <= self.vanilla_seconds(query_len, prefix_len)

    def crossover(self, prefix_len: int) -> float:
        """The number of new tokens s* on a prefix from which vanilla is faster; 0.0 if it always is.

        inf if absorbed stays faster up to as many new tokens as a million.
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
        """The largest query length for which absorbed is chosen on a long prefix; at least 1, as decode is.

        An engine that must split its batch by query length alone (vLLM's reorder threshold) takes this.
        """
        return max(1, int(min(self.crossover(prefix_len), _LONG_PREFIX)))

    def _seconds(self, cost: Cost, flops_per_s: float) -> float:
        # Added, not overlapped: the expanded keys are written by one kernel and read back by others, and the
        # crossover seen on Hopper (250-300 tokens) is that of the sum.
        return cost.flops / flops_per_s + cost.bytes / self.rates.bytes_per_s
