"""Decode on Hopper: the choice among the kernels of `csrc/decode/hopper`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch

from mla_backend.batch import TableKind
from mla_backend.cache_format import CacheFormat
from mla_backend.jit import KernelVariant
from mla_backend.kernels import trace
from mla_backend.kernels.base import (
    ELEMENTS,
    LATENTS,
    KernelDecode,
    cpp_struct,
    format_argument,
    kernel_format,
    kernel_name,
    unsupported,
)
from mla_backend.spec import DecoderSpec

ARCH = "90a"
FEW_ROWS_SHARED = 32
"""The most query rows of a request from an fp8 cache that the copy engine loads: two m-blocks of 16 rows
share its keys. Requests with more rows than their kernel allows have m-blocks of 64."""
MAX_ROWS = 64
CLUSTER_ROWS = 2 * MAX_ROWS
"""Query rows of the two m-blocks that a cluster computes from the same keys."""

_SHARED_BYTES = 227 << 10
_RING_BYTES = 168 << 10
"""The most bytes of a ring: more keys in flight than memory can deliver meanwhile gain nothing."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(ABC):
    """A kernel of `csrc/decode/hopper` and its tuning, one subclass per kernel.

    Attributes:
        kv_format: of the cache; None means elements of ``dtype``.
        rows: of an m-block, which one CTA computes.
        range_ctas: 2 if the CTAs of a cluster share keys; the planner then treats their m-blocks as one.
    """

    dtype: torch.dtype
    kv_format: CacheFormat | None = None
    kv_lora_rank: int
    qk_rope_head_dim: int
    rows: int
    stages: int
    query_buffers: int = 1
    range_ctas: int = 1
    tma: bool
    lists: bool = False
    profile: bool = False

    @property
    def plan_rows(self) -> int:
        """Rows of what the planner takes for an m-block: those of all CTAs that share keys."""
        return self.rows * self.range_ctas

    @property
    @abstractmethod
    def for_one_m_block(self) -> bool:
        """Made for requests of at most ``rows`` rows; correct for longer ones, but slower."""

    @property
    @abstractmethod
    def kernel(self) -> str:
        """The kernel's folder in `csrc/decode/hopper`."""

    def variant(self) -> KernelVariant:
        """The translation unit that instantiates this kernel and the planner that goes with it."""
        cpp_name = "".join(map(str.capitalize, self.kernel.split("_")))  # few_rows: FewRows
        chosen = cpp_struct(
            "mla::hopper::DecodeConfig",
            format=format_argument(self.kv_format),
            dim_latent=self.kv_lora_rank,
            dim_rope=self.qk_rope_head_dim,
            rows=self.rows,
            stages=self.stages,
            query_buffers=self.query_buffers,
            range_ctas=self.range_ctas,
            for_one_m_block=self.for_one_m_block,
            tma=self.tma,
            lists=self.lists,
            profile=self.profile,
        )
        config = f"mla::hopper::{cpp_name}Config<{ELEMENTS[self.dtype]}, {chosen}>"
        source = f"""\
#include "ffi/hopper_decode.cuh"
#include "ffi/plan.cuh"
using Kernel = mla::ffi::{cpp_name}Kernel<{config}>;
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, mla::ffi::decode<Kernel>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, mla::ffi::plan<Kernel::Config>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace, mla::ffi::workspace<Kernel>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(resident, mla::ffi::resident<Kernel>);
"""
        sizes = (self.kv_lora_rank, self.qk_rope_head_dim)
        name = kernel_name(f"hopper_{self.kernel}", self.dtype, self.kv_format, *sizes)
        loads = "lists" if self.lists else "tma" if self.tma else "small_pages"
        name += f"-r{self.rows}" + f"x{self.range_ctas}" * (self.range_ctas > 1) + f"-{loads}"
        return KernelVariant(name + "-profile" * self.profile, source, ARCH)


@dataclass(frozen=True, kw_only=True)
class FewRowsConfig(DecodeConfig):
    """m-blocks of a multiple of 8 rows."""

    @property
    def for_one_m_block(self) -> bool:
        return self.range_ctas == 1

    @property
    def kernel(self) -> str:
        return "few_rows"


@dataclass(frozen=True, kw_only=True)
class ManyRowsConfig(DecodeConfig):
    """m-blocks of 64 rows, by a kernel for 16-bit caches and another for fp8 caches."""

    @property
    def for_one_m_block(self) -> bool:
        return False

    @property
    def kernel(self) -> str:
        return "many_rows" if self.kv_format is None else "many_rows_fp8"


def decode_config(
    dtype: torch.dtype,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    rows: int,
    kv_format: CacheFormat | None = None,
    lists: bool = False,
) -> DecodeConfig:
    """The tuning decision: the kernel for requests of ``rows`` query rows (num_heads * query_len).

    A request with more rows than the largest m-block has several m-blocks. ``kv_format``: of the cache; None
    means elements of ``dtype``. ``lists``: attend to lists of slots (`TableKind.LIST`).
    """
    tma = page_size % 8 == 0 and not lists
    width = kv_lora_rank, qk_rope_head_dim
    most_rows = _few_rows(*width, kv_format, tma)
    if rows > (FEW_ROWS_SHARED if kv_format is not None and tma else most_rows):
        range_ctas = 2 if rows > MAX_ROWS and tma else 1
        return ManyRowsConfig(
            dtype=dtype,
            kv_format=kv_format,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            rows=MAX_ROWS,
            range_ctas=range_ctas,
            stages=_stages(*width, kv_format, _many_rows_bytes(*width, kv_format)),
            tma=tma,
            lists=lists,
        )
    range_ctas = 2 if rows > most_rows else 1
    block_rows = 16 if range_ctas == 2 else -(-rows // 8) * 8
    query_buffers = 2 if block_rows <= (8 if _scales(kv_format, kv_lora_rank) else 16) else 1
    other_bytes = _few_rows_bytes(*width, kv_format, block_rows, query_buffers)
    return FewRowsConfig(
        dtype=dtype,
        kv_format=kv_format,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        rows=block_rows,
        range_ctas=range_ctas,
        stages=_stages(*width, kv_format, other_bytes) // 2 * 2,
        query_buffers=query_buffers,
        tma=tma,
        lists=lists,
    )


def _few_rows(kv_lora_rank: int, qk_rope_head_dim: int, kv_format: CacheFormat | None, tma: bool) -> int:
    """The most query rows in an m-block of the kernel for few rows.

    Outputs have to fit into registers, of which loaders of e4m3 need more without TMA. If groups of columns
    have scales, shared memory has no room for more rows; nor has it with narrow latents, unless the ring had
    two stages.
    """
    if _scales(kv_format, kv_lora_rank):
        return 16
    if kv_lora_rank <= 256:
        return 32 if tma or kv_format is None else 24
    # Without rotary columns, 24 rows lack two registers.
    return 16 if kv_format is not None and qk_rope_head_dim == 0 else 24


def _scales(kv_format: CacheFormat | None, kv_lora_rank: int) -> int:
    return 0 if kv_format is None else kv_format.scales_in_row(kv_lora_rank)


def _column_blocks(kv_lora_rank: int, qk_rope_head_dim: int) -> int:
    return -(-(kv_lora_rank + qk_rope_head_dim) // 64)


def _few_rows_bytes(
    kv_lora_rank: int, qk_rope_head_dim: int, kv_format: CacheFormat | None, rows: int, query_buffers: int
) -> int:
    """An upper bound of `sizeof(mla::hopper::FewRowsMemory)` without the ring of keys."""
    columns = _column_blocks(kv_lora_rank, qk_rope_head_dim)
    queries = columns * rows * 128
    buffers = query_buffers * (columns + (qk_rope_head_dim == 0)) * rows * 128
    # P of both consumers, multiplied by each scale, or in two buffers.
    weights = 2 * (_scales(kv_format, kv_lora_rank) or 2) * 128 * rows
    scratch = max(weights + queries * (kv_format is not None), 4 * kv_lora_rank * rows)
    return buffers + scratch + 128 * rows + 1024


def _many_rows_bytes(kv_lora_rank: int, qk_rope_head_dim: int, kv_format: CacheFormat | None) -> int:
    """The same of `ManyRowsMemory`, or of `ManyRowsFp8Memory` for fp8 caches."""
    queries = _column_blocks(kv_lora_rank, qk_rope_head_dim) * 64 * 128
    # P of a tile takes 8 KB: of one, with records of two, with e4m3 of three.
    others = 9 if kv_format is None else 28 if _scales(kv_format, kv_lora_rank) else 36
    return queries + (others << 10)


def _stages(kv_lora_rank: int, qk_rope_head_dim: int, kv_format: CacheFormat | None, other_bytes: int) -> int:
    """As many stages as fit beside ``other_bytes`` of shared memory. The compiler checks the exact size."""
    column_block = 128 if kv_format is None else 64
    token = _column_blocks(kv_lora_rank, qk_rope_head_dim) * column_block
    if kv_format is not None and _scales(kv_format, kv_lora_rank):
        token = kv_format.row_bytes(kv_lora_rank, qk_rope_head_dim)
    return min(_RING_BYTES, _SHARED_BYTES - other_bytes) // (64 * token)


def config_of(spec: DecoderSpec, rows: int, arch: str = ARCH) -> DecodeConfig:
    """`decode_config` for a decoder of ``spec``; ``arch`` can only be `ARCH`."""
    return decode_config(
        spec.dtype,
        spec.kv_lora_rank,
        spec.qk_rope_head_dim,
        spec.page_size,
        rows,
        kernel_format(spec),
        lists=spec.table_kind is TableKind.LIST,
    )


def refusal(spec: DecoderSpec, capability: tuple[int, int]) -> str | None:
    """Why these kernels cannot serve ``spec``, or None."""
    if capability[0] != 9:
        return f"Hopper kernels need compute capability 9.x, not {capability[0]}.{capability[1]}"
    if why_not := unsupported(spec):
        return why_not
    if spec.table_kind is not TableKind.LIST and spec.page_size % 8 != 0 and spec.page_size not in (1, 2, 4):
        return f"Hopper kernels need a page_size of 1, 2, 4 or a multiple of 8, not {spec.page_size}"
    return None


class HopperDecode(KernelDecode):
    """See `few_rows`, `many_rows` and `many_rows_fp8` in `csrc/decode/hopper`.

    A grid has at most one CTA per SM, and no more than CUDA says can be resident at once in clusters of two.

    With ``profile``, each run leaves timestamps in `stamps`, for `mla_backend.kernels.trace`.
    """

    name = "hopper"

    def __init__(self, spec: DecoderSpec, profile: bool = False):
        self._profile = profile
        super().__init__(spec)
        if profile:
            self.stamps = trace.stamp_buffer(len(self._plans), spec.device)

    def config(self, rows: int) -> DecodeConfig:
        return replace(config_of(self._spec, rows), profile=self._profile)


def shipped_variants() -> list[KernelVariant]:
    """Variants for any number of query rows, pages with and without TMA, of what ships (`LATENTS`)."""
    all_rows = (*range(8, FEW_ROWS_SHARED + 1, 8), MAX_ROWS, CLUSTER_ROWS)
    configs = [
        decode_config(dtype, d_c, d_rope, page_size, rows, kv_format, lists)
        for d_c, d_rope, ships, _ in LATENTS
        for dtype, kv_format, lists in ships
        for page_size in ((1,) if lists else (64, 1))
        for rows in all_rows
    ]
    return list(dict.fromkeys(config.variant() for config in configs))
