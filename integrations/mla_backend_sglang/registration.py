"""What SGLang has to know about the backend: its name, when to dispatch to it, and how drafts use it.

Everything goes through SGLang's own registries, save five places that have none.
:func:`_allow_deterministic`, :func:`_add_draft_backends`, :func:`_follow_direct_loads` and
:func:`_take_new_tokens` say what they hook, with SGLang's own means for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def register_choices(name: str, factory: Callable[[Any], Any]) -> None:
    """Before arguments are parsed, in every process. Cheap: imports no model code."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    # SGLang's lists are extended as they are, and this may run twice in a process.
    if name not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([name])
        server_args.add_chunked_prefix_cache_attention_backend(name)
        server_args.add_deterministic_attention_backend_choices([name])
        server_args.add_radix_supported_deterministic_attention_backend_choices([name])
    register_attention_backend(name)(factory)
    _allow_deterministic(server_args.ServerArgs, name)


@functools.cache
def register_model_side(name: str) -> None:
    """In a worker, once its model is built."""
    from sglang.srt.models.deepseek_common import attention_backend_handler, utils

    from mla_backend_sglang.dispatch import choose_forward_method

    attention_backend_handler.AttentionBackendRegistry.register(name, choose_forward_method)
    # Absorbed queries come as q_nope and q_rope, not concatenated.
    if name not in utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(name)
    _add_draft_backends(name)
    _follow_direct_loads()
    _take_new_tokens(name)


def _allow_deterministic(server_args_class: type, name: str) -> None:
    """Let DeepSeek models run deterministically on our backend where SGLang has a fixed list for them.

    0.5.16's ``ServerArgs._handle_deterministic_inference`` refuses DeepSeek architectures on any backend but
    two that it names in a local variable; later versions ask the list that :func:`register_choices` extends.
    The method reads the model's config only for this check, and takes a model whose config it can't read for
    another one.
    """
    method = getattr(server_args_class, "_handle_deterministic_inference", None)
    if method is None or "deepseek_deterministic_attention_backends" not in method.__code__.co_varnames:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(original: Callable, server_args: Any) -> None:
        if server_args.attention_backend != name:
            return original(server_args)
        server_args.get_model_config = None
        try:
            return original(server_args)
        finally:
            del server_args.get_model_config

    target = (
        f"{server_args_class.__module__}.{server_args_class.__qualname__}._handle_deterministic_inference"
    )
    HookRegistry.register(target, around, HookType.AROUND)


def _add_draft_backends(name: str) -> None:
    """Offer our backends to EAGLE and MTP drafts.

    ``DraftBackendFactory`` builds its map of backends inside a method and has no registry, so its
    ``_create_backend`` is handed a map with our entry added. From 0.5.18 an entry returns (name, backend).
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from mla_backend_sglang import backend

    takes_names = "stamp" in DraftBackendFactory._create_backend.__code__.co_varnames

    def around(original: Callable, factory: Any, role: str, backends: dict, *args: Any, **kwargs: Any) -> Any:
        def create() -> Any:
            runner = factory.draft_model_runner
            if backends.get("triton") == factory._create_triton_decode_backend:
                ours = backend.MLADraftDecodeBackend(runner, factory.topk, factory.speculative_num_steps)
            else:
                ours = backend.MLABackend(runner)
            return (name, ours) if takes_names else ours

        return original(factory, role, {**backends, name: create}, *args, **kwargs)

    HookRegistry.register(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend", around, HookType.AROUND
    )
    HookRegistry.apply_hooks()


def _follow_direct_loads() -> None:
    """Take over what changed after ``update_weights_from_tensor(load_format="direct")``.

    It writes parameters by a function of its own, past the model and all that it derives from its weights.
    """
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from mla_backend_sglang.weights import refresh_after_direct_load

    HookRegistry.register(
        f"{weight_updater.__name__}._model_load_weights_direct", refresh_after_direct_load, HookType.AFTER
    )
    HookRegistry.apply_hooks()


def _take_new_tokens(name: str) -> None:
    """Have the model hand over new tokens as its projections leave them, where our backend takes them in.

    SGLang's MLA forward leaves rotary embedding to backends that ``_fuse_rope_for_trtllm_mla`` names, and
    passes cosines and sines on to the attention call. The name alone does not do: a draft may run on another
    backend. About the latents' norm, in ``forward_absorb_prepare``, nothing is asked: it is taken out for
    that call, and both projections of the input are made one.
    """
    from sglang.srt.model_executor.forward_context import get_attn_backend
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import (
        DeepseekMLAForwardMixin,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from mla_backend_sglang import backend

    def backend_of(attention: Any) -> backend.MLABackend | None:
        current = get_attn_backend() if attention.current_attention_backend == name else None
        return current if isinstance(current, backend.MLABackend) else None

    def around_question(original: Callable, attention: Any, forward_batch: Any) -> bool:
        ours = backend_of(attention)
        return original(attention, forward_batch) if ours is None else ours.takes_in(attention)

    def around_prepare(
        original: Callable,
        attention: Any,
        positions: Any,
        hidden_states: Any,
        forward_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        prepare = functools.partial(
            original, attention, positions, hidden_states, forward_batch, *args, **kwargs
        )
        ours = backend_of(attention)
        if ours is None or not ours.take_in(attention, forward_batch):
            return prepare()
        # An instance's own attributes come before its submodules of the same name.
        instead = {"kv_a_layernorm": lambda kv_c: kv_c}
        if projection := ours.joint_projection(attention):
            q, latent = projection(hidden_states)
            instead |= {"q_proj": lambda _: (q, None), "kv_a_proj_with_mqa": lambda _: (latent, None)}
        vars(attention).update(instead)
        try:
            return prepare()
        finally:
            for attribute in instead:
                del vars(attention)[attribute]

    mixin = f"{DeepseekMLAForwardMixin.__module__}.{DeepseekMLAForwardMixin.__qualname__}"
    HookRegistry.register(f"{mixin}._fuse_rope_for_trtllm_mla", around_question, HookType.AROUND)
    HookRegistry.register(f"{mixin}.forward_absorb_prepare", around_prepare, HookType.AROUND)
    HookRegistry.apply_hooks()
