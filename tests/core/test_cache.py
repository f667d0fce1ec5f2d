"""Writing to and gathering from the paged latent cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_backend import InvalidInputError, TableKind, cache
from mla_backend.cache_format import FLOAT_DTYPES, cache_format, dequantize, format_of
from tests.support.latents import gather
from tests.support.mla_oracle import nearest_e4m3, paged_problem

KV_DTYPES = [*FLOAT_DTYPES, torch.float8_e4m3fn, "fp8_ds_mla"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from([TableKind.BLOCK, TableKind.TOKEN]),
    st.sampled_from([0, 7]),
    st.sampled_from([0, 3]),
    st.booleans(),
    st.sampled_from(KV_DTYPES),
)
def test_gather_returns_the_requests_rows(kv_lens, page_size, kind, page_gap, row_gap, indirect, kv_dtype):
    problem = paged_problem(
        kv_lens,
        page_size=page_size,
        table_kind=kind,
        page_gap=page_gap,
        row_gap=row_gap,
        indirect_rows=indirect,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        kv_dtype=kv_dtype,
        kv_scale=0.3,
        scale_exponents=(-10, 10),
    )
    rows = gather(problem.latent_cache, problem.batch, problem.kv_scale, dtype=torch.float32)
    torch.testing.assert_close(rows, torch.cat(problem.latents).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("page_gap", [0, 7])
def test_a_cache_without_pages_has_no_rows_to_select(page_gap):
    latent_cache = torch.empty(99).as_strided((0, 4, 12), (4 * 12 + page_gap, 12, 1))
    assert cache.select_rows(latent_cache, torch.empty(0, dtype=torch.int64)).shape == (0, 12)


@st.composite
def writes(draw):
    num_pages, page_size = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    slots = draw(st.lists(st.integers(0, num_pages * page_size - 1), unique=True, max_size=12))
    skipped = draw(st.lists(st.integers(0, len(slots)), max_size=4))
    for place in skipped:
        slots.insert(place, -1)
    return num_pages, page_size, slots


@settings(max_examples=80, deadline=None)
@given(
    writes(),
    st.sampled_from(FLOAT_DTYPES),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([0, 5]),
)
def test_append_writes_the_named_slots_and_nothing_else(shape, cache_dtype, dtype, slot_dtype, page_gap):
    num_pages, page_size, slots = shape
    page_stride = page_size * 12 + page_gap
    storage = torch.arange(num_pages * page_stride).remainder(13).to(cache_dtype)
    expected = storage.float()
    latent_cache = storage.as_strided((num_pages, page_size, 12), (page_stride, 12, 1))
    kv = torch.randn(len(slots), 12).to(dtype)
    # A skipped token's data must not matter either.
    kv[[slot == -1 for slot in slots]] = torch.nan
    for token, slot in enumerate(slots):
        if slot >= 0:
            start = slot // page_size * page_stride + slot % page_size * 12
            expected[start : start + 12] = kv[token].to(cache_dtype).float()
    cache.append(latent_cache, kv[:, :8], kv[:, 8:], torch.tensor(slots, dtype=slot_dtype))
    assert torch.equal(storage.float(), expected)


EXTREMES = [0.0, -0.0, 1e-30, -1e6, 1e6, torch.inf, -torch.inf, torch.nan, 2**-9, 2**-10, 3 * 2**-10, 448.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.3, 2.0**-10, 2.0**10])
def test_append_rounds_to_e4m3_and_saturates(dtype, scale):
    kv = torch.randn(20, 24, generator=torch.Generator().manual_seed(0)).to(dtype) * 2 * scale
    kv[0, :12], kv[1, :12] = torch.tensor(EXTREMES), scale * torch.tensor(EXTREMES)
    kv_scale = torch.tensor(scale)
    latent_cache = torch.zeros(5, 4, 24, dtype=torch.float8_e4m3fn)
    cache.append(latent_cache, kv[:, :16], kv[:, 16:], torch.arange(20), kv_scale)
    expected = nearest_e4m3(kv.double() / kv_scale.double())
    torch.testing.assert_close(latent_cache.view(20, 24).double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
def test_scales_of_any_shape(shape):
    latent_cache = torch.zeros(2, 4, 24, dtype=torch.float8_e4m3fn)
    kv = torch.tensor([1.0, 2.0, 3.0]).unsqueeze(1).expand(3, 24)
    scale = torch.full(shape, 0.5)
    cache.append(latent_cache, kv[:, :16], kv[:, 16:], torch.tensor([5, -1, 6]), scale)
    expected = torch.zeros(8, 24)
    expected[5], expected[6] = 1, 3
    values = dequantize(latent_cache.view(8, 24), scale, dtype=torch.float32)
    assert values.shape == expected.shape and torch.equal(values, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_append_writes_records(dtype):
    g = torch.Generator().manual_seed(0)
    magnitudes = (2.0 ** (40 * torch.rand(6, 4, generator=g) - 20)).repeat_interleave(128, dim=1)
    kv_c = (torch.randn(6, 512, generator=g) * magnitudes).to(dtype)
    kv_c[1, :128] = 0
    kv_c[2, :12] = torch.tensor(EXTREMES)
    kv_c[3, 5] = torch.nan
    k_rope = torch.randn(64, 6, generator=g).to(dtype).T  # of any layout
    k_rope[2, :12] = torch.tensor(EXTREMES)
    latent_cache = torch.full((2, 4, 656), 0xFF, dtype=torch.uint8)
    cache.append(latent_cache, kv_c, k_rope, torch.tensor([0, 1, 2, 4, 5, 7]))
    assert (latent_cache[0, 3] == 0xFF).all() and (latent_cache[1, 2] == 0xFF).all()
    rows = latent_cache.view(8, 656)[[0, 1, 2, 4, 5, 7]]
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    finite = kv_c.double().abs().nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max)
    largest = finite.unflatten(1, (4, 128)).amax(2)
    torch.testing.assert_close(scales.double(), (largest / 448).clamp(min=2.0**-126), rtol=1e-6, atol=0)
    stored = rows[:, :512].view(torch.float8_e4m3fn).double().unflatten(1, (4, 128))
    exact = kv_c.double().unflatten(1, (4, 128)) / scales.double()[..., None]
    # Half a step of the element, and the fp32 quotient's own rounding.
    error = (stored - exact.clamp(-448, 448)).abs()
    assert (error <= (exact.abs() * 2**-4).clamp(min=2**-10) * (1 + 1e-5))[~exact.isnan()].all()
    assert torch.equal(stored.isnan(), exact.isnan())
    rope = rows[:, 528:].contiguous().view(torch.bfloat16)
    torch.testing.assert_close(rope, k_rope.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, "fp8_ds_mla"])
def test_values_in_fp64_are_exact_products(kv_dtype):
    """A product of an element and an fp32 scale may need more than fp32."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    problem = paged_problem([9], kv_dtype=kv_dtype, kv_scale=0.3, scale_exponents=(-3, 3), **sizes)
    values = gather(problem.latent_cache, problem.batch, problem.kv_scale, dtype=torch.float64)
    assert torch.equal(values, problem.latents[0])


def test_formats_are_named_and_refused():
    assert cache_format("fp8_e4m3") is cache_format(torch.float8_e4m3fn)
    assert cache_format("bfloat16") is cache_format(torch.bfloat16)
    assert format_of(torch.zeros(1, 1, 656, dtype=torch.uint8)) is cache_format("fp8_ds_mla")
    dimensions = ("bfloat16", 1152), ("fp8_e4m3", 576), ("fp8_ds_mla", 656)
    assert all(cache_format(name).row_bytes(512, 64) == size for name, size in dimensions)
    with pytest.raises(InvalidInputError, match="kv_lora_rank 512 with qk_rope_head_dim 64, not 256 with 32"):
        cache_format("fp8_ds_mla").row_width(256, 32)
    for wrong in ("fp8_e5m2", torch.float8_e5m2, torch.uint8):
        with pytest.raises(InvalidInputError, match="kv_dtype must be one of bfloat16, .*fp8_ds_mla"):
            cache_format(wrong)


def test_what_append_writes_attention_can_gather():
    problem = paged_problem([10, 3], page_size=4, table_kind=TableKind.TOKEN)
    target = torch.full_like(problem.latent_cache, torch.nan)
    slots = torch.cat([problem.batch.table[0, :10], problem.batch.table[1, :3]])
    rows = torch.cat(problem.latents)
    cache.append(target, rows[:, :16], rows[:, 16:], slots)
    assert torch.equal(gather(target, problem.batch, dtype=rows.dtype), rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_c": torch.zeros(2, 9)}, "9 . 4 wide, latent_cache rows are 12"),
        ({"kv_c": torch.zeros(3, 8)}, "with the same T"),
        ({"k_rope": torch.zeros(2, 1, 4)}, r"k_rope \[T, d_rope\]"),
        ({"slots": torch.tensor([0.0, 1.0])}, "must be torch.int32 or torch.int64, got torch.float32"),
        ({"slots": torch.tensor([0, 1, 2])}, "one entry per token"),
        ({"slots": [0, 1]}, "slot_mapping must be a torch.Tensor, got list"),
        ({"kv_c": None}, "kv_c must be a torch.Tensor, got NoneType"),
        ({"latent_cache": None}, "latent_cache must be a torch.Tensor, got NoneType"),
        ({"slots": torch.tensor([0, 20])}, "slots from 0 to 20, outside -1 .. 19"),
        ({"slots": torch.tensor([-2, 1])}, "slots from -2 to 1"),
        ({"latent_cache": torch.zeros(20, 12)}, "got shape .20, 12."),
        ({"k_rope": torch.zeros(2, 4, device="meta")}, "must be on one device"),
        ({"slots": torch.zeros(2, dtype=torch.int64, device="meta")}, "must be on one device"),
        ({"latent_cache": torch.zeros(5, 4, 12).to(torch.float8_e4m3fn)}, "needs its kv_scale"),
        ({"kv_c": torch.zeros(2, 8, dtype=torch.complex64)}, "kv_c must be one of .*got torch.complex64"),
        ({"kv_c": torch.zeros(2, 8).int()}, "kv_c must be one of .*got torch.int32"),
        ({"k_rope": torch.zeros(2, 4).bool()}, "k_rope must be one of .*got torch.bool"),
        ({"latent_cache": torch.zeros(1, 4, 12).expand(5, 4, 12)}, r"latent_cache is expanded.*\(0, 12, 1\)"),
        ({"latent_cache": torch.zeros(5, 4, 12).to(torch.int8)}, "latent_cache must be one of"),
        (
            {"latent_cache": torch.zeros(5, 4, 576).to(torch.uint8)},
            "576 wide, expected 656 bytes of fp8_ds_mla .*view it as torch.float8_e4m3fn",
        ),
        ({"latent_cache": torch.zeros(5, 4, 656).to(torch.uint8)}, "fp8_ds_mla rows hold kv_lora_rank 512"),
    ],
)
def test_append_refuses(changes, message):
    args = {
        "latent_cache": torch.zeros(5, 4, 12),
        "kv_c": torch.zeros(2, 8),
        "k_rope": torch.zeros(2, 4),
        "slots": torch.tensor([0, 1]),
    }
    with pytest.raises(InvalidInputError, match=message):
        cache.append(*{**args, **changes}.values())


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan, torch.inf])
def test_append_refuses_scales_that_are_not_positive_and_finite(scale):
    latent_cache = torch.zeros(5, 4, 12).to(torch.float8_e4m3fn)
    with pytest.raises(InvalidInputError, match=f"kv_scale must be finite and greater than 0, got {scale}"):
        cache.append(
            latent_cache, torch.zeros(1, 8), torch.zeros(1, 4), torch.tensor([0]), torch.tensor(scale)
        )
    assert (latent_cache.float() == 0).all()


def test_append_keeps_no_graph():
    kv_c, k_rope = torch.randn(2, 512, requires_grad=True), torch.randn(2, 64)
    latent_cache = torch.zeros(1, 4, 576)
    cache.append(latent_cache, kv_c, k_rope, torch.tensor([0, 3]))
    assert not latent_cache.requires_grad and torch.equal(latent_cache[0, 3, :512], kv_c[1])


def test_a_cache_may_come_from_inference_mode():
    with torch.inference_mode():
        latent_cache = torch.zeros(1, 4, 24)
    cache.append(latent_cache, torch.ones(1, 16), torch.ones(1, 8), torch.tensor([2]))
    assert latent_cache.sum((0, 2)).tolist() == [0, 0, 24, 0]


def test_tokens_without_slots_write_nothing():
    """Not even what is there already, which may change meanwhile."""
    latent_cache = torch.zeros(2, 4, 24)
    version = latent_cache._version
    cache.append(latent_cache, torch.ones(2, 16), torch.ones(2, 8), torch.tensor([-1, -1]))
    assert latent_cache._version == version


def test_pages_without_tokens_are_refused():
    with pytest.raises(InvalidInputError, match=r"with pages of a token or more, got shape \(3, 0, 24\)"):
        cache.append(torch.zeros(3, 0, 24), torch.ones(1, 16), torch.ones(1, 8), torch.tensor([-1]))


def test_nothing_is_appended_to_a_cache_without_pages():
    cache.append(torch.zeros(0, 4, 576), torch.randn(2, 512), torch.randn(2, 64), torch.tensor([-1, -1]))
