"""Decode context parallelism (DCP): which keys a rank has."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.distributed.parallel_state import get_dcp_group

from mla_backend import Shard
from mla_backend.batch import WHOLE
from mla_backend_vllm.refusals import reasons_against_shard, refuse


def shard_of(vllm_config: Any, impl: Any, page_size: int) -> Shard:
    """This rank's shard of the cache of a layer whose attention is ``impl``.

    Raises:
        UnsupportedError: the ranks cannot divide this cache.
    """
    size = _group_size()
    if size == 1:
        return WHOLE
    refuse(reasons_against_shard(vllm_config, impl, size, page_size))
    interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
    return Shard(get_dcp_group().rank_in_group, size, interleave)


def _group_size() -> int:
    """The number of ranks that divide the cache.

    vLLM's configuration of a draft model may not say so (seen in 0.33).
    """
    try:
        size: int = get_dcp_group().world_size
    except AssertionError:  # vLLM has made no groups, as in tests
        return 1
    return size


def with_lengths_of(shard: Shard, common_attn_metadata: Any) -> Any:
    """vLLM's metadata of a batch, with the numbers of keys that lie on this rank.

    Dummy runs of vLLM's Model Runner V2, such as those that tune FlashInfer at start, omit these numbers, and
    vLLM's metadata builder for MLA then fails (seen in 0.26).
    """
    if shard is WHOLE or common_attn_metadata.dcp_local_seq_lens is not None:
        return common_attn_metadata
    lengths = shard.keys_of(common_attn_metadata.seq_lens)
    return dataclasses.replace(common_attn_metadata, dcp_local_seq_lens=lengths)
