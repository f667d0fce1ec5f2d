"""Shapes, inputs, figures and failures of the decode benchmark."""

import json
import math
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mla_backend import TableKind
from mla_backend import decode as decode_module
from mla_backend.errors import InvalidInputError, UnsupportedError
from mla_backend_bench import decode as bench
from mla_backend_bench import implementations
from mla_backend_bench.baseline import Checkout
from mla_backend_bench.cases import LATENT_DIM, SOFTMAX_SCALE, STANDARD_GRID, Case, Inputs
from mla_backend_bench.cli import app
from mla_backend_bench.timing import Replay
from tests.support.cases import bytes_of
from tests.support.mla_oracle import stored_values

CPU = torch.device("cpu")


def test_shapes_are_parsed_as_they_are_printed():
    assert Case.parse("64x1024x16x2@1~lognormal") == Case(64, 1024, 16, 2, 1, "lognormal")
    assert Case.parse("1x2x3x1") == Case(1, 2, 3, 1, 64, "fixed")
    assert Case.parse("1x4096x8x2~lognormal~shard4") == Case(1, 1024, 32, 2, 64, "lognormal", 4)
    assert Case.parse("1x2x3x1~256+64") == replace(Case(1, 2, 3), kv_lora_rank=256)
    without_rope = Case(1, 2, 3, page_size=1, qk_rope_head_dim=0, lists=True)
    assert Case.parse("1x2x3x1~512+0~lists") == Case.parse("1x2x3x1@1~512+0~lists") == without_rope
    others = ("1x4096x8x2@1~lognormal~shard4", "2x64x16x1~shard2", "2x64x16x1~lognormal~512+0~lists")
    for shape in (*STANDARD_GRID, *others):
        assert Case.parse(str(Case.parse(shape))) == Case.parse(shape)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1x2x3",
        "0x2x3x1",
        "1x2x3x1@0",
        "1x2x3x4",
        "1x2x3x1~normal",
        "1x2x3x1 ",
        "1x2x3x1~shard0",
        "1x3x3x1~shard2",
        "1x2x3x1~0+64",
        "1x2x3x1~512",
        "1x2x3x1@64~lists",
        "1x2x3x2~lists",
    ],
)
def test_bad_shapes_are_refused(text):
    with pytest.raises(InvalidInputError):
        Case.parse(text)


@pytest.mark.parametrize("command", ["decode", "trace"])
def test_help_says_how_shapes_are_written(command):
    printed = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
    assert "BATCHxSEQ_LENxHEADSxQ_LEN[@PAGE_SIZE]" in printed


def test_lognormal_lengths_recur_and_keep_the_mean():
    lengths = Case.parse("4096x1000x1x1~lognormal").seq_lens()
    assert lengths == Case.parse("4096x1000x1x1~lognormal").seq_lens()
    assert min(lengths) < 400 < 2500 < max(lengths)
    assert sum(lengths) / len(lengths) == pytest.approx(1000, rel=0.05)


def test_bytes_and_flops_follow_the_definition():
    case = Case.parse("2x7x3x4@2")
    pairs = sum(position + 1 for position in range(7 - 4, 7)) * 2
    assert case.flops() == 2 * 3 * pairs * (576 + 512)
    assert case.num_bytes(2) == 2 * (2 * 7 * 576 + 2 * 4 * 3 * (576 + 512))


def test_inputs_scatter_a_logical_sequence_over_pages():
    inputs = Inputs(Case.parse("3x40x2x2@16~lognormal"), CPU, torch.float32, cache_bytes=2_000_000)
    assert inputs.num_layers * inputs.caches[0].nbytes >= 2_000_000
    used = torch.cat(inputs.pages)
    assert sorted(used.tolist()) == list(range(inputs.caches.shape[1]))
    layer = inputs.num_layers - 1
    expected = inputs.expected(layer)
    # One query row, key by key, by the page table that implementations get.
    request, row, head = 1, 0, 1
    length = inputs.lengths[request]
    slots = [(int(inputs.batch.table[request, t // 16]), t % 16) for t in range(length - 1)]  # row 0 of 2
    keys = torch.stack([inputs.caches[layer][slot] for slot in slots]).double()
    assert keys.shape[1] == LATENT_DIM
    q = inputs.q[request * 2 + row, head].double()
    weights = [math.exp(float(q @ key) * SOFTMAX_SCALE) for key in keys]
    exact = sum(w * key[:512] for w, key in zip(weights, keys, strict=True)) / sum(weights)
    assert torch.allclose(expected[request * 2 + row, head], exact, atol=1e-10)


@pytest.mark.parametrize(("kv_dtype", "row_bytes"), [("fp8_e4m3", 576), ("fp8_ds_mla", 656)])
def test_fp8_caches_are_measured_against_what_they_store(kv_dtype, row_bytes):
    case = replace(Case.parse("2x40x2x1@16"), kv_dtype=kv_dtype)
    assert case.num_bytes(2) == 2 * 40 * row_bytes + 2 * 2 * 2 * (576 + 512)
    inputs = Inputs(case, CPU, torch.bfloat16, cache_bytes=100_000)
    assert inputs.caches.shape[1:] == (6, 16, row_bytes)
    values, _ = stored_values(
        bytes_of(inputs.caches[0])[inputs.pages[1].long()].view(inputs.caches.dtype).flatten(0, 1)[:40],
        1.0 if inputs.kv_scale is None else inputs.kv_scale.item(),
    )
    assert 0.9 < values.std() < 1.1 and values.abs().max() > 3
    scores = torch.einsum("hd,kd->hk", inputs.q[1].double(), values) * SOFTMAX_SCALE
    exact = scores.softmax(-1) @ values[:, :512]
    torch.testing.assert_close(inputs.expected(0)[1], exact)
    implementation = implementations.Torch(inputs)
    implementation.plan()
    error = (implementation.run(0).double() - inputs.expected(0)).norm() / inputs.expected(0).norm()
    assert error < 2.5e-3


@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"])
def test_rotary_columns_of_zeros_change_nothing(kv_dtype):
    case = replace(Case.parse("2x40x2x1@16~512+0"), kv_dtype=kv_dtype)
    assert case.num_bytes(2) == 2 * 40 * 512 * (1 if kv_dtype else 2) + 2 * 2 * 2 * (512 + 512)
    inputs = Inputs(case, CPU, torch.bfloat16, cache_bytes=100_000)
    padded = inputs.with_rotary_columns()
    assert (inputs.caches.shape[-1], padded.caches.shape[-1]) == (512, 576)
    assert (padded.q_nope.shape[-1], padded.q_rope.shape[-1]) == (512, 64)
    torch.testing.assert_close(padded.expected(0), inputs.expected(0))
    assert padded.with_rotary_columns() is padded


@pytest.mark.parametrize("shape", ["3x40x2x1@1~256+64~lists", "3x40x2x1~lognormal~512+0~lists"])
def test_lists_name_the_keys_of_the_pages(shape):
    inputs = Inputs(Case.parse(shape), CPU, torch.float32, cache_bytes=100_000)
    implementation = implementations.Torch(inputs)
    assert implementation.decoder.spec.table_kind is TableKind.LIST
    implementation.plan()
    torch.testing.assert_close(implementation.run(0).double(), inputs.expected(0), rtol=1e-4, atol=1e-5)


def test_replay_visits_every_layer_in_order():
    calls = []

    def run(layer):
        calls.append(layer)
        return layer

    replay = Replay(run, 3, CPU)
    calls.clear()
    replay.replay()
    assert len(calls) == replay.num_calls > 0
    assert calls == [i % 3 for i in range(len(calls))]
    assert replay.result == 2
    assert all(seconds > 0 for seconds in replay.measure())


def test_times_are_of_one_call(monkeypatch):
    """Not of a replay, which has one for each layer."""
    clock = 0.0

    def run(layer):
        nonlocal clock
        clock += 0.25

    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    assert set(Replay(run, 4, CPU).measure()) == {0.25}


class Wrong(implementations.Torch):
    def run(self, layer):
        return super().run(layer) * 1.01


class TurnsWrong(implementations.Torch):
    """Right until it is timed."""

    def run(self, layer):
        out = super().run(layer)
        return out if bench.measure_in_turn.calls == 0 else torch.zeros_like(out)


class Stale(implementations.Torch):
    """Correct for the first layer only."""

    def run(self, layer):
        return super().run(0)


class Remembers(implementations.Torch):
    """Computes each layer once, so a replay writes nothing."""

    def plan(self):
        super().plan()
        self.outputs = getattr(self, "outputs", {})

    def run(self, layer):
        if layer not in self.outputs:
            self.outputs[layer] = super().run(layer)
        return self.outputs[layer]


class Broken(implementations.Torch):
    def plan(self):
        raise OSError("no such thing\nsecond line")


class Missing(implementations.Torch):
    def __init__(self, inputs):
        import a_library_that_is_not_there  # noqa: F401


@pytest.fixture(scope="module")
def results():
    faulty = {"wrong": Wrong, "stale": Stale, "turns wrong": TurnsWrong, "remembers": Remembers}
    faulty |= {"broken": Broken, "missing": Missing}
    seen = []
    measure = bench.measure_in_turn

    def measure_in_turn(*arguments):
        measure_in_turn.calls += 1
        return measure(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        for name, implementation in faulty.items():
            patch.setitem(implementations.IMPLEMENTATIONS, name, implementation)
        patch.setattr(bench, "measure_in_turn", measure_in_turn)

        def finished(case, results):
            seen.append((case, len(results.rows)))
            measure_in_turn.calls = 0

        measure_in_turn.calls = 0
        done = bench.run(
            [Case.parse("2x50x2x1@8"), Case.parse("2x50x2x2@1~lognormal")],
            ["torch", "mla_backend", *faulty],
            CPU,
            torch.float32,
            finished,
            commit="c0ffee",
        )
    assert [rows for _, rows in seen] == [1, 2]
    return done


def test_only_correct_implementations_are_timed(results):
    assert {row.impl for row in results.rows} == {"torch"}
    for row in results.rows:
        case = Case(row.batch, row.seq_len, row.heads, row.q_len, row.page_size, row.lengths)
        assert 0 < row.rel_l2 < 1e-5
        assert row.tb_per_s * row.time_us == pytest.approx(case.num_bytes(4) * 1e-6)
        assert row.tflops * row.time_us == pytest.approx(case.flops() * 1e-6)


@pytest.mark.parametrize(
    ("impl", "reason"),
    [
        ("wrong", "wrong result: relative L2 error 1.00e-02"),
        ("stale", "wrong result"),
        ("turns wrong", "wrong result: relative L2 error 1.00e+00"),
        ("remembers", "wrong result"),
        ("broken", "OSError: no such thing"),
        ("missing", "not installed: No module named 'a_library_that_is_not_there'"),
        ("mla_backend", "none of our kernels serves this"),
    ],
)
def test_failures_are_reported_with_their_reason(results, impl, reason):
    reasons = [failure.reason for failure in results.failures if failure.impl == impl]
    assert len(reasons) == 2 and all(text.startswith(reason) for text in reasons)
    assert "second line" not in "".join(reasons)


def row(impl, time_us, heads=16):
    return bench.Row(1, 8, heads, 1, 64, "fixed", impl, time_us, 0.0, 1.0, 1.0, 0.0)


def test_speedups_are_over_the_best_other(results):
    table = [row("mla_backend", 10), row("fa3", 40), row("triton", 20)]
    table += [row("mla_backend", 8, heads=128), row("fa3", 4, heads=128), row("mla_backend", 1, heads=2)]
    results = bench.Results({}, {}, None, "", {}, 1.0, rows=table)
    assert results.speedup(table[0]) == 2.0
    assert results.speedup(table[2]) == 2.0  # over the best other one
    assert results.speedup(table[5]) is None
    assert results.mean_speedup(64, "mla_backend") == (pytest.approx(2.0), 1)
    assert results.mean_speedup(128, "mla_backend") == (pytest.approx(1.0), 2)


def test_the_quick_command_says_what_is_installed(monkeypatch):
    monkeypatch.setattr("mla_backend_bench.cases.QUICK_GRID_OF_CPUS", ("1x20x2x1@4",))
    outcome = CliRunner().invoke(app, ["quick", "--device", "cpu"])
    assert outcome.exit_code == 0 and "1x20x2x1@4" in outcome.output
    assert "ours" in outcome.output.splitlines()[1]


def test_command_writes_results(tmp_path):
    path = tmp_path / "made" / "results.json"
    arguments = ["decode", "1x20x2x1@4", "-o", str(path), "--commit", "c0ffee"]
    arguments += ["--kv-dtype", "auto", "--kv-dtype", "fp8_e4m3"]
    outcome = CliRunner().invoke(app, [*arguments, "--dtype", "float32", "--device", "cpu"])
    assert outcome.exit_code == 0, outcome.output
    written = json.loads(path.read_text())
    assert written["commit"] == "c0ffee" and not written["failures"]
    assert [row["impl"] for row in written["rows"]] == ["torch", "torch"]  # all that a CPU runs
    assert all(0 < row["p10_us"] <= row["time_us"] <= row["p90_us"] for row in written["rows"])
    assert written["read_ceiling_tb_per_s"] == max(written["read_tb_per_s"].values()) > 0
    loaded = bench.Results.load(path)
    assert loaded.cases() == [Case(1, 20, 2, 1, 4), Case(1, 20, 2, 1, 4, kv_dtype="fp8_e4m3")]
    assert [len(loaded.of(case)) for case in loaded.cases()] == [1, 1]
    loaded.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == written


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rows": [{"engine": "vllm"}], "failures": []}'])
def test_other_files_are_not_loaded_as_results(tmp_path, content):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(InvalidInputError, match="does not hold results"):
        bench.Results.load(path)


@pytest.mark.parametrize("command", [["decode"], ["crossover"], ["trace", "1x8192x16x1", "-o", "trace.json"]])
def test_commands_say_in_one_line_that_there_is_no_gpu(command, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    outcome = CliRunner().invoke(app, command)
    assert outcome.exit_code == 1
    [line] = outcome.output.splitlines()
    assert f"bench {command[0]} needs a" in line and "torch sees n" in line


def test_the_gpu_that_is_measured_is_the_current_one(monkeypatch):
    """CUDA graphs are captured on that."""
    current = []

    def run(cases, names, device, *_):
        assert current == [device]
        raise UnsupportedError("seen")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", current.append)
    monkeypatch.setattr(bench, "run", run)
    outcome = CliRunner().invoke(app, ["decode", "1x8x2x1", "--device", "cuda:1"])
    assert "seen" in outcome.output and current == [torch.device("cuda:1")]


@pytest.mark.parametrize(
    "arguments",
    [
        ["1x2"],
        ["--impl", "nothing"],
        ["--dtype", "int8"],
        ["--kv-dtype", "fp8"],
        ["--device", "gpu"],
        ["--device", "meta"],
        ["--device", "cpu:1"],
        ["--device", "cpu", "-o", "/"],
        ["--among-kernels", "--device", "cpu"],
    ],
)
def test_command_refuses_bad_arguments(arguments):
    assert CliRunner().invoke(app, ["decode", *arguments]).exit_code == 2


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], ["--among-kernels"]], ids=str)
def test_command_measures_on_a_gpu(tmp_path, options):
    path = tmp_path / "results.json"
    arguments = ["decode", "2x500x16x1", "3x300x16x2@1~lognormal", "--impl", "torch"]
    outcome = CliRunner().invoke(app, [*arguments, *options, "-o", str(path)])
    assert outcome.exit_code == 0, outcome.output
    written = json.loads(path.read_text())
    assert [row["impl"] for row in written["rows"]] == ["torch", "torch"], written["failures"]
    assert written["among_kernels"] == bool(options)
    assert 0.1 < written["read_ceiling_tb_per_s"] < 20


def test_another_checkout_is_measured_with_its_own_code(tmp_path):
    """The other checkout is a copy of this one whose decoder has another name."""
    checkout = tmp_path / "earlier"
    shutil.copytree(Path(decode_module.__file__).parent, checkout / "mla_backend")
    decoder = checkout / "mla_backend" / "decode.py"
    decoder.write_text(decoder.read_text().replace('name = "torch"', 'name = "earlier"'))
    case = Case.parse("2x40x2x1@16")
    seen = []

    def done(case, results):
        seen.append(sys.modules["mla_backend.decode"] is decode_module)

    results = bench.run([case], ["torch"], CPU, torch.float32, done, baseline=Checkout(checkout))
    assert seen == [True]
    # `MlaBackend` refuses a decoder named "torch"; the other checkout's decoder has another name.
    assert {row.impl for row in results.rows} == {"torch", "baseline"}
    assert sys.modules["mla_backend.decode"] is decode_module


def test_a_baseline_must_be_a_checkout(tmp_path):
    with pytest.raises(InvalidInputError, match="is not a checkout of mla-backend"):
        Checkout(tmp_path)


def test_differences_from_the_baseline_are_those_of_the_same_shape():
    rows = [("mla_backend", 10.5, 64), ("baseline", 10.0, 64), ("mla_backend", 7.0, 1), ("baseline", 8.0, 1)]
    results = bench.Results({}, {}, None, "bfloat16", {}, 1.0)
    for name, time_us, page_size in rows:
        results.rows.append(bench.Row(1, 2, 3, 1, page_size, "fixed", name, time_us, 0, 0, 0, 0))
    assert [(row.page_size, longer) for row, longer in results.against_baseline()] == [(64, 0.5), (1, -1.0)]
    assert results.speedup(results.rows[0]) is None
