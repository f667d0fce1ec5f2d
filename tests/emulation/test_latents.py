"""The CUDA kernels for other latents than DeepSeek's, run on the CPU, against fp64 attention.

Pairs of dimensions with the cache formats that hold them, kinds of tables and numbers of query rows for which
there are kernels of their own. They are hundreds, so a run builds every seventh; TESTS_SEED moves the first.
What the kernels do apart from dimensions is tested elsewhere.
"""

import itertools
import random

import pytest
import torch

from mla_backend.batch import TableKind
from mla_backend.kernels.base import DIMENSIONS
from tests.emulation.emulator import assert_right, run
from tests.support.cases import make_case, make_list_case, random_case
from tests.support.seeds import first_seed, seeds

E4M3 = torch.float8_e4m3fn
LATENTS = [pair for pair in DIMENSIONS if pair != (512, 64)]
LENGTHS = [300, 70, 0, 1, 9, 64, 65, 200]


def every_seventh(names, *values):
    """Parameters: latents, their format, and combinations of these values."""
    cases = list(itertools.product(LATENTS, [None, E4M3], *values))
    return pytest.mark.parametrize(f"latents, kv_dtype, {names}", cases[first_seed() % 7 :: 7])


def sizes_of(latents):
    return {"d_c": latents[0], "d_rope": latents[1], "device": "cpu"}


# Each m-block; the last one is two that share keys.
@every_seventh("table_kind, num_heads", [TableKind.BLOCK, TableKind.TOKEN], [5, 16, 24, 32, 64, 80])
def test_hopper(decoder, latents, kv_dtype, table_kind, num_heads):
    page_size = 1 if table_kind is TableKind.TOKEN else 8
    options = {"num_heads": num_heads, "page_size": page_size, "kv_dtype": kv_dtype, "page_gap": 3}
    case = make_case(LENGTHS, [1] * 8, table_kind=table_kind, **options, **sizes_of(latents))
    assert_right(case, *run(decoder(case, "hopper", 5), case))


@every_seventh("num_heads", [5, 16, 24, 32, 64])
def test_hopper_lists(decoder, latents, kv_dtype, num_heads):
    options = {"num_heads": num_heads, "page_size": 24, "kv_dtype": kv_dtype, "page_gap": 3}
    case = make_list_case(LENGTHS, **options, **sizes_of(latents))
    assert_right(case, *run(decoder(case, "hopper", 5), case))


@every_seventh("family, num_heads, lists", ["portable", "portable_99k"], [16, 20, 64], [False, True])
def test_portable(decoder, latents, kv_dtype, family, num_heads, lists):
    options = {"num_heads": num_heads, "page_size": 8, "kv_dtype": kv_dtype, **sizes_of(latents)}
    case = make_list_case(LENGTHS, **options) if lists else make_case(LENGTHS, [1] * 8, **options)
    assert_right(case, *run(decoder(case, family, 5), case))


# A pair of CTAs, splits of two that end and begin in one range, and splits of more.
@every_seventh("num_heads, splits", [16, 32, 40], [([400, 390], 4), ([500, 800, 330], 4), ([800], 12)])
def test_splits(decoder, latents, kv_dtype, num_heads, splits):
    lengths, num_ctas = splits
    options = {"num_heads": num_heads, "page_size": 8, "kv_dtype": kv_dtype, **sizes_of(latents)}
    case = make_case(lengths, [1] * len(lengths), **options)
    assert_right(case, *run(decoder(case, "hopper", num_ctas), case))


@pytest.mark.smoke(seed=seeds(1), family="hopper")
@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("family", ["hopper", "portable"])
@pytest.mark.parametrize("latents", LATENTS, ids=str)
def test_random_geometry(decoder, latents, family, seed):
    """Also fp16, several query tokens, and batch invariance."""
    draw = random.Random(seed)
    case = random_case(
        draw,
        requests=[1, 2, 3, 6],
        keys=(80, 500),
        max_query_len=4,
        num_heads=[1, 2, 8, 12, 20, 32],
        page_sizes=[1, 2, 16, 40, 64],
        latents=[latents],
        seed=seed,
        kv_dtype=draw.choice([None, None, E4M3]),
        device="cpu",
    )
    causal = draw.random() < 0.8
    implementation = decoder(case, family, draw.randint(1, 10), batch_invariant=draw.random() < 0.2)
    assert_right(case, *run(implementation, case, causal), causal)
