"""Counts as Prometheus metrics: in the client's registry, and in its multiprocess mode."""

import os
import subprocess
import sys

import pytest

from mla_backend import counters

prometheus_client = pytest.importorskip("prometheus_client", reason="it is not installed")
multiprocess = pytest.importorskip("prometheus_client.multiprocess")

LABELS = {"path": "sparse", "kernel": "hopper", "cache_format": "fp8_e4m3"}
COUNT = (
    "from mla_backend import counters; counters.add('sparse', 3, kernel='hopper', cache_format='fp8_e4m3')"
)


@pytest.fixture(autouse=True)
def no_file(monkeypatch):
    monkeypatch.setattr(counters, "_cells", None)
    monkeypatch.delenv(counters.ENVIRONMENT_VARIABLE, raising=False)


def test_tokens_by_path_kernel_and_cache_format():
    def value(**changes):
        return prometheus_client.REGISTRY.get_sample_value("mla_backend_tokens_total", LABELS | changes) or 0

    before = value()
    counters.add("sparse", 5, kernel="hopper", cache_format="fp8_e4m3")
    counters.add("sparse", 7, kernel="portable", cache_format="fp8_e4m3")
    assert value() == before + 5 and value(kernel="portable") >= 7
    assert "mla_backend_tokens_total{" in prometheus_client.generate_latest().decode()


def test_processes_of_an_engine_are_added_up(tmp_path):
    """As an engine's server does it: the folder is named before any of them imports the client."""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", COUNT], env=environment, check=True)
    registry = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(tmp_path))
    assert registry.get_sample_value("mla_backend_tokens_total", LABELS) == 6


def test_nothing_is_counted_without_the_client():
    hidden = f"import sys; sys.modules['prometheus_client'] = None; {COUNT}; print(counters.snapshot())"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=True)
    assert "'sparse': Count(calls=1, tokens=3)" in done.stdout


def test_a_folder_that_is_missing_ends_no_engine(tmp_path):
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "missing")}
    code = f"{COUNT}; from mla_backend import metrics; metrics.count_build('90a', 1.0, failed=False)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "no Prometheus metrics of mla-backend: FileNotFoundError" in done.stderr
