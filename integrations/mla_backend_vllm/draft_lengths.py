"""Corrects the lengths on the host of a draft model's batches, in which vLLM omits the sampled token.

vLLM appends the token that it has sampled to each query of a draft model, and counts it in all lengths except
``seq_lens_cpu_upper_bound`` (seen in 0.26, 0.29, 0.32 and 0.33). From that one, its metadata builders for MLA
compute how much context a prompt has. Uncorrected, a prompt would lose a token of its context, and a prompt
without context, next to one with context, would stop the engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def with_added_tokens(common_attn_metadata: Any, added: int | None = None) -> Any:
    """vLLM's metadata of a draft model's batch, whose lengths on the host also count the tokens added to it.

    Args:
        added: how many tokens were added to each request; by default, the number by which ``max_seq_len``
            exceeds the longest of the lengths on the host.
    """
    lengths = common_attn_metadata.seq_lens_cpu_upper_bound
    if lengths is None:
        return common_attn_metadata
    longest = common_attn_metadata.max_seq_len
    if added is None:
        added = longest - int(lengths.max())  # 0 if vLLM has counted the added tokens
    if added <= 0:
        return common_attn_metadata
    return dataclasses.replace(
        common_attn_metadata, seq_lens_cpu_upper_bound=(lengths + added).clamp(max=longest)
    )


def with_sampled_tokens(layer_names: list[str], common_attn_metadata: Any, fast_build: bool) -> Any:
    """`with_added_tokens` for a draft model of vLLM's Model Runner V2.

    That runner only calls `build`, and its ``max_seq_len`` is the model's limit. Only the draft model's first
    step has queries of more than one token, and only in this step is the sampled token not counted.

    Args:
        fast_build: the argument of `build`. Only Model Runner V1 sets it, through `build_for_drafting`, which
            has counted the token already.
    """
    if fast_build or not all(name.startswith("draft_model.") for name in layer_names):
        return common_attn_metadata
    is_first = int(common_attn_metadata.query_start_loc_cpu.diff().min()) > 1
    return with_added_tokens(common_attn_metadata, int(is_first))
