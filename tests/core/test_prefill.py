"""Vanilla prefill, on whatever library the device brings."""

import fractions
import math
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mla_backend import InvalidInputError, KernelBuildError, UnsupportedError, jit
from mla_backend import prefill as prefill_module
from mla_backend import prefill_libraries as libraries
from mla_backend.kernels import merge
from mla_backend.kernels import prefill as prefill_kernels
from mla_backend.kernels.prefill import _aligned as aligned
from mla_backend.prefill import library, prefill
from tests.support.mla_oracle import assert_attention_close, dense_attention

# d_qk, d_v of DeepSeek, GLM-4.7-Flash and MiniCPM3.
WIDTHS = [(192, 128), (256, 256), (96, 64)]


def check(q_lens, kv_lens, widths, dtype, causal, device):
    d_qk, d_v = widths
    g = torch.Generator().manual_seed(0)
    q = torch.randn(sum(q_lens), 4, d_qk, generator=g).to(dtype)
    kv = torch.randn(sum(kv_lens), 4, d_qk + d_v, generator=g).to(dtype)
    k, v = kv[..., :d_qk], kv[..., d_qk:]
    expected = [
        dense_attention(*parts, d_qk**-0.5, causal)
        for parts in zip(q.split(q_lens), k.split(kv_lens), v.split(kv_lens), strict=True)
    ]
    actual = prefill(
        q.to(device),
        k.to(device),
        v.to(device),
        torch.tensor([0, *q_lens]).cumsum(0).int().to(device),
        torch.tensor([0, *kv_lens]).cumsum(0).int().to(device),
        max(q_lens),
        max(kv_lens),
        d_qk**-0.5,
        causal,
        return_lse=True,
    )
    assert actual[1].dtype is torch.float32
    expected = torch.cat([out for out, _ in expected]), torch.cat([lse for _, lse in expected])
    assert_attention_close([part.cpu() for part in actual], expected, dtype)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_prefill_on_the_cpu(widths, dtype, causal):
    assert library("cpu", dtype, *widths) == "torch"
    check([5, 1, 33, 2], [5, 7, 40, 0], widths, dtype, causal, "cpu")


def test_fp64_is_computed_in_fp64():
    q = torch.randn(5, 2, 16, dtype=torch.float64)
    starts = torch.tensor([0, 5]).int()
    expected, _ = dense_attention(q, q, q, 0.25, causal=True)
    out = prefill(q, q, q, starts, starts, 5, 5, 0.25, True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_prefill_on_a_gpu(widths, dtype, causal):
    check([5, 1, 133, 2], [5, 7, 300, 0], widths, dtype, causal, "cuda")


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that there is a GPU and libraries; `make(...)` returns what would be chosen there."""

    def make(
        capability, d_qk, d_v, *, flash3=False, flashinfer=False, can_build=True, with_plans=False, cudnn=None
    ):
        why_not = None if can_build else "no compiler"
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(prefill_module.jit, "load", lambda variant: None)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        monkeypatch.setattr(prefill_module.jit, "why_unavailable", lambda variants: why_not)
        monkeypatch.setattr(libraries, "flash3", lambda batch_invariant: print if flash3 else None)
        monkeypatch.setattr(libraries.FlashInfer, "is_installed", lambda: flashinfer)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        libraries.cudnn_serves.cache_clear()
        monkeypatch.setattr(libraries, "_flashinfer", lambda *_: SimpleNamespace(attend=print))
        prefill_module._choose.cache_clear()
        prefill_module._merges_in_one_launch.cache_clear()
        merge.module.cache_clear()
        return library("cuda", torch.bfloat16, d_qk, d_v, with_plans=with_plans)

    yield make
    prefill_module._choose.cache_clear()
    libraries.cudnn_serves.cache_clear()
    prefill_module._merges_in_one_launch.cache_clear()
    merge.module.cache_clear()
    prefill_module._failed.clear()


@pytest.mark.parametrize(
    "expected, capability, dims, here",
    [
        ("FlashAttention-3", (9, 0), (192, 128), {"flash3": True, "flashinfer": True, "with_plans": True}),
        ("FlashInfer", (9, 0), (192, 128), {"flashinfer": True, "with_plans": True}),
        ("mla_backend", (9, 0), (192, 128), {"flashinfer": True}),
        ("FlashAttention-2", (8, 0), (192, 128), {"flash3": True, "flashinfer": True, "with_plans": True}),
        ("mla_backend", (9, 0), (96, 64), {"flash3": True}),
        ("mla_backend", (9, 0), (160, 96), {"flash3": True}),
        ("FlashAttention-3", (9, 0), (160, 104), {"flash3": True}),
        ("FlashAttention-3", (9, 0), (64, 32), {"flash3": True}),
        ("mla_backend, cuDNN for one long request", (9, 0), (192, 128), {"cudnn": 91000}),
        ("mla_backend, cuDNN for one long request", (9, 0), (96, 64), {"cudnn": 91000, "flash3": True}),
        ("FlashAttention-3", (9, 0), (192, 128), {"cudnn": 91000, "flash3": True}),
        ("mla_backend", (9, 0), (192, 128), {"cudnn": 90900}),
        ("mla_backend", (9, 0), (320, 320), {"cudnn": 91000}),
        ("mla_backend", (10, 0), (192, 128), {"cudnn": 91000}),
        ("FlashAttention-2", (9, 0), (192, 128), {"can_build": False}),
        ("mla_backend", (9, 0), (256, 256), {}),
        ("FlashAttention-2", (9, 0), (192, 192), {}),
        ("FlashAttention-2", (8, 0), (256, 256), {}),
        ("mla_backend", (9, 0), (576, 512), {"flash3": True, "flashinfer": True, "with_plans": True}),
        ("mla_backend", (8, 6), (128, 192), {}),
        ("torch", (9, 0), (576, 512), {"can_build": False}),
        ("torch", (7, 5), (192, 128), {}),
        ("torch", (9, 0), (2048, 128), {}),
        ("torch", (9, 0), (100, 64), {"flash3": True}),
    ],
)
def test_the_fastest_library_is_chosen(gpu, expected, capability, dims, here):
    assert gpu(capability, *dims, **here) == expected


def cudnn(q, k, v, bias, with_lse, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """What torch returns from cuDNN, whose causal mask is aligned at the top left."""
    assert bias is None and with_lse and not dropout_p
    scores = q.double() @ k.double().transpose(2, 3) * scale
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    scores.masked_fill_(hidden & is_causal, -math.inf)
    out = scores.softmax(-1) @ v.double()
    nothing = q.new_empty(0)
    lse = scores.logsumexp(-1, keepdim=True).float()
    return out.to(q.dtype), lse, nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing


@pytest.fixture
def on_the_cpu():
    """Registers a function as torch's call of cuDNN, which has none on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    yield lambda attend: library.impl("_scaled_dot_product_cudnn_attention", attend, "CPU")
    library._destroy()


@pytest.fixture
def cudnn_calls(on_the_cpu, monkeypatch):
    """`prefill` on the CPU with cuDNN, or what is in its place; returns the shapes of its calls' queries."""
    shapes = []

    def attend(q, *arguments, **options):
        shapes.append(tuple(q.shape))
        return cudnn(q, *arguments, **options)

    by_use = {True: prefill_module._Library("cuDNN", libraries.by_cudnn), False: prefill_module._TORCH}
    on_the_cpu(attend)
    monkeypatch.setattr(prefill_module, "_choose", lambda use: by_use[use.alone])
    return shapes


@pytest.mark.parametrize(
    "lens_q, lens_k, causal, same_offsets, is_served",
    [
        ([2048], [2048], True, True, True),
        ([2049], [2049], True, True, True),
        ([2047], [2047], True, True, False),
        ([2048], [2048], True, False, False),
        ([2048], [2148], True, False, False),
        ([2048], [2048], False, True, False),
        ([2040, 8], [2040, 8], True, True, False),
    ],
)
def test_cudnn_is_asked_for_one_long_request_alone(
    cudnn_calls, lens_q, lens_k, causal, same_offsets, is_served
):
    q, k, v = (torch.randn(sum(lens), 1, dim) for lens, dim in ((lens_q, 16), (lens_k, 16), (lens_k, 8)))
    starts_q, starts_k = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (lens_q, lens_k))
    offsets = starts_q, starts_q if same_offsets else starts_k
    longest = sum(lens_q), sum(lens_k)  # they may be too large
    actual = prefill(q, k, v, *offsets, *longest, 0.25, causal, return_lse=True)
    expected = libraries.by_torch(libraries.Call(q, k, v, starts_q, starts_k, 0, 0, 0.25, causal))
    for ours, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)
    assert bool(cudnn_calls) is is_served


def test_tokens_behind_a_request_are_not_for_cudnn(cudnn_calls):
    """It would count the lengths of the tensors."""
    q, starts = torch.randn(2100, 1, 8), torch.tensor([0, 2060]).int()
    prefill(q, q, q, starts, starts, 2060, 2060, 0.25, True)
    assert not cudnn_calls


def test_cudnn_is_asked_for_few_numbers_of_tokens(cudnn_calls):
    """It compiles for each of them."""
    for tokens in (2048, 2049, 2304, 2305, 3900, 4096):
        q = torch.zeros(1, 1, 8).expand(tokens, 1, 8)
        starts = torch.tensor([0, tokens]).int()
        out = prefill(q, q, q, starts, starts, tokens, tokens, 0.25, True)
        assert len(out) == tokens
    assert {shape[2] for shape in cudnn_calls} == {2048, 2304, 2560, 4096}


@pytest.mark.parametrize("fails", [False, True])
def test_the_library_for_a_long_request_is_prepared_too(gpu, monkeypatch, fails, caplog):
    tried = []

    def try_out(chosen, use):
        tried.append(chosen.name)
        if fails and chosen.name == "cuDNN":
            raise RuntimeError("no plan")

    gpu((9, 0), 192, 128, cudnn=91000)
    monkeypatch.setattr(prefill_module, "_try_out", try_out)
    name = prefill_module.prepare("cuda", torch.bfloat16, 192, 128)
    assert tried == ["mla_backend", "cuDNN"]
    assert name == ("mla_backend" if fails else "mla_backend, cuDNN for one long request")
    assert ("cuDNN cannot be used for prefill here: no plan" in caplog.text) is fails


@pytest.mark.parametrize("factor, works", [(1, True), (1.44, False)])
def test_cudnn_is_tried_out_with_what_it_serves(on_the_cpu, factor, works):
    def attend(*arguments, **options):
        out, lse, *others = cudnn(*arguments, **options)
        return out, lse * factor, *others

    on_the_cpu(attend)
    library = prefill_module._Library("cuDNN", libraries.by_cudnn)
    with nullcontext() if works else pytest.raises(UnsupportedError, match="its lse differ from torch's"):
        prefill_module._try_out(library, ON_THE_CPU._replace(alone=True))


@pytest.mark.parametrize("can_split", [True, False])
def test_batch_invariant_attention_never_splits_keys(monkeypatch, can_split):
    """FlashAttention-3 splits them by itself, if few CTAs have work."""
    calls = []

    def attend(q, k, v, num_splits=0, **arguments):
        calls.append(num_splits)
        return v, torch.zeros(q.shape[1], q.shape[0])

    def early_attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
        raise AssertionError("it may split keys")

    function = attend if can_split else early_attend
    monkeypatch.setattr(libraries, "_flash3_function", lambda: function)
    monkeypatch.setattr(prefill_module, "_ours", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(libraries.FlashInfer, "is_installed", lambda: True)
    libraries.flash3.cache_clear()
    monkeypatch.setattr(libraries, "cudnn_serves", lambda *_: True)
    use = prefill_module._Use(torch.device("cuda", 0), torch.bfloat16, 192, 128, True, True, alone=True)
    names = [library.name for library in prefill_module._candidates(use)]
    assert ("FlashAttention-3" in names) is can_split and not {"FlashInfer", "cuDNN"} & set(names)
    others = prefill_module._candidates(use._replace(batch_invariant=False))
    assert {"FlashInfer", "cuDNN"} <= {library.name for library in others}
    if can_split:
        q, starts = torch.zeros(3, 2, 8), torch.tensor([0, 3]).int()
        for batch_invariant in (False, True):
            call = libraries.Call(q, q, q, starts, starts, 3, 3, 1.0, True)
            libraries.flash3(batch_invariant)(call)
        assert calls == [0, 1]
    libraries.flash3.cache_clear()


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_is_prepared_is_what_will_be_called(gpu, monkeypatch, batch_invariant):
    gpu((9, 0), 192, 128)
    monkeypatch.setattr(libraries, "flash3", lambda splits_alike: None if splits_alike else print)
    monkeypatch.setattr(prefill_module, "_try_out", lambda *_: None)
    prefill_module._choose.cache_clear()
    arguments, options = ("cuda", torch.bfloat16, 192, 128), {"batch_invariant": batch_invariant}
    name = prefill_module.prepare(*arguments, **options)
    assert name == library(*arguments, **options)
    assert (name == "FlashAttention-3") is not batch_invariant


def test_libraries_need_16_bit_inputs(gpu):
    gpu((9, 0), 192, 128, flash3=True)
    assert library("cuda", torch.float32, 192, 128) == "torch"


def test_flash_attention_2_may_be_missing_from_torch(gpu, monkeypatch):
    gpu((8, 0), 192, 128)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    prefill_module._choose.cache_clear()
    assert library("cuda", torch.bfloat16, 192, 128) == "mla_backend"


@pytest.fixture
def any_library(monkeypatch):
    """Pretends that a library serves the CPU; returns its calls."""
    calls = []

    def attend(call):
        calls.append(call)
        return libraries.by_torch(call)

    monkeypatch.setattr(prefill_module, "_choose", lambda *_: prefill_module._Library("any", attend))
    return calls


def test_a_chunk_without_keys_is_not_for_libraries(any_library):
    q, starts = torch.zeros(3, 2, 8), torch.tensor([0, 3]).int()
    prefill(q, q[:0], q[:0], starts, torch.zeros(2).int(), 3, 0, 1.0, False)
    assert not any_library
    prefill(q, q, q, starts, starts, 3, 3, 1.0, True)
    assert len(any_library) == 1


def test_tensors_are_checked_before_a_library_gets_them(any_library):
    q, starts = torch.zeros(3, 2, 8), torch.tensor([0, 3])
    with pytest.raises(InvalidInputError, match=r"must be torch.int32, got torch.int64"):
        prefill(q, q, q, starts, starts, 3, 3, 1.0, True)
    assert not any_library


def test_what_the_merge_kernel_does_not_serve_is_merged_by_torch(monkeypatch):
    monkeypatch.setattr(prefill_module, "_merges_in_one_launch", lambda device: True)
    monkeypatch.setattr(merge, "merge_states", None)
    state = torch.randn(3, 2, 16), torch.randn(3, 2)
    out, lse = prefill_module.merge_states(*state, *state)
    torch.testing.assert_close(out, state[0])
    torch.testing.assert_close(lse, state[1] + math.log(2))


def test_what_fails_at_start_is_not_used(gpu, monkeypatch, caplog):
    def try_out(chosen, *_):
        if chosen.name == "FlashInfer":
            raise RuntimeError("no ninja")

    gpu((9, 0), 192, 128, flashinfer=True, with_plans=True)
    monkeypatch.setattr(prefill_module, "_try_out", try_out)
    arguments = ("cuda", torch.bfloat16, 192, 128, True)
    assert prefill_module.prepare(*arguments) == library(*arguments) == "mla_backend"
    assert library("cuda:0", *arguments[1:]) == "mla_backend", "tensors have a device with an index"
    assert "FlashInfer cannot be used for prefill here: no ninja" in caplog.text


def test_a_merge_kernel_that_cannot_be_built_is_not_the_librarys_fault(gpu, monkeypatch, caplog):
    def load(variant):
        raise KernelBuildError(f"{variant} failed to compile")

    gpu((9, 0), 192, 128, flash3=True)
    monkeypatch.setattr(prefill_module, "_try_out", lambda *_: None)
    monkeypatch.setattr(jit, "load", load)
    for _ in range(2):
        assert prefill_module.prepare("cuda", torch.bfloat16, 192, 128) == "FlashAttention-3"
    (warning,) = caplog.messages
    assert warning == "torch merges the states of prefill here: merge_states (sm_90a) failed to compile"
    assert not prefill_module._merges_in_one_launch(torch.device("cuda:0"))


ON_THE_CPU = prefill_module._Use(torch.device("cpu"), torch.bfloat16, 192, 128, False, False)


@pytest.mark.parametrize(
    "factors, wrong",
    [((1, 1), None), ((1, 1.44), "lse"), ((0.9, 1), "outputs"), ((1, math.nan), "lse")],
)
def test_a_library_with_other_results_is_not_used(factors, wrong):
    """For example one whose logarithm has base 2."""

    def attend(call):
        return tuple(part * f for part, f in zip(libraries.by_torch(call), factors, strict=True))

    library = prefill_module._Library("new", attend)
    if wrong is None:
        prefill_module._try_out(library, ON_THE_CPU)
    else:
        with pytest.raises(UnsupportedError, match=f"its {wrong} differ from torch's"):
            prefill_module._try_out(library, ON_THE_CPU)


@pytest.mark.parametrize("mask", [True, False])
def test_a_library_with_another_mask_is_not_used(mask):
    def attend(call):
        return libraries.by_torch(call._replace(causal=mask))

    library = prefill_module._Library("new", attend)
    with pytest.raises(UnsupportedError, match="its outputs differ from torch's"):
        prefill_module._try_out(library, ON_THE_CPU)


def test_a_library_that_plans_is_tried_out_with_plans_of_its_own():
    given = []

    def attend(call, plans):
        given.append(plans)
        return libraries.by_torch(call)

    library = prefill_module._Library("planning", attend, takes_plans=True)
    prefill_module._try_out(library, ON_THE_CPU)
    assert given == [{}, {}]


def test_prefill_is_there_when_the_package_is():
    subprocess.run([sys.executable, "-c", "import mla_backend; mla_backend.prefill.prefill"], check=True)


def test_results_have_no_gradients():
    q, starts = torch.randn(3, 2, 8, requires_grad=True), torch.tensor([0, 3]).int()
    state = prefill(q, q, q, starts, starts, 3, 3, 1.0, True, return_lse=True)
    merged = prefill_module.merge_states(q, state[1], *state)
    assert not any(result.requires_grad for result in (*state, *merged))


def test_a_default_device_does_not_keep_libraries_from_use():
    with torch.device("meta"):
        prefill_module._try_out(prefill_module._TORCH, ON_THE_CPU)


def test_nothing_to_prepare_on_the_cpu():
    assert prefill_module.prepare("cpu", torch.bfloat16, 192, 128) == "torch"


def test_refuses_what_is_no_device():
    with pytest.raises(InvalidInputError, match="device must be one of torch's.*got None"):
        library(None, torch.bfloat16, 192, 128)


def test_without_lse():
    q, k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 4)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    out = prefill(q, k, v, starts, starts, 3, 3, 1.0, True)
    assert out.shape == (3, 2, 4)
    assert not out.isnan().any()
    torch.testing.assert_close(out, prefill(q, k, v, starts, starts, 3, 3, 1.0, True, return_lse=True)[0])


def test_rows_without_keys_merge_away():
    starts_q, starts_k = torch.tensor([0, 2]).int(), torch.tensor([0, 0]).int()
    out, lse = prefill(
        torch.randn(2, 2, 8),
        torch.randn(0, 2, 8),
        torch.randn(0, 2, 4),
        starts_q,
        starts_k,
        2,
        0,
        1.0,
        False,
        return_lse=True,
    )
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("which", ["q", "k"])
def test_refuses_offsets_that_are_not_contiguous(which):
    starts = dict.fromkeys("qk", torch.tensor([0, 3]).int())
    starts[which] = torch.tensor([[0, 0], [3, 3]]).int()[:, 0]
    q = torch.zeros(3, 2, 8)
    with pytest.raises(InvalidInputError, match=f"dimension of cu_seqlens_{which} must be contiguous"):
        prefill(q, q, q, starts["q"], starts["k"], 3, 3, 1.0, True)


@pytest.mark.parametrize(
    "change, served",
    [
        ({}, True),
        ({"out_b": torch.zeros(3, 2, 16, dtype=torch.float16)}, False),
        ({"out_b": torch.zeros(2, 2, 16, dtype=torch.bfloat16)}, False),
        ({name: torch.zeros(3, 2, 16) for name in ("out_a", "out_b")}, False),
        ({"lse_b": torch.zeros(3, 2, dtype=torch.bfloat16)}, False),
        ({"lse_a": torch.zeros(3, 1)}, False),
        ({"out_a": torch.zeros(3, 16, 2, dtype=torch.bfloat16).mT}, False),
        ({"out_a": torch.zeros(3, 2, 16, 8, dtype=torch.bfloat16)[..., 0]}, False),
        ({name: torch.zeros(3, 2, 16, dtype=torch.bfloat16)[..., :12] for name in ("out_a", "out_b")}, False),
        ({"out_a": torch.zeros(3, 2, 24, dtype=torch.bfloat16)[..., :16]}, True),
        ({"out_a": torch.zeros(3, 2, 24, dtype=torch.bfloat16)[..., 1:17]}, False),
        ({"out_b": torch.zeros(3, 2, 20, dtype=torch.bfloat16)[..., :16]}, False),
        ({"out_b": torch.zeros(3, 36, dtype=torch.bfloat16)[:, :32].unflatten(1, (2, 16))}, False),
        ({name: torch.zeros(3, 16, dtype=torch.bfloat16) for name in ("out_a", "out_b")}, False),
        ({name: torch.zeros(3, 2, 4, 8, dtype=torch.bfloat16).mT for name in ("out_a", "out_b")}, False),
        ({"out_b": torch.zeros(3, 2, 16, dtype=torch.bfloat16, device="meta")}, False),
        ({"lse_a": torch.zeros(3, 2, device="meta")}, False),
    ],
)
def test_what_the_kernel_cannot_merge_goes_to_torch(change, served):
    states = {f"out_{side}": torch.zeros(3, 2, 16, dtype=torch.bfloat16) for side in "ab"}
    states |= {f"lse_{side}": torch.zeros(3, 2) for side in "ab"}
    assert merge.serves(**states | change) is served


@pytest.mark.parametrize(
    "change, message",
    [
        ({name: torch.zeros(3, 2, 4, 4) for name in ("out_a", "out_b")}, r"two outputs \[T, H, d\]"),
        ({name: torch.zeros(3, 2) for name in ("out_a", "out_b")}, r"two outputs \[T, H, d\]"),
        ({name: torch.zeros(3, 2, 4).int() for name in ("out_a", "out_b")}, "out_a must be one of"),
        ({"lse_b": torch.zeros(3, 2).int()}, "lse_b must be one of"),
    ],
)
def test_refuses_to_merge_other_states(change, message):
    states = {f"out_{side}": torch.zeros(3, 2, 4) for side in "ab"}
    states |= {f"lse_{side}": torch.zeros(3, 2) for side in "ab"}
    with pytest.raises(InvalidInputError, match=message):
        prefill_module.merge_states(**states | change)


def test_autocast_changes_nothing():
    q, starts = torch.randn(9, 2, 8), torch.tensor([0, 9]).int()
    arguments = (q, q, q, starts, starts, 9, 9, fractions.Fraction(1, 5), True)
    expected = prefill(*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(prefill(*arguments), expected)


def test_tensors_are_copied_where_the_kernel_cannot_read_them():
    numbers = torch.arange(1 + 2 * 3 * 16, dtype=torch.bfloat16)
    misaligned = numbers[1:].view(2, 3, 16), numbers[:80].view(2, 2, 20)[..., :16]
    for x in (*misaligned, numbers[:-1].view(2, 16, 3).mT):
        copy = aligned(x)
        assert copy.data_ptr() % 16 == 0 and copy.is_contiguous() and torch.equal(copy, x)
    x = numbers[:-1].view(2, 3, 16)
    assert aligned(x) is x


@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"])
def test_refuses_what_is_no_tensor(name):
    starts = torch.tensor([0, 3]).int()
    tensors = dict.fromkeys("qkv", torch.zeros(3, 2, 8)) | {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    with pytest.raises(InvalidInputError, match=f"{name} must be a torch.Tensor, got list"):
        prefill(**tensors | {name: [0, 3]}, max_q=3, max_k=3, softmax_scale=0.1, causal=True)


@pytest.mark.parametrize(
    ("longest", "message"),
    [
        ({"max_q": 3}, "max_q is 3, but a request has 4 tokens"),
        ({"max_k": 5}, "max_k is 5, but a request has 6 tokens"),
        ({"max_q": None}, "max_q must be an int, got None"),
        ({"max_k": 6.0}, "max_k must be an int, got 6.0"),
    ],
)
def test_refuses_lengths_that_are_too_small_or_no_integers(longest, message):
    q, k = torch.zeros(5, 2, 8), torch.zeros(6, 2, 8)
    offsets = {"cu_seqlens_q": torch.tensor([0, 1, 5]).int(), "cu_seqlens_k": torch.tensor([0, 0, 6]).int()}
    with pytest.raises(InvalidInputError, match=message):
        prefill(q, k, k, **offsets, **{"max_q": 4, "max_k": 6} | longest, softmax_scale=0.1, causal=True)


def test_our_kernel_gets_aligned_tensors(monkeypatch):
    given = []
    module = SimpleNamespace(prefill=lambda *arguments: given.extend(arguments[:3]))
    monkeypatch.setattr(prefill_kernels, "_module", lambda *_: module)
    tensors = [torch.zeros(4, 2, 20, dtype=torch.bfloat16)[..., :16] for _ in range(3)]
    starts = torch.tensor([0, 4]).int()
    prefill_kernels.attend(*tensors, starts, starts, 4, 4, 1.0, True)
    assert [x.is_contiguous() for x in given] == [True] * 3


@pytest.mark.parametrize("capability, within_99k", [((8, 0), False), ((8, 9), True), ((12, 0), True)])
def test_our_kernel_keeps_to_the_shared_memory_of_the_gpu(monkeypatch, capability, within_99k):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    variant = prefill_kernels.variant_on(torch.device("cuda"), torch.bfloat16, 192, 128)
    assert variant.name.endswith("-99k") is within_99k


@pytest.mark.filterwarnings("error")
def test_lengths_of_numpy_do_not_overflow(monkeypatch):
    """128 heads of 32,768 keys and values have more bytes than an int32 can count."""
    calls = []
    module = SimpleNamespace(prefill=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(prefill_kernels, "_module", lambda *_: module)
    ours = prefill_module._Library("mla_backend", lambda call: prefill_kernels.attend(*call))
    monkeypatch.setattr(prefill_module, "_choose", lambda *_: ours)
    q, starts = torch.zeros(1, 128, 192).bfloat16(), torch.tensor([0, 1]).int()
    prefill(q, q, q[..., :128], starts, starts, np.int32(1), np.int32(32768), 0.1, True)
    *_, max_q, _, _, head_group = calls[0]
    assert (max_q, head_group) == (1, 1), "the keys and values of one head exceed L2_KEY_BYTES"


def test_refuses_integers():
    starts = torch.tensor([0, 3]).int()
    q = torch.zeros(3, 2, 8, dtype=torch.int64)
    with pytest.raises(InvalidInputError, match="q must be "):
        prefill(q, q, q, starts, starts, 3, 3, 0.1, True)


@pytest.mark.parametrize("softmax_scale", [0.0, -1.0, math.nan, math.inf, None, "a", 1j, True])
def test_refuses_a_scale_that_is_not_positive(softmax_scale):
    starts = torch.tensor([0, 3]).int()
    q = torch.zeros(3, 2, 8)
    with pytest.raises(InvalidInputError, match="softmax_scale must be a number, finite and greater than 0"):
        prefill(q, q, q, starts, starts, 3, 3, softmax_scale, True)


def test_refuses_different_heads():
    starts = torch.tensor([0, 3]).int()
    with pytest.raises(InvalidInputError, match="must agree in H"):
        prefill(
            torch.zeros(3, 2, 8), torch.zeros(3, 1, 8), torch.zeros(3, 1, 8), starts, starts, 3, 3, 1.0, True
        )
