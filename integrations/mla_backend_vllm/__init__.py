"""mla-backend for vLLM: `register` is its ``vllm.general_plugins`` entry point.

vLLM calls `register` in every process it starts (API server, engine core, workers), sometimes twice, and
before a worker has chosen its GPU. It therefore only writes class paths into vLLM's registries: nothing here
imports a kernel, builds one, or touches CUDA.
"""

from __future__ import annotations

import logging
import os
from typing import Any

BACKEND_NAME = "MLA_BACKEND"
BACKEND_PATH = "mla_backend_vllm.backend.MLABackend"
PREFILL_PATH = "mla_backend_vllm.prefill.MLAPrefill"
DEFAULT_VARIABLE = "MLA_BACKEND_DEFAULT"

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM prints the logs below its own name only


def is_default() -> bool:
    """Whether the user asked (MLA_BACKEND_DEFAULT=1) for this backend wherever no other is named."""
    return os.environ.get(DEFAULT_VARIABLE) == "1"


def is_this_backend(selected: Any) -> bool:
    """Whether a member of vLLM's AttentionBackendEnum (or None) stands for this backend."""
    return selected is not None and selected.is_overridden() and selected.get_path() == BACKEND_PATH


def register() -> None:
    """Make the backend known to vLLM: as MLA_BACKEND, or as CUSTOM where vLLM takes no names.

    Never raises: vLLM starts no model at all if a plugin does. What fails is logged in one warning.
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
        if _takes_names(backend_enum):
            _register_name(kind)
        else:
            _register_custom(backend_enum, register_path, path)
    extend_selection(current_platform)
    _log_through_vllm()


def selection_name() -> str:
    """The --attention-backend of the installed vLLM: MLA_BACKEND, or CUSTOM where it takes no names."""
    return _member_name("attention")


def prefill_member() -> Any:
    """The member of vLLM's MLAPrefillBackendEnum that stands for our prefill backend."""
    return _registry("prefill")[0][_member_name("prefill")]


def describe() -> list[str]:
    """For `mla-backend doctor`: how vLLM comes to use this backend here."""
    otherwise = f"not taken ({DEFAULT_VARIABLE}=1 changes that)"
    unnamed = "taken for MLA layers that it can serve" if is_default() else otherwise
    return [f"chosen by --attention-backend {selection_name()}; where none is named: {unnamed}"]


def _registry(kind: str) -> tuple[Any, Any, str]:
    """vLLM's enum of "attention" or "prefill" backends, the function that registers one, and our class."""
    if kind == "attention":
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        return AttentionBackendEnum, register_backend, BACKEND_PATH
    from vllm.v1.attention.backends.mla.prefill.registry import (
        MLAPrefillBackendEnum,
        register_mla_prefill_backend,
    )

    return MLAPrefillBackendEnum, register_mla_prefill_backend, PREFILL_PATH


def _takes_names(backend_enum: Any) -> bool:
    return hasattr(backend_enum, "register")


def _member_name(kind: str) -> str:
    return BACKEND_NAME if _takes_names(_registry(kind)[0]) else "CUSTOM"


def _register_name(kind: str) -> Any:
    backend_enum, register_path, path = _registry(kind)
    if BACKEND_NAME not in backend_enum.__members__:
        register_path(BACKEND_NAME, path)
        # A spawned engine process unpickles its configuration before it loads plugins, when a member added at
        # run time does not exist yet: let unpickling add it.
        backend_enum[BACKEND_NAME].__reduce_ex__ = lambda protocol: (_register_name, (kind,))
    return backend_enum[BACKEND_NAME]


def _register_custom(backend_enum: Any, register_path: Any, path: str) -> None:
    """Take vLLM's one place for backends of others, unless another plugin has it."""
    custom = backend_enum.CUSTOM
    if not custom.is_overridden():
        register_path(custom, path)
    elif custom.get_path() != path:
        logger.warning(
            "mla-backend leaves %s.CUSTOM to %s, which another plugin registered. To use mla-backend, load "
            "it alone (VLLM_PLUGINS=mla_backend), or install vLLM 0.32 or later, where it has its own name.",
            backend_enum.__name__,
            custom.get_path(),
        )


class _ToVLLM(logging.Handler):
    """Hands records to vLLM's logger, whose handlers and level may be configured later than plugins load."""

    def emit(self, record: logging.LogRecord) -> None:
        target = logging.getLogger("vllm")
        if target.isEnabledFor(record.levelno):
            target.handle(record)


def _log_through_vllm() -> None:
    """Print the library's own records, such as that it builds kernels, where and as vLLM prints its own."""
    library = logging.getLogger("mla_backend")
    if not any(isinstance(handler, _ToVLLM) for handler in library.handlers):
        library.addHandler(_ToVLLM())
        library.setLevel(logging.DEBUG)  # vLLM's level decides
        library.propagate = False
