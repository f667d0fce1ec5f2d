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


@pytest.fixture
def section(tmp_path, monkeypatch):
    """`section(table, {file: rows})`: the lines between a table's comments, if these are all results."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)

    def make(name, files):
        for file, rows in files.items():
            (tmp_path / file).write_text(json.dumps({"runs": {}, "rows": rows}))
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        monkeypatch.setattr(figures, "TABLES", {name: figures.TABLES[name]})
        page = figures.updated(f"before\n{begin}old\n{end}\nafter")
        assert page.startswith(f"before\n{begin}") and page.endswith(f"{end}\nafter")
        return page.split(begin)[1].split(end)[0].splitlines()

    monkeypatch.setattr(figures, "TABLES", figures.TABLES)
    return make


def cells(line):
    return line.strip("| ").split(" | ")


def load_row(backend, start, requests, tpot, **more):
    latencies = dict.fromkeys(("ttft_p50_ms", "ttft_p99_ms", "tpot_p99_ms"), 150.0)
    facts = {"engine": "vllm", "version": "0.33.0", "model": "v2-lite", "range_ratio": 0.5}
    facts |= {"concurrency": 8, "prompt_tokens": 2048, "new_tokens": 256, "backend": backend, "start": start}
    rates = {"requests_per_s": requests, "output_tokens_per_s": 256 * requests}
    return facts | latencies | rates | {"tpot_p50_ms": tpot} | more


LOADED = [load_row("CUSTOM", start, 4.0 + start, 3.0 - start / 4) for start in range(3)]
LOADED += [load_row("FLASH_ATTN_MLA", start, 4.5, 3.5) for start in range(3)]


def test_figures_under_load_have_a_section_once_there_are_results(section):
    assert section("load", {}) == []
    lines = section("load", {figures.LOADS[0]: LOADED})
    assert "### Under load" in lines
    text = " ".join(lines)
    assert (
        "DeepSeek-V2-Lite's shape, random prompts of 1,024 to 3,072 tokens, each of which continues" in text
    )
    assert "with 128 to 384, medians of 3 starts ([load-vllm" in text
    same = ["**150**"] * 2
    assert [cells(line) for line in lines if line.startswith("| 8")] == [
        ["8", "mla-backend", "**5.00**", "**1,280**", *same, "**2.75**", "**150**"],
        ["8", "FLASH_ATTN_MLA", "4.50", "1,152", *same, "3.50", "**150**"],
    ]
    fewer = [row for row in LOADED if (row["backend"], row["start"]) != ("FLASH_ATTN_MLA", 2)]
    assert "medians of 2 to 3 starts" in " ".join(section("load", {figures.LOADS[0]: fewer}))


def test_figures_under_load_of_several_models_engines_and_lengths(section):
    """Each has a table; loads are in order; starts are counted by what medians are taken of."""
    v3 = [row | {"model": "v3-layer"} for row in LOADED if row["start"] == 0]
    fixed = [row | {"range_ratio": 0.0, "requests_per_s": 90.0} for row in LOADED]
    once = load_row("CUSTOM", 3, 2.0, 1.5, concurrency=1)
    with_options = load_row("CUSTOM", 0, 6.0, 2.0, options={"block_size": 32})
    sglang = [row | {"engine": "sglang", "version": "0.5.23"} for row in LOADED]
    vllm_file, sglang_file = figures.LOADS
    lines = section("load", {vllm_file: [*LOADED, *v3, *fixed, once, with_options], sglang_file: sglang})
    text = "\n".join(lines)
    captions = [" ".join(part.split()).split(" (")[0] for part in text.split("\n\n") if part.endswith("):")]
    lengths = "random prompts of 1,024 to 3,072 tokens, each of which continues with 128 to 384"
    assert captions == [
        f"DeepSeek-V2-Lite's shape, {lengths}, medians of 1 to 3 starts",
        f"16 layers like DeepSeek-V3's, as one of 8 GPUs sees them, {lengths}, one start",
        "DeepSeek-V2-Lite's shape, random prompts of 2,048 tokens, each of which continues with 256, "
        "medians of 3 starts",
        f"DeepSeek-V2-Lite's shape, {lengths}, medians of 3 starts",
    ]
    found = [cells(line)[:3] for line in lines if re.match(r"\| (\d|at)", line)]
    ours, theirs = ["8", "mla-backend", "**5.00**"], ["8", "FLASH_ATTN_MLA", "4.50"]
    vllm, sglang = (
        ["at a time, " + title, "backend", "requests/s"] for title in ("vLLM 0.33", "SGLang 0.5.23")
    )
    assert found == [
        *[vllm, ["1", "mla-backend", "2.00"], ["8", "mla-backend", "5.00"], theirs],
        ["8", 'mla-backend with {"block_size": 32}', "**6.00**"],
        *[vllm, ["8", "mla-backend", "4.00"], ["8", "FLASH_ATTN_MLA", "**4.50**"]],
        *[vllm, ["8", "mla-backend", "**90.0**"], ["8", "FLASH_ATTN_MLA", "**90.0**"]],
        *[sglang, ours, theirs],
    ]


def test_layers_have_medians_over_their_starts(section):
    def row(backend, start, step, **more):
        facts = {"engine": "vllm", "version": "0.33.0", "model": "v3-layer", "batch": 1, "context": 8192}
        facts |= {"backend": backend, "start": start, "kernels_per_layer": 14.06, "step_ms": step}
        return facts | more

    around = "MLA_BACKEND MLA_BACKEND_AROUND_ATTENTION=0"
    steps = {"MLA_BACKEND": (1.3, 9.0, 1.4), around: (1.6, 1.5), "FLASH_ATTN_MLA": (1.7, 1.6, 1.8)}
    rows = [row(backend, start, step) for backend, times in steps.items() for start, step in enumerate(times)]
    rows += [row("MLA_BACKEND", 0, 0.4, model="other"), row("MLA_BACKEND", 1, 0.6, model="other")]
    lines = section("layer", {"layer-h200.json": rows})
    captions = [line.split(" (")[0] for line in " ".join(lines).replace("| ", "\n").split("\n")]
    assert captions[0].strip() == (
        "vLLM 0.33, 16 layers like DeepSeek-V3's, as one of 8 GPUs sees them, medians of 2 to 3 starts"
    )
    assert any("vLLM 0.33, other, medians of 2 starts" in caption for caption in captions)
    assert [cells(line) for line in lines if line.startswith("| 1")] == [
        ["1 × 8,192", "mla-backend", "14", "1.400"],
        ["1 × 8,192", "mla-backend, with vLLM's kernels around it", "14", "1.550"],
        ["1 × 8,192", "FLASH_ATTN_MLA", "14", "1.700"],
        ["1 × 8,192", "mla-backend", "14", "0.500"],
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
