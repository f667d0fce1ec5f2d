"""The CUDA decode kernels with fp8 caches, against dense fp64 attention over the values of the cache."""

import random

import pytest
import torch

from tests.kernels.test_decode_gpu import check, run
from tests.support.cases import decoder_for, make_case, make_dominated_case, random_case

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
RECORDS = "fp8_ds_mla"


@pytest.fixture(params=[E4M3, RECORDS], ids=["e4m3", "records"])
def kv_dtype(request):
    return request.param


@pytest.mark.parametrize("page_size", [1, 4, 8, 64, 128])
@pytest.mark.parametrize("num_heads", [1, 16, 20, 32, 40, 64, 128])
def test_ragged_batch(num_heads, page_size, kv_dtype, implementation):
    lengths = [0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 500, 1777, 4096]
    sizes = {"num_heads": num_heads, "page_size": page_size}
    case = make_case(lengths, [1] * len(lengths), kv_dtype=kv_dtype, kv_scale=0.03, **sizes)
    check(case, implementation=implementation)


@pytest.mark.parametrize("exponents", [(-10, -10), (10, 10), (-10, 10)])
@pytest.mark.parametrize("sharpness", [0.25, 1.0])
@pytest.mark.parametrize("num_heads", [16, 64])
def test_scales_of_records(num_heads, exponents, sharpness, implementation):
    """Also the smallest and the largest in one tile."""
    sizes = {"num_heads": num_heads, "page_size": 64, "kv_dtype": RECORDS}
    case = make_case([3000, 70, 900], [1, 1, 1], scale_exponents=exponents, **sizes)
    case.scale *= sharpness * 2.0 ** -exponents[1]
    check(case, implementation=implementation)


@pytest.mark.parametrize("seed", range(16))
def test_random_geometry(seed, kv_dtype, implementation):
    draw = random.Random(seed)
    case = random_case(
        draw,
        requests=[1, 2, 5, 17, 64, 200],
        keys=(300, 6000),
        max_query_len=8,
        num_heads=[1, 8, 16, 24, 40, 64, 128],
        page_sizes=[1, 2, 4, 8, 16, 40, 64, 256],
        latents=[(512, 64)] if kv_dtype == RECORDS else [(512, 64), (512, 64), (256, 32)],
        seed=seed,
        kv_dtype=kv_dtype,
    )
    check(case, causal=draw.random() < 0.8, implementation=implementation)


@pytest.mark.parametrize(
    "requests, length", [(1, 64), (1, 8192), (3, 10000), (25, 3000), (60, 1100), (132, 700), (500, 90)]
)
@pytest.mark.parametrize("num_heads", [16, 64])
def test_splits(requests, length, num_heads, kv_dtype, implementation):
    case = make_case(
        [length] * requests, [1] * requests, num_heads=num_heads, page_size=64, kv_dtype=kv_dtype
    )
    check(case, implementation=implementation)


@pytest.mark.parametrize("dominant", [[0], [64, 5000]], ids=["one", "two"])
@pytest.mark.parametrize("num_heads", [8, 16, 24, 32, 40])
def test_dominant_keys(num_heads, dominant, kv_dtype, implementation):
    """Each CTA has half of a request."""
    sizes = {"num_heads": num_heads, "page_size": 64, "kv_dtype": kv_dtype}
    check(make_dominated_case(8000, dominant, 12.0, requests=66, **sizes), implementation=implementation)


@pytest.mark.parametrize(
    "num_heads, page_size", [(8, 64), (16, 64), (24, 64), (32, 64), (64, 64), (8, 1), (16, 1), (64, 1)]
)
@pytest.mark.parametrize("stored", [torch.bfloat16, E4M3, RECORDS], ids=["16-bit", "e4m3", "records"])
def test_thousands_of_launches_without_a_pause(stored, num_heads, page_size, implementation):
    """Loads that take far longer than the others happen only now and then."""
    sizes = {"num_heads": num_heads, "page_size": page_size}
    case = make_case([2048] * 128, [1] * 128, kv_dtype=stored, **sizes)
    decoder = decoder_for(case, implementation=implementation)
    first = run(decoder, case)
    plan, again = decoder.plan(case.batch), torch.empty_like(first[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            decoder.run(
                case.q_nope, case.q_rope, case.cache, plan, case.scale, kv_scale=case.kv_scale, out=again
            )
    for _ in range(100):
        graph.replay()
    assert torch.equal(again, first[0])


def test_a_captured_graph_sees_a_new_scale(implementation):
    case = make_case([3000, 40], [1, 1], num_heads=16, page_size=64, kv_dtype=E4M3)
    decoder = decoder_for(case, implementation=implementation)
    run(decoder, case)
    plan = decoder.plan(case.batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = decoder.run(case.q_nope, case.q_rope, case.cache, plan, case.scale, kv_scale=case.kv_scale)
    for factor in (1.0, 0.5, 4.0):
        case.kv_scale.copy_(torch.tensor([0.07 * factor]))
        graph.replay()
        expected, _ = run(decoder, case)
        decoder.plan(case.batch)
        assert torch.equal(out, expected)
