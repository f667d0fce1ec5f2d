"""The figures in the documentation are those of the results files."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks/figures.py")
figures = sys.modules["figures"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_results(page):
    text = page.read_text()
    assert figures.updated(text) == text, "run `python benchmarks/figures.py`"


def test_every_table_is_on_a_page():
    text = "".join(page.read_text() for page in figures.PAGES)
    for name in figures.TABLES:
        assert text.count(f"<!-- {name} -->\n") == text.count(f"<!-- /{name} -->\n") == 1, name


def load_row(backend, start, requests, tpot):
    latencies = dict.fromkeys(("ttft_p50_ms", "ttft_p99_ms", "tpot_p99_ms"), 150.0)
    facts = {"engine": "vllm", "version": "0.33.0", "model": "v2-lite", "range_ratio": 0.5}
    facts |= {"concurrency": 8, "prompt_tokens": 2048, "new_tokens": 256, "backend": backend, "start": start}
    rates = {"requests_per_s": requests, "output_tokens_per_s": 256 * requests}
    return facts | latencies | rates | {"tpot_p50_ms": tpot}


def test_figures_under_load_have_a_section_once_there_are_results(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    page = "before\n<!-- load -->\nold\n<!-- /load -->\nafter"
    monkeypatch.setattr(figures, "TABLES", {"load": figures.TABLES["load"]})
    assert figures.updated(page) == "before\n<!-- load -->\n<!-- /load -->\nafter"
    rows = [load_row("CUSTOM", start, 4.0 + start, 3.0 - start / 4) for start in range(3)]
    rows += [load_row("FLASH_ATTN_MLA", start, 4.5, 3.5) for start in range(3)]
    (tmp_path / figures.LOADS[0]).write_text(json.dumps({"runs": {}, "rows": rows}))
    lines = figures.updated(page).splitlines()
    assert "### Under load" in lines and "of 1,024 to 3,072 tokens" in " ".join(lines)
    assert any("DeepSeek-V2-Lite's shape, medians of 3 starts" in line for line in lines)
    fewer = [row for row in rows if (row["backend"], row["start"]) != ("FLASH_ATTN_MLA", 2)]
    (tmp_path / figures.LOADS[0]).write_text(json.dumps({"runs": {}, "rows": fewer}))
    assert "medians of 2 to 3 starts" in figures.updated(page)
    same = ["**150**"] * 2
    assert [line.strip("| ").split(" | ") for line in lines if line.startswith("| 8")] == [
        ["8", "mla-backend", "**5.00**", "**1,280**", *same, "**2.75**", "**150**"],
        ["8", "FLASH_ATTN_MLA", "4.50", "1,152", *same, "3.50", "**150**"],
    ]


def test_the_picture_is_that_of_the_results():
    assert figures.PICTURE.read_text() == figures.picture(), "run `python benchmarks/figures.py`"


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_the_claim_on_top_is_that_of_the_results(page):
    percent = [round(100 * saving) for saving in figures.savings()]
    claim = f"{min(percent)} to {max(percent)} %"
    assert claim in " ".join((ROOT / page).read_text().split()), claim


def test_the_readme_says_by_how_much_another_backend_is_faster():
    rows = figures.by_shape("decode-fp8-h200.json").values()
    fp8 = [(r["mla_backend", "fp8_e4m3"], r["flashmla", "fp8_e4m3"]) for r in rows if ("flashmla", None) in r]
    saved = max(1 - other["time_us"] / ours["time_us"] for ours, other in fp8)
    (said,) = re.findall(r"FlashMLA, up to (\d+) % faster", (ROOT / "README.md").read_text())
    assert int(said) == round(100 * saved)


def test_results_that_the_documentation_names_exist():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "benchmarks/README.md"]
    for page in pages:
        for name in re.findall(r"[\w-]+-h200\.json", page.read_text()):
            assert (figures.RESULTS / name).exists(), f"{page}: {name}"
