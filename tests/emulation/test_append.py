"""The append kernel, run on the CPU, against fp64."""

import multiprocessing
import random
import signal

import pytest
import torch

from mla_backend.kernels import append
from mla_backend.kernels.base import ELEMENT_NAMES
from tests.emulation.emulator import EmulatedModule, sources
from tests.support.cases import check_rotary_append


def build(folder, toolchain, edits=()):
    """The kernel, from edited sources."""
    return EmulatedModule(append.variant("90a"), sources(folder / "csrc", edits), toolchain)


def check(module, seed, interleaved=True, dtype=torch.bfloat16):
    def rotary_append(*tensors, interleaved, norm_weight, norm_eps):
        getattr(module, ELEMENT_NAMES[dtype])(*tensors, interleaved, norm_weight, norm_eps)

    draw = random.Random(seed)
    check_rotary_append(
        rotary_append,
        draw,
        tokens=draw.choice([1, 2, 7]),
        num_heads=draw.choice([1, 5, 16, 40]),
        dtype=dtype,
        interleaved=interleaved,
        device="cpu",
    )


@pytest.fixture(scope="module")
def module(tmp_path_factory, toolchain):
    return build(tmp_path_factory.mktemp("append"), toolchain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_append(module, seed, interleaved, dtype):
    check(module, seed, interleaved, dtype)


def test_predecessor_is_waited_for(tmp_path, toolchain, capfd):
    module = build(tmp_path, toolchain, [("common/append.cuh", "wait_for_predecessor();", "")])
    process = multiprocessing.get_context("spawn").Process(target=check, args=(module, 0))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGABRT
    assert "did not wait for the predecessor" in capfd.readouterr().err
