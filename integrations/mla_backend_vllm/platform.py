"""How vLLM's platform comes to select this backend.

A named backend needs nothing here on a GPU. Two cases do: MLA_BACKEND_DEFAULT=1, where none is named, and the
CPU platform, which ignores --attention-backend for MLA models. For these the platform object gets a subclass
of its own class. Whatever does not select this backend is left to vLLM's code.
"""

from __future__ import annotations

from typing import Any

from mla_backend_vllm import (
    BACKEND_NAME,
    BACKEND_PATH,
    DEFAULT_VARIABLE,
    is_default,
    is_this_backend,
    logger,
)


class TakesUnnamed:
    """Mixed into vLLM's platform: MLA layers without a named backend get this one, if it can serve them."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        if selected_backend is None and is_default() and attn_selector_config.use_mla:
            reasons = _reasons_against(cls, attn_selector_config)
            if not reasons:
                logger.info("Using %s attention backend (%s=1).", BACKEND_NAME, DEFAULT_VARIABLE)
                return BACKEND_PATH
            logger.warning(
                "%s=1, but %s cannot serve these layers, vLLM chooses another backend: %s",
                DEFAULT_VARIABLE,
                BACKEND_NAME,
                "; ".join(reasons),
            )
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, *args, **kwargs)


class HonoursSelection(TakesUnnamed):
    """Mixed into vLLM's CPU platform, which ignores --attention-backend for MLA models."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        if not is_this_backend(selected_backend):
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, *args, **kwargs)
        reasons = _reasons_against(cls, attn_selector_config)
        if reasons:
            raise ValueError(
                f"Selected backend {selected_backend} is not valid for this configuration. Reason: {reasons}"
            )
        return BACKEND_PATH

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


def extend_selection(platform: Any) -> None:
    """Give vLLM's platform object a class that knows this backend, where that is needed; once."""
    base = type(platform)
    if issubclass(base, TakesUnnamed):
        return
    if platform.is_cpu():
        mixin = HonoursSelection
    elif platform.is_cuda() and is_default():
        mixin = TakesUnnamed
    else:
        return
    if not hasattr(base, "get_attn_backend_cls"):
        raise RuntimeError(f"vLLM's {base.__name__} does not select backends by get_attn_backend_cls")
    platform.__class__ = type(base.__name__, (mixin, base), {})


def _reasons_against(platform: Any, attn_selector_config: Any) -> list[str]:
    from mla_backend_vllm.backend import MLABackend

    return MLABackend.validate_configuration(
        device_capability=platform.get_device_capability(), **attn_selector_config._asdict()
    )
