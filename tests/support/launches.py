"""Launches that begin before their predecessor has ended."""

from collections.abc import Callable

import torch
from torch import Tensor


def assert_overlap_changes_nothing(
    all_layers: Callable[..., None], results: Tensor, *, captured: bool
) -> None:
    """Compare launches that may overlap with those between which the GPU is idle, bit for bit.

    Args:
        all_layers: writes ``results``; called with ``pause``, it calls that before each launch.
        captured: replay the launches from a graph.
    """
    all_layers(pause=torch.cuda.synchronize)
    expected = results.clone()
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            all_layers()
    for _ in range(10):
        graph.replay() if captured else all_layers()
        assert torch.equal(results, expected)
