"""Decode on Hopper: the choice among the kernels of `csrc/sm90`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from mla_backend.batch import TableKind
from mla_backend.jit import KernelVariant
from mla_backend.kernels import trace
from mla_backend.kernels.base import (
    DIMENSIONS,
    ELEMENT_NAMES,
    ELEMENTS,
    KernelDecode,
    unsupported,
)
from mla_backend.spec import DecoderSpec

ARCH = "90a"
SWAPPED_ROWS = 24
"""The most query rows of a request that the swapped kernel serves; requests with more have m-blocks of 64."""
MAX_ROWS = 64
CLUSTER_ROWS = 2 * MAX_ROWS
"""Query rows of the two m-blocks that a cluster computes from the same keys."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(ABC):
    """A kernel of `csrc/sm90` and its tuning, one subclass per kernel."""

    dtype: torch.dtype
    kv_lora_rank: int
    qk_rope_head_dim: int
    rows: int
    stages: int
    tma: bool
    lists: bool = False
    profile: bool = False

    @abstractmethod
    def kernel(self) -> str:
        """The kernel's type in C++."""

    def variant(self) -> KernelVariant:
        """The translation unit that instantiates this kernel and the planner that goes with it."""
        source = f"""\
#include "ffi/plan.cuh"
#include "ffi/sm90_decode.cuh"
using Kernel = mla::ffi::{self.kernel()};
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, mla::ffi::decode<Kernel>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, mla::ffi::plan<Kernel::Config>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace, mla::ffi::workspace<Kernel::Config>);
"""
        element = ELEMENT_NAMES[self.dtype]
        loads = "lists" if self.lists else "tma" if self.tma else "rows"
        name = f"sm90_decode-{element}-d{self.kv_lora_rank}_{self.qk_rope_head_dim}-r{self.rows}-{loads}"
        return KernelVariant(name + "-profile" * self.profile, source, ARCH)

    def _arguments(self, *sizes: int) -> str:
        """Template arguments; ``sizes`` are those that differ between the kernels."""
        values = (self.kv_lora_rank, self.qk_rope_head_dim, *sizes)
        flags = (str(flag).lower() for flag in (self.tma, self.profile, self.lists))
        return ", ".join([ELEMENTS[self.dtype], *map(str, values), *flags])


@dataclass(frozen=True, kw_only=True)
class SwappedConfig(DecodeConfig):
    """`swapped.cuh`: m-blocks of any multiple of 8 rows up to `SWAPPED_ROWS`."""

    query_buffers: int
    range_ctas: ClassVar[int] = 1

    def kernel(self) -> str:
        arguments = self._arguments(self.rows, self.stages, self.query_buffers)
        return f"SwappedKernel<mla::sm90::SwappedConfig<{arguments}>>"


@dataclass(frozen=True, kw_only=True)
class Rows64Config(DecodeConfig):
    """`rows64.cuh`: m-blocks of 64 rows.

    Attributes:
        range_ctas: 2 if the CTAs of a cluster share keys. To the planner, their m-blocks are one of 128 rows.
    """

    range_ctas: int

    def kernel(self) -> str:
        return f"Rows64Kernel<mla::sm90::Rows64Config<{self._arguments(self.stages, self.range_ctas)}>>"


def decode_config(
    dtype: torch.dtype,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    rows: int,
    lists: bool = False,
) -> DecodeConfig:
    """The tuning decision: the kernel for requests of ``rows`` query rows (num_heads * query_len).

    A request with more rows than the largest m-block has several m-blocks. ``lists``: of slots, which may lie
    anywhere (`TableKind.LIST`).
    """
    tma = page_size % 8 == 0 and not lists
    if rows > SWAPPED_ROWS:
        range_ctas = 2 if tma and rows > MAX_ROWS else 1
        return Rows64Config(
            dtype=dtype,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            rows=CLUSTER_ROWS if range_ctas == 2 else MAX_ROWS,
            range_ctas=range_ctas,
            stages=2 if kv_lora_rank == 512 else 4,
            tma=tma,
            lists=lists,
        )
    rows = -(-rows // 8) * 8
    return SwappedConfig(
        dtype=dtype,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        rows=rows,
        stages=2,
        query_buffers=2 if rows <= 16 else 1,
        tma=tma,
        lists=lists,
    )


def refusal(spec: DecoderSpec, capability: tuple[int, int]) -> str | None:
    """Why these kernels cannot serve ``spec``, or None."""
    if capability[0] != 9:
        return f"sm90 kernels need compute capability 9.x, this device has {capability[0]}.{capability[1]}"
    if why_not := unsupported(spec):
        return why_not
    if spec.table_kind is not TableKind.LIST and spec.page_size % 8 != 0 and spec.page_size not in (1, 2, 4):
        return f"sm90 kernels need a page_size of 1, 2, 4 or a multiple of 8, not {spec.page_size}"
    return None


class Sm90Decode(KernelDecode):
    """See `csrc/sm90/swapped.cuh` and `rows64.cuh`.

    A grid has at most one CTA per SM. In a launch with clusters of two, all clusters can be resident at once:
    the CTAs of a cluster share a GPC, and GPCs, like green contexts, have even numbers of SMs.

    With ``profile``, each run leaves timestamps in `stamps`, for `mla_backend.kernels.trace`.
    """

    name = "sm90"
    max_rows = MAX_ROWS

    def __init__(self, spec: DecoderSpec, profile: bool = False):
        self._profile = profile
        super().__init__(spec)
        if profile:
            self.stamps = trace.stamp_buffer(len(self._plans), spec.device)

    def config(self, rows: int) -> DecodeConfig:
        spec = self._spec
        lists = spec.table_kind is TableKind.LIST
        sizes = (spec.kv_lora_rank, spec.qk_rope_head_dim, spec.page_size)
        return replace(decode_config(spec.dtype, *sizes, rows, lists), profile=self._profile)


def shipped_variants() -> list[KernelVariant]:
    """Variants for any number of query rows: both dtypes, pages with and without TMA; and for lists, in bf16
    for DeepSeek's dimensions."""
    row_counts = (*range(8, SWAPPED_ROWS + 1, 8), MAX_ROWS, CLUSTER_ROWS)
    variants = [
        decode_config(dtype, *dimensions, page_size, rows).variant()
        for dimensions in DIMENSIONS
        for dtype in ELEMENTS
        for page_size in (64, 1)
        for rows in row_counts
    ]
    variants += [
        decode_config(torch.bfloat16, *DIMENSIONS[0], 64, rows, True).variant() for rows in row_counts
    ]
    return list(dict.fromkeys(variants))
