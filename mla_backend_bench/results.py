"""What the results of all benchmarks share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from mla_backend.errors import KernelBuildError, UnsupportedError
from mla_backend_bench.timing import synchronize

MAX_REL_L2 = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}
"""The largest relative L2 error against fp64 of a correct result. Rounding to bf16 alone gives 1.6e-3."""

CaseT = TypeVar("CaseT")


class WrongResultError(Exception):
    """An implementation's output differs too much from fp64."""


@dataclass(frozen=True)
class Failure:
    """Why an implementation has no row for a shape."""

    case: str
    impl: str
    reason: str


@dataclass
class ResultsFile:
    """The content of a results file; each benchmark adds fields.

    Attributes:
        machine, versions, commit: where the results come from, by `environment.origin`.
    """

    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None

    def save(self, path: Path) -> None:
        """Write the results as JSON; missing folders are made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


class CaseResults(ResultsFile):
    """Results of implementations on shapes. Subclasses are dataclasses, and have these fields last."""

    rows: list[Any]
    failures: list[Failure]

    def fail(self, case: Any, impl: str, error: Exception) -> None:
        """Record why an implementation has no row for a shape."""
        self.failures.append(Failure(str(case), impl, failure_reason(error)))

    def of(self, case: Any) -> list[Any]:
        """The rows of a shape: a dataclass, all of whose fields rows have, too."""
        return [row for row in self.rows if all(getattr(row, k) == v for k, v in asdict(case).items())]

    def measure(
        self,
        cases: Iterable[CaseT],
        device: torch.device,
        measure: Callable[[CaseT], None],
        on_case: Callable[[CaseT, Any], None],
    ) -> None:
        """Measure case after case. One that fails as a whole gets a `Failure` for "every implementation".

        Ends early after an error that leaves the GPU unusable.

        Args:
            measure: adds the rows and failures of a case.
            on_case: called after each case, with the results so far.
        """
        for case in cases:
            try:
                measure(case)
                synchronize(device)
            except Exception as error:  # out of memory, or the context was lost
                self.fail(case, "every implementation", error)
            on_case(case, self)
            try:
                synchronize(device)
            except RuntimeError:
                break


def checked_rel_l2(out: torch.Tensor, expected: torch.Tensor, limit: float) -> float:
    error = float((out.double() - expected).norm() / expected.norm())
    if not error <= limit:
        raise WrongResultError(f"wrong result: relative L2 error {error:.2e} against fp64")
    return error


def failure_reason(error: Exception) -> str:
    """Why an implementation has no result, in one line."""
    if isinstance(error, ImportError):
        return f"not installed: {_first_line(error)}"
    if isinstance(error, (WrongResultError, UnsupportedError, KernelBuildError)):
        return _first_line(error)
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
