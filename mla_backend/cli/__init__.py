"""The command `mla-backend`: doctor, check, build, cache, and what other packages add, such as bench.

A package adds a command by an entry point in the group `mla_backend.commands`: a `typer.Typer`. Modules with
commands import torch inside of these only, so that help and completion take no time.
"""

import importlib.metadata
from typing import Annotated

import typer

import mla_backend
from mla_backend.cli import build, cache, check, doctor

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Attention kernels for models with Multi-head Latent Attention: check, build and measure them here. "
    "Exit codes: 0, done; 1, failed, or the answer is no; 2, wrong arguments.",
)
app.command("doctor")(doctor.doctor)
app.command("check")(check.check)
app.command("build")(build.build)
app.add_typer(cache.app, name="cache")


def add_commands(app: typer.Typer) -> None:
    """Add the commands of other packages."""
    for command in importlib.metadata.entry_points(group="mla_backend.commands"):
        app.add_typer(command.load(), name=command.name)


add_commands(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mla-backend {mla_backend.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    app()
