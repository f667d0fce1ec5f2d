"""The backends of draft models: one for each decode step, and one for the extension after these steps."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.utils import is_cuda

from mla_backend_sglang.attention_backend import SglangMLABackend
from mla_backend_sglang.refusals import check_topk

logger = logging.getLogger(__name__)


class DraftDecodeBackend:
    """The decode steps of an EAGLE or MTP draft: one backend per step, all planned before the first step."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, topk: int, num_steps: int):
        check_topk(topk)
        self.topk = topk
        self.speculative_num_steps = num_steps
        # The last step needs no backend: the one before it drafts the last token.
        self.attn_backends = [SglangMLABackend(runner, draft_step=step) for step in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Do nothing: all planning happens on the device, inside the graph."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)


def extension_backend(runner: Any) -> SglangMLABackend:
    """A backend for a draft's extension over the verified tokens, which SGLang captures in CUDA graphs.

    SGLang captures extensions only for backends that are instances of the classes in a list, a local variable
    of ``EagleDraftWorker``. FlashMLA's class is in this list. Like all backends it is an abstract base class,
    so ours can be registered as its subclass without inheriting anything. SGLang tests for this class or its
    base nowhere else (a test of ours checks this).
    """
    backend = SglangMLABackend(runner)
    if is_cuda() and not _passes_for_flashmla(backend):
        logger.warning(
            "mla_backend: this version of SGLang captures no CUDA graphs of draft extensions for other "
            "backends than its own, which makes drafts slower"
        )
    return backend


def _passes_for_flashmla(backend: SglangMLABackend) -> bool:
    try:
        from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend

        FlashMLABackend.register(SglangMLABackend)
    except (ImportError, AttributeError):
        return False
    return isinstance(backend, FlashMLABackend)
