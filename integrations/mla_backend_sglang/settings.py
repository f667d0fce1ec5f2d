"""What the backend reads from SGLang's configuration, wherever the running version keeps it."""

from __future__ import annotations

from typing import Any

from sglang.srt import runtime_context


def is_deterministic() -> bool:
    """--enable-deterministic-inference, or a mode that implies it."""
    settings = _settings("get_exec")
    return bool(getattr(settings, "deterministic", settings).enable_deterministic_inference)


def is_chunked_prefix_disabled() -> bool:
    """--disable-chunked-prefix-cache: cached tokens are only to be attended to absorbed."""
    return bool(_settings("get_schedule").disable_chunked_prefix_cache)


def are_weights_shared() -> bool:
    """Whether other servers may read this one's parameters at the addresses that they were loaded to.

    So it is with --load-format remote_instance, whatever its transport, and with its seeds; and with
    --weight-cache-mode (from 0.5.23), where parameters are a daemon's.
    """
    settings = _settings("get_model")
    return bool(
        settings.remote_instance_weight_loader_start_seed_via_transfer_engine
        or settings.load_format == "remote_instance"
        or getattr(settings, "weight_cache_mode", "off") != "off"
    )


def speculation() -> Any:
    """An object with the ``speculative_*`` settings."""
    return _settings("get_spec")


def _settings(getter: str) -> Any:
    """A group of settings, or ServerArgs in 0.5.16. Later, ServerArgs holds what was asked for."""
    return getattr(runtime_context, getter, runtime_context.get_server_args)()
