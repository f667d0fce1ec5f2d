"""Absorbed weights against the vanilla module that they come from."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_backend import (
    AbsorbedWeights,
    DecodeBatch,
    InvalidInputError,
    MLAGeometry,
    torch_attention,
)
from tests.support.mla_oracle import dense_attention

SMALL = MLAGeometry(
    num_heads=3,
    kv_lora_rank=32,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=20,
    softmax_scale=20**-0.5,
    hidden_size=48,
    q_lora_rank=40,
)
WIDE = MLAGeometry(4, 512, 128, 64, 128, 192**-0.5, 512)


def query_input_dim(g):
    return g.q_lora_rank or g.hidden_size


class VanillaModule:
    """DeepSeek-V2's attention as its paper writes it: keys and values expanded for every head."""

    def __init__(self, g, dtype, seed=0):
        def linear(outputs, inputs):
            weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float64) * inputs**-0.5
            return weight.to(dtype)

        generator = torch.Generator().manual_seed(seed)
        self.g = g
        self.w_q = linear(g.num_heads * g.qk_head_dim, query_input_dim(g))
        self.kv_b = linear(g.num_heads * (g.qk_nope_head_dim + g.v_head_dim), g.kv_lora_rank)
        self.w_o = linear(g.hidden_size, g.num_heads * g.v_head_dim)

    def __call__(self, x, latent):
        """x [n, q_in] are the last n of the tokens whose latent rows are [m, d_c + d_rope]; all in fp64."""
        g = self.g
        w_q, kv_b, w_o = (w.double() for w in (self.w_q, self.kv_b, self.w_o))
        q = (x.double() @ w_q.T).view(len(x), g.num_heads, g.qk_head_dim)
        c, k_rope = latent.double().split([g.kv_lora_rank, g.qk_rope_head_dim], dim=-1)
        expanded = (c @ kv_b.T).view(len(c), g.num_heads, -1)
        k_nope, v = expanded.split([g.qk_nope_head_dim, g.v_head_dim], dim=-1)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, g.num_heads, -1)], dim=-1)
        out, _ = dense_attention(q, k, v, g.softmax_scale, causal=True)
        return out.flatten(1) @ w_o.T


def absorbed_pass(module, x, latent, dtype):
    """The same layer through the library: absorbed weights, latent cache, attention in plain torch."""
    g = module.g
    absorbed = AbsorbedWeights.from_kv_b_proj(module.kv_b, g)
    q = (x @ module.w_q.T).view(len(x), g.num_heads, g.qk_head_dim)
    q_nope, q_rope = q.split([g.qk_nope_head_dim, g.qk_rope_head_dim], dim=-1)
    q_latent = absorbed.absorb_query(q_nope)
    page_size = 16
    pages = math.ceil(len(latent) / page_size)
    cache = torch.full((pages * page_size, g.latent_dim), math.nan, dtype=dtype)
    cache[: len(latent)] = latent
    batch = DecodeBatch(
        torch.tensor([len(latent)], dtype=torch.int32),
        torch.arange(pages, dtype=torch.int32)[None],
        page_size,
        None,
        len(x),
    )
    o_latent, _ = torch_attention.paged_attention(
        q_latent,
        q_rope,
        cache.view(pages, page_size, -1),
        batch,
        g.softmax_scale,
        compute_dtype=torch.float64 if dtype is torch.float64 else torch.float32,
    )
    return absorbed.project_output(o_latent).flatten(1) @ module.w_o.T


# 1 - cosine, weighted mean absolute percentage error, mean squared error (outputs have unit-order variance).
BOUNDS = {
    torch.float64: (1e-12, 1e-12, 1e-24),
    torch.float32: (1e-10, 1e-5, 1e-11),
    torch.bfloat16: (1e-4, 1.5e-2, 1e-5),
}


@pytest.mark.parametrize("query_len", [1, 5], ids=["decode", "extend"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    "geometry",
    [SMALL, WIDE, replace(SMALL, qk_rope_head_dim=0)],
    ids=["small", "DeepSeek's widths", "no rotary part"],
)
def test_absorbed_equals_vanilla(geometry, dtype, query_len):
    module = VanillaModule(geometry, dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(query_len, query_input_dim(geometry), generator=generator).to(dtype)
    latent = torch.randn(100, geometry.latent_dim, generator=generator).to(dtype)
    expected = module(x, latent).flatten()
    actual = absorbed_pass(module, x, latent, dtype).double().flatten()
    cosine, wmape, mse = BOUNDS[dtype]
    error = actual - expected
    assert 1 - torch.nn.functional.cosine_similarity(actual, expected, dim=0) < cosine
    assert error.abs().sum() / expected.abs().sum() < wmape
    assert error.square().mean() < mse


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_absorbed_weights_are_contiguous_slices(dtype):
    g = SMALL
    kv_b = torch.randn(g.num_heads * 32, g.kv_lora_rank).to(dtype)
    absorbed = AbsorbedWeights.from_kv_b_proj(kv_b, g)
    assert absorbed.w_uk.is_contiguous()
    assert absorbed.w_uv.is_contiguous()
    assert absorbed.w_uk.dtype is absorbed.w_uv.dtype is dtype
    for head in range(g.num_heads):
        rows = kv_b[head * 32 : (head + 1) * 32]
        assert torch.equal(absorbed.w_uk[head], rows[:12])
        assert torch.equal(absorbed.w_uv[head], rows[12:].T)
    assert AbsorbedWeights.from_kv_b_proj(kv_b, g, dtype=torch.float16).w_uk.dtype is torch.float16


def test_projections_write_to_out():
    absorbed = AbsorbedWeights.from_kv_b_proj(torch.randn(96, 32), SMALL)
    for project, inputs, outputs in ((absorbed.absorb_query, 12, 32), (absorbed.project_output, 32, 20)):
        x = torch.randn(5, 3, inputs)
        out = torch.full((5, 3, outputs), math.nan)
        assert project(x, out=out) is out
        torch.testing.assert_close(out, project(x))


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(5, 3, 33),
        torch.zeros(6, 3, 32),
        torch.zeros(5, 3, 32).double(),
        torch.zeros(5, 3, 32, device="meta"),
        torch.zeros(5, 32, 3).mT,
    ],
)
def test_projections_refuse_another_out(out):
    absorbed = AbsorbedWeights.from_kv_b_proj(torch.randn(96, 32), SMALL)
    with pytest.raises(InvalidInputError, match="out must be .*|dimension of out must be contiguous"):
        absorbed.absorb_query(torch.randn(5, 3, 12), out=out)


def test_projections_have_the_dtype_of_the_weights_under_autocast():
    absorbed = AbsorbedWeights.from_kv_b_proj(torch.randn(96, 32), SMALL)
    q_nope = torch.randn(5, 3, 12)
    expected = absorbed.absorb_query(q_nope)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(absorbed.absorb_query(q_nope), expected)


def test_projections_refuse_tensors_elsewhere():
    absorbed = AbsorbedWeights.from_kv_b_proj(torch.randn(96, 32), SMALL)
    with pytest.raises(InvalidInputError, match="must be on one device, got meta, cpu"):
        absorbed.absorb_query(torch.randn(5, 3, 12, device="meta"))


def test_projections_of_no_tokens():
    module = VanillaModule(SMALL, torch.float32)
    absorbed = AbsorbedWeights.from_kv_b_proj(module.kv_b, SMALL)
    assert absorbed.absorb_query(torch.zeros(0, 3, 12)).shape == (0, 3, 32)
    assert absorbed.project_output(torch.zeros(0, 3, 32)).shape == (0, 3, 20)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([None, (128, 128), (16, 8), (5, 7), (100, 100)]),
    st.sampled_from([None, torch.bfloat16, torch.float32]),
    st.integers(0, 1 << 16),
)
def test_fp8_weights_are_dequantized(block_size, dtype, seed):
    g = SMALL
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randn(96, 32, generator=generator).to(torch.float8_e4m3fn)
    expected = stored.double()
    if block_size is None:
        scale = torch.rand(1, generator=generator) + 0.5
        expected *= scale.item()
    else:
        b0, b1 = block_size
        scale = torch.rand(math.ceil(96 / b0), math.ceil(32 / b1), generator=generator) + 0.5
        for i in range(96):
            for j in range(32):
                expected[i, j] *= scale[i // b0, j // b1].item()
    absorbed = AbsorbedWeights.from_kv_b_proj(stored, g, dtype=dtype, scale=scale, block_size=block_size)
    assert absorbed.w_uk.dtype is (dtype or torch.bfloat16)
    plain = AbsorbedWeights.from_kv_b_proj(expected, g)
    rounding = 1e-6 if dtype is torch.float32 else 2**-8
    for name in ("w_uk", "w_uv"):
        got, want = getattr(absorbed, name).double(), getattr(plain, name)
        torch.testing.assert_close(got, want, atol=0, rtol=rounding)


def test_weights_made_in_inference_mode_can_be_updated_outside():
    with torch.inference_mode():
        absorbed = AbsorbedWeights.from_kv_b_proj(torch.zeros(96, 32), SMALL)
    absorbed.update_(torch.ones(96, 32))
    assert (absorbed.w_uk == 1).all() and (absorbed.w_uv == 1).all()


def test_update_keeps_addresses():
    absorbed = AbsorbedWeights.from_kv_b_proj(torch.randn(96, 32), SMALL, dtype=torch.bfloat16)
    addresses = absorbed.w_uk.data_ptr(), absorbed.w_uv.data_ptr()
    new = torch.randn(96, 32).to(torch.float8_e4m3fn)
    absorbed.update_(new, scale=torch.tensor(0.5))
    assert (absorbed.w_uk.data_ptr(), absorbed.w_uv.data_ptr()) == addresses
    fresh = AbsorbedWeights.from_kv_b_proj(new.float() * 0.5, SMALL, dtype=torch.bfloat16)
    assert torch.equal(absorbed.w_uk, fresh.w_uk)
    assert torch.equal(absorbed.w_uv, fresh.w_uv)


FP8 = torch.zeros(96, 32).to(torch.float8_e4m3fn)
SCALE = torch.ones(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": torch.zeros(95, 32)}, r"\[H \* \(d_nope . d_v\), d_c\] = \[96, 32\], got \[95, 32\]"),
        ({"weight": torch.zeros(96, 32).int()}, "got torch.int32"),
        ({"weight": None}, "weight must be a torch.Tensor, got NoneType"),
        ({"weight": FP8, "scale": 1.0}, "scale must be a torch.Tensor, got float"),
        ({"weight": torch.zeros(96, 32), "dtype": torch.int8}, "dtype must be one of"),
        ({"weight": torch.zeros(96, 32), "scale": SCALE}, "takes no scale"),
        ({"weight": FP8}, "needs its scale"),
        ({"weight": FP8, "scale": SCALE.half()}, "scale must be torch.float32"),
        ({"weight": FP8, "scale": torch.ones(6, 2)}, "needs block_size"),
        ({"weight": FP8, "scale": torch.ones(6, 2), "block_size": (16, 8)}, r"scale must be \[6, 4\]"),
        ({"weight": torch.zeros(96, 32).to(torch.int8)}, "the weight must be .* got torch.int8"),
        ({"weight": FP8.to(torch.float8_e5m2)}, "the weight must be .* got torch.float8_e5m2"),
        ({"weight": torch.zeros(96, 32), "block_size": (16, 8)}, "takes no scale and no block_size"),
        ({"weight": FP8, "scale": SCALE.to("meta")}, "weight, scale must be on one device, got cpu, meta"),
        *(
            ({"weight": FP8, "scale": torch.ones(6, 4), "block_size": size}, "block_size must be a p")
            for size in (0, 16, (16,), "ab", (0, 8), (16.0, 8))
        ),
    ],
)
def test_from_kv_b_proj_refuses(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        AbsorbedWeights.from_kv_b_proj(arguments.pop("weight"), SMALL, **arguments)


def test_projections_refuse_other_shapes():
    absorbed = AbsorbedWeights.from_kv_b_proj(torch.zeros(96, 32), SMALL)
    with pytest.raises(InvalidInputError, match=r"q_nope must be \[T, 3, 12\], got \[5, 3, 13\]"):
        absorbed.absorb_query(torch.zeros(5, 3, 13))
    with pytest.raises(InvalidInputError, match=r"o_latent must be \[T, 3, 32\], got \[5, 2, 32\]"):
        absorbed.project_output(torch.zeros(5, 2, 32))
    with pytest.raises(InvalidInputError, match="q_nope must be a torch.Tensor, got NoneType"):
        absorbed.absorb_query(None)
    with pytest.raises(InvalidInputError, match="q_nope must be torch.float32, as the weight, got torch.bf"):
        absorbed.absorb_query(torch.zeros(5, 3, 12, dtype=torch.bfloat16))
