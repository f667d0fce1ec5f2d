"""Vanilla prefill, on whatever library the device brings."""

import math
import sys
from types import ModuleType

import pytest
import torch

from mla_backend import InvalidInputError
from mla_backend import prefill as prefill_module
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


@pytest.mark.gpu
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_prefill_on_a_gpu(widths, dtype, causal):
    check([5, 1, 133, 2], [5, 7, 300, 0], widths, dtype, causal, "cuda")


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


def test_refuses_different_heads():
    starts = torch.tensor([0, 3]).int()
    with pytest.raises(InvalidInputError, match="must agree in H"):
        prefill(
            torch.zeros(3, 2, 8), torch.zeros(3, 1, 8), torch.zeros(3, 1, 8), starts, starts, 3, 3, 1.0, True
        )


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
    attend = prefill_module._flash3_function.__wrapped__()
    lengths = {"cu_seqlens_q": 0, "cu_seqlens_k": 0, "max_seqlen_q": 0, "max_seqlen_k": 0}
    assert attend(0, 0, 0, **lengths) == ("out", "lse")
