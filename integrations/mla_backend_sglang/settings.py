"""The settings of SGLang that the backend reads, wherever the running version keeps them."""

from __future__ import annotations

from typing import Any

from sglang.srt import runtime_context
from sglang.srt.environ import envs


def is_deterministic() -> bool:
    """--enable-deterministic-inference, or a mode that implies it."""
    settings = _settings("get_exec")
    return bool(getattr(settings, "deterministic", settings).enable_deterministic_inference)


def is_chunked_prefix_disabled() -> bool:
    """--disable-chunked-prefix-cache: every request with a cached prefix uses absorbed attention.

    True only if the user set the option. SGLang also sets it if the target model's prefills run on a backend
    that it does not list, which does not matter to ours. 0.5.16 does not record who set it, so it counts.
    """
    option = "disable_chunked_prefix_cache"
    is_set = bool(getattr(_settings("get_schedule"), option))
    return is_set and not any(option in changed for _, changed in _changes_by_sglang())


def speculation() -> Any:
    """An object with the ``speculative_*`` settings."""
    return _settings("get_spec")


def plans_on_another_stream() -> bool:
    """SGLANG_ENABLE_OVERLAP_PLAN_STREAM: speculative decoding plans a step during the previous one."""
    return bool(envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get())


def verifies_fewer_drafts() -> bool:
    """SGLANG_RAGGED_VERIFY_MODE=compact: DSpark verifies a different number of drafts of each request."""
    return envs.SGLANG_RAGGED_VERIFY_MODE.get() == "compact"


def serves_one_phase() -> bool:
    """--disaggregation-mode: prefills run on one server, and decode steps on another."""
    return _settings("get_disagg").disaggregation_mode != "null"


def multiplexes_prefill() -> bool:
    """--enable-pdmux: prefill and decode share the GPU, each on a part of its multiprocessors."""
    return bool(_settings("get_disagg").enable_pdmux)


def offloads_weights() -> bool:
    """--cpu-offload-gb or --offload-group-size: some parameters are not on the GPU."""
    settings = _settings("get_exec")
    settings = getattr(settings, "offload", settings)
    return settings.cpu_offload_gb > 0 or settings.offload_group_size > 0


def _settings(getter: str) -> Any:
    """The settings after SGLang's own choices: a group of them, or all of ``ServerArgs`` in 0.5.16.

    In later versions ``ServerArgs`` keeps the user's own values.
    """
    return getattr(runtime_context, getter, runtime_context.get_server_args)()


def _changes_by_sglang() -> list[tuple[str, dict[str, Any]]]:
    """SGLang's own changes of its settings since the start: who made each change, and the new values."""
    log = getattr(runtime_context.get_context(), "overrides_log", None)  # not in 0.5.16
    return [] if log is None else log()
