"""The CUDA kernels for other latents than DeepSeek's, run on the CPU, against fp64 attention.

Every pair of dimensions with every cache format that holds it, every kind of table and every number of query
rows for which there is a kernel of its own. What the kernels do apart from dimensions is tested elsewhere.
"""

import random

import pytest
import torch

from mla_backend.batch import TableKind
from mla_backend.kernels.base import DIMENSIONS
from tests.emulation.emulator import assert_right, run
from tests.support.cases import make_case, make_list_case, random_case

E4M3 = torch.float8_e4m3fn
LATENTS = pytest.mark.parametrize(
    "latents", [pair for pair in DIMENSIONS if pair != (512, 64)], ids=lambda pair: "{}+{}".format(*pair)
)
FORMATS = pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["bf16", "e4m3"])
LENGTHS = [300, 70, 0, 1, 9, 64, 65, 200]


def sizes_of(latents):
    return {"d_c": latents[0], "d_rope": latents[1], "device": "cpu"}


# Each m-block; the last one is two that share keys.
@pytest.mark.parametrize("num_heads", [5, 16, 24, 32, 64, 80])
@pytest.mark.parametrize("table_kind", [TableKind.BLOCK, TableKind.TOKEN], ids=["TMA", "small pages"])
@FORMATS
@LATENTS
def test_hopper(decoder, latents, kv_dtype, table_kind, num_heads):
    page_size = 1 if table_kind is TableKind.TOKEN else 8
    options = {"num_heads": num_heads, "page_size": page_size, "kv_dtype": kv_dtype, "page_gap": 3}
    case = make_case(LENGTHS, [1] * 8, table_kind=table_kind, **options, **sizes_of(latents))
    assert_right(case, *run(decoder(case, "hopper", 5), case))


@pytest.mark.parametrize("num_heads", [5, 16, 24, 32, 64])
@FORMATS
@LATENTS
def test_hopper_lists(decoder, latents, kv_dtype, num_heads):
    options = {"num_heads": num_heads, "page_size": 24, "kv_dtype": kv_dtype, "page_gap": 3}
    case = make_list_case(LENGTHS, **options, **sizes_of(latents))
    assert_right(case, *run(decoder(case, "hopper", 5), case))


@pytest.mark.parametrize("lists", [False, True], ids=["pages", "lists"])
@pytest.mark.parametrize("num_heads", [16, 20, 64])
@pytest.mark.parametrize("family", ["portable", "portable_99k"])
@FORMATS
@LATENTS
def test_portable(decoder, latents, kv_dtype, family, num_heads, lists):
    options = {"num_heads": num_heads, "page_size": 8, "kv_dtype": kv_dtype, **sizes_of(latents)}
    case = make_list_case(LENGTHS, **options) if lists else make_case(LENGTHS, [1] * 8, **options)
    assert_right(case, *run(decoder(case, family, 5), case))


# A pair of CTAs, splits of two that end and begin in one range, and splits of more.
@pytest.mark.parametrize("lengths, num_ctas", [([400, 390], 4), ([500, 800, 330], 4), ([800], 12)])
@pytest.mark.parametrize("num_heads", [16, 32, 40])
@FORMATS
@LATENTS
def test_splits(decoder, latents, kv_dtype, num_heads, lengths, num_ctas):
    options = {"num_heads": num_heads, "page_size": 8, "kv_dtype": kv_dtype, **sizes_of(latents)}
    case = make_case(lengths, [1] * len(lengths), **options)
    assert_right(case, *run(decoder(case, "hopper", num_ctas), case))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["hopper", "portable"])
@LATENTS
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
