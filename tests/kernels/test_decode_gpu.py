"""The CUDA decode kernels against dense fp64 attention."""

import functools
import random
from dataclasses import replace

import pytest
import torch

from mla_backend import MLADecoder, Shard, TableKind
from mla_backend.torch_attention import merge_states
from tests.support.cases import Case, decoder_for, make_case, random_case, relative_error
from tests.support.shards import shard_of

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 2.5e-3, torch.float16: 4e-4}


def run(decoder: MLADecoder, case: Case, causal: bool = True):
    out = torch.full(case.q_nope.shape, float("nan"), dtype=case.q_nope.dtype, device=case.q_nope.device)
    lse = torch.full(case.q_nope.shape[:2], float("nan"), device=case.q_nope.device)
    decoder.run(
        case.q_nope,
        case.q_rope,
        case.cache,
        decoder.plan(case.batch),
        case.scale,
        kv_scale=case.kv_scale,
        sinks=case.sinks,
        causal=causal,
        out=out,
        lse=lse,
    )
    return out, lse


def check(case: Case, causal: bool = True, **options):
    decoder = decoder_for(case, **options)
    out, lse = run(decoder, case, causal)
    expected_out, expected_lse = case.expected(causal)
    assert not out.isnan().any() and not lse.isnan().any()
    assert relative_error(out, expected_out) <= TOLERANCE[out.dtype]
    empty = expected_lse.isinf()
    assert torch.equal(lse.isinf(), empty) and (lse[empty] < 0).all() and (out[empty] == 0).all()
    assert_near(case, lse[~empty], expected_lse[~empty])
    return decoder


def assert_near(case: Case, lse, expected):
    """Scores from an fp8 cache are rounded: in records scaled values, with e4m3 and many rows sums."""
    many_rows = case.q_nope.shape[1] * max(case.query_lens) > 24
    allowed = torch.full_like(expected, 2e-3)
    if case.kv_dtype == "fp8_ds_mla":
        allowed = 1e-2 + 1e-3 * expected.abs()
    elif case.kv_dtype is torch.float8_e4m3fn and many_rows:
        allowed = 1.5e-2 + 1e-3 * expected.abs()
    assert ((lse - expected).abs() <= allowed).all()


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 24, 64, 128])
@pytest.mark.parametrize("num_heads", [1, 8, 16, 20, 40, 64, 72])
def test_ragged_batch(num_heads, page_size, implementation):
    lengths = [0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 500, 1777, 4096]
    check(
        make_case(lengths, [1] * len(lengths), num_heads=num_heads, page_size=page_size),
        implementation=implementation,
    )


@pytest.mark.parametrize("seed", range(24))
def test_random_geometry(seed, implementation):
    draw = random.Random(seed)
    case = random_case(
        draw,
        requests=[1, 2, 5, 17, 64, 200],
        keys=(300, 6000),
        max_query_len=8,
        num_heads=[1, 3, 8, 12, 16, 20, 24, 40, 64, 96, 128],
        page_sizes=[1, 2, 4, 8, 16, 32, 40, 64, 256],
        latents=[(512, 64), (512, 64), (256, 32)],
        seed=seed,
    )
    check(case, causal=draw.random() < 0.8, implementation=implementation)


@pytest.mark.parametrize(
    "requests, length",
    [(1, 64), (1, 2048), (1, 8192), (1, 131072), (3, 10000), (25, 3000), (60, 1100), (132, 700), (500, 90)],
)
@pytest.mark.parametrize("page_size", [64, 1])
@pytest.mark.parametrize("num_heads", [16, 24, 64])
def test_splits(requests, length, num_heads, page_size, implementation):
    """From no split at all to every CTA on one request."""
    check(
        make_case([length] * requests, [1] * requests, num_heads=num_heads, page_size=page_size),
        implementation=implementation,
    )


@pytest.mark.parametrize("seed", range(12))
def test_merged_shards_are_the_whole(seed, implementation):
    """Replayed from one graph per rank, with other lengths than those that it was captured with."""
    draw = random.Random(seed)
    kind = draw.choice([TableKind.BLOCK, TableKind.TOKEN])
    interleave = draw.choice([1, 3, 64]) if kind is TableKind.BLOCK else 1
    ranks, page_size = draw.choice([2, 4, 8]), draw.choice([1, 2, 8, 64])
    lengths = [draw.choice([0, 1, draw.randint(2, 70), draw.randint(2, 4000)]) for _ in range(9)]
    queries = draw.choice([[1] * 9, [draw.randint(1, 8)] * 9, [draw.randint(1, 8) for _ in range(9)]])
    heads = draw.choice([8, 16, 40, 128])
    whole = make_case(lengths, queries, num_heads=heads, page_size=page_size, table_kind=kind, seed=seed)
    latents = [whole.keys(request, length) for request, length in enumerate(lengths)]
    states = []
    for rank in range(ranks):
        cache, batch = shard_of(whole.batch, latents, Shard(rank, ranks, interleave))
        case = replace(whole, cache=cache, batch=batch)
        decoder = decoder_for(case, implementation=implementation)
        right = batch.seq_lens.clone()
        batch.seq_lens.clamp_(max=1)
        run(decoder, case)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = run(decoder, case)
        batch.seq_lens.copy_(right)
        graph.replay()
        assert not out.isnan().any() and not out[lse.isneginf()].any()
        states.append((out.clone(), lse.clone()))
    out, lse = functools.reduce(lambda a, b: merge_states(*a, *b), states)
    expected_out, expected_lse = whole.expected()
    assert relative_error(out, expected_out) <= 2 * TOLERANCE[out.dtype]
    empty = expected_lse.isinf()
    assert torch.equal(lse.isinf(), empty)
    assert (lse[~empty] - expected_lse[~empty]).abs().max() <= 2e-3 if (~empty).any() else True


@pytest.mark.parametrize("num_heads", [16, 64])
def test_large_scores(num_heads, implementation):
    """Scores far apart: the running maximum moves by more than any bound, and most weights vanish."""
    case = make_case([3000, 40], [1, 1], num_heads=num_heads, page_size=64)
    case.scale *= 300
    check(case, implementation=implementation)


def test_more_queries_than_keys(implementation):
    case = make_case([3, 0, 1], [8, 8, 8], num_heads=16, page_size=16)
    check(case, implementation=implementation)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("num_heads", [16, 40])
def test_cache_beyond_2_31_elements(num_heads, page_size, implementation):
    case = make_case([5000, 333], [1, 1], num_heads=num_heads, page_size=page_size)
    check(case.far_away(2**31 + 10**8), implementation=implementation)


@pytest.mark.parametrize("lengths", [[8192, 77, 3000], [900, 1100] * 30], ids=["by many CTAs", "by two"])
@pytest.mark.parametrize("num_heads", [16, 64])
def test_bits_repeat(num_heads, lengths, implementation):
    case = make_case(lengths, [1] * len(lengths), num_heads=num_heads, page_size=64)
    decoder = decoder_for(case, implementation=implementation)
    first = run(decoder, case)
    for _ in range(20):
        again = run(decoder, case)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


@pytest.mark.parametrize("num_heads", [16, 40])
def test_batch_invariance(num_heads, implementation):
    """A request's bits are the same alone and among others, whatever their lengths and query lengths."""
    lengths, query_lens = [5000, 40, 0, 9001, 333], [2, 1, 3, 1, 3]
    case = make_case(lengths, query_lens, num_heads=num_heads, page_size=64)
    decoder = decoder_for(case, implementation=implementation, batch_invariant=True)
    together = run(decoder, case)
    check(case, implementation=implementation, batch_invariant=True)
    for request in range(len(lengths)):
        only, rows = case.alone(request)
        alone = run(decoder, only)
        assert all(torch.equal(a, t[rows]) for a, t in zip(alone, together, strict=True))


def test_other_plans_share_the_workspace(implementation):
    """Steps of other shapes between two equal ones leave nothing behind for the second."""
    case = make_case([9000, 4097, 1], [1] * 3, num_heads=16, page_size=64)
    other = make_case([700, 20000, 5], [4, 2, 3], num_heads=16, page_size=64, seed=1)
    decoder = decoder_for(other, implementation=implementation)
    first = run(decoder, case)
    assert relative_error(run(decoder, other)[0], other.expected()[0]) <= TOLERANCE[torch.bfloat16]
    assert all(torch.equal(a, b) for a, b in zip(run(decoder, case), first, strict=True))


def test_graph_replays_with_other_lengths(implementation):
    """A graph captured with short requests gives, after a new plan, the bits of an eager run on long ones."""
    case = make_case([9000, 0, 4097, 1], [1] * 4, num_heads=16, page_size=64)
    decoder = decoder_for(case, implementation=implementation)
    lengths = case.batch.seq_lens.clone()
    eager_out, eager_lse = run(decoder, case)
    case.batch.seq_lens.fill_(1)
    out, lse = torch.empty_like(eager_out), torch.empty_like(eager_lse)
    plan = decoder.plan(case.batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.run(case.q_nope, case.q_rope, case.cache, plan, case.scale, out=out, lse=lse)
    case.batch.seq_lens.copy_(lengths)
    decoder.plan(case.batch)
    for _ in range(3):
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, eager_out) and torch.equal(lse, eager_lse)


@pytest.mark.parametrize("num_heads", [16, 24, 64])
def test_graph_replays_for_fewer_requests(num_heads, implementation):
    """Captured with a request per CTA, it runs on a plan that gives two CTAs to each."""
    most = torch.cuda.get_device_properties("cuda").multi_processor_count
    few = most // 2
    case = make_case([1000] * most, [1] * most, num_heads=num_heads, page_size=64)
    decoder = decoder_for(case, implementation=implementation)
    out, lse = run(decoder, case)
    plan = decoder.plan(case.batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.run(case.q_nope, case.q_rope, case.cache, plan, case.scale, out=out, lse=lse)
    decoder.plan(replace(case.batch, seq_lens=case.batch.seq_lens[:few]))
    out.fill_(float("nan"))
    graph.replay()
    assert relative_error(out[:few], case.expected()[0][:few]) <= TOLERANCE[out.dtype]
    assert out[few:].isnan().all()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("page_size", [64, 1])
@pytest.mark.parametrize("num_heads", [8, 16, 64])
def test_launches_begin_early(num_heads, page_size, captured, implementation):
    """Plans and launches in a row, each on the output of the one before: nothing is read too soon."""
    steps = [[9000, 4097, 1], [300] * 3, [2000] * 3, [700, 20000, 0]]
    cases = [
        make_case(lengths, [1] * 3, num_heads=num_heads, page_size=page_size, seed=seed)
        for seed, lengths in enumerate(steps)
    ]
    decoder = decoder_for(cases[0], implementation=implementation)
    results = torch.empty(len(cases), 3, *cases[0].q_nope.shape, dtype=torch.bfloat16, device="cuda")

    def all_steps(pause=lambda: None):
        for case, outputs in zip(cases, results, strict=True):
            outputs.fill_(float("nan"))
            q_nope, plan = case.q_nope, decoder.plan(case.batch)
            for out in outputs:
                pause()
                decoder.run(q_nope, case.q_rope, case.cache, plan, case.scale, out=out)
                q_nope = out

    all_steps(pause=torch.cuda.synchronize)
    expected = results.clone()
    assert expected.isfinite().all()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_steps()
    for _ in range(10):
        graph.replay() if captured else all_steps()
        assert torch.equal(results, expected)
