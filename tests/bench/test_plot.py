"""The plot shows every other implementation on every shape."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from mla_backend.errors import InvalidInputError
from mla_backend_bench import plot
from mla_backend_bench.cli import app
from mla_backend_bench.decode import Results, Row

TIMES = {
    (1, 2048, 16, 64): {"mla_backend": 10, "fa3": 20, "flashmla": 20.1, "torch": 5000},
    (64, 1024, 40, 64): {"mla_backend": 10, "fa3": 12, "triton": 60},
    (64, 1024, 16, 1): {"mla_backend": 10, "fa3": 8},
    (128, 1024, 16, 64): {"mla_backend": 10, "flashmla": 15},
    (1, 4096, 16, 64): {"mla_backend": 10, "baseline": 11},  # has no other implementation
}


def results(ours="mla_backend"):
    rows = [
        Row(batch, seq_len, heads, 1, page_size, "fixed", name.replace("mla_backend", ours), time, 0, 0, 0, 0)
        for (batch, seq_len, heads, page_size), times in TIMES.items()
        for name, time in times.items()
    ]
    return Results({"device": "Some GPU"}, {}, None, "bfloat16", {}, 1.0, rows=rows)


@pytest.fixture
def figure():
    pytest.importorskip("matplotlib")
    return plot.draw(results())


def test_lines_are_grouped_by_page_size_and_query_rows(figure):
    [axes] = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "page size 64, up to 16 query rows",
        "1 request × 2,048 keys, 16 heads",
        "128 requests × 1,024 keys, 16 heads",
        "page size 64, 17 to 64 query rows",
        "64 requests × 1,024 keys, 40 heads",
        "page size 1, up to 16 query rows",
        "64 requests × 1,024 keys, 16 heads",
    ]


def test_dots_are_the_speedups_and_do_not_hide_each_other(figure):
    [axes] = figure.axes
    dots = {}
    for dot in axes.collections:
        [[speedup, y]] = dot.get_offsets().tolist()
        dots.setdefault(round(y), []).append((dot.get_label(), pytest.approx(speedup), y))
    found = {line: [(label, speedup) for label, speedup, _ in line_dots] for line, line_dots in dots.items()}
    assert found == {
        1: [("FlashAttention-3", 2.0), ("FlashMLA", 2.01)],
        2: [("FlashMLA", 1.5)],
        4: [("FlashAttention-3", 1.2), ("Triton", 6.0)],
        6: [("FlashAttention-3", 0.8)],
    }
    (_, _, first), (_, _, second) = dots[1]  # nearly equal times
    assert abs(first - second) > 0.2
    left, right = axes.get_xlim()
    assert left < 0.8 and right > 6


def test_bars_and_figures_are_the_speedup_over_the_best(figure):
    [axes] = figure.axes
    ends = {round(bar.get_y() + bar.get_height() / 2): bar.get_x() + bar.get_width() for bar in axes.patches}
    assert ends == {line: pytest.approx(best) for line, best in {1: 2.0, 2: 1.5, 4: 1.2, 6: 0.8}.items()}
    written = {round(text.get_position()[1]): text.get_text() for text in axes.texts}
    assert written == {0: "over the best", 1: "2.00×", 2: "1.50×", 4: "1.20×", 6: "0.80×"}


def test_a_second_mark_is_the_speedup_among_other_kernels():
    pytest.importorskip("matplotlib")
    slower = results()
    slower.rows = [
        replace(row, time_us=row.time_us * (1.25 if row.impl == "mla_backend" else 1))
        for row in slower.rows
        if row.batch == 1
    ]
    [axes] = plot.draw(results(), slower).figure.axes
    marks = [dot for dot in axes.collections if dot.get_label() == "the same among other kernels"]
    [[speedup, y]] = marks[0].get_offsets().tolist()
    assert len(marks) == 1 and (speedup, y) == (pytest.approx(1.6), 1)
    [legend] = axes.figure.legends
    assert "the same among other kernels" in [text.get_text() for text in legend.get_texts()]


def test_the_legend_names_what_is_drawn(figure):
    [legend] = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["over the best", "FlashMLA", "FlashAttention-3", "Triton"]
    assert legend.get_title().get_text() == "Decode attention on Some GPU, bfloat16: speed-up of mla_backend"


def test_a_forced_kernel_is_drawn_if_it_is_alone():
    pytest.importorskip("matplotlib")
    [legend] = plot.draw(results(ours="mla_backend_portable")).legends
    assert legend.get_title().get_text().endswith("speed-up of mla_backend_portable")


def test_results_without_a_comparison_are_refused():
    pytest.importorskip("matplotlib")
    alone = results()
    alone.rows = [row for row in alone.rows if row.impl in ("mla_backend", "baseline", "torch")]
    with pytest.raises(InvalidInputError, match="no shape has times of both"):
        plot.draw(alone)


def test_command_draws_a_results_file(tmp_path):
    pytest.importorskip("matplotlib")
    results().save(tmp_path / "results.json")
    pictures = [tmp_path / "first.svg", tmp_path / "second.svg", tmp_path / "picture.png"]
    for path in pictures:
        outcome = CliRunner().invoke(app, ["plot", str(tmp_path / "results.json"), "-o", str(path)])
        assert outcome.exit_code == 0, outcome.output
    text = pictures[0].read_text()
    assert ">FlashAttention-3<" in text and ">64 requests × 1,024 keys, 40 heads<" in text
    assert pictures[1].read_text() == text
    assert pictures[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("results_file", "picture"), [("missing.json", "a.svg"), ("results.json", "a.xyz"), ("results.json", "a")]
)
def test_command_refuses_bad_arguments(tmp_path, results_file, picture):
    pytest.importorskip("matplotlib")
    results().save(tmp_path / "results.json")
    arguments = [str(tmp_path / results_file), "-o", str(tmp_path / picture)]
    assert CliRunner().invoke(app, ["plot", *arguments]).exit_code == 2
