"""The settings of SGLang that the backend reads, wherever the running version keeps them."""

from __future__ import annotations

from typing import Any

from sglang.srt import runtime_context
from sglang.srt.environ import envs


class Settings:
    """An engine's settings after SGLang's own choices. They are read anew with each access.

    Args:
        resolved: all settings of an engine that has not started yet; None for the engine of this process.
    """

    def __init__(self, resolved: Any = None):
        self._resolved = resolved

    @property
    def is_deterministic(self) -> bool:
        """--enable-deterministic-inference, or a mode that implies it."""
        group = self._group("get_exec")
        return bool(getattr(group, "deterministic", group).enable_deterministic_inference)

    @property
    def is_chunked_prefix_disabled(self) -> bool:
        """--disable-chunked-prefix-cache: every request with a cached prefix uses absorbed attention.

        True only if the user set the option. Workers of SGLang also set it if the target model's prefills run
        on a backend that it does not list, which does not matter to ours. 0.5.16 does not record who set it,
        so it counts.
        """
        option = "disable_chunked_prefix_cache"
        is_set = bool(getattr(self._group("get_schedule"), option))
        if self._resolved is not None:
            return is_set
        return is_set and not any(option in changed for _, changed in _changes_by_sglang())

    @property
    def speculation(self) -> Any:
        """An object with the ``speculative_*`` settings."""
        return self._group("get_spec")

    @property
    def serves_one_phase(self) -> bool:
        """--disaggregation-mode: prefills run on one server, and decode steps on another."""
        return self._group("get_disagg").disaggregation_mode != "null"

    @property
    def multiplexes_prefill(self) -> bool:
        """--enable-pdmux: prefill and decode share the GPU, each on a part of its multiprocessors."""
        return bool(self._group("get_disagg").enable_pdmux)

    @property
    def offloads_weights(self) -> bool:
        """--cpu-offload-gb or --offload-group-size: some parameters are not on the GPU."""
        group = self._group("get_exec")
        group = getattr(group, "offload", group)
        return group.cpu_offload_gb > 0 or group.offload_group_size > 0

    @property
    def prefill_ranks(self) -> int:
        """The number of GPUs over which a prefill's tokens are split (--attn-cp-size)."""
        return self._group("get_parallel").attn_cp_size or 1

    @property
    def cache_ranks(self) -> int:
        """The number of GPUs that divide a request's cache (--dcp-size)."""
        group = self._group("get_parallel")
        return getattr(group, "attn_dcp_size", None) or getattr(group, "dcp_size", None) or 1

    @property
    def replicates_queries(self) -> bool:
        """--dcp-replicate-q-proj, from 0.5.23 on."""
        return bool(getattr(self._group("get_parallel"), "dcp_replicate_q_proj", False))

    def _group(self, getter: str) -> Any:
        """A group of the settings, or all of them: before the start, and in 0.5.16.

        In later versions ``ServerArgs`` keeps the user's own values.
        """
        if self._resolved is not None:
            return self._resolved
        return getattr(runtime_context, getter, runtime_context.get_server_args)()


def plans_on_another_stream() -> bool:
    """SGLANG_ENABLE_OVERLAP_PLAN_STREAM: speculative decoding plans a step during the previous one."""
    return bool(envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get())


def verifies_fewer_drafts() -> bool:
    """SGLANG_RAGGED_VERIFY_MODE=compact: DSpark verifies a different number of drafts of each request."""
    return envs.SGLANG_RAGGED_VERIFY_MODE.get() == "compact"


def _changes_by_sglang() -> list[tuple[str, dict[str, Any]]]:
    """SGLang's own changes of its settings since the start: who made each change, and the new values."""
    log = getattr(runtime_context.get_context(), "overrides_log", None)  # not in 0.5.16
    return [] if log is None else log()
