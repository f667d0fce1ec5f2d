"""Attention sinks in the CUDA kernels, run on the CPU, against fp64 attention with one more key a head."""

import functools
from dataclasses import replace

import pytest
import torch

from mla_backend.batch import Shard
from mla_backend.torch_attention import merge_states
from tests.emulation.emulator import TOLERANCE, assert_right, run
from tests.support.cases import make_case, make_list_case, relative_error, with_sinks
from tests.support.shards import shard_of

E4M3 = torch.float8_e4m3fn
# Each way in which kernels gather the softmax state of rows.
KERNELS = pytest.mark.parametrize(
    "family, num_heads, kv_dtype",
    [
        *(("hopper", heads, kv_dtype) for heads in (16, 40) for kv_dtype in (None, E4M3)),
        ("hopper", 80, None),
        ("hopper", 40, "fp8_ds_mla"),
        ("portable", 16, E4M3),
        ("portable", 40, None),
    ],
)


@pytest.mark.smoke(num_ctas=5, num_heads=16)
@KERNELS
@pytest.mark.parametrize("num_ctas", [4, 5, 12], ids=["pairs", "two splits", "more"])
def test_splits_count_sinks_once(decoder, family, num_heads, kv_dtype, num_ctas):
    case = make_case([400, 390], [1, 1], num_heads=num_heads, page_size=8, kv_dtype=kv_dtype, device="cpu")
    case = with_sinks(case)
    assert_right(case, *run(decoder(case, family, num_ctas), case))


@KERNELS
def test_rows_without_keys(decoder, family, num_heads, kv_dtype):
    """Also queries before the first key, and more m-blocks than one: LSEs are the sinks."""
    lengths, queries = [0, 1, 70, 300, 3], [1, 2, 3, 1, 5]
    case = make_case(lengths, queries, num_heads=num_heads, page_size=8, kv_dtype=kv_dtype, device="cpu")
    case = with_sinks(case)
    assert_right(case, *run(decoder(case, family, 3), case))


@KERNELS
def test_lists(decoder, family, num_heads, kv_dtype):
    """The first list names a key in its last tile alone, so what comes before has none."""
    options = {"num_heads": num_heads, "kv_dtype": kv_dtype, "device": "cpu"}
    case = with_sinks(make_list_case([300, 70, 0, 1, 64, 200], **options))
    assert_right(case, *run(decoder(case, family, 5), case))


@pytest.mark.parametrize("offset", [-150.0, 60.0])
@pytest.mark.parametrize("family, num_heads", [("hopper", 16), ("hopper", 40), ("portable", 40)])
def test_sinks_far_from_all_scores(decoder, family, num_heads, offset):
    case = make_case([400, 90], [1, 1], num_heads=num_heads, page_size=8, device="cpu")
    case = with_sinks(case)
    case.sinks += offset
    out, lse = run(decoder(case, family, 4), case)
    expected_out, expected_lse = case.expected()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)
    for head in range(num_heads):  # outputs are small beside a large sink
        assert relative_error(out[:, head], expected_out[:, head]) <= 3 * TOLERANCE[out.dtype]


def test_merged_shards_count_sinks_once(decoder):
    whole = with_sinks(make_case([300, 0, 70], [1] * 3, num_heads=16, page_size=8, device="cpu"))
    latents = [whole.keys(request, length) for request, length in enumerate(whole.seq_lens)]
    states = []
    for rank in range(2):
        cache, batch = shard_of(whole.batch, latents, Shard(rank, 2, 1))
        case = replace(whole, cache=cache, batch=batch, sinks=whole.sinks if rank == 0 else None)
        states.append(run(decoder(case, "hopper", 4), case))
    out, lse = functools.reduce(lambda a, b: merge_states(*a, *b), states)
    expected_out, expected_lse = whole.expected()
    assert relative_error(out, expected_out) <= 2 * TOLERANCE[out.dtype]
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)
