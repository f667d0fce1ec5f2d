"""The kernel that takes new tokens in, run on the CPU, against fp64."""

import ctypes
import multiprocessing
import random
import signal
from pathlib import Path

import pytest
import torch

from tests.emulation.emulator import call, compile_for_cpu, sources
from tests.support.cases import check_rotary_append


def build(folder, toolchain, edits=()):
    """The kernel's library, from edited sources."""
    root = sources(folder / "csrc", edits)
    library = root / "append.so"
    compile_for_cpu(Path(__file__).parent / "append.cpp", library, root, toolchain)
    return library


def check(library, seed, interleaved=True, dtype=torch.bfloat16):
    def append(q_rope, kv_c, k_rope, cache, slots, positions, cos_sin, *, interleaved, norm_weight, norm_eps):
        call(
            ctypes.CDLL(str(library)), "append", int(q_rope.dtype is torch.bfloat16),
            q_rope, *q_rope.stride()[:2], kv_c, kv_c.stride(0), k_rope, k_rope.stride(0),
            cache, *cache.stride()[:2], cache.shape[1], slots, int(slots.element_size() == 8),
            positions, cos_sin, int(interleaved), *q_rope.shape[:2], kv_c.shape[1], k_rope.shape[1],
            norm_weight, norm_eps,
        )  # fmt: skip

    draw = random.Random(seed)
    check_rotary_append(
        append,
        draw,
        tokens=draw.choice([1, 2, 7]),
        num_heads=draw.choice([1, 5, 16, 40]),
        dtype=dtype,
        interleaved=interleaved,
        device="cpu",
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory, toolchain):
    return build(tmp_path_factory.mktemp("append"), toolchain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_append(library, seed, interleaved, dtype):
    check(library, seed, interleaved, dtype)


def test_predecessor_is_waited_for(tmp_path, toolchain, capfd):
    library = build(tmp_path, toolchain, [("common/append.cuh", "wait_for_predecessor();", "")])
    process = multiprocessing.get_context("spawn").Process(target=check, args=(library, 0))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGABRT
    assert "did not wait for the predecessor" in capfd.readouterr().err
