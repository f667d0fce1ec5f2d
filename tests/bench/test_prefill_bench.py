"""Shapes, figures and failures of the prefill benchmark."""

import functools
import json

import pytest
import torch
from typer.testing import CliRunner

from mla_backend.errors import InvalidInputError
from mla_backend.torch_attention import prefill_attention
from mla_backend_bench import prefill as bench
from mla_backend_bench import prefill_implementations
from mla_backend_bench.cli import app
from mla_backend_bench.prefill import PrefillShape

CPU = torch.device("cpu")


def test_shapes_are_parsed_as_they_are_printed():
    assert PrefillShape.parse("16x20x50@192:128~full") == PrefillShape(16, 20, 50, 192, 128, False)
    assert PrefillShape.parse("1x2@64") == PrefillShape(1, 2, 2, 64, 64, True)
    for text in bench.STANDARD_SHAPES:
        assert str(PrefillShape.parse(text)) == text


@pytest.mark.parametrize("text", ["", "16x20", "0x2@64", "1x2x1@64", "1x2@64~causal", "1x2@0", "1x2x3x4@64"])
def test_bad_shapes_are_refused(text):
    with pytest.raises(InvalidInputError):
        PrefillShape.parse(text)


def test_flops_count_visible_pairs_without_padding():
    assert PrefillShape.parse("3x4x7@16:8").flops() == 2 * 3 * (4 + 5 + 6 + 7) * (16 + 8)
    assert PrefillShape.parse("3x4x7@16:8~full").flops() == 2 * 3 * 4 * 7 * (16 + 8)


@pytest.mark.parametrize("text", ["2x70x90@24:16", "2x9@24:16~full"])
def test_expected_rows_are_those_of_attention(text):
    inputs = PrefillShape.parse(text).inputs(CPU, torch.float32)
    rows = bench.checked_rows(inputs)
    assert {0, len(inputs.q) - 1} <= set(rows.tolist())
    out, _ = prefill_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.starts_q,
        inputs.starts_k,
        inputs.scale,
        causal=inputs.causal,
        compute_dtype=torch.float64,
    )
    torch.testing.assert_close(bench.expected_rows(inputs, rows).float(), out[rows], rtol=1e-5, atol=1e-6)


def test_rows_and_failures(monkeypatch, tmp_path):
    def wrong(inputs):
        return lambda: torch.zeros(*inputs.q.shape[:2], inputs.v.shape[2])

    def remembers(inputs):
        """Attends once, so a replay writes nothing."""
        return functools.cache(prefill_implementations.shipped(inputs))

    monkeypatch.setitem(prefill_implementations.IMPLEMENTATIONS, "fa3", wrong)
    monkeypatch.setitem(prefill_implementations.IMPLEMENTATIONS, "sdpa-flash", remembers)
    path = tmp_path / "results.json"
    options = ["--impl", "mla_backend", "--impl", "fa3", "--impl", "sdpa-flash"]
    options += ["--device", "cpu", "--dtype", "float32"]
    done = CliRunner().invoke(app, ["prefill", "2x20x30@24:16", *options, "-o", str(path)])
    assert done.exit_code == 0, done.output
    results = json.loads(path.read_text())
    (row,) = results["rows"]
    assert row["rel_l2"] < 1e-5 and row["time_us"] > 0 and row["tflops"] > 0
    shape = {"d_qk": 24, "d_v": 16, "heads": 2, "q_len": 20, "kv_len": 30, "causal": True}
    assert row.items() >= (shape | {"impl": "mla_backend"}).items()
    assert [failure["impl"] for failure in results["failures"]] == ["fa3", "sdpa-flash"]
    assert all("wrong result" in failure["reason"] for failure in results["failures"])


def test_an_unknown_implementation_is_refused():
    done = CliRunner().invoke(app, ["prefill", "1x2@64", "--impl", "fa4", "--device", "cpu"])
    assert done.exit_code == 2
