"""The portable kernel with caches of 656-byte records, against dense fp64 attention over their values."""

import random

import pytest

from tests.kernels.test_decode_gpu import check
from tests.kernels.test_lists_gpu import assert_right, run
from tests.support.cases import decoder_for, make_case, make_list_case, random_case

pytestmark = pytest.mark.gpu

RECORDS = "fp8_ds_mla"


@pytest.fixture(params=["sm80", "sm80_99k"])
def implementation(implementation_of_a_family, request):
    return implementation_of_a_family(request.param)


@pytest.mark.parametrize("page_size", [1, 7, 64])
@pytest.mark.parametrize("num_heads", [1, 16, 20, 32, 40, 64, 128])
def test_ragged_batch(num_heads, page_size, implementation):
    lengths = [0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 500, 1777, 4096]
    sizes = {"num_heads": num_heads, "page_size": page_size}
    check(make_case(lengths, [1] * len(lengths), kv_dtype=RECORDS, **sizes), implementation=implementation)


@pytest.mark.parametrize("seed", range(12))
def test_random_geometry(seed, implementation):
    """Scales from 2^-10 to 2^10, also in one tile."""
    draw = random.Random(seed)
    case = random_case(
        draw,
        requests=[1, 2, 5, 17, 64, 200],
        keys=(300, 6000),
        max_query_len=8,
        num_heads=[1, 8, 16, 24, 40, 64, 128],
        page_sizes=[1, 2, 8, 16, 40, 64, 256],
        latents=[(512, 64)],
        seed=seed,
        kv_dtype=RECORDS,
        scale_exponents=(-10, 10),
    )
    case.scale *= 2.0**-11
    check(case, causal=draw.random() < 0.8, implementation=implementation)


@pytest.mark.parametrize("requests, length", [(1, 8192), (3, 10000), (60, 1100), (500, 90)])
@pytest.mark.parametrize("num_heads", [16, 64])
def test_splits(requests, length, num_heads, implementation):
    case = make_case([length] * requests, [1] * requests, num_heads=num_heads, page_size=64, kv_dtype=RECORDS)
    check(case, implementation=implementation)


@pytest.mark.parametrize("num_heads", [16, 64])
def test_lists(num_heads, implementation):
    case = make_list_case([1, 40, 600, 2048], num_heads=num_heads, unnamed=0.3, kv_dtype=RECORDS)
    assert_right(case, *run(decoder_for(case, implementation=implementation), case))
