"""Registers the backend with SGLang: its name, the batches that it serves, and its use by drafts.

Where SGLang has registries, they are used. Five functions have no registry, and are hooked.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from mla_backend.engines import SGLANG
from mla_backend.errors import UnsupportedError
from mla_backend.settings import is_on
from mla_backend_sglang import hooks, sparse
from mla_backend_sglang.names import DSA_BACKENDS, DSA_VARIABLE, NAME

logger = logging.getLogger(__name__)


def register_choices(factory: Callable[[Any], Any]) -> None:
    """Register the name and the factory of the backend.

    SGLang calls this in every process, before it parses its arguments. This is cheap: no model code is
    imported.
    """
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    _serve_sparse_layers()  # first, so that nothing is registered if it raises
    # SGLang's functions append to lists without a check, and this function may run twice in a process.
    if NAME not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([NAME])
        server_args.add_chunked_prefix_cache_attention_backend(NAME)
        server_args.add_deterministic_attention_backend_choices([NAME])
        server_args.add_radix_supported_deterministic_attention_backend_choices([NAME])
    register_attention_backend(NAME)(factory)
    _leave_prefills_uncaptured()
    _allow_deterministic()
    _check_before_start()


@functools.cache
def register_model_side() -> None:
    """Register what needs the model's code; call this in a worker whose model is built.

    Raises:
        UnsupportedError: results would be wrong, because this version of SGLang lacks a function that the
            backend must hook or wrap.
    """
    import sglang
    from sglang.srt.models.deepseek_common import attention_backend_handler, utils
    from sglang.srt.models.deepseek_common import deepseek_weight_loader as loader

    from mla_backend_sglang.dispatch import choose_forward_method

    if unsupported := SGLANG.unsupported(sglang.__version__):
        logger.warning(unsupported)
    attention_backend_handler.AttentionBackendRegistry.register(NAME, choose_forward_method)
    # SGLang passes q_nope and q_rope separately to the backends in this list.
    split = getattr(utils, "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS", None)
    if split is None:
        logger.warning("mla_backend: this version of SGLang concatenates queries, which makes decode slower")
    elif NAME not in split:
        split.append(NAME)
    # `mla_backend_sglang.weights.adopt_weights` wraps this method of a model.
    hooks.require(f"{loader.__name__}.DeepseekV2WeightLoaderMixin.post_load_weights")
    _add_draft_backends()
    _follow_direct_loads()
    _never_replay_prefills()
    hooks.apply()


def _serve_sparse_layers() -> None:
    """With MLA_BACKEND_DSA=1, let SGLang's ``dsa`` backend use our kernels: `mla_backend_sglang.sparse`."""
    from sglang.srt.layers.attention import attention_registry

    if not is_on(DSA_VARIABLE):
        return
    factories = attention_registry.ATTENTION_BACKENDS
    names = DSA_BACKENDS.intersection(factories)
    if not names:
        raise UnsupportedError(f"{DSA_VARIABLE}=1, but this SGLang has no dsa backend: unset it")
    for name in names:
        if not hasattr(factories[name], "__wrapped__"):  # this function may run twice in a process
            factories[name] = functools.wraps(factories[name])(sparse.wrap_factory(factories[name]))


def _allow_deterministic() -> None:
    """Allow deterministic inference of DeepSeek models on this backend in SGLang 0.5.16.

    There, ``ServerArgs._handle_deterministic_inference`` accepts only two backends for DeepSeek
    architectures, which it names in a local variable. Later versions use the list that
    :func:`register_choices` extends. The method reads the model's config only for this check, and skips the
    check if it cannot read the config.
    """
    target = "sglang.srt.server_args.ServerArgs._handle_deterministic_inference"
    method = hooks.resolve(target)
    if method is None or "deepseek_deterministic_attention_backends" not in method.__code__.co_varnames:
        return

    def around(original: Callable, server_args: Any) -> None:
        if server_args.attention_backend != NAME:
            return original(server_args)
        server_args.get_model_config = None
        try:
            return original(server_args)
        finally:
            del server_args.get_model_config

    hooks.register(
        target, around, "AROUND", otherwise="SGLang refuses deterministic inference of DeepSeek models"
    )


def _check_before_start() -> None:
    """Refuse what cannot be served before an engine starts other processes.

    ``check_server_args`` is the last step in the process that the user starts, before SGLang starts others.
    """

    def after(result: Any, server_args: Any, *_: Any) -> None:
        from sglang.srt.arg_groups.overrides import resolved_view

        from mla_backend_sglang.refusals import check_before_start

        check_before_start(server_args, resolved_view(server_args))

    hooks.register(
        "sglang.srt.server_args.ServerArgs.check_server_args",
        after,
        "AFTER",
        otherwise="what cannot be served, or built, is refused only after weights are loaded",
    )


def _add_draft_backends() -> None:
    """Make the backend available to EAGLE and MTP drafts.

    ``DraftBackendFactory`` has no registry: it builds its map of backends inside a method. The hook adds an
    entry to the map that ``_create_backend`` receives.
    """
    target = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"

    def around(original: Callable, factory: Any, role: str, backends: dict, *args: Any, **kwargs: Any) -> Any:
        called: list[str] = []  # the entry that SGLang called
        ours: list[Any] = []  # what our entry made

        def note_call(name: str, entry: Callable[[], Any]) -> Callable[[], Any]:
            def call() -> Any:
                called.append(name)
                return entry()

            return call

        def create() -> tuple[str, Any]:
            ours.append(_create_draft_backend(factory, backends))
            return NAME, ours[0]

        entries = {name: note_call(name, entry) for name, entry in {**backends, NAME: create}.items()}
        try:
            made = original(factory, role, entries, *args, **kwargs)
        except (AttributeError, TypeError, ValueError) as error:
            if ours:
                raise hooks.mismatch(
                    f"{target} takes no (name, backend) from its entries: {error}"
                ) from error
            raise
        return _named(made, called[-1])

    hooks.register(target, around, "AROUND")


def _create_draft_backend(factory: Any, backends: dict[str, Any]) -> Any:
    """The backend of a draft's decode steps, or of its extension, depending on what the map is for."""
    from mla_backend_sglang import drafts

    runner = factory.draft_model_runner
    entry = getattr(backends.get("triton"), "__name__", None)
    if entry == "_create_triton_decode_backend":
        return drafts.DraftDecodeBackend(runner, factory.topk, factory.speculative_num_steps)
    if entry == "_create_triton_prefill_backend":
        return drafts.extension_backend(runner)
    raise hooks.mismatch(f"DraftBackendFactory has an unknown entry for triton, {entry}")


def _named(made: Any, name: str) -> Any:
    """The backend that an entry made, with the name by which the model chooses its attention method.

    From 0.5.18 on an entry returns (name, backend), and SGLang sets the name on the backend. Before, it
    returns the backend, and the model goes by the target's backend where nobody has set a name.
    """
    if isinstance(made, tuple):  # our entry's, in versions that return what the entry does
        _, made = made
    for each in (made, *getattr(made, "attn_backends", ())):
        if each is not None and getattr(each, "decode_attention_backend_str", None) is None:
            each.prefill_attention_backend_str = each.decode_attention_backend_str = name
    return made


def _follow_direct_loads() -> None:
    """Refresh the absorbed weights after ``update_weights_from_tensor(load_format="direct")``.

    This update writes into parameters without calling the model, so the model does not split ``kv_b_proj``.
    """
    from sglang.srt.model_executor.model_runner_components import weight_updater

    from mla_backend_sglang.weights import update_from_tensors

    hooks.register(
        f"{weight_updater.__name__}.WeightUpdater.update_weights_from_tensor", update_from_tensors, "AROUND"
    )


@functools.cache
def _leave_prefills_uncaptured() -> None:
    """Keep SGLang from capturing prefills for this backend, which would never be replayed.

    Captures take memory and time at start. With data-parallel attention SGLang also pads a batch for them
    before it asks whether they can be replayed. An explicit choice of the user is left alone.
    """
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        register = register_resolution_hook("handle_cuda_graph_config")
    except (ImportError, ValueError):  # no registry, or none for this setting
        return

    from mla_backend_sglang.refusals import serves_prefill

    @register
    def handle(server_args: Any, previous: Callable[[Any], None]) -> None:
        previous(server_args)
        if not serves_prefill(server_args):
            return
        from sglang.srt.arg_groups import overrides
        from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

        if (Phase.PREFILL, "backend") in server_args._cuda_graph_config_locked:  # by the user
            return
        config = overrides.resolving_view(server_args).cuda_graph_config
        uncaptured = with_phase(config, Phase.PREFILL, backend=Backend.DISABLED)
        overrides.declare_resolution(server_args, NAME, cuda_graph_config=uncaptured)


def _never_replay_prefills() -> None:
    """Keep SGLang from replaying captured prefills where this backend serves the prefill.

    A full graph, or a piecewise one of earlier versions, has only one path, so small batches would take
    another path than large ones. Breakable graphs, the default of 0.5.23, leave the attention calls out. If
    they captured the MHA forward, each request could keep its method; this has not been tested. From 0.5.21
    SGLang asks the backend, but not a backend inside a wrapper (for different prefill and decode backends,
    and for hybrid models). Where ranks of data-parallel attention vote, they call `can_replay_locally`.
    """
    from mla_backend_sglang import attention_backend

    def around(original: Callable, graph_runner: Any, *args: Any, **kwargs: Any) -> bool:
        if attention_backend.serves_prefill(graph_runner.model_runner.attn_backend):
            return False
        return original(graph_runner, *args, **kwargs)

    runner = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
    votes = hooks.resolve(f"{runner}.can_replay_locally") is not None
    hooks.register(
        f"{runner}.{'can_replay_locally' if votes else 'can_run_graph'}",
        around,
        "AROUND",
        otherwise="with captured prefills, the attention method of a request depends on its batch; "
        "to prevent this, use --cuda-graph-backend-prefill disabled",
    )
