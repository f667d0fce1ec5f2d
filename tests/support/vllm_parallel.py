#!/usr/bin/env python3
"""Greedy tokens of vLLM over two devices, as JSON; for tests, which run it in a process of its own.

    python vllm_parallel.py KIND MODEL RESULT.json OPTIONS.json

KIND `tensor` divides the heads of every layer, and `pipeline` the layers. `data` gives each device an engine
and every other prompt; layers with experts bring the two together in each step, also when one of them has
nothing left to do.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from mla_backend_bench.ports import free_port  # noqa: E402
from tests.support.vllm_workload import generate, prompts  # noqa: E402

RANKS = 2


def run(model: str, options: dict, some_prompts: list[list[int]]) -> list:
    from vllm import LLM

    return generate(LLM(model, **options), some_prompts)


def run_ranks(arguments: list[str]) -> list:
    """Engines as vLLM wants them for data parallelism offline: processes told apart by their environment."""
    common = {"VLLM_DP_SIZE": str(RANKS), "VLLM_DP_MASTER_PORT": str(free_port())}
    ranks = [{"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)} for rank in range(RANKS)]
    result = Path(arguments[2])
    parts = [result.with_suffix(f".{rank}") for rank in range(RANKS)]
    commands = [[sys.executable, __file__, "rank", arguments[1], str(part), arguments[3]] for part in parts]
    processes = [
        subprocess.Popen(command, env=os.environ | common | rank)
        for command, rank in zip(commands, ranks, strict=True)
    ]
    if any([process.wait() for process in processes]):
        sys.exit("a rank failed")
    made = [json.loads(part.read_text()) for part in parts]
    return [made[i % RANKS][i // RANKS] for i in range(sum(map(len, made)))]


def main(kind: str, model: str, result: str, options: str) -> None:
    settings = json.loads(options)
    if kind == "data":
        made = run_ranks(sys.argv[1:])
    elif kind == "rank":
        made = run(model, settings, prompts()[int(os.environ["VLLM_DP_RANK"]) :: RANKS])
    else:
        made = run(model, settings | {f"{kind}_parallel_size": RANKS}, prompts())
    Path(result).write_text(json.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
