"""`mla-backend bench`: measure our kernels and their peers on this machine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from mla_backend.cli.console import make_console
from mla_backend.errors import InvalidInputError

if TYPE_CHECKING:
    from mla_backend.bench.cases import Case
    from mla_backend.bench.decode import Results

app = typer.Typer(no_args_is_help=True, help=__doc__)

_DTYPES = ("bfloat16", "float16", "float32")


@app.command()
def decode(
    shapes: Annotated[
        list[str] | None,
        typer.Argument(
            help="BATCHxSEQ_LENxHEADSxQ_LEN[@PAGE_SIZE][~lognormal], such as 64x1024x16x1@1. "
            "Default: the grid of benchmarks/README.md."
        ),
    ] = None,
    impl: Annotated[
        list[str] | None, typer.Option(help="Implementation to measure; repeatable. Default: all.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Results file (JSON); a plot is drawn beside it.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(_DTYPES)}.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Default: cuda if there is a GPU, else cpu.")] = "",
    commit: Annotated[
        str | None, typer.Option(help="Recorded in the results. Default: what git says of the checkout.")
    ] = None,
) -> None:
    """Time a decode step's attention, ours and every installed peer's, checked against fp64."""
    import torch

    from mla_backend.bench import decode as bench
    from mla_backend.bench.cases import STANDARD_GRID, Case
    from mla_backend.bench.implementations import DEFAULT, IMPLEMENTATIONS

    console = make_console()
    unknown = set(impl or ()) - set(IMPLEMENTATIONS)
    if unknown:
        raise typer.BadParameter(
            f"no implementation {', '.join(unknown)}; there are {', '.join(IMPLEMENTATIONS)}"
        )
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype}")
    try:
        cases = [Case.parse(shape) for shape in shapes or STANDARD_GRID]
    except InvalidInputError as error:
        raise typer.BadParameter(str(error)) from None

    def finished(case: Case, results: Results) -> None:
        console.print(_table(case, results))
        if output:
            results.save(output)

    results = bench.run(
        cases,
        impl or DEFAULT,
        torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")),
        getattr(torch, dtype),
        finished,
        commit,
    )
    _summary(console, cases, results)
    if output and results.rows:
        _draw(console, results, output.with_suffix(".png"))
    if not results.rows:
        raise typer.Exit(1)


def _table(case: Case, results: Results) -> Table:
    table = Table(title=str(case), title_justify="left", title_style="bold")
    table.add_column("implementation")
    for column in ("time µs", "plan µs", "TB/s", "TFLOP/s", "of read ceiling", "vs best peer", "rel. L2"):
        table.add_column(column, justify="right")
    for row in sorted(results.of(case), key=lambda row: row.time_us):
        speedup = results.speedup(row)
        table.add_row(
            row.impl,
            f"{row.time_us:.1f}",
            f"{row.plan_us:.0f}",
            f"{row.tb_per_s:.3f}",
            f"{row.tflops:.1f}",
            f"{row.tb_per_s / results.read_ceiling_tb_per_s:.0%}",
            f"{speedup:.2f}x" if speedup else "",
            f"{row.rel_l2:.1e}",
        )
    return table


def _overview(cases: list[Case], results: Results) -> Table:
    """One line a shape: every implementation's µs, and our speed-up over the best peer."""
    from mla_backend.bench.implementations import OURS

    names = list(dict.fromkeys(row.impl for row in results.rows))
    table = Table(title="µs", title_justify="left", title_style="bold", box=None)
    table.add_column("shape")
    for column in (*names, "vs best peer"):
        table.add_column(column, justify="right")
    for case in cases:
        rows = {row.impl: row for row in results.of(case)}
        times = [f"{rows[name].time_us:.1f}" if name in rows else "-" for name in names]
        speedup = results.speedup(rows[OURS[0]]) if OURS[0] in rows else None
        table.add_row(str(case), *times, f"{speedup:.2f}x" if speedup else "")
    return table


def _summary(console: Console, cases: list[Case], results: Results) -> None:
    console.print(_overview(cases, results))
    console.print(
        f"{results.machine['device']}: reads peak at {results.read_ceiling_tb_per_s:.3f} TB/s ("
        + ", ".join(f"{name} {rate:.3f}" for name, rate in results.read_tb_per_s.items())
        + ")"
    )
    for (impl, reason), count in Counter((f.impl, f.reason) for f in results.failures).items():
        console.print(f"no result from {impl} on {count} shapes: {reason}", markup=False)
    for max_rows in (64, 128):
        mean = results.mean_speedup(max_rows)
        if mean:
            ratio, shapes = mean
            console.print(f"faster than the best peer up to {max_rows} rows: {ratio:.2f}x on {shapes} shapes")


def _draw(console: Console, results: Results, path: Path) -> None:
    from mla_backend.bench import plot

    try:
        plot.draw(results, path)
    except ImportError:
        console.print("no plot: it needs matplotlib (pip install 'mla-backend[bench]')", markup=False)
