"""Devices as tensors name them, without a GPU."""

import contextlib

import pytest
import torch

from mla_backend.device import is_captured, with_index
from mla_backend.errors import UnsupportedError


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that there are two GPUs, of which the second one captures; `gpus[0]` is the current one."""
    current = [0]

    @contextlib.contextmanager
    def device(switched_to):
        before, current[0] = current[0], switched_to.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 1)
    monkeypatch.setattr(torch.cuda, "device", device)
    return current


@pytest.mark.parametrize("current", [0, 1])
def test_what_is_captured_depends_on_the_device_and_not_on_the_current_one(gpus, current):
    gpus[0] = current
    assert [is_captured(torch.device("cuda", index)) for index in range(2)] == [False, True]
    assert not is_captured(torch.device("cpu"))
    assert gpus == [current]


def test_the_current_device_is_not_switched_to(gpus, monkeypatch):
    """That would cost more than the question."""
    monkeypatch.setattr(torch.cuda, "device", None)
    assert not is_captured(torch.device("cuda", 0))


@pytest.mark.parametrize("device", ["meta", "mps", "xpu:0"])
def test_refuses_devices_that_are_neither_gpus_nor_the_cpu(device):
    with pytest.raises(UnsupportedError, match=f"on CUDA GPUs and on the CPU, not on '{device}'"):
        with_index(device)
