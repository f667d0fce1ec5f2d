"""Stand-ins of libraries for vanilla prefill: FlashInfer's plans, and the search for FlashAttention-3."""

import math
import sys
import weakref
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mla_backend import prefill as prefill_module
from mla_backend import prefill_libraries as libraries
from mla_backend.prefill import prefill


@pytest.fixture
def flashinfer_plans(monkeypatch):
    """What FlashInfer, or what is in its place, has planned so far."""
    plans = []

    class Wrapper:
        def __init__(self, workspace, layout, backend):
            assert (layout, backend) == ("NHD", "fa3")

        def plan(self, *arguments, **options):
            plans.append((arguments[2:], options, weakref.ref(self)))

        def run(self, q, k, v, return_lse):
            return v, torch.ones(q.shape[:2])

    flashinfer = ModuleType("flashinfer")
    flashinfer.BatchPrefillWithRaggedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(torch.cuda, "Event", Copied)
    return plans


class Copied:
    """An event behind a plan's copy to the GPU, which arrives when `has_arrived` says so."""

    has_arrived = True

    def record(self):
        pass

    def query(self):
        return self.has_arrived


@pytest.fixture
def attend_by_flashinfer(flashinfer_plans, monkeypatch):
    """`prefill` of three tokens with FlashInfer, or what is in its place, and the plans of a step."""
    ragged = libraries.FlashInfer(torch.device("cpu"), "fa3")
    chosen = prefill_module._Library("FlashInfer", ragged.attend, takes_plans=True)
    monkeypatch.setattr(prefill_module, "_choose", lambda *_: chosen)
    q, v = torch.zeros(3, 2, 192), torch.zeros(3, 2, 128)
    return lambda starts, plans: prefill(q, q, v, starts, starts, 3, 3, 0.5, True, True, plans)


@pytest.mark.parametrize("pairs", [1, 9, 40])
def test_layers_share_the_plans_of_a_step(attend_by_flashinfer, flashinfer_plans, pairs):
    """However many pairs of offsets the step has."""
    plans, offsets = {}, [torch.tensor([0, 3], dtype=torch.int32) for _ in range(pairs)]
    for _ in range(61):
        for starts in offsets:
            _, lse = attend_by_flashinfer(starts, plans)
    assert len(flashinfer_plans) == pairs
    options = {"causal": True, "sm_scale": 0.5, "q_data_type": torch.float32}
    assert flashinfer_plans[0][:2] == ((2, 2, 192, 128), options)
    torch.testing.assert_close(lse, torch.full((3, 2), math.log(2)))


@pytest.mark.parametrize("has_arrived", [True, False])
def test_plans_take_the_place_of_those_whose_steps_have_ended(
    attend_by_flashinfer, flashinfer_plans, monkeypatch, has_arrived
):
    """Not before the GPU has copied these from the host, which may be steps ahead."""
    monkeypatch.setattr(Copied, "has_arrived", has_arrived)
    for pairs in (9, 9, 4, 9):
        plans = {}
        for _ in range(pairs):
            attend_by_flashinfer(torch.tensor([0, 3], dtype=torch.int32), plans)
    assert len({id(wrapper()) for *_, wrapper in flashinfer_plans}) == (9 if has_arrived else 31)


def test_plans_of_a_large_step_are_freed(attend_by_flashinfer, flashinfer_plans, monkeypatch):
    """When smaller steps have not needed them for some time."""
    now = 0.0
    monkeypatch.setattr(libraries.time, "monotonic", lambda: now)
    for pairs in (30, *[2] * 40):
        plans, now = {}, now + 5
        for _ in range(pairs):
            attend_by_flashinfer(torch.tensor([0, 3], dtype=torch.int32), plans)
    assert sum(wrapper is not None for wrapper in {wrapper() for *_, wrapper in flashinfer_plans}) == 2


def test_streams_share_no_plans(monkeypatch):
    made, stream = [], SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(libraries, "FlashInfer", lambda *_: made.append(1) or SimpleNamespace(attend=print))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    libraries._flashinfer.cache_clear()
    call = SimpleNamespace(q=SimpleNamespace(device=torch.device("cuda", 0)))
    for stream.cuda_stream in (7, 8, 7):
        libraries.by_flashinfer(call, {})
    libraries._flashinfer.cache_clear()
    assert len(made) == 2


def test_flashinfer_plans_again_for_all_that_a_plan_depends_on(flashinfer_plans):
    ragged, plans = libraries.FlashInfer(torch.device("cpu"), "fa3"), {}
    starts, others = (torch.tensor([0, 3], dtype=torch.int32) for _ in range(2))

    def planned(heads=2, d_v=128, dtype=torch.bfloat16, ends=starts, scale=0.5, causal=True):
        q = torch.zeros(3, heads, 192, dtype=dtype)
        ragged.attend(libraries.Call(q, q, q[..., :d_v], starts, ends, 3, 3, scale, causal), plans)
        return len(flashinfer_plans)

    assert planned() == planned() == 1
    changes = [{"heads": 4}, {"d_v": 64}, {"dtype": torch.float16}, {"ends": others}]
    changes += [{"scale": 0.25}, {"causal": False}]
    assert [planned(**change) for change in changes] == [2, 3, 4, 5, 6, 7]
    assert planned() == 7


def test_plans_keep_their_offsets(attend_by_flashinfer):
    """Otherwise other offsets could have the identity of a plan's, and get that plan."""
    plans, starts = {}, torch.tensor([0, 3], dtype=torch.int32)
    attend_by_flashinfer(starts, plans)
    kept = weakref.ref(starts)
    del starts
    assert kept() is not None


def flash_attn_3(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_attn_probs=False):
    return ("out", "lse") if return_attn_probs else "out"


def flash_attn_of_engines(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, return_softmax_lse=False, fa_version=2
):
    return ("out", "lse") if return_softmax_lse and fa_version == 3 else "out"


@pytest.mark.parametrize(
    "name, function",
    [
        ("flash_attn_interface", flash_attn_3),
        ("sgl_kernel.flash_attn", flash_attn_of_engines),
        ("vllm.vllm_flash_attn", flash_attn_of_engines),
    ],
)
def test_finds_flash_attention_3_and_asks_for_the_lse(monkeypatch, name, function):
    module = ModuleType(name)
    module.flash_attn_varlen_func = function
    monkeypatch.setitem(sys.modules, name.partition(".")[0], ModuleType(name.partition(".")[0]))
    monkeypatch.setitem(sys.modules, name, module)
    attend = libraries._flash3_function.__wrapped__()
    lengths = {"cu_seqlens_q": 0, "cu_seqlens_k": 0, "max_seqlen_q": 0, "max_seqlen_k": 0}
    assert attend(0, 0, 0, **lengths) == ("out", "lse")


def test_flash_attention_3_gives_the_lse_as_others_do():
    """[T, H], -inf without keys: in the library [H, T], in some versions +inf."""
    lse = torch.tensor([[1.0, math.inf, 2.0], [3.0, math.inf, 4.0]])
    out = torch.zeros(3, 2, 8)
    call = libraries.Call(out, out, out, 0, 0, 3, 3, 0.5, True)
    attended = libraries._flash3(lambda *_, **__: (out, lse), call)
    assert attended[0] is out
    assert torch.equal(attended[1], torch.tensor([[1.0, 3.0], [-math.inf, -math.inf], [2.0, 4.0]]))


@pytest.mark.parametrize(
    "engine_runs, version, found", [(True, 3, True), (True, 2, False), (True, 4, False), (False, 3, False)]
)
def test_an_engines_copy_is_taken_if_it_is_flash_attention_3(monkeypatch, engine_runs, version, found):
    """Not imported for this, which would take seconds."""
    copy = ModuleType("vllm.vllm_flash_attn")
    copy.flash_attn_varlen_func = flash_attn_of_engines
    copy.is_fa_version_supported = lambda asked: asked == version
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", copy)
    if engine_runs:
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    else:
        monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert (libraries._flash3_function.__wrapped__() is not None) is found
