"""The tables that `mla-backend bench` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from mla_backend_bench.implementations import OURS

if TYPE_CHECKING:
    from mla_backend_bench.cases import Case
    from mla_backend_bench.crossover import Calibration
    from mla_backend_bench.decode import Results
    from mla_backend_bench.prefill import PrefillResults, PrefillShape
    from mla_backend_bench.serving import Row
    from mla_backend_bench.sparse import Row as SparseRow
    from mla_backend_bench.sparse import SparseCase


def print_decode_case(console: Console, case: Case, results: Results) -> None:
    """Every implementation on one shape, the fastest first."""
    columns = ("time µs", "plan µs", "TB/s", "TFLOP/s", "MHz", "of read ceiling", "vs best other", "rel. L2")
    table = _table(str(case), "implementation", *columns)
    for row in sorted(results.of(case), key=lambda row: row.time_us):
        table.add_row(
            row.impl,
            f"{row.time_us:.1f}",
            f"{row.plan_us:.0f}",
            f"{row.tb_per_s:.3f}",
            f"{row.tflops:.1f}",
            f"{row.sm_mhz:.0f}" if row.sm_mhz else "-",
            f"{row.tb_per_s / results.read_ceiling_tb_per_s:.0%}",
            _ratio(results.speedup(row)),
            f"{row.rel_l2:.1e}",
        )
    console.print(table)


def print_sparse_case(console: Console, case: SparseCase, rows: list[SparseRow]) -> None:
    """Every implementation on one shape, the fastest first."""
    table = _table(str(case), "implementation", "cache", "time µs", "plan µs", "TFLOP/s", "rel. L2")
    for row in sorted(rows, key=lambda row: row.time_us):
        times = (f"{row.time_us:.1f}", f"{row.plan_us:.0f}", f"{row.tflops:.1f}", f"{row.rel_l2:.1e}")
        table.add_row(row.impl, row.kv_dtype, *times)
    console.print(table)


def print_decode_summary(console: Console, cases: list[Case], results: Results) -> None:
    """All shapes, the read ceiling, the difference from the baseline, failures and mean speed-ups."""
    console.print(_decode_overview(cases, results))
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


def _decode_overview(cases: list[Case], results: Results) -> Table:
    """One line per shape: the time of each implementation, and our speed-up over the best other."""
    names = list(dict.fromkeys(row.impl for row in results.rows))
    table = _table("time in µs", "shape", *names, "vs best other")
    table.box = None
    for case in cases:
        rows = {row.impl: row for row in results.of(case)}
        times = [f"{rows[name].time_us:.1f}" if name in rows else "-" for name in names]
        ours = next((rows[name] for name in OURS if name in rows), None)
        table.add_row(str(case), *times, _ratio(results.speedup(ours) if ours else None))
    return table


def print_prefill_shape(console: Console, shape: PrefillShape, results: PrefillResults) -> None:
    """Every implementation on one shape, the fastest first, and why others have no result."""
    table = _table(str(shape), "implementation", "time µs", "TFLOP/s", "rel. L2")
    for row in sorted(results.of(shape), key=lambda row: row.time_us):
        table.add_row(row.impl, f"{row.time_us:.1f}", f"{row.tflops:.1f}", f"{row.rel_l2:.1e}")
    console.print(table)
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
    """The times of each shape and backend, each with its ratio to ours; the fastest decode first."""
    titles = {
        "prefill_ms": "prefill ms",
        "decode_ms_per_step": "decode ms/step",
        "gpu_ms_per_step": "GPU ms/step",
    }
    columns = {name: title for name, title in titles.items() if any(name in row for row in rows)}
    table = _table(None, "backend", "batch", "context")
    for title in columns.values():
        table.add_column(title, justify="right")
        table.add_column("/ ours", justify="right")
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


def _first_time(row: Row) -> float:
    """A decode step's time, or prefill's where no decode was measured."""
    return float(row["decode_ms_per_step" if "decode_ms_per_step" in row else "prefill_ms"])


def _shape_of(row: Row) -> tuple[str, str]:
    """Requests, and tokens of each; ``CACHED+NEW`` where the prefix cache holds some."""
    cached, context = row.get("cached", 0), row["context"]
    return str(row["batch"]), f"{cached}+{context - cached}" if cached else str(context)


def _table(title: str | None, first: str, *columns: str) -> Table:
    """A table whose first column is text and whose other columns are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _ratio(value: float | None) -> str:
    return f"{value:.2f}x" if value else ""
