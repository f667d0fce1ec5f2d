"""Prefill on Ampere and newer GPUs: the choice among the kernels of `csrc/prefill/kernel.cuh`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_backend import jit
from mla_backend.jit import KernelVariant
from mla_backend.kernels.base import ELEMENT_NAMES, ELEMENTS, FIRST_CAPABILITY, cpp_struct
from mla_backend.kernels.portable import has_only_99k

MAX_DIM = 1024
"""The largest head dimension, of keys and of values."""

SHARED_BYTES, SHARED_BYTES_99K = 163 << 10, 99 << 10
"""What a CTA may have on sm_80, and on the architectures of which `has_only_99k` is true."""

L2_KEY_BYTES = 16 << 20
"""Keys and values of the heads whose query blocks are in turn on the GPU: they should stay in
its L2 cache."""


class Tuning(NamedTuple):
    """Fields of `mla::prefill::PrefillConfig`, which explains them."""

    row_blocks: int
    row_groups: int
    column_groups: int
    tile: int
    stages: int
    key_columns: int
    value_tokens: int
    streams_queries: bool
    mbarriers: bool
    ctas: int


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """A kernel: dtype, head dimensions, tuning and where it runs."""

    dtype: torch.dtype
    d_qk: int
    d_v: int
    tuning: Tuning
    arch: str
    within_99k: bool

    def variant(self) -> KernelVariant:
        """The translation unit that instantiates this kernel."""
        fields = self.tuning._asdict()
        config = cpp_struct("mla::prefill::PrefillConfig", dim_qk=self.d_qk, dim_v=self.d_v, **fields)
        most = SHARED_BYTES_99K if self.within_99k else SHARED_BYTES
        source = f"""\
#include "ffi/prefill.cuh"
using Config = mla::prefill::KernelConfig<{ELEMENTS[self.dtype]}, {config}>;
static_assert(sizeof(mla::prefill::PrefillMemory<Config>) <= {most});
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prefill, mla::ffi::prefill<Config>);
"""
        suffix = "-99k" * self.within_99k
        name = f"prefill-{ELEMENT_NAMES[self.dtype]}-d{self.d_qk}_{self.d_v}{suffix}"
        return KernelVariant(name, source, self.arch)

    def shared_bytes(self) -> int:
        """An upper bound of `sizeof(mla::prefill::PrefillMemory)`, which the compiler checks exactly."""
        t = self.tuning
        rows, column_blocks = 16 * t.row_blocks * t.row_groups, _round_up(self.d_qk, 64) // 64
        key_bytes = t.tile * t.key_columns * 2
        value_columns = _round_up(self.d_v, 16 * t.column_groups)
        value_bytes = t.value_tokens * _round_up(value_columns, 64) * 2
        queries = 0 if t.streams_queries else rows * column_blocks * 128
        replaces_queries = t.streams_queries and t.tile <= t.key_columns and value_bytes <= key_bytes
        probabilities = 0 if t.column_groups == 1 or replaces_queries else rows * t.tile * 2
        states = 4 * rows * (1 + max(4, 2 * t.column_groups)) + 384 + 16 * t.stages
        stage = max(key_bytes + rows * t.key_columns * 2 * t.streams_queries, value_bytes)
        return t.stages * stage + queries + probabilities + states


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _tunings(d_qk: int, d_v: int) -> list[Tuning]:
    """The tunings that may serve the dimensions, the best first; the last one fits into 99 KB."""
    whole = _round_up(d_qk, 64)
    if d_v <= 128:
        return [
            Tuning(2, 4, 1, 64, 2, whole, 64, False, False, 2),
            Tuning(2, 4, 2, 64, 3, 64, 32, True, False, 1),
        ]
    if d_v <= 256:
        return [
            Tuning(2, 4, 2, 64, 2, whole, 64, False, True, 1),
            Tuning(2, 2, 4, 128, 2, 128, 64, True, True, 1),
        ]
    if d_v <= 320:
        return [
            Tuning(2, 2, 4, 128, 2, 192, 64, False, True, 1),
            Tuning(2, 2, 4, 128, 3, 64, 32, True, True, 1),
        ]
    if d_v <= 512:
        return [
            Tuning(2, 2, 4, 128, 2, 192, 64, True, True, 1),
            Tuning(2, 2, 4, 128, 2, 128, 32, True, True, 1),
        ]
    if d_v <= 576:
        return [
            Tuning(2, 2, 4, 128, 2, 192, 64, True, True, 1),
            Tuning(2, 2, 4, 128, 2, 64, 32, True, False, 1),
        ]
    if d_v <= 768:
        return [
            Tuning(2, 2, 4, 128, 2, 192, 32, True, False, 1),
            Tuning(2, 2, 4, 128, 2, 128, 16, True, False, 1),
        ]
    return [Tuning(3, 1, 8, 128, 2, 192, 32, True, True, 1), Tuning(3, 1, 8, 128, 2, 128, 16, True, False, 1)]


def prefill_config(dtype: torch.dtype, d_qk: int, d_v: int, arch: str, within_99k: bool) -> PrefillConfig:
    """The tuning decision. ``within_99k`` keeps to 99 KB of shared memory."""
    for tuning in _tunings(d_qk, d_v):
        config = PrefillConfig(
            dtype=dtype, d_qk=d_qk, d_v=d_v, tuning=tuning, arch=arch, within_99k=within_99k
        )
        if config.shared_bytes() <= (SHARED_BYTES_99K if within_99k else SHARED_BYTES):
            return config
    raise AssertionError(f"no kernel for head dimensions {d_qk} and {d_v}")


def refusal(dtype: torch.dtype, d_qk: int, d_v: int, capability: tuple[int, int]) -> str | None:
    """Why there is no kernel for these inputs, or None."""
    if capability < FIRST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]}: the kernels need 8.0 or newer"
    if dtype not in ELEMENTS:
        return f"dtype {dtype}: use bfloat16 or float16"
    for dim in (d_qk, d_v):
        if dim % 8 or not 0 < dim <= MAX_DIM:
            return f"head dimension {dim}: the kernels serve multiples of 8 up to {MAX_DIM}"
    return None


def shipped_variants(arch: str) -> list[KernelVariant]:
    """In bf16, vanilla heads of DeepSeek, of GLM-4.7-Flash, of MiniCPM3 and of Mistral-Small-4."""
    dimensions = ((192, 128), (256, 256), (96, 64), (128, 128))
    return [prefill_config(torch.bfloat16, *dims, arch, has_only_99k(arch)).variant() for dims in dimensions]


def variant_on(
    device: torch.device, dtype: torch.dtype, d_qk: int, d_v: int, within_99k: bool | None = None
) -> KernelVariant:
    """The kernel for a CUDA device, for inputs that `refusal` accepts; ``within_99k`` as in `attend`."""
    arch = jit.arch_of(device)
    return prefill_config(
        dtype, d_qk, d_v, arch, has_only_99k(arch) if within_99k is None else within_99k
    ).variant()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    softmax_scale: float,
    causal: bool,
    within_99k: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Vanilla attention by our kernel, as `mla_backend.prefill.prefill` describes it.

    Args:
        k, v: may have fewer heads than q, of which each serves as many heads of q.
        within_99k: keep to 99 KB of shared memory, as on Ada; by default, only if the GPU has no more.

    Returns:
        out [T, H, d_v], and lse [T, H] in fp32; rows without keys are 0 and -inf.
    """
    module = _module(q.device, q.dtype, q.shape[2], v.shape[2], within_99k)
    q, k, v = map(_aligned, (q, k, v))
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    bytes_per_head = max_k * (q.shape[2] + v.shape[2]) * q.element_size() * k.shape[1] // q.shape[1]
    head_group = max(1, min(q.shape[1], L2_KEY_BYTES // max(1, bytes_per_head)))
    module.prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse, max_q, softmax_scale, causal, head_group)
    return out, lse


@functools.cache
def _module(device: torch.device, dtype: torch.dtype, d_qk: int, d_v: int, within_99k: bool | None) -> Any:
    return jit.load(variant_on(device, dtype, d_qk, d_v, within_99k))


def _aligned(x: Tensor) -> Tensor:
    """The tensor, copied unless its rows are contiguous and begin at multiples of 16 bytes."""
    steps = [stride * x.element_size() for stride in x.stride()[:-1]]
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and not any(step % 16 for step in steps)
    return x if fits else x.clone(memory_format=torch.contiguous_format)
