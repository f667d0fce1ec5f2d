"""LoRA adapters of kv_b_proj, which vLLM would load and never apply.

vLLM wraps each linear module of a model, and the wrapper applies the adapter when it is called. Latent
attention reads the weight of kv_b_proj, or calls the module inside the wrapper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger
from vllm.lora.worker_manager import WorkerLoRAManager

from mla_backend_vllm.refusals import reasons_against_adapter, refuse

logger = init_logger(f"vllm.{__name__}")  # vLLM prints only the logs below its own name


def refuse_adapters(is_ours: Callable[[Any], bool]) -> None:
    """Make vLLM refuse adapters of kv_b_proj, for models with a layer for whose ``impl`` ``is_ours`` is true.

    vLLM has no registry for this, and its manager of adapters does not exist yet when layers are made, so the
    function that loads adapters is replaced in its class, once in a process.
    """
    load = getattr(WorkerLoRAManager, "_load_adapter", None)
    if load is None:
        logger.warning_once("This vLLM would load LoRA adapters of kv_b_proj without applying them")
    elif not hasattr(load, "_refuses_adapters"):
        WorkerLoRAManager._load_adapter = _refusing(load, is_ours)


def _refusing(load: Callable[..., Any], is_ours: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_or_refuse(manager: Any, lora_request: Any) -> Any:
        adapter = load(manager, lora_request)
        if any(is_ours(getattr(module, "impl", None)) for module in manager._adapter_manager.model.modules()):
            refuse(reasons_against_adapter(lora_request.lora_name, adapter.loras))
        return adapter

    load_or_refuse._refuses_adapters = True  # type: ignore[attr-defined]
    return load_or_refuse
