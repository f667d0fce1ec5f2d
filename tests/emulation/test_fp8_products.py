"""Decode with products in fp8, run on the CPU, against fp64 attention over the values of the cache."""

import random
from dataclasses import replace

import pytest
import torch

from mla_backend import Shard
from mla_backend.torch_attention import merge_states
from tests.emulation.emulator import assert_alone_as_together, assert_right, run
from tests.support.cases import (
    make_case,
    make_list_case,
    make_sink_case,
    random_case,
    relative_error,
    with_sinks,
)
from tests.support.seeds import seeds
from tests.support.shards import shard_of

E4M3 = torch.float8_e4m3fn
ONE_TERM, DEFAULT, TWO_TERMS = 0, 5, 9
"""Of 9 column blocks of queries, how many are sums of two e4m3."""
TOLERANCE = {ONE_TERM: 5.5e-2, DEFAULT: 3.5e-2, TWO_TERMS: 2e-2}
"""Relative errors of outputs: those of docs/kernels-hopper.md, and room for small batches."""
OF_LSE = {ONE_TERM: 0.3, DEFAULT: 0.2, TWO_TERMS: 0.04}
"""In nats: a rounded query moves a score by up to 3 percent."""
RAGGED = [0, 1, 9, 33, 64, 65, 200, 400]


def assert_near(case, results, terms=DEFAULT, causal=True):
    assert_right(case, *results, causal, TOLERANCE[terms], OF_LSE[terms])


def e4m3_case(lengths, num_heads=40, page_size=8, **options):
    sizes = {"num_heads": num_heads, "page_size": page_size, "kv_dtype": E4M3, "device": "cpu"}
    return make_case(lengths, [1] * len(lengths), **sizes, **options)


@pytest.mark.smoke(num_heads=(40, 80), page_size=8, terms=DEFAULT)
@pytest.mark.parametrize(
    "num_heads, page_size, terms",
    [
        (40, 8, DEFAULT),
        (64, 8, ONE_TERM),
        (64, 64, TWO_TERMS),
        (40, 1, DEFAULT),
        (80, 1, DEFAULT),
        (80, 8, DEFAULT),
        (128, 64, DEFAULT),
    ],
)
def test_ragged_batch(decoder, num_heads, page_size, terms):
    """More work tiles than CTAs, split ones among them; clusters; three ways to load keys."""
    case = e4m3_case(RAGGED, num_heads, page_size)
    assert_near(case, run(decoder(case, "hopper", two_term_blocks=terms), case), terms)


@pytest.mark.parametrize("num_ctas", [2, 4, 5, 6, 12])
@pytest.mark.parametrize("num_heads", [40, 128])
def test_splits(decoder, num_heads, num_ctas):
    """Pairs, two splits in other places, more splits, and CTAs that have no keys."""
    case = e4m3_case([400, 390], num_heads)
    assert_near(case, run(decoder(case, "hopper", num_ctas, two_term_blocks=DEFAULT), case))


def test_few_rows_have_the_exact_kernel(decoder):
    case = e4m3_case([300, 70], num_heads=16)
    assert_right(case, *run(decoder(case, "hopper", two_term_blocks=DEFAULT), case))


@pytest.mark.parametrize("kv_lora_rank, qk_rope_head_dim", [(512, 0), (256, 32), (256, 64), (512, 32)])
def test_other_latents(decoder, kv_lora_rank, qk_rope_head_dim):
    """Also half a column block of rotary columns, and pairs where queries are smaller."""
    case = e4m3_case([300, 70], d_c=kv_lora_rank, d_rope=qk_rope_head_dim)
    for num_ctas in (2, 4):
        assert_near(case, run(decoder(case, "hopper", num_ctas, two_term_blocks=3), case), ONE_TERM)


def test_batch_invariance(decoder):
    sizes = {"num_heads": 40, "page_size": 64, "kv_dtype": E4M3, "device": "cpu"}
    case = make_case([300, 40, 0, 201], [2, 1, 3, 1], **sizes)
    assert_alone_as_together(decoder(case, "hopper", 4, batch_invariant=True, two_term_blocks=DEFAULT), case)


@pytest.mark.parametrize("num_heads", [40, 80])
def test_lists(decoder, num_heads):
    """With slots that name no key."""
    options = {"kv_dtype": E4M3, "page_size": 24, "page_gap": 3, "device": "cpu"}
    case = make_list_case([300, 70, 0, 1, 9, 64, 65, 200], num_heads=num_heads, **options)
    assert_near(case, run(decoder(case, "hopper", 5, two_term_blocks=DEFAULT), case))


def test_merged_shards_are_the_whole(decoder):
    lengths = [300, 1, 130, 2, 65, 0]
    whole = e4m3_case(lengths)
    stored = replace(whole, cache=whole.cache.view(torch.uint8), values=None)
    latents = [stored.keys(request, length) for request, length in enumerate(lengths)]
    states = []
    for rank in range(2):
        cache, batch = shard_of(whole.batch, latents, Shard(rank, 2, 3))
        case = replace(whole, cache=cache.view(E4M3), batch=batch)
        states.append(run(decoder(case, "hopper", two_term_blocks=DEFAULT), case))
    assert_near(whole, merge_states(*states[0], *states[1]))


def test_sinks_of_heads(decoder):
    case = with_sinks(e4m3_case([300, 70, 0, 130]))
    assert_near(case, run(decoder(case, "hopper", 5, two_term_blocks=DEFAULT), case))


@pytest.mark.parametrize("gap", [6.0, 12.0])
@pytest.mark.parametrize("sinks", [[0], [64, 2500]], ids=["one", "two"])
def test_attention_sinks_of_a_long_context(decoder, sinks, gap):
    """Keys without values have up to all of the weight, and e4m3 holds no probabilities beside theirs."""
    case = make_sink_case(3000, sinks, gap, num_heads=40, page_size=64, kv_dtype=E4M3, device="cpu")
    assert_near(case, run(decoder(case, "hopper", 1, two_term_blocks=DEFAULT), case))


@pytest.mark.parametrize("sharpness", [0.1, 3.0])
def test_flat_and_sharp_softmax(decoder, sharpness):
    """With all terms: errors of single ones grow with the scores."""
    case = e4m3_case([400, 390])
    case.scale *= sharpness
    out, _ = run(decoder(case, "hopper", 3, two_term_blocks=TWO_TERMS), case)
    assert relative_error(out, case.expected()[0]) <= 3e-2


def test_scores_that_grow(decoder):
    """Each tile exceeds what the weights of those before were relative to."""
    case = e4m3_case([640])
    case.q_rope.fill_(1)
    tokens = torch.arange(640)
    places = case.batch.table[0][tokens // 8].long(), tokens % 8
    growing = (tokens / 64 + 1).floor().to(E4M3)[:, None].repeat(1, 64)
    for rows, rotary in ((case.cache.view(torch.uint8), growing.view(torch.uint8)), (case.values, None)):
        changed = rows[places]
        changed[:, 512:] = growing.double() * case.kv_scale.double() if rotary is None else rotary
        rows[places] = changed
    assert_near(case, run(decoder(case, "hopper", 1, two_term_blocks=DEFAULT), case))


def test_infinite_queries_are_not_hidden(decoder):
    case = e4m3_case([70])
    case.q_nope[0, 3, 5] = torch.inf
    out, _ = run(decoder(case, "hopper", 1, two_term_blocks=DEFAULT), case)
    assert out[0, 3].isnan().all() and not out[0, 4].isnan().any()


def test_queries_in_fp16(decoder):
    case = e4m3_case([300, 70], dtype=torch.float16)
    assert_near(case, run(decoder(case, "hopper", two_term_blocks=DEFAULT), case))


def test_a_scale_of_zero(decoder):
    """As a calibration on zeros gives it: all values count as 0, and no masked score as NaN."""
    case = e4m3_case([70, 9])
    case.kv_scale.zero_()
    out, lse = run(decoder(case, "hopper", 2, two_term_blocks=DEFAULT), case)
    assert (out == 0).all()
    torch.testing.assert_close(lse, torch.tensor([[70.0], [9.0]]).log().expand_as(lse))


@pytest.mark.parametrize("exponent", [-60, 60])
@pytest.mark.parametrize("num_ctas", [4, 5, 12], ids=["pairs", "two splits", "more"])
def test_splits_of_any_magnitude(decoder, num_ctas, exponent):
    """Splits are in fp16, which holds no such values."""
    case = e4m3_case([400, 390], kv_scale=2.0**exponent)
    case.scale /= 16  # many keys have weight, so sums of weights are large
    assert_near(case, run(decoder(case, "hopper", num_ctas, two_term_blocks=DEFAULT), case))


@pytest.mark.parametrize("kv_scale", [2.0**-10, 2.0**10])
@pytest.mark.parametrize("query_exponents", [(-40, 0), (0, 40)], ids=["small queries", "large queries"])
def test_ranges_beyond_fp16(decoder, kv_scale, query_exponents):
    """Query rows of any magnitude that bf16 has, side by side."""
    case = e4m3_case([300, 70], kv_scale=kv_scale)
    exponents = torch.linspace(*query_exponents, 40).round()[:, None]
    case.q_nope, case.q_rope = case.q_nope * 2**exponents, case.q_rope * 2**exponents
    case.q_nope, case.q_rope = case.q_nope.bfloat16(), case.q_rope.bfloat16()
    case.scale *= 2.0 ** -query_exponents[1]
    out, _ = run(decoder(case, "hopper", two_term_blocks=TWO_TERMS), case)
    assert relative_error(out, case.expected()[0]) <= TOLERANCE[TWO_TERMS]


@pytest.mark.parametrize("seed", seeds(4))
def test_random_geometry(decoder, seed):
    draw = random.Random(seed)
    case = random_case(
        draw,
        requests=[1, 2, 3, 6],
        keys=(80, 500),
        max_query_len=4,
        num_heads=[20, 40, 64],
        page_sizes=[1, 8, 40, 64],
        latents=[(512, 64)],
        seed=seed,
        kv_dtype=E4M3,
        device="cpu",
    )
    causal = draw.random() < 0.8
    invariant = draw.random() < 0.2
    implementation = decoder(
        case, "hopper", draw.randint(2, 10), batch_invariant=invariant, two_term_blocks=DEFAULT
    )
    assert_near(case, run(implementation, case, causal), causal=causal)
