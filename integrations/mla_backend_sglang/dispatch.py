"""Chooses which of the model's attention forwards a batch uses. All requests of a batch use the same one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.models.deepseek_common.attention_backend_handler import AttnForwardMethod

from mla_backend_sglang import hooks
from mla_backend_sglang.settings import Settings

logger = logging.getLogger(__name__)

_EXECUTOR = "sglang.srt.model_executor"
_CAPTURES = (
    f"{_EXECUTOR}.runner_backend_utils.tc_piecewise_cuda_graph.is_in_tc_piecewise_cuda_graph",
    f"{_EXECUTOR}.runner_backend_utils.breakable_cuda_graph.is_in_breakable_cuda_graph",
    f"{_EXECUTOR}.runner_utils.prefill_graph.is_in_full_prefill_graph",  # from 0.5.23 on
)
"""Functions that tell whether SGLang captures a prefill, in graphs of a kind each."""


def _find_captures() -> list[Callable[[], bool]]:
    """Those of the functions that this version of SGLang has."""
    found = [function for name in _CAPTURES if (function := hooks.resolve(name)) is not None]
    if not found:
        logger.warning(
            "mla_backend: this version of SGLang does not tell whether it captures a prefill; if it fails to "
            "capture one, use --cuda-graph-backend-prefill disabled"
        )
    return found


# Not in each call: torch.compile traces the calls.
_is_captured = _find_captures()


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
        and not any(is_in_graph() for is_in_graph in _is_captured)
        and not Settings().is_deterministic
        and not hasattr(attention.kv_b_proj, "set_lora")
    ):
        return AttnForwardMethod.MHA
    return AttnForwardMethod.MLA
