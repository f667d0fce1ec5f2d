"""`mla-backend doctor`: whether attention can run here, or how a model would be served."""

from __future__ import annotations

from typing import Annotated

import typer

from mla_backend.cli.console import FAILED, WRONG_ARGUMENTS, Report, end
from mla_backend.errors import InvalidInputError


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Report on a model instead: a folder with config.json, a path to one, or a Hub name. If the "
            "local Hugging Face cache lacks it, huggingface_hub fetches the config, where that is installed."
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="With MODEL: memory of one GPU, in GiB. Default: what is free on the GPU here.",
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            help="With MODEL: compute capability to serve it on, such as 90a or 80. Default: the GPU here."
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, help="With MODEL: GPUs that split its heads.")
    ] = 1,
    decode_context_parallel_size: Annotated[
        int, typer.Option(min=1, help="With MODEL: GPUs, of these, that divide the tokens of its cache.")
    ] = 1,
    page_size: Annotated[int, typer.Option(min=1, help="With MODEL: tokens in a page of the cache.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine, or report on a model before it is served.

    Exits with 1 if attention cannot run here, or the model cannot be served.
    """
    sizes = (tensor_parallel_size, decode_context_parallel_size, page_size)
    report = Report(as_json)
    if model is None:
        if arch or gpu_memory is not None or sizes != (1, 1, 64):
            raise typer.BadParameter("these options are about a model: name one, too")
        from mla_backend.cli.machine_report import check_machine

        is_well = check_machine(report)
    else:
        from mla_backend.checkpoint import Checkpoint
        from mla_backend.cli import model_report

        try:
            checkpoint = Checkpoint.find(model)
            target = model_report.Target.find(arch, *sizes, gpu_memory)
            is_well = model_report.report(report, model, checkpoint, target)
        except InvalidInputError as error:
            end(str(error), WRONG_ARGUMENTS)
    if not is_well:
        raise typer.Exit(FAILED)
