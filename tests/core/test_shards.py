"""Requests divided among ranks, each attended to alone: merged, they are attention to the whole."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_backend import InvalidInputError, Shard, TableKind
from mla_backend.torch_attention import merge_states, paged_attention
from tests.support.latents import gather
from tests.support.mla_oracle import assert_attention_close, paged_problem
from tests.support.shards import owned_tokens, shard_of


@st.composite
def splits(draw):
    size = draw(st.integers(1, 5))
    uniform = draw(st.booleans())
    query_len = st.integers(1, 8)
    query_lens = (
        [draw(query_len)] * size if uniform else draw(st.lists(query_len, min_size=size, max_size=size))
    )
    length = st.one_of(st.integers(0, 3), st.integers(0, 300))
    kind = draw(st.sampled_from([TableKind.BLOCK, TableKind.TOKEN]))
    return {
        "kv_lens": draw(st.lists(length, min_size=size, max_size=size)),
        "query_lens": query_lens,
        "uniform": uniform,
        "table_kind": kind,
        "page_size": draw(st.sampled_from([1, 4, 64])),
        "seed": draw(st.integers(0, 1 << 20)),
        "ranks": draw(st.sampled_from([1, 2, 4, 8])),
        "interleave": draw(st.one_of(st.integers(1, 64), st.just(64))) if kind is TableKind.BLOCK else 1,
    }


@given(splits(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_merged_shards_are_the_whole(split, causal):
    ranks, interleave = split.pop("ranks"), split.pop("interleave")
    problem = paged_problem(dtype=torch.float64, **split)
    states = []
    for rank in range(ranks):
        own, batch = shard_of(problem.batch, problem.latents, Shard(rank, ranks, interleave), split["seed"])
        batch.check()
        out, lse = paged_attention(
            problem.q_nope,
            problem.q_rope,
            own,
            batch,
            problem.scale,
            causal=causal,
            compute_dtype=torch.float64,
        )
        assert not out[lse.isneginf()].any()
        states.append((out, lse))
    merged = functools.reduce(lambda a, b: merge_states(*a, *b), states)
    assert_attention_close(merged, problem.expected(causal), torch.float64)


@given(st.integers(0, 1000), st.integers(1, 8), st.integers(1, 64))
@settings(deadline=None)
def test_ranks_divide_the_tokens(tokens, size, interleave):
    shards = [Shard(rank, size, interleave) for rank in range(size)]
    counts = [shard.keys_of(tokens) for shard in shards]
    assert counts == [len(owned_tokens(tokens, shard)) for shard in shards]
    assert counts == [int(shard.keys_of(torch.tensor(tokens))) for shard in shards]


@pytest.mark.parametrize("kind", [TableKind.BLOCK, TableKind.TOKEN])
def test_gather_takes_what_is_here(kind):
    problem = paged_problem([9, 0, 30], table_kind=kind)
    shard = Shard(1, 4)
    own, batch = shard_of(problem.batch, problem.latents, shard)
    expected = [latents[owned_tokens(len(latents), shard)] for latents in problem.latents]
    assert torch.equal(gather(own, batch, dtype=own.dtype), torch.cat(expected))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2), "rank must be below the size of 2, got 2"),
        ((-1, 2), "rank must be an int of at least 0, got -1"),
        ((0, 0), "size must be a positive int, got 0"),
        ((0, 2, 0), "interleave must be a positive int, got 0"),
        ((0, 2, 1 << 30), r"size \* interleave must be below 2\^31, got 2 \* 1073741824: give a shorter"),
    ],
)
def test_shards_that_do_not_exist_are_refused(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        Shard(*arguments)


@pytest.mark.parametrize("field", ["rank", "size", "interleave"])
@pytest.mark.parametrize("value", [1.0, "1", None, True])
def test_shards_need_integers(field, value):
    with pytest.raises(InvalidInputError, match=f"{field} must be a.* int.*, got {value!r}"):
        Shard(**{"rank": 0, "size": 2, "interleave": 1} | {field: value})


def test_token_tables_need_an_interleave_of_one():
    problem = paged_problem([9], table_kind=TableKind.TOKEN)
    _, batch = shard_of(problem.batch, problem.latents, Shard(0, 2))
    object.__setattr__(batch, "shard", Shard(0, 2, 4))
    with pytest.raises(InvalidInputError, match="interleave of 1"):
        batch.check()
    object.__setattr__(batch, "shard", Shard(0, 1, 4))  # has all tokens, whatever the interleave
    batch.check()


def test_a_table_is_checked_for_what_is_here():
    problem = paged_problem([40], page_size=4)
    own, batch = shard_of(problem.batch, problem.latents, Shard(0, 2))
    assert batch.table.shape[1] * 4 < 40
    batch.check_lengths([40])
    with pytest.raises(InvalidInputError, match="0 .. 28 tokens a request here, and 50 of the longest one's"):
        batch.check_lengths([100])


def test_a_token_table_is_checked_for_the_tokens_of_all_ranks():
    problem = paged_problem([40], table_kind=TableKind.TOKEN)
    _, batch = shard_of(problem.batch, problem.latents, Shard(0, 2))
    width = batch.table.shape[1]
    batch.check_lengths([width])
    with pytest.raises(InvalidInputError, match=f"the table holds 0 .. {width} tokens"):
        batch.check_lengths([width + 1])
