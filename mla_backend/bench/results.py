"""What the results files of all benchmarks share."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any


class ResultsFile:
    """A base of dataclasses with the content of a results file."""

    rows: list[Any]

    def save(self, path: Path) -> None:
        """Write the results as JSON; missing folders are made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")  # type: ignore[call-overload]

    def of(self, case: Any) -> list[Any]:
        """The rows of a shape, which is a dataclass whose fields rows have, too."""
        return [row for row in self.rows if all(getattr(row, k) == v for k, v in asdict(case).items())]
