"""The libraries that vanilla attention runs on, each with what it needs of a call.

Their attention takes a `Call`, and returns out [T, H, d_v] and lse [T, H]. :mod:`mla_backend.prefill` chooses
among them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_backend import torch_attention
from mla_backend.device import without_autocast

_FIRST_CUDNN = 91000
"""The first version of cuDNN that serves head dimensions above 128 on Hopper: 9.10."""
_LONG = 2048
"""Tokens from which cuDNN is worth its copies."""

Plans: TypeAlias = dict[tuple[Any, ...], Any]
"""What libraries have planned, by what a plan depends on."""


class Call(NamedTuple):
    """Arguments of `mla_backend.prefill.prefill`, which has checked them."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int
    softmax_scale: float
    causal: bool


def by_torch(call: Call) -> tuple[Tensor, Tensor]:
    """Plain torch, on any device."""
    q, k, v, starts_q, starts_k, _, _, scale, causal = call
    wide = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q.device):
        return torch_attention.prefill_attention(
            q, k, v, starts_q, starts_k, scale, causal=causal, compute_dtype=wide
        )


def flash3_serves(d_qk: int, d_v: int) -> bool:
    """Whether FlashAttention-3 serves these head dimensions."""
    if d_qk % 8 or d_v % 8:
        return False
    return d_v == d_qk <= 256 or d_v < d_qk <= 64 or (128 < d_qk <= 192 and 96 < d_v <= 128)


@functools.cache
def flash3(batch_invariant: bool = False) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """FlashAttention-3, from its package or an engine's copy; takes a `Call`. None if there is none."""
    function = _flash3_function()
    if function is not None and batch_invariant:  # its default is to split keys if few CTAs have work
        if "num_splits" not in inspect.signature(function).parameters:
            return None
        function = functools.partial(function, num_splits=1)
    return functools.partial(_flash3, function) if function is not None else None


@functools.cache
def _flash3_function() -> Callable[..., tuple[Tensor, ...]] | None:
    """``flash_attn_varlen_func``, with the arguments that make it return the log-sum-exp."""
    for name in ("flash_attn_interface", "sgl_kernel.flash_attn", "vllm.vllm_flash_attn"):
        if name.startswith("vllm") and "vllm" not in sys.modules:
            continue  # importing an engine takes seconds
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        versions = getattr(module, "is_fa_version_supported", None)
        if versions is not None and not versions(3):
            continue
        # The name of the argument differs; early releases have none and always return the log-sum-exp.
        arguments = {"return_attn_probs": True, "return_softmax_lse": True, "fa_version": 3}
        attend = module.flash_attn_varlen_func
        known = inspect.signature(attend).parameters
        return functools.partial(attend, **{key: arguments[key] for key in arguments if key in known})
    return None


def _flash3(function: Callable[..., tuple[Tensor, ...]], call: Call) -> tuple[Tensor, Tensor]:
    out, lse, *_ = function(
        call.q,
        call.k,
        call.v,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        max_seqlen_q=call.max_q,
        max_seqlen_k=call.max_k,
        softmax_scale=call.softmax_scale,
        causal=call.causal,
    )
    return out, _finite_or_empty(lse)


def by_flash2(call: Call) -> tuple[Tensor, Tensor]:
    """FlashAttention-2, which torch contains; values are padded to the width of the keys."""
    q, k, v, starts_q, starts_k, max_q, max_k, scale, causal = call
    padded = F.pad(v, (0, q.shape[2] - v.shape[2]))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, padded, starts_q, starts_k, max_q, max_k, 0.0, causal, False, scale=scale
    )
    return out[:, :, : v.shape[2]], _finite_or_empty(lse)


def is_alone(call: Call) -> bool:
    """Whether the call is causal attention of one long request to its own tokens, by what the host knows.

    cuDNN's causal mask is aligned at the top left, and torch does not pass it the lengths of requests. So
    queries and keys must be the same tokens: of the same offsets, and with no others behind them.
    """
    return (
        call.causal
        and call.max_q >= _LONG
        and len(call.q) == len(call.k) == call.max_q == call.max_k
        and len(call.cu_seqlens_q) == len(call.cu_seqlens_k) == 2
        and call.cu_seqlens_q.data_ptr() == call.cu_seqlens_k.data_ptr()
    )


@functools.cache
def cudnn_serves(d_qk: int, d_v: int) -> bool:
    """Whether torch's cuDNN serves these head dimensions."""
    version = None
    with contextlib.suppress(RuntimeError):  # not the version that torch was built with
        version = torch.backends.cudnn.version()
    return (version or 0) >= _FIRST_CUDNN and d_v <= d_qk <= 256 and d_qk % 8 == d_v % 8 == 0


def by_cudnn(call: Call) -> tuple[Tensor, Tensor]:
    """cuDNN's attention, for calls of which `is_alone` is true.

    cuDNN compiles for each number of tokens, which takes longer than a step of a model. So the number is
    rounded up to one of 8 between two powers of two, by tokens that no query of the request sees.
    """
    tokens = len(call.q)
    padding = -tokens % (1 << max(0, tokens.bit_length() - 4))
    q, k, v = (
        (F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x.contiguous()).transpose(0, 1)[None]
        for x in (call.q, call.k, call.v)
    )
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=call.softmax_scale
    )
    return out[0, :, :tokens].transpose(0, 1), lse.reshape(q.shape[1], -1)[:, :tokens].T


def _finite_or_empty(lse: Tensor) -> Tensor:
    """[H, T] as [T, H], with -inf for queries without keys, for which FlashAttention-2 has +inf."""
    return lse.masked_fill(lse.isposinf(), -math.inf).transpose(0, 1)


class FlashInfer:
    """FlashInfer's ragged prefill, which is planned on the host.

    A plan takes 8 MiB on the host, which are copied in stream order to as many on the GPU. When a plan is no
    longer used and its copy is done, another plan reuses the memory. The GPU may still be running the old
    plan then, so all plans and runs are on one stream.

    Args:
        device: where the tensors are.
        backend: "fa3" or "fa2".
    """

    _WORKSPACE_BYTES = 128 << 20
    _IDLE_SECONDS = 60

    def __init__(self, device: torch.device, backend: str):
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        workspace = torch.empty(self._WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._make = functools.partial(
            BatchPrefillWithRaggedKVCacheWrapper, workspace, "NHD", backend=backend
        )
        self._spare: deque[_Spare] = deque()  # in the order in which their plans ended

    @staticmethod
    def is_installed() -> bool:
        """Whether FlashInfer can be imported; importing it takes seconds."""
        return importlib.util.find_spec("flashinfer") is not None

    def attend(self, call: Call, plans: Plans) -> tuple[Tensor, Tensor]:
        """As `prefill`."""
        q, k, v, cu_seqlens_q, cu_seqlens_k, _, _, softmax_scale, causal = call
        heads = (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
        key = (id(cu_seqlens_q), id(cu_seqlens_k), *heads, q.dtype, softmax_scale, causal)
        if key not in plans:
            options = {"causal": causal, "sm_scale": softmax_scale, "q_data_type": q.dtype}
            plans[key] = self._plan((cu_seqlens_q, cu_seqlens_k), *heads, **options)
        out, lse = plans[key].wrapper.run(q, k, v, return_lse=True)
        return out, lse * math.log(2)  # FlashInfer's logarithm has base 2

    def _plan(self, offsets: tuple[Tensor, Tensor], *heads: int, **options: Any) -> _FlashInferPlan:
        wrapper = self._take_spare() or self._make()
        wrapper.plan(*offsets, *heads, **options)
        copied = torch.cuda.Event()
        copied.record()
        plan = _FlashInferPlan(wrapper, offsets)
        weakref.finalize(plan, lambda: self._spare.append(_Spare(wrapper, copied, time.monotonic())))
        return plan

    def _take_spare(self) -> Any | None:
        """A wrapper whose plan has been copied: the last one used, so that others stay idle and are freed."""
        while self._spare and self._spare[0].since < time.monotonic() - self._IDLE_SECONDS:
            self._spare.popleft()
        for index in reversed(range(len(self._spare))):
            if self._spare[index].copied.query():
                spare = self._spare[index]
                del self._spare[index]
                return spare.wrapper
        return None


class _Spare(NamedTuple):
    """A wrapper whose plan has ended, since when, and an event after the copy of that plan."""

    wrapper: Any
    copied: torch.cuda.Event
    since: float


@dataclass(frozen=True)
class _FlashInferPlan:
    """A wrapper that has planned, and its offsets, kept so that no other tensors can get their ids."""

    wrapper: Any
    offsets: tuple[Tensor, Tensor]


@functools.cache
def _flashinfer(device: torch.device, stream: int) -> FlashInfer:
    """The `FlashInfer` of a stream, made at its first use, because its workspace takes 128 MiB."""
    return FlashInfer(device, "fa3")


def by_flashinfer(call: Call, plans: Plans) -> tuple[Tensor, Tensor]:
    """FlashInfer, on the current stream."""
    device = call.q.device
    return _flashinfer(device, torch.cuda.current_stream(device).cuda_stream).attend(call, plans)
