"""Whatever tables, lists, lengths and offsets hold, kernels touch what belongs to the batch alone.

Best run under compute-sanitizer's memcheck, too, which sees reads that change no result.
"""

import random
from dataclasses import replace

import pytest
import torch

from mla_backend import RotaryAppend
from mla_backend.batch import TableKind
from tests.kernels.test_decode_gpu import assert_near
from tests.support.cases import decoder_for, make_case, make_list_case, relative_error
from tests.support.hostile import (
    LEAST,
    MOST,
    between_canaries,
    rows_of,
    with_hostile_entries,
    with_hostile_lengths,
)

pytestmark = pytest.mark.gpu

E4M3, RECORDS = torch.float8_e4m3fn, "fp8_ds_mla"


def random_batch(draw: random.Random, seed: int):
    """A case between canaries, and some of its requests."""
    count = draw.choice([1, 3, 17, 70])
    lengths = [draw.choice([0, 1, 64, draw.randint(2, 300), draw.randint(2, 3000)]) for _ in range(count)]
    kind = draw.choice(list(TableKind))
    kv_dtype = draw.choice([None, None, E4M3, RECORDS])
    options = {
        "num_heads": draw.choice([1, 8, 16, 20, 32, 40, 64, 128]),
        "page_size": draw.choice([16, 64] if kv_dtype == RECORDS else [1, 2, 8, 16, 64]),
        "kv_dtype": kv_dtype,
        "seed": seed,
    }
    if kind is TableKind.LIST:
        case = make_list_case(lengths, num_pages=3000, unnamed=0, **options)
    else:
        queries = [draw.randint(1, 4) for _ in range(count)] if draw.random() < 0.5 else [1] * count
        case = make_case(lengths, queries, table_kind=kind, **options)
    return between_canaries(case), [i for i in range(count) if draw.random() < 0.4]


def run(decoder, case):
    out = torch.full(case.q_nope.shape, float("nan"), dtype=case.q_nope.dtype, device="cuda")
    lse = torch.full(case.q_nope.shape[:2], float("nan"), device="cuda")
    inputs = case.q_nope, case.q_rope, case.cache, decoder.plan(case.batch), case.scale
    return decoder.run(*inputs, kv_scale=case.kv_scale, out=out, lse=lse, table=case.lists)


def assert_right(case, out, lse):
    expected_out, expected_lse = case.expected()
    assert not out.isnan().any() and not lse.isnan().any()
    assert relative_error(out, expected_out) <= 2.7e-3
    empty = expected_lse.isinf()
    assert torch.equal(lse.isinf(), empty) and (lse[empty] < 0).all() and (out[empty] == 0).all()
    assert_near(case, lse[~empty], expected_lse[~empty])


@pytest.mark.parametrize("seed", range(40))
def test_hostile_tables(seed, implementation):
    """Entries outside of the cache; every other batch also has lengths and rows beyond the table."""
    draw = random.Random(seed)
    case, victims = random_batch(draw, seed)
    whole_pages = case.batch.table_kind is TableKind.TOKEN and case.batch.page_size >= 8  # of one entry
    moves_lengths = seed % 2 == 1 and case.kv_dtype is torch.bfloat16 and not whole_pages
    if moves_lengths:
        case.cache.nan_to_num_(0.5)  # what lies behind the end of a request counts where its length says so
    hostile = with_hostile_entries(case, draw, victims)
    if moves_lengths:
        hostile = with_hostile_lengths(hostile, draw, victims)
    decoder = decoder_for(case, implementation=implementation, batch_invariant=moves_lengths)
    clean = run(decoder, case)
    results = run(decoder, hostile)
    assert_right(hostile, *results)
    others = ~rows_of(case, victims).cuda()
    assert all(torch.equal(a[others], b[others]) for a, b in zip(clean, results, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_random_numbers_everywhere(seed, implementation):
    """Any int32 in tables, lengths, rows and offsets: whatever comes out, nothing else is touched."""
    draw = random.Random(seed)
    case, _ = random_batch(draw, seed)
    case.cache.view(torch.uint8).fill_(0)
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def noise(tensor):
        if tensor is None:
            return None
        options = {"generator": generator, "device": "cuda"}
        wide = torch.randint(LEAST, MOST, tensor.shape, dtype=torch.int64, **options)
        near = torch.randint(-5, 5000, tensor.shape, dtype=torch.int64, **options)
        keeps = torch.rand(tensor.shape, **options)
        mixed = torch.where(keeps < 0.3, wide, torch.where(keeps < 0.7, near, tensor.long()))
        return mixed.to(tensor.dtype)

    names = ("seq_lens", "table", "table_rows", "query_start_loc")
    batch = replace(case.batch, **{name: noise(getattr(case.batch, name)) for name in names})
    decoder = decoder_for(case, implementation=implementation)
    plan = decoder.plan(batch)
    rows, (tokens, heads, d_c) = slice(3, 3 + len(case.q_nope)), case.q_nope.shape
    out = torch.full((tokens + 6, heads, d_c), 7.0, dtype=case.q_nope.dtype, device="cuda")
    lse = torch.full((tokens + 6, heads), 7.0, device="cuda")
    decoder.run(
        case.q_nope,
        case.q_rope,
        case.cache,
        plan,
        case.scale,
        kv_scale=case.kv_scale,
        out=out[rows],
        lse=lse[rows],
        table=noise(case.lists),
    )
    assert not out.isnan().any() and not lse.isnan().any()
    for results in (out, lse):
        assert (results[:3] == 7).all() and (results[-3:] == 7).all()


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3, RECORDS])
def test_append(kv_dtype):
    pages, page_size, width = 3, 4, 656 if kv_dtype == RECORDS else 576
    dtype = torch.uint8 if kv_dtype == RECORDS else kv_dtype
    storage = torch.full((pages + 20, page_size, width * dtype.itemsize), 0xFF, dtype=torch.uint8).cuda()
    slots = torch.tensor([5, -1, 12, 13, -2, LEAST, MOST, 11, 2**32 + 1, 2**40, -(2**40)]).cuda()
    positions = torch.tensor([0, -1, 3, 2, 2**40, -(2**62), 0, 1, 0, 0, 0]).cuda()
    shapes = (len(slots), 2, 64), (len(slots), 512), (len(slots), 64)
    tensors = [torch.ones(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    append = RotaryAppend(dtype=torch.bfloat16, device="cuda")
    scale = torch.ones(1, device="cuda") if kv_dtype is E4M3 else None
    cache = storage[10:-10].view(dtype)
    angles = torch.zeros(3, 64, device="cuda")
    append(*tensors, cache, slots, positions, angles, interleaved=True, kv_scale=scale)
    written = (storage[10:-10].view(pages * page_size, -1) != 0xFF).any(dim=1)
    assert written.nonzero().flatten().tolist() == [5, 11]
    assert (storage[:10] == 0xFF).all() and (storage[-10:] == 0xFF).all()
    nan = tensors[0].isnan().flatten(1)
    exists = ((positions >= 0) & (positions < 3))[:, None]
    assert torch.equal(nan, ~exists.expand_as(nan))
