"""Writes the tables and the picture of the documentation from the files in `results`.

    python benchmarks/figures.py

A table stands between two comments, `<!-- NAME -->` and `<!-- /NAME -->`, on one of `PAGES`; what is between
them is replaced. tests/core/test_figures.py checks that the pages are up to date.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = (ROOT / "README.md", ROOT / "docs/performance.md")
PICTURE = ROOT / "docs/decode-steps.svg"

Row = dict[str, Any]
Key = TypeVar("Key")


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def table(*rows: Iterable[str]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * (lines[0].count(" | ") + 1), *lines[1:]])


def digits(value: float) -> str:
    """About three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def ratio(value: float) -> str:
    return f"{value:.2f}"


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


# Whole engines ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Serving:
    """The starts of one engine, in which backends took turns. The first backend is ours."""

    engine: str
    files: tuple[str, ...]
    backends: tuple[tuple[str, str], ...]
    shapes: tuple[tuple[int, int], ...] = ((1, 8192), (1, 65536), (16, 2048), (64, 2048))

    def rows(self, backend: str, shape: tuple[int, int]) -> list[Row]:
        rows = (row for name in self.files for row in load(name)["rows"])
        return [row for row in rows if row["backend"] == backend and (row["batch"], row["context"]) == shape]

    def steps(self, shape: tuple[int, int]) -> list[float]:
        """Milliseconds per decode step of each backend, medians over the starts."""
        return [median(r["decode_ms_per_step"] for r in self.rows(name, shape)) for name, _ in self.backends]

    def prefills(self, shape: tuple[int, int]) -> list[float]:
        return [median(r["prefill_ms"] for r in self.rows(name, shape)) for name, _ in self.backends]

    @property
    def title(self) -> str:
        version = self.rows(self.backends[0][0], self.shapes[0])[0]["version"]
        return f"{self.engine} {version.removesuffix('.0')}"


VLLM = Serving(
    "vLLM",
    tuple(f"serving-vllm-start{n}-h200.json" for n in (1, 2, 3)),
    tuple((name, name) for name in ("CUSTOM", "FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA")),
)
SGLANG = Serving(
    "SGLang",
    tuple(f"serving-sglang-start{n}-h200.json" for n in (1, 2, 3)),
    tuple((name, name) for name in ("mla_backend", "flashmla", "flashinfer")),
)
SGLANG_FA3 = Serving(
    "SGLang", ("serving-sglang-fa3-h200.json",), tuple((name, name) for name in ("mla_backend", "fa3"))
)
ENGINES = (VLLM, SGLANG)
"""Those in the picture."""


def shape_name(shape: tuple[int, int]) -> str:
    return f"{shape[0]} × {shape[1]:,}"


def step(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def serving_table(serving: Serving) -> str:
    def cells(shape: tuple[int, int]) -> Iterator[str]:
        times = list(zip(serving.prefills(shape), serving.steps(shape), strict=True))
        for prefill, decode in times:
            best = decode == min(decode for _, decode in times)
            yield f"{prefill:,.0f} / {f'**{step(decode)}**' if best else step(decode)}"

    names = ["mla-backend", *(name for _, name in serving.backends[1:])]
    return table([serving.title, *names], *([shape_name(s), *cells(s)] for s in serving.shapes))


def title_of(row: Row) -> str:
    engine = {"vllm": "vLLM", "sglang": "SGLang"}[row["engine"]]
    return f"{engine} {row['version'].removesuffix('.0')}"


FORMATS = {"auto": "16 bits", "fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_ds_mla": "fp8 with block scales"}


def backend_name(row: Row) -> str:
    return "mla-backend" if row["backend"] in ("CUSTOM", "MLA_BACKEND", "mla_backend") else row["backend"]


MODELS = {
    "v2-lite": "DeepSeek-V2-Lite's shape",
    "v3-layer": "16 layers like DeepSeek-V3's, as one of 8 GPUs sees them",
}
"""What the names of models in results stand for."""


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def starts_of(groups: Iterable[list[Row]]) -> str:
    """Of how many starts the medians of groups of rows are."""
    counts = {len({row["start"] for row in rows}) for rows in groups}
    fewest, most = min(counts), max(counts)
    if most == 1:
        return "one start"
    return f"medians of {f'{fewest} to ' * (fewest < most)}{most} starts"


def medians(rows: list[Row], columns: Iterable[str]) -> list[float]:
    return [median(row[name] for row in rows) for name in columns]


LOADS = ("load-vllm-h200.json", "load-sglang-h200.json")


def load_section() -> str:
    """Figures of servers under load, medians over their starts; empty while there is no file of them."""
    files = [name for name in LOADS if (RESULTS / name).exists()]
    if not files:
        return ""
    introduction = (
        "Servers under the engines' own load generators, on an H200, bf16. Time to the first token (TTFT) "
        "and per further token (TPOT) of a request ([method](../benchmarks/README.md#servers-under-load))."
    )
    parts = ["### Under load", textwrap.fill(introduction, 120, break_on_hyphens=False)]
    for name in files:
        for rows in grouped(load(name)["rows"], load_of).values():
            parts += load_part(rows, f"[{name}](../benchmarks/results/{name})")
    return "\n\n".join(parts)


def load_of(row: Row) -> tuple[str, ...]:
    """What the rows of one table have in common: engine, model, and lengths of prompts and answers."""
    bounds = (1 - row["range_ratio"], 1 + row["range_ratio"])
    lengths = (
        " to ".join(dict.fromkeys(f"{row[key] * bound:,.0f}" for bound in bounds))
        for key in ("prompt_tokens", "new_tokens")
    )
    return (title_of(row), MODELS.get(row["model"], row["model"]), *lengths)


def load_part(rows: list[Row], file: str) -> list[str]:
    """A line that says what was measured, and a table with a line for each number of requests at a time and
    each backend; the best of each in bold."""

    def server_of(row: Row) -> tuple[int, str]:
        options = f" with {json.dumps(row['options'])}" if "options" in row else ""
        return row["concurrency"], backend_name(row) + options

    groups = grouped(rows, server_of)
    engine, model, prompt, answer = load_of(rows[0])
    caption = (
        f"{model}, random prompts of {prompt} tokens, each of which continues with {answer}, "
        f"{starts_of(groups.values())} ({file}):"
    )
    lines = []
    for concurrency in sorted({number for number, _ in groups}):
        servers = {
            name: medians(group, LOAD_COLUMNS) for (n, name), group in groups.items() if n == concurrency
        }
        best = [
            (max if key.endswith("_per_s") else min)(column)
            for key, column in zip(LOAD_COLUMNS, zip(*servers.values(), strict=True), strict=True)
        ]
        for name, numbers in servers.items():
            texts = [digits(number) if number >= 100 else step(number) for number in numbers]
            cells = [
                f"**{text}**" if number == most and len(servers) > 1 else text
                for text, number, most in zip(texts, numbers, best, strict=True)
            ]
            lines.append([str(concurrency), name, *cells])
    columns = [f"at a time, {engine}", "backend", *LOAD_COLUMNS.values()]
    return [textwrap.fill(caption, 120, break_on_hyphens=False), table(columns, *lines)]


def fp8_engines_table() -> str:
    """Decode steps of 64 requests of 8,192 tokens, by cache."""
    files = ("serving-fp8-h200.json", "serving-sglang-fp8-h200.json")
    rows = [row for name in files for row in load(name)["rows"] if not row.get("cached")]
    lines = [
        [title_of(r), backend_name(r), FORMATS[r["kv_dtype"]], f"{step(r['decode_ms_per_step'])} ms"]
        for r in rows
    ]
    return table(["engine", "backend", "cache", "step"], *lines)


def layer_section() -> str:
    """Decode steps with and without our launches around attention, medians over the starts of engines."""
    file = "[layer-h200.json](../benchmarks/results/layer-h200.json)"
    parts = []
    for rows in grouped(load("layer-h200.json")["rows"], lambda row: (title_of(row), row["model"])).values():
        groups = grouped(rows, lambda row: (row["batch"], row["context"], row["backend"]))
        engine, model = title_of(rows[0]), MODELS.get(rows[0]["model"], rows[0]["model"])
        caption = f"{engine}, {model}, {starts_of(groups.values())} ({file}):"
        parts += [textwrap.fill(caption, 120, break_on_hyphens=False), layer_table(groups.values())]
    return "\n\n".join(parts)


def layer_table(groups: Iterable[list[Row]]) -> str:
    """A line for each shape and backend, of whose rows there is a list."""
    lines = []
    for rows in groups:
        row = rows[0]
        off = row["backend"].endswith("=0")  # the variable that leaves the launches around attention to vLLM
        name = "mla-backend, with vLLM's kernels around it" if off else backend_name(row)
        numbers = zip(medians(rows, LAYER_COLUMNS), LAYER_COLUMNS.values(), strict=True)
        cells = (f"{number:.{decimals}f}" for number, decimals in numbers)
        lines.append([shape_name((row["batch"], row["context"])), name, *cells])
    columns = ("kernels a layer", "step, ms")
    return table(["requests × context", "backend", *columns], *lines)


def prefix_hits_table() -> str:
    """Times to the first token of prompts of which 8,192 tokens are cached."""
    files = ("prefix-hits-h200.json", "serving-fp8-h200.json", "prefix-hits-sglang-h200.json")
    times: dict[tuple[str, ...], dict[int, float]] = {}
    for name in files:
        for row in load(name)["rows"]:
            if row.get("cached"):
                key = (title_of(row), backend_name(row), FORMATS[row["kv_dtype"]], name)
                times.setdefault(key, {})[row["context"] - row["cached"]] = row["prefill_ms"]
    lines = [
        [*key[:3], *(f"{new[n]:.0f} ms" for n in (128, 256)), f"[{key[3]}](../benchmarks/results/{key[3]})"]
        for key, new in times.items()
    ]
    return table(["engine", "backend", "cache", "128 new tokens", "256 new tokens", "file"], *lines)


def sparse_engines_table() -> str:
    """Decode steps of a small sparse model: GPU time and wall-clock time."""
    found: dict[tuple[str, str], dict[int, Row]] = {}
    for row in load("serving-sparse-h200.json")["rows"]:
        found.setdefault((FORMATS[row["kv_dtype"]], backend_name(row)), {})[row["batch"]] = row
    lines = [
        [*key, *(f"{r[n]['gpu_ms_per_step']:.2f} / {r[n]['decode_ms_per_step']:.2f}" for n in (64, 1))]
        for key, r in found.items()
    ]
    return table(["cache", "backend", "64 × 4,096", "1 × 4,096"], *lines)


def sparse_prefill_table() -> str:
    """Prefill from a cache with block scales, with and without a 16-bit copy of the context."""

    def of(name: str, backend: str) -> dict[int, float]:
        rows = (r for r in load(name)["rows"] if r["kv_dtype"] == "fp8_ds_mla" and r["backend"] == backend)
        return {row["context"]: row["prefill_ms"] for row in rows}

    after = of("serving-sparse-prefill-h200.json", "CUSTOM")
    before = of("serving-sparse-prefill-before-h200.json", "CUSTOM")
    other = of("serving-sparse-prefill-h200.json", "FLASHMLA_SPARSE")
    lines = [[f"{n:,} tokens", *(f"{times[n]:.0f}" for times in (after, before, other))] for n in after]
    names = ("mla-backend", "without the 16-bit copy of the context", "FLASHMLA_SPARSE")
    return table(["prompt", *names], *lines)


def gpu_time() -> str:
    """How much shorter the GPU's time per step is than FLASH_ATTN_MLA's, at the first start."""

    def saved(shape: tuple[int, int]) -> str:
        rows = load(VLLM.files[0])["rows"]
        ours, other = (
            next(
                r["gpu_ms_per_step"]
                for r in rows
                if (r["backend"], r["batch"], r["context"]) == (name, *shape)
            )
            for name in ("CUSTOM", "FLASH_ATTN_MLA")
        )
        return f"{shape_name(shape)} {100 * (1 - ours / other):.0f} %"

    return (
        "GPU time per step, shorter than with FLASH_ATTN_MLA by: " + ", ".join(map(saved, VLLM.shapes)) + "."
    )


def savings() -> list[float]:
    """By how much our decode step is shorter than the best other backend's, for each engine and shape."""
    steps = [serving.steps(shape) for serving in (*ENGINES, SGLANG_FA3) for shape in serving.shapes]
    return [1 - ours / min(others) for ours, *others in steps]


# Decode kernels -----------------------------------------------------------------------------------

OURS = ("mla_backend", "mla_backend_sm80", "mla_backend_portable")


def decode_shape(row: Row) -> str:
    latent = (row.get("kv_lora_rank", 512), row.get("qk_rope_head_dim", 64))
    return (
        f"{row['batch']}x{row['seq_len']}x{row['heads']}x{row['q_len']}"
        + (f"@{row['page_size']}" if row["page_size"] != 64 else "")
        + ("~lognormal" if row["lengths"] == "lognormal" else "")
        + (f"~{latent[0]}+{latent[1]}" if latent != (512, 64) else "")
        + "~lists" * row.get("lists", False)
    )


Times = dict[str, dict[tuple[str, str | None], Row]]


def by_shape(name: str) -> Times:
    """Rows of a results file of `bench decode`: shape, then (implementation, cache format)."""
    found: Times = {}
    for row in load(name)["rows"]:
        found.setdefault(decode_shape(row), {})[row["impl"], row.get("kv_dtype")] = row
    return found


def best_other(rows: dict[tuple[str, str | None], Row]) -> float:
    """The shortest time of another implementation with a 16-bit cache."""
    return min(
        row["time_us"]
        for (impl, kv_dtype), row in rows.items()
        if kv_dtype is None and impl not in (*OURS, "baseline")
    )


def speed_up(rows: dict[tuple[str, str | None], Row]) -> float:
    return best_other(rows) / rows["mla_backend", None]["time_us"]


def query_rows(row: Row) -> int:
    return row["heads"] * row["q_len"]


def cells(rows: dict[tuple[str, str | None], Row], keys: Iterable[tuple[str, str | None]]) -> list[str]:
    """Times, the shortest in bold; a dash where an implementation has none."""
    times = [rows[key]["time_us"] if key in rows else None for key in keys]
    least = min(time for time in times if time is not None)
    return ["–" if t is None else f"**{digits(t)}**" if t == least else digits(t) for t in times]


PEERS = ("flashmla", "fa3", "flashinfer-fa3", "triton")
NAMES = {"flashmla": "FlashMLA", "fa3": "FA3", "flashinfer-fa3": "FlashInfer fa3", "triton": "Triton"}


def decode_order(row: Row) -> tuple[int, ...]:
    return (row["page_size"] == 1, query_rows(row), row["batch"], row["seq_len"])


def decode_table() -> str:
    results, among = by_shape("decode-h200.json"), by_shape("decode-among-kernels-h200.json")
    keys = [(name, None) for name in ("mla_backend", *PEERS)]
    lines = []
    for shape, rows in sorted(results.items(), key=lambda i: decode_order(i[1]["mla_backend", None])):
        ours = rows["mla_backend", None]
        beside = among.get(shape)
        lines.append(
            [
                shape,
                *cells(rows, keys),
                ratio(speed_up(rows)),
                f"{ours['tflops']:.0f}" if query_rows(ours) >= 64 else "",
                digits(beside["mla_backend", None]["time_us"]) if beside else "",
                digits(best_other(beside)) if beside else "",
            ]
        )
    heading = ["shape", "ours", *NAMES.values(), "speed-up", "our TFLOP/s"]
    file = load("decode-h200.json")
    return (
        table([*heading, "among other kernels: ours", "best other"], *lines)
        + f"\n\nIn this run, the best plain read reached {file['read_ceiling_tb_per_s']:.2f} TB/s, and a "
        f"large product of torch {file['product_tflops']:.0f} TFLOP/s."
    )


def summary_table() -> str:
    alone, among = by_shape("decode-h200.json"), by_shape("decode-among-kernels-h200.json")
    fp8, latents = by_shape("decode-fp8-h200.json"), by_shape("decode-latents-h200.json")

    def group(name: str, results: Times, wanted: Callable[[Row], bool], over: str, baseline: Any = None):
        ratios = []
        for rows in results.values():
            ours = rows["mla_backend", None]
            if not wanted(ours):
                continue
            if baseline is None:
                ratios.append(speed_up(rows))
            elif baseline in rows and ("mla_backend", baseline[1]) in rows:
                ratios.append(rows[baseline]["time_us"] / rows["mla_backend", baseline[1]]["time_us"])
        spread = f"{ratio(geometric_mean(ratios))} ({ratio(min(ratios))} to {ratio(max(ratios))})"
        return [name, str(len(ratios)), spread, over]

    def paged(least: int, most: int, requests: range) -> Callable[[Row], bool]:
        return lambda r: r["page_size"] == 64 and least <= query_rows(r) <= most and r["batch"] in requests

    few, many, all_ = range(1, 9), range(16, 1000), range(1, 1000)
    best = "the best of FlashMLA, FA3, FlashInfer, Triton"
    flashmla = ("FlashMLA, which rounds more", ("flashmla", "fp8_e4m3"))
    flashinfer = ("FlashInfer", ("flashinfer-fa3", "fp8_e4m3"))
    return table(
        ["requests and query rows", "shapes", "speed-up: mean (range)", "over"],
        group("1 to 8 requests, up to 20 rows", alone, paged(1, 20, few), best),
        group("16 to 128 requests, up to 20 rows", alone, paged(1, 20, many), best),
        group("32 to 64 rows", alone, paged(32, 64, all_), best),
        group("96 rows and more", alone, paged(96, 10**6, all_), best),
        group("pages of one token", alone, lambda r: r["page_size"] == 1, best),
        group("among other kernels", among, lambda r: True, best),
        group("among other kernels, 64 requests and more", among, paged(1, 10**6, range(64, 1000)), best),
        group("latents of 256 + 64", latents, lambda r: r["kv_lora_rank"] == 256, "FA3", ("fa3", None)),
        group("fp8 cache, 16 rows", fp8, paged(1, 20, all_), *flashmla),
        group("fp8 cache, 32 to 64 rows", fp8, paged(32, 64, all_), *flashmla),
        group("fp8 cache, 128 rows", fp8, paged(96, 10**6, all_), *flashmla),
        group("fp8 cache, 16 rows", fp8, paged(1, 20, all_), *flashinfer),
        group("fp8 cache, 32 rows and more", fp8, paged(32, 10**6, all_), *flashinfer),
    )


def ragged_table() -> str:
    keys = [(name, None) for name in ("mla_backend", "flashmla", "fa3", "flashinfer-fa3")]
    lines = [
        [shape, *cells(rows, keys), ratio(speed_up(rows))]
        for shape, rows in by_shape("ragged-h200.json").items()
    ]
    return table(["shape", "ours", "FlashMLA", "FA3", "FlashInfer fa3", "speed-up"], *lines)


def fp8_table() -> str:
    lines = []
    results = by_shape("decode-fp8-h200.json")
    for shape, rows in sorted(results.items(), key=lambda i: decode_order(i[1]["mla_backend", None])):

        def time(impl: str, kv_dtype: str | None, rows: Any = rows) -> str:
            row = rows.get((impl, kv_dtype))
            return digits(row["time_us"]) if row else "–"

        def beside_16_bit(kv_dtype: str, rows: Any = rows, time: Any = time) -> str:
            own = rows["mla_backend", None]["time_us"] / rows["mla_backend", kv_dtype]["time_us"]
            return f"{time('mla_backend', kv_dtype)} ({ratio(own)})"

        lines.append(
            [
                shape,
                time("mla_backend", None),
                beside_16_bit("fp8_e4m3"),
                beside_16_bit("fp8_ds_mla"),
                time("flashmla", None),
                *(time(impl, "fp8_e4m3") for impl in ("flashmla", "flashinfer-fa3", "triton")),
            ]
        )
    ours = ("ours, 16-bit", "ours, e4m3", "ours, block scales")
    others = ("FlashMLA, 16-bit", "FlashMLA, e4m3", "FlashInfer, e4m3", "Triton, e4m3")
    return table(["shape", *ours, *others], *lines)


def latents_table() -> str:
    in_16_bits = [(name, None) for name in ("mla_backend", "fa3", "flashmla", "triton")]
    in_e4m3 = [(name, "fp8_e4m3") for name in ("mla_backend", "flashmla", "triton")]
    lines = [
        [shape, *cells(rows, in_16_bits), ratio(speed_up(rows)), *cells(rows, in_e4m3)]
        for shape, rows in sorted(by_shape("decode-latents-h200.json").items())
    ]
    others = ["FA3", "FlashMLA", "Triton", "speed-up"]
    return table(["shape", "ours", *others, "ours, e4m3", "FlashMLA, e4m3", "Triton, e4m3"], *lines)


def sparse_table() -> str:
    found: dict[str, dict[str, float]] = {}
    for row in load("sparse-h200.json")["rows"]:
        shape = f"{row['phase']}:{row['rows']}x{row['heads']}"
        found.setdefault(shape, {})[row["impl"]] = row["time_us"]
    names = {
        "mla_backend": "ours, bf16",
        "mla_backend-records": "ours, block scales",
        "fa3": "FA3, bf16",
        "flashmla-prefill": "FlashMLA prefill, bf16",
        "flashmla-decode": "FlashMLA decode, block scales",
    }
    order = sorted(
        found, key=lambda s: (s.split(":")[0], int(s.split("x")[1]), int(re.findall(r"\d+", s)[0]))
    )
    lines = [
        [shape, *(digits(found[shape][n]) if n in found[shape] else "–" for n in names)] for shape in order
    ]
    return table(["shape", *names.values()], *lines)


def portable_table() -> str:
    lines = []
    for shape, rows in by_shape("decode-sm80-h200.json").items():
        times = {impl.replace("sm80", "portable"): row["time_us"] for (impl, _), row in rows.items()}
        own = [times[f"mla_backend_portable{suffix}"] for suffix in ("", "_99k")]
        others = [times["flashinfer-fa2"], times["triton"]]
        lines.append([shape, *map(digits, own + others), *(ratio(others[0] / time) for time in own)])
    names = ("`portable`", "`portable_99k`", "FlashInfer fa2", "Triton")
    return table(["shape", *names, "speed-up over fa2", "of `portable_99k`"], *lines)


def prefill_rows() -> dict[tuple[int, int, int, bool], dict[str, float]]:
    """TFLOP/s by implementation: (d_qk, d_v, tokens, causal)."""
    found: dict[tuple[int, int, int, bool], dict[str, float]] = {}
    for row in load("prefill-h200.json")["rows"]:
        key = (row["d_qk"], row["d_v"], row["q_len"], row["causal"])
        found.setdefault(key, {})[row["impl"].replace("sm80", "portable")] = row["tflops"]
    return found


def wide_prefill_table() -> str:
    found = prefill_rows()

    def pair(d: int, impl: str, over: str | None = None) -> str:
        both = [found[d, d, 8192, causal] for causal in (False, True)]
        if any(impl not in rates for rates in both):
            return "–"
        text = " / ".join(f"{rates[impl]:.0f}" for rates in both)
        return text + (f" ({' / '.join(ratio(r[impl] / r[over]) for r in both)})" if over else "")

    lines = [
        [
            str(d),
            pair(d, "mla_backend_portable", "sdpa-efficient"),
            pair(d, "mla_backend_portable_99k", "sdpa-efficient"),
            pair(d, "sdpa-efficient"),
            pair(d, "sdpa-flash"),
            pair(d, "mla_backend") if d == 256 else "–",
        ]
        for d in sorted({d_qk for d_qk, d_v, *_ in found if d_qk == d_v})
    ]
    names = ("efficient attention", "FlashAttention-2", "FlashAttention-3")
    return table(["d", "ours, within 163 KB", "ours, within 99 KB", *names], *lines)


def deepseek_prefill_table() -> str:
    found = prefill_rows()
    lines = []
    for tokens in sorted(tokens for d_qk, d_v, tokens, _ in found if (d_qk, d_v) == (192, 128)):
        rates = found[192, 128, tokens, True]
        ours, flash = rates["mla_backend_portable"], rates["sdpa-flash"]
        others = (f"{rates[name]:.0f}" for name in ("sdpa-flash", "sdpa-efficient", "mla_backend"))
        lines.append([f"{tokens:,}", f"{ours:.0f} ({ratio(ours / flash)})", *others])
    return table(["tokens", "ours", "FlashAttention-2", "efficient attention", "FlashAttention-3"], *lines)


LOAD_COLUMNS = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "tokens/s",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "p99",
    "tpot_p50_ms": "TPOT p50, ms",
    "tpot_p99_ms": "p99",
}
"""With their titles."""
LAYER_COLUMNS = {"kernels_per_layer": 0, "step_ms": 3}
"""With their decimals."""

TABLES: dict[str, Callable[[], str]] = {
    "layer": layer_section,
    "load": load_section,
    "vllm": lambda: serving_table(VLLM),
    "sglang": lambda: serving_table(SGLANG),
    "sglang-fa3": lambda: serving_table(SGLANG_FA3),
    "gpu-time": gpu_time,
    "fp8-engines": fp8_engines_table,
    "prefix-hits": prefix_hits_table,
    "sparse-engines": sparse_engines_table,
    "sparse-prefill": sparse_prefill_table,
    "summary": summary_table,
    "decode": decode_table,
    "ragged": ragged_table,
    "fp8": fp8_table,
    "sparse": sparse_table,
    "latents": latents_table,
    "portable": portable_table,
    "prefill": wide_prefill_table,
    "prefill-192-128": deepseek_prefill_table,
}


def updated(page: str) -> str:
    """A page with the tables of today's results between its comments; nothing where there are no results."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text = f"\n{made}\n\n" if (made := make()) else ""
        page = re.sub(pattern, lambda m, text=text: f"{m[1]}{text}{m[2]}", page, flags=re.DOTALL)
    return page


# The picture --------------------------------------------------------------------------------------

# Colours that can be told from white and from a dark page.
_TEXT, _GRID = "#768390", "#8b949e"
_OURS, _OTHERS = "#2f81f7", ("#57606a", "#818b98", "#a8b0b9")
_WIDTH, _HEIGHT, _TOP, _BOTTOM, _LEFT, _GAP = 880, 300, 62, 252, 40, 40


def picture() -> str:
    """Milliseconds per decode step of both engines: the other backends in grey, ours in blue."""
    panel = (_WIDTH - _LEFT - _GAP) / 2
    body = [
        _panel(serving, _LEFT + index * (panel + _GAP), panel - 8) for index, serving in enumerate(ENGINES)
    ]
    caption = "requests × context, DeepSeek-V2-Lite's shape on one H200, bf16; lower is better"
    body.append(_label(_WIDTH / 2, _HEIGHT - 8, caption, anchor="middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="system-ui, Helvetica, Arial, sans-serif" font-size="12">\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _panel(serving: Serving, left: float, width: float) -> str:
    highest = max(max(serving.steps(shape)) for shape in serving.shapes)
    top = 2 * math.ceil(highest / 2)

    def y(milliseconds: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * milliseconds / top

    parts = [_label(left, 16, f"{serving.title}: milliseconds per decode step", size=14, weight="bold")]
    parts += _legend(serving, left)
    for value in range(0, top + 1, 4):
        parts.append(
            f'<path d="M{left:.0f} {y(value):.1f}h{width:.0f}" stroke="{_GRID}" stroke-opacity=".35"/>'
        )
        parts.append(_label(left - 6, y(value) + 4, str(value), anchor="end"))
    group = width / len(serving.shapes)
    bar = 0.8 * group / len(serving.backends)
    for index, shape in enumerate(serving.shapes):
        ours, *others = serving.steps(shape)
        x = left + index * group + 0.1 * group
        # The slowest backend first, ours last.
        for number, value in enumerate([*reversed(others), ours]):
            color = _OURS if number == len(others) else _OTHERS[len(others) - 1 - number]
            parts.append(
                f'<rect x="{x + number * bar:.1f}" y="{y(value):.1f}" width="{bar - 2:.1f}" '
                f'height="{_BOTTOM - y(value):.1f}" fill="{color}"/>'
            )
        saved = f"−{100 * (1 - ours / min(others)):.0f} %"
        right = x + (len(others) + 1) * bar
        above = y(max(ours, others[0])) - 5  # also of the bar beside ours
        parts.append(_label(right, above, saved, anchor="end", color=_OURS, weight="bold"))
        parts.append(_label(x + 0.4 * group, _BOTTOM + 17, shape_name(shape), anchor="middle"))
    return "\n".join(parts)


def _legend(serving: Serving, x: float) -> Iterator[str]:
    names = [name for _, name in serving.backends[1:]]
    items = [*reversed(list(zip(names, _OTHERS, strict=False))), ("mla-backend", _OURS)]
    for name, color in items:
        yield f'<rect x="{x:.0f}" y="29" width="10" height="10" fill="{color}"/>'
        yield _label(x + 14, 38, name)
        x += 26 + 7.2 * len(name)


def _label(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    color: str = _TEXT,
    size: int = 12,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size}" '
        f'font-weight="{weight}">{text}</text>'
    )


def main() -> None:
    for page in PAGES:
        page.write_text(updated(page.read_text()))
    PICTURE.write_text(picture())


if __name__ == "__main__":
    main()
