"""What a batch's requests have in the latent cache."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_backend import DecodeBatch
from mla_backend.cache import select_rows, token_slots
from mla_backend.cache_format import dequantize


def gather(
    latent_cache: Tensor, batch: DecodeBatch, kv_scale: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """The latents here of all requests of a batch, one request after the other, dequantized.

    Returns:
        [sum(batch.shard.keys_of(seq_lens)), d_c + d_rope] in ``dtype``.
    """
    batch.check()
    kv_lens = batch.shard.keys_of(batch.seq_lens.long())
    requests = torch.repeat_interleave(torch.arange(batch.batch_size), kv_lens)
    starts = kv_lens.cumsum(0) - kv_lens
    slots = token_slots(batch, requests, torch.arange(len(requests)) - starts[requests])
    return dequantize(select_rows(latent_cache, slots), kv_scale, dtype=dtype)
