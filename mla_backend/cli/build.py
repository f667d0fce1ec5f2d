"""`mla-backend build`: compile kernels ahead of time."""

from __future__ import annotations

import fnmatch
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mla_backend import jit
from mla_backend.cli.console import make_console
from mla_backend.errors import KernelBuildError


def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="Compute capability, such as 90a or 80; repeatable. Default: the GPUs' here, else all."
        ),
    ] = None,
    match: Annotated[
        list[str] | None, typer.Option(help="Only variants whose name matches this pattern; repeatable.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Default: what ninja finds right for the CPUs.")
    ] = None,
    prebuilt: Annotated[
        bool, typer.Option(help="Store them inside the package, for images without a compiler.")
    ] = False,
) -> None:
    """Build the kernels that ship with this package, so that none is built when it is first needed."""
    from mla_backend.kernels import shipped_variants

    console = make_console()
    archs = arch or sorted(local_archs()) or [None]
    variants = [variant for a in archs for variant in shipped_variants(a)]
    if match:
        variants = [v for v in variants if any(fnmatch.fnmatchcase(v.name, pattern) for pattern in match)]
    if not variants:
        asked = f"arch {', '.join(a or 'any' for a in archs)} and name {', '.join(match or ['*'])}"
        console.print(f"[red]no variant matches {asked}[/]; others are built when first used. There are:")
        for variant in shipped_variants(None):
            console.print(f"  {variant}")
        raise typer.Exit(2)
    try:
        toolchain = jit.find_toolchain()
        console.print(f"nvcc {toolchain.version} ({toolchain.origin}: {toolchain.nvcc})")
    except KernelBuildError as error:
        console.print(f"[yellow]{error}[/]", highlight=False)
    store = jit.prebuilt_dir() if prebuilt else jit.cache_dir()

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task(f"building into {store}", total=len(variants))

        def report(result: jit.BuildResult) -> None:
            outcome = "[red]failed[/]" if result.error else "cached" if result.cached else "[green]built[/]"
            progress.console.print(
                f"{outcome:>8}  {result.seconds:6.1f} s  {result.variant}", highlight=False
            )
            progress.advance(task)

        results = jit.build(variants, jobs, report, prebuilt)

    errors = [result.error for result in results if result.error]
    for error in errors:
        console.print(f"\n[red]{type(error).__name__}[/]")
        console.print(str(error), markup=False, highlight=False)
    if errors:
        console.print(f"\n[red]{len(errors)} of {len(variants)} variants failed[/]")
        raise typer.Exit(1)


def local_archs() -> set[str]:
    """The compute capabilities of this machine's GPUs."""
    import torch

    return {jit.arch_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())}
