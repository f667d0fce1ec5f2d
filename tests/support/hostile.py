"""Batches whose tables, lists and lengths hold numbers that name nothing."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import torch
from torch import Tensor

from mla_backend.batch import TableKind
from tests.support.cases import Case

MOST, LEAST = 2**31 - 1, -(2**31)


def between_canaries(case: Case, rows: int = 9) -> Case:
    """With NaN in ``rows`` pages before the cache, and in as many behind it."""
    wide = case.cache.new_empty(len(case.cache) + 2 * rows, *case.cache.shape[1:])
    wide.view(torch.uint8).fill_(0xFF)  # NaN in every format
    wide[rows:-rows].view(torch.uint8).copy_(case.cache.view(torch.uint8))
    return replace(case, cache=wide[rows:-rows])


def with_hostile_entries(case: Case, draw: random.Random, requests: list[int], share: float = 0.3) -> Case:
    """With numbers outside of the cache in the rows of some requests, within their lengths and behind them.

    An entry of a token table may stand for the 64 tokens after it, as far as they are of one page. So all of
    them are changed.
    """
    batch, page = case.batch, case.batch.page_size
    pages = len(case.cache)
    of_blocks = case.lists is None and batch.table_kind is TableKind.BLOCK
    limit = pages if of_blocks else pages * page
    given = batch.table if case.lists is None else case.lists
    table = given.cpu().clone()
    group = math.gcd(page, 64) if case.lists is None and batch.table_kind is TableKind.TOKEN else 1
    for request in requests:
        row = request if batch.table_rows is None else int(batch.table_rows[request])
        for begin in range(0, table.shape[1], group):
            if draw.random() < share:
                numbers = [
                    -1,
                    -2,
                    limit,
                    limit + 7,
                    LEAST,
                    MOST,
                    draw.randint(limit, MOST),
                    -draw.randint(1, MOST),
                ]
                # Its product with the page size is, in 32 bits, a slot of the cache.
                numbers += [2**32 // page + 1] if of_blocks and page > 2 else []
                table[row, begin : begin + group] = draw.choice(numbers)
    table = table.to(given.device)
    if case.lists is not None:
        return replace(case, lists=table)
    return replace(case, batch=replace(batch, table=table))


def with_hostile_lengths(case: Case, draw: random.Random, requests: list[int]) -> Case:
    """With lengths below 0 and beyond the table, and rows that the table does not have."""
    batch = case.batch
    width = (batch.table if case.lists is None else case.lists).shape[1]
    longest = width * (batch.page_size if batch.table_kind is TableKind.BLOCK else 1)
    lengths, rows = batch.seq_lens.clone(), batch.table_rows
    rows = None if rows is None else rows.clone()
    effective = list(case.seq_lens)
    for request in requests:
        if rows is not None and draw.random() < 0.5:
            numbers = [
                -1,
                LEAST,
                len(batch.table),
                MOST,
                *([2**40, -(2**40)] if rows.dtype is torch.int64 else []),
            ]
            rows[request] = draw.choice(numbers)
            effective[request] = 0
        else:
            length = draw.choice([-1, LEAST, MOST, longest + 1, longest + draw.randint(1, 1000)])
            lengths[request] = length
            effective[request] = min(max(length, 0), longest)
    return replace(case, batch=replace(batch, seq_lens=lengths, table_rows=rows), seq_lens=effective)


def rows_of(case: Case, requests: list[int]) -> Tensor:
    """Which query tokens belong to some requests: bool [T]."""
    owners = torch.repeat_interleave(torch.arange(len(case.query_lens)), torch.tensor(case.query_lens))
    return torch.isin(owners, torch.tensor(requests, dtype=torch.long))
