"""How the backend becomes known to SGLang, and what it hooks, on whichever version runs."""

import inspect
import types

import pytest
from sglang.srt import server_args
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

import mla_backend_sglang
from mla_backend_sglang import registration

NAME = "mla_backend"


@pytest.fixture(scope="module", autouse=True)
def plugins():
    load_plugins()


def test_the_entry_point_makes_it_a_choice_once():
    mla_backend_sglang.register()  # a second time
    assert server_args.ATTENTION_BACKEND_CHOICES.count(NAME) == 1
    assert server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count(NAME) == 1
    assert server_args.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count(NAME) == 1
    assert ATTENTION_BACKENDS[NAME] is mla_backend_sglang.create_backend


def test_a_failed_registration_says_why(monkeypatch, capsys):
    def fail(*_):
        raise AttributeError("no such registry")

    monkeypatch.setattr(registration, "register_choices", fail)
    with pytest.raises(AttributeError):
        mla_backend_sglang.register()
    assert "--attention-backend mla_backend will not be known: AttributeError: no such registry" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("backend, accepted", [(NAME, True), ("flashinfer", False)])
def test_deterministic_inference_of_deepseek_models(checkpoint, backend, accepted):
    """Our entry in the list that SGLang asks, and our hook where it has a fixed one."""

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
    """What DraftBackendFactory looks at."""


def draft_factory(monkeypatch, num_steps):
    from sglang.srt.speculative import draft_utils

    arguments = types.SimpleNamespace(
        speculative_draft_attention_backend=NAME,
        attention_backend=NAME,
        decode_attention_backend=None,
        prefill_attention_backend=None,
        speculative_attention_mode="prefill",
    )
    runner = FakeRunner(
        draft_attention_backend=NAME,
        model_config=types.SimpleNamespace(hf_config=object(), hf_text_config=object()),
    )
    for name, value in (("get_spec", lambda: arguments), ("attention_backends", lambda: (NAME, NAME))):
        if hasattr(draft_utils, name):
            monkeypatch.setattr(draft_utils, name, value)
    given = dict(server_args=arguments, draft_model_runner=runner, topk=1, speculative_num_steps=num_steps)
    parameters = inspect.signature(draft_utils.DraftBackendFactory.__init__).parameters
    return draft_utils.DraftBackendFactory(**{k: v for k, v in given.items() if k in parameters})


def test_drafts_get_our_backends(monkeypatch):
    import sgl_kernel_stub

    sgl_kernel_stub.install()
    from mla_backend_sglang import backend

    made = []

    class Recorder(types.SimpleNamespace):
        def __init__(self, runner, draft_step=None):
            super().__init__(draft_step=draft_step)
            made.append(self)

    monkeypatch.setattr(backend, "MLABackend", Recorder)
    registration.register_model_side(NAME)
    factory = draft_factory(monkeypatch, num_steps=4)
    decode = factory.create_decode_backend()
    assert isinstance(decode, backend.MLADraftDecodeBackend)
    assert [step.draft_step for step in decode.attn_backends] == [0, 1, 2]
    extend = factory.create_draft_extend_backend()
    assert extend is made[-1] and extend.draft_step is None


def test_hooks_are_only_those_that_have_no_registry():
    registration.register_model_side(NAME)
    ours = {
        target.rpartition(".")[2]
        for target, hooks in HookRegistry._hooks.items()
        for _, hook, _ in hooks
        if hook.__module__.startswith("mla_backend_sglang")
    }
    assert ours - {"_handle_deterministic_inference"} == {
        "_create_backend",
        "_model_load_weights_direct",
        "_fuse_rope_for_trtllm_mla",
        "forward_absorb_prepare",
    }
    fixed_list = "deepseek_deterministic_attention_backends"
    method = getattr(server_args.ServerArgs, "_handle_deterministic_inference", None)
    original = getattr(method, "__wrapped__", method)
    needed = original is not None and fixed_list in original.__code__.co_varnames
    assert ("_handle_deterministic_inference" in ours) == needed
