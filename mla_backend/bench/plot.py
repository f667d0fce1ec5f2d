"""Draws a results file."""

from __future__ import annotations

from pathlib import Path

from mla_backend.bench.cases import Case
from mla_backend.bench.decode import Results
from mla_backend.bench.implementations import IMPLEMENTATIONS, OURS


def draw(results: Results, path: Path) -> None:
    """Write a picture of the share of the read ceiling that each implementation reaches on each shape.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(
        dict.fromkeys(
            Case(r.batch, r.seq_len, r.heads, r.q_len, r.page_size, r.lengths) for r in results.rows
        )
    )
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.42 * len(cases) + 2), 5), layout="constrained")
    for name in IMPLEMENTATIONS:
        points = [
            (index, 100 * row.tb_per_s / results.read_ceiling_tb_per_s)
            for index, case in enumerate(cases)
            for row in results.of(case)
            if row.impl == name
        ]
        if points:
            style = (
                {"marker": "D", "markersize": 8, "zorder": 3}
                if name in OURS
                else {"marker": "o", "alpha": 0.7}
            )
            axes.plot(*zip(*points, strict=True), linestyle="", label=name, **style)
    axes.set_xticks(range(len(cases)), [str(case) for case in cases], rotation=60, ha="right", fontsize=8)
    axes.set_ylim(0, 105)
    axes.set_ylabel(f"% of the read ceiling ({results.read_ceiling_tb_per_s:.2f} TB/s)")
    axes.set_xlabel("batch x context x heads x query length @ page size")
    axes.set_title(
        f"MLA decode, {results.dtype}, {results.machine['device']}: bytes that must move over time"
    )
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, ncols=3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
