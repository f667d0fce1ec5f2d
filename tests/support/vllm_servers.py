"""A prefill and a decode server: two engines in processes of their own, and NIXL carries the cache across.

An engine ends where the next one starts in its process, which saves most of the time of a start. Engines with
several GPUs start further processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from mla_backend import counters
from mla_backend_bench.ports import free_port
from tests.support.greedy import Sequence
from tests.support.nixl_on_cpu import let_nixl_sleep
from tests.support.processes import kill_group
from tests.support.vllm_workload import clean_up, freeze_for_good, generate

PREFILL, DECODE = "kv_producer", "kv_consumer"  # vLLM's names of the roles

_llm: Any = None  # of this process


class Decoded(NamedTuple):
    """What the decode server made of some prompts.

    Attributes:
        sequences: what it generated.
        query_tokens: by path, of all its layers and ranks.
    """

    sequences: list[Sequence]
    query_tokens: dict[str, int]


class Servers:
    """A prefill and a decode server.

    Args:
        folder: for files.
    """

    def __init__(self, folder: Path):
        self._counts = folder / "decode"
        self._prefill, self._decode = (
            ProcessPoolExecutor(1, get_context("spawn"), _set_up, (str(folder / role),))
            for role in ("prefill", "decode")
        )
        self._groups = [server.submit(os.getpgrp) for server in (self._prefill, self._decode)]

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *error: object) -> None:
        """End both servers; also if they hang, which raises TimeoutError."""
        servers = self._prefill, self._decode
        try:
            for stop in [server.submit(_stop) for server in servers]:
                stop.result(timeout=60)
        finally:
            for server, group in zip(servers, self._groups, strict=True):
                with contextlib.suppress(BrokenProcessPool):
                    kill_group(group.result(timeout=60))
                server.shutdown()

    def start(self, model: Path | str, **options: Any) -> None:
        """Start both servers with these options of `LLM`, after the end of those before."""
        starts = [
            server.submit(_start, str(model), options, role)
            for server, role in ((self._prefill, PREFILL), (self._decode, DECODE))
        ]
        for start in starts:
            start.result()

    def replace_prefill(self, model: Path | str, **options: Any) -> None:
        """Start another prefill server, after the end of the one before; the decode server goes on."""
        self._prefill.submit(_start, str(model), options, PREFILL).result()

    def generate(self, prompts: list[list[int]]) -> Decoded:
        """Greedy texts: the prefill server reads the prompts, and the decode server continues them."""
        transfers = self._prefill.submit(_read, prompts).result()
        return self._continued(prompts, transfers)

    def alone(self, prompts: list[list[int]]) -> Decoded:
        """Greedy texts of the decode server, which also reads the prompts."""
        return self._continued(prompts, None)

    def _continued(self, prompts: list[list[int]], transfers: list | None) -> Decoded:
        before = counters.read_folder(self._counts)
        sequences = self._decode.submit(_continue, prompts, transfers).result()
        after = counters.read_folder(self._counts)
        return Decoded(sequences, {path: after[path].tokens - before[path].tokens for path in after})


def _set_up(counts: str) -> None:
    os.setpgid(0, 0)  # a group with the processes of its engines
    os.environ |= {counters.ENVIRONMENT_VARIABLE: counts, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    os.environ |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    # vLLM remembers the first port of a process. Each engine frees it at its end.
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())


def _start(model: str, options: dict[str, Any], role: str) -> None:
    global _llm
    _stop()
    import torch

    if not torch.cuda.is_available():
        let_nixl_sleep()
        if "decode_context_parallel_size" in options:
            _complete_cpu_platform()
    from vllm import LLM

    freeze_for_good()
    transfer = {"kv_connector": "NixlConnector", "kv_role": role}
    transfer["kv_buffer_device"] = "cuda" if torch.cuda.is_available() else "cpu"
    _llm = LLM(model, kv_transfer_config=transfer, **options)


@functools.cache
def _complete_cpu_platform() -> None:
    """For engines with decode context parallelism; before anything in this process imports vLLM's worker.

    Workers are forks of this process, so they have what is added here, and need not import vLLM again.
    """
    from tests.support.vllm_ranks import complete_cpu_platform

    complete_cpu_platform()
    from vllm.v1.executor import multiproc_executor
    from vllm.v1.worker import cpu_worker  # noqa: F401

    multiproc_executor.get_mp_context = functools.partial(get_context, "fork")


def _stop() -> None:
    global _llm
    if _llm is None:
        return
    _llm.llm_engine.engine_core.shutdown()
    _llm = None
    clean_up()


def _read(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """On the prefill server: where the decode server finds each prompt."""
    from vllm import SamplingParams

    stays = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    sampling = SamplingParams(temperature=0, max_tokens=1, extra_args=stays)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.kv_transfer_params for output in _llm.generate(requests, sampling, use_tqdm=False)]


def _continue(prompts: list[list[int]], transfers: list[dict[str, Any]] | None) -> list[Sequence]:
    """On the decode server, which has no prompt in its cache at first."""
    _llm.reset_prefix_cache()
    extra = transfers and [{"kv_transfer_params": transfer} for transfer in transfers]
    return generate(_llm, prompts, extra)
