"""How vLLM's platform comes to select this backend.

On a GPU, vLLM needs no help to select a backend that the user names. Three cases need help: layers with
sparse attention, which use another class under the same name; MLA_BACKEND_DEFAULT=1, where the user names no
backend; and the CPU platform, which ignores --attention-backend for MLA models. So the class of the platform
object is replaced by a subclass, which runs vLLM's code unless it selects this backend. If the user names
this backend, the subclass also refuses at the start what the configuration shows to be unsupported.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mla_backend_vllm import (
    BACKEND_NAME,
    BACKEND_PATH,
    DEFAULT_VARIABLE,
    SPARSE_PATH,
    is_default,
    is_this_backend,
    logger,
    selection_name,
)

if TYPE_CHECKING:  # stands for the class of the platform object, with which the mixins are combined
    from vllm.platforms.interface import Platform
else:
    Platform = object


class GpuSelection(Platform):
    """A mixin for vLLM's platform: selects this backend for sparse layers if the user names it, and for all
    MLA layers if the user names no backend and MLA_BACKEND_DEFAULT=1."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        if attn_selector_config.use_mla and _is_custom_of_nobody(selected_backend):
            _warn_of_custom()
        if is_this_backend(selected_backend) and attn_selector_config.use_sparse:
            return _path_or_error(cls, selected_backend, attn_selector_config)
        if selected_backend is None and attn_selector_config.use_mla and is_default():
            reasons = _reasons_against(cls, attn_selector_config)
            if not reasons:
                logger.info("Using %s attention backend (%s=1).", BACKEND_NAME, DEFAULT_VARIABLE)
                return _path_for(attn_selector_config)
            logger.warning(
                "%s=1, but %s cannot serve these layers, so vLLM chooses another backend: %s",
                DEFAULT_VARIABLE,
                BACKEND_NAME,
                "; ".join(reasons),
            )
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, *args, **kwargs)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        if is_this_backend(_named_for_mla(vllm_config)):
            from mla_backend_vllm.refusals import refuse_at_start  # imports vLLM's layers

            refuse_at_start(cls, vllm_config)
        super().check_and_update_config(vllm_config)


class CpuSelection(GpuSelection):
    """A mixin for vLLM's CPU platform: also selects this backend for MLA layers if the user names it."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        if not is_this_backend(selected_backend):
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, *args, **kwargs)
        return _path_or_error(cls, selected_backend, attn_selector_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunked_prefill, max_tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefix_caching, block_size = cache.enable_prefix_caching, cache.block_size
        super().check_and_update_config(vllm_config)
        if not _will_be_selected(vllm_config):
            return
        # Eager engines use vLLM's rotary op for CPUs, which rotates MLA models without YaRN wrongly (seen in
        # 0.32). Its implementation in torch is right.
        custom_ops = vllm_config.compilation_config.custom_ops
        if "+rotary_embedding" not in custom_ops and "-rotary_embedding" not in custom_ops:
            custom_ops.append("-rotary_embedding")
        # On a CPU without AMX, vLLM adapts the configuration to the limits of its own CPU_MLA kernels: pages
        # of 16 tokens, no chunked prefill, no prefix caching. This backend does not have those limits.
        kept = []
        if cache.user_specified_block_size and cache.block_size != block_size:
            kept.append(f"pages of {block_size} tokens")
            cache.block_size = block_size
        if scheduler.enable_chunked_prefill != chunked_prefill:
            kept.append("chunked prefill")
            scheduler.enable_chunked_prefill = chunked_prefill
        scheduler.max_num_batched_tokens = max_tokens
        if cache.enable_prefix_caching != prefix_caching:
            kept.append("prefix caching")
            cache.enable_prefix_caching = prefix_caching
        if kept:
            logger.info(
                "%s keeps as configured what vLLM has overridden for its own CPU MLA backend: %s",
                BACKEND_NAME,
                ", ".join(kept),
            )


def _named_for_mla(vllm_config: Any) -> Any:
    """The backend that the user names for MLA layers, in either of vLLM's ways, or None."""
    options = vllm_config.attention_config
    per_kind = getattr(options, "backend_per_kind", None) or {}
    return per_kind.get("mla_attention", options.backend)


def _will_be_selected(vllm_config: Any) -> bool:
    """Whether this backend is named for MLA layers, or chosen without a name."""
    named = _named_for_mla(vllm_config)
    model = vllm_config.model_config
    return is_this_backend(named) or (named is None and model is not None and model.use_mla and is_default())


def extend_selection(platform: Any) -> None:
    """Give vLLM's platform object a class that can select this backend, if it does not have one yet."""
    base = type(platform)
    if issubclass(base, GpuSelection):
        return
    mixin: type[GpuSelection]
    if platform.is_cpu():
        mixin = CpuSelection
    elif platform.is_cuda():
        mixin = GpuSelection
    else:
        return
    if not hasattr(base, "get_attn_backend_cls"):
        raise RuntimeError(f"vLLM's {base.__name__} does not select backends with get_attn_backend_cls")
    platform.__class__ = type(base.__name__, (mixin, base), {})


def _is_custom_of_nobody(selected_backend: Any) -> bool:
    """Whether the user names CUSTOM, as for older versions of vLLM, and no plugin has registered it."""
    if selected_backend is None or selected_backend.name != "CUSTOM" or selected_backend.is_overridden():
        return False
    return selection_name() != "CUSTOM"


@functools.cache
def _warn_of_custom() -> None:
    logger.warning(
        "--attention-backend CUSTOM selects no backend here: mla-backend is %s in this vLLM", BACKEND_NAME
    )


def _path_for(attn_selector_config: Any) -> str:
    return SPARSE_PATH if attn_selector_config.use_sparse else BACKEND_PATH


def _path_or_error(platform: Any, selected_backend: Any, attn_selector_config: Any) -> str:
    reasons = _reasons_against(platform, attn_selector_config)
    if reasons:
        raise ValueError(
            f"Selected backend {selected_backend} is not valid for this configuration. Reason: {reasons}"
        )
    return _path_for(attn_selector_config)


def _reasons_against(platform: Any, attn_selector_config: Any) -> list[str]:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    backend = resolve_obj_by_qualname(_path_for(attn_selector_config))
    return backend.validate_configuration(
        device_capability=platform.get_device_capability(), **attn_selector_config._asdict()
    )
