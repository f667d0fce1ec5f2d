"""Taking new tokens in: rotary embedding and the cache's new rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_backend import InvalidInputError, RotaryAppend
from mla_backend.cache_format import cache_format
from mla_backend.rotary import rms_norm, rotate
from tests.support.mla_oracle import cos_sin_cache, normalized, rotary_angles, rotated, rotated_by


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(0, 3), st.sampled_from([0, 2, 8, 64]), st.booleans())
def test_rotate_turns_pairs_by_their_angles(tokens, heads, d_rope, interleaved):
    angles = rotary_angles(50, d_rope)
    x = torch.randn(tokens, *[heads] * (heads > 0), d_rope, dtype=torch.float64)
    positions = torch.randint(0, 50, (tokens,))
    got = rotate(x, positions, cos_sin_cache(angles), interleaved=interleaved)
    torch.testing.assert_close(got, rotated(x, angles[positions], interleaved))


def test_rotation_keeps_the_dtype_and_the_argument():
    x = torch.randn(3, 2, 8, dtype=torch.bfloat16)
    before = x.clone()
    angles = rotary_angles(9, 8).float()
    got = rotate(x, torch.arange(3), cos_sin_cache(angles), interleaved=True)
    assert got.dtype is torch.bfloat16
    assert torch.equal(x, before)


def test_rotation_in_16_bits_is_rounded_once():
    x, cos_sin = torch.randn(200, 64).bfloat16(), cos_sin_cache(rotary_angles(200, 64)).bfloat16()
    got = rotate(x, torch.arange(200), cos_sin, interleaved=True)
    expected = rotated_by(x, cos_sin, interleaved=True)
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-6)


def arguments(**changes):
    """Of a call with 3 tokens and 2 heads, the second token without a slot."""
    angles = rotary_angles(40, 8).float()
    given = {
        "q_rope": torch.randn(3, 2, 8),
        "kv_c": torch.randn(3, 16),
        "k_rope": torch.randn(3, 8),
        "latent_cache": torch.full((5, 4, 24), torch.nan),
        "slot_mapping": torch.tensor([17, -1, 2]),
        "positions": torch.tensor([30, 0, 7]),
        "cos_sin_cache": cos_sin_cache(angles),
    }
    return given | changes


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("d_rope", [0, 8])
def test_append_rotates_and_writes(d_rope, interleaved):
    given = arguments()
    given["latent_cache"] = given["latent_cache"][..., : 16 + d_rope]
    for name in ("q_rope", "k_rope", "cos_sin_cache"):
        given[name] = given[name][..., :d_rope].contiguous()
    angles = rotary_angles(40, d_rope)[given["positions"]]
    expected_q = rotated(given["q_rope"].double(), angles, interleaved)
    expected_k = rotated(given["k_rope"].double(), angles, interleaved)
    k_before = given["k_rope"].clone()
    RotaryAppend(torch.float32, "cpu")(**given, interleaved=interleaved)
    torch.testing.assert_close(given["q_rope"].double(), expected_q, rtol=1e-5, atol=1e-6)
    assert torch.equal(given["k_rope"], k_before)
    rows = given["latent_cache"].reshape(20, 16 + d_rope)
    for token, slot in ((0, 17), (2, 2)):
        assert torch.equal(rows[slot, :16], given["kv_c"][token])
        torch.testing.assert_close(rows[slot, 16:].double(), expected_k[token], rtol=1e-5, atol=1e-6)
    assert rows.isnan().all(dim=-1).sum() == 18


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.sampled_from([8, 512]), st.sampled_from([0.0, 1e-6, 0.5]))
def test_rms_norm_divides_by_the_root_mean_square(tokens, width, eps):
    x, weight = torch.randn(tokens, width, dtype=torch.float64), torch.randn(width, dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, weight, eps), normalized(x, weight, eps))
    low = rms_norm(x.bfloat16(), weight.bfloat16(), eps)
    assert low.dtype is torch.bfloat16
    expected = normalized(x.bfloat16(), weight.bfloat16(), eps)
    torch.testing.assert_close(low.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("cache", [torch.zeros(5, 4, 24), torch.zeros(5, 4, 24).to(torch.float8_e4m3fn)])
def test_no_tokens_are_no_work(cache):
    angles = rotary_angles(40, 8).float()
    no_slots = torch.zeros(0, dtype=torch.int64)
    RotaryAppend(torch.float32, "cpu")(
        torch.zeros(0, 2, 8),
        torch.zeros(0, 16),
        torch.zeros(0, 8),
        cache,
        no_slots,
        no_slots,
        cos_sin_cache(angles),
        interleaved=True,
        norm_weight=torch.ones(16),
        norm_eps=0.1,
        kv_scale=torch.ones(1) if cache.dtype is torch.float8_e4m3fn else None,
    )
    assert not cache.float().any()


def test_append_refuses_tensors_that_are_not_on_its_device():
    elsewhere = arguments(q_rope=torch.zeros(3, 2, 8, device="meta"))
    with pytest.raises(InvalidInputError, match=r"q_rope must be .* on cpu, got .* on meta"):
        RotaryAppend(torch.float32, "cpu")(**elsewhere, interleaved=True)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int8, None])
def test_queries_of_other_dtypes_are_refused(dtype):
    with pytest.raises(InvalidInputError, match=f"dtype must be one of .*got {dtype!r}"):
        RotaryAppend(dtype, "cpu")


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        ({"norm_weight": torch.ones(16)}, "norm_weight and norm_eps go together"),
        ({"norm_eps": 1e-6}, "norm_weight and norm_eps go together"),
        *(
            (
                {"norm_weight": torch.ones(16), "norm_eps": eps},
                "norm_eps must be a number, finite and at least",
            )
            for eps in (-1e-6, math.nan, math.inf, 10**400, "1e-6", True)
        ),
    ],
)
def test_append_refuses_the_norm(norm, message):
    given = arguments()
    with pytest.raises(InvalidInputError, match=message):
        RotaryAppend(torch.float32, "cpu")(**given, interleaved=True, **norm)
    assert given["latent_cache"].isnan().all()


def test_append_keeps_no_graph():
    given = arguments(q_rope=torch.randn(3, 2, 8, requires_grad=True))
    before = given["q_rope"].detach().clone()
    RotaryAppend(torch.float32, "cpu")(**given, interleaved=True)
    assert given["q_rope"].grad_fn is None and not torch.equal(given["q_rope"], before)


def test_append_normalizes_what_it_writes():
    given = arguments()
    before, weight = given["kv_c"].clone(), torch.randn(16)
    RotaryAppend(torch.float32, "cpu")(**given, interleaved=True, norm_weight=weight, norm_eps=0.1)
    written = given["latent_cache"].view(20, 24)[[17, 2], :16]
    expected = normalized(before[[0, 2]], weight, 0.1)
    torch.testing.assert_close(written.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(given["kv_c"], before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q_rope": torch.zeros(3, 2, 4)},
            r"q_rope must be torch.float32 \[3, 2, 8\] on cpu, got .* \[3, 2, 4\]",
        ),
        ({"q_rope": torch.zeros(3, 2, 8).double()}, "q_rope must be torch.float32"),
        ({"q_rope": torch.zeros(3, 8)}, r"q_rope must be .* got torch.float32 \[3, 8\]"),
        ({"q_rope": torch.zeros(3, 8, 2).mT}, "last dimension of q_rope must be contiguous"),
        ({"q_rope": torch.zeros(3, 1, 8).expand(3, 2, 8)}, "q_rope is expanded"),
        ({"kv_c": torch.zeros(3, 16, dtype=torch.float64)}, "kv_c must be torch.float32"),
        ({"k_rope": torch.zeros(3, 8).double()}, "k_rope must be torch.float32"),
        ({"k_rope": torch.zeros(3, 6)}, "16 . 6 wide, latent_cache rows are 24"),
        ({"latent_cache": torch.zeros(5, 4, 24).half()}, "latent_cache must be torch.float32"),
        ({"slot_mapping": torch.zeros(4).long()}, "one entry per token"),
        ({"slot_mapping": torch.zeros(6).long()[::2]}, "dimension of slot_mapping must be contiguous"),
        ({"slot_mapping": torch.tensor([0, 1, 20])}, "slots from 0 to 20, outside -1 .. 19"),
        ({"positions": [0, 1, 2]}, "positions must be a torch.Tensor, got list"),
        ({"cos_sin_cache": None}, "cos_sin_cache must be a torch.Tensor, got NoneType"),
        ({"positions": torch.zeros(3).int()}, r"positions must be torch.int64 \[3\]"),
        ({"positions": torch.tensor([0, 40, 1])}, "positions range from 0 to 40, cos_sin_cache has 0 .. 39"),
        ({"positions": torch.tensor([0, -1, 1])}, "positions range from -1 to 1"),
        ({"cos_sin_cache": torch.zeros(40, 4)}, r"cos_sin_cache must be torch.float32 \[40, 8\]"),
        ({"cos_sin_cache": torch.tensor(1.0)}, r"cos_sin_cache must be torch.float32 \[0, 8\]"),
        (
            {"cos_sin_cache": torch.zeros(40, 16)[:, :8]},
            r"cos_sin_cache must be contiguous .* strides .16, 1",
        ),
        ({"cos_sin_cache": torch.zeros(321)[1:].view(40, 8)}, "begin at a multiple of 16 bytes"),
        ({"norm_weight": torch.zeros(8), "norm_eps": 0.1}, r"norm_weight must be torch.float32 \[16\]"),
        ({"kv_c": torch.zeros(3, 12), "latent_cache": torch.zeros(5, 4, 20)}, "of 8, got 12 and 8"),
        (
            {
                "q_rope": torch.zeros(3, 2, 4),
                "k_rope": torch.zeros(3, 4),
                "latent_cache": torch.zeros(5, 4, 20),
                "cos_sin_cache": torch.zeros(40, 4),
            },
            "of 8, got 16 and 4",
        ),
    ],
)
def test_append_refuses(changes, message):
    given = arguments(**changes)
    before = given["q_rope"].clone()
    with pytest.raises(InvalidInputError, match=message):
        RotaryAppend(torch.float32, "cpu")(**given, interleaved=True)
    assert torch.equal(given["q_rope"], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_append_returns_the_new_rows_too(dtype):
    """Of all tokens: of the second, which has no slot, as of the others."""
    given = arguments()
    angles = given["cos_sin_cache"].to(dtype)
    given |= {name: given[name].to(dtype) for name in ("q_rope", "kv_c", "k_rope", "latent_cache")}
    weight = torch.randn(16).to(dtype)
    kv_c_out, k_rope_out = (torch.full((3, width), torch.nan, dtype=dtype) for width in (16, 8))
    given |= {"cos_sin_cache": angles, "kv_c_out": kv_c_out, "k_rope_out": k_rope_out}
    RotaryAppend(dtype, "cpu")(**given, interleaved=True, norm_weight=weight, norm_eps=0.1)
    near = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(kv_c_out.double(), normalized(given["kv_c"], weight, 0.1), **near)
    expected = rotated_by(given["k_rope"], angles[given["positions"]], interleaved=True)
    torch.testing.assert_close(k_rope_out.double(), expected, **near)
    written = given["latent_cache"].view(20, 24)[[17, 2]]
    assert torch.equal(written, torch.cat([kv_c_out, k_rope_out], dim=1)[[0, 2]])


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"kv_c_out": torch.zeros(3, 16)}, "kv_c_out and k_rope_out go together"),
        ({"k_rope_out": torch.zeros(3, 8)}, "kv_c_out and k_rope_out go together"),
        (
            {"kv_c_out": torch.zeros(3, 8), "k_rope_out": torch.zeros(3, 8)},
            r"kv_c_out must be torch.float32 \[3, 16\]",
        ),
        (
            {"kv_c_out": torch.zeros(3, 16), "k_rope_out": torch.zeros(3, 1).expand(3, 8)},
            "k_rope_out must be contiguous",
        ),
        (
            {"kv_c_out": torch.zeros(3, 16), "k_rope_out": torch.zeros(1, 8).expand(3, 8)},
            "k_rope_out is expanded",
        ),
    ],
)
def test_append_refuses_outputs(outputs, message):
    given = arguments()
    with pytest.raises(InvalidInputError, match=message):
        RotaryAppend(torch.float32, "cpu")(**given, interleaved=True, **outputs)
    assert given["latent_cache"].isnan().all()


def test_a_kernel_can_be_launched_without_checks():
    """Torch, in its place, still gets what is checked."""
    wrong, launched = arguments(positions=torch.zeros(3).int()), []
    append = RotaryAppend(torch.float32, "cpu")
    with pytest.raises(InvalidInputError, match="positions must be"):
        append(**wrong, interleaved=True, check=False)
    append._kernels = {cache_format(torch.float32): lambda *tensors: launched.append(tensors)}
    append(**wrong, interleaved=True, check=False)
    assert len(launched) == 1
    with pytest.raises(InvalidInputError, match="positions must be"):
        append(**wrong, interleaved=True)
