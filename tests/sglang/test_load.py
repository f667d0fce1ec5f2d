"""`bench load` with SGLang's server and its own generator."""

import importlib.util
import json

import pytest
import sglang
from typer.testing import CliRunner

from mla_backend_bench.cli import app

pytestmark = pytest.mark.newest


def test_a_server_under_load(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if importlib.util.find_spec("datasets") is None:
        # The generator imports it for data sets of other kinds.
        (tmp_path / "datasets.py").write_text("load_dataset = None")
        monkeypatch.syspath_prepend(tmp_path)
    engine = {"max_total_tokens": 2048, "disable_cuda_graph": True}
    file = tmp_path / "results.json"
    arguments = ["load", "sglang", str(checkpoint), "--backend", "mla_backend", "--dtype", "float32"]
    arguments += ["--engine-options", json.dumps(engine), "--concurrency", "3", "--waves", "2"]
    arguments += ["--min-requests", "1", "--prompt-tokens", "80", "--new-tokens", "8", "-o", str(file)]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["version"], row["requests"]) == (sglang.__version__, 6)
    assert 4 <= row["output_tokens_per_s"] / row["requests_per_s"] <= 12
    assert 0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"] and 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
