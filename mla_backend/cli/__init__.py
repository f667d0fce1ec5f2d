"""The command `mla-backend`: doctor, build, bench."""

from typing import Annotated

import typer

from mla_backend.cli import bench, build, doctor
from mla_backend.engines import installed_version

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Attention kernels for models with Multi-head Latent Attention: check, build and measure them here.",
)
app.command("doctor")(doctor.doctor)
app.command("build")(build.build)
app.add_typer(bench.app, name="bench")


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
