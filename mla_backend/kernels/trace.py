"""Timestamps from inside a kernel (`csrc/decode/hopper/profile.cuh`) as a Chrome trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROLES = ("key loader", "consumer 0", "consumer 1", "transposing warp")
EVENTS = (
    "start",
    "table read",
    "loads issued",
    "queries arrived",
    "keys arrived",
    "scores",
    "softmax",
    "probabilities arrived",
    "values",
    "merged",
    "work tile written",
    "combined",
)
"""What a stamp marks the end of, in the order of `Event` in profile.cuh."""

_STAMPS = 512  # kProfileStamps


def stamp_buffer(num_ctas: int, device: torch.device) -> Tensor:
    """int64 [num_ctas, roles, stamps, 2]: the buffer that a profiling variant writes."""
    return torch.zeros(num_ctas, len(ROLES), _STAMPS, 2, dtype=torch.int64, device=device)


def chrome_trace(stamps: Tensor) -> dict[str, Any]:
    """The stamps of one launch as a trace, to be saved as JSON and opened in Perfetto or chrome://tracing.

    Args:
        stamps: a `stamp_buffer` that a launch has written.

    Returns:
        One process per CTA with one thread per role, and one slice per stamp, which begins at the previous
        stamp. A nanosecond of the trace is a clock cycle of the SM. The GPU's global timer gives the start of
        each CTA.
    """
    events: list[dict[str, Any]] = []
    rows = stamps.cpu().tolist()
    started = [role[0][1] for cta in rows for role in cta if role[0][0]]
    for cta, roles in enumerate(rows):
        for role, (head, *marks) in enumerate(roles):
            count, start_ns = head
            if not count:
                continue
            thread = {"pid": cta, "tid": role}
            events.append({"ph": "M", "name": "process_name", **thread, "args": {"name": f"CTA {cta}"}})
            events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": ROLES[role]}})
            origin = start_ns - min(started) - marks[0][1]
            for (_, begin), (event, end) in zip(marks, marks[1:count], strict=False):
                times = {"ts": (origin + begin) / 1000, "dur": (end - begin) / 1000}
                events.append({"ph": "X", "name": EVENTS[event], **thread, **times})
    return {"traceEvents": events, "displayTimeUnit": "ns"}
