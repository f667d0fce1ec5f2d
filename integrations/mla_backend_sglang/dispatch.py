"""Which of the model's attention forwards a batch takes. SGLang allows one for all of its requests."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import is_in_breakable_cuda_graph
from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph import (
    is_in_tc_piecewise_cuda_graph,
)
from sglang.srt.models.deepseek_common.attention_backend_handler import AttnForwardMethod

from mla_backend_sglang.settings import is_deterministic


def choose_forward_method(attention: Any, forward_batch: Any) -> AttnForwardMethod:
    """MHA for every prefill batch, absorbed for everything else.

    The one attention call of MHA hands the backend all that any method needs: queries and new keys per head,
    and the latents, which are in the cache by then. So the backend can choose for each request on its own
    (see :mod:`mla_backend_sglang.prefill`), and a request's path does not depend on the others.

    Absorbed, as decode is, are also

    - a prefill inside a captured graph, which fixes one path for good,
    - deterministic inference, in which a key must count the same whichever chunk brought it,
    - layers whose ``kv_b_proj`` has LoRA adapters. SGLang knows the adapter of each new token and corrects
      absorbed queries and outputs for it; it does not know that of a cached token which is to be expanded.
    """
    if (
        forward_batch.forward_mode.is_extend_without_speculative()
        and not is_in_tc_piecewise_cuda_graph()
        and not is_in_breakable_cuda_graph()
        and not is_deterministic()
        and not hasattr(attention.kv_b_proj, "set_lora")
    ):
        return AttnForwardMethod.MHA
    return AttnForwardMethod.MLA
