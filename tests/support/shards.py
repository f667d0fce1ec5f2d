"""Requests divided among the ranks of a shard, each with a cache of its own; poison where nothing is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mla_backend.batch import DecodeBatch, Shard, TableKind
from tests.support.cases import GARBAGE


def owned_tokens(length: int, shard: Shard) -> list[int]:
    """The tokens of a request of ``length`` tokens that a rank has, in their order."""
    return [t for t in range(length) if t // shard.interleave % shard.size == shard.rank]


def shard_of(
    batch: DecodeBatch, latents: Sequence[Tensor], shard: Shard, seed: int = 0
) -> tuple[Tensor, DecodeBatch]:
    """What a rank has of a batch, on the batch's device.

    Args:
        batch: of the whole.
        latents: the keys of each request, [tokens, d_c + d_rope], or the bytes of those in e4m3.
        shard: with an interleave of 1 if the batch has token tables.
        seed: of the places of pages. Ranks that share token tables need the same one.

    Returns:
        the rank's cache, whose unused rows are NaN, and its batch, whose unused table entries are garbage.
    """
    generator = torch.Generator().manual_seed(seed)
    page, kind, size = batch.page_size, batch.table_kind, shard.size
    most = [len(owned_tokens(len(keys), replace(shard, rank=0))) for keys in latents]
    pages_of = [-(-tokens // page) for tokens in most]
    num_pages = sum(pages_of) + 3
    order = torch.randperm(num_pages, generator=generator)
    width = (max(pages_of, default=0) + 2) * (page * size if kind is TableKind.TOKEN else 1)
    latents, device = [keys.cpu() for keys in latents], batch.seq_lens.device
    table = torch.full((len(latents), width), GARBAGE, dtype=torch.int32)
    nan = 0xFF if latents[0].dtype is torch.uint8 else torch.nan
    cache = torch.full((num_pages, page, latents[0].shape[1]), nan, dtype=latents[0].dtype)
    for request, keys in enumerate(latents):
        pages = order[sum(pages_of[:request]) : sum(pages_of[: request + 1])]
        own = torch.tensor(owned_tokens(len(keys), shard), dtype=torch.long)
        place = torch.arange(len(own))
        cache[pages[place // page], place % page] = keys[own]
        if kind is TableKind.BLOCK:
            table[request, : len(pages)] = pages.int()
        else:
            tokens = torch.arange(len(keys))
            slots = pages[tokens // size // page] * page + tokens // size % page
            table[request, : len(keys)] = (slots * size + tokens % size).int()
    return cache.to(device), replace(batch, table=table.to(device), table_rows=None, shard=shard)
