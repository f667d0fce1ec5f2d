"""The backends of the steps in which a draft model decodes."""

from __future__ import annotations

from typing import Any

from mla_backend_sglang.attention_backend import SglangMLABackend
from mla_backend_sglang.support import check_topk


class DraftDecodeBackend:
    """The decode steps of an EAGLE or MTP draft: one backend per step, all planned before the first step."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, topk: int, num_steps: int):
        check_topk(topk)
        self.topk = topk
        self.speculative_num_steps = num_steps
        # The step before the last one drafts the last token.
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
