"""The CUDA kernels for other latents than DeepSeek's, and for sinks, on a GPU, against fp64 attention."""

import random

import pytest
import torch

from mla_backend.kernels.base import DIMENSIONS
from tests.kernels import test_lists_gpu
from tests.kernels.test_decode_gpu import check, run
from tests.support.cases import decoder_for, make_case, make_list_case, random_case, with_sinks

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
LATENTS = pytest.mark.parametrize(
    "latents", [pair for pair in DIMENSIONS if pair != (512, 64)], ids=lambda pair: "{}+{}".format(*pair)
)
FORMATS = pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=["bf16", "e4m3"])
LENGTHS = [0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 500, 1777, 4096]


def sizes_of(latents):
    return {"d_c": latents[0], "d_rope": latents[1]}


@pytest.mark.parametrize("page_size", [1, 4, 8, 64])
@pytest.mark.parametrize("num_heads", [1, 8, 16, 24, 32, 40, 64, 72, 128])
@FORMATS
@LATENTS
def test_ragged_batch(latents, kv_dtype, num_heads, page_size, implementation):
    options = {"num_heads": num_heads, "page_size": page_size, "kv_dtype": kv_dtype, **sizes_of(latents)}
    case = make_case(LENGTHS, [1] * len(LENGTHS), **options)
    check(case, implementation=implementation)


@pytest.mark.parametrize("num_heads", [1, 8, 16, 24, 32, 64, 128])
@FORMATS
@LATENTS
def test_lists(latents, kv_dtype, num_heads, implementation):
    lengths = [2048, 0, 1, 63, 64, 65, 500, 2047] * 9
    options = {"num_heads": num_heads, "num_pages": 600, "kv_dtype": kv_dtype, **sizes_of(latents)}
    case = make_list_case(lengths, page_gap=3, **options)
    decoder = decoder_for(case, implementation=implementation)
    test_lists_gpu.assert_right(case, *test_lists_gpu.run(decoder, case))


@pytest.mark.parametrize("seed", range(8))
@LATENTS
def test_random_geometry(latents, seed, implementation):
    draw = random.Random(seed)
    case = random_case(
        draw,
        requests=[1, 2, 5, 17, 64, 200],
        keys=(300, 6000),
        max_query_len=8,
        num_heads=[1, 3, 8, 12, 16, 20, 24, 32, 40, 64, 128],
        page_sizes=[1, 2, 4, 8, 16, 32, 40, 64, 256],
        latents=[latents],
        seed=seed,
        kv_dtype=draw.choice([None, None, E4M3]),
    )
    check(case, causal=draw.random() < 0.8, implementation=implementation)


@pytest.mark.parametrize("requests, length", [(1, 64), (1, 8192), (1, 131072), (25, 3000), (132, 700)])
@pytest.mark.parametrize("page_size", [64, 1])
@pytest.mark.parametrize("num_heads", [16, 32, 64])
@FORMATS
@LATENTS
def test_splits_repeat_in_graphs(latents, kv_dtype, num_heads, page_size, requests, length, implementation):
    """From no split at all to every CTA on one request; the same bits in every run and replay."""
    options = {"num_heads": num_heads, "page_size": page_size, "kv_dtype": kv_dtype, **sizes_of(latents)}
    case = make_case([length] * requests, [1] * requests, **options)
    decoder = check(case, implementation=implementation)
    first = run(decoder, case)
    again = run(decoder, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run(decoder, case)
    graph.replay()
    for results in (again, replayed):
        assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True))


@pytest.mark.parametrize("num_heads", [16, 40])
@LATENTS
def test_batch_invariance(latents, num_heads):
    """A request's bits are the same alone and among others, whatever their lengths and query lengths."""
    lengths, query_lens = [5000, 40, 0, 9001, 333], [2, 1, 3, 1, 3]
    case = make_case(lengths, query_lens, num_heads=num_heads, page_size=64, **sizes_of(latents))
    decoder = decoder_for(case, batch_invariant=True)
    together = run(decoder, case)
    for request in range(len(lengths)):
        only, rows = case.alone(request)
        assert all(torch.equal(a, t[rows]) for a, t in zip(run(decoder, only), together, strict=True))


@pytest.mark.parametrize("lengths", [[8192], [900, 1100] * 30, [0, 1, 300] * 40], ids=["many", "two", "one"])
@pytest.mark.parametrize("num_heads", [16, 64, 128])
@FORMATS
def test_sinks(kv_dtype, num_heads, lengths, implementation):
    case = make_case(lengths, [1] * len(lengths), num_heads=num_heads, page_size=64, kv_dtype=kv_dtype)
    check(with_sinks(case), implementation=implementation)
