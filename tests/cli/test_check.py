"""`mla-backend check`: whether a kernel works here."""

import pytest
import torch
from typer.testing import CliRunner

from mla_backend import MLADecoder
from mla_backend.cli import app
from mla_backend.errors import KernelBuildError


def check(*arguments):
    return CliRunner().invoke(app, ["check", *arguments])


def test_a_right_result_is_ok():
    outcome = check("--device", "cpu")
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.stdout.splitlines()
    assert lines[0].startswith("decode kernel: torch (") and lines[-1] == "ok"
    assert lines[1].startswith("relative L2 error against fp64: ") and "µs a layer" in lines[2]


@pytest.mark.parametrize("fault", [lambda out: out * 1.01, lambda out: out * float("nan")])
def test_a_wrong_result_is_named(monkeypatch, fault):
    run = MLADecoder.run

    def wrong(*arguments, **options):
        out, lse = run(*arguments, **options)
        return fault(out), lse

    monkeypatch.setattr(MLADecoder, "run", wrong)
    outcome = check("--device", "cpu")
    assert outcome.exit_code == 1 and "ok" not in outcome.stdout
    assert outcome.stderr.startswith("WRONG: ") and "please report it" in outcome.stderr


def test_a_kernel_that_cannot_be_built_is_named(monkeypatch):
    def fail(*arguments, **options):
        raise KernelBuildError("no usable CUDA compiler found")

    monkeypatch.setattr(MLADecoder, "__init__", fail)
    outcome = check("--device", "cpu")
    assert (outcome.exit_code, outcome.stderr) == (1, "no usable CUDA compiler found\n")


def test_devices(monkeypatch):
    assert check("--device", "tpu9x").exit_code == 2
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    outcome = check("--device", "cuda:3")
    assert outcome.exit_code == 1 and "there is no cuda:3 here" in outcome.stderr


@pytest.mark.gpu
def test_check_on_a_gpu():
    outcome = check()
    assert outcome.exit_code == 0 and "TB/s" in outcome.stdout, outcome.output
    assert torch.cuda.is_available()
