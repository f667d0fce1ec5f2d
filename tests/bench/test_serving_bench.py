"""The serving benchmark: shapes, times, results files and the table, and a whole run with a toy engine."""

import gzip
import json
import re
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mla_backend.errors import InvalidInputError
from mla_backend_bench import cli, layer, load, serving, serving_timing, tables
from mla_backend_bench.cli import app
from mla_backend_bench.serving_engines import Backend, Settings, SglangDriver, Shape, VllmDriver

TOY_ENGINE = '''
"""Stands for vLLM: generates nothing, but takes a millisecond per token."""

import json, pathlib, time
from types import SimpleNamespace

from mla_backend import counters

__version__ = "1.2"
SamplingParams = SimpleNamespace

class LLM:
    def __init__(self, model, attention_backend, **options):
        if attention_backend == "BROKEN":
            raise OSError("the engine does not start")
        if attention_backend == "SLOW":
            time.sleep(600)
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 1000)
        parallel = SimpleNamespace(
            tensor_parallel_size=2,
            decode_context_parallel_size=options.get("decode_context_parallel_size", 1),
            cp_kv_cache_interleave_size=1,
        )
        kv_dtype = options.get("kv_cache_dtype", "auto")
        cache = SimpleNamespace(
            num_gpu_blocks=20 if kv_dtype == "fp8" else 10, block_size=64, cache_dtype=kv_dtype
        )
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(parallel_config=parallel, cache_config=cache)
        )
        self.log = pathlib.Path(model) / f"{attention_backend}.log"
        self.counts = attention_backend in ("CUSTOM", "LIAR")

    def generate(self, prompts, sampling, use_tqdm):
        if self.counts:
            counters.add("absorbed_decode", 1)
        with self.log.open("a") as log:
            print(json.dumps([prompts, [vars(params) for params in sampling]]), file=log)
        time.sleep(1e-3 * sampling[0].max_tokens)
'''


def test_shapes_are_parsed():
    assert Shape.parse("16x2048") == Shape(batch=16, context=2048)
    assert Shape.parse("2x8192+128") == Shape(batch=2, context=8320, cached=8192)


@pytest.mark.parametrize("text", ["", "16", "16x", "0x5", "1x2x3", "-1x5", "ax5", "1x5+", "1x5+0"])
def test_bad_shapes_are_refused(text):
    with pytest.raises(InvalidInputError, match="is not a valid shape: write BATCHxCONTEXT"):
        Shape.parse(text)


def test_engines_hold_the_largest_shape():
    settings = Settings("vllm", "model", [Shape(1, 1000), Shape(16, 10)], new_tokens=5)
    assert (settings.max_batch, settings.max_tokens) == (16, 1005)


def test_our_backend_is_recognized():
    assert VllmDriver.is_ours("CUSTOM") and VllmDriver.is_ours("MLA_BACKEND")
    assert SglangDriver.is_ours("mla_backend") and SglangDriver.is_ours("flashmla/mla_backend")
    assert SglangDriver.is_ours("mla_backend_dsa") and not SglangDriver.is_ours("dsa")
    assert not VllmDriver.is_ours("FLASHMLA") and not SglangDriver.is_ours("flashmla/triton")


def test_a_step_is_the_difference_of_medians():
    seconds = iter([0.010, 0.050, 0.900, 0.051, 0.011, 0.052])  # one run for one token is an outlier
    ms = serving_timing.ms_per_step(lambda *_: next(seconds), None, [[1]], steps=4, repeats=3)
    assert ms == pytest.approx((51 - 11) / 4)


def test_the_first_token_after_a_cached_prefix():
    calls = []
    engine = SimpleNamespace(vocabulary=1000, generate=lambda *call: calls.append(call))
    times = serving_timing.measure(engine, Shape(batch=2, context=50, cached=40), 9, repeats=3)
    assert list(times) == ["prefill_ms"]
    (prefixes, _), *timed = calls
    assert len(timed) == 3 and all(num_tokens == 1 for _, num_tokens in calls)
    assert all([prompt[:40] for prompt in prompts] == prefixes for prompts, _ in timed)
    suffixes = {tuple(prompt[40:]) for prompts, _ in timed for prompt in prompts}
    assert len(suffixes) == 6 and all(len(suffix) == 10 for suffix in suffixes)


def test_overlapping_gpu_work_counts_once(tmp_path):
    events = [
        {"cat": "kernel", "ts": 0, "dur": 10},
        {"cat": "kernel", "ts": 5, "dur": 2},  # inside the first
        {"cat": "gpu_memcpy", "ts": 8, "dur": 6},
        {"cat": "cpu_op", "ts": 100, "dur": 1000},
        {"cat": "gpu_memset", "ts": 20, "dur": 1},
        {"ts": 3},
    ]
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    assert serving_timing.busy_seconds(path) == pytest.approx(15e-6)


def row(engine, backend, prefill, decode, **more):
    times = {"prefill_ms": prefill, "decode_ms_per_step": decode}
    facts = {"engine": engine, "version": "1", "backend": backend, "dcp": 1, "kv_dtype": "auto"}
    return facts | {"batch": 1, "context": 8} | times | more


def test_rows_of_another_engine_are_kept(tmp_path):
    path = tmp_path / "made" / "results.json"
    serving.save(path, [row("vllm", "A", 1.0, 1.0)], "first", "c0ffee")
    serving.save(path, [row("sglang", "B", 1.0, 1.0)], "second", "c0ffee")
    serving.save(path, [row("vllm", "C", 1.0, 1.0)], "third", "c0ffee")
    written = json.loads(path.read_text())
    assert [(row["engine"], row["backend"]) for row in written["rows"]] == [("sglang", "B"), ("vllm", "C")]
    assert {engine: run["command"] for engine, run in written["runs"].items()} == {
        "vllm": "third",
        "sglang": "second",
    }
    assert {"machine", "versions", "commit", "command"} == set(written["runs"]["vllm"])


def printed(rows):
    """The cells of the table's header and lines. Between columns there are two spaces."""
    console = Console(width=150)
    with console.capture() as capture:
        tables.print_serving(console, rows, VllmDriver.is_ours)
    header, *lines = capture.get().splitlines()
    ends = [match.end() for match in re.finditer(r"\S+( \S+)*", header)]
    # The first column is aligned at the left, the others at the right.
    starts = [0, header.index("batch"), *ends[1:-1]]
    bounds = list(zip(starts, [*starts[1:], None], strict=True))
    return [[line[start:end].strip() for start, end in bounds] for line in (header, *lines)]


def test_the_table_has_every_time_and_its_ratio_to_ours():
    rows = [
        row("vllm", "B", 30.0, 9.0, gpu_ms_per_step=3.0),
        row("vllm", "CUSTOM", 20.0, 6.0, gpu_ms_per_step=2.0),
    ]
    times = ["prefill ms", "/ ours", "step ms", "/ ours", "of GPU ms", "/ ours"]
    assert printed(rows) == [
        ["backend", "batch", "context", *times],
        ["CUSTOM", "1", "8", "20.000", "1.000", "6.000", "1.000", "2.000", "1.000"],
        ["B", "1", "8", "30.000", "1.500", "9.000", "1.500", "3.000", "1.500"],
    ]


def test_the_table_of_a_cpu_has_no_gpu_times_and_ours_may_be_missing():
    assert printed([row("vllm", "B", 30.0, 9.0)]) == [
        ["backend", "batch", "context", "prefill ms", "/ ours", "step ms", "/ ours"],
        ["B", "1", "8", "30.000", "", "9.000", ""],
    ]


def test_the_table_of_prefix_hits():
    hit = {"engine": "vllm", "version": "1", "backend": "B", "dcp": 1, "kv_dtype": "auto", "prefill_ms": 3.0}
    rows = [row("vllm", "B", 30.0, 9.0), hit | {"batch": 1, "context": 10, "cached": 8}]
    assert printed(rows)[1:] == [
        ["B", "1", "8", "30.000", "", "9.000", ""],
        ["B", "1", "8+2", "3.000", "", "", ""],
    ]


@pytest.fixture
def toy_engine(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(TOY_ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def test_command_measures_each_backend_in_an_engine_of_its_own(toy_engine):
    path = toy_engine / "results.json"
    backends = ["--backend", "CUSTOM", "--backend", "OTHER", "--backend", "LIAR"]
    options = ["--new-tokens", "3", "--together", "2", "--rounds", "2", "-o", str(path)]
    arguments = ["vllm", str(toy_engine), "1x4", "2x8", *backends, *options]
    outcome = CliRunner().invoke(app, ["serving", *arguments])
    assert outcome.exit_code == 1, "because LIAR failed"
    written = json.loads(path.read_text())
    assert [(row["backend"], row["batch"], row["context"]) for row in written["rows"]] == [
        ("CUSTOM", 1, 4),
        ("OTHER", 1, 4),
        ("CUSTOM", 2, 8),
        ("OTHER", 2, 8),
    ]
    for row in written["rows"]:
        assert row["version"] == "1.2" and row["prefill_ms"] >= 1 and "decode_ms_per_step" in row
    assert written["runs"][f"vllm {toy_engine.name}"]["command"].startswith("mla-backend")
    assert "LIAR failed" in outcome.output and "mla-backend's counters show" in outcome.output
    assert "prefill ms" in outcome.output and "step ms" in outcome.output
    ours, theirs = ((toy_engine / f"{backend}.log").read_text() for backend in ("CUSTOM", "OTHER"))
    assert ours == theirs  # the same prompts for all
    for line in ours.splitlines():
        prompts, sampling = json.loads(line)
        for prompt, parameters in zip(prompts, sampling, strict=True):
            assert list(parameters["logit_bias"]) == [str(prompt["prompt_token_ids"][0])]


def test_a_backend_may_have_options_of_its_own(toy_engine):
    path = toy_engine / "results.json"
    backend = 'CUSTOM {"decode_context_parallel_size": 2, "kv_cache_dtype": "fp8"}'
    arguments = ["vllm", str(toy_engine), "1x4", "--backend", backend, "--new-tokens", "2", "-o", str(path)]
    outcome = CliRunner().invoke(app, ["serving", *arguments])
    assert outcome.exit_code == 0, outcome.output
    (row,) = json.loads(path.read_text())["rows"]
    facts = ("backend", "tp", "dcp", "interleave", "kv_dtype", "cache_tokens")
    assert [row[fact] for fact in facts] == ["CUSTOM", 2, 2, 1, "fp8", 2560]
    assert "CUSTOM, dcp 2, fp8" in outcome.output


def test_command_fails_if_no_engine_starts(toy_engine):
    start = time.monotonic()
    arguments = ["vllm", str(toy_engine), "1x4", "--backend", "BROKEN"]
    outcome = CliRunner().invoke(app, ["serving", *arguments])
    assert outcome.exit_code == 1
    assert "BROKEN failed" in outcome.output and "the engine does not start" in outcome.output
    assert time.monotonic() - start < serving.TIMEOUT / 2


def test_an_engine_that_still_starts_is_not_waited_for(toy_engine, monkeypatch):
    """When the user presses Ctrl-C, for example."""
    monkeypatch.setattr(serving, "_END_SECONDS", 1)
    settings = Settings("vllm", str(toy_engine), [Shape(1, 4)])
    begin = time.monotonic()
    engine = serving._EngineProcess(settings, "SLOW", toy_engine, lambda *_: None)
    engine.stop()
    assert time.monotonic() - begin < 60 and not engine._process.is_alive()


def test_command_says_that_an_engine_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = CliRunner().invoke(app, ["serving", "sglang", "model"])
    assert (outcome.exit_code, outcome.output.strip()) == (1, "sglang is not installed here")


@pytest.mark.parametrize(
    "arguments",
    [
        ["tgi", "model"],
        ["vllm", "model", "1x"],
        ["vllm", "model", "--engine-options", "3"],
        ["vllm", "model", "--backend", "CUSTOM 3"],
    ],
)
def test_command_refuses_bad_arguments(arguments):
    assert CliRunner().invoke(app, ["serving", *arguments]).exit_code == 2


@pytest.mark.parametrize("content", ["", "[]", '{"rows": []}'])
def test_command_refuses_to_add_to_other_files(tmp_path, content):
    path = tmp_path / "results.json"
    path.write_text(content)
    outcome = CliRunner().invoke(app, ["serving", "vllm", "model", "-o", str(path)])
    assert outcome.exit_code == 2 and "does not hold results of" in outcome.output
    assert path.read_text() == content


@pytest.mark.parametrize("add", [[], ["--add"]], ids=["replace", "add"])
@pytest.mark.parametrize("command", ["serving", "layer", "load"])
def test_command_refuses_files_of_other_commands(tmp_path, monkeypatch, command, add):
    """Also those in which nothing of this engine and model stands."""
    measured = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: measured.append(name))
    path = tmp_path / "results.json"
    rows = {
        "serving": row("sglang", "A", 1.0, 1.0),
        "layer": dict.fromkeys(("kernels_per_layer", "attention_us_per_layer", "step_ms"), 1.0),
        "load": dict.fromkeys(load.MEASURED, 1.0),
    }
    for other in rows.keys() - {command}:
        path.write_text(json.dumps({"runs": {}, "rows": [rows[other]]}))
        before = path.read_text()
        outcome = CliRunner().invoke(app, [command, "vllm", "model", "-o", str(path), *add])
        words = " ".join(re.sub("[│╭╮╰╯─]", " ", outcome.output).split())
        assert outcome.exit_code == 2 and not measured, outcome.output
        assert f"holds results of `bench {other}`; name another file for those of `bench {command}`" in words
        assert path.read_text() == before
    path.write_text(json.dumps({"runs": {}, "rows": [rows[command]]}))
    serving.check(path, command)


@pytest.mark.parametrize(
    "typed", [["mla-backend", "bench", "serving", "vllm"], ["__main__.py", "serving", "vllm"]]
)
def test_results_record_the_command(monkeypatch, typed):
    monkeypatch.setattr(sys, "argv", typed)
    assert cli._command_line() == "mla-backend bench serving vllm"


def test_a_backend_may_have_environment_variables():
    parsed = Backend.parse('CUSTOM {"kv_cache_dtype": "fp8", "environment": {"A": "0"}}')
    assert parsed == ("CUSTOM", {"kv_cache_dtype": "fp8"}, {"A": "0"}) and parsed.label == "CUSTOM A=0"
    with pytest.raises(InvalidInputError, match="is not a JSON object of strings"):
        Backend.parse('CUSTOM {"environment": {"A": 0}}')


def kernel(name, start, duration, launch):
    return {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": {"correlation": launch}}


def test_a_layer_is_measured_in_the_graphs_of_a_trace(tmp_path):
    """Steps of 2 layers with 4 kernels each: 16 us from first to last, products in 6 of these."""
    events = [kernel("sampling", 0, 500, 1)]  # no graph
    for step in range(3):
        for number in range(2):
            at = 1000 * step + 9 * number
            events += [
                kernel("nvjet_sm90_tst", at, 2, 7 + step),
                kernel("norm_rope", at + 1, 3, 7 + step),  # begins under the product
                kernel("cutlass::device_kernel<flash::FlashAttnFwdSm90<gemm>>", at + 5, 1, 7 + step),
                kernel("cublasLt::splitKreduce_kernel", at + 6, 1, 7 + step),
            ]
    events.append({"cat": "gpu_memcpy", "ts": 4, "dur": 900, "args": {"correlation": 8}})

    def stop():
        with gzip.open(tmp_path / "traces" / "rank0.json.gz", "wt") as file:
            json.dump({"traceEvents": events}, file)

    calls = []
    engine = SimpleNamespace(
        traces=tmp_path / "traces",
        vocabulary=9,
        generate=lambda prompts, n: calls.append(n),
        start_profile=lambda: calls.append("start"),
        stop_profile=stop,
    )
    result = layer.measure(engine, Shape(1, 8), num_layers=2)
    assert result == {"kernels_per_layer": 4, "attention_us_per_layer": 5, "step_ms": pytest.approx(0.016)}
    assert calls == [1, "start", 1 + layer.STEPS]
    with pytest.raises(RuntimeError, match="have no graph of a decode step"):
        layer.measure(engine, Shape(1, 8), num_layers=3)


@pytest.mark.parametrize(
    "config, layers",
    [
        ({"num_hidden_layers": 9}, 9),
        ({"text_config": {"num_hidden_layers": 8}}, 8),
        ({"num_hidden_layers": 27, "linear_attn_config": {"full_attn_layers": [4, 8, 12]}}, 3),
        ({"num_hidden_layers": 24, "layer_group_size": 4}, 6),
    ],
    ids=["plain", "multimodal", "Kimi-Linear", "Ling"],
)
def test_bench_layer_divides_by_the_layers_with_latent_attention(tmp_path, monkeypatch, config, layers):
    latents = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "hidden_size": 512}
    part = config.get("text_config", config)
    part |= latents | {"num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(cli, "_device", lambda *_: None)
    seen = []

    def measure(settings, *_):
        seen.append(settings.layers)
        return [], True

    monkeypatch.setattr(cli, "_measure_engines", measure)
    outcome = CliRunner().invoke(app, ["layer", "vllm", str(tmp_path)])
    assert outcome.exit_code == 0 and seen == [layers], outcome.output


def test_rows_of_another_model_are_kept(tmp_path):
    path = tmp_path / "layer.json"
    for model, step in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        serving.save(path, [{"engine": "vllm", "model": model, "step_ms": step}], "command", "c0ffee")
    written = json.loads(path.read_text())
    assert [(row["model"], row["step_ms"]) for row in written["rows"]] == [("b", 2.0), ("a", 3.0)]
    assert set(written["runs"]) == {"vllm a", "vllm b"}


def test_rows_that_name_no_model_are_older_and_replaced(tmp_path):
    path = tmp_path / "results.json"
    for row in ({"engine": "sglang"}, {"engine": "vllm"}, {"engine": "vllm", "model": "a"}):
        serving.save(path, [row], "command", "c0ffee")
    written = json.loads(path.read_text())
    assert written["rows"] == [{"engine": "sglang"}, {"engine": "vllm", "model": "a"}]
    assert set(written["runs"]) == {"sglang", "vllm a"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["tgi", "."], "unknown engine tgi"),
        (["vllm", ".", "1x"], "not a valid shape"),
        (["vllm", "."], "config.json"),
        (["vllm", ".", "--backend", "CUSTOM 3"], "is not a backend"),
        (["vllm", ".", "-o", "other.json"], "does not hold results"),
    ],
)
def test_bench_layer_refuses_bad_arguments(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.json").write_text("{}")
    outcome = CliRunner().invoke(app, ["layer", *arguments])
    assert outcome.exit_code == 2 and message in outcome.output
