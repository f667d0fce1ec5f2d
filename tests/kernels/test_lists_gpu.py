"""Sparse attention by the CUDA kernels: lists of slots, against dense fp64 attention to what they name."""

import random
from dataclasses import replace

import pytest
import torch

from mla_backend import MLADecoder
from tests.kernels.test_decode_gpu import assert_near
from tests.support.cases import Case, decoder_for, make_list_case, relative_error

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 2.5e-3, torch.float16: 4e-4}


def run(decoder: MLADecoder, case: Case, plan=None):
    out = torch.full(case.q_nope.shape, float("nan"), dtype=case.q_nope.dtype, device="cuda")
    lse = torch.full(case.q_nope.shape[:2], float("nan"), device="cuda")
    plan = plan or decoder.plan(case.batch)
    inputs = (case.q_nope, case.q_rope, case.cache, plan, case.scale)
    return decoder.run(*inputs, kv_scale=case.kv_scale, out=out, lse=lse, table=case.lists)


def assert_right(case: Case, out, lse):
    expected_out, expected_lse = case.expected()
    assert not out.isnan().any() and not lse.isnan().any()
    assert relative_error(out, expected_out) <= TOLERANCE[out.dtype]
    empty = expected_lse.isinf()
    assert torch.equal(lse.isinf(), empty) and (lse[empty] < 0).all() and (out[empty] == 0).all()
    assert_near(case, lse[~empty], expected_lse[~empty])


@pytest.mark.parametrize("seed", range(24))
def test_random_lists(seed, implementation):
    draw = random.Random(seed)
    rows = draw.choice([1, 2, 7, 64, 133, 300])
    lengths = [draw.choice([0, 1, 63, draw.randint(2, 2048), 2048]) for _ in range(rows)]
    case = make_list_case(
        lengths,
        num_heads=draw.choice([1, 8, 12, 16, 20, 24, 40, 64, 96, 128]),
        page_size=draw.choice([1, 24, 64]),
        num_pages=draw.choice([600, 3000]),
        unnamed=draw.choice([0, 0.05, 0.7]),
        shared=draw.random() < 0.5,
        dtype=draw.choice([torch.bfloat16, torch.float16]),
        kv_dtype=draw.choice([None, None, torch.float8_e4m3fn]),
        page_gap=draw.choice([0, 3]),
        seed=seed,
    )
    decoder = decoder_for(case, implementation=implementation)
    first = run(decoder, case)
    assert_right(case, *first)
    assert all(torch.equal(a, b) for a, b in zip(run(decoder, case), first, strict=True))


@pytest.mark.parametrize("num_heads", [8, 64, 128])
@pytest.mark.parametrize("unnamed", [0, 0.3])
def test_lists_of_records(num_heads, unnamed, implementation):
    lengths = [0, 1, 63, 64, 65, 500, 2048, 777]
    options = {"page_size": 24, "num_pages": 600, "page_gap": 3, "kv_dtype": "fp8_ds_mla"}
    case = make_list_case(lengths, num_heads=num_heads, unnamed=unnamed, **options)
    decoder = decoder_for(case, implementation=implementation)
    assert_right(case, *run(decoder, case))


@pytest.mark.parametrize("num_heads", [16, 64, 128])
def test_thousands_of_rows(num_heads, implementation):
    case = make_list_case([300] * 8192, num_heads=num_heads, num_pages=2000, unnamed=0)
    out, lse = run(decoder_for(case, implementation=implementation), case)
    assert out.isfinite().all() and lse.isfinite().all()
    for row in (0, 1, 63, 4000, 8191):
        only = slice(row, row + 1)
        alone = replace(case, q_nope=case.q_nope[only], q_rope=case.q_rope[only], lists=case.lists[only])
        alone.seq_lens, alone.query_lens = [300], [1]
        assert_right(alone, out[only], lse[only])


@pytest.mark.parametrize("num_heads", [16, 64])
def test_lists_change_between_replays(num_heads, implementation):
    """A graph whose layers each write their list just before they attend to it."""
    cases = [make_list_case([2048, 70, 900, 0], num_heads=num_heads, num_pages=900, seed=i) for i in range(3)]
    cache = cases[0].cache.nan_to_num(0.5)
    decoder = decoder_for(cases[0], implementation=implementation)
    plan = decoder.plan(cases[0].batch)
    # Rolled, a list may be longer than it was; what is behind its end then counts.
    all_lists = [case.lists.clamp(max=900 * 64 - 1) for case in cases]
    case, source = cases[0], all_lists[0].clone()
    table = torch.zeros_like(source)
    out = torch.empty(4, *case.q_nope.shape, dtype=case.q_nope.dtype, device="cuda")

    def layers():
        for i in range(4):
            table.copy_(source.roll(i, 0))  # the kernel before, which may still run when the launch begins
            decoder.run(case.q_nope, case.q_rope, cache, plan, case.scale, out=out[i], table=table)

    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for lists in all_lists:
        source.copy_(lists)
        for _ in range(5):
            out.fill_(float("nan"))
            graph.replay()
            for i in range(4):
                one = replace(case, cache=cache, lists=source.roll(i, 0))
                expected, _ = one.expected()
                assert relative_error(out[i], expected) <= TOLERANCE[torch.bfloat16]
