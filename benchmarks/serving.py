#!/usr/bin/env python3
"""Prefill and decode latency of whole engines: this backend against the engine's own, in turn in one run.

    python benchmarks/serving.py vllm MODEL --shapes 1x8192 16x2048 -o benchmarks/results/serving.json
    python benchmarks/serving.py sglang MODEL --shapes 1x8192 16x2048 -o benchmarks/results/serving.json

A shape is BATCHxCONTEXT. Each backend gets an engine in a process of its own; engines that run at the same
time (--together) share the GPU's memory, and only one of them has work at a time. Prompts are random tokens.

`prefill_ms` is the time to the first token of the whole batch. Then the same prompts, in the prefix cache by
now, are given again for one token and for many; `decode_ms_per_step` is what each token more takes. All
backends get the same prompts, and a request generates its prompt's first token again and again: which experts
a step reads depends on the tokens, and with random weights rounding alone would choose them.

`gpu_ms_per_step`, on a GPU, is how long it works for such a token, from profiles of further runs for one
token and for a few. Where it is far below `decode_ms_per_step`, the GPU waits for the engine's scheduler.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from mla_backend import counters
from mla_backend.bench import environment

Prompts = list[list[int]]
REPEATS = 5  # of a run, of which the median counts
PROFILES = 3  # likewise
PROFILED_STEPS = 16
TIMEOUT = 600  # seconds, for the start of an engine or a measurement
FORCE = 100.0  # the bias of the one token's logit; vLLM takes no larger one


class VllmEngine:
    """vLLM's offline engine. Its scheduler runs in a process of its own, as in a server."""

    @staticmethod
    def backends(on_gpu: bool) -> list[str]:
        from mla_backend_vllm import selection_name

        return [selection_name(), *(["FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"] if on_gpu else ["CPU_MLA"])]

    @staticmethod
    def is_ours(backend: str) -> bool:
        return backend in ("CUSTOM", "MLA_BACKEND")

    def __init__(self, args: argparse.Namespace, backend: str, traces: Path):
        import vllm

        self._vllm = vllm
        self.version = vllm.__version__
        self.traces = traces
        options = {
            "dtype": args.dtype,
            "max_model_len": max(context for _, context in args.shapes) + args.new_tokens,
            "max_num_seqs": max(batch for batch, _ in args.shapes),
            "attention_backend": backend,
        }
        if torch.cuda.is_available():
            options["profiler_config"] = {
                "profiler": "torch",
                "torch_profiler_dir": str(traces),
                "torch_profiler_with_stack": False,
            }
        self._llm = vllm.LLM(args.model, **(options | args.engine_options))
        self.vocabulary = self._llm.model_config.get_vocab_size()

    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        common = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "detokenize": False}
        sampling = [self._vllm.SamplingParams(**common, logit_bias={prompt[0]: FORCE}) for prompt in prompts]
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    def start_profile(self) -> None:
        self._llm.start_profile()

    def stop_profile(self) -> None:
        self._llm.stop_profile()


class SglangEngine:
    """SGLang's offline engine: tokenizer, scheduler and detokenizer as in a server."""

    @staticmethod
    def backends(on_gpu: bool) -> list[str]:
        return ["mla_backend", *(["flashmla", "triton", "flashinfer"] if on_gpu else ["triton"])]

    @staticmethod
    def is_ours(backend: str) -> bool:
        return "mla_backend" in backend.split("/")

    def __init__(self, args: argparse.Namespace, backend: str, traces: Path):
        import sglang

        self.version = sglang.__version__
        self.traces = traces
        decode, _, prefill = backend.partition("/")
        options = {
            "dtype": args.dtype,
            "context_length": max(context for _, context in args.shapes) + args.new_tokens + 1,
            "max_running_requests": max(batch for batch, _ in args.shapes),
            "page_size": 64,
            "attention_backend": decode,
            "prefill_attention_backend": prefill or None,
            "log_level": "warning",
        }
        self._engine = sglang.Engine(model_path=args.model, **(options | args.engine_options))
        self.vocabulary = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]

    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        common = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        sampling = [common | {"logit_bias": {str(prompt[0]): FORCE}} for prompt in prompts]
        self._engine.generate(input_ids=prompts, sampling_params=sampling)

    def start_profile(self) -> None:
        self._engine.start_profile(output_dir=str(self.traces), activities=["GPU"], with_stack=False)

    def stop_profile(self) -> None:
        self._engine.stop_profile()


Engine = VllmEngine | SglangEngine
ENGINES = {"vllm": VllmEngine, "sglang": SglangEngine}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", help="a path")
    parser.add_argument(
        "--shapes", nargs="+", type=parse_shape, default=[(1, 1024), (16, 1024)], metavar="BATCHxCONTEXT"
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        help="default: this one and the engine's own; SGLang takes another one for prefill behind a slash",
    )
    parser.add_argument("--new-tokens", type=int, default=129, help="tokens to generate per request")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each backend; the median counts")
    parser.add_argument("--together", type=int, default=1, help="engines that run at the same time")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine-options", type=json.loads, default={}, help="JSON, further arguments")
    parser.add_argument("--commit", help="recorded in the results; default: what git says of the checkout")
    parser.add_argument("-o", "--output", type=Path, help="JSON; another engine's rows in it are kept")
    return parser.parse_args()


def parse_shape(shape: str) -> tuple[int, int]:
    batch, context = shape.split("x")
    return int(batch), int(context)


def measure(
    engine: Engine, batch: int, context: int, new_tokens: int, repeats: int = REPEATS, profile: bool = False
) -> dict:
    # New ones each time: none may be in the cache already.
    prompts = [[random.randrange(engine.vocabulary) for _ in range(context)] for _ in range(batch)]
    result = {"prefill_ms": wall_seconds(engine, prompts, 1) * 1e3}
    result["decode_ms_per_step"] = ms_per_step(wall_seconds, engine, prompts, new_tokens - 1, repeats)
    if profile:
        result["gpu_ms_per_step"] = ms_per_step(gpu_seconds, engine, prompts, PROFILED_STEPS, PROFILES)
    return result


def ms_per_step(
    seconds: Callable[[Engine, Prompts, int], float],
    engine: Engine,
    prompts: Prompts,
    steps: int,
    repeats: int,
) -> float:
    """What each token after the first takes: from medians of runs for one token and for `steps` more."""
    runs = [(seconds(engine, prompts, 1), seconds(engine, prompts, 1 + steps)) for _ in range(repeats)]
    one, many = map(statistics.median, zip(*runs, strict=True))
    return (many - one) * 1e3 / steps


def wall_seconds(engine: Engine, prompts: Prompts, num_tokens: int) -> float:
    start = time.perf_counter()
    engine.generate(prompts, num_tokens)
    return time.perf_counter() - start


def gpu_seconds(engine: Engine, prompts: Prompts, num_tokens: int) -> float:
    """How long a GPU works while the engine generates; of several GPUs, the longest."""
    shutil.rmtree(engine.traces, ignore_errors=True)
    engine.traces.mkdir()
    engine.start_profile()
    engine.generate(prompts, num_tokens)
    engine.stop_profile()
    traces = list(engine.traces.glob("*.json.gz"))
    if not traces:
        raise RuntimeError(f"the engine's profiler left no trace in {engine.traces}")
    return max(map(busy_seconds, traces))


def busy_seconds(trace: Path) -> float:
    """How long kernels or copies run in a trace of torch's profiler; those that overlap count once."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    work = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in work)
    busy, last = 0.0, -math.inf
    for start, end in spans:
        busy += max(end - max(start, last), 0)
        last = max(last, end)
    return busy * 1e-6


def serve(connection: Connection, args: argparse.Namespace, backend: str, folder: str) -> None:
    """In a process of its own: an engine that measures the shapes which it is sent."""
    os.setsid()
    with open(Path(folder) / "log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ[counters.ENVIRONMENT_VARIABLE] = folder
    random.seed(0)
    try:
        engine = ENGINES[args.engine](args, backend, Path(folder) / "traces")
        for batch, context in args.shapes:  # what is built for a shape at its first use
            measure(engine, batch, context, new_tokens=2, repeats=1)
        counts = counters.read_folder(folder).values()
        if any(count.calls for count in counts) != engine.is_ours(backend):
            raise RuntimeError(f"asked for {backend}, but this backend counted {counts}")
        connection.send(engine.version)
        while True:
            shape = connection.recv()
            connection.send(measure(engine, *shape, args.new_tokens, profile=torch.cuda.is_available()))
    except EOFError:
        pass  # the parent is gone
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)  # the engine's processes too, which may outlive their parent


class Server:
    """The parent's side of `serve`."""

    def __init__(self, args: argparse.Namespace, backend: str, folder: str):
        self.backend, self._folder = backend, Path(folder)
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, args, backend, folder))
        self._process.start()
        theirs.close()

    def receive(self) -> str | dict | None:
        """What the engine answers; None, and the end of its log on stderr, if it failed or hangs."""
        try:
            if self._connection.poll(TIMEOUT):
                return self._connection.recv()
        except (EOFError, ConnectionError):
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        print(f"{self.backend}: failed\n{(self._folder / 'log').read_text()[-4000:]}", file=sys.stderr)
        return None

    def measure(self, shape: tuple[int, int]) -> dict | None:
        with contextlib.suppress(ConnectionError):
            self._connection.send(shape)
        return self.receive()

    def stop(self) -> None:
        self._connection.close()
        self._process.join()


def measure_group(args: argparse.Namespace, backends: list[str]) -> Iterator[dict]:
    """Rows of some backends, whose engines run at the same time and measure in turn."""
    with tempfile.TemporaryDirectory() as folder:
        servers = [Server(args, backend, tempfile.mkdtemp(dir=folder)) for backend in backends]
        versions = {server.backend: server.receive() for server in servers}
        running = [server for server in servers if versions[server.backend]]
        for shape in args.shapes:
            results: dict[str, list[dict]] = {server.backend: [] for server in running}
            for _ in range(args.rounds):
                for server in list(running):
                    if result := server.measure(shape):
                        results[server.backend].append(result)
                    else:
                        running.remove(server)
            for backend, measured in results.items():
                if measured:
                    medians = {key: statistics.median(m[key] for m in measured) for key in measured[0]}
                    row = {"engine": args.engine, "version": versions[backend], "backend": backend}
                    row |= {"batch": shape[0], "context": shape[1]}
                    yield row | {key: round(value, 4) for key, value in medians.items()}
        for server in servers:
            server.stop()


def save(args: argparse.Namespace, rows: list[dict], on_gpu: bool) -> None:
    results = json.loads(args.output.read_text()) if args.output.exists() else {"runs": {}, "rows": []}
    results["runs"][args.engine] = {
        "machine": environment.machine(torch.device("cuda" if on_gpu else "cpu")),
        "versions": environment.versions(),
        "commit": args.commit or environment.commit(),
        "command": " ".join(sys.argv),
    }
    results["rows"] = [row for row in results["rows"] if row["engine"] != args.engine] + rows
    args.output.write_text(json.dumps(results, indent=1) + "\n")


def print_table(rows: Iterable[dict], is_ours: Callable[[str], bool]) -> None:
    table = Table("batch", "context", "backend", "prefill ms", "decode ms/step", "of ours", "GPU ms/step")
    by_shape: dict[tuple[int, int], list[dict]] = {}
    for row in rows:
        by_shape.setdefault((row["batch"], row["context"]), []).append(row)
    for (batch, context), group in by_shape.items():
        own = [row["decode_ms_per_step"] for row in group if is_ours(row["backend"])]
        for row in sorted(group, key=lambda row: row["decode_ms_per_step"]):
            ratio = f"{row['decode_ms_per_step'] / own[0]:.3f}" if own else ""
            gpu = f"{row['gpu_ms_per_step']:.3f}" if "gpu_ms_per_step" in row else ""
            numbers = f"{row['prefill_ms']:.1f}", f"{row['decode_ms_per_step']:.3f}", ratio, gpu
            table.add_row(str(batch), str(context), row["backend"], *numbers)
    Console().print(table)


def main() -> None:
    args = parse_args()
    on_gpu = torch.cuda.is_available()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; without a GPU only
    engine = ENGINES[args.engine]
    backends = args.backends or engine.backends(on_gpu)
    rows: list[dict] = []
    for start in range(0, len(backends), args.together):
        for row in measure_group(args, backends[start : start + args.together]):
            rows.append(row)
            if args.output:
                save(args, rows, on_gpu)
    print_table(rows, engine.is_ours)
    if not rows:
        sys.exit(1)


if __name__ == "__main__":
    main()
