"""Prefill and decode times of an engine, by the clock and by its profiler."""

from __future__ import annotations

import gzip
import json
import math
import random
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from mla_backend_bench.serving_engines import Driver, Prompts, Shape

REPEATS = 5  # wall-clock runs, of which the median counts
PROFILES = 3  # profiled runs, of which the median counts
PROFILED_STEPS = 16


def measure(
    engine: Driver, shape: Shape, new_tokens: int, repeats: int = REPEATS, profile: bool = False
) -> dict[str, float]:
    """Times in ms of one shape: prefill_ms, decode_ms_per_step and, with ``profile``, gpu_ms_per_step.

    Prompts are new random tokens: the engine's prefix cache holds none of them when prefill is timed, and all
    of them when decode is. For a shape with cached tokens, only prefill is timed: ``repeats`` times, each
    with other new tokens; the median counts.
    """
    if shape.cached:
        prefixes = random_prompts(engine, shape.batch, shape.cached)
        engine.generate(prefixes, 1)
        times = [prefill_ms_after(engine, prefixes, shape.context - shape.cached) for _ in range(repeats)]
        return {"prefill_ms": statistics.median(times)}
    prompts = random_prompts(engine, shape.batch, shape.context)
    result = {"prefill_ms": wall_seconds(engine, prompts, 1) * 1e3}
    result["decode_ms_per_step"] = ms_per_step(wall_seconds, engine, prompts, new_tokens - 1, repeats)
    if profile:
        result["gpu_ms_per_step"] = ms_per_step(gpu_seconds, engine, prompts, PROFILED_STEPS, PROFILES)
    return result


def random_prompts(engine: Driver, batch: int, length: int) -> Prompts:
    return [[random.randrange(engine.vocabulary) for _ in range(length)] for _ in range(batch)]


def prefill_ms_after(engine: Driver, prefixes: Prompts, new: int) -> float:
    """Milliseconds to the first token of requests with ``new`` random tokens after ``prefixes``."""
    suffixes = random_prompts(engine, len(prefixes), new)
    prompts = [prefix + suffix for prefix, suffix in zip(prefixes, suffixes, strict=True)]
    return wall_seconds(engine, prompts, 1) * 1e3


def ms_per_step(
    seconds: Callable[[Driver, Prompts, int], float],
    engine: Driver,
    prompts: Prompts,
    steps: int,
    repeats: int,
) -> float:
    """The time of each token after the first, from medians of runs for one token and for ``steps`` more."""
    runs = [(seconds(engine, prompts, 1), seconds(engine, prompts, 1 + steps)) for _ in range(repeats)]
    one, many = map(statistics.median, zip(*runs, strict=True))
    return (many - one) * 1e3 / steps


def wall_seconds(engine: Driver, prompts: Prompts, num_tokens: int) -> float:
    """Wall-clock seconds in which the engine generates ``num_tokens`` tokens per prompt."""
    start = time.perf_counter()
    engine.generate(prompts, num_tokens)
    return time.perf_counter() - start


def gpu_seconds(engine: Driver, prompts: Prompts, num_tokens: int) -> float:
    """Seconds in which the GPU works while the engine generates; of several GPUs, the longest."""
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
    """Seconds in which a kernel or a copy runs in a trace of torch's profiler; overlaps count once."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    work = ("kernel", "gpu_memcpy", "gpu_memset")
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in work)
    busy, last = 0.0, -math.inf
    for start, end in spans:
        busy += max(end - max(start, last), 0)
        last = max(last, end)
    return busy * 1e-6
