"""A malformed batch names the field that is wrong."""

import dataclasses

import pytest
import torch

from mla_backend import DecodeBatch, InvalidInputError


def good_batch():
    return DecodeBatch(
        seq_lens=torch.tensor([3, 5], dtype=torch.int32),
        table=torch.zeros(2, 4, dtype=torch.int32),
        page_size=2,
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
        max_query_len=1,
        table_rows=torch.tensor([1, 0]),
    )


def test_a_good_batch_passes():
    good_batch().check()
    assert good_batch().batch_size == 2


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seq_lens", torch.tensor([3, 5]), "seq_lens must be torch.int32, got torch.int64"),
        ("seq_lens", torch.zeros(2, 1, dtype=torch.int32), "seq_lens must have 1 dimension"),
        ("seq_lens", [3, 5], "seq_lens must be a torch.Tensor, got list"),
        ("table", torch.zeros(2, 4), "table must be torch.int32"),
        ("table", torch.zeros(8, dtype=torch.int32), "table must have 2 dimension"),
        ("page_size", 0, "page_size must be a positive int, got 0"),
        ("page_size", 4.0, "page_size must be a positive int, got 4.0"),
        ("page_size", True, "page_size must be a positive int, got True"),
        ("max_query_len", 0, "max_query_len must be a positive int, got 0"),
        ("shard", (0, 2, 1), r"shard must be a Shard, got \(0, 2, 1\)"),
        ("table_kind", "block", "must be a TableKind"),
        ("query_start_loc", torch.zeros(2, dtype=torch.int32), "batch . 1 = 3 entries, got 2"),
        ("query_start_loc", torch.zeros(3), "query_start_loc must be torch.int32"),
        ("table_rows", torch.tensor([0]), "batch = 2 entries, got 1"),
        ("table_rows", torch.tensor([0.0, 1.0]), "torch.int32 or torch.int64"),
        ("table", torch.zeros(2, 4, dtype=torch.int32, device="meta"), "table is on meta, seq_lens on cpu"),
        (
            "query_start_loc",
            torch.zeros(3, dtype=torch.int32, device="meta"),
            "query_start_loc is on meta, seq_lens on cpu",
        ),
        ("table_rows", torch.zeros(2, dtype=torch.int64, device="meta"), "table_rows is on meta, seq_lens"),
        ("seq_lens", torch.zeros(2, 2, dtype=torch.int32)[:, 0], r"seq_lens must be contiguous.*\(2,\)"),
        ("query_start_loc", torch.zeros(6, dtype=torch.int32)[::2], "query_start_loc must be contiguous"),
        ("table_rows", torch.zeros(4, dtype=torch.int32)[::2], "table_rows must be contiguous"),
        ("table", torch.zeros(4, 2, dtype=torch.int32).T, "last dimension of table must be contiguous"),
    ],
)
def test_check_refuses(field, value, message):
    with pytest.raises(InvalidInputError, match=message):
        dataclasses.replace(good_batch(), **{field: value}).check()


def test_check_refuses_too_few_table_rows():
    batch = dataclasses.replace(good_batch(), table=torch.zeros(1, 4, dtype=torch.int32), table_rows=None)
    with pytest.raises(InvalidInputError, match="1 rows for a batch of 2"):
        batch.check()


def test_a_single_element_may_have_any_stride():
    table = torch.zeros(9, 4, dtype=torch.int32)[::4]
    one = torch.ones(2, 2, dtype=torch.int32)[:1, 1]
    assert one.stride() != (1,)
    batch = DecodeBatch(one, table, page_size=2, query_start_loc=None, max_query_len=1, table_rows=one)
    batch.check()
