"""`mla-backend build`: compile kernels ahead of time."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mla_backend.cli.console import WRONG_ARGUMENTS, end, make_console, print_json
from mla_backend.errors import InvalidInputError, KernelBuildError

if TYPE_CHECKING:
    from mla_backend import jit

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
    wheel: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also write a wheel of these kernels, for images without nvcc."),
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="List the variants, and build none.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --list: print one JSON array.")] = False,
) -> None:
    """Build the kernels of common models ahead of time, so that no engine has to build them."""
    from mla_backend import jit

    if as_json and not only_list:
        raise typer.BadParameter("--json needs --list")
    console = make_console()
    variants = _select(arch or [], match or ["*"])
    if as_json:
        try:
            print_json([_described(variant) for variant in variants])
        except InvalidInputError as error:  # of a setting
            end(str(error))
        return
    if only_list:
        for variant in variants:
            console.print(str(variant), highlight=False)
        return
    with contextlib.suppress(KernelBuildError):  # variants that have to be built report it
        toolchain = jit.find_toolchain()
        console.print(f"nvcc {toolchain.version} ({toolchain.origin}: {toolchain.nvcc})", markup=False)
    try:
        results = _build(console, variants, jobs, prebuilt)
        if wheel and not any(result.error for result in results):
            written = jit.write_wheel([result.entry for result in results if result.entry], wheel)
            size = written.stat().st_size / 1e6
            console.print(f"wrote {written} ({size:.1f} MB)", markup=False, highlight=False, soft_wrap=True)
    except InvalidInputError as error:
        end(str(error))
    if errors := [result.error for result in results if result.error]:
        reasons = dict.fromkeys(map(str, errors))  # one error may concern all variants
        end("\n".join([*reasons, f"{len(errors)} of {len(variants)} variants failed"]))


def _select(archs: list[str], patterns: list[str]) -> list[jit.KernelVariant]:
    """The shipped variants for these architectures, or for those of this machine, whose names match.

    Ends the command if there are none.
    """
    from mla_backend import kernels

    chosen: list[str] | list[None] = archs or sorted(local_archs()) or [None]
    try:
        of_archs = [variant for arch in chosen for variant in kernels.shipped_variants(arch)]
    except InvalidInputError as error:
        raise typer.BadParameter(str(error)) from None
    variants = [v for v in of_archs if any(fnmatch.fnmatchcase(v.name, pattern) for pattern in patterns)]
    if not variants:
        wanted = f"arch {', '.join(arch or 'any' for arch in chosen)} and name {', '.join(patterns)}"
        near = _near(patterns, of_archs, archs) if of_archs else []
        reason = (
            f"no variant matches {wanted}; kernels need compute capability 8.0 or higher, and others are "
            "built when they are first used"
        )
        end("\n".join([reason, *near]), WRONG_ARGUMENTS)
    return variants


def _described(variant: jit.KernelVariant) -> dict[str, str | bool]:
    from mla_backend import jit

    return {"name": variant.name, "arch": variant.arch, "built": jit.find_entry(variant) is not None}


def _near(patterns: list[str], variants: list[jit.KernelVariant], archs: list[str]) -> list[str]:
    """Lines with the variants whose names are nearest to the patterns, and how to list all of them."""
    names = sorted({variant.name for variant in variants})
    near = [name for text in patterns for name in difflib.get_close_matches(text, names, _MAX_NEAR, 0.4)]
    shown = [variant for name in dict.fromkeys(near) for variant in variants if variant.name == name]
    lines = ["The nearest are:"] if shown else []
    lines += [f"  {variant}" for variant in shown[:_MAX_NEAR]]
    command = " ".join(["mla-backend build", *(f"--arch {arch}" for arch in archs), "--list"])
    return [*lines, f"`{command}` lists all of them ({len(variants)})"]


def _build(
    console: Console, variants: list[jit.KernelVariant], jobs: int | None, prebuilt: bool
) -> list[jit.BuildResult]:
    """Build with a progress bar and one line per variant."""
    from mla_backend import jit

    try:
        store = jit.prebuilt_dir() if prebuilt else jit.cache_dir()
    except KernelBuildError as error:
        end(str(error))
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
    import torch

    from mla_backend import jit

    return {jit.arch_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())}
