"""The tables that `mla-backend bench` prints."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.table import Table

from mla_backend_bench.implementations import OURS

if TYPE_CHECKING:
    from mla_backend_bench.cases import Case
    from mla_backend_bench.crossover import Calibration
    from mla_backend_bench.decode import Results
    from mla_backend_bench.decode import Row as DecodeRow
    from mla_backend_bench.prefill import PrefillResults, PrefillRow, PrefillShape
    from mla_backend_bench.serving import Row
    from mla_backend_bench.sparse import Row as SparseRow
    from mla_backend_bench.sparse import SparseCase


_NARROW = 110
"""Characters below which tables leave out what matters less, so that no number is cut."""

_NOISY = 1.1

Timed = TypeVar("Timed", "DecodeRow", "PrefillRow", "SparseRow")


def print_decode_case(console: Console, case: Case, results: Results) -> None:
    """Every implementation on one shape, the fastest first."""
    ceiling = results.read_ceiling_tb_per_s
    columns: dict[str, Callable[[DecodeRow], str]] = {
        "time µs": lambda row: f"{row.time_us:.1f}",
        "p10-p90": spread,
        "plan µs": lambda row: f"{row.plan_us:.0f}",
        "TB/s": lambda row: f"{row.tb_per_s:.3f}",
        "TFLOP/s": lambda row: f"{row.tflops:.1f}",
        "MHz": lambda row: f"{row.sm_mhz:.0f}" if row.sm_mhz else "-",
        "of reads": lambda row: f"{row.tb_per_s / ceiling:.0%}",
        "vs best": lambda row: _ratio(results.speedup(row)),
        "rel. L2": lambda row: f"{row.rel_l2:.1e}",
    }
    if console.width < _NARROW:
        for title in ("plan µs", "TFLOP/s", "MHz", "of reads"):
            del columns[title]
    _print_rows(console, str(case), columns, results.of(case))


def print_sparse_case(console: Console, case: SparseCase, rows: list[SparseRow]) -> None:
    """Every implementation on one shape, the fastest first."""
    columns: dict[str, Callable[[SparseRow], str]] = {
        "cache": lambda row: row.kv_dtype,
        "time µs": lambda row: f"{row.time_us:.1f}",
        "p10-p90": spread,
        "plan µs": lambda row: f"{row.plan_us:.0f}",
        "TFLOP/s": lambda row: f"{row.tflops:.1f}",
        "rel. L2": lambda row: f"{row.rel_l2:.1e}",
    }
    if console.width < _NARROW:
        del columns["plan µs"]
    _print_rows(console, str(case), columns, rows)


def spread(row: Timed) -> str:
    """The deciles of a time, or nothing where a file has none."""
    return "" if row.p10_us is None or row.p90_us is None else f"{row.p10_us:.1f}-{row.p90_us:.1f}"


def _print_rows(
    console: Console, title: str, columns: dict[str, Callable[[Timed], str]], rows: Iterable[Timed]
) -> None:
    """The fastest row first, and a remark if times vary much."""
    table = _table(title, "implementation", *columns)
    rows = sorted(rows, key=lambda row: row.time_us)
    for row in rows:
        table.add_row(row.impl, *(cell(row) for cell in columns.values()))
    console.print(table)
    noisy = [row.impl for row in rows if row.p10_us and row.p90_us and row.p90_us > _NOISY * row.p10_us]
    if noisy:
        console.print(
            f"times of {', '.join(noisy)} vary by more than {_NOISY - 1:.0%}: does something else run here?",
            highlight=False,
        )


def print_decode_summary(console: Console, cases: list[Case], results: Results) -> None:
    """All shapes, the read ceiling, the difference from the baseline, failures and mean speed-ups."""
    console.print(_decode_overview(cases, results, console.width))
    rates = ", ".join(f"{name} {rate:.3f}" for name, rate in results.read_tb_per_s.items())
    console.print(
        f"{results.machine['device']}: read ceiling {results.read_ceiling_tb_per_s:.3f} TB/s ({rates})"
    )
    if results.product_tflops:
        console.print(f"a large product of torch: {results.product_tflops:.0f} TFLOP/s")
    for row, slower in results.against_baseline():
        baseline = row.time_us - slower
        console.print(
            f"{results.case_of(row)}: baseline {baseline:.2f} µs, this checkout {row.time_us:.2f} µs "
            f"({slower / baseline:+.1%})"
        )
    for (impl, reason), count in Counter((f.impl, f.reason) for f in results.failures).items():
        console.print(f"{impl} has no result for {count} of {len(cases)} shapes: {reason}", markup=False)
    for impl in OURS:
        for max_rows in (64, 128):
            if mean := results.mean_speedup(max_rows, impl):
                ratio, count = mean
                console.print(
                    f"{impl} is {ratio:.2f}x as fast as the best other implementation "
                    f"(geometric mean of {count} shapes with up to {max_rows} query rows)"
                )


def print_quick(console: Console, cases: list[Case], results: Results) -> None:
    """One line per shape, and a verdict: ours beside the best other one that is installed."""
    console.print(_narrow_overview(cases, results))
    for impl in sorted({failure.impl for failure in results.failures}):
        reason = next(failure.reason for failure in results.failures if failure.impl == impl)
        console.print(f"{impl} has no result: {reason}", markup=False, highlight=False)
    means = [mean for impl in OURS if (mean := results.mean_speedup(10**6, impl))]
    if means:
        ratio, count = means[0]
        others = ", ".join(sorted({row.impl for row in results.rows if row.impl not in OURS}))
        console.print(
            f"ours takes {1 / ratio:.0%} of the time of the best other one (mean of {count} shapes; "
            f"installed: {others})",
            highlight=False,
        )
    else:
        console.print("nothing else is installed here to compare with", highlight=False)


def _decode_overview(cases: list[Case], results: Results, width: int) -> Table:
    """One line per shape: the time of each implementation, and our speed-up over the best other."""
    names = list(dict.fromkeys(row.impl for row in results.rows))
    if sum(len(name) + 2 for name in names) + 40 > width:
        return _narrow_overview(cases, results)
    table = _table("time in µs", "shape", *names, "vs best other")
    for case in cases:
        rows = {row.impl: row for row in results.of(case)}
        times = [f"{rows[name].time_us:.1f}" if name in rows else "-" for name in names]
        ours = next((rows[name] for name in OURS if name in rows), None)
        table.add_row(str(case), *times, _ratio(results.speedup(ours) if ours else None))
    return table


def _narrow_overview(cases: list[Case], results: Results) -> Table:
    """The same with the best other implementation alone."""
    table = _table("time in µs", "shape", "ours", "best other", "vs it", "which is")
    for case in cases:
        rows = sorted(results.of(case), key=lambda row: row.time_us)
        ours = next((row for name in OURS for row in rows if row.impl == name), None)
        other = next((row for row in rows if row.impl not in OURS), None)
        times = (f"{row.time_us:.1f}" if row else "-" for row in (ours, other))
        ratio = _ratio(results.speedup(ours) if ours else None)
        table.add_row(str(case), *times, ratio, other.impl if other else "-")
    return table


def print_prefill_shape(console: Console, shape: PrefillShape, results: PrefillResults) -> None:
    """Every implementation on one shape, the fastest first, and why others have no result."""
    columns: dict[str, Callable[[PrefillRow], str]] = {
        "time µs": lambda row: f"{row.time_us:.1f}",
        "p10-p90": spread,
        "TFLOP/s": lambda row: f"{row.tflops:.1f}",
        "rel. L2": lambda row: f"{row.rel_l2:.1e}",
    }
    _print_rows(console, str(shape), columns, results.of(shape))
    for failure in results.failures:
        if failure.case == str(shape):
            console.print(f"{failure.impl}: {failure.reason}", markup=False, highlight=False)


def print_crossover(console: Console, calibration: Calibration) -> None:
    """The crossovers, what ran, and the fitted rates."""
    columns = ("measured", "by the fitted rates", "by the shipped rates")
    table = _table("new tokens from which vanilla is faster", "prefix", *columns)
    for point in calibration.crossovers:
        table.add_row(*("none" if value is None else f"{value:.0f}" for value in vars(point).values()))
    console.print(table)
    console.print(f"vanilla: {calibration.vanilla_library}; absorbed: {calibration.absorbed_implementation}")
    rates = ", ".join(f"{name}={value:.3g}" for name, value in asdict(calibration.rates).items())
    console.print(f"Rates({rates})", highlight=False)


def print_serving(console: Console, rows: list[Row], is_ours: Callable[[str], bool]) -> None:
    """The times of each shape and backend, each with its ratio to ours; the fastest decode first.

    Medians over the starts.
    """
    rows = _over_starts(rows)
    titles = {
        "prefill_ms": "prefill ms",
        "decode_ms_per_step": "step ms",
        "gpu_ms_per_step": "of GPU ms",
    }
    columns = {name: title for name, title in titles.items() if any(name in row for row in rows)}
    table = _table(None, "backend", "batch", "context")
    for title in columns.values():
        table.add_column(title, justify="right", no_wrap=True)
        table.add_column("/ ours", justify="right", no_wrap=True)
    for shape in dict.fromkeys(map(_shape_of, rows)):
        group = [row for row in rows if _shape_of(row) == shape]
        ours = next((row for row in group if is_ours(row["backend"])), None)
        for row in sorted(group, key=_first_time):
            cells = []
            for name in columns:
                ratio = f"{row[name] / ours[name]:.3f}" if ours and name in row else ""
                cells += [f"{row[name]:.3f}" if name in row else "", ratio]
            setup = f", dcp {row['dcp']}" if row["dcp"] > 1 else ""
            setup += f", {row['kv_dtype']}" if row["kv_dtype"] != "auto" else ""
            table.add_row(row["backend"] + setup, *shape, *cells)
    console.print(table)


def print_layers(console: Console, rows: list[Row]) -> None:
    """The rows of `bench layer`, shape by shape."""
    columns = ("start", "kernels/layer", "µs/layer outside products", "step ms")
    table = _table(None, "backend", "batch", "context", *columns)
    for row in sorted(rows, key=lambda row: (_shape_of(row), row["backend"], row["start"])):
        numbers = (f"{row[name]:.2f}" for name in ("kernels_per_layer", "attention_us_per_layer"))
        table.add_row(row["backend"], *_shape_of(row), str(row["start"]), *numbers, f"{row['step_ms']:.4f}")
    console.print(table)


def print_loads(console: Console, rows: list[Row]) -> None:
    """The rows of `bench load`, medians over the starts, load by load."""
    columns = {
        "requests_per_s": "requests/s",
        "output_tokens_per_s": "tokens/s",
        "ttft_p50_ms": "TTFT p50 ms",
        "ttft_p99_ms": "p99",
        "tpot_p50_ms": "TPOT p50 ms",
        "tpot_p99_ms": "p99",
    }
    table = _table(None, "backend", "prompt", "new", "at a time", *columns.values())
    for row in sorted(_over_starts(rows), key=lambda row: row["concurrency"]):
        lengths = (_span(row[name], row["range_ratio"]) for name in ("prompt_tokens", "new_tokens"))
        numbers = (f"{row[name]:.2f}" for name in columns)
        options = f" {json.dumps(row['options'])}" if "options" in row else ""
        table.add_row(row["backend"] + options, *lengths, str(row["concurrency"]), *numbers)
    console.print(table)


def _span(average: int, ratio: float) -> str:
    """From which to which number lengths are drawn."""
    least, most = (f"{average * factor:.0f}" for factor in (1 - ratio, 1 + ratio))
    return least if least == most else f"{least}-{most}"


def _over_starts(rows: list[Row]) -> list[Row]:
    """One row for those that differ by their start alone, with the medians of what was measured."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        facts = {k: v for k, v in row.items() if not isinstance(v, float) or k == "range_ratio"}
        facts = {name: value for name, value in facts.items() if name not in ("start", "cache_tokens")}
        groups.setdefault(repr(facts), []).append(row)
    return [
        {
            name: median(r[name] for r in group) if isinstance(value, float) else value
            for name, value in first.items()
        }
        for group in groups.values()
        for first in group[:1]
    ]


def _first_time(row: Row) -> float:
    """A decode step's time, or prefill's where no decode was measured."""
    return float(row["decode_ms_per_step" if "decode_ms_per_step" in row else "prefill_ms"])


def _shape_of(row: Row) -> tuple[str, str]:
    """Requests, and tokens of each; ``CACHED+NEW`` where the prefix cache holds some."""
    cached, context = row.get("cached", 0), row["context"]
    return str(row["batch"]), f"{cached}+{context - cached}" if cached else str(context)


def _table(title: str | None, first: str, *columns: str) -> Table:
    """A table whose first column is text and whose other columns are numbers, which are never cut."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _ratio(value: float | None) -> str:
    return f"{value:.2f}x" if value else ""
