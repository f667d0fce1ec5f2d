"""Fused norm, rotary embedding and append: everything that SGLang skips is done exactly once."""

import math
import types

import pytest
import torch
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import DeepseekScalingRotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from mla_backend.batch import WHOLE
from mla_backend.errors import UnsupportedError
from mla_backend_sglang import attention_backend
from mla_backend_sglang.append import Appender, NewTokens
from mla_backend_sglang.attention_backend import SglangMLABackend
from mla_backend_sglang.fused_append import Deferred, FusedAppend, fuse_appends, why_not_fused
from mla_backend_sglang.settings import Settings
from tests.support.mla_oracle import cos_sin_cache, normalized, rotary_angles, rotated

HEADS, D_C, D_ROPE, PAGE_SIZE = 2, 32, 8, 4
POSITIONS = torch.tensor([17, 3])
ANGLES = rotary_angles(30, D_ROPE)


def rotary_embedding(kind=DeepseekScalingRotaryEmbedding, **changes):
    rotary = kind.__new__(kind)
    torch.nn.Module.__init__(rotary)
    values = dict(rotary_dim=D_ROPE, cos_sin_cache=cos_sin_cache(ANGLES).float(), is_neox_style=False)
    for name, value in (values | changes).items():
        setattr(rotary, name, value)
    return rotary


class Layer(torch.nn.Module):
    """Like SGLang's layer, this prepares queries and keys, and then makes the attention call."""

    def __init__(self, how):
        super().__init__()
        self.layer_id, self.qk_rope_head_dim, self.how = 3, D_ROPE, how
        self.kv_a_layernorm, self.rotary_emb = RMSNorm(D_C, eps=0.1), rotary_embedding()
        torch.nn.init.normal_(self.kv_a_layernorm.weight)
        self.other_norm, self.other_rotary = self.kv_a_layernorm, self.rotary_emb

    def normalize(self, x):
        norm = self.other_norm if self.how == "norm has another name" else self.kv_a_layernorm
        if isinstance(norm, torch.nn.Module):
            return normalized(x, norm.weight.detach(), norm.variance_epsilon).to(x.dtype)
        return norm(x)

    def rotate(self, positions, q, k):
        rotary = self.other_rotary if self.how == "rotary has another name" else self.rotary_emb
        if isinstance(rotary, torch.nn.Module):
            return [rotated(x, ANGLES[positions], interleaved=True).to(x.dtype) for x in (q, k)]
        return rotary(positions, q, k)

    def forward_absorb_prepare(self, positions, hidden_states, forward_batch, *others):
        q, q_rope, k, k_rope = hidden_states
        k = self.normalize(k)
        if self.how == "norm is called twice":
            k = self.normalize(k)
        q_rope, k_rope = self.rotate(positions, q_rope, k_rope)
        return q, q_rope, k, k_rope

    def forward(self, attend, hidden_states, forward_batch):
        q, q_rope, k, k_rope = self.forward_absorb_prepare(POSITIONS, hidden_states, forward_batch, None)
        if self.how == "queries and keys come concatenated":
            q, k = torch.cat([q, q_rope], dim=-1), torch.cat([k, k_rope], dim=-1)
            return attend(q, k, k[..., :D_C], forward_batch)
        if self.how == "the attention call is for another batch":
            forward_batch = types.SimpleNamespace(**vars(forward_batch))
        keys = None if self.how == "there are no keys" else k
        return attend(q, keys, keys, forward_batch, q_rope=q_rope, k_rope=k_rope)


class Step:
    """A decode step of two requests, whose slots are interleaved with those of the second draft step."""

    def __init__(self, how="as in tested versions", mode=ForwardMode.DECODE, current=SglangMLABackend):
        torch.manual_seed(0)
        self.layer = Layer(how)
        self.hidden = (
            torch.randn(2, HEADS, D_C),
            torch.randn(2, HEADS, D_ROPE),
            torch.randn(2, 1, D_C),
            torch.randn(2, 1, D_ROPE),
        )
        self.batch = types.SimpleNamespace(
            forward_mode=mode,
            out_cache_loc=torch.tensor([[9, 10], [4, 5]])[:, 0],
            out_cache_loc_is_physical=False,
            positions=torch.tensor([0, 0]),  # the model is called with others
        )
        self.ours = object.__new__(SglangMLABackend)
        self.rows = torch.full((5 * PAGE_SIZE, D_C + D_ROPE), math.nan)
        fused = {3: FusedAppend(self.layer, attention_backend.receives_calls)}
        self.appender = Appender(fused, WHOLE, None, torch.float32, "cpu")
        self.current = self.ours if current is SglangMLABackend else current()

    def set_kv_buffer(self, layer, location, k, v):  # of the pool
        self.rows[getattr(location, "loc", location)] = k.flatten(1)

    def attend(self, q, k, v, forward_batch, **arguments):
        attention = types.SimpleNamespace(
            layer_id=3, tp_q_head_num=HEADS, head_dim=D_C + D_ROPE, v_head_dim=D_C
        )
        cache = self.rows.unflatten(0, (-1, PAGE_SIZE))
        tokens = NewTokens.of_call(q, k, v, attention, forward_batch, **arguments)
        self.appender.append(tokens, cache, self)
        return tokens.q_nope, tokens.q_rope

    def run(self):
        return self.layer(self.attend, [x.clone() for x in self.hidden], self.batch)

    def check(self, q_nope, q_rope):
        q, q_unrotated, k, k_rope = self.hidden
        norm, near = self.layer.kv_a_layernorm, {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(q_nope, q)
        angles = ANGLES[POSITIONS]
        torch.testing.assert_close(q_rope.double(), rotated(q_unrotated, angles, interleaved=True), **near)
        latents = normalized(k[:, 0], norm.weight.detach(), norm.variance_epsilon)
        keys = rotated(k_rope[:, 0], angles, interleaved=True)
        torch.testing.assert_close(self.rows[[9, 4]].double(), torch.cat([latents, keys], -1), **near)
        assert self.rows.isnan().all(-1).sum() == len(self.rows) - 2


@pytest.fixture(autouse=True)
def current_backend(monkeypatch):
    current = types.SimpleNamespace(backend=None)
    monkeypatch.setattr(attention_backend, "get_attn_backend", lambda: current.backend)
    return current


def run(step, current_backend):
    current_backend.backend = step.current
    return step.run()


@pytest.mark.parametrize(
    "how, correct",
    [
        ("as in tested versions", True),
        ("queries and keys come concatenated", True),
        ("norm has another name", False),
        ("rotary has another name", False),
        ("norm is called twice", False),
        ("the attention call is for another batch", False),
        ("there are no keys", False),
    ],
)
def test_correct_rows_or_an_error(current_backend, how, correct):
    step = Step(how)
    if correct:
        for _ in range(2):
            step.check(*run(step, current_backend))
        return
    with pytest.raises(UnsupportedError, match="layer 3 .*: use a supported version of SGLang, or another"):
        run(step, current_backend)
    assert step.rows.isnan().all(), "something was appended before the error"
    assert not {"kv_a_layernorm", "rotary_emb"} & vars(step.layer).keys()


def test_an_unwrapped_method_leaves_all_to_sglang(current_backend):
    step = Step()
    step.layer.forward_absorb_prepare = types.MethodType(Layer.forward_absorb_prepare, step.layer)
    step.check(*run(step, current_backend))
    del step.layer.forward_absorb_prepare
    assert why_not_fused(step.layer, torch.float32) is None


def test_nothing_is_appended_if_the_cache_has_the_tokens_already(current_backend):
    step = Step("queries and keys come concatenated")
    q, q_rope, k, k_rope = step.hidden
    keys = torch.cat([k, k_rope], dim=-1)
    queries = torch.cat([q, q_rope], dim=-1)
    step.attend(queries, keys, k, step.batch, save_kv_cache=False)
    assert step.rows.isnan().all()


def test_pairs_of_halves_are_rotated_as_the_model_does():
    step = Step()
    q_rope, k, k_rope = torch.randn(2, HEADS, D_ROPE), torch.randn(2, D_C), torch.randn(2, D_ROPE)
    rotary = rotary_embedding(is_neox_style=True)
    deferred = Deferred(step.batch, POSITIONS, rotary, step.layer.kv_a_layernorm)
    tokens = NewTokens(None, step.batch, q_rope, q_rope, k, k, k_rope)
    step.appender._append_deferred(tokens, k, step.rows.unflatten(0, (-1, PAGE_SIZE)), deferred)
    expected = rotated(k_rope, ANGLES[POSITIONS], interleaved=False)
    torch.testing.assert_close(step.rows[[9, 4], D_C:].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_fp8_cache_gets_its_scale(is_fused):
    step = Step()
    appender = Appender({}, WHOLE, torch.full((1,), 0.5), torch.float32, "cpu")
    cache = torch.zeros(5, PAGE_SIZE, D_C + D_ROPE, dtype=torch.float8_e4m3fn)
    q_rope, k, k_rope = torch.randn(2, HEADS, D_ROPE), torch.randn(2, D_C), torch.randn(2, D_ROPE)
    tokens = NewTokens(None, step.batch, q_rope, q_rope, k, k, k_rope)
    if is_fused:
        deferred = Deferred(step.batch, POSITIONS, step.layer.rotary_emb, step.layer.kv_a_layernorm)
        appender._append_deferred(tokens, k, cache, deferred)
    else:
        appender._append_prepared(tokens, k, cache, step)
    rows = cache.view(-1, D_C + D_ROPE).float()
    assert rows.any(dim=1).nonzero().flatten().tolist() == [4, 9]
    if not is_fused:
        expected = (torch.cat([k, k_rope], dim=-1) / 0.5).to(torch.float8_e4m3fn).float()
        assert torch.equal(rows[[9, 4]], expected)
    else:
        torch.testing.assert_close(rows[[9, 4], D_C:].norm(), k_rope.norm() / 0.5, rtol=0.05, atol=0)


def test_a_batch_of_one_draft_step():
    """Its slots and positions have one element each, and the stride of all steps."""
    step = Step()
    q_rope, k, k_rope = torch.randn(1, HEADS, D_ROPE), torch.randn(1, D_C), torch.randn(1, D_ROPE)
    step.batch.out_cache_loc = torch.tensor([[9, 10, 11]])[:, 0]
    positions = torch.tensor([[17, 18, 19]])[:, 0]
    layer = step.layer
    deferred = Deferred(step.batch, positions, layer.rotary_emb, layer.kv_a_layernorm)
    tokens = NewTokens(None, step.batch, q_rope, q_rope, k, k, k_rope)
    step.appender._append_deferred(tokens, k, step.rows.unflatten(0, (-1, PAGE_SIZE)), deferred)
    expected = rotated(k_rope, ANGLES[positions], interleaved=True)
    torch.testing.assert_close(step.rows[[9], D_C:].double(), expected, rtol=1e-5, atol=1e-6)


def test_a_missing_attention_call_is_an_error(current_backend):
    step = Step()
    current_backend.backend = step.ours
    step.layer.forward_absorb_prepare(POSITIONS, step.hidden, step.batch)
    with pytest.raises(UnsupportedError, match="layer 3 made no attention call for the batch"):
        step.layer.forward_absorb_prepare(POSITIONS, step.hidden, step.batch)
    step.layer.forward_absorb_prepare(POSITIONS, step.hidden, step.batch)  # it is said once


@pytest.mark.parametrize(
    "mode, deferred",
    [
        (ForwardMode.DECODE, True),
        (ForwardMode.TARGET_VERIFY, True),
        (ForwardMode.DRAFT_EXTEND_V2, True),
        (ForwardMode.EXTEND, False),
        (ForwardMode.IDLE, False),  # makes no attention call
    ],
)
def test_steps_that_are_fused(current_backend, mode, deferred):
    assert_deferred(Step(mode=mode), current_backend, deferred)


@pytest.mark.parametrize("module", ["kv_a_layernorm", "rotary_emb"])
def test_hooks_that_come_later_are_called(current_backend, module):
    """As those of --forward-hooks."""
    step = Step()
    getattr(step.layer, module).register_forward_hook(lambda *_: None)
    assert_deferred(step, current_backend, False)


def assert_deferred(step, current_backend, deferred):
    current_backend.backend = step.current
    prepared = step.layer.forward_absorb_prepare(POSITIONS, step.hidden, step.batch)
    assert torch.equal(prepared[1], step.hidden[1]) is torch.equal(prepared[2], step.hidden[2]) is deferred
    assert (step.appender.fused[3].take(step.batch) is not None) is deferred


def ours():
    return object.__new__(SglangMLABackend)


def other(**inner):
    return types.SimpleNamespace(**inner)


def split(prefill, decode):
    """SGLang's wrapper for different backends, which verifies drafts with that for prefills."""
    wrapper = object.__new__(HybridAttnBackend)
    wrapper.prefill_backend, wrapper.decode_backend = prefill, decode
    wrapper.spec_attn_is_decode, wrapper.spec_attn_is_prefill = False, True
    return wrapper


@pytest.mark.parametrize(
    "wrap, modes",
    [
        (ours, {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY}),
        (lambda: split(prefill=other(), decode=ours()), {ForwardMode.DECODE}),
        (lambda: split(prefill=ours(), decode=other()), {ForwardMode.TARGET_VERIFY}),
        (lambda: split(ours(), ours()), {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY}),
        (lambda: other(full_attn_backend=ours()), {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY}),
        (lambda: other(full_attn_backend=split(prefill=other(), decode=ours())), {ForwardMode.DECODE}),
        (lambda: other(full_attn_backend=other(), linear_attn_backend=ours()), set()),
        (lambda: other(primary=ours(), children=[ours(), ours()]), set()),
        (other, set()),  # e.g. that of a draft
    ],
    ids=[
        "alone",
        "for decode",
        "for prefill",
        "for both",
        "hybrid model",
        "hybrid model, for decode",
        "another in a hybrid model",
        "two-batch overlap",
        "another",
    ],
)
def test_steps_inside_of_wrappers_are_fused_if_they_come_here(current_backend, wrap, modes):
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        assert_deferred(Step(mode=mode, current=wrap), current_backend, mode in modes)


def test_halves_of_a_batch_may_overlap(current_backend):
    """With two-batch overlap a layer prepares both halves before it attends to the first."""
    step = Step()
    current_backend.backend = step.ours
    halves = [types.SimpleNamespace(**vars(step.batch), tbo_parent_token_range=r) for r in ((0, 2), (2, 4))]
    prepared = [step.layer.forward_absorb_prepare(POSITIONS, step.hidden, half) for half in halves]
    for (q, q_rope, k, k_rope), half in zip(prepared, halves, strict=True):
        step.check(*step.attend(q, k, k, half, q_rope=q_rope, k_rope=k_rope))


class DynamicRotaryEmbedding(RotaryEmbedding):
    """A class that may compute other angles."""


def hooked(module):
    module.register_forward_hook(lambda *_: None)
    return module


def hooked_before(module):
    module.register_forward_pre_hook(lambda *_: None)
    return module


def quantizing(norm):
    norm.__dict__["_quant_linear"] = torch.nn.Identity()  # as SGLang's fuse_input_quant does
    return norm


def replaced(module):
    module.forward = lambda *_: None
    return module


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, None),
        (dict(rotary_emb=rotary_embedding(RotaryEmbedding)), None),
        (dict(rotary_emb=None), "rotary embedding is missing"),
        (dict(rotary_emb=rotary_embedding(DynamicRotaryEmbedding)), "is a DynamicRotaryEmbedding"),
        (
            dict(rotary_emb=rotary_embedding(rotary_dim=4)),
            "rotary embedding has options",
        ),
        (dict(rotary_emb=rotary_embedding(use_fallback_kernel=True)), "rotary embedding has options"),
        (dict(rotary_emb=rotary_embedding(position_start=1)), "rotary embedding has options"),
        (
            dict(rotary_emb=rotary_embedding(cos_sin_cache=torch.zeros(9, 8).bfloat16())),
            "rotary embedding has options",
        ),
        (dict(rotary_emb=hooked(rotary_embedding())), "a wrapped DeepseekScalingRotaryEmbedding"),
        (dict(rotary_emb=hooked_before(rotary_embedding())), "a wrapped DeepseekScalingRotaryEmbedding"),
        (dict(kv_a_layernorm=torch.nn.Identity()), "norm is a Identity"),
        (dict(kv_a_layernorm=replaced(RMSNorm(D_C))), "norm is a wrapped RMSNorm"),
        (
            dict(kv_a_layernorm=RMSNorm(D_C, cast_x_before_out_mul=True)),
            "norm has options",
        ),
        (
            dict(kv_a_layernorm=RMSNorm(D_C, var_hidden_size=8)),
            "norm has options",
        ),
        (
            dict(kv_a_layernorm=RMSNorm(D_C, weight_dtype=torch.float64)),
            "norm has options",
        ),
        (
            dict(kv_a_layernorm=RMSNorm(D_C, override_orig_dtype=torch.float64)),
            "norm has options",
        ),
        (dict(kv_a_layernorm=quantizing(RMSNorm(D_C))), "norm has options"),
    ],
)
def test_layers_that_are_fused(change, reason):
    layer = Layer("as in tested versions")
    for name, value in change.items():
        setattr(layer, name, value)
    why_not = why_not_fused(layer, torch.float32)
    assert why_not is None if reason is None else reason in why_not


def test_a_layer_without_the_method():
    layer = torch.nn.Module()
    layer.rotary_emb, layer.kv_a_layernorm = rotary_embedding(), RMSNorm(D_C)
    assert why_not_fused(layer, torch.float32) == "Module has no forward_absorb_prepare"


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_model_is_wrapped_and_logged_once(monkeypatch, caplog, is_deterministic):
    monkeypatch.setattr(Settings, "is_deterministic", is_deterministic)
    layers = [Layer("as in tested versions") for _ in range(4)]
    for layer in layers[1:3]:
        layer.rotary_emb = None
    model = types.SimpleNamespace(
        mla_backend_layers={i: types.SimpleNamespace(attention=layer) for i, layer in enumerate(layers)}
    )
    fused = fuse_appends(model, torch.float32, attention_backend.receives_calls)
    assert set(fused) == (set() if is_deterministic else {0, 3})
    assert fuse_appends(model, torch.float32, attention_backend.receives_calls) is fused
    assert caplog.text.count("of 2 layers to SGLang") == 1


def test_arguments_that_would_change_the_result_are_refused():
    step = Step()
    q = torch.zeros(1, HEADS, D_C + D_ROPE)
    step.attend(q, None, None, step.batch, topk_indices=None)
    with pytest.raises(UnsupportedError, match="layer 3 calls attention with attn_sink"):
        step.attend(q, None, None, step.batch, attn_sink=torch.zeros(2))
