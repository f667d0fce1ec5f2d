"""`bench load` with SGLang's server and its own generator."""

import importlib.util

import pytest
import sglang

from tests.support.loads import check_a_server_under_load

pytestmark = pytest.mark.newest


def test_a_server_under_load(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if importlib.util.find_spec("datasets") is None:
        # The generator imports it for data sets of other kinds.
        (tmp_path / "datasets.py").write_text("load_dataset = None")
        monkeypatch.syspath_prepend(tmp_path)
    engine = {"max_total_tokens": 2048, "disable_cuda_graph": True}
    check_a_server_under_load(sglang, checkpoint, "mla_backend", engine, tmp_path / "results.json")
