"""What a layer costs in a decode step of a whole engine: its kernels, and the time outside of its products.

Measured in traces of the engine's profiler, in which all kernels of a CUDA graph's launch have one number.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import statistics
from collections import defaultdict
from pathlib import Path

from mla_backend_bench.serving_engines import Driver, Shape
from mla_backend_bench.serving_timing import random_prompts

STEPS = 33

_PRODUCT = re.compile("gemm|nvjet|gemv|splitk|moe", re.IGNORECASE)
_ATTENTION = re.compile("mla|flash|attention", re.IGNORECASE)  # may be made of CUTLASS's products, too

Kernels = list[tuple[float, float, bool]]
"""Start and end in microseconds, and whether it is a matrix product."""


def measure(engine: Driver, shape: Shape, num_layers: int) -> dict[str, float]:
    """The medians over decode steps of kernels_per_layer, attention_us_per_layer and step_ms.

    ``num_layers`` are the layers with latent attention.

    attention_us_per_layer is the time in which no matrix product of the step runs: attention, norms,
    rotation, append, activations, and the gaps between kernels; also our own products with absorbed weights,
    which overlap their predecessors. step_ms is the time from the first kernel of a step's graph to its last.
    """
    prompts = random_prompts(engine, shape.batch, shape.context)
    engine.generate(prompts, 1)  # so that the prefix cache has them
    shutil.rmtree(engine.traces, ignore_errors=True)
    engine.traces.mkdir()
    engine.start_profile()
    engine.generate(prompts, 1 + STEPS)
    engine.stop_profile()
    steps = [step for trace in engine.traces.glob("*.json.gz") for step in graphs(trace, 4 * num_layers)]
    if not steps:
        raise RuntimeError(f"the traces in {engine.traces} have no graph of a decode step")
    return {
        "kernels_per_layer": statistics.median(map(len, steps)) / num_layers,
        "attention_us_per_layer": statistics.median(map(outside_products, steps)) / num_layers,
        "step_ms": statistics.median(map(span, steps)) * 1e-3,
    }


def graphs(trace: Path, at_least: int) -> list[Kernels]:
    """The launches of graphs with so many kernels or more."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    launches: dict[int, Kernels] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel":
            name, start = event["name"], event["ts"]
            is_product = bool(_PRODUCT.search(name)) and not _ATTENTION.search(name)
            launches[event["args"]["correlation"]].append((start, start + event["dur"], is_product))
    return [kernels for kernels in launches.values() if len(kernels) >= at_least]


def span(kernels: Kernels) -> float:
    """Microseconds from the start of the first to the end of the last."""
    return max(end for _, end, _ in kernels) - min(start for start, _, _ in kernels)


def outside_products(kernels: Kernels) -> float:
    """Microseconds of the `span` in which none of the matrix products runs."""
    products = sorted((start, end) for start, end, is_product in kernels if is_product)
    busy, last = 0.0, float("-inf")
    for start, end in products:
        busy += max(end - max(start, last), 0)
        last = max(last, end)
    return span(kernels) - busy
