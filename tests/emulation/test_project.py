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
            run(x[:tokens, :, :d_in], w, out[:tokens], *[None] * (4 if run == emulated.absorb else 0))
            expected = torch.einsum("thi,hio->tho", x[:tokens, :, :d_in].double(), w.double())
            error = (out[:tokens] - expected).norm() / expected.norm()
            assert error < (2.5e-3 if dtype is torch.bfloat16 else 4e-4), (tokens, d_in)
            assert out[tokens:].isnan().all()


@pytest.mark.parametrize("tokens, slots", [(1, 1), (7, 5), (40, 40)], ids=str)
def test_new_latents_are_appended(module, tokens, slots):
    """Rows that are wider, pages with a gap behind them, slots that are left out, more queries than slots."""
    emulated = module(torch.bfloat16, project.DIMENSIONS[0])
    new = torch.randn(tokens, 512 + 64 + 8).bfloat16()
    latent, rope = new[:, :512], new[:, 520:]
    pages = torch.full((6, 24, 576), float("nan"), dtype=torch.bfloat16)
    cache = pages[:, :16]
    chosen = torch.randperm(6 * 16)[:slots]
    chosen[slots // 2 :: 3] = -1 if slots > 1 else chosen[0]
    q = torch.randn(tokens, HEADS, 128).bfloat16()
    w = torch.randn(HEADS, 128, 512).bfloat16()
    out = torch.full((tokens, HEADS, 512), float("nan"), dtype=torch.bfloat16)
    emulated.absorb(q, w, out, latent, rope, chosen, cache)
    expected = torch.full_like(pages, float("nan"))
    for token, slot in enumerate(chosen.tolist()):
        if slot >= 0:
            expected[slot // 16, slot % 16] = torch.cat([latent[token], rope[token]])
    torch.testing.assert_close(pages, expected, rtol=0, atol=0, equal_nan=True)
    assert out.isfinite().all()
