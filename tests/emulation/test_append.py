"""The kernel that takes new tokens in, run on the CPU, against fp64."""

import ctypes
import random
from pathlib import Path

import pytest
import torch

from tests.emulation.emulator import compile_for_cpu, sources
from tests.kernels.cases import check_rotary_append


@pytest.fixture(scope="module")
def append(tmp_path_factory, toolchain):
    root = sources(tmp_path_factory.mktemp("append") / "csrc")
    library = root / "append.so"
    compile_for_cpu(Path(__file__).parent / "append.cpp", library, root, toolchain)
    function = ctypes.CDLL(str(library)).append

    def call(q_rope, kv_c, k_rope, cache, slots, positions, cos_sin, interleaved):
        tensors = {
            name: ctypes.c_void_p(tensor.data_ptr())
            for name, tensor in locals().items()
            if isinstance(tensor, torch.Tensor)
        }

        def numbers(*values):
            return map(ctypes.c_int64, values)

        status = function(
            *numbers(q_rope.dtype is torch.bfloat16),
            tensors["q_rope"], *numbers(*q_rope.stride()[:2]),
            tensors["kv_c"], *numbers(kv_c.stride(0)),
            tensors["k_rope"], *numbers(k_rope.stride(0)),
            tensors["cache"], *numbers(*cache.stride()[:2], cache.shape[1]),
            tensors["slots"], *numbers(slots.element_size() == 8),
            tensors["positions"], tensors["cos_sin"],
            *numbers(interleaved, len(q_rope), q_rope.shape[1], kv_c.shape[1], k_rope.shape[1]),
        )  # fmt: skip
        assert status == 0

    return call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_append(append, seed, interleaved, dtype):
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
