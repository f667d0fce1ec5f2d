"""Two ranks of vLLM engines, each in a process of its own that runs `vllm_ranks.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from mla_backend_bench.ports import free_port
from tests.support.greedy import Sequence

RANKS = 2
_SCRIPT = Path(__file__).with_name("vllm_ranks.py")


class Generated(NamedTuple):
    """What rank 0 generates in a job, and how often it calls each attention path."""

    sequences: list[Sequence]
    calls: dict[str, int]


def generate_on_ranks(jobs: list[dict], folder: Path) -> list[Generated]:
    """What rank 0 generates in each job, after a check that rank 1 generates the same tokens.

    Args:
        jobs: as in `vllm_ranks.py`; ``options`` need not name the number of ranks.
        folder: for files.
    """
    size = {"tensor_parallel_size": RANKS}
    (folder / "jobs").write_text(json.dumps([job | {"options": job["options"] | size} for job in jobs]))
    common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    common["NUMBA_NUM_THREADS"] = "1"  # numba would let OpenMP have one thread per processor, which spins
    results = [folder / f"{rank}.json" for rank in range(RANKS)]
    processes = [
        subprocess.Popen(
            [sys.executable, _SCRIPT, folder / "jobs", result],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, result in enumerate(results)
    ]
    try:
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    first, second = (
        [
            Generated([Sequence(*s) for s in sequences], calls)
            for sequences, calls in json.loads(result.read_text())
        ]
        for result in results
    )
    for mine, other in zip(first, second, strict=True):
        assert [s.tokens for s in mine.sequences] == [s.tokens for s in other.sequences]
    return first


def _wait(processes: list[subprocess.Popen]) -> None:
    """Until all have ended. If one fails, the others may wait for it for ever."""
    while not all(process.poll() == 0 for process in processes):
        for rank, process in enumerate(processes):
            assert not process.returncode, f"rank {rank} ended with {process.returncode}"
        time.sleep(0.1)
