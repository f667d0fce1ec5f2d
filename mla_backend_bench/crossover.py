"""Measures from how many new tokens vanilla attention is faster than absorbed, and fits rates to it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_backend import costs
from mla_backend.costs import Cost
from mla_backend.geometry import MLAGeometry
from mla_backend.policy import Policy, Rates, shipped_rates
from mla_backend.prefill import library, prefill
from mla_backend.weights import AbsorbedWeights
from mla_backend_bench import ceilings, environment
from mla_backend_bench.cases import KV_LORA_RANK, ROPE_DIM, SOFTMAX_SCALE, Case, Inputs
from mla_backend_bench.implementations import IMPLEMENTATIONS
from mla_backend_bench.results import ResultsFile
from mla_backend_bench.timing import Replay, cold_cache_bytes, measure_in_turn

PREFIX_LENS = (2048, 8192, 32768)
QUERY_LENS = (16, 32, 64, 128, 192, 256, 384, 512, 1024)
_NOPE_DIM = 128
_VALUE_DIM = 128
_PAGE_SIZE = 64
_ROUNDS = 3

_Attend = Callable[..., Any]  # (q, k, v, start_q, start_k, max_q, max_k, scale)


@dataclass(frozen=True)
class Row:
    """The times in µs of both ways to compute one request's attention in one layer.

    Attributes:
        prefix_len: keys before the new tokens.
        query_len: new tokens.
        expand_us, vanilla_us: vanilla, which expands all latents to keys and values, and attends to these.
        absorb_us, absorbed_us: absorbed, which multiplies queries by W_UK and outputs by W_UV, and attends to
            the latents.
    """

    prefix_len: int
    query_len: int
    expand_us: float
    vanilla_us: float
    absorb_us: float
    absorbed_us: float

    @property
    def absorbed_over_vanilla(self) -> float:
        return (self.absorb_us + self.absorbed_us) / (self.expand_us + self.vanilla_us)


@dataclass(frozen=True)
class Crossover:
    """New tokens from which vanilla is faster on a prefix: measured, and by the fitted and shipped rates.

    None means that absorbed is always faster.
    """

    prefix_len: int
    measured: float | None
    fitted: float | None
    shipped: float | None

    @classmethod
    def of(cls, prefix_len: int, *query_lens: float) -> Crossover:
        return cls(prefix_len, *(None if math.isinf(length) else length for length in query_lens))


@dataclass
class Calibration(ResultsFile):
    """The content of a results file. `policy.default_rates` reads `rates`, `dtype` and the device's name."""

    dtype: str
    vanilla_library: str
    absorbed_implementation: str
    geometry: MLAGeometry
    rates: Rates
    crossovers: list[Crossover]
    rows: list[Row]


def geometry_of(num_heads: int) -> MLAGeometry:
    """DeepSeek's attention with ``num_heads`` query heads."""
    return MLAGeometry(
        num_heads=num_heads,
        kv_lora_rank=KV_LORA_RANK,
        qk_nope_head_dim=_NOPE_DIM,
        qk_rope_head_dim=ROPE_DIM,
        v_head_dim=_VALUE_DIM,
        softmax_scale=SOFTMAX_SCALE,
        hidden_size=2048,
    )


def run(
    num_heads: int,
    prefix_lens: Iterable[int],
    query_lens: Iterable[int],
    device: torch.device,
    dtype: torch.dtype,
    on_row: Callable[[Row], None],
    commit: str | None = None,
) -> Calibration:
    """Measure every combination of prefix and query length, and fit the policy's rates to the times.

    A GPU runs our decode kernel; a CPU the implementation for CPUs.

    Args:
        num_heads: query heads on this device.
        on_row: called with each row as soon as it is measured.
        commit: recorded in the results; by default `environment.commit()`.

    Raises:
        UnsupportedError: none of our kernels serves this GPU.
        KernelBuildError: a kernel cannot be built or loaded.
    """
    geometry = geometry_of(num_heads)
    bytes_per_s = max(ceilings.read_rates(device).values())
    rows: list[Row] = []
    prefix_lens = sorted(prefix_lens)
    for prefix_len, query_len in itertools.product(prefix_lens, sorted(query_lens)):
        rows.append(_measure(geometry, prefix_len, query_len, device, dtype))
        on_row(rows[-1])
    rates = fit(geometry, rows, bytes_per_s)
    fitted, shipped = Policy(geometry, rates), Policy(geometry, shipped_rates(device))
    return Calibration(
        **environment.origin(device, commit),
        dtype=str(dtype).removeprefix("torch."),
        vanilla_library=" or ".join(_vanilla_libraries(device, dtype)),
        absorbed_implementation=_absorbed_implementation(device),
        geometry=geometry,
        rates=rates,
        crossovers=[
            Crossover.of(p, measured_crossover(rows, p), fitted.crossover(p), shipped.crossover(p))
            for p in prefix_lens
        ],
        rows=rows,
    )


def fit(geometry: MLAGeometry, rows: Iterable[Row], bytes_per_s: float) -> Rates:
    """The rates with which `policy`'s model, FLOPs / rate + bytes / bandwidth, predicts the measured times.

    Each rate is the median over the rows within a factor of two of the crossover, where the choice matters,
    or over all rows if there are none. Bytes account for at most half of a stage's time: a stage whose bytes
    alone explain its time says little about its arithmetic.
    """
    rows = list(rows)
    rows = [row for row in rows if 0.5 <= row.absorbed_over_vanilla <= 2] or rows

    def rate(cost: Cost, microseconds: float) -> float:
        seconds = microseconds * 1e-6
        return cost.flops / max(seconds - cost.bytes / bytes_per_s, seconds / 2)

    gemm, absorbed, vanilla = [], [], []
    for row in rows:
        kv_len = row.prefix_len + row.query_len
        gemm.append(rate(costs.expand_keys(geometry, kv_len), row.expand_us))
        absorbed.append(rate(costs.absorbed_attention(geometry, row.query_len, kv_len), row.absorbed_us))
        vanilla.append(rate(costs.vanilla_attention(geometry, row.query_len, kv_len), row.vanilla_us))
    return Rates(
        gemm_flops=statistics.median(gemm),
        absorbed_flops=statistics.median(absorbed),
        vanilla_flops=statistics.median(vanilla),
        bytes_per_s=bytes_per_s,
    )


def measured_crossover(rows: Iterable[Row], prefix_len: int) -> float:
    """The query length at which the measured times on a prefix cross.

    It is interpolated, in log-log, between two measured query lengths. 0 if vanilla is faster at the shortest
    one, inf if absorbed is faster at all of them.
    """
    points = sorted(
        (row.query_len, row.absorbed_over_vanilla) for row in rows if row.prefix_len == prefix_len
    )
    if points[0][1] > 1:
        return 0.0
    for (left, low), (right, high) in itertools.pairwise(points):
        if high > 1:
            share = -math.log(low) / (math.log(high) - math.log(low))
            return left * (right / left) ** share
    return math.inf


def _measure(
    geometry: MLAGeometry, prefix_len: int, query_len: int, device: torch.device, dtype: torch.dtype
) -> Row:
    kv_len = prefix_len + query_len
    case = Case(1, kv_len, geometry.num_heads, query_len, _PAGE_SIZE)
    inputs = Inputs(case, device, dtype, cold_cache_bytes(device))
    weight_rows = geometry.num_heads * (geometry.qk_nope_head_dim + geometry.v_head_dim)
    weight = torch.randn(weight_rows, geometry.kv_lora_rank, device=device, dtype=dtype)
    weight /= geometry.kv_lora_rank**0.5
    q = torch.randn(query_len, geometry.num_heads, geometry.qk_head_dim, device=device, dtype=dtype)

    stages = _absorbed_stages(geometry, inputs, weight, q)
    expand = _expansion(geometry, inputs, weight)
    stages["expand_us"] = Replay(expand, inputs.num_layers, device)
    k, v = expand(0)
    bounds = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (query_len, kv_len)]

    def vanilla(attend: _Attend) -> Callable[[int], Any]:
        return lambda _: attend(q, k, v, *bounds, query_len, kv_len, geometry.softmax_scale)

    libraries = {
        name: Replay(vanilla(attend), 1, device) for name, attend in _vanilla_libraries(device, dtype).items()
    }
    times = measure_in_turn(stages | libraries, _ROUNDS)
    microseconds = {name: times[name].median * 1e6 for name in stages}
    vanilla_us = min(times[name].median for name in libraries) * 1e6
    return Row(prefix_len, query_len, vanilla_us=vanilla_us, **microseconds)


def _expansion(
    geometry: MLAGeometry, inputs: Inputs, weight: Tensor
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """A function of the layer that expands all its latents to keys [S, H, 192] and values [S, H, 128]."""
    latents = inputs.caches.flatten(1, 2)[:, : inputs.case.seq_len]
    heads, rank = geometry.num_heads, geometry.kv_lora_rank

    def expand(layer: int) -> tuple[Tensor, Tensor]:
        kv = (latents[layer, :, :rank] @ weight.T).unflatten(-1, (heads, -1))
        k_nope, v = kv.split([geometry.qk_nope_head_dim, geometry.v_head_dim], dim=-1)
        k_rope = latents[layer, :, None, rank:].expand(-1, heads, -1)
        return torch.cat([k_nope, k_rope], dim=-1), v

    return expand


def _absorbed_stages(geometry: MLAGeometry, inputs: Inputs, weight: Tensor, q: Tensor) -> dict[str, Replay]:
    """The two stages of absorbed attention, by the names of their columns in `Row`."""
    weights = AbsorbedWeights.from_kv_b_proj(weight, geometry)
    implementation = IMPLEMENTATIONS[_absorbed_implementation(inputs.device)](inputs)
    implementation.plan()
    o_latent = implementation.run(0)

    def absorb(_: int) -> Tensor:
        weights.absorb_query(q[..., : geometry.qk_nope_head_dim])
        return weights.project_output(o_latent)

    return {
        "absorb_us": Replay(absorb, 1, inputs.device),
        "absorbed_us": Replay(implementation.run, inputs.num_layers, inputs.device),
    }


def _absorbed_implementation(device: torch.device) -> str:
    return "mla_backend" if device.type == "cuda" else "torch"


def _vanilla_libraries(device: torch.device, dtype: torch.dtype) -> dict[str, _Attend]:
    """The libraries, by name, on which engines would run vanilla prefill here. The fastest one counts."""

    def shipped(q, k, v, start_q, start_k, max_q, max_k, scale):
        return prefill(q, k, v, start_q, start_k, max_q, max_k, scale, causal=True)

    libraries: dict[str, _Attend] = {library(device, dtype, _NOPE_DIM + ROPE_DIM, _VALUE_DIM): shipped}
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:
        return libraries

    def flash3(q, k, v, start_q, start_k, max_q, max_k, scale):
        return flash_attn_varlen_func(
            q, k, v, max_q, start_q, max_k, start_k, softmax_scale=scale, causal=True, fa_version=3
        )

    if is_fa_version_supported(3):
        libraries["vLLM's FlashAttention-3"] = flash3
    return libraries
