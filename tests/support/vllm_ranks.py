#!/usr/bin/env python3
"""Greedy tokens of a rank of several vLLM engines in turn, as JSON; for tests, which run all ranks.

    RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... \\
        python vllm_ranks.py JOBS.json RESULT.json

A job has a `model`, `options` of `LLM`, and `prompts`, which run twice: then all of them are in the prefix
cache. The result has `Sequence`s of each job, and how often each attention path was called. Engines start and
end inside this process, which saves most of the time of a start.

vLLM's CPU platform lacks three kernels that decode context parallelism needs. Here they are in torch.
"""

import inspect
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from mla_backend import counters  # noqa: E402
from tests.support.vllm_workload import clean_up, freeze_for_good, generate  # noqa: E402


def map_slots(arguments: dict) -> None:
    """The slots of new tokens on this rank, -1 for those of other ranks (vLLM's `block_table.py`)."""
    starts, positions = arguments["query_start_loc"].long(), arguments["positions"]
    size, rank = arguments["TOTAL_CP_WORLD_SIZE"], arguments["TOTAL_CP_RANK"]
    interleave, page = arguments["CP_KV_CACHE_INTERLEAVE_SIZE"], arguments["KV_CACHE_BLOCK_SIZE"]
    tokens = int(starts[-1])
    requests = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
    position = positions[:tokens]
    run = position // interleave
    place = run // size * interleave + position % interleave
    slots = arguments["block_table"][requests, place // page].long() * page + place % page
    arguments["slot_mapping"][: arguments["max_num_tokens"]] = -1
    arguments["slot_mapping"][:tokens] = torch.where(run % size == rank, slots, -1)


def weigh_output(
    out: Tensor, lses: Tensor, rank: int, ctx: object, is_lse_base_on_e: bool = True
) -> tuple[Tensor, Tensor]:
    """A rank's output [T, H, d] by its weight among the lses [ranks, T, H] (vLLM's `correct_attn_out`)."""
    assert is_lse_base_on_e and lses.dtype is torch.float32
    lse = lses.logsumexp(0)
    weight = (lses[rank] - lse).exp().nan_to_num(0.0)
    return out * weight.unsqueeze(-1), lse


def gather_pages(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
) -> None:
    """The cached rows of several requests, one after the other (vLLM's `_custom_ops.py`)."""
    page = src_cache.shape[1]
    starts = [0] * batch_size if seq_starts is None else seq_starts.tolist()
    bounds = cu_seq_lens.tolist()
    for request, start in enumerate(starts):
        first, last = bounds[request], bounds[request + 1]
        tokens = torch.arange(start, start + last - first)
        pages = block_table[request, tokens // page].long()
        dst[first:last] = src_cache[pages, tokens % page]


def complete_cpu_platform() -> None:
    from vllm import _custom_ops
    from vllm.distributed.device_communicators import cpu_communicator
    from vllm.utils import cpu_triton_utils
    from vllm.v1.attention.ops import dcp

    from mla_backend_vllm import refusals

    signature = inspect.signature(cpu_triton_utils._compute_slot_mapping_kernel_impl)
    replacement = lambda *args, **kwargs: map_slots(signature.bind(*args, **kwargs).arguments)  # noqa: E731
    cpu_triton_utils._compute_slot_mapping_kernel_impl = replacement
    if hasattr(cpu_triton_utils, "compute_slot_mapping_kernel"):
        cpu_triton_utils.compute_slot_mapping_kernel.func = replacement
    dcp.correct_attn_out = weigh_output
    _custom_ops.cp_gather_cache = gather_pages
    # Started like this, all engines of a machine would share one name in shared memory. If ranks do not agree
    # on a name, they use torch's communication.
    name = staticmethod(lambda communicator: f"process {os.getpid()}")
    cpu_communicator._CPUSHMDistributed.make_group_name = name
    refusals.CPU_HAS_DCP = True


def run(model: str, options: dict, prompts: list[list[int]]) -> tuple[list, dict[str, int]]:
    """The sequences and calls of one engine, which ends."""
    from vllm import LLM

    freeze_for_good()
    start, before = time.monotonic(), counters.snapshot()
    llm = LLM(model, distributed_executor_backend="external_launcher", seed=0, **options)
    started = time.monotonic()
    made = [sequence for _ in range(2) for sequence in generate(llm, prompts)]
    print(
        f"{options}: started in {started - start:.1f} s, ran {time.monotonic() - started:.1f} s", flush=True
    )
    del llm
    clean_up()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    return made, {path: count.calls - before[path].calls for path, count in counters.snapshot().items()}


def main(jobs: str, result: str) -> None:
    if not torch.cuda.is_available():
        complete_cpu_platform()
    made = []
    for job in json.loads(Path(jobs).read_text()):
        made.append(run(**job))
        Path(result).write_text(json.dumps(made))
    sys.stdout.flush()
    os._exit(0)  # vLLM's own end may wait for the other rank


if __name__ == "__main__":
    main(*sys.argv[1:])
