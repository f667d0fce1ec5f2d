"""The command `mla-backend`: doctor, build, and what other packages add, such as bench.

A package adds a command by an entry point in the group `mla_backend.commands`: a `typer.Typer`.
"""

import importlib.metadata
from typing import Annotated

import typer

from mla_backend.cli import build, doctor
from mla_backend.engines import installed_version

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Attention kernels for models with Multi-head Latent Attention: check, build and measure them here.",
)
app.command("doctor")(doctor.doctor)
app.command("build")(build.build)


def add_commands(app: typer.Typer) -> None:
    """Add the commands of other packages."""
    for command in importlib.metadata.entry_points(group="mla_backend.commands"):
        app.add_typer(command.load(), name=command.name)


add_commands(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mla-backend {installed_version('mla-backend') or '(a checkout that is not installed)'}")
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
