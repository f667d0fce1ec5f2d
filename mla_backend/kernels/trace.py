"""Timestamps from inside a kernel (`csrc/common/profile.cuh`) as a Chrome trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROLES = ("key loader", "consumer 0", "consumer 1")
EVENTS = (
    "start",
    "table read",
    "loads issued",
    "queries arrived",
    "keys arrived",
    "scores",
    "softmax",
    "values",
    "merged",
    "work tile written",
    "combined",
)
"""What each stamp ends, in the order of `Event` in profile.cuh."""

_STAMPS = 512  # kProfileStamps


def stamp_buffer(num_ctas: int, device: torch.device) -> Tensor:
    """int64 [num_ctas, roles, stamps, 2], what `decode` of a profiling variant takes as ``profile``."""
    return torch.zeros(num_ctas, len(ROLES), _STAMPS, 2, dtype=torch.int64, device=device)


def chrome_trace(stamps: Tensor) -> dict[str, Any]:
    """The stamps of one launch, to be saved as JSON and opened in Perfetto or chrome://tracing.

    Args:
        stamps: what a launch left in a `stamp_buffer`.

    Returns:
        A process per CTA with a thread per role; a slice per stage, from the stamp before it to its own. A
        nanosecond of the trace is a clock cycle of the SM; CTAs are set off by the GPU's global timer.
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
