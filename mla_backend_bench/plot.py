"""Draws how much faster our kernel is than other implementations, from a results file of `bench decode`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mla_backend.errors import InvalidInputError
from mla_backend_bench.cases import Case
from mla_backend_bench.decode import Results
from mla_backend_bench.implementations import BASELINE, OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Label, colour and marker. Plain torch is left out: up to 80 times slower, it would only stretch the axis.
_OTHERS = {
    "flashmla": ("FlashMLA", "#009E73", "o"),
    "fa3": ("FlashAttention-3", "#D55E00", "s"),
    "flashinfer-fa3": ("FlashInfer (fa3)", "#CC79A7", "^"),
    "flashinfer-fa2": ("FlashInfer (fa2)", "#E69F00", "v"),
    "triton": ("Triton", "#56B4E9", "D"),
}
_BEST = "over the best"
_AMONG = "the same among other kernels"
_BAR_COLOUR = "#9DBBE0"
_TEXT_COLOUR = "#0B4F9C"
_CLOSE = 1.05  # dots closer than this factor would hide each other in one line
_TICKS = (0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16)


def draw(results: Results, among: Results | None = None) -> Figure:
    """One line per shape: a dot for our speed-up over each other implementation, a bar for the best one.

    Args:
        results: what is drawn.
        among: results among other kernels; on shapes that both have, a stroke marks our speed-up in these.

    Raises:
        ImportError: matplotlib is not installed.
        InvalidInputError: no shape has both our kernel and another implementation.
    """
    from matplotlib.figure import Figure

    ours = next((name for name in OURS if name != BASELINE and _speedups(results, name)), None)
    if ours is None:
        raise InvalidInputError("no shape has times of both our kernel and another implementation")
    speedups = _speedups(results, ours)
    marks = _speedups(among, ours) if among else {}
    lines: list[Case | str] = []
    for heading, cases in groupby(sorted(speedups, key=_group), _heading):
        lines += [heading, *cases]

    figure = Figure(figsize=(9, 0.235 * len(lines) + 1.5), layout="constrained")
    axes = figure.subplots()
    for y, line in enumerate(lines):
        if isinstance(line, Case):
            _draw_line(axes, y, speedups[line])
            if line in marks:
                _draw_mark(axes, y, min(marks[line].values()))
    _write(axes, 0, _BEST)
    _label_lines(axes, lines)
    drawn = [*speedups.values(), *marks.values()]
    _label_axis(axes, [speedup for line in drawn for speedup in line.values()])
    conditions = [results.machine["device"], results.dtype]
    if results.among_kernels:
        conditions.append("among other kernels")
    _add_legend(figure, axes, f"Decode attention on {', '.join(conditions)}: speed-up of {ours}")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a picture in the format of the path's suffix. The same figure always gives the same SVG.

    Raises:
        ValueError: matplotlib does not know the format.
    """
    import matplotlib

    metadata = {"Date": None} if path.suffix == ".svg" else None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mla-backend"}):
        figure.savefig(path, facecolor="white", dpi=150, metadata=metadata)


def _speedups(results: Results, ours: str) -> dict[Case, dict[str, float]]:
    """For each shape, each other implementation's time over ours."""
    speedups = {}
    for case in results.cases():
        times = {row.impl: row.time_us for row in results.of(case)}
        others = {name: times[name] / times[ours] for name in _OTHERS if {name, ours} <= times.keys()}
        if others:
            speedups[case] = others
    return speedups


def _group(case: Case) -> tuple[int, int]:
    """Sorts large pages and few query rows first."""
    rows = case.heads * case.q_len
    return -case.page_size, 0 if rows <= 16 else 1 if rows <= 64 else 2


def _heading(case: Case) -> str:
    rows = ("up to 16", "17 to 64", "more than 64")[_group(case)[1]]
    return f"page size {case.page_size}, {rows} query rows"


def _label(case: Case) -> str:
    requests = "1 request" if case.batch == 1 else f"{case.batch} requests"
    about = "" if case.lengths == "fixed" else "about "
    tokens = "" if case.q_len == 1 else f" × {case.q_len} tokens"
    return f"{requests} × {about}{case.seq_len:,} keys, {case.heads} heads{tokens}"


def _draw_line(axes: Axes, y: int, speedups: dict[str, float]) -> None:
    """Draw the bar, the dots and the number of one shape."""
    best = min(speedups.values())
    axes.barh(y, best - 1, left=1, height=0.7, color=_BAR_COLOUR, label=_BEST, zorder=1)
    cluster: list[str] = []
    for name in sorted(speedups, key=lambda name: speedups[name]):
        if cluster and speedups[name] > _CLOSE * speedups[cluster[-1]]:
            _draw_dots(axes, y, cluster, speedups)
            cluster = []
        cluster.append(name)
    _draw_dots(axes, y, cluster, speedups)
    _write(axes, y, f"{best:.2f}×")


def _draw_mark(axes: Axes, y: int, speedup: float) -> None:
    """Mark the speed-up over the best other implementation among other kernels."""
    axes.scatter(speedup, y, s=110, marker="|", color=_TEXT_COLOUR, label=_AMONG, linewidths=1.8, zorder=4)


def _draw_dots(axes: Axes, y: int, names: list[str], speedups: dict[str, float]) -> None:
    """Draw dots of similar speed-ups above each other, so that none hides another."""
    for index, name in enumerate(names):
        label, colour, marker = _OTHERS[name]
        offset = 0.34 * (index - (len(names) - 1) / 2)
        axes.scatter(
            speedups[name], y + offset, s=22, color=colour, marker=marker, label=label, linewidths=0, zorder=3
        )


def _write(axes: Axes, y: int, text: str) -> None:
    """Write bold text to the right of a line."""
    place = axes.get_yaxis_transform()  # x in axes, y in lines
    axes.text(1.02, y, text, transform=place, va="center", weight="bold", color=_TEXT_COLOUR)


def _add_legend(figure: Figure, axes: Axes, title: str) -> None:
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    known = [_BEST, _AMONG, *(label for label, _, _ in _OTHERS.values())]
    order = [label for label in known if label in by_label]
    figure.legend(
        [by_label[label] for label in order],
        order,
        title=title,
        title_fontproperties={"weight": "bold", "size": 12},
        loc="outside upper center",
        ncols=min(len(order), 6),
        frameon=False,
        fontsize=9,
        handletextpad=0.4,
        columnspacing=1.4,
    )


def _label_lines(axes: Axes, lines: list[Case | str]) -> None:
    axes.set_yticks(range(len(lines)), [_label(line) if isinstance(line, Case) else line for line in lines])
    for line, label in zip(lines, axes.get_yticklabels(), strict=True):
        if isinstance(line, str):
            label.set_weight("bold")
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _label_axis(axes: Axes, speedups: list[float]) -> None:
    left, right = 0.93 * min(1, *speedups), 1.1 * max(speedups)
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    ticks = [tick for tick in _TICKS if left <= tick <= right]
    axes.set_xticks(ticks, [f"{tick}×" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.axvline(1, color="black", linewidth=1, zorder=2)
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("time of the other implementation / our time (logarithmic)")
