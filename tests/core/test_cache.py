"""Writing to and gathering from the paged latent cache."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_backend import InvalidInputError, TableKind, cache
from tests.support.mla_oracle import paged_problem


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from([TableKind.BLOCK, TableKind.TOKEN]),
    st.sampled_from([0, 7]),
    st.sampled_from([0, 3]),
    st.booleans(),
    st.sampled_from(cache.CACHE_DTYPES),
)
def test_gather_returns_the_requests_rows(kv_lens, page_size, kind, page_gap, row_gap, indirect, dtype):
    problem = paged_problem(
        kv_lens,
        page_size=page_size,
        table_kind=kind,
        page_gap=page_gap,
        row_gap=row_gap,
        indirect_rows=indirect,
        kv_dtype=dtype,
    )
    rows = cache.gather(problem.latent_cache, problem.batch)
    assert rows.dtype is dtype
    assert torch.equal(rows.double(), torch.cat(problem.latents).double())


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
    st.sampled_from(cache.CACHE_DTYPES),
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


def test_what_append_writes_attention_can_gather():
    problem = paged_problem([10, 3], page_size=4, table_kind=TableKind.TOKEN)
    target = torch.full_like(problem.latent_cache, torch.nan)
    slots = torch.cat([problem.batch.table[0, :10], problem.batch.table[1, :3]])
    rows = torch.cat(problem.latents)
    cache.append(target, rows[:, :16], rows[:, 16:], slots)
    assert torch.equal(cache.gather(target, problem.batch), rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_c": torch.zeros(2, 9)}, "9 . 4 wide, latent_cache rows are 12"),
        ({"kv_c": torch.zeros(3, 8)}, "with the same T"),
        ({"k_pe": torch.zeros(2, 1, 4)}, r"k_pe \[T, d_rope\]"),
        ({"slots": torch.tensor([0.0, 1.0])}, "must be torch.int32 or torch.int64, got torch.float32"),
        ({"slots": torch.tensor([0, 1, 2])}, "one entry per token"),
        ({"slots": torch.tensor([0, 20])}, "slots from 0 to 20, outside -1 .. 19"),
        ({"slots": torch.tensor([-2, 1])}, "slots from -2 to 1"),
        ({"latent_cache": torch.zeros(20, 12)}, "got shape .20, 12."),
        ({"k_pe": torch.zeros(2, 4, device="meta")}, "must be on one device"),
    ],
)
def test_append_refuses(changes, message):
    args = {
        "latent_cache": torch.zeros(5, 4, 12),
        "kv_c": torch.zeros(2, 8),
        "k_pe": torch.zeros(2, 4),
        "slots": torch.tensor([0, 1]),
    }
    with pytest.raises(InvalidInputError, match=message):
        cache.append(*{**args, **changes}.values())


@pytest.mark.parametrize(
    ("changes", "latent_cache", "message"),
    [
        ({}, torch.zeros(9, 2, 24), "pages of 2 tokens, expected 4"),
        ({}, torch.zeros(1, 4, 24), "latent_cache has pages 0 .. 0"),
        ({"seq_lens": torch.tensor([40]).int()}, torch.zeros(9, 4, 24), "the table holds 0 .. 20 tokens"),
        ({"table_rows": torch.tensor([1])}, torch.zeros(9, 4, 24), "from 1 to 1, the table has rows 0 .. 0"),
        ({"table_rows": torch.tensor([-1])}, torch.zeros(9, 4, 24), "table_rows range from -1 to -1"),
    ],
)
def test_gather_refuses(changes, latent_cache, message):
    batch = dataclasses.replace(paged_problem([9], page_size=4).batch, **changes)
    with pytest.raises(InvalidInputError, match=message):
        cache.gather(latent_cache, batch)
