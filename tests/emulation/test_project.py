"""The kernels that absorb queries and expand outputs, run on the CPU, against fp64."""

import pytest
import torch

from mla_backend.errors import KernelBuildError
from mla_backend.jit.toolchain import find_toolchain
from mla_backend.kernels import project
from tests.emulation.emulator import EmulatedProjections, sources

HEADS = 2


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """By dtype and dimensions."""
    try:
        toolchain = find_toolchain()
    except KernelBuildError as error:
        pytest.skip(f"needs the CUDA headers: {error}")
    root = sources(tmp_path_factory.mktemp("emulation") / "csrc")
    return lambda dtype, dimensions: EmulatedProjections(
        project.variant(dtype, *dimensions, "90a"), root, toolchain
    )


@pytest.mark.parametrize(
    "dtype, dimensions",
    [(dtype, project.DIMENSIONS[0]) for dtype in (torch.bfloat16, torch.float16)]
    + [(torch.bfloat16, dimensions) for dimensions in project.DIMENSIONS[1:]],
    ids=str,
)
def test_products(module, dtype, dimensions):
    emulated = module(dtype, dimensions)
    d_nope, d_c, d_v = dimensions
    for tokens in (1, 7, 16, 17, 33, 64, 70):
        for run, d_in, d_out in ((emulated.absorb, d_nope, d_c), (emulated.expand, d_c, d_v)):
            # A slice of wider rows, as of queries with their rotary part; an output that lies head by head.
            x = torch.full((tokens + 1, HEADS, d_in + 64), float("nan"), dtype=dtype)
            x[:tokens, :, :d_in] = torch.randn(tokens, HEADS, d_in)
            w = torch.randn(HEADS, d_in, d_out).to(dtype)
            out = torch.full((HEADS, tokens + 1, d_out), float("nan"), dtype=dtype).transpose(0, 1)
            run(x[:tokens, :, :d_in], w, out[:tokens])
            expected = torch.einsum("thi,hio->tho", x[:tokens, :, :d_in].double(), w.double())
            error = (out[:tokens] - expected).norm() / expected.norm()
            assert error < (2.5e-3 if dtype is torch.bfloat16 else 4e-4), (tokens, d_in)
            assert out[tokens:].isnan().all()
