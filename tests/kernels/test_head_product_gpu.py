"""The products of heads with their weights on a GPU: against fp64, and behind and before other launches."""

import pytest
import torch

from mla_backend.kernels import head_product
from mla_backend.kernels.head_product import HeadProduct
from tests.support.cases import relative_error
from tests.support.launches import assert_overlap_changes_nothing

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 2.4e-3, torch.float16: 3e-4}


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability() != head_product.CAPABILITY:
        pytest.skip("the kernel is for compute capability 9.0")


def weights_of(heads, d_nope, d_c, d_v, dtype):
    """W_UK and W_UV as vLLM has them: views of kv_b_proj's weight."""
    kv_b = torch.randn(heads, d_nope + d_v, d_c, dtype=dtype, device="cuda")
    return kv_b[:, :d_nope], kv_b[:, d_nope:].transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 31, 64])
@pytest.mark.parametrize(
    "heads, d_nope, d_c, d_v", [(16, 128, 512, 128), (20, 192, 512, 256), (5, 64, 256, 64)]
)
def test_products(heads, d_nope, d_c, d_v, tokens, dtype):
    torch.manual_seed(tokens)
    for weights in weights_of(heads, d_nope, d_c, d_v, dtype):
        assert head_product.why_not(weights, (9, 0)) is None
        multiply = HeadProduct(weights)
        x = torch.randn(tokens, heads, weights.shape[1] + 64, dtype=dtype, device="cuda")[..., :-64]
        shape = tokens, heads, weights.shape[2]
        out, again = (torch.full(shape, float("nan"), dtype=dtype, device="cuda") for _ in range(2))
        multiply(x, weights, out)
        multiply(x, weights, again)
        assert torch.equal(out, again)
        expected = torch.einsum("thk,hkn->thn", x.double(), weights.double())
        assert relative_error(out, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("tokens", [1, 33])
def test_a_chain_of_products_reads_what_was_just_written(captured, tokens):
    """Each launch begins before its predecessor has ended, and reads what that one writes."""
    torch.manual_seed(0)
    heads, layers = 16, 20
    weights = [weights_of(heads, 128, 512, 128, torch.bfloat16) for _ in range(layers)]
    multiply = [HeadProduct(w) for w in weights[0]]
    first = torch.randn(tokens, heads, 128, dtype=torch.bfloat16, device="cuda")
    results = torch.empty(layers, tokens, heads, 128, dtype=torch.bfloat16, device="cuda")

    def all_layers(pause=lambda: None):
        results.fill_(float("nan"))
        latent = torch.full((tokens, heads, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
        x = first
        for (w_uk, w_uv), out in zip(weights, results, strict=True):
            pause()
            multiply[0](x, w_uk, latent)
            pause()
            multiply[1](latent, w_uv, out)
            out.mul_(0.004)
            x = out

    assert_overlap_changes_nothing(all_layers, results, captured=captured)
    assert results[-1].any()
