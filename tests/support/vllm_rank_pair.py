"""Two ranks of vLLM engines, each in a process of its own that runs `vllm_ranks.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from mla_backend import counters
from tests.support.greedy import Sequence
from tests.support.ports import free_port

RANKS = 2
_SCRIPT = Path(__file__).with_name("vllm_ranks.py")


def sequences_of_ranks(jobs: list[dict], prompts: list[list[int]], folder: Path) -> list[list[Sequence]]:
    """What rank 0 generates in each job, after a check that rank 1 generates the same tokens.

    Args:
        jobs: as in `vllm_ranks.py`; ``options`` need not name the number of ranks.
        prompts: run twice in each job.
        folder: for files. Counters of both ranks and all jobs are left in ``folder / "counts"``.
    """
    size = {"tensor_parallel_size": RANKS}
    (folder / "jobs").write_text(json.dumps([job | {"options": job["options"] | size} for job in jobs]))
    (folder / "prompts").write_text(json.dumps(prompts))
    common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    common["NUMBA_NUM_THREADS"] = "1"  # numba would let OpenMP have one thread per processor, which spins
    common[counters.ENVIRONMENT_VARIABLE] = str(folder / "counts")
    results = [folder / f"{rank}.json" for rank in range(RANKS)]
    processes = [
        subprocess.Popen(
            [sys.executable, _SCRIPT, folder / "jobs", folder / "prompts", result],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, result in enumerate(results)
    ]
    assert [process.wait() for process in processes] == [0] * RANKS
    first, second = (
        [[Sequence(*s) for s in job] for job in json.loads(result.read_text())] for result in results
    )
    for mine, other in zip(first, second, strict=True):
        assert [s.tokens for s in mine] == [s.tokens for s in other]
    return first
