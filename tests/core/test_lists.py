"""Sparse attention in plain torch, and what a decoder of lists refuses."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from mla_backend import DecodeBatch, DecodePlan, InvalidInputError, MLADecoder, Shard, TableKind
from mla_backend.grouped_batch import GroupedBatch
from mla_backend.torch_attention import paged_attention
from tests.support.cases import Case, decoder_for, make_list_case
from tests.support.mla_oracle import assert_attention_close

SIZES = {"d_c": 16, "d_rope": 8, "page_size": 4, "device": "cpu"}


def run(decoder: MLADecoder, case: Case, plan=None):
    plan = plan or decoder.plan(case.batch)
    inputs = (case.q_nope, case.q_rope, case.cache, plan, case.scale)
    return decoder.run(*inputs, kv_scale=case.kv_scale, table=case.lists)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_random_lists(dtype, shared, batch_invariant):
    lengths = [2048, 70, 0, 1, 64, 9, 5, 5]
    case = make_list_case(lengths, num_heads=3, num_pages=80, dtype=dtype, shared=shared, **SIZES)
    actual = run(decoder_for(case, batch_invariant=batch_invariant), case)
    assert_attention_close(actual, case.expected(), dtype)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, "fp8_ds_mla"])
def test_fp8_caches(kv_dtype):
    case = make_list_case(
        [70, 0, 1, 33], num_heads=3, dtype=torch.bfloat16, kv_dtype=kv_dtype, page_size=4, device="cpu"
    )
    assert_attention_close(run(decoder_for(case), case), case.expected(), torch.bfloat16)


def test_layers_have_lists_of_their_own():
    layers = [
        make_list_case([30, 0, 9], num_heads=2, dtype=torch.float32, seed=seed, **SIZES) for seed in (0, 1)
    ]
    decoder = decoder_for(layers[0])
    plan = decoder.plan(layers[0].batch)
    for layer in (*layers, layers[0]):
        assert_attention_close(run(decoder, layer, plan), layer.expected(), torch.float32)


def test_any_page_size_through_a_flat_view():
    case = make_list_case([30, 9], num_heads=2, dtype=torch.float32, **SIZES)
    flat = dataclasses.replace(
        case, cache=case.cache.view(-1, 1, 24), batch=dataclasses.replace(case.batch, page_size=1)
    )
    for of_flat, of_pages in zip(run(decoder_for(flat), flat), run(decoder_for(case), case), strict=True):
        assert torch.equal(of_flat, of_pages)


def test_slots_outside_the_cache():
    case = make_list_case([30, 9], num_heads=2, dtype=torch.float32, **SIZES)
    case.lists[0, 3:6] = torch.tensor([40 * 4, 2**31 - 1, -(2**31)])
    assert_attention_close(run(decoder_for(case), case), case.expected(), torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"table": torch.zeros(2, 4, dtype=torch.int32)},
            r"\(TableKind.LIST\) has no table: give each layer's own",
        ),
        ({"max_query_len": 2}, "each query token is a request with a list of its own"),
        ({"query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32)}, "leave out query_start_loc"),
        ({"table_rows": torch.tensor([0, 1])}, "leave out query_start_loc and table_rows"),
        ({"shard": Shard(1, 2)}, "of a cache with all tokens, but this batch is of shard 1 of 2"),
        ({"table_kind": TableKind.TOKEN}, "table must be a torch.Tensor, got NoneType"),
    ],
)
def test_batches_that_are_refused(changes, message):
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    batch = DecodeBatch(lengths, None, 4, None, 1, TableKind.LIST)
    batch.check()
    with pytest.raises(InvalidInputError, match=message):
        dataclasses.replace(batch, **changes).check()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (None, r"needs the layer's own: run\(..., table=slots\)"),
        (torch.zeros(2, 9), "table must be torch.int32"),
        (torch.zeros(1, 9, dtype=torch.int32), "1 rows for 2 query tokens"),
        (torch.zeros(9, 2, dtype=torch.int32).T, "last dimension of table must be contiguous"),
        (torch.zeros(2, 9, dtype=torch.int32, device="meta"), "table is on meta, seq_lens on cpu"),
        (torch.zeros(2, 8, dtype=torch.int32), "the table holds 0 .. 8 tokens"),
    ],
)
def test_lists_that_are_refused(table, message):
    case = make_list_case([3, 9], num_heads=2, dtype=torch.float32, **SIZES)
    case.lists = table
    with pytest.raises(InvalidInputError, match=message):
        run(decoder_for(case), case)


def test_plain_torch_attends_to_lists_and_refuses_a_batch_without_them():
    case = make_list_case([3, 9], num_heads=2, dtype=torch.float32, **SIZES)
    tensors = case.q_nope, case.q_rope, case.cache
    index = GroupedBatch(case.batch.with_lists(case.lists))
    assert_attention_close(paged_attention(*tensors, index, case.scale), case.expected(), torch.float32)
    with pytest.raises(InvalidInputError, match=r"no lists: pass GroupedBatch\(batch.with_lists\(table\)\)"):
        paged_attention(*tensors, case.batch, case.scale)


def test_lists_are_checked_before_a_kernel_gets_them():
    """Kernels check less than plain torch does."""

    def launch(*arguments, **options):
        raise AssertionError("launched")

    case = make_list_case([3, 9], num_heads=2, dtype=torch.float32, **SIZES)
    decoder = decoder_for(case)
    decoder._implementation = SimpleNamespace(plan=lambda batch: DecodePlan(batch, None), run=launch)
    case.lists = case.lists.long()
    with pytest.raises(InvalidInputError, match="table must be torch.int32"):
        run(decoder, case)


def test_negative_lengths_are_refused_by_the_plan():
    case = make_list_case([3, 9], num_heads=2, dtype=torch.float32, **SIZES)
    case.batch = dataclasses.replace(case.batch, seq_lens=case.batch.seq_lens - 4)
    with pytest.raises(InvalidInputError, match="seq_lens must not be negative, got -1"):
        decoder_for(case).plan(case.batch)


def test_batch_invariance():
    """A token's bits do not depend on the lists beside its own."""
    case = make_list_case([300, 400, 330], num_heads=4, num_pages=200, dtype=torch.float32, **SIZES)
    decoder = decoder_for(case, batch_invariant=True)
    together = run(decoder, case)
    for i in range(3):
        row = slice(i, i + 1)
        alone = dataclasses.replace(
            case,
            q_nope=case.q_nope[row],
            q_rope=case.q_rope[row],
            batch=dataclasses.replace(case.batch, seq_lens=case.batch.seq_lens[row]),
            lists=case.lists[row],
        )
        for of_batch, of_token in zip(together, run(decoder, alone), strict=True):
            assert torch.equal(of_batch[row], of_token)


def test_a_decoder_of_tables_takes_no_lists():
    case = make_list_case([3, 9], num_heads=2, dtype=torch.float32, **SIZES)
    kind = TableKind.TOKEN
    case.batch = dataclasses.replace(case.batch, table=case.lists.clamp(min=0, max=9), table_kind=kind)
    with pytest.raises(InvalidInputError, match=r"only a decoder with TableKind.LIST takes one in run"):
        run(decoder_for(case), case)


def test_a_decoder_of_lists_has_one_query_token_a_request():
    case = make_list_case([3, 9], num_heads=2, dtype=torch.float32, **SIZES)
    case.batch = dataclasses.replace(case.batch, max_query_len=2)
    with pytest.raises(InvalidInputError, match="max_query_len must be 1, got 2"):
        decoder_for(case)
