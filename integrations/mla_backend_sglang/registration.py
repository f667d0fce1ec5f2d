"""What SGLang has to know about the backend: its name, when to dispatch to it, and how drafts use it.

Everything goes through SGLang's own registries, save five places that have none. :func:`_hook` puts something
around those, with SGLang's own means, and :func:`_apply_hooks` makes sure that it is there.
"""

from __future__ import annotations

import functools
import inspect
import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mla_backend.errors import UnsupportedError

logger = logging.getLogger(__name__)

_REMEDY = "use a tested version, or another --attention-backend"


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
    _check_before_start(server_args.ServerArgs, name)


@functools.cache
def register_model_side(name: str) -> None:
    """In a worker, once its model is built.

    Raises:
        UnsupportedError: this version of SGLang lacks something without which results would be wrong.
    """
    import sglang
    from sglang.srt.models.deepseek_common import attention_backend_handler, utils
    from sglang.srt.models.deepseek_common import deepseek_weight_loader as loader

    from mla_backend.engines import SGLANG
    from mla_backend_sglang.dispatch import choose_forward_method

    if untested := SGLANG.untested(sglang.__version__):
        logger.warning(untested)
    attention_backend_handler.AttentionBackendRegistry.register(name, choose_forward_method)
    # Absorbed queries come as q_nope and q_rope then, not concatenated.
    split = getattr(utils, "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS", None)
    if split is None:
        logger.warning("mla_backend: this version of SGLang concatenates queries, which makes decode slower")
    elif name not in split:
        split.append(name)
    _require(f"{loader.__name__}.DeepseekV2WeightLoaderMixin.post_load_weights")
    _add_draft_backends(name)
    _follow_direct_loads()
    _keep_prefills_uncaptured()
    _apply_hooks()


@dataclass(frozen=True)
class _Hooked:
    original: Any  # None if there is no such target
    otherwise: str | None


_hooked: dict[str, _Hooked] = {}


def _hook(target: str, hook: Callable, kind: str, otherwise: str | None = None) -> None:
    """Register a hook around a function or method of SGLang, once in a process.

    Args:
        target: dotted path, in a module that is imported already.
        hook: see SGLang's ``HookRegistry``.
        kind: a name in its ``HookType``.
        otherwise: what it means if the hook cannot be put in place; None if results would be wrong then.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if target in _hooked:
        return
    _hooked[target] = _Hooked(_resolve(target), otherwise)
    if _hooked[target].original is not None:
        HookRegistry.register(target, hook, HookType[kind])


def _apply_hooks() -> None:
    """Put all registered hooks in place, and make sure that they are.

    ``HookRegistry`` only logs what it could not hook, and skips a target that it has hooked before for
    another plugin. So what the target is afterwards decides.

    Raises:
        UnsupportedError: one that we cannot do without is not in place.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    for target, hooked in _hooked.items():
        if hooked.original is not None and _resolve(target) is not hooked.original:
            continue
        problem = f"mla_backend could not hook {target} of this version of SGLang"
        if hooked.otherwise is None:
            raise UnsupportedError(f"{problem}: {_REMEDY}")
        logger.warning("%s: %s", problem, hooked.otherwise)


def _require(target: str) -> None:
    """Make sure of what :func:`mla_backend_sglang.weights.adopt_weights` wraps where it finds it."""
    if _resolve(target) is None:
        raise UnsupportedError(f"mla_backend did not find {target} in this version of SGLang: {_REMEDY}")


def _resolve(target: str) -> Any:
    """What stands under that name in its module or class, not in a base class; None if nothing does."""
    owner, _, name = target.rpartition(".")
    try:
        return vars(pkgutil.resolve_name(owner)).get(name)
    except (ImportError, AttributeError):
        return None


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
    _hook(target, around, "AROUND", otherwise="SGLang refuses deterministic inference of DeepSeek models")


def _check_before_start(server_args_class: type, name: str) -> None:
    """Find out what an engine lacks for our kernels before it loads weights.

    ``check_server_args`` is the last thing that SGLang does in the process that was started, before it starts
    others.
    """

    def after(result: Any, server_args: Any, *_: Any) -> None:
        from sglang.srt.arg_groups.overrides import resolved_view

        settings = resolved_view(server_args)
        backends = (
            settings.attention_backend,
            settings.prefill_attention_backend,
            settings.decode_attention_backend,
        )
        if name in backends and settings.device == "cuda":
            from mla_backend_sglang.early import check_kernels

            check_kernels(server_args, settings)

    _hook(
        f"{server_args_class.__module__}.{server_args_class.__qualname__}.check_server_args",
        after,
        "AFTER",
        otherwise="a missing compiler is found after the weights are loaded",
    )


def _add_draft_backends(name: str) -> None:
    """Offer our backends to EAGLE and MTP drafts.

    ``DraftBackendFactory`` builds its map of backends inside a method and has no registry, so its
    ``_create_backend`` is handed a map with our entry added. From 0.5.18 an entry returns (name, backend).
    """
    from mla_backend_sglang import backend

    target = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"

    def around(original: Callable, factory: Any, role: str, backends: dict, *args: Any, **kwargs: Any) -> Any:
        def create() -> Any:
            runner = factory.draft_model_runner
            if backends.get("triton") == factory._create_triton_decode_backend:
                ours = backend.MLADraftDecodeBackend(runner, factory.topk, factory.speculative_num_steps)
            else:
                ours = backend.MLABackend(runner)
            return (name, ours) if takes_names else ours

        return original(factory, role, {**backends, name: create}, *args, **kwargs)

    # This is how its newer form can be told from the older one.
    takes_names = "stamp" in inspect.unwrap(_resolve(target) or around).__code__.co_varnames
    _hook(target, around, "AROUND")


def _follow_direct_loads() -> None:
    """Take over what changed after ``update_weights_from_tensor(load_format="direct")``.

    It writes parameters by a function of its own, past the model and all that it derives from its weights.
    """
    from sglang.srt.model_executor.model_runner_components import weight_updater

    from mla_backend_sglang.weights import refresh_after_direct_load

    _hook(f"{weight_updater.__name__}._model_load_weights_direct", refresh_after_direct_load, "AFTER")


def _keep_prefills_uncaptured() -> None:
    """Keep SGLang from replaying captured prefills of models whose prefill is ours.

    A captured prefill has one path, and small batches would take another than large ones. From 0.5.21 SGLang
    asks a backend about that, but not one inside of its wrappers (for different prefill and decode backends,
    and for hybrid models).
    """
    from mla_backend_sglang import backend

    def around(original: Callable, graph_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> bool:
        if backend.serves_prefill(graph_runner.model_runner.attn_backend):
            return False
        return original(graph_runner, forward_batch, *args, **kwargs)

    _hook(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
        around,
        "AROUND",
        otherwise="with captured prefills a request's method depends on its batch; "
        "--cuda-graph-backend-prefill disabled prevents that",
    )
