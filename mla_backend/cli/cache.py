"""`mla-backend cache`: list the built kernels of this user, and remove those that nothing uses any more."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from mla_backend.cli.console import end, make_console
from mla_backend.errors import InvalidInputError, KernelBuildError

if TYPE_CHECKING:
    from mla_backend.jit import StoredKernel

app = typer.Typer(help="List the kernels in the cache, or remove those that are not used any more.")


@app.callback(invoke_without_command=True)
def overview(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        show()


@app.command("list")
def show() -> None:
    """List the kernels in the cache (also: `mla-backend cache`)."""
    folder, stored = _stored()
    table = Table(box=None, pad_edge=False)
    for title in ("kernel", "nvcc", "MB", "days", "state"):
        table.add_column(title, justify="right" if title in ("MB", "days") else "left", overflow="fold")
    for kernel in stored:
        days = (time.time() - kernel.entry.stat().st_mtime) / 86400
        state = kernel.why_unused or "may be used"
        table.add_row(kernel.name, kernel.toolkit, f"{kernel.num_bytes / 1e6:.1f}", f"{days:.0f}", state)
    console = make_console()
    if stored:
        console.print(table)
    total = sum(kernel.num_bytes for kernel in stored) / 1e6
    console.print(f"{len(stored)} kernels, {total:.1f} MB in {folder}", highlight=False, soft_wrap=True)


@app.command()
def clean(
    everything: Annotated[
        bool, typer.Option("--all", help="Remove all kernels, not only those that are not used any more.")
    ] = False,
) -> None:
    """Remove kernels of other versions of mla-backend, of apache-tvm-ffi or of the compiler.

    Kernels that are removed are built again when they are needed. Servers that run keep theirs.
    """
    folder, stored = _stored()
    removed = [kernel for kernel in stored if everything or kernel.why_unused]
    for kernel in removed:
        try:
            shutil.rmtree(kernel.entry)
        except OSError as error:
            end(f"{kernel.entry} cannot be removed: {error.strerror}")
    size = sum(kernel.num_bytes for kernel in removed) / 1e6
    left = len(stored) - len(removed)
    make_console().print(
        f"removed {len(removed)} kernels, {size:.1f} MB, from {folder}; {left} are left",
        highlight=False,
        soft_wrap=True,
    )


def _stored() -> tuple[Path, list[StoredKernel]]:
    from mla_backend import jit, kernels

    try:
        folder = jit.cache_dir()
        return folder, jit.stored_kernels(folder, kernels.shipped_variants())
    except (InvalidInputError, KernelBuildError) as error:
        end(str(error))
