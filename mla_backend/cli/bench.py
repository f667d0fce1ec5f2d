"""`mla-backend bench`: measure our kernels and their peers on this machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from mla_backend.cli.console import make_console
from mla_backend.errors import InvalidInputError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from mla_backend.bench.cases import Case
    from mla_backend.bench.decode import Results

app = typer.Typer(no_args_is_help=True, help=__doc__)

_SHAPE = r"BATCHxSEQ_LENxHEADSxQ_LEN\[@PAGE_SIZE]"  # escaped: rich would take it for markup
_DTYPES = ("bfloat16", "float16", "float32")
_DTYPE_OPTION = typer.Option(help=f"One of {', '.join(_DTYPES)}.")
_DEVICE_OPTION = typer.Option(help="Default: cuda if there is a GPU, else cpu.")
_COMMIT_OPTION = typer.Option(help="Recorded in the results. Default: what git says of the checkout.")


@app.command()
def decode(
    shapes: Annotated[
        list[str] | None,
        typer.Argument(
            help=_SHAPE + ", then ~lognormal for such lengths; for example 64x1024x16x1@1. "
            "Default: the grid of benchmarks/README.md."
        ),
    ] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            help="Implementation to measure; repeatable. Default: all but those that force a kernel of ours."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Results file (JSON); a plot is drawn beside it.")
    ] = None,
    dtype: Annotated[str, _DTYPE_OPTION] = "bfloat16",
    device: Annotated[str, _DEVICE_OPTION] = "",
    commit: Annotated[str | None, _COMMIT_OPTION] = None,
    among_kernels: Annotated[
        bool, typer.Option("--among-kernels", help="With other work between calls, as in a model.")
    ] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Another checkout of mla-backend, whose kernels are measured in turn with ours."),
    ] = None,
) -> None:
    """Time a decode step's attention, ours and every installed peer's, checked against fp64."""
    from mla_backend.bench import decode as bench
    from mla_backend.bench.baseline import Checkout
    from mla_backend.bench.cases import STANDARD_GRID, Case
    from mla_backend.bench.implementations import DEFAULT, IMPLEMENTATIONS

    console = make_console()
    unknown = set(impl or ()) - set(IMPLEMENTATIONS)
    if unknown:
        raise typer.BadParameter(
            f"no implementation {', '.join(unknown)}; there are {', '.join(IMPLEMENTATIONS)}"
        )
    try:
        cases = [Case.parse(shape) for shape in shapes or STANDARD_GRID]
        checkout = Checkout(baseline) if baseline else None
    except InvalidInputError as error:
        raise typer.BadParameter(str(error)) from None

    def finished(case: Case, results: Results) -> None:
        console.print(_table(case, results))
        if output:
            results.save(output)

    try:
        results = bench.run(
            cases,
            impl or DEFAULT,
            _device(device),
            _dtype(dtype),
            finished,
            commit,
            among_kernels,
            checkout,
        )
    except UnsupportedError as error:
        raise typer.BadParameter(str(error)) from None
    _summary(console, cases, results)
    if output and results.rows:
        _draw(console, results, output.with_suffix(".png"))
    if not results.rows:
        raise typer.Exit(1)


@app.command()
def crossover(
    heads: Annotated[int, typer.Option(min=1, help="Query heads on this GPU.")] = 16,
    prefix: Annotated[
        list[int] | None, typer.Option(min=1, help="Keys before the new tokens; repeatable.")
    ] = None,
    query_len: Annotated[list[int] | None, typer.Option(min=1, help="New tokens; repeatable.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Results file (JSON); engines use it if MLA_BACKEND_RATES names it."
        ),
    ] = None,
    dtype: Annotated[str, _DTYPE_OPTION] = "bfloat16",
    device: Annotated[str, _DEVICE_OPTION] = "",
    commit: Annotated[str | None, _COMMIT_OPTION] = None,
) -> None:
    """Measure where vanilla attention overtakes absorbed, and fit the policy's rates to this machine."""
    from mla_backend.bench import crossover as bench

    console = make_console()

    def measured(row: bench.Row) -> None:
        console.print(
            f"{row.query_len:5} on {row.prefix_len:6}: "
            f"vanilla {row.expand_us:8.1f} + {row.vanilla_us:8.1f} µs, "
            f"absorbed {row.absorb_us:8.1f} + {row.absorbed_us:8.1f} µs, "
            f"{'absorbed' if row.absorbed_over_vanilla <= 1 else 'vanilla'}",
            highlight=False,
        )

    calibration = bench.run(
        heads,
        prefix or bench.PREFIX_LENS,
        query_len or bench.QUERY_LENS,
        _device(device),
        _dtype(dtype),
        measured,
        commit,
    )
    table = Table(title="new tokens from which vanilla is faster", title_justify="left", title_style="bold")
    for column in ("prefix", "measured", "by these rates", "by the shipped rates"):
        table.add_column(column, justify="right")
    for point in calibration.crossovers:
        table.add_row(*(f"{value:.0f}" for value in vars(point).values()))
    console.print(table)
    console.print(f"vanilla: {calibration.vanilla_library}; absorbed: {calibration.absorbed_implementation}")
    rates = ", ".join(f"{name}={value:.3g}" for name, value in asdict(calibration.rates).items())
    console.print(f"Rates({rates})", highlight=False)
    if output:
        calibration.save(output)


def _device(name: str) -> torch.device:
    import torch

    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _dtype(name: str) -> torch.dtype:
    import torch

    if name not in _DTYPES:
        raise typer.BadParameter(f"dtype must be one of {', '.join(_DTYPES)}, not {name}")
    return getattr(torch, name)


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


@app.command()
def trace(
    shape: Annotated[str, typer.Argument(help=f"As for `decode`: {_SHAPE}.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Chrome trace (JSON).")],
    dtype: Annotated[str, _DTYPE_OPTION] = "bfloat16",
) -> None:
    """Record what each warp role of the Hopper kernel does, and when; open the file in Perfetto."""
    import json

    from mla_backend.bench import trace as recorder
    from mla_backend.bench.cases import Case

    try:
        recorded = recorder.record(Case.parse(shape), _dtype(dtype))
    except (InvalidInputError, UnsupportedError) as error:
        raise typer.BadParameter(str(error)) from None
    output.write_text(json.dumps(recorded))
    make_console().print(f"wrote {output}")


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
        ours = next((rows[name] for name in OURS if name in rows), None)
        speedup = results.speedup(ours) if ours else None
        table.add_row(str(case), *times, f"{speedup:.2f}x" if speedup else "")
    return table


def _summary(console: Console, cases: list[Case], results: Results) -> None:
    from mla_backend.bench.implementations import OURS

    console.print(_overview(cases, results))
    console.print(
        f"{results.machine['device']}: reads peak at {results.read_ceiling_tb_per_s:.3f} TB/s ("
        + ", ".join(f"{name} {rate:.3f}" for name, rate in results.read_tb_per_s.items())
        + ")"
    )
    for row, longer in results.against_baseline():
        before = row.time_us - longer
        console.print(
            f"{results.case_of(row)}: {before:.2f} µs before, {row.time_us:.2f} now, {longer / before:+.1%}"
        )
    for (impl, reason), count in Counter((f.impl, f.reason) for f in results.failures).items():
        console.print(f"no result from {impl} on {count} shapes: {reason}", markup=False)
    for impl in OURS:
        for max_rows in (64, 128):
            mean = results.mean_speedup(max_rows, impl)
            if mean:
                ratio, shapes = mean
                console.print(
                    f"{impl} over the best peer, up to {max_rows} rows: {ratio:.2f}x on {shapes} shapes"
                )


def _draw(console: Console, results: Results, path: Path) -> None:
    from mla_backend.bench import plot

    try:
        plot.draw(results, path)
    except ImportError:
        console.print("no plot: it needs matplotlib (pip install matplotlib)", markup=False)
