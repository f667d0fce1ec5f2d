"""Whatever tables, lists, lengths and offsets hold, kernels touch what belongs to the batch alone."""

import random
from dataclasses import replace

import pytest
import torch

from mla_backend.batch import TableKind
from mla_backend.cache_format import format_of
from mla_backend.kernels import append
from mla_backend.spec import DecodeCall
from tests.emulation.emulator import assert_right, run
from tests.support.cases import make_case, make_list_case
from tests.support.hostile import (
    LEAST,
    MOST,
    between_canaries,
    rows_of,
    with_hostile_entries,
    with_hostile_lengths,
)
from tests.support.seeds import seeds

E4M3, RECORDS = torch.float8_e4m3fn, "fp8_ds_mla"

# Each kernel, and each way to load keys.
KERNELS = [
    *(("hopper", heads, page_size, None) for heads in (16, 40) for page_size in (8, 1)),
    ("hopper", 80, 8, None),
    ("hopper", 16, 8, E4M3),
    ("hopper", 40, 8, E4M3),
    ("hopper", 40, 1, E4M3),
    ("hopper", 32, 16, RECORDS),
    ("hopper", 40, 16, RECORDS),
    ("portable", 16, 8, None),
    ("portable_99k", 40, 1, None),
    ("portable", 16, 8, E4M3),
]
LISTS = [("hopper", 16, None), ("hopper", 40, None), ("hopper", 16, RECORDS), ("portable", 16, None)]

LENGTHS, QUERIES, HOSTILE = [200, 70, 129, 1, 64], [1, 2, 1, 1, 3], [1, 3, 4]


def assert_others_unchanged(case, clean, hostile):
    kept = ~rows_of(case, HOSTILE)
    assert all(torch.equal(a[kept], b[kept]) for a, b in zip(clean, hostile, strict=True))


@pytest.mark.smoke(kind=TableKind.BLOCK, num_heads=16)
@pytest.mark.parametrize("family, num_heads, page_size, kv_dtype", KERNELS)
@pytest.mark.parametrize("kind", [TableKind.BLOCK, TableKind.TOKEN])
def test_entries_outside_of_the_cache_name_no_key(decoder, family, num_heads, page_size, kv_dtype, kind):
    draw = random.Random(num_heads + page_size)
    sizes = {"num_heads": num_heads, "page_size": page_size, "kv_dtype": kv_dtype, "table_kind": kind}
    case = between_canaries(make_case(LENGTHS, QUERIES, **sizes, device="cpu"))
    implementation = decoder(case, family, 4)
    clean = run(implementation, case)
    hostile = with_hostile_entries(case, draw, HOSTILE)
    results = run(implementation, hostile)
    assert_right(hostile, *results)
    assert_others_unchanged(case, clean, results)


@pytest.mark.parametrize(
    "family, num_heads, page_size", [("hopper", 16, 8), ("hopper", 40, 1), ("portable", 16, 8)]
)
def test_requests_without_any_key(decoder, family, num_heads, page_size):
    case = between_canaries(
        make_case(LENGTHS, QUERIES, num_heads=num_heads, page_size=page_size, device="cpu")
    )
    hostile = with_hostile_entries(case, random.Random(0), HOSTILE, share=1)
    out, lse = run(decoder(case, family, 4), hostile)
    assert_right(hostile, out, lse)
    assert lse[rows_of(case, HOSTILE)].isneginf().all()


@pytest.mark.parametrize("family, num_heads, kv_dtype", LISTS)
def test_entries_of_lists_outside_of_the_cache_name_no_key(decoder, family, num_heads, kv_dtype):
    case = between_canaries(
        make_list_case(LENGTHS, num_heads=num_heads, kv_dtype=kv_dtype, page_size=24, unnamed=0, device="cpu")
    )
    implementation = decoder(case, family, 4)
    clean = run(implementation, case)
    hostile = with_hostile_entries(case, random.Random(num_heads), HOSTILE)
    results = run(implementation, hostile)
    assert_right(hostile, *results)
    assert_others_unchanged(case, clean, results)


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("kind", TableKind)
@pytest.mark.parametrize(
    "family, num_heads, page_size", [("hopper", 16, 8), ("hopper", 40, 1), ("portable", 16, 8)]
)
def test_lengths_end_with_the_table(decoder, family, num_heads, page_size, kind, seed):
    """A request whose row does not exist has no keys. Batch-invariant results do not depend on others."""
    draw = random.Random(seed)
    page_size = 1 if kind is TableKind.TOKEN else page_size  # larger ones have an entry for several tokens
    if kind is TableKind.LIST:
        case = make_list_case(LENGTHS, num_heads=num_heads, page_size=page_size, unnamed=0, device="cpu")
    else:
        sizes = {"num_heads": num_heads, "page_size": page_size, "table_kind": kind}
        case = make_case(LENGTHS, QUERIES, **sizes, device="cpu")
        if draw.random() < 0.5:
            rows = torch.arange(5, dtype=draw.choice([torch.int32, torch.int64]))
            rows = rows if kind is TableKind.BLOCK else rows.flip(0)
            case = replace(case, batch=replace(case.batch, table_rows=rows))
    case.cache.nan_to_num_(0.5)  # what lies behind the end of a request counts where its length says so
    case = between_canaries(case)
    implementation = decoder(case, family, 4, batch_invariant=True)
    clean = run(implementation, case)
    hostile = with_hostile_lengths(case, draw, HOSTILE)
    results = run(implementation, hostile)
    assert_right(hostile, *results)
    assert_others_unchanged(case, clean, results)


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize(
    "family, num_heads, page_size", [("hopper", 16, 8), ("hopper", 40, 8), ("portable", 16, 8)]
)
def test_offsets_of_query_tokens_lead_to_no_foreign_row(decoder, family, num_heads, page_size, seed):
    """Offsets below 0, beyond the queries, or falling: rows beside queries and outputs are not touched."""
    draw = random.Random(seed)
    case = make_case(LENGTHS, QUERIES, num_heads=num_heads, page_size=page_size, device="cpu")
    starts = case.batch.query_start_loc.clone()
    for i in range(len(starts)):
        if draw.random() < 0.5:
            starts[i] = draw.choice([-1, LEAST, MOST, 9, draw.randint(-5, 20), draw.randint(LEAST, MOST)])
    tokens, beside = sum(QUERIES), 3
    q = torch.full((tokens + 2 * beside, num_heads, 576), float("nan"), dtype=torch.bfloat16)
    rows = slice(beside, beside + tokens)
    q[rows] = torch.cat([case.q_nope, case.q_rope], -1)
    out = torch.full((len(q), num_heads, 512), 7.0, dtype=torch.bfloat16)
    lse = torch.full((len(q), num_heads), 7.0)
    implementation = decoder(case, family, 4)
    plan = implementation.plan(replace(case.batch, query_start_loc=starts))
    inputs = q[rows, :, :512], q[rows, :, 512:], case.cache, case.scale
    implementation.run(DecodeCall(*inputs, True, None, None, out[rows], lse[rows]), plan)
    assert not out.isnan().any() and not lse.isnan().any()
    for results in (out, lse):
        assert (results[:beside] == 7).all() and (results[-beside:] == 7).all()


@pytest.mark.parametrize("slots_in", [torch.int32, torch.int64])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3, RECORDS])
def test_append_writes_to_slots_of_the_cache_alone(modules, kv_dtype, slots_in):
    pages, page_size, width = 3, 4, 656 if kv_dtype == RECORDS else 576
    dtype = torch.uint8 if kv_dtype == RECORDS else kv_dtype
    storage = torch.full((pages + 20, page_size, width * dtype.itemsize), 0xFF, dtype=torch.uint8)
    cache = storage[10:-10].view(dtype)
    numbers = [5, -1, 12, 13, -2, LEAST, MOST, 11]
    numbers += [2**32 + 1, 2**40, -(2**40)] if slots_in is torch.int64 else []
    slots = torch.tensor(numbers, dtype=slots_in)
    tokens = len(slots)
    q_rope, kv_c, k_rope = torch.randn(tokens, 2, 64), torch.randn(tokens, 512), torch.randn(tokens, 64)
    tensors = [t.bfloat16() for t in (q_rope, kv_c, k_rope)]
    scale = torch.ones(1) if kv_dtype is E4M3 else None
    positions, angles = torch.zeros(tokens, dtype=torch.int64), torch.zeros(1, 64)
    name = append.function_name(torch.bfloat16, format_of(cache))
    getattr(modules(append.variant("90a")), name)(
        *tensors, cache, slots, positions, angles, True, None, 0.0, scale, None, None
    )
    rows = storage[10:-10].view(pages * page_size, -1)
    written = (rows != 0xFF).any(dim=1)
    assert written.nonzero().flatten().tolist() == [5, 11]
    assert (storage[:10] == 0xFF).all() and (storage[-10:] == 0xFF).all()


def test_positions_without_angles_give_nan(modules):
    """Not what lies beside the angles: it would be taken for some, and nobody would see it."""
    angles = torch.full((9, 64), 3.0)
    positions = torch.tensor([0, -1, 3, 2, 2**40, -(2**62)])
    exists = torch.tensor([True, False, False, True, False, False])
    q_rope, kv_c, k_rope = torch.ones(6, 2, 64), torch.ones(6, 512), torch.ones(6, 64)
    tensors = [t.bfloat16() for t in (q_rope, kv_c, k_rope)]
    cache = torch.zeros(6, 1, 576, dtype=torch.bfloat16)
    name = append.function_name(torch.bfloat16, format_of(cache))
    getattr(modules(append.variant("90a")), name)(
        *tensors, cache, torch.arange(6), positions, angles[3:6], True, None, 0.0, *[None] * 3
    )
    for rotated in (tensors[0][:, 0], cache[:, 0, 512:]):
        assert torch.equal(rotated.isnan().all(1), ~exists) and torch.equal(rotated.isnan().any(1), ~exists)
    assert not cache[..., :512].isnan().any()
