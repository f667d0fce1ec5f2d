"""The registration of the backend with the installed SGLang, and its hooks."""

import collections
import contextlib
import inspect
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest
import sglang
import torch
import transformers
from conftest import make_checkpoint
from sglang.srt import server_args
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.models.deepseek_common import attention_backend_handler, deepseek_weight_loader, utils
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

import mla_backend_sglang
from mla_backend.batch import TableKind
from mla_backend.errors import UnsupportedError
from mla_backend_sglang import hooks, registration

pytestmark = pytest.mark.smoke

NAME = "mla_backend"


@pytest.fixture(scope="module", autouse=True)
def plugins():
    load_plugins()


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A checkpoint in fp16, because there are no kernels for fp32."""
    path = tmp_path_factory.mktemp("half")
    make_checkpoint(path, "--dtype", "float16", "--heads", "16", "--layers", "1", "--experts", "0")
    return path


def test_the_entry_point_registers_the_name_once():
    mla_backend_sglang.register()  # a second time
    assert server_args.ATTENTION_BACKEND_CHOICES.count(NAME) == 1
    assert server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count(NAME) == 1
    assert server_args.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count(NAME) == 1
    assert ATTENTION_BACKENDS[NAME] is mla_backend_sglang.create_backend


def test_a_failed_registration_prints_the_reason(monkeypatch, capsys):
    def fail(*_):
        raise AttributeError("no such registry")

    monkeypatch.setattr(registration, "register_choices", fail)
    with pytest.raises(AttributeError):
        mla_backend_sglang.register()
    assert "--attention-backend mla_backend is not available: AttributeError: no such registry" in (
        capsys.readouterr().err
    )


def test_a_mistaken_switch_registers_nothing_and_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("MLA_BACKEND_DSA", "true")
    monkeypatch.setattr(server_args, "ATTENTION_BACKEND_CHOICES", [])
    with pytest.raises(ValueError, match="MLA_BACKEND_DSA must be 0 or 1, not 'true'"):
        mla_backend_sglang.register()
    assert server_args.ATTENTION_BACKEND_CHOICES == []
    assert "MLA_BACKEND_DSA must be 0 or 1, not 'true'" in capsys.readouterr().err


@pytest.mark.parametrize("backend, accepted", [(NAME, True), ("flashinfer", False)])
def test_deterministic_inference_of_deepseek_models(checkpoint, backend, accepted):
    """Accepted through SGLang's list of backends, or through a hook where that list is fixed."""

    def resolve():
        arguments = server_args.ServerArgs(
            model_path=str(checkpoint),
            device="cpu",
            attention_backend=backend,
            enable_deterministic_inference=True,
        )
        if hasattr(arguments, "resolve_once"):  # from 0.5.19; before, the constructor does it
            arguments.resolve_once()

    if accepted:
        resolve()
    else:
        with pytest.raises(ValueError, match=r"deterministic inference with .* models"):
            resolve()


class FakeRunner(types.SimpleNamespace):
    """The attributes that DraftBackendFactory reads."""


def draft_factory(monkeypatch, num_steps, target=NAME, draft=NAME):
    from sglang.srt.speculative import draft_utils

    arguments = types.SimpleNamespace(
        speculative_draft_attention_backend=draft,
        attention_backend=target,
        decode_attention_backend=None,
        prefill_attention_backend=None,
        speculative_attention_mode="prefill",
    )
    runner = FakeRunner(
        draft_attention_backend=draft,
        model_config=types.SimpleNamespace(hf_config=object(), hf_text_config=object()),
    )
    for name, value in (("get_spec", lambda: arguments), ("attention_backends", lambda: (target, target))):
        if hasattr(draft_utils, name):
            monkeypatch.setattr(draft_utils, name, value)
    given = dict(server_args=arguments, draft_model_runner=runner, topk=1, speculative_num_steps=num_steps)
    parameters = inspect.signature(draft_utils.DraftBackendFactory.__init__).parameters
    return draft_utils.DraftBackendFactory(**{k: v for k, v in given.items() if k in parameters})


@pytest.fixture
def draft_backends(monkeypatch):
    """Registers a class in the place of the draft's backend; the objects that SGLang makes of it."""
    import sgl_kernel_stub

    sgl_kernel_stub.install()
    from mla_backend_sglang import drafts

    made = []

    class Recorder(types.SimpleNamespace):
        def __init__(self, runner, draft_step=None):
            super().__init__(draft_step=draft_step)
            made.append(self)

    monkeypatch.setattr(drafts, "SglangMLABackend", Recorder)
    registration.register_model_side()
    return made


def test_drafts_use_this_backend(monkeypatch, draft_backends):
    from mla_backend_sglang import drafts

    factory = draft_factory(monkeypatch, num_steps=4)
    decode = factory.create_decode_backend()
    assert isinstance(decode, drafts.DraftDecodeBackend)
    assert [step.draft_step for step in decode.attn_backends] == [0, 1, 2]
    extend = factory.create_draft_extend_backend()
    assert extend is draft_backends[-1] and extend.draft_step is None


@pytest.mark.parametrize(
    "method, given",
    [
        ("init_forward_metadata", ("batch",)),
        ("init_cuda_graph_state", (8, 16)),
        ("init_forward_metadata_in_graph", ("batch",)),
    ],
)
def test_all_steps_of_a_draft_are_prepared(monkeypatch, draft_backends, method, given):
    decode = draft_factory(monkeypatch, num_steps=4).create_decode_backend()
    prepared = []
    for step in decode.attn_backends:
        setattr(step, method, lambda *got, step=step: prepared.append((step.draft_step, *got)))
    getattr(decode, method)(*given)
    assert prepared == [(step, *given) for step in range(3)]


def test_a_draft_attends_by_the_methods_of_its_own_backend(monkeypatch, draft_backends):
    """The model looks up the method by the name on the backend, without one by the target's backend."""

    def names(backend):
        return {backend.prefill_attention_backend_str, backend.decode_attention_backend_str}

    ours = draft_factory(monkeypatch, num_steps=3, target="fa3")
    assert names(ours.create_draft_extend_backend()) == {NAME}
    assert all(names(step) == {NAME} for step in ours.create_decode_backend().attn_backends)

    module = types.ModuleType("sglang.srt.layers.attention.flashattention_backend")
    module.FlashAttentionBackend = lambda *_, **__: types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    theirs = draft_factory(monkeypatch, num_steps=3, draft="fa3")
    assert names(theirs.create_draft_extend_backend()) == {"fa3"}


def returning_entries(self, role, backends, *args, **kwargs):
    """As in versions before 0.5.18, which return what an entry returns."""
    return backends[self.draft_attn_backend]()


def unpacking_entries(self, role, backends, *args, **kwargs):
    """As from 0.5.18 on, which set names on backends."""
    name, backend = backends[self.draft_attn_backend]()
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = name
    return backend


def expecting_more(self, role, backends, *args, **kwargs):
    """As a later version may do."""
    name, backend, options = backends[self.draft_attn_backend]()


def refusing(self, role, backends, *args, **kwargs):
    raise ValueError("EAGLE is not supported in this backend")


@pytest.mark.parametrize("convention", [returning_entries, unpacking_entries])
def test_drafts_of_versions_with_either_convention(unhooked, monkeypatch, draft_backends, convention):
    from sglang.srt.speculative import draft_utils

    monkeypatch.setattr(draft_utils.DraftBackendFactory, "_create_backend", convention)
    register_all()
    factory = draft_factory(monkeypatch, num_steps=3)
    decode, extend = factory.create_decode_backend(), factory.create_draft_extend_backend()
    assert [step.draft_step for step in decode.attn_backends] == [0, 1]
    for backend in (*decode.attn_backends, extend):
        assert backend.prefill_attention_backend_str == backend.decode_attention_backend_str == NAME


@pytest.mark.parametrize(
    "convention, error, message",
    [
        (expecting_more, UnsupportedError, "does not fit this version of SGLang: .*_create_backend takes no"),
        (refusing, ValueError, "EAGLE is not supported in this backend"),
    ],
)
def test_drafts_of_an_unknown_version_end_with_a_clear_error(
    unhooked, monkeypatch, draft_backends, convention, error, message
):
    from sglang.srt.speculative import draft_utils

    monkeypatch.setattr(draft_utils.DraftBackendFactory, "_create_backend", convention)
    register_all()
    with pytest.raises(error, match=message):
        draft_factory(monkeypatch, num_steps=3).create_decode_backend()


def test_a_map_of_drafts_with_unknown_entries_is_refused(unhooked, monkeypatch, draft_backends):
    """It no longer tells whether it is for a draft's decode steps or for its extension."""
    from sglang.srt.speculative import draft_utils

    def renamed_entries(self, role, backends, *args, **kwargs):
        return backends[self.draft_attn_backend]()

    factory = draft_utils.DraftBackendFactory
    monkeypatch.setattr(factory, "_create_backend", renamed_entries)
    monkeypatch.setattr(factory, "_create_triton_decode_backend", lambda self: None)
    register_all()
    with pytest.raises(UnsupportedError, match="unknown entry for triton"):
        draft_factory(monkeypatch, num_steps=3).create_decode_backend()


def test_trees_of_drafts_are_refused():
    from mla_backend_sglang import drafts

    with pytest.raises(UnsupportedError, match="use --speculative-eagle-topk 1"):
        drafts.DraftDecodeBackend(None, topk=4, num_steps=3)


@pytest.fixture
def flashmla(monkeypatch):
    """A module in the place of SGLang's with the class that passes for captured draft extensions."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    from mla_backend_sglang import drafts

    name = "sglang.srt.layers.attention.flashmla_backend"
    module = types.ModuleType(name)
    module.FlashMLABackend = type("FlashMLABackend", (AttentionBackend,), {})
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(drafts, "is_cuda", lambda: True)
    monkeypatch.setattr(drafts.SglangMLABackend, "__init__", lambda self, runner: None)
    return module


def without_the_class(module):
    del module.FlashMLABackend


def without_registration(module):
    """A class that is no abstract base class."""
    module.FlashMLABackend = type("FlashMLABackend", (), {})


def with_another_meaning(module):
    module.FlashMLABackend.__subclasshook__ = classmethod(lambda cls, other: False)


@pytest.mark.parametrize("change", [None, without_the_class, without_registration, with_another_meaning])
def test_draft_extensions_pass_for_those_that_sglang_captures(flashmla, caplog, change):
    from mla_backend_sglang import drafts

    listed = flashmla.FlashMLABackend
    if change is not None:
        change(flashmla)
    backend = drafts.extension_backend(None)
    assert type(backend) is drafts.SglangMLABackend
    assert isinstance(backend, listed) is (change is None)
    assert ("captures no CUDA graphs of draft extensions" in caplog.text) is (change is not None)


def test_without_cuda_there_are_no_captured_extensions(flashmla, monkeypatch, caplog):
    from mla_backend_sglang import drafts

    monkeypatch.setattr(drafts, "is_cuda", lambda: False)
    backend = drafts.extension_backend(None)
    assert not isinstance(backend, flashmla.FlashMLABackend) and not caplog.text


def test_sglang_asks_for_flashmla_only_where_it_captures_draft_extensions():
    """Elsewhere it makes, or derives from, this class and its base, or compares names of classes."""
    root = Path(sglang.__file__).parent / "srt"
    named = re.compile(r"\b(FlashMLA|FlashInferMLAAttn)Backend\b")
    texts = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.py")}
    naming = {path for path, text in texts.items() if named.search(text)}
    gate = "speculative/eagle_worker_v2.py"
    assert "graph_supported_backend_types.append(FlashMLABackend)" in texts[gate]
    backends = ("attention_registry", "flashmla_backend", "flashinfer_mla_backend", "trtllm_mla_backend")
    others = {f"layers/attention/{name}.py" for name in (*backends, "cutlass_mla_backend")}
    others |= {"speculative/draft_utils.py", "speculative/dflash_utils.py"}
    assert naming <= {gate, *others}
    asking = re.compile(rf"is(instance|subclass)\([^)]*{named.pattern}")
    assert not any(asking.search(texts[path]) for path in naming - {gate})


REQUIRED = [
    "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    ".update_weights_from_tensor",
]
RUNNER = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner"
REPLAYS = "can_replay_locally" if hooks.resolve(f"{RUNNER}.can_replay_locally") else "can_run_graph"
OPTIONAL = ["sglang.srt.server_args.ServerArgs.check_server_args", f"{RUNNER}.{REPLAYS}"]


def test_only_functions_without_a_registry_are_hooked():
    registration.register_model_side()
    fixed_list = "deepseek_deterministic_attention_backends"
    method = "sglang.srt.server_args.ServerArgs._handle_deterministic_inference"
    original = hooks.resolve(method)
    original = getattr(original, "__wrapped__", original)
    needed = [method] if original is not None and fixed_list in original.__code__.co_varnames else []
    assert sorted(hooks.registered) == sorted(REQUIRED + OPTIONAL + needed)


@pytest.fixture
def unhooked(monkeypatch):
    """SGLang as before the first registration in this process."""
    registration.register_model_side()
    for target, hooked in hooks.registered.items():
        owner, _, name = target.rpartition(".")
        monkeypatch.setattr(pkgutil.resolve_name(owner), name, hooked.original)
    monkeypatch.setattr(HookRegistry, "_hooks", collections.defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(hooks, "registered", {})


def register_all():
    mla_backend_sglang.register()
    registration.register_model_side.__wrapped__()


def test_every_hook_is_applied(unhooked, caplog):
    register_all()
    assert set(hooks.registered) == set(HookRegistry._patched) >= {*REQUIRED, *OPTIONAL}
    for target, hooked in hooks.registered.items():
        assert pkgutil.resolve_name(target).__wrapped__ is hooked.original
    assert "could not hook" not in caplog.text


def renamed(monkeypatch, target):
    owner, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    monkeypatch.setattr(owner, f"{name}_elsewhere", vars(owner)[name], raising=False)
    monkeypatch.delattr(owner, name)


def hooked_by_another_plugin(monkeypatch, target):
    HookRegistry._patched.add(target)


@pytest.mark.parametrize("change", [renamed, hooked_by_another_plugin])
@pytest.mark.parametrize("target", REQUIRED + OPTIONAL)
def test_a_hook_that_cannot_be_applied(unhooked, monkeypatch, caplog, target, change):
    change(monkeypatch, target)
    if target.endswith(".can_replay_locally") and change is renamed:
        register_all()
        assert f"{RUNNER}.can_run_graph" in hooks.registered  # as in versions without it
    elif target in REQUIRED:
        with pytest.raises(UnsupportedError, match=rf"could not hook {target}.*: use a supported version"):
            register_all()
    else:
        register_all()
        assert caplog.text.count("could not hook") == caplog.text.count(f"could not hook {target}") == 1


def test_a_renamed_weight_loader_stops_the_start(unhooked, monkeypatch):
    """Otherwise its updates would not reach the absorbed weights."""
    target = "DeepseekV2WeightLoaderMixin.post_load_weights"
    renamed(monkeypatch, f"{deepseek_weight_loader.__name__}.{target}")
    with pytest.raises(UnsupportedError, match=f"it has no .*{target}.*: use a supported version"):
        register_all()


def test_a_missing_registry_stops_the_start(unhooked, monkeypatch):
    renamed(monkeypatch, f"{attention_backend_handler.__name__}.AttentionBackendRegistry.register")
    monkeypatch.setattr(registration, "register_model_side", registration.register_model_side.__wrapped__)
    with pytest.raises(UnsupportedError, match="does not fit this version of SGLang: .* 'register'"):
        mla_backend_sglang.create_backend(None)


def test_a_name_that_sglang_no_longer_has_stops_the_start(monkeypatch):
    """Where the backend imports it."""
    monkeypatch.delitem(sys.modules, "mla_backend_sglang.attention_backend")
    monkeypatch.delattr("sglang.srt.layers.attention.base_attn_backend.AttentionBackend")
    with pytest.raises(
        UnsupportedError, match="does not fit .* import name 'AttentionBackend'.*: use a supp"
    ):
        mla_backend_sglang.create_backend(None)


def test_a_missing_list_of_split_queries_is_logged(unhooked, monkeypatch, caplog):
    renamed(monkeypatch, f"{utils.__name__}.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS")
    register_all()
    assert "concatenates queries" in caplog.text


@pytest.mark.parametrize("version, says", [("0.5.16", False), ("0.5.23.post1", False), ("0.5.24", True)])
def test_an_untested_version_is_logged_once(unhooked, monkeypatch, caplog, version, says):
    monkeypatch.setattr("sglang.__version__", version)
    register_all()
    assert caplog.text.count(f"SGLang {version} is newer than the versions") == says


class Layered(torch.nn.Module):
    """A norm and layers of which each has a ``kv_b_proj`` of one of these dtypes.

    Attributes:
        reloaded: the layers whose absorbed weights were reloaded, with the weight's sum then.
    """

    def __init__(self, *dtypes):
        from mla_backend_sglang.weights import LayerWeights

        super().__init__()
        self.norm = torch.nn.LayerNorm(2)
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in dtypes)
        self.reloaded, self.mla_backend_layers = [], {}
        for index, (attention, dtype) in enumerate(zip(self.layers, dtypes, strict=True)):
            attention.layer_id = index
            attention.kv_b_proj = torch.nn.Module()
            weight = torch.zeros(1, 2, dtype=dtype)
            attention.kv_b_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
            layer = self.mla_backend_layers[index] = object.__new__(LayerWeights)
            layer.attention = attention
            layer.reload = lambda a=attention: self.reloaded.append((a.layer_id, a.kv_b_proj.weight.sum()))


DIRECT = "sglang.srt.model_executor.model_runner_components.weight_updater._model_load_weights_direct"
"""A custom loader that writes parameters."""


def load_directly(monkeypatch, model, *named_tensors, load_format="direct"):
    """What SGLang answers to ``update_weights_from_tensor`` with this ``load_format``."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    registration.register_model_side()
    for name, value in (
        ("get_parallel", lambda: types.SimpleNamespace(tp_rank=0)),
        ("_unsupported_derived_weight_cache_error", lambda model: None),
    ):
        if hasattr(weight_updater, name):
            monkeypatch.setattr(weight_updater, name, value)
    updater = types.SimpleNamespace(
        get_model=lambda: model,
        device="cpu",
        tp_rank=0,
        custom_weight_loaders=[DIRECT],
        _assert_weight_cache_inactive=lambda *_: None,
    )
    update = weight_updater.WeightUpdater.update_weights_from_tensor
    return update(updater, named_tensors=list(named_tensors), load_format=load_format)


def test_direct_loads_are_followed(monkeypatch):
    model = Layered(torch.float16, torch.bfloat16)
    new = ("layers.1.kv_b_proj.weight", torch.ones(1, 2)), ("norm.weight", torch.full((2,), 7.0))
    assert load_directly(monkeypatch, model, *new)[0]
    assert model.reloaded == [(1, 2)] and model.norm.weight.tolist() == [7, 7]


def test_loads_by_loaders_of_users_are_followed(monkeypatch):
    """They may call parameters by other names, so the absorbed weights of all layers are made again."""
    model = Layered(torch.float16, torch.int8, torch.bfloat16)
    new = ("layers.2.kv_b_proj.weight", torch.ones(1, 2))
    assert load_directly(monkeypatch, model, new, load_format=DIRECT)[0]
    assert model.reloaded == [(0, 0), (2, 2)]


def test_a_direct_load_of_a_quantized_layer_is_refused_before_it_writes(monkeypatch):
    """An exception would end the server."""
    model = Layered(torch.float16, torch.int8)
    norm = ("norm.weight", torch.full((2,), 7.0))
    updated, message = load_directly(
        monkeypatch, model, norm, ("layers.1.kv_b_proj.weight", torch.ones(1, 2))
    )
    assert not updated and re.search(r"a quantized kv_b_proj \(layer 1\).*leave load_format out", message)
    assert model.norm.weight.tolist() == [1, 1] and not model.reloaded
    assert load_directly(monkeypatch, model, norm)[0]
    assert model.norm.weight.tolist() == [7, 7] and not model.reloaded


def ours():
    from mla_backend_sglang.attention_backend import SglangMLABackend

    return object.__new__(SglangMLABackend)


def wrapper(**inner):
    return types.SimpleNamespace(**inner)


@pytest.mark.parametrize(
    "wrap, replays",
    [
        (lambda: ours(), False),
        (lambda: wrapper(prefill_backend=ours(), decode_backend=wrapper()), False),
        (lambda: wrapper(full_attn_backend=ours(), linear_attn_backend=wrapper()), False),
        (lambda: wrapper(full_attn_backend=wrapper(prefill_backend=ours(), decode_backend=wrapper())), False),
        (lambda: wrapper(primary=ours(), children=[]), False),
        (lambda: wrapper(primary=wrapper(full_attn_backend=ours()), children=[]), False),
        (lambda: wrapper(prefill_backend=wrapper(), decode_backend=ours()), True),
        (lambda: wrapper(), True),
    ],
)
def test_captured_prefills_are_not_replayed(unhooked, monkeypatch, wrap, replays):
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    monkeypatch.setattr(PrefillCudaGraphRunner, REPLAYS, lambda runner, **_: True)
    register_all()
    graph_runner = types.SimpleNamespace(model_runner=types.SimpleNamespace(attn_backend=wrap()))
    assert getattr(PrefillCudaGraphRunner, REPLAYS)(graph_runner) is replays


@pytest.mark.parametrize(
    "given, locked, captured",
    [
        (dict(attention_backend=NAME), set(), False),
        (dict(attention_backend="triton", prefill_attention_backend=NAME), set(), False),
        (dict(attention_backend=NAME), {("prefill", "backend")}, True),
        (dict(attention_backend=NAME, prefill_attention_backend="triton"), set(), True),
        (dict(attention_backend="triton"), set(), True),
    ],
    ids=["ours", "ours for prefill", "the user asks for it", "another for prefill", "another"],
)
def test_prefills_are_captured_only_if_the_user_asks_for_it(checkpoint, given, locked, captured):
    resolution_hooks = pytest.importorskip(
        "sglang.srt.arg_groups.resolution_hooks", reason="this SGLang has no registry for it"
    )
    from sglang.srt.arg_groups import overrides
    from sglang.srt.model_executor.cuda_graph_config import (
        Backend,
        Phase,
        default_cuda_graph_config,
        with_phase,
    )

    def handle_cuda_graph_config(arguments):  # as SGLang on a GPU
        arguments._cuda_graph_config_locked = locked
        config = with_phase(default_cuda_graph_config(), Phase.PREFILL, backend=Backend.BREAKABLE)
        overrides.declare_resolution(arguments, "test", cuda_graph_config=config)

    mla_backend_sglang.register()
    arguments = server_args.ServerArgs(model_path=str(checkpoint), device="cpu", page_size=64, **given)
    resolution_hooks.run_hook(handle_cuda_graph_config, arguments)
    backend = overrides.resolving_view(arguments).cuda_graph_config.prefill.backend
    assert (backend != Backend.DISABLED) is captured


@pytest.fixture
def checks_alone(unhooked, monkeypatch):
    """Of the checks of an engine's arguments, only those of this backend, not SGLang's own."""
    monkeypatch.setattr(server_args.ServerArgs, "check_server_args", lambda arguments: None)
    register_all()


@pytest.fixture
def checked(monkeypatch):
    """The lists of kernels that are checked before an engine starts."""
    from mla_backend import jit

    checks = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(jit, "why_unavailable", lambda variants: checks.append(list(variants)) or "no nvcc")
    return checks


def engine_arguments(monkeypatch, checkpoint, device="cuda", changes=None, **given):
    """Arguments of an engine, resolved as on this machine except for the device and other ``changes``."""
    from sglang.srt.arg_groups import overrides

    given = dict(attention_backend=NAME, tp_size=2, page_size=64) | given
    arguments = server_args.ServerArgs(model_path=str(checkpoint), device="cpu", **given)
    if hasattr(arguments, "resolve_once"):
        arguments.resolve_once()
    resolved = overrides.resolved_view(arguments)

    elsewhere = dict(device=device) | (changes or {})

    class Elsewhere:
        def __getattr__(self, name):
            return elsewhere[name] if name in elsewhere else getattr(resolved, name)

    monkeypatch.setattr(overrides, "resolved_view", lambda _: Elsewhere())
    return arguments


def drafts_of(path):
    """Settings of an engine whose draft model is in a folder."""
    return dict(
        speculative_algorithm="EAGLE",
        speculative_eagle_topk=1,
        speculative_draft_model_path=str(path),
        speculative_draft_model_revision=None,
    )


def rows_of(variants):
    """The query rows that kernels are for; None for those that are for any number."""
    found = (re.search(r"-r(\d+)(?:x(\d+))?-", variant.name) for variant in variants)
    return [rows and int(rows[1]) * int(rows[2] or 1) for rows in found]


def test_a_missing_compiler_is_found_before_an_engine_starts(checks_alone, monkeypatch, half, checked):
    with pytest.raises(UnsupportedError, match="kernels cannot be loaded: no nvcc"):
        engine_arguments(monkeypatch, half).check_server_args()
    # Eight heads per GPU: the kernels for one query token, for two, for three and for long queries.
    assert rows_of(checked[0]) == [8, 16, 24, 64, 128, None]
    assert checked[0][-1].name == "append"


def test_with_data_parallel_attention_each_gpu_has_all_heads(checks_alone, monkeypatch, half, checked):
    arguments = engine_arguments(monkeypatch, half, dp_size=2, enable_dp_attention=True)
    with pytest.raises(UnsupportedError, match="kernels cannot be loaded: no nvcc"):
        arguments.check_server_args()
    assert min(filter(None, rows_of(checked[0]))) == 16


@pytest.mark.parametrize("role", ["decode_attention_backend", "speculative_draft_attention_backend"])
def test_kernels_are_checked_if_the_backend_serves_one_role(checks_alone, monkeypatch, half, checked, role):
    given = {"attention_backend": "triton", role: NAME}
    arguments = engine_arguments(monkeypatch, half, changes=drafts_of(half), **given)
    with pytest.raises(UnsupportedError, match="kernels cannot be loaded: no nvcc"):
        arguments.check_server_args()


@pytest.mark.parametrize(
    "option, quantization, in_e4m3",
    [
        ("auto", None, False),
        ("auto", {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, True),
        ("fp8_e4m3", None, True),
        ("bfloat16", {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, False),
    ],
    ids=["the model's", "the checkpoint's", "fp8", "16 bits"],
)
def test_kernels_are_those_of_the_cache(monkeypatch, option, quantization, in_e4m3):
    from mla_backend_sglang import kernel_check

    config = types.SimpleNamespace(quantization_config=quantization)
    model = types.SimpleNamespace(hf_config=config, dtype=torch.bfloat16)
    expected = torch.float8_e4m3fn if in_e4m3 else torch.bfloat16
    assert kernel_check._cache_dtype(option, model) is expected


@pytest.fixture
def check_kernels(checked):
    """A function that checks the kernels of a model with 16 heads, and returns the rows that they are for."""
    from mla_backend_sglang import kernel_check

    config = types.SimpleNamespace(
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_attention_heads=16,
        hidden_size=2048,
    )
    model = types.SimpleNamespace(hf_text_config=config, hf_config=config, dtype=torch.bfloat16)
    settings = dict(tp_size=2, enable_dp_attention=False, kv_cache_dtype="auto", page_size=64)
    settings |= dict(enable_deterministic_inference=False, device="cuda")
    settings |= dict(dsa_decode_backend="fa3", dsa_prefill_backend="fa3")

    def check(table_kind=TableKind.TOKEN, refusal="no nvcc", **changes):
        with pytest.raises(UnsupportedError, match=refusal):
            kernel_check.check_kernels(model, types.SimpleNamespace(**settings | changes), table_kind)
        return rows_of(checked[-1]) if checked else None

    check.config, check.model = config, model
    return check


def test_kernels_are_those_of_the_queries(check_kernels):
    assert min(filter(None, check_kernels())) == 8
    assert min(filter(None, check_kernels(dcp_size=2))) == 16, "queries are gathered"
    assert check_kernels(enable_deterministic_inference=True) == [128, None], "one for all lengths"


@pytest.mark.parametrize("page_size, loader", [(64, "-tma"), (1, "-small_pages"), (None, "-small_pages")])
def test_kernels_are_those_of_the_page_size(check_kernels, checked, page_size, loader):
    check_kernels(page_size=page_size)
    assert loader in checked[-1][0].name


@pytest.mark.parametrize("table_kind, remedy", [("TOKEN", "choose another --att"), ("LIST", "leave MLA_BAC")])
def test_dimensions_and_dtypes_without_a_kernel_are_refused(check_kernels, checked, table_kind, remedy):
    """Dimensions are a pair: there is a kernel for other rows of 576 values."""
    kind = TableKind[table_kind]
    check_kernels.config.kv_lora_rank, check_kernels.config.qk_rope_head_dim = 448, 128
    check_kernels(kind, rf"no kernel .*\(kv_lora_rank 448 with qk_rope_head_dim 128: .*\(512, 64\).*{remedy}")
    check_kernels.model.dtype = torch.float32
    check_kernels(kind, rf"no kernel .*\(dtype torch.float32: use bfloat16 or float16\): {remedy}")
    assert not checked


@pytest.mark.parametrize(
    "d_rope, sub_backend, kv_cache_dtype, cache",
    [
        (64, "fa3", "bfloat16", ""),
        (64, "fa3", "fp8_e4m3", "-rec656"),
        (64, "tilelang", "fp8_e4m3", "-e4m3"),
        (0, "fa3", "bfloat16", ""),
        (0, "tilelang", "fp8_e4m3", "-e4m3"),
    ],
)
def test_kernels_of_sparse_layers_have_lists(
    check_kernels, checked, d_rope, sub_backend, kv_cache_dtype, cache
):
    """SGLang itself writes the cache, with or without records if it is fp8; each token is a request."""
    check_kernels.config.qk_rope_head_dim = d_rope
    given = dict(dsa_decode_backend=sub_backend, dsa_prefill_backend=sub_backend)
    check_kernels(TableKind.LIST, kv_cache_dtype=kv_cache_dtype, **given)
    names = [variant.name for variant in checked[-1]]
    assert names == [f"hopper_few_rows-bf16{cache}-d512_{d_rope}-r8-lists"]


@pytest.mark.parametrize("switch, refused", [("1", True), ("0", False)])
def test_kernels_of_sparse_layers_are_checked_if_they_are_asked_for(
    checks_alone, monkeypatch, half, checked, switch, refused
):
    monkeypatch.setenv("MLA_BACKEND_DSA", switch)
    arguments = engine_arguments(monkeypatch, half, attention_backend="dsa", dsa_decode_backend="fa3")
    with pytest.raises(UnsupportedError, match="no nvcc") if refused else contextlib.nullcontext():
        arguments.check_server_args()
    assert all(variant.name.endswith("-lists") for variants in checked for variant in variants)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """The config of a model without latent attention."""
    path = tmp_path_factory.mktemp("dense")
    transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=64, num_attention_heads=4, dtype="float16"
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def selective(tmp_path_factory):
    """The config of a model whose queries attend to selected keys."""
    path = tmp_path_factory.mktemp("selective")
    make_checkpoint(path, "--architecture", "deepseek-v3.2", "--dtype", "float16", "--config-only")
    return path


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(kv_cache_dtype="fp8_e5m2"), "this cache is fp8_e5m2 .*: start with --kv-cache-dtype fp8_e4m3"),
        (dict(kv_cache_dtype="mxfp8"), "this cache is mxfp8"),
        (dict(kv_cache_dtype="bf16"), "torch.float16, .* cache is bf16 .* with --dtype bfloat16 --kv-cache"),
        (dict(model_impl="transformers"), "not those of --model-impl transformers: leave it out"),
        (dict(enable_nvidia_megakernel=True), "does not call mla_backend: leave one of the two out"),
        (dict(weight_cache_mode="client"), "leave --weight-cache-mode out"),
        (dict(enable_pdmux=True), "--enable-pdmux .* leave it off"),
        (dict(cpu_offload_gb=4), "leave --cpu-offload-gb and --offload-group-size off"),
        (dict(attn_cp_size=2), "leave --enable-prefill-cp and --attn-cp-size off"),
        (dict(dcp_size=2, speculative_algorithm="EAGLE"), "leave --speculative-algorithm or --dcp-size out"),
        (dict(dcp_size=2, enable_deterministic_inference=True), "or --enable-deterministic-inference, out"),
        (dict(dcp_size=2, disable_chunked_prefix_cache=True), "or --disable-chunked-prefix-cache, out"),
        (dict(dcp_size=2, dcp_replicate_q_proj=True), "use --no-dcp-replicate-q-proj"),
        (dict(speculative_algorithm="NGRAM"), "another --speculative-algorithm"),
    ],
)
def test_what_the_options_decide_is_refused_before_an_engine_starts(
    checks_alone, monkeypatch, half, changes, reason
):
    arguments = engine_arguments(monkeypatch, half, "cpu", changes)
    with pytest.raises(UnsupportedError, match=reason):
        arguments.check_server_args()


@pytest.mark.parametrize("role", ["attention_backend", "prefill_attention_backend"])
@pytest.mark.parametrize(
    "model, reason",
    [
        ("dense", "this model has none: choose another --attention-backend"),
        ("selective", "DSA.*MLA_BACKEND_"),
    ],
)
def test_what_the_model_decides_is_refused_before_an_engine_starts(
    checks_alone, monkeypatch, request, half, model, reason, role
):
    """SGLang's own choices are those for another model: for some models it replaces the backend."""
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig(str(request.getfixturevalue(model)))
    arguments = engine_arguments(monkeypatch, half, "cpu", {"attention_backend": "triton", role: NAME})
    monkeypatch.setattr(ModelConfig, "from_server_args", lambda *_, **__: config)
    with pytest.raises(UnsupportedError, match=reason):
        arguments.check_server_args()


def test_drafts_without_latents_are_refused_before_an_engine_starts(checks_alone, monkeypatch, half, dense):
    """As EAGLE3's for DeepSeek models."""
    arguments = engine_arguments(monkeypatch, half, "cpu", drafts_of(half))
    arguments.check_server_args()
    arguments = engine_arguments(monkeypatch, half, "cpu", drafts_of(dense))
    with pytest.raises(UnsupportedError, match="choose another --speculative-draft-attention-backend"):
        arguments.check_server_args()
    other = drafts_of(dense) | dict(speculative_draft_attention_backend="triton")
    engine_arguments(monkeypatch, half, "cpu", other).check_server_args()


def test_draft_trees_are_refused_before_an_engine_starts(checks_alone, monkeypatch, half, checked):
    trees = dict(speculative_algorithm="EAGLE", speculative_eagle_topk=4)
    arguments = engine_arguments(monkeypatch, half, changes=trees)
    with pytest.raises(UnsupportedError, match="use --speculative-eagle-topk 1"):
        arguments.check_server_args()
    assert not checked


def test_settings_of_sparse_layers_are_checked_before_an_engine_starts(
    checks_alone, monkeypatch, half, checked
):
    monkeypatch.setenv("MLA_BACKEND_DSA", "1")
    given = dict(attention_backend="dsa", dsa_decode_backend="flashmla_kv", kv_cache_dtype="fp8_e4m3")
    with pytest.raises(UnsupportedError, match="use --dsa-decode-backend fa3"):
        engine_arguments(monkeypatch, half, **given).check_server_args()


@pytest.mark.parametrize(
    "changes",
    [dict(device="cpu"), dict(attention_backend="triton")],
)
def test_other_engines_need_no_compiler(checks_alone, monkeypatch, half, checked, changes):
    engine_arguments(monkeypatch, half, **changes).check_server_args()
    assert not checked


@pytest.mark.parametrize(
    "given, refused",
    [
        ({}, True),
        (dict(attention_backend="triton", prefill_attention_backend=NAME), True),
        (dict(prefill_attention_backend="triton"), False),
    ],
    ids=["ours", "ours for prefill", "another for prefill"],
)
def test_graphs_of_whole_prefills_are_refused(checks_alone, monkeypatch, half, given, refused):
    full = types.SimpleNamespace(prefill=types.SimpleNamespace(backend="full"))
    arguments = engine_arguments(monkeypatch, half, "cpu", dict(cuda_graph_config=full), **given)
    if not refused:
        return arguments.check_server_args()
    with pytest.raises(UnsupportedError, match="use --cuda-graph-backend-prefill disabled"):
        arguments.check_server_args()
