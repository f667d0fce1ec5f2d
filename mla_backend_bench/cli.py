"""`mla-backend bench`: measure attention kernels and whole engines on this machine."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mla_backend.cli.console import end, make_console
from mla_backend.errors import InvalidInputError, KernelBuildError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from mla_backend_bench.serving import Meter, Row
    from mla_backend_bench.serving_engines import Settings, Shape

app = typer.Typer(no_args_is_help=True, help="Measure attention kernels and whole engines on this machine.")

_SHAPE = r"BATCHxSEQ_LENxHEADSxQ_LEN\[@PAGE_SIZE]"  # escaped, because rich reads brackets as markup
_DTYPES = ("bfloat16", "float16", "float32")
_KV_DTYPES = ("auto", "fp8_e4m3", "fp8_ds_mla")

_Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(_DTYPES)}.")]
_Dtype16 = Annotated[str, typer.Option("--dtype", help="One of bfloat16, float16.")]
_Device = Annotated[str, typer.Option(help="Such as cuda:1; cpu measures the implementation for CPUs.")]
_Commit = Annotated[
    str | None, typer.Option(help="Recorded in the results. Default: the commit of the checkout, if any.")
]


def _distinct(numbers: list[int] | None) -> list[int] | None:
    """Refuses a load that is given twice: it has the same prompts, which the prefix cache then holds."""
    if repeated := [number for number, times in Counter(numbers or ()).items() if times > 1]:
        raise typer.BadParameter(
            f"{repeated[0]} is given more than once; --starts measures each load more often, in new servers"
        )
    return numbers


def _writable(path: Path | None) -> Path | None:
    """Refuses, before anything is measured, a file that the results could not be written to."""
    if path is not None:
        try:
            existed = path.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from None
        if not existed:
            path.unlink()
    return path


def _output(help: str) -> Any:
    """The option for the file that a command writes, which is checked first."""
    return typer.Option("--output", "-o", callback=_writable, help=help)


_Output = Annotated[Path | None, _output("Results file (JSON).")]
_Shapes = Annotated[
    list[str] | None,
    typer.Argument(
        help=_SHAPE + ", then ~lognormal for log-normal lengths, ~shard2 for one of two GPUs that share "
        "the keys, ~256+64 for latents of other widths than 512+64, ~lists for lists of slots; for example "
        "64x1024x16x1@1. "
        "Default: a grid of 32 shapes."
    ),
]
_Implementations = Annotated[
    list[str] | None,
    typer.Option(help="Implementation to measure; repeatable. Default: all but our forced kernels."),
]
_KvDtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-dtype",
        help=f"Format of the cache: {', '.join(_KV_DTYPES)}; auto is --dtype. Repeatable: each shape is then "
        "measured with each. Default: auto.",
    ),
]
_AmongKernels = Annotated[
    bool, typer.Option("--among-kernels", help="Run other work between calls, as in a model.")
]
_Baseline = Annotated[
    Path | None, typer.Option(help="Another checkout of mla-backend, whose kernels are measured too.")
]


@app.command()
def decode(
    shapes: _Shapes = None,
    impl: _Implementations = None,
    output: _Output = None,
    dtype: _Dtype = "bfloat16",
    kv_dtype: _KvDtypes = None,
    device: _Device = "cuda",
    commit: _Commit = None,
    among_kernels: _AmongKernels = False,
    baseline: _Baseline = None,
) -> None:
    """Time decode attention, ours and other implementations', each checked against fp64."""
    from mla_backend_bench import decode as bench
    from mla_backend_bench import tables
    from mla_backend_bench.baseline import Checkout
    from mla_backend_bench.cases import STANDARD_GRID, Case
    from mla_backend_bench.implementations import DEFAULT, IMPLEMENTATIONS

    console = make_console()
    _check_names("implementation", impl, IMPLEMENTATIONS)
    _check_names("kv_dtype", kv_dtype, _KV_DTYPES)
    with _as_bad_parameter(InvalidInputError):
        parsed = [Case.parse(shape) for shape in shapes or STANDARD_GRID]
        formats = [None if name == "auto" else name for name in kv_dtype or ("auto",)]
        cases = [replace(case, kv_dtype=name) for case in parsed for name in formats]
        checkout = Checkout(baseline) if baseline else None
    torch_dtype, torch_device = _dtype(dtype), _device("bench decode", device)
    names = impl or (DEFAULT if torch_device.type == "cuda" else ["torch"])

    def finished(case: Case, results: bench.Results) -> None:
        tables.print_decode_case(console, case, results)
        advance()
        if output:
            results.save(output)

    with _as_bad_parameter(UnsupportedError), _progress(len(cases)) as advance:
        results = bench.run(
            cases, names, torch_device, torch_dtype, finished, commit, among_kernels, checkout
        )
    tables.print_decode_summary(console, cases, results)
    if not results.rows:
        raise typer.Exit(1)


@app.command()
def quick(device: _Device = "cuda") -> None:
    """Compare our decode kernels with all others that are installed here, in about a minute."""
    from mla_backend_bench import decode as bench
    from mla_backend_bench import tables
    from mla_backend_bench.cases import QUICK_GRID, QUICK_GRID_OF_CPUS, Case
    from mla_backend_bench.implementations import DEFAULT

    torch_device = _device("bench quick", device)
    on_gpu = torch_device.type == "cuda"
    cases = [Case.parse(shape) for shape in (QUICK_GRID if on_gpu else QUICK_GRID_OF_CPUS)]
    names = DEFAULT if on_gpu else ["torch"]
    console = make_console()
    with _progress(len(cases)) as advance:
        results = bench.run(cases, names, torch_device, _dtype("bfloat16"), lambda *_: advance())
    tables.print_quick(console, cases, results)
    if not results.rows:
        raise typer.Exit(1)


@app.command()
def sparse(
    shapes: Annotated[
        list[str] | None,
        typer.Argument(
            help=r"decode:ROWSxHEADS or prefill:ROWSxHEADS, with @TOPK if not 2048. Default: a grid."
        ),
    ] = None,
    impl: _Implementations = None,
    output: _Output = None,
    device: _Device = "cuda",
    commit: _Commit = None,
) -> None:
    """Time sparse attention to lists of slots, ours and other implementations', checked against fp64."""
    from mla_backend_bench import sparse as bench
    from mla_backend_bench import tables

    console, torch_device = make_console(), _device("bench sparse", device)
    _check_names("implementation", impl, bench.SPARSE_IMPLEMENTATIONS)
    with _as_bad_parameter(InvalidInputError):
        cases = [bench.SparseCase.parse(shape) for shape in shapes or bench.STANDARD_GRID]
    names = impl or (bench.DEFAULT if torch_device.type == "cuda" else ["mla_backend"])

    def finished(case: bench.SparseCase, results: bench.Results) -> None:
        tables.print_sparse_case(console, case, results.of(case))
        advance()
        if output:
            results.save(output)

    with _progress(len(cases)) as advance:
        results = bench.run(cases, names, torch_device, finished, commit)
    for failure in results.failures:
        console.print(f"{failure.case}: {failure.impl} has no result: {failure.reason}", markup=False)
    if not results.rows:
        raise typer.Exit(1)


@app.command()
def prefill(
    shapes: Annotated[
        list[str] | None,
        typer.Argument(
            help="HEADSxQ_LEN\\[xKV_LEN]@D_QK\\[:D_V]\\[~full], for example 16x2048@192:128; causal without "
            "~full. Default: 48 heads at dimensions 192:128 and 256 to 1024."
        ),
    ] = None,
    impl: Annotated[
        list[str] | None, typer.Option(help="Implementation to measure; repeatable. Default: all.")
    ] = None,
    output: _Output = None,
    dtype: _Dtype = "bfloat16",
    device: _Device = "cuda",
    commit: _Commit = None,
) -> None:
    """Time vanilla attention, ours and other libraries', each checked against fp64."""
    from mla_backend_bench import prefill as bench
    from mla_backend_bench import tables
    from mla_backend_bench.prefill_implementations import IMPLEMENTATIONS

    _check_names("implementation", impl, IMPLEMENTATIONS)
    with _as_bad_parameter(InvalidInputError):
        parsed = [bench.PrefillShape.parse(shape) for shape in shapes or bench.STANDARD_SHAPES]
    torch_dtype, torch_device = _dtype(dtype), _device("bench prefill", device)
    names = impl or (list(IMPLEMENTATIONS) if torch_device.type == "cuda" else ["mla_backend"])
    console = make_console()

    def finished(shape: bench.PrefillShape, results: bench.PrefillResults) -> None:
        tables.print_prefill_shape(console, shape, results)
        advance()
        if output:
            results.save(output)

    with _progress(len(parsed)) as advance:
        results = bench.run(parsed, names, torch_device, torch_dtype, finished, commit)
    if not results.rows:
        raise typer.Exit(1)


@app.command()
def crossover(
    heads: Annotated[int, typer.Option(min=1, help="Query heads on this GPU.")] = 16,
    prefix: Annotated[
        list[int] | None, typer.Option(min=1, help="Keys before the new tokens; repeatable.")
    ] = None,
    query_len: Annotated[list[int] | None, typer.Option(min=1, help="New tokens; repeatable.")] = None,
    output: Annotated[
        Path | None, _output("Results file (JSON). Engines use it as MLA_BACKEND_RATES.")
    ] = None,
    dtype: _Dtype16 = "bfloat16",
    device: _Device = "cuda",
    commit: _Commit = None,
) -> None:
    """Measure where vanilla attention overtakes absorbed, and fit the policy's rates to this machine."""
    from mla_backend_bench import crossover as bench
    from mla_backend_bench import tables

    if dtype == "float32":
        raise typer.BadParameter("engines use rates of bfloat16 or float16, not of float32")
    torch_dtype, torch_device = _dtype(dtype), _device("bench crossover", device)
    console = make_console()

    def measured(row: bench.Row) -> None:
        console.print(
            f"{row.query_len:5} new tokens on {row.prefix_len:6}: "
            f"vanilla {row.expand_us:8.1f} + {row.vanilla_us:8.1f} µs, "
            f"absorbed {row.absorb_us:8.1f} + {row.absorbed_us:8.1f} µs, "
            f"{'absorbed' if row.absorbed_over_vanilla <= 1 else 'vanilla'} is faster",
            highlight=False,
        )

    prefixes, query_lens = prefix or bench.PREFIX_LENS, query_len or bench.QUERY_LENS
    try:
        calibration = bench.run(heads, prefixes, query_lens, torch_device, torch_dtype, measured, commit)
    except (InvalidInputError, KernelBuildError, UnsupportedError) as error:
        end(str(error))
    tables.print_crossover(console, calibration)
    if output:
        calibration.save(output)


_ServingBackends = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        help="Attention backend to measure; repeatable. Default: ours and the engine's own. "
        "In SGLang, DECODE/PREFILL names two. 'NAME JSON' gives it engine options of its own, such as "
        '\'MLA_BACKEND {"kv_cache_dtype": "fp8"}\' (CUSTOM before vLLM 0.32).',
    ),
]
_Rounds = Annotated[int, typer.Option(min=1, help="Measurements of each shape; the median counts.")]
_OutputByModel = Annotated[
    Path | None, _output("Results file (JSON). Another engine's or model's rows in it are kept.")
]
_Add = Annotated[
    bool, typer.Option("--add", help="Keep the file's rows of this model; add those of new starts.")
]
_Starts = Annotated[int, typer.Option(min=1, help="Starts of each engine, in turn.")]
_Together = Annotated[int, typer.Option(min=1, help="Engines that run at the same time.")]
_EngineDtype = Annotated[str, typer.Option("--dtype", help="Passed to the engine.")]
_EngineOptions = Annotated[
    str, typer.Option(help="Further arguments of the engine's constructor, a JSON object.")
]


def _check_engine_run(
    command: str, engine: str, shapes: list[str], backends: list[str] | None, output: Path | None
) -> list[Shape]:
    """The parsed shapes. Refuses an unknown engine, a bad shape or backend, and a file that does not hold
    results of ``bench command``."""
    from mla_backend_bench import serving
    from mla_backend_bench.serving_engines import DRIVERS, Backend, Shape

    if engine not in DRIVERS:
        raise typer.BadParameter(f"unknown engine {engine}; choose from {', '.join(DRIVERS)}")
    with _as_bad_parameter(InvalidInputError):
        parsed = [Shape.parse(shape) for shape in shapes]
        for text in backends or ():
            Backend.parse(text)
        if output:
            serving.check(output, command)
    return parsed


def _check_installed(engine: str) -> None:
    if importlib.util.find_spec(engine) is None:
        end(f"{engine} is not installed here")


def _measure_engines(
    settings: Settings,
    backends: list[str] | None,
    meter: type[Meter],
    starts: int,
    output: Path | None,
    add: bool,
    commit: str | None,
    show: Callable[[Console, list[Row]], None],
) -> None:
    """Measure all backends and starts, save the rows one by one, and show them.

    With ``add``, the rows that the file has of the model are the first of them. Ends the command with exit
    status 1 if an engine failed.
    """
    import torch

    from mla_backend_bench import serving as bench
    from mla_backend_bench.serving_engines import DRIVERS

    model = Path(settings.model).resolve().name
    rows: list[Row] = []
    if add:
        if output is None:
            raise typer.BadParameter("--add needs the file that it adds to: -o FILE")
        with _as_bad_parameter(InvalidInputError):
            rows = bench.rows_of(output, settings.engine, model, commit)
    backends = backends or DRIVERS[settings.engine].default_backends(torch.cuda.is_available())
    first = 1 + max((row["start"] for row in rows), default=-1)
    failed: list[str] = []

    def on_failure(backend: str, log: str) -> None:
        failed.append(backend)
        typer.echo(f"{backend} failed; the end of its log:\n{log}", err=True)

    for start in range(first, first + starts):
        for row in bench.run(settings, backends, on_failure, meter):
            rows.append({"start": start, "model": model} | row)
            if output:
                bench.save(output, rows, _command_line(), commit)
    if rows:
        show(make_console(), rows)
    if failed or not rows:
        raise typer.Exit(1)


@app.command()
def serving(
    engine: Annotated[str, typer.Argument(help="vllm or sglang.")],
    model: Annotated[str, typer.Argument(help="Path of the model.")],
    shapes: Annotated[
        list[str] | None, typer.Argument(help="BATCHxCONTEXT or BATCHxCACHED+NEW. Default: 1x1024 16x1024.")
    ] = None,
    backend: _ServingBackends = None,
    output: _OutputByModel = None,
    add: _Add = False,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens that each request generates.")] = 129,
    rounds: _Rounds = 1,
    starts: _Starts = 1,
    together: _Together = 1,
    dtype: _EngineDtype = "bfloat16",
    engine_options: _EngineOptions = "{}",
    profile: Annotated[bool, typer.Option(help="Also time by the engine's profiler, on a GPU.")] = True,
    commit: _Commit = None,
) -> None:
    """Time prefill and decode of a whole engine, with this backend and with the engine's own."""
    from mla_backend_bench import tables
    from mla_backend_bench.serving import EngineMeter
    from mla_backend_bench.serving_engines import DRIVERS, Settings

    parsed = _check_engine_run("serving", engine, shapes or ["1x1024", "16x1024"], backend, output)
    options = _json_object(engine_options)
    _check_installed(engine)
    settings = Settings(engine, model, parsed, new_tokens, rounds, together, dtype, options, profile)
    show = functools.partial(tables.print_serving, is_ours=DRIVERS[engine].is_ours)
    _measure_engines(settings, backend, EngineMeter, starts, output, add, commit, show)


@app.command()
def layer(
    engine: Annotated[str, typer.Argument(help="vllm or sglang.")],
    model: Annotated[str, typer.Argument(help="Path of the model.")],
    shapes: Annotated[list[str] | None, typer.Argument(help="BATCHxCONTEXT. Default: 1x8192.")] = None,
    backend: _ServingBackends = None,
    output: _OutputByModel = None,
    add: _Add = False,
    starts: _Starts = 1,
    together: _Together = 1,
    engine_options: _EngineOptions = "{}",
    commit: _Commit = None,
) -> None:
    """Count a layer's kernels in a decode step of an engine, and time it outside of its matrix products."""
    from mla_backend.checkpoint import Checkpoint
    from mla_backend_bench import tables
    from mla_backend_bench.layer import STEPS
    from mla_backend_bench.serving import EngineMeter
    from mla_backend_bench.serving_engines import Settings

    parsed = _check_engine_run("layer", engine, shapes or ["1x8192"], backend, output)
    with _as_bad_parameter(InvalidInputError):
        layers = Checkpoint.find(model).num_layers
    options = _json_object(engine_options)
    _check_installed(engine)
    _device("bench layer", "cuda")
    new_tokens = STEPS + 1
    settings = Settings(engine, model, parsed, new_tokens, 1, together, "bfloat16", options, layers=layers)
    _measure_engines(settings, backend, EngineMeter, starts, output, add, commit, tables.print_layers)


@app.command()
def load(
    engine: Annotated[str, typer.Argument(help="vllm or sglang.")],
    model: Annotated[str, typer.Argument(help="Path of the model.")],
    backend: _ServingBackends = None,
    output: _OutputByModel = None,
    add: _Add = False,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            callback=_distinct,
            help="Requests at a time; repeatable with other numbers. Default: 1, 8, 32 and 128.",
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, on average.")] = 2048,
    new_tokens: Annotated[int, typer.Option(min=3, help="Tokens that a request makes, on average.")] = 256,
    range_ratio: Annotated[
        float,
        typer.Option(min=0, max=0.9, help="Lengths are drawn from 1 - R to 1 + R times these averages."),
    ] = 0.5,
    waves: Annotated[int, typer.Option(min=1, help="Requests, as a multiple of the concurrency.")] = 4,
    min_requests: Annotated[int, typer.Option(min=1, help="Requests, at least.")] = 16,
    starts: _Starts = 1,
    together: _Together = 1,
    dtype: _EngineDtype = "bfloat16",
    engine_options: _EngineOptions = "{}",
    commit: _Commit = None,
) -> None:
    """Put an engine's server under load by the engine's own generator, with this backend and with others."""
    from mla_backend_bench import tables
    from mla_backend_bench.load import ServerMeter, vocabulary_of
    from mla_backend_bench.serving_engines import Load, Settings

    _check_engine_run("load", engine, [], backend, output)
    with _as_bad_parameter(InvalidInputError):
        vocabulary = vocabulary_of(model)
    options = _json_object(engine_options)
    _check_installed(engine)
    loads = [
        Load(number, max(waves * number, min_requests), prompt_tokens, new_tokens, range_ratio)
        for number in concurrency or (1, 8, 32, 128)
    ]
    if vocabulary < 8 * (requests := max(load.requests for load in loads)):
        typer.echo(
            f"the model has {vocabulary:,} token ids, too few for {requests:,} different prompts: the prefix "
            "cache will have some of them; write a larger vocab_size into its config.json",
            err=True,
        )
    longest = loads[0].longest(new_tokens)
    settings = Settings(engine, model, loads, longest, 1, together, dtype, options)
    _measure_engines(settings, backend, ServerMeter, starts, output, add, commit, tables.print_loads)


@app.command()
def trace(
    shape: Annotated[str, typer.Argument(help=f"As for `bench decode`: {_SHAPE}.")],
    output: Annotated[Path, _output("Chrome trace (JSON).")],
    dtype: _Dtype16 = "bfloat16",
) -> None:
    """Record when each warp role of the Hopper kernel does what; open the file in Perfetto."""
    from mla_backend_bench import trace as recorder
    from mla_backend_bench.cases import Case

    try:
        recorded = recorder.record(Case.parse(shape), _dtype(dtype))
    except InvalidInputError as error:
        raise typer.BadParameter(str(error)) from None
    except (KernelBuildError, UnsupportedError) as error:
        end(str(error))
    output.write_text(json.dumps(recorded))
    make_console().print(f"wrote {output}", highlight=False)


@app.command()
def plot(
    results: Annotated[Path, typer.Argument(help="Results file of `bench decode`.")],
    output: Annotated[Path, _output("Picture, such as decode.svg or .png.")],
    among: Annotated[
        Path | None, typer.Option(help="Results of `bench decode --among-kernels`, as a second mark.")
    ] = None,
) -> None:
    """Draw how much faster our kernel is than each other implementation on each shape."""
    from mla_backend_bench import plot as bench
    from mla_backend_bench.decode import Results

    if not output.suffix:
        raise typer.BadParameter(f"name a picture by its format, such as {output}.svg")
    try:
        beside = Results.load(among) if among else None
        bench.save(bench.draw(Results.load(results), beside), output)
    except ImportError:
        end("bench plot needs matplotlib: pip install 'mla-backend[bench]'")
    except (OSError, ValueError) as error:  # a format that matplotlib does not know is a ValueError too
        raise typer.BadParameter(str(error)) from None
    make_console().print(f"wrote {output}", highlight=False)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar of how many shapes are done, on stderr, while a terminal is there. Yields what advances it."""
    with Progress(
        TextColumn("shape {task.completed} of {task.total}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("about"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=make_console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def _command_line() -> str:
    """This command, as `mla-backend` takes it."""
    return shlex.join(["mla-backend", "bench", *sys.argv[1 + (sys.argv[1:2] == ["bench"]) :]])


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object")
    return value


def _check_names(what: str, given: Iterable[str] | None, known: Iterable[str]) -> None:
    if unknown := set(given or ()) - set(known):
        raise typer.BadParameter(
            f"unknown {what} {', '.join(sorted(unknown))}; choose from {', '.join(known)}"
        )


def _device(command: str, name: str) -> torch.device:
    """The device of that name; a GPU becomes torch's current one, which graphs are captured on.

    Ends the command, in one line, if it is a GPU and there is none.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise typer.BadParameter(f"{name!r} is not a device to measure; write cuda, cuda:1 or cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        end(f"{command} needs a GPU, and torch sees none here; --device cpu measures the CPU instead")
    if (device.index or 0) >= (count := torch.cuda.device_count() if device.type == "cuda" else 1):
        raise typer.BadParameter(f"{name!r} does not exist: torch sees {count} of its kind")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def _dtype(name: str) -> torch.dtype:
    import torch

    if name not in _DTYPES:
        raise typer.BadParameter(f"dtype must be one of {', '.join(_DTYPES)}, not {name}")
    return getattr(torch, name)


@contextlib.contextmanager
def _as_bad_parameter(*errors: type[Exception]) -> Iterator[None]:
    """Ends the command with the message of an error of these types, which its arguments caused."""
    try:
        yield
    except errors as error:
        raise typer.BadParameter(str(error)) from None
