"""From how many new tokens on vanilla beats absorbed attention here, and the rates that predict it."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_backend import costs
from mla_backend.bench import environment, read_ceiling
from mla_backend.bench.cases import KV_LORA_RANK, ROPE_DIM, SOFTMAX_SCALE, Case, Inputs
from mla_backend.bench.decode import cold_cache_bytes
from mla_backend.bench.implementations import IMPLEMENTATIONS
from mla_backend.bench.timing import Replay, measure_in_turn
from mla_backend.costs import Cost
from mla_backend.geometry import MLAGeometry
from mla_backend.policy import Policy, Rates, shipped_rates
from mla_backend.prefill import library, prefill
from mla_backend.weights import AbsorbedWeights

PREFIX_LENS = (2048, 8192, 32768)
QUERY_LENS = (16, 32, 64, 128, 192, 256, 384, 512, 1024)
_NOPE_DIM = 128
_VALUE_DIM = 128
_PAGE_SIZE = 64
_ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """One request's attention in one layer: both ways, each in two stages, in µs.

    Vanilla expands the latents of all keys (`expand_us`) and attends (`vanilla_us`); absorbed multiplies
    queries and outputs by W_UK and W_UV (`absorb_us`) and attends to the latents (`absorbed_us`).
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
    """New tokens from which vanilla is faster on a prefix: measured, by the fitted and the shipped rates."""

    prefix_len: int
    measured: float
    fitted: float
    shipped: float


@dataclass(frozen=True)
class Calibration:
    """All that a results file holds; `policy.default_rates` reads `rates`, `dtype` and the device's name."""

    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    dtype: str
    vanilla_library: str
    absorbed_implementation: str
    geometry: MLAGeometry
    rates: Rates
    crossovers: list[Crossover]
    rows: list[Row]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def geometry_of(num_heads: int) -> MLAGeometry:
    """DeepSeek's attention with `num_heads` heads on this device."""
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
    """Measure each combination, `on_row` as it is done, and fit the policy's rates to all of them.

    Raises:
        UnsupportedError: no kernel of ours serves this GPU (a CPU is measured in plain torch).
    """
    geometry = geometry_of(num_heads)
    bytes_per_s = max(read_ceiling.measure(device).values())
    rows: list[Row] = []
    prefix_lens, query_lens = sorted(prefix_lens), sorted(query_lens)
    for prefix_len in prefix_lens:
        for query_len in query_lens:
            rows.append(_measure(geometry, prefix_len, query_len, device, dtype))
            on_row(rows[-1])
    rates = fit(geometry, rows, bytes_per_s)
    fitted, shipped = Policy(geometry, rates), Policy(geometry, shipped_rates(device))
    return Calibration(
        machine=environment.machine(device),
        versions=environment.versions(),
        commit=commit or environment.commit(),
        dtype=str(dtype).removeprefix("torch."),
        vanilla_library=" or ".join(name for name, _ in _vanilla_libraries(device, dtype)),
        absorbed_implementation=_absorbed_implementation(device),
        geometry=geometry,
        rates=rates,
        crossovers=[
            Crossover(p, measured_crossover(rows, p), fitted.crossover(p), shipped.crossover(p))
            for p in prefix_lens
        ],
        rows=rows,
    )


def fit(geometry: MLAGeometry, rows: Iterable[Row], bytes_per_s: float) -> Rates:
    """The rates with which `policy`'s model, FLOPs / rate + bytes / bandwidth, meets the measured times.

    Each is the median over the rows within a factor of two of the crossover, where the choice is made (over
    all, if there are none). A stage whose bytes alone explain its time says little of its arithmetic: they
    are taken to account for half of it at most.
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
    """Where the measured times cross on a prefix, on a line between neighbouring query lengths in log-log.

    0 if vanilla is faster from the first query length on, inf if absorbed is to the last.
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
    g, kv_len = geometry, prefix_len + query_len
    case = Case(1, kv_len, g.num_heads, query_len, _PAGE_SIZE)
    inputs = Inputs(case, device, dtype, cold_cache_bytes(device))
    latents = inputs.caches.flatten(1, 2)[:, :kv_len]
    weight = torch.randn(
        g.num_heads * (g.qk_nope_head_dim + g.v_head_dim), g.kv_lora_rank, device=device, dtype=dtype
    )
    weight /= g.kv_lora_rank**0.5
    absorbed_weights = AbsorbedWeights.from_kv_b_proj(weight, g)
    q = torch.randn(query_len, g.num_heads, g.qk_head_dim, device=device, dtype=dtype)

    def expand(layer: int) -> tuple[Tensor, Tensor]:
        kv = (latents[layer, :, : g.kv_lora_rank] @ weight.T).unflatten(-1, (g.num_heads, -1))
        k_nope, v = kv.split([g.qk_nope_head_dim, g.v_head_dim], dim=-1)
        k_rope = latents[layer, :, None, g.kv_lora_rank :].expand(-1, g.num_heads, -1)
        return torch.cat([k_nope, k_rope], dim=-1), v

    k, v = expand(0)
    bounds = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (query_len, kv_len)]

    def vanilla(attend: Callable[..., Any]) -> Callable[[int], Any]:
        return lambda _: attend(q, k, v, *bounds, query_len, kv_len, g.softmax_scale)

    decoder = IMPLEMENTATIONS[_absorbed_implementation(device)](inputs)
    decoder.plan()
    o_latent = decoder.run(0)

    def absorb(_: int) -> Tensor:
        absorbed_weights.absorb_query(q[..., : g.qk_nope_head_dim])
        return absorbed_weights.project_output(o_latent)

    stages = {
        "expand_us": Replay(expand, inputs.num_layers, device),
        "absorb_us": Replay(absorb, 1, device),
        "absorbed_us": Replay(decoder.run, inputs.num_layers, device),
    }
    libraries = {
        name: Replay(vanilla(attend), 1, device) for name, attend in _vanilla_libraries(device, dtype)
    }
    seconds = measure_in_turn(stages | libraries, _ROUNDS)
    microseconds = {name: seconds[name] * 1e6 for name in stages}
    return Row(
        prefix_len, query_len, vanilla_us=min(seconds[name] for name in libraries) * 1e6, **microseconds
    )


def _absorbed_implementation(device: torch.device) -> str:
    return "mla_backend" if device.type == "cuda" else "torch"


def _vanilla_libraries(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What engines would run vanilla prefill on here; the fastest counts."""
    yield (
        library(device, dtype, _NOPE_DIM + ROPE_DIM, _VALUE_DIM),
        lambda *arguments: prefill(*arguments, causal=True),
    )
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:
        return
    if is_fa_version_supported(3):

        def flash3(q, k, v, start_q, start_k, max_q, max_k, scale):
            return flash_attn_varlen_func(
                q, k, v, max_q, start_q, max_k, start_k, softmax_scale=scale, causal=True, fa_version=3
            )

        yield "vLLM's FlashAttention-3", flash3
