"""Times of decode attention, ours and other implementations', over a grid of shapes."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

from mla_backend.errors import InvalidInputError, UnsupportedError
from mla_backend_bench import ceilings, environment
from mla_backend_bench.baseline import Baseline, Checkout
from mla_backend_bench.cases import KV_LORA_RANK, ROPE_DIM, Case, Inputs
from mla_backend_bench.implementations import BASELINE, IMPLEMENTATIONS, OURS, DecodeImplementation
from mla_backend_bench.prepared import Prepared, prepare, still_right
from mla_backend_bench.results import MAX_REL_L2, CaseResults, Failure
from mla_backend_bench.timing import (
    Replay,
    WorkBetweenCalls,
    cold_cache_bytes,
    measure_in_turn,
    synchronize,
)

MAX_REL_L2_OF_FP8_PRODUCTS = 0.1
"""Of implementations that round queries and probabilities to e4m3 too."""
_ROUNDS = 4
_FORMER_NAMES = {
    "mla_backend_sm80": "mla_backend_portable",
    "mla_backend_sm80_99k": "mla_backend_portable_99k",
}
"""What implementations are called now, by their names in older files of results."""


@dataclass(frozen=True)
class Row:
    """One implementation on one shape.

    Attributes:
        batch, seq_len, heads, q_len, page_size, lengths, shards: the shape, as in `Case`.
        impl: a key of `IMPLEMENTATIONS`, or `BASELINE`.
        time_us: one call, for one layer: the median over replays.
        p10_us, p90_us: eight of ten replays are between these; None in older files.
        plan_us: wall-clock time of one step's planning.
        tb_per_s: the bytes that must move (`Case.num_bytes`) over the time.
        tflops: `Case.flops` over the time.
        rel_l2: relative L2 error against fp64 attention to the values that the cache stores.
        sm_mhz: clock of a GPU's multiprocessors, read from the driver in the middle of the timing. Under load
            it follows the power limit. None if the driver's Python bindings (nvidia-ml-py) are not installed.
        kv_dtype: of the cache, as in `Case`; None is the queries' dtype.
        kv_lora_rank, qk_rope_head_dim, lists: as in `Case`.
    """

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
    sm_mhz: float | None = None
    shards: int = 1
    kv_dtype: str | None = None
    kv_lora_rank: int = KV_LORA_RANK
    qk_rope_head_dim: int = ROPE_DIM
    lists: bool = False
    p10_us: float | None = None
    p90_us: float | None = None


@dataclass
class Results(CaseResults):
    """The content of a results file.

    Attributes:
        read_tb_per_s: how fast this machine reads memory, in several ways; the highest is the ceiling.
        product_tflops: what a large product of torch reaches on a GPU, in `dtype`.
        among_kernels: whether other work ran before each call.
    """

    dtype: str
    read_tb_per_s: dict[str, float]
    read_ceiling_tb_per_s: float
    product_tflops: float | None = None
    among_kernels: bool = False
    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @staticmethod
    def load(path: Path) -> Results:
        """Read a file that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            InvalidInputError: it does not hold results of this benchmark.
        """
        try:
            content = json.loads(path.read_text())
            for row in content["rows"]:
                row["impl"] = _FORMER_NAMES.get(row["impl"], row["impl"])
            content["rows"] = [Row(**row) for row in content["rows"]]
            content["failures"] = [Failure(**failure) for failure in content["failures"]]
            return Results(**content)
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidInputError(f"{path} does not hold results of `bench decode`: {error}") from None

    def cases(self) -> list[Case]:
        """The shapes that have a row, in the order in which they were measured."""
        return list(dict.fromkeys(map(self.case_of, self.rows)))

    @staticmethod
    def case_of(row: Row) -> Case:
        """The shape of a row."""
        return Case(**{field.name: getattr(row, field.name) for field in fields(Case)})

    def speedup(self, row: Row) -> float | None:
        """The best other implementation's time on the row's shape, over the row's; None if no other ran."""
        others = [o.time_us for o in self.of(self.case_of(row)) if o.impl not in (*OURS, row.impl)]
        return min(others) / row.time_us if others else None

    def against_baseline(self) -> list[tuple[Row, float]]:
        """Our rows, and how many µs each is slower (if negative, faster) than the baseline on its shape."""
        return [
            (row, row.time_us - other.time_us)
            for row in self.rows
            if row.impl == OURS[0]
            for other in self.of(self.case_of(row))
            if other.impl == BASELINE
        ]

    def mean_speedup(self, max_rows: int, impl: str) -> tuple[float, int] | None:
        """The geometric mean of an implementation's `speedup` over shapes of up to max_rows query rows, and
        their number; None if there are none."""
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
    """Measure implementations on each case.

    An implementation that is missing, refuses a case or computes a wrong result gets a `Failure`. After an
    error that leaves the GPU unusable, the results so far are returned.

    Args:
        names: keys of `IMPLEMENTATIONS`.
        on_case: called after each case, with the results so far.
        commit: recorded in the results; by default `environment.commit()`.
        among_kernels: run other work before each call, as in a model. Its own time is measured too, and
            subtracted.
        baseline: another checkout, whose decoder is measured too.

    Raises:
        UnsupportedError: among_kernels without a GPU.
    """
    if among_kernels and device.type != "cuda":
        raise UnsupportedError(f"times among other kernels need a GPU, not {device}")
    results = _new_results(device, dtype, among_kernels, commit)
    makers = {name: IMPLEMENTATIONS[name] for name in names}
    if baseline is not None:
        makers[BASELINE] = functools.partial(Baseline, baseline)
    results.measure(cases, device, lambda case: _run_case(case, makers, device, dtype, results), on_case)
    return results


def _new_results(
    device: torch.device, dtype: torch.dtype, among_kernels: bool, commit: str | None
) -> Results:
    """Results without rows, of this machine, whose ceilings are measured."""
    read_rates = {name: rate / 1e12 for name, rate in ceilings.read_rates(device).items()}
    return Results(
        **environment.origin(device, commit),
        dtype=str(dtype).removeprefix("torch."),
        read_tb_per_s=read_rates,
        read_ceiling_tb_per_s=max(read_rates.values()),
        product_tflops=ceilings.product_rate(device, dtype) / 1e12 if device.type == "cuda" else None,
        among_kernels=among_kernels,
    )


def _run_case(
    case: Case,
    makers: dict[str, Callable[[Inputs], DecodeImplementation]],
    device: torch.device,
    dtype: torch.dtype,
    results: Results,
) -> None:
    inputs = Inputs(case, device, dtype, cold_cache_bytes(device))
    expected = inputs.expected(0), inputs.expected(inputs.num_layers - 1)
    between = WorkBetweenCalls(device) if results.among_kernels else None
    prepared: dict[str, Prepared] = {}
    for name, make in makers.items():
        try:
            implementation = make(inputs)
            limit = _limit(implementation, inputs)
            prepared[name] = prepare(
                implementation, expected, limit, inputs.num_layers, device, between=between
            )
        except Exception as error:  # other implementations may raise anything; the rest still runs
            results.fail(case, name, error)
        synchronize(device)
    replays = {name: p.replay for name, p in prepared.items()}
    if between is not None:
        replays["between"] = Replay(lambda layer: between(), inputs.num_layers, device)
    times = measure_in_turn(replays, _ROUNDS)
    between_calls = times.pop("between").median if between is not None else 0.0
    for name, p in still_right(prepared, case, results).items():
        seconds, fast, slow = (value - between_calls for value in times[name])
        results.rows.append(
            Row(
                **asdict(case),
                impl=name,
                time_us=seconds * 1e6,
                plan_us=p.plan_seconds * 1e6,
                tb_per_s=case.num_bytes(dtype.itemsize) / seconds / 1e12,
                tflops=case.flops() / seconds / 1e12,
                rel_l2=p.rel_l2,
                sm_mhz=p.replay.sm_mhz,
                p10_us=fast * 1e6,
                p90_us=slow * 1e6,
            )
        )


def _limit(implementation: DecodeImplementation, inputs: Inputs) -> float:
    """The largest relative L2 error of a right result."""
    if implementation.multiplies_in_fp8:
        return MAX_REL_L2_OF_FP8_PRODUCTS
    # With e4m3 keys, our Hopper kernels keep as many bits of fp16 queries as bf16 has.
    return MAX_REL_L2[torch.bfloat16 if inputs.case.kv_dtype else inputs.q.dtype]
