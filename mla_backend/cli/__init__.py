"""The command `mla-backend`: doctor, build, bench."""

import typer

from mla_backend.cli import bench, build, doctor

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Attention kernels for models with Multi-head Latent Attention: check, build and measure them here.",
)
app.command("doctor")(doctor.doctor)
app.command("build")(build.build)
app.add_typer(bench.app, name="bench")


def main() -> None:
    app()
