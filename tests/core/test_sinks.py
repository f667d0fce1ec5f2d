"""Attention sinks in plain torch, against fp64 attention with one more key a head."""

import functools
from dataclasses import replace

import pytest
import torch

from mla_backend import InvalidInputError, Shard
from mla_backend.prefill import prefill
from mla_backend.torch_attention import merge_states
from tests.support.cases import decoder_for, make_case, make_list_case, with_sinks
from tests.support.shards import shard_of

SIZES = {"num_heads": 3, "d_c": 16, "d_rope": 8, "page_size": 4, "dtype": torch.float32, "device": "cpu"}


def run(case, **changes):
    decoder = decoder_for(case)
    inputs = (case.q_nope, case.q_rope, case.cache, decoder.plan(case.batch), case.scale)
    return decoder.run(*inputs, **{"table": case.lists, "sinks": case.sinks} | changes)


def assert_right(case, out, lse):
    expected_out, expected_lse = case.expected()
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_decode_and_extend():
    """Also requests without keys and queries before the first key, whose LSEs are the sinks."""
    case = with_sinks(make_case([9, 0, 70, 2], [1, 1, 4, 3], **SIZES))
    assert_right(case, *run(case))


def test_lists():
    case = with_sinks(make_list_case([30, 0, 7, 1], **SIZES))
    assert_right(case, *run(case))


def test_merged_shards_count_sinks_once():
    whole = with_sinks(make_case([30, 0, 7], [1] * 3, **SIZES))
    latents = [whole.keys(request, length) for request, length in enumerate(whole.seq_lens)]
    shards = [shard_of(whole.batch, latents, Shard(rank, 3, 1)) for rank in range(3)]
    states = [run(replace(whole, cache=cache, batch=batch)) for cache, batch in shards]
    assert_right(whole, *functools.reduce(lambda a, b: merge_states(*a, *b), states))


def test_prefill():
    torch.manual_seed(0)
    q, k, v = (torch.randn(5, 3, width) for width in (24, 24, 16))
    sinks, starts = torch.tensor([-torch.inf, 0.5, 30.0]), torch.tensor([0, 2, 5], dtype=torch.int32)
    out, lse = prefill(q, k, v, starts, starts, 3, 3, 0.3, True, return_lse=True, sinks=sinks)
    for token, first in enumerate([0, 0, 2, 2, 2]):
        scores = torch.einsum("hd,khd->hk", q[token], k[first : token + 1]).double() * 0.3
        weights = torch.cat([scores, sinks.double()[:, None]], 1).softmax(1)[:, :-1]
        expected = torch.einsum("hk,khd->hd", weights, v[first : token + 1].double())
        torch.testing.assert_close(out[token].double(), expected, rtol=1e-4, atol=1e-6)
        expected_lse = torch.logaddexp(scores.logsumexp(1), sinks.double())
        torch.testing.assert_close(lse[token].double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sinks", [torch.zeros(2), torch.zeros(3).double(), torch.zeros(6)[::2], [0.0] * 3])
def test_what_is_no_sink_is_refused(sinks):
    case = make_case([9], [1], **SIZES)
    with pytest.raises(InvalidInputError, match="sinks"):
        run(case, sinks=sinks)
    q = torch.randn(1, 3, 8)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(InvalidInputError, match="sinks"):
        prefill(q, q, q, starts, starts, 1, 1, 0.3, True, sinks=sinks)
