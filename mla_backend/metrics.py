"""Prometheus metrics, where ``prometheus_client`` is installed.

=================================  ==================================================================
metric                             labels
=================================  ==================================================================
``mla_backend_tokens_total``       ``path``, as in :mod:`mla_backend.counters`; ``kernel``: the
                                   decoder's implementation, or for vanilla prefill the library that
                                   attends; ``cache_format``
``mla_backend_builds_total``       ``arch``; ``result``: "built" or "failed"
``mla_backend_build_seconds_total``  ``arch``
=================================  ==================================================================

They are counters in the client's own registry. In its multiprocess mode (PROMETHEUS_MULTIPROC_DIR), which
engines use, they lie in that folder, from which an engine's server adds them up over all processes.

As in :mod:`mla_backend.counters`, only calls from Python are counted: a captured CUDA graph counts once.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

_FAILURES = (OSError, ValueError)
"""Of a client whose folder (PROMETHEUS_MULTIPROC_DIR) cannot be written, or that has such a metric already.
Metrics are not worth the end of an engine."""


class _Metrics(NamedTuple):
    tokens: Any
    builds: Any
    build_seconds: Any


@functools.cache
def _metrics() -> _Metrics | None:
    # Not at this module's import: the client reads PROMETHEUS_MULTIPROC_DIR when it is imported.
    try:
        from prometheus_client import Counter
    except ImportError:
        return None
    return _Metrics(
        Counter(
            "mla_backend_tokens",
            "Query tokens of all layers and processes. A captured CUDA graph counts once.",
            ("path", "kernel", "cache_format"),
        ),
        Counter("mla_backend_builds", "Kernels that were compiled.", ("arch", "result")),
        Counter("mla_backend_build_seconds", "Time that compilers of kernels ran.", ("arch",)),
    )


@functools.cache
def _tokens(path: str, kernel: str, cache_format: str) -> Any:
    try:
        metrics = _metrics()
        return None if metrics is None else metrics.tokens.labels(path, kernel, cache_format)
    except _FAILURES as error:
        _warn(error)
        return None


def count_tokens(path: str, tokens: int, kernel: str, cache_format: str) -> None:
    """Count query tokens of one call."""
    counter = _tokens(path, kernel, cache_format)
    if counter is not None:
        counter.inc(tokens)


def count_build(arch: str, seconds: float, *, failed: bool) -> None:
    """Count a compiler's run of so many seconds."""
    try:
        if (metrics := _metrics()) is not None:
            metrics.builds.labels(arch, "failed" if failed else "built").inc()
            metrics.build_seconds.labels(arch).inc(seconds)
    except _FAILURES as error:
        _warn(error)


def _warn(error: Exception) -> None:
    logger.warning("no Prometheus metrics of mla-backend: %s: %s", type(error).__name__, error)
