"""mla-backend for vLLM: `register` is its ``vllm.general_plugins`` entry point.

vLLM calls `register` in every process it starts (API server, engine core, workers), sometimes twice, and
before a worker has chosen its GPU. It therefore only writes class paths into vLLM's registries: nothing here
imports a kernel, builds one, or touches CUDA.
"""

from __future__ import annotations

import os
from typing import Any

BACKEND_NAME = "MLA_BACKEND"
BACKEND_PATH = "mla_backend_vllm.backend.MLABackend"
PREFILL_PATH = "mla_backend_vllm.prefill.MLAPrefill"
DEFAULT_VARIABLE = "MLA_BACKEND_DEFAULT"


def is_default() -> bool:
    """Whether the user asked (MLA_BACKEND_DEFAULT=1) for this backend wherever no other is named."""
    return os.environ.get(DEFAULT_VARIABLE) == "1"


def is_this_backend(selected: Any) -> bool:
    """Whether a member of vLLM's AttentionBackendEnum (or None) stands for this backend."""
    return selected is not None and selected.is_overridden() and selected.get_path() == BACKEND_PATH


def register() -> None:
    """Make the backend known to vLLM as CUSTOM and, where vLLM takes names, as MLA_BACKEND."""
    from vllm.v1.attention.backends.mla.prefill.registry import (
        MLAPrefillBackendEnum,
        register_mla_prefill_backend,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from mla_backend_vllm.platform import honour_selection_on_cpu

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND_PATH)
    if _takes_names(AttentionBackendEnum):
        _register_name()
    register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, PREFILL_PATH)
    if is_default():
        # The first that vLLM tries for dense MLA on the GPUs which we serve. What we refuse falls through to
        # the next one in its order.
        register_backend(AttentionBackendEnum.FLASH_ATTN_MLA, BACKEND_PATH)
    honour_selection_on_cpu()


def selection_name() -> str:
    """The --attention-backend of the installed vLLM: MLA_BACKEND, or CUSTOM where it takes no names."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return BACKEND_NAME if _takes_names(AttentionBackendEnum) else "CUSTOM"


def describe() -> list[str]:
    """For `mla-backend doctor`: how vLLM comes to use this backend here."""
    otherwise = f"not taken ({DEFAULT_VARIABLE}=1 changes that)"
    unnamed = "taken for MLA models on GPUs that we serve" if is_default() else otherwise
    return [f"chosen by --attention-backend {selection_name()}; where none is named: {unnamed}"]


def _takes_names(backend_enum: Any) -> bool:
    return hasattr(backend_enum, "register")


def _register_name() -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, BACKEND_PATH)
        # A spawned engine process unpickles its configuration before it loads plugins, when a member added at
        # run time does not exist yet: let unpickling add it.
        AttentionBackendEnum[BACKEND_NAME].__reduce_ex__ = lambda protocol: (_register_name, ())
    return AttentionBackendEnum[BACKEND_NAME]
