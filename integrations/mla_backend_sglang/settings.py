"""What the backend reads from SGLang's configuration, wherever the running version keeps it."""

from __future__ import annotations

from typing import Any


def is_deterministic() -> bool:
    """--enable-deterministic-inference, or a mode that implies it."""
    from sglang.srt import runtime_context

    if hasattr(runtime_context, "get_exec"):  # from 0.5.18; ServerArgs holds the raw input there
        return bool(runtime_context.get_exec().deterministic.enable_deterministic_inference)
    return bool(runtime_context.get_server_args().enable_deterministic_inference)


def speculation() -> Any:
    """An object with the ``speculative_*`` settings."""
    from sglang.srt import runtime_context

    if hasattr(runtime_context, "get_spec"):  # from 0.5.18
        return runtime_context.get_spec()
    return runtime_context.get_server_args()
