"""The products of heads with their weights, run on the CPU, against fp64."""

import pytest
import torch

from mla_backend.kernels import head_product
from tests.emulation.emulator import TOLERANCE
from tests.support.cases import relative_error

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def product(monkeypatch, modules):
    """Makes the `HeadProduct` of weights, on the CPU."""
    monkeypatch.setattr(head_product, "_function", lambda kernel: modules(kernel).multiply)
    return head_product.HeadProduct


def weights_of(heads, depth, columns, dtype, depth_contiguous):
    """Part of larger weights, as vLLM's are of kv_b_proj's."""
    if depth_contiguous:
        return torch.randn(heads, columns + 64, depth).to(dtype)[:, 64:].transpose(1, 2)
    return torch.randn(heads, depth + 64, columns).to(dtype)[:, :depth]


@pytest.mark.smoke(tokens=[11])
@pytest.mark.parametrize("tokens", [1, 8, 11, 17, 64])
@pytest.mark.parametrize(
    "depth, columns, dtype, depth_contiguous",
    [
        (128, 512, BF16, False),
        (512, 128, BF16, True),
        (64, 256, FP16, False),
        (192, 512, FP16, False),
        (256, 64, FP16, True),
        (320, 256, FP16, True),
    ],
)
def test_products(product, depth, columns, dtype, depth_contiguous, tokens):
    torch.manual_seed(tokens)
    heads = 2
    weights = weights_of(heads, depth, columns, dtype, depth_contiguous)
    assert head_product._kind(weights) == (dtype, depth, 1 if depth_contiguous else 2)
    x = torch.randn(tokens, heads, depth + 64).to(dtype)[..., :depth]
    storage = torch.full((tokens, heads, columns + 8), float("nan"), dtype=dtype)
    out = storage[..., :columns]
    multiply = product(weights)
    assert multiply.serves(x, weights)
    multiply(x, weights, out)
    expected = torch.einsum("thk,hkn->thn", x.double(), weights.double())
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    assert storage[..., columns:].isnan().all()


def test_a_tokens_bits_do_not_depend_on_the_others(product):
    torch.manual_seed(0)
    weights = weights_of(1, 512, 128, BF16, True)
    x, out = torch.randn(64, 1, 512).to(BF16), torch.empty(64, 1, 128, dtype=BF16)
    multiply = product(weights)
    multiply(x, weights, out)
    for tokens in (1, 9, 32):
        fewer = torch.empty(tokens, 1, 128, dtype=BF16)
        multiply(x[:tokens], weights, fewer)
        assert torch.equal(fewer, out[:tokens])


def test_what_the_kernel_does_not_serve(product):
    weights = weights_of(16, 512, 128, BF16, True)
    multiply = product(weights)

    def x(tokens, heads=16, depth=512, dtype=BF16):
        return torch.empty(tokens, heads, depth, dtype=dtype)

    assert multiply.serves(x(64), weights)
    assert not multiply.serves(x(0), weights)
    assert not multiply.serves(x(65, 1), weights[:1])
    many = weights_of(128, 512, 128, BF16, True)
    assert multiply.serves(x(16, 128), many) and not multiply.serves(x(17, 128), many)
    assert not multiply.serves(x(1, 15), weights)
    assert not multiply.serves(x(1, dtype=FP16), weights)
    assert not multiply.serves(x(1, dtype=FP16), weights.half())
    assert not multiply.serves(x(1), weights.contiguous())
    assert not multiply.serves(x(1, depth=256), weights[:, :256])
    assert not multiply.serves(x(1, depth=516)[..., 4:], weights)


@pytest.mark.parametrize(
    "weights, capability, reason",
    [
        (weights_of(1, 128, 512, BF16, False), (9, 0), None),
        (weights_of(1, 128, 512, BF16, False), (10, 0), "capability 9.0"),
        (weights_of(1, 128, 512, torch.float32, False), (9, 0), "not for torch.float32"),
        (weights_of(1, 96, 512, BF16, False), (9, 0), "does not multiply 96 by 512 columns"),
        (weights_of(1, 576, 128, BF16, False), (9, 0), "does not multiply 576 by 128 columns"),
        (weights_of(1, 128, 96, BF16, False), (9, 0), "does not multiply 128 by 96 columns"),
        (torch.empty(1, 128, 1024, dtype=BF16)[..., ::2], (9, 0), "strides (131072, 1024, 2)"),
        (torch.empty(1, 128, 516, dtype=BF16)[..., 4:], (9, 0), "strides (66048, 516, 1)"),
    ],
)
def test_weights_without_a_kernel(monkeypatch, weights, capability, reason):
    monkeypatch.setattr(head_product.jit, "why_unavailable", lambda variants: None)
    found = head_product.why_not(weights, capability)
    assert found is None if reason is None else reason in found
