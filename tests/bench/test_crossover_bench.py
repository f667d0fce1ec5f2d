"""The calibration gives back the rates that the times were made with."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from mla_backend import costs
from mla_backend.errors import KernelBuildError, UnsupportedError
from mla_backend.policy import Policy, Rates, default_rates
from mla_backend_bench import crossover as bench
from mla_backend_bench.cli import app

RATES = Rates(gemm_flops=7e14, absorbed_flops=4e14, vanilla_flops=6e14, bytes_per_s=4e12)


def modelled_row(geometry, prefix_len, query_len):
    def microseconds(cost, rate):
        return 1e6 * (cost.flops / rate + cost.bytes / RATES.bytes_per_s)

    kv_len = prefix_len + query_len
    return bench.Row(
        prefix_len,
        query_len,
        expand_us=microseconds(costs.expand_keys(geometry, kv_len), RATES.gemm_flops),
        vanilla_us=microseconds(costs.vanilla_attention(geometry, query_len, kv_len), RATES.vanilla_flops),
        absorb_us=microseconds(costs.absorb(geometry, query_len), RATES.gemm_flops),
        absorbed_us=microseconds(costs.absorbed_attention(geometry, query_len, kv_len), RATES.absorbed_flops),
    )


def test_fit_recovers_the_rates_and_the_crossover():
    geometry = bench.geometry_of(16)
    rows = [modelled_row(geometry, p, s) for p in bench.PREFIX_LENS for s in (64, 128, 256, 512, 1024, 2048)]
    fitted = bench.fit(geometry, rows, RATES.bytes_per_s)
    for name in RATES.__slots__:
        assert getattr(fitted, name) == pytest.approx(getattr(RATES, name), rel=0.2), name
    for prefix_len in bench.PREFIX_LENS:
        exact = Policy(geometry, RATES).crossover(prefix_len)
        assert bench.measured_crossover(rows, prefix_len) == pytest.approx(exact, rel=0.05)


def test_crossover_outside_the_measured_lengths():
    faster = bench.Row(8, 1, expand_us=1, vanilla_us=1, absorb_us=1, absorbed_us=2)
    slower = bench.Row(8, 2, expand_us=1, vanilla_us=1, absorb_us=0, absorbed_us=1)
    assert bench.measured_crossover([faster], 8) == 0.0
    assert bench.measured_crossover([slower], 8) == math.inf
    assert bench.Crossover.of(8, math.inf, 0.0, 3.0) == bench.Crossover(8, None, 0.0, 3.0)


def test_command_measures_and_writes(tmp_path):
    path = tmp_path / "crossover.json"
    shape = ["--heads", "2", "--prefix", "64", "--query-len", "2", "--query-len", "8"]
    where = ["--device", "cpu", "-o", str(path)]
    outcome = CliRunner().invoke(app, ["crossover", *shape, *where])
    assert outcome.exit_code == 0, outcome.output
    written = json.loads(path.read_text())
    assert [(row["prefix_len"], row["query_len"]) for row in written["rows"]] == [(64, 2), (64, 8)]
    assert all(value > 0 for row in written["rows"] for value in row.values())
    assert Rates(**written["rates"]) and written["vanilla_library"] == "torch"
    assert "Rates(gemm_flops=" in outcome.output
    refused = CliRunner().invoke(app, ["crossover", *shape, *where, "--dtype", "float32"])
    assert refused.exit_code == 2 and "bfloat16 or float16, not of float32" in refused.output


@pytest.mark.parametrize("error", [UnsupportedError, KernelBuildError])
def test_command_says_in_one_line_that_no_kernel_serves(monkeypatch, error):
    def fail(*_):
        raise error("no kernel for this GPU")

    monkeypatch.setattr(bench, "run", fail)
    outcome = CliRunner().invoke(app, ["crossover", "--device", "cpu"])
    assert (outcome.exit_code, outcome.output.strip()) == (1, "no kernel for this GPU")


def test_what_the_command_writes_is_read_as_rates(tmp_path, monkeypatch):
    path = tmp_path / "crossover.json"
    shape = ["--heads", "2", "--prefix", "64", "--query-len", "2", "--device", "cpu"]
    outcome = CliRunner().invoke(app, ["crossover", *shape, "-o", str(path)])
    assert outcome.exit_code == 0, outcome.output
    monkeypatch.setenv("MLA_BACKEND_RATES", str(path))
    assert default_rates("cpu") == Rates(**json.loads(path.read_text())["rates"])


@pytest.mark.gpu
def test_command_runs_on_a_gpu(tmp_path):
    path = tmp_path / "crossover.json"
    arguments = ["--prefix", "512", "--query-len", "16", "--query-len", "64", "-o", str(path)]
    outcome = CliRunner().invoke(app, ["crossover", *arguments])
    assert outcome.exit_code == 0, outcome.output
    assert torch.cuda.get_device_name() == json.loads(path.read_text())["machine"]["device"]
