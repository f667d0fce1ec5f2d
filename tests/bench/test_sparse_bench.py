"""`bench sparse` on the CPU: shapes, inputs, and an implementation that computes something else."""

import json

import pytest
import torch
from typer.testing import CliRunner

from mla_backend.errors import InvalidInputError
from mla_backend_bench import sparse
from mla_backend_bench.cli import app

CPU = torch.device("cpu")


def test_shapes():
    assert sparse.SparseCase.parse("decode:64x16") == sparse.SparseCase("decode", 64, 2048, 16)
    assert str(sparse.SparseCase.parse("prefill:1024x128@64")) == "prefill:1024x128@64"
    for text in ("64x16", "decode:0x16", "extend:1x1", "decode:1x16@"):
        with pytest.raises(InvalidInputError, match="write decode:ROWSxHEADS or prefill:ROWSxHEADS"):
            sparse.SparseCase.parse(text)


@pytest.mark.parametrize("phase, shared", [("decode", False), ("prefill", True)])
def test_lists_come_from_one_request_each(phase, shared):
    """Slots differ within a list; another layer's lists, and in decode another row's, have other requests."""
    inputs = sparse.SparseInputs(sparse.SparseCase(phase, 3, 50, 2), CPU, torch.float32, cold_bytes=1)
    requests = inputs.lists // sparse.CONTEXT[phase]
    assert all(len(row.unique()) == 50 for row in inputs.lists.flatten(0, 1))
    assert all(len(row.unique()) == 1 for row in requests.flatten(0, 1))
    assert len(requests.unique()) == inputs.num_layers * (1 if shared else 3)


def test_results_are_written(tmp_path):
    path = tmp_path / "results.json"
    arguments = ["sparse", "decode:2x2@40", "--device", "cpu", "--commit", "abc", "-o", str(path)]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.output
    (row,) = json.loads(path.read_text())["rows"]
    assert {k: row[k] for k in ("phase", "rows", "topk", "heads", "impl")} == {
        "phase": "decode",
        "rows": 2,
        "topk": 40,
        "heads": 2,
        "impl": "mla_backend",
    }
    assert row["rel_l2"] < 1e-5 and row["time_us"] > 0


def test_wrong_results_get_no_time(monkeypatch):
    class Wrong(sparse.MlaBackend):
        def run(self, layer):
            return super().run(layer) * 1.2

    monkeypatch.setitem(sparse.SPARSE_IMPLEMENTATIONS, "wrong", Wrong)
    case = sparse.SparseCase("decode", 2, 40, 2)
    results = sparse.run([case], ["wrong"], CPU, lambda *_: None)
    assert results.rows == []
    assert "wrong result" in results.failures[0].reason


def test_records_hold_the_cache():
    cache = torch.randn(3, 4, sparse.LATENT_DIM, dtype=torch.bfloat16)
    records = sparse.fp8_records(cache)
    assert records.shape == (3, 4, 656)
    values = records[..., :512].view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
    latent = (values * records[..., 512:528].view(torch.float32).unsqueeze(-1)).flatten(-2)
    assert (latent - cache[..., :512].float()).norm() / cache[..., :512].float().norm() < 0.05
    assert torch.equal(records[..., 528:].view(torch.bfloat16), cache[..., 512:])


def test_a_list_longer_than_its_context_is_refused():
    outcome = CliRunner().invoke(app, ["sparse", "decode:1x4@99999", "--device", "cpu"])
    assert outcome.exit_code == 2 and "asks for 99999 of 32768 tokens" in outcome.output


def test_a_case_that_fails_as_a_whole_leaves_the_others(monkeypatch):
    inputs_of, failing = sparse.SparseInputs, sparse.SparseCase("decode", 2, 40, 2)

    def inputs(case, *arguments):
        if case == failing:
            raise RuntimeError("out of memory")
        return inputs_of(case, *arguments)

    monkeypatch.setattr(sparse, "SparseInputs", inputs)
    other = sparse.SparseCase("decode", 1, 40, 2)
    results = sparse.run([failing, other], ["mla_backend"], CPU, lambda *_: None)
    assert [failure.reason for failure in results.failures] == ["RuntimeError: out of memory"]
    assert len(results.of(other)) == 1
