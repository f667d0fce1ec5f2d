"""Decode attention, ours and every peer's, over a grid of shapes."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mla_backend.bench import environment, read_ceiling
from mla_backend.bench.baseline import Baseline, Checkout
from mla_backend.bench.cases import Case, Inputs
from mla_backend.bench.implementations import BASELINE, IMPLEMENTATIONS, OURS, Implementation
from mla_backend.bench.timing import OtherKernels, Replay, measure_in_turn, seconds_per_call, synchronize
from mla_backend.errors import KernelBuildError, UnsupportedError

# Relative L2 error against fp64 up to which a result counts as right; bf16 outputs alone round by 1.6e-3.
MAX_REL_L2 = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}
_L2_MULTIPLE = 4
_ROUNDS = 4


class WrongResultError(Exception):
    """An implementation disagrees with fp64."""


@dataclass(frozen=True)
class Row:
    """One implementation on one shape; `plan_us` is the wall-clock time until a step's planning is done."""

    batch: int
    seq_len: int
    heads: int
    q_len: int
    page_size: int
    lengths: str
    impl: str
    time_us: float
    plan_us: float
    tb_per_s: float
    tflops: float
    rel_l2: float


@dataclass(frozen=True)
class Failure:
    """Why an implementation has no row for a shape."""

    case: str
    impl: str
    reason: str


@dataclass
class Results:
    """All that a results file holds."""

    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    dtype: str
    read_tb_per_s: dict[str, float]
    read_ceiling_tb_per_s: float
    among_kernels: bool = False
    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def of(self, case: Case) -> list[Row]:
        return [row for row in self.rows if all(getattr(row, k) == v for k, v in asdict(case).items())]

    @staticmethod
    def case_of(row: Row) -> Case:
        return Case(row.batch, row.seq_len, row.heads, row.q_len, row.page_size, row.lengths)

    def speedup(self, row: Row) -> float | None:
        """How many times faster than the best peer on the same shape; None if no peer ran."""
        peers = [other.time_us for other in self.of(self.case_of(row)) if other.impl not in (*OURS, row.impl)]
        return min(peers) / row.time_us if peers else None

    def against_baseline(self) -> list[tuple[Row, float]]:
        """Our rows, and how many µs each takes longer (if positive) than the baseline's on its shape."""
        return [
            (row, row.time_us - other.time_us)
            for row in self.rows
            if row.impl == OURS[0]
            for other in self.of(self.case_of(row))
            if other.impl == BASELINE
        ]

    def mean_speedup(self, max_rows: int, impl: str = OURS[0]) -> tuple[float, int] | None:
        """Geometric mean and number of its speed-ups over the best peer where heads * q_len <= max_rows."""
        ratios = [
            ratio
            for row in self.rows
            if row.impl == impl
            and row.heads * row.q_len <= max_rows
            and (ratio := self.speedup(row)) is not None
        ]
        return (statistics.geometric_mean(ratios), len(ratios)) if ratios else None


def run(
    cases: Iterable[Case],
    names: Iterable[str],
    device: torch.device,
    dtype: torch.dtype,
    on_case: Callable[[Case, Results], None],
    commit: str | None = None,
    among_kernels: bool = False,
    baseline: Checkout | None = None,
) -> Results:
    """Measure `names` (keys of `IMPLEMENTATIONS`) on each case; `on_case` is called after each one.

    With ``among_kernels`` other work runs before each call, as in a model; it is timed alone, too, and
    subtracted. That needs a GPU. With ``baseline`` the decoder of another checkout takes part.

    What an implementation cannot do, or does wrong, becomes a `Failure`. After an error that leaves the
    GPU unusable, the results so far are returned.
    """
    if among_kernels and device.type != "cuda":
        raise UnsupportedError(f"times among other kernels need a GPU, not {device}")
    ceilings = {name: rate / 1e12 for name, rate in read_ceiling.measure(device).items()}
    results = Results(
        machine=environment.machine(device),
        versions=environment.versions(),
        commit=commit or environment.commit(),
        dtype=str(dtype).removeprefix("torch."),
        read_tb_per_s=ceilings,
        read_ceiling_tb_per_s=max(ceilings.values()),
        among_kernels=among_kernels,
    )
    makers: dict[str, Callable[[Inputs], Implementation]] = {name: IMPLEMENTATIONS[name] for name in names}
    if baseline is not None:
        makers[BASELINE] = functools.partial(Baseline, baseline)
    for case in cases:
        try:
            _run_case(case, makers, device, dtype, results)
            synchronize(device)
        except Exception as error:  # out of memory, or the context was lost
            results.failures.append(Failure(str(case), "*", _first_line(error)))
        on_case(case, results)
        try:
            synchronize(device)
        except RuntimeError:
            break
    return results


def cold_cache_bytes(device: torch.device) -> int:
    """How large layers' caches must be, together, for each call to find nothing in the L2 cache."""
    if device.type != "cuda":
        return 1 << 20
    return _L2_MULTIPLE * torch.cuda.get_device_properties(device).L2_cache_size


def _run_case(
    case: Case,
    makers: dict[str, Callable[[Inputs], Implementation]],
    device: torch.device,
    dtype: torch.dtype,
    results: Results,
) -> None:
    inputs = Inputs(case, device, dtype, cold_cache_bytes(device))
    expected_first, expected_last = inputs.expected(0), inputs.expected(inputs.num_layers - 1)
    others = OtherKernels(device) if results.among_kernels else None
    replays: dict[str, Replay] = {}
    measured: dict[str, tuple[float, float]] = {}
    for name, make in makers.items():
        try:
            implementation = make(inputs)
            error, plan_seconds = _check(implementation, device, dtype, expected_first)
            replay = Replay(_after(others, implementation.run), inputs.num_layers, device)
            # The last call of a replay is on the last layer: what it wrote must be that layer's output.
            replay.result.fill_(math.nan)
            replay.replay()
            error = max(error, _rel_l2(replay.result, expected_last, dtype))
            replays[name], measured[name] = replay, (error, plan_seconds)
        except ImportError as missing:
            results.failures.append(Failure(str(case), name, f"not installed: {_first_line(missing)}"))
        except (WrongResultError, UnsupportedError, KernelBuildError) as refusal:
            results.failures.append(Failure(str(case), name, _first_line(refusal)))
        except Exception as failure:  # a peer may raise anything; the others still run
            results.failures.append(
                Failure(str(case), name, f"{type(failure).__name__}: {_first_line(failure)}")
            )
        synchronize(device)
    if others is not None:
        replays["others"] = Replay(lambda layer: others(), inputs.num_layers, device)
    times = measure_in_turn(replays, _ROUNDS)
    seconds_of_others = times.pop("others", 0.0)
    for name, (error, plan_seconds) in measured.items():
        seconds = times[name] - seconds_of_others
        results.rows.append(
            Row(
                **asdict(case),
                impl=name,
                time_us=seconds * 1e6,
                plan_us=plan_seconds * 1e6,
                tb_per_s=case.num_bytes(dtype.itemsize) / seconds / 1e12,
                tflops=case.flops() / seconds / 1e12,
                rel_l2=error,
            )
        )


def _after(others: OtherKernels | None, run: Callable[[int], Any]) -> Callable[[int], Any]:
    def both(layer: int) -> Any:
        others()
        return run(layer)

    return run if others is None else both


def _check(
    implementation: Implementation, device: torch.device, dtype: torch.dtype, expected: torch.Tensor
) -> tuple[float, float]:
    """The error of an eager call, and the seconds that planning takes."""
    implementation.plan()
    error = _rel_l2(implementation.run(0), expected, dtype)
    plan_seconds = seconds_per_call(implementation.plan, device)
    if implementation.plan_includes_a_run:
        plan_seconds = max(0.0, plan_seconds - seconds_per_call(lambda: implementation.run(0), device))
    return error, plan_seconds


def _rel_l2(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    error = float((out.double() - expected).norm() / expected.norm())
    if not error <= MAX_REL_L2[dtype]:
        raise WrongResultError(f"wrong result: relative L2 error {error:.2e} against fp64")
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
