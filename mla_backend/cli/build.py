"""`mla-backend build`: compile kernels ahead of time."""

from __future__ import annotations

import fnmatch
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mla_backend import jit
from mla_backend.cli.console import make_console
from mla_backend.errors import InvalidInputError, KernelBuildError


def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="Compute capability, such as 90a or 80; repeatable. Default: those of the GPUs here, or all."
        ),
    ] = None,
    match: Annotated[
        list[str] | None, typer.Option(help="Only variants whose name matches this pattern; repeatable.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Compilations at once. Default: ninja's, by the CPUs."),
    ] = None,
    prebuilt: Annotated[
        bool, typer.Option(help="Store kernels inside the package, for images without a compiler.")
    ] = False,
) -> None:
    """Build the kernels of common models ahead of time, so that no engine has to build them."""
    from mla_backend.kernels import shipped_variants

    console = make_console()
    archs: list[str] | list[None] = arch or sorted(local_archs()) or [None]
    try:
        variants = [variant for a in archs for variant in shipped_variants(a)]
    except InvalidInputError as error:
        raise typer.BadParameter(str(error)) from None
    if match:
        variants = [v for v in variants if any(fnmatch.fnmatchcase(v.name, pattern) for pattern in match)]
    if not variants:
        wanted = f"arch {', '.join(a or 'any' for a in archs)} and name {', '.join(match or ['*'])}"
        console.print(
            f"[red]no variant matches {escape(wanted)}[/]; other kernels are built when they are first used. "
            "There are:"
        )
        for variant in shipped_variants(None):
            console.print(f"  {variant}")
        raise typer.Exit(2)
    try:
        toolchain = jit.find_toolchain()
        console.print(f"nvcc {toolchain.version} ({toolchain.origin}: {toolchain.nvcc})", markup=False)
    except KernelBuildError as error:
        console.print(str(error), style="yellow", markup=False, highlight=False)

    try:
        results = _build(console, variants, jobs, prebuilt)
    except InvalidInputError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    errors = [result.error for result in results if result.error]
    for failure in errors:
        console.print(f"\n[red]{type(failure).__name__}[/]")
        console.print(str(failure), markup=False, highlight=False)
    if errors:
        console.print(f"\n[red]{len(errors)} of {len(variants)} variants failed[/]")
        raise typer.Exit(1)


def _build(
    console: Console, variants: list[jit.KernelVariant], jobs: int | None, prebuilt: bool
) -> list[jit.BuildResult]:
    """Build with a progress bar and one line per variant."""
    try:
        store = jit.prebuilt_dir() if prebuilt else jit.cache_dir()
    except KernelBuildError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task(f"building into {escape(str(store))}", total=len(variants))

        def report(result: jit.BuildResult) -> None:
            outcome = "[red]failed[/]" if result.error else "cached" if result.cached else "[green]built[/]"
            progress.console.print(
                f"{outcome:>8}  {result.seconds:6.1f} s  {result.variant}", highlight=False
            )
            progress.advance(task)

        return jit.build(variants, jobs, report, prebuilt)


def local_archs() -> set[str]:
    """The compute capabilities of this machine's GPUs."""
    import torch

    return {jit.arch_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())}
