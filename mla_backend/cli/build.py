"""`mla-backend build`: compile kernels ahead of time."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mla_backend import jit, kernels
from mla_backend.cli.console import make_console
from mla_backend.errors import InvalidInputError, KernelBuildError

_MAX_NEAR = 10


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
    only_list: Annotated[bool, typer.Option("--list", help="List the variants, and build none.")] = False,
) -> None:
    """Build the kernels of common models ahead of time, so that no engine has to build them."""
    console = make_console()
    archs: list[str] | list[None] = arch or sorted(local_archs()) or [None]
    try:
        of_archs = [variant for a in archs for variant in kernels.shipped_variants(a)]
    except InvalidInputError as error:
        raise typer.BadParameter(str(error)) from None
    patterns = match or ["*"]
    variants = [v for v in of_archs if any(fnmatch.fnmatchcase(v.name, pattern) for pattern in patterns)]
    if not variants:
        wanted = f"arch {', '.join(a or 'any' for a in archs)} and name {', '.join(patterns)}"
        console.print(
            f"[red]no variant matches {escape(wanted)}[/]; kernels need compute capability 8.0 or higher, "
            "and others are built when they are first used"
        )
        if of_archs:
            _print_near(console, patterns, of_archs, arch or [])
        raise typer.Exit(2)
    if only_list:
        for variant in variants:
            console.print(str(variant), highlight=False)
        return
    with contextlib.suppress(KernelBuildError):  # variants that have to be built report it
        toolchain = jit.find_toolchain()
        console.print(f"nvcc {toolchain.version} ({toolchain.origin}: {toolchain.nvcc})", markup=False)
    try:
        results = _build(console, variants, jobs, prebuilt)
    except InvalidInputError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    if errors := [result.error for result in results if result.error]:
        _print_errors(console, errors)
        console.print(f"\n[red]{len(errors)} of {len(variants)} variants failed[/]")
        raise typer.Exit(1)


def _print_errors(console: Console, errors: list[KernelBuildError]) -> None:
    for text in dict.fromkeys(map(str, errors)):  # one error may concern all variants
        console.print("\n[red]KernelBuildError[/]")
        console.print(text, markup=False, highlight=False)


def _print_near(
    console: Console, patterns: list[str], variants: list[jit.KernelVariant], archs: list[str]
) -> None:
    """Print the variants whose names are nearest to the patterns, and how to list all of them."""
    names = sorted({variant.name for variant in variants})
    near = [name for text in patterns for name in difflib.get_close_matches(text, names, _MAX_NEAR, 0.4)]
    shown = [variant for name in dict.fromkeys(near) for variant in variants if variant.name == name]
    if shown:
        console.print("The nearest are:")
    for variant in shown[:_MAX_NEAR]:
        console.print(f"  {variant}", highlight=False)
    command = " ".join(["mla-backend build", *(f"--arch {arch}" for arch in archs), "--list"])
    console.print(f"`{command}` lists all of them ({len(variants)})", highlight=False)


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
            outcome = "failed" if result.error else "cached" if result.cached else "built"
            color = {"failed": "red", "cached": "default", "built": "green"}[outcome]
            progress.console.print(
                f"[{color}]{outcome:6}[/]  {result.seconds:6.1f} s  {result.variant}", highlight=False
            )
            progress.advance(task)

        return jit.build(variants, jobs, report, prebuilt)


def local_archs() -> set[str]:
    """The compute capabilities of this machine's GPUs."""
    return {jit.arch_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())}
