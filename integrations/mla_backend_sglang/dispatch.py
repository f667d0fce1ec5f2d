"""Chooses which of the model's attention forwards a batch uses. All requests of a batch use the same one."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
    is_in_tc_piecewise_cuda_graph,
)
from sglang.srt.models.deepseek_common.attention_backend_handler import AttnForwardMethod

from mla_backend_sglang.settings import Settings


def choose_forward_method(attention: Any, forward_batch: Any) -> AttnForwardMethod:
    """Choose MHA for a prefill batch, and the absorbed forward for everything else.

    The MHA forward makes one attention call, with queries and new keys per head. The cache already holds the
    new latents then. Every method can work with these inputs, so the backend chooses one for each request
    (see :mod:`mla_backend_sglang.prefill_step`), and a request's path does not depend on the other requests.

    Some prefills use the absorbed forward nevertheless:

    - while SGLang captures a prefill. Such a graph is never replayed (see `registration`),
    - in deterministic inference, where a key must have the same effect whichever chunk it came with,
    - in layers whose ``kv_b_proj`` has LoRA adapters. SGLang knows the adapter of each new token, and
      corrects absorbed queries and outputs for it. It does not know the adapters of cached tokens, which it
      would need to expand them.
    """
    if (
        forward_batch.forward_mode.is_extend_without_speculative()
        and not is_in_tc_piecewise_cuda_graph()
        and not is_in_breakable_cuda_graph()
        and not Settings().is_deterministic
        and not hasattr(attention.kv_b_proj, "set_lora")
    ):
        return AttnForwardMethod.MHA
    return AttnForwardMethod.MLA
