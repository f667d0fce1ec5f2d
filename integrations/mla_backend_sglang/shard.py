"""Decode context parallelism (``--dcp-size``): the ranks of a group divide the tokens of each request.

SGLang allocates slots for all ranks together: slot s is row ``s // size`` of the cache of rank ``s % size``,
and token t of a request has a slot with ``s % size == t % size``. It gathers the queries of a decode step
over the heads, and merges the outputs of the ranks by their log-sum-exp, to base 2.
"""

from __future__ import annotations

import math

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from mla_backend import cache
from mla_backend.batch import Shard
from mla_backend.cache_format import dequantize

LOG2_E = math.log2(math.e)
"""From an lse in natural logarithm to one that SGLang merges by."""


def current_shard() -> Shard:
    """This rank's shard of the cache."""
    parallel = get_parallel()
    return Shard(parallel.attn_dcp_rank, parallel.attn_dcp_size) if parallel.attn_dcp_size > 1 else Shard()


def rows_here(slots: Tensor, shard: Shard) -> Tensor:
    """Rows of this rank's cache for slots of all ranks; -1 for slots of other ranks."""
    return torch.where(slots % shard.size == shard.rank, slots // shard.size, -1)


def gather_rows(
    latent_cache: Tensor, slots: Tensor, shard: Shard, kv_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The latents in some slots, [n, d_c + d_rope], from the ranks that have them; all ranks must call this.

    Args:
        latent_cache: this rank's cache, [pages, page_size, d_c + d_rope].
        slots: int64 [n], slots of all ranks.
        shard: this rank's shard.
        kv_scale: the scale of the cache, if its format has one.
        dtype: of the result.
    """
    local_slots = slots if shard.size == 1 else slots // shard.size
    rows = dequantize(cache.select_rows(latent_cache, local_slots), kv_scale, dtype=dtype)
    if shard.size == 1:
        return rows
    # Only one rank adds a row that is not zero, so the sum is exact.
    rows.masked_fill_((slots % shard.size != shard.rank).unsqueeze(1), 0)
    return get_parallel().dcp_group.all_reduce(rows)
