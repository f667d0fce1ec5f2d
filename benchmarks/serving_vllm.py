#!/usr/bin/env python3
"""Prefill and decode latency of whole vLLM engines: this backend against vLLM's own, side by side in one run.

    python benchmarks/serving_vllm.py MODEL --shapes 1x8192 16x2048 -o benchmarks/results/serving-vllm.json
    python benchmarks/serving_vllm.py MODEL --backends MLA_BACKEND CPU_MLA --shapes 16x16 --new-tokens 256

A shape is BATCHxCONTEXT. Each backend gets an engine in a process of its own; with --rounds, backends take
turns, so that a machine's slow phases hit all of them, and the best of the rounds counts. Prompts are random
tokens, prefix caching is off. `prefill_ms` is the time to the first token of the whole batch;
`decode_ms_per_step` is what each further step takes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mla_backend import counters
from mla_backend.bench import environment

STOCK = {"cuda": ["FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"], "cpu": ["CPU_MLA"]}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--shapes", nargs="+", default=["1x1024", "16x1024"], help="BATCHxCONTEXT")
    parser.add_argument("--backends", nargs="+", help="default: this one and vLLM's own for this machine")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate per request")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--engine-options", type=json.loads, default={}, help="JSON, further arguments of vllm.LLM"
    )
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--measure", metavar="BACKEND", help=argparse.SUPPRESS)  # the process of one engine
    return parser.parse_args()


def parse_shape(shape: str) -> tuple[int, int]:
    batch, context = shape.split("x")
    return int(batch), int(context)


def measure(args: argparse.Namespace) -> list[dict]:
    """Rows of one engine with the backend `args.measure`."""
    import vllm

    shapes = [parse_shape(shape) for shape in args.shapes]
    options = {
        "dtype": args.dtype,
        "max_model_len": max(context for _, context in shapes) + args.new_tokens,
        "max_num_seqs": max(batch for batch, _ in shapes),
        "enable_prefix_caching": False,
        "attention_backend": args.measure,
    }
    llm = vllm.LLM(args.model, **(options | args.engine_options))
    vocabulary = llm.get_tokenizer().vocab_size
    generator = random.Random(0)

    def seconds(batch: int, context: int, new_tokens: int) -> float:
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        prompts = [
            {"prompt_token_ids": [generator.randrange(vocabulary) for _ in range(context)]}
            for _ in range(batch)
        ]
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    rows = []
    for batch, context in shapes:
        seconds(batch, context, args.new_tokens)  # warm-up: what is built for a shape at its first use
        prefill = seconds(batch, context, 1)
        total = seconds(batch, context, args.new_tokens)
        rows.append(
            {
                "engine": "vllm",
                "version": vllm.__version__,
                "backend": args.measure,
                "batch": batch,
                "context": context,
                "prefill_ms": prefill * 1e3,
                "decode_ms_per_step": (total - prefill) * 1e3 / (args.new_tokens - 1),
                "tokens_per_s": batch * args.new_tokens / total,
            }
        )
    ours = sum(
        count.calls for count in counters.read_folder(os.environ[counters.ENVIRONMENT_VARIABLE]).values()
    )
    from mla_backend_vllm import selection_name

    if (ours > 0) != (args.measure in (selection_name(), "CUSTOM")):
        raise RuntimeError(f"asked for {args.measure}, but this backend counted {ours} calls")
    return rows


def measure_in_process(backend: str, counters_folder: Path) -> list[dict]:
    """Run this script again for one backend; its rows, or none (and a message) if the engine failed."""
    rows_file = counters_folder / "rows.json"
    command = [sys.executable, *sys.argv, "--measure", backend, "--output", str(rows_file)]
    result = subprocess.run(
        command,
        env=os.environ | {counters.ENVIRONMENT_VARIABLE: str(counters_folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        print(f"{backend}: failed\n{result.stdout[-3000:]}", file=sys.stderr)
        return []
    return json.loads(rows_file.read_text())


def best(rows: list[dict]) -> dict[tuple, dict]:
    """For each (batch, context, backend) the row with the fastest decode."""
    fastest: dict[tuple, dict] = {}
    for row in rows:
        key = row["batch"], row["context"], row["backend"]
        if key not in fastest or row["decode_ms_per_step"] < fastest[key]["decode_ms_per_step"]:
            fastest[key] = row
    return fastest


def print_table(fastest: dict[tuple, dict]) -> None:
    table = Table("batch", "context", "backend", "prefill ms", "decode ms/step", "tokens/s", title="vLLM")
    for (batch, context, backend), row in sorted(fastest.items()):
        numbers = (
            f"{row['prefill_ms']:.1f}",
            f"{row['decode_ms_per_step']:.2f}",
            f"{row['tokens_per_s']:.0f}",
        )
        table.add_row(str(batch), str(context), backend, *numbers)
    Console().print(table)


def main() -> None:
    import tempfile

    args = parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; without a GPU only
    if args.measure:
        args.output.write_text(json.dumps(measure(args)))
        return
    import torch

    from mla_backend_vllm import selection_name

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backends = args.backends or [selection_name(), *STOCK[device.type]]
    rows: list[dict] = []
    for _ in range(args.rounds):
        for backend in backends:
            with tempfile.TemporaryDirectory() as folder:
                rows += measure_in_process(backend, Path(folder))
            if args.output:
                results = {"machine": environment.machine(device), "versions": environment.versions()}
                results |= {
                    "commit": environment.commit(),
                    "dtype": args.dtype,
                    "new_tokens": args.new_tokens,
                }
                args.output.write_text(json.dumps(results | {"rows": rows}, indent=1))
    print_table(best(rows))


if __name__ == "__main__":
    main()
