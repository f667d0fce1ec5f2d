"""Times of calls: replays of CUDA graphs on a GPU, wall-clock times on a CPU."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# Long enough that launching the graph and recording events hardly count.
_REPLAY_SECONDS = 2e-3
_ROUND_SECONDS = 30e-3
# At the power limit a GPU's clock depends on what ran in the last 0.1 seconds.
_WARM_UP_SECONDS = 0.1
_L2_MULTIPLE = 4


def seconds_per_call(function: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Median wall-clock seconds of a call, until its work on the device is done."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cold_cache_bytes(device: torch.device) -> int:
    """The total size of all layers' caches at which no call finds its keys in the L2 cache."""
    if device.type != "cuda":
        return 1 << 20
    return _L2_MULTIPLE * torch.cuda.get_device_properties(device).L2_cache_size


class WorkBetweenCalls:
    """Work that stands for the rest of a model's layer: it evicts everything else from the GPU's caches.

    It writes twice the size of the L2 cache, and its kernels' code fills the instruction caches.
    """

    def __init__(self, device: torch.device):
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._large = torch.zeros(2 * l2_bytes // 4, dtype=torch.int32, device=device)
        self._rows = torch.randn(64, 2048, dtype=torch.bfloat16, device=device)
        self._weight = torch.randn(2048, 2048, dtype=torch.bfloat16, device=device)

    def __call__(self) -> None:
        self._large.add_(1)
        product = self._rows @ self._weight
        torch.layer_norm(torch.softmax(product, -1), (2048,))
        torch.topk(product, 6)


class Replay:
    """Repeated calls of `run(0) ... run(num_layers - 1)`, captured in one CUDA graph.

    On a CPU each replay makes the calls. A GPU must be torch's current one.

    Attributes:
        result: the last call's return value, which each replay overwrites.
        num_calls: calls in one replay.
        sm_mhz: clock of a GPU's multiprocessors in the last round of `measure`, if it can be read.
    """

    def __init__(self, run: Callable[[int], Any], num_layers: int, device: torch.device):
        self.device = device
        self._run = run
        self._graph = None
        self.sm_mhz: float | None = None
        for layer in range(min(2, num_layers)):  # the first calls may build or tune kernels
            run(layer)
        seconds = seconds_per_call(lambda: run(0), device)
        passes = max(1, round(_REPLAY_SECONDS / (seconds * num_layers)))
        self._layers = list(range(num_layers)) * passes
        self.num_calls = len(self._layers)
        if device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.result = self._call_all()
        self.replay()
        self._seconds = seconds_per_call(self.replay, device, repeats=1)
        self._replays = max(1, round(_ROUND_SECONDS / self._seconds))

    def _call_all(self) -> Any:
        for layer in self._layers:
            result = self._run(layer)
        return result

    def replay(self) -> None:
        if self._graph is None:
            self.result = self._call_all()
        else:
            self._graph.replay()

    def measure(self) -> list[float]:
        """Seconds per call of each replay in one round.

        On a GPU, 0.1 seconds of replays that are not measured come first.
        """
        if self._graph is None:
            return [
                seconds_per_call(self.replay, self.device, repeats=1) / self.num_calls
                for _ in range(self._replays)
            ]
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(self._replays + 1)]
        for _ in range(max(1, round(_WARM_UP_SECONDS / self._seconds))):
            self.replay()
        marks[0].record()
        for mark in marks[1:]:
            self._graph.replay()
            mark.record()
        marks[len(marks) // 2].synchronize()
        with contextlib.suppress(ModuleNotFoundError):
            self.sm_mhz = float(torch.cuda.clock_rate(self.device))
        marks[-1].synchronize()
        return [start.elapsed_time(end) * 1e-3 / self.num_calls for start, end in itertools.pairwise(marks)]


class Times(NamedTuple):
    """Seconds per call, over replays: the median, and the deciles between which eight of ten replays are."""

    median: float
    p10: float
    p90: float


def times_of(seconds: list[float]) -> Times:
    """The median and the deciles of measured times, at least one."""
    ordered = sorted(seconds)
    tenth, ninth = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    return Times(statistics.median(ordered), tenth, ninth)


def measure_in_turn(replays: dict[str, Replay], rounds: int) -> dict[str, Times]:
    """Times of each replay. They take turns, so a drift of the clocks affects all alike."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(rounds):
        for name, replay in replays.items():
            times[name] += replay.measure()
    return {name: times_of(values) for name, values in times.items()}
