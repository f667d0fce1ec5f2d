"""Decode context parallelism (DCP): which keys a rank has, and between which servers caches may move."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.parallel_state import get_dcp_group

from mla_backend import Shard, UnsupportedError
from mla_backend.batch import WHOLE

KNOW_SHARDS = ("OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector")
"""vLLM's connectors, beside those of NIXL, that tell the ranks' parts of a page from each other."""

BENCHMARKS_KNOWING_SHARDS = ("DecodeBenchConnector",)
"""Likewise, but they fill the cache with made-up values, so no message advises them."""


def divides_cache() -> bool:
    """Whether the engine that vLLM is configuring has decode context parallelism."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.parallel_config.decode_context_parallel_size > 1


def shard_of(vllm_config: Any, impl: Any, page_size: int) -> Shard:
    """This rank's shard of the cache of a layer whose attention is ``impl``.

    To move caches between servers, vLLM pairs pages as if each rank had whole pages of a text, and does not
    compare the servers' interleaves. For `NixlConnector` it sets the interleave to a page, unless the user
    sets it.
    """
    size = _group_size()
    interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
    if size == 1:
        return WHOLE
    if impl.dcp_world_size == 1:  # the draft model of vLLM's Model Runner V2 (seen in 0.32 and 0.33)
        raise UnsupportedError(
            f"vLLM's Model Runner V2 divides the model's cache among {size} ranks, but not that of its "
            "draft model: leave out --decode-context-parallel-size, or set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    # Checked only when the connector exists: before that, vLLM may build metadata to measure CUDA graphs, and
    # has not set the interleave yet.
    uses_nixl = any(name.startswith("Nixl") for name in connectors_of(vllm_config))
    if uses_nixl and has_kv_transfer_group() and interleave != page_size:
        raise UnsupportedError(
            f"with decode context parallelism, NIXL transfers whole pages of {page_size} tokens, but "
            f"--cp-kv-cache-interleave-size is {interleave}, and another server would read the wrong tokens: "
            f"set --cp-kv-cache-interleave-size to {page_size} on all servers"
        )
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


def connectors_of(vllm_config: Any) -> list[str]:
    """The names of the connectors that move the cache to other servers or memories."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return []
    return list(_names_of(transfer.kv_connector, transfer.kv_connector_extra_config))


def _names_of(connector: str | None, extra_config: dict[str, Any]) -> Iterator[str]:
    if connector == "MultiConnector":
        for inner in extra_config.get("connectors", ()):
            yield from _names_of(inner.get("kv_connector"), inner.get("kv_connector_extra_config") or {})
    elif connector is not None:
        yield connector


def reason_against_connector(vllm_config: Any) -> str | None:
    """Why the configured connectors cannot move the cache among ranks that divide it; None if they can.

    A connector that does not know that ranks divide the cache would give some ranks the tokens of others.
    """
    if vllm_config.parallel_config.decode_context_parallel_size == 1:
        return None
    remedy = "leave out --decode-context-parallel-size"
    for name in connectors_of(vllm_config):
        if name.startswith("Nixl"):
            from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

            if "dcp_size" not in NixlAgentMetadata.__dataclass_fields__:
                return (
                    f"the {name} of this vLLM does not see how many ranks divide the cache of the other "
                    f"server: {remedy}, or use vLLM 0.29 or later"
                )
        elif name not in (*KNOW_SHARDS, *BENCHMARKS_KNOWING_SHARDS):
            known = ", ".join(("NixlConnector", *KNOW_SHARDS))
            return f"{name} does not see that ranks divide the cache: {remedy}, or use one of {known}"
    return None


def with_lengths_of(shard: Shard, common_attn_metadata: Any) -> Any:
    """vLLM's metadata of a batch, with the numbers of keys that lie on this rank.

    Dummy runs of vLLM's Model Runner V2, such as those that tune FlashInfer at start, omit these numbers, and
    vLLM's metadata builder for MLA then fails (seen in 0.26).
    """
    if shard is WHOLE or common_attn_metadata.dcp_local_seq_lens is not None:
        return common_attn_metadata
    lengths = shard.keys_of(common_attn_metadata.seq_lens)
    return dataclasses.replace(common_attn_metadata, dcp_local_seq_lens=lengths)
