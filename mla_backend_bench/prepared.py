"""Implementations that are ready to be timed: checked against fp64 before and after the timing."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_backend_bench.results import CaseResults, WrongResultError, checked_rel_l2
from mla_backend_bench.timing import Replay, WorkBetweenCalls, seconds_per_call


class Implementation(ABC):
    """An implementation of attention, constructed for the inputs of one case.

    Attributes:
        plan_includes_a_run: `plan` also attends once.

    Raises:
        ImportError: its library is not installed.
        UnsupportedError: it does not serve the case.
    """

    plan_includes_a_run: ClassVar[bool] = False

    def plan(self) -> None:
        """Do the work that an engine does once per step; none by default."""
        return None

    @abstractmethod
    def run(self, layer: int) -> Tensor:
        """Attend to one layer's keys.

        Returns:
            [T, H, 512], or [T, H, d_v] in prefill. The next call may overwrite it.
        """


@dataclass
class Prepared:
    """An implementation whose results are right, ready to be timed.

    Attributes:
        replay: its calls, one for each layer.
        plan_seconds: wall-clock time of a plan.
        rows: the rows of its output that are compared.
        expected: the right values of these rows in the last layer, with which a replay ends.
        limit: the largest relative L2 error of a right result.
        rel_l2: the largest error so far.
    """

    replay: Replay
    plan_seconds: float
    rows: slice | list[int]
    expected: Tensor
    limit: float
    rel_l2: float

    def check(self) -> None:
        """Replay once more, which must overwrite NaN with a right result.

        Raises:
            WrongResultError: it does not.
        """
        self.replay.result.fill_(math.nan)
        self.replay.replay()
        error = checked_rel_l2(self.replay.result[self.rows], self.expected, self.limit)
        self.rel_l2 = max(self.rel_l2, error)


def prepare(
    implementation: Implementation,
    expected: tuple[Tensor, Tensor],
    limit: float,
    num_layers: int,
    device: torch.device,
    rows: slice | list[int] = slice(None),
    between: WorkBetweenCalls | None = None,
) -> Prepared:
    """Check an implementation, time its plan, and capture its calls.

    Args:
        expected: ``rows`` of the first and of the last layer's output.
        limit: the largest relative L2 error of a right result.
        between: work before each call.

    Raises:
        WrongResultError: its results are wrong. Errors of the implementation itself pass through.
    """

    def run(layer: int) -> Tensor:
        if between is not None:
            between()
        return implementation.run(layer)

    implementation.plan()
    error = checked_rel_l2(implementation.run(0)[rows], expected[0], limit)
    plan_seconds = seconds_per_call(implementation.plan, device)
    if implementation.plan_includes_a_run:
        plan_seconds = max(0.0, plan_seconds - seconds_per_call(lambda: implementation.run(0), device))
    prepared = Prepared(Replay(run, num_layers, device), plan_seconds, rows, expected[1], limit, error)
    prepared.check()
    return prepared


def still_right(prepared: dict[str, Prepared], case: Any, results: CaseResults) -> dict[str, Prepared]:
    """The implementations whose results are still right after the timing; others get a `Failure`."""
    right = {}
    for name, one in prepared.items():
        try:
            one.check()
        except WrongResultError as error:
            results.fail(case, name, error)
        else:
            right[name] = one
    return right
