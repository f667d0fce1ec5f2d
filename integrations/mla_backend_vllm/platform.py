"""Selecting the backend on vLLM's CPU platform, which ignores --attention-backend for MLA models."""

from __future__ import annotations

from typing import Any

from mla_backend_vllm import BACKEND_PATH, is_default, is_this_backend


class HonoursSelection:
    """Mixed into vLLM's CPU platform. Who does not select this backend gets the platform's own behaviour."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        by_default = selected_backend is None and is_default() and attn_selector_config.use_mla
        if not (by_default or is_this_backend(selected_backend)):
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, *args, **kwargs)
        from mla_backend_vllm.backend import MLABackend

        reasons = MLABackend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if not reasons:
            return BACKEND_PATH
        if by_default:
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, *args, **kwargs)
        raise ValueError(
            f"Selected backend {selected_backend} is not valid for this configuration. Reason: {reasons}"
        )

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunked_prefill, max_tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefix_caching, block_size = cache.enable_prefix_caching, cache.block_size
        super().check_and_update_config(vllm_config)
        if not is_this_backend(vllm_config.attention_config.backend):
            return
        # Without AMX the platform fits the configuration to the limits of its own CPU_MLA kernels: pages of
        # 16 tokens, neither chunked prefill nor prefix caching. They are not ours.
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked_prefill, max_tokens
        cache.enable_prefix_caching = prefix_caching
        if cache.user_specified_block_size:
            cache.block_size = block_size


def honour_selection_on_cpu() -> None:
    """Give vLLM's platform object, if it is the CPU's, a class that knows this backend."""
    from vllm.platforms import current_platform

    base = type(current_platform)
    if current_platform.is_cpu() and not issubclass(base, HonoursSelection):
        current_platform.__class__ = type(base.__name__, (HonoursSelection, base), {})
