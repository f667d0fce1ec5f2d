"""mla-backend for vLLM: `register` is its ``vllm.general_plugins`` entry point.

vLLM calls `register` in every process that it starts (API server, engine core, workers), sometimes twice, and
before a worker has chosen its GPU. `register` therefore writes class paths into vLLM's registries, and one
class, for which it imports vLLM's layers. Nothing here imports or builds a kernel, or touches CUDA.
"""

from __future__ import annotations

import logging
from typing import Any

BACKEND_NAME = "MLA_BACKEND"
BACKEND_PATH = "mla_backend_vllm.backend.VllmMLABackend"
SPARSE_PATH = "mla_backend_vllm.sparse.SparseBackend"
PREFILL_PATH = "mla_backend_vllm.prefill_backend.MLAPrefill"
DEFAULT_VARIABLE = "MLA_BACKEND_DEFAULT"
AROUND_ATTENTION_VARIABLE = "MLA_BACKEND_AROUND_ATTENTION"

PREFERRED_PAGE_SIZE = 64
"""On a GPU, and on the CPU from vLLM 0.33 on; before, its CPU platform had its own default."""

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM prints only the logs below its own name


def is_default() -> bool:
    """Whether MLA_BACKEND_DEFAULT=1 selects this backend for MLA layers if the user names none.

    Raises:
        InvalidInputError: the variable is neither 0 nor 1.
    """
    from mla_backend import settings

    return settings.is_on(DEFAULT_VARIABLE)


def launches_around_attention() -> bool:
    """Whether MLA_BACKEND_AROUND_ATTENTION leaves `mla_backend_vllm.fused_append` and `head_products` on.

    Raises:
        InvalidInputError: the variable is neither 0 nor 1.
    """
    from mla_backend import settings

    return settings.is_on(AROUND_ATTENTION_VARIABLE)


def is_this_backend(selected: Any) -> bool:
    """Whether a member of vLLM's AttentionBackendEnum (or None) stands for this backend."""
    return selected is not None and selected.is_overridden() and selected.get_path() == BACKEND_PATH


def register() -> None:
    """Register the backend with vLLM: as MLA_BACKEND, or as CUSTOM if this vLLM accepts no new names.

    Never raises, because a plugin that raises keeps vLLM from starting any model. A failure is logged as one
    warning.
    """
    try:
        _register()
    except Exception as error:
        logger.warning(
            "mla-backend could not register with this vLLM and is not available: %s: %s. "
            "Other attention backends work as before.",
            type(error).__name__,
            error,
        )


def _register() -> None:
    from vllm.platforms import current_platform

    from mla_backend_vllm.platform import extend_selection

    registries = {kind: _registry(kind) for kind in ("attention", "prefill")}
    for kind, (backend_enum, register_path, path) in registries.items():
        if _accepts_names(backend_enum):
            _register_name(kind)
        else:
            _register_custom(backend_enum, register_path, path)
    extend_selection(current_platform)
    _log_through_vllm()
    if current_platform.is_cuda() or current_platform.is_cpu():
        _replace_wrapper()


def _replace_wrapper() -> None:
    """Have one launch normalize, rotate and append new tokens, if this vLLM has what it takes."""
    try:
        if launches_around_attention():
            from mla_backend_vllm.fused_append import replace_wrapper

            replace_wrapper()
    except Exception as error:
        logger.warning(
            "mla-backend leaves norm, rotation and append of new tokens to this vLLM's kernels: %s: %s",
            type(error).__name__,
            error,
        )


def selection_name() -> str:
    """The name for --attention-backend: MLA_BACKEND, or CUSTOM if this vLLM accepts no new names."""
    return _member_name("attention")


def prefill_member() -> Any:
    """The member of vLLM's MLAPrefillBackendEnum under which our prefill backend is registered."""
    return _registry("prefill")[0][_member_name("prefill")]


def describe() -> list[str]:
    """For `mla-backend doctor`: when vLLM uses this backend here."""
    otherwise = f"not used ({DEFAULT_VARIABLE}=1 changes that)"
    unnamed = "used for MLA layers that it can serve" if is_default() else otherwise
    return [f"selected with --attention-backend {selection_name()}; without that option {unnamed}"]


def _registry(kind: str) -> tuple[Any, Any, str]:
    """vLLM's enum of "attention" or "prefill" backends, the function that registers one, our path."""
    if kind == "attention":
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        return AttentionBackendEnum, register_backend, BACKEND_PATH
    from vllm.v1.attention.backends.mla.prefill.registry import (
        MLAPrefillBackendEnum,
        register_mla_prefill_backend,
    )

    return MLAPrefillBackendEnum, register_mla_prefill_backend, PREFILL_PATH


def _accepts_names(backend_enum: Any) -> bool:
    return hasattr(backend_enum, "register")


def _member_name(kind: str) -> str:
    return BACKEND_NAME if _accepts_names(_registry(kind)[0]) else "CUSTOM"


def _register_name(kind: str) -> Any:
    backend_enum, register_path, path = _registry(kind)
    if BACKEND_NAME not in backend_enum.__members__:
        register_path(BACKEND_NAME, path)
        # A spawned engine process unpickles its configuration before it loads plugins. The member does not
        # exist there yet, so unpickling has to add it.
        backend_enum[BACKEND_NAME].__reduce_ex__ = lambda protocol: (_register_name, (kind,))
    return backend_enum[BACKEND_NAME]


def _register_custom(backend_enum: Any, register_path: Any, path: str) -> None:
    """Register as CUSTOM, vLLM's only name for external backends, unless another plugin holds it."""
    custom = backend_enum.CUSTOM
    if not custom.is_overridden():
        register_path(custom, path)
    elif custom.get_path() != path:
        logger.warning(
            "mla-backend leaves %s.CUSTOM to %s, which another plugin registered. To use mla-backend, load "
            "only this plugin (VLLM_PLUGINS=mla_backend), or install vLLM 0.32 or later, which accepts new "
            "names.",
            backend_enum.__name__,
            custom.get_path(),
        )


class _ForwardToVllm(logging.Handler):
    """Forwards records to vLLM's logger, which vLLM may configure only after it has loaded plugins."""

    def emit(self, record: logging.LogRecord) -> None:
        target = logging.getLogger("vllm")
        if target.isEnabledFor(record.levelno):
            target.handle(record)


def _log_through_vllm() -> None:
    """Make the library's own records, such as "building 4 kernels", appear in vLLM's log."""
    library = logging.getLogger("mla_backend")
    if not any(isinstance(handler, _ForwardToVllm) for handler in library.handlers):
        library.addHandler(_ForwardToVllm())
        library.setLevel(logging.DEBUG)  # vLLM's level decides
        library.propagate = False
