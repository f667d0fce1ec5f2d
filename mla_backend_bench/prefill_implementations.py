"""The implementations of vanilla attention that are compared, behind one interface.

Each is a function of the inputs of one shape. It does the work that an engine does once per step, and returns
a function that attends: it takes no arguments and returns out [T, H, d_v].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mla_backend import prefill
from mla_backend import prefill_libraries as libraries
from mla_backend.errors import UnsupportedError
from mla_backend.kernels import prefill as kernels

Attend = Callable[[], Tensor]


@dataclass
class PrefillInputs:
    """One request's tensors.

    Attributes:
        q: [q_len, H, d_qk].
        k: [kv_len, H, d_qk].
        v: [kv_len, H, d_v].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        self.scale = self.q.shape[2] ** -0.5
        # One tensor for both if they are alike, as engines have it.
        starts = {
            length: torch.tensor([0, length], dtype=torch.int32, device=self.q.device)
            for length in (len(self.q), len(self.k))
        }
        self.starts_q, self.starts_k = starts[len(self.q)], starts[len(self.k)]

    @property
    def call(self) -> libraries.Call:
        offsets = (self.starts_q, self.starts_k, len(self.q), len(self.k))
        return libraries.Call(self.q, self.k, self.v, *offsets, self.scale, self.causal)


def shipped(inputs: PrefillInputs) -> Attend:
    """The library that `mla_backend.prefill.prefill` chooses on this machine."""
    dimensions = inputs.q.shape[2], inputs.v.shape[2]
    prefill.prepare(inputs.q.device, inputs.q.dtype, *dimensions, with_plans=True)
    attend = functools.partial(prefill.prefill, plans={})
    return lambda: attend(*inputs.call)


def ours(inputs: PrefillInputs, within_99k: bool) -> Attend:
    """Our kernel, in the configuration of sm_80 or of 99 KB of shared memory, on any GPU."""
    if not inputs.q.is_cuda:
        raise UnsupportedError("needs a GPU")
    d_qk, d_v = inputs.q.shape[2], inputs.v.shape[2]
    capability = torch.cuda.get_device_capability(inputs.q.device)
    if why_not := kernels.refusal(inputs.q.dtype, d_qk, d_v, capability):
        raise UnsupportedError(why_not)
    attend = functools.partial(kernels.attend, within_99k=within_99k)
    return lambda: attend(*inputs.call)[0]


def sdpa(inputs: PrefillInputs, backend: SDPBackend) -> Attend:
    """Torch's `scaled_dot_product_attention`; flash with values padded to the width of the keys."""
    if inputs.causal and len(inputs.q) != len(inputs.k):
        raise UnsupportedError("its causal mask is for as many keys as queries")
    d_qk, d_v = inputs.q.shape[2], inputs.v.shape[2]
    if d_v > d_qk:
        raise UnsupportedError("values wider than keys")
    pad = d_qk - d_v if backend is SDPBackend.FLASH_ATTENTION else 0
    q, k, v = (x.transpose(0, 1)[None] for x in (inputs.q, inputs.k, inputs.v))

    def attend() -> Tensor:
        with sdpa_kernel(backend):
            # Padding is part of the time, because the library needs it.
            out = F.scaled_dot_product_attention(
                q, k, F.pad(v, (0, pad)) if pad else v, is_causal=inputs.causal, scale=inputs.scale
            )
        return out[0].transpose(0, 1)[..., :d_v]

    return attend


def flash3(inputs: PrefillInputs) -> Attend:
    """FlashAttention-3, from its package or from an engine."""
    attend = libraries.flash3()
    if attend is None:
        raise ImportError("neither flash_attn_interface nor an engine's copy of FlashAttention-3")
    return lambda: attend(inputs.call)[0]


def flashinfer(inputs: PrefillInputs, backend: str) -> Attend:
    """FlashInfer's ragged prefill."""
    ragged = libraries.FlashInfer(inputs.q.device, backend)
    plans: libraries.Plans = {}
    return lambda: ragged.attend(inputs.call, plans)[0]


IMPLEMENTATIONS: dict[str, Callable[[PrefillInputs], Attend]] = {
    "mla_backend": shipped,
    "mla_backend_portable": functools.partial(ours, within_99k=False),
    "mla_backend_portable_99k": functools.partial(ours, within_99k=True),
    "fa3": flash3,
    "flashinfer-fa3": functools.partial(flashinfer, backend="fa3"),
    "flashinfer-fa2": functools.partial(flashinfer, backend="fa2"),
    "sdpa-flash": functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa-efficient": functools.partial(sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "sdpa-cudnn": functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
}
