"""Decode on Ampere, Ada and GPUs without special kernels: the choice among the kernels of
`csrc/decode/portable`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_backend import jit
from mla_backend.batch import TableKind
from mla_backend.cache_format import E4M3, RECORD_656, CacheFormat
from mla_backend.jit import KernelVariant
from mla_backend.kernels.base import (
    ELEMENTS,
    FIRST_CAPABILITY,
    LATENTS,
    NEEDS_HOPPER,
    KernelDecode,
    cpp_struct,
    dependent_launch,
    format_argument,
    kernel_format,
    kernel_name,
    unsupported,
)
from mla_backend.spec import DecoderSpec

M_BLOCK_ROWS = (16, 24, 32, 48, 64)
MAX_ROWS = M_BLOCK_ROWS[-1]

_ARCHS_WITH_99K = ("86", "89", "120", "121")

_Choices = dict[tuple[int, bool], tuple[tuple[int, int], ...]]

# By kv_lora_rank and whether shared memory is small (99 KB instead of 163 KB): the tokens of a KV tile and
# the stages, for each of M_BLOCK_ROWS. Larger tiles wait less often at barriers, but with fewer than three
# stages, too few keys are in flight. Compilation checks that they fit. In 16 bits, as many stages as fit:
_TILES_AND_STAGES: _Choices = {
    (512, False): ((32, 4), (32, 3), (32, 4), (32, 3), (32, 3)),
    (512, True): ((16, 5), (16, 4), (16, 4), (16, 4), (16, 4)),
    (256, False): ((32, 7), (32, 6), (32, 7), (32, 6), (32, 6)),
    (256, True): ((32, 4), (32, 3), (32, 4), (32, 3), (32, 3)),
}

# The same with fp8 caches, whose keys take half the memory or little more. With 16 rows, tiles of 64 tokens
# and the stages of e4m3 are the fastest of those timed (docs/dead-ends.md). With more rows, larger tiles
# or more stages would often fit; no comparison is recorded.
_E4M3_TILES_AND_STAGES: _Choices = {
    (512, False): ((64, 4), (32, 6), (32, 6), (32, 5), (32, 5)),
    (512, True): ((32, 4), (32, 3), (16, 6), (16, 6), (16, 6)),
    (256, False): ((64, 6), (32, 8), (32, 8), (32, 8), (32, 8)),
    (256, True): ((32, 6), (32, 5), (32, 5), (32, 4), (32, 4)),
}
_RECORD_TILES_AND_STAGES: _Choices = {
    (512, False): ((64, 3), (32, 6), (32, 6), (32, 5), (32, 5)),
    (512, True): ((32, 3), (32, 3), (16, 6), (16, 6), (16, 6)),
}
_CHOICES = {None: _TILES_AND_STAGES, E4M3: _E4M3_TILES_AND_STAGES, RECORD_656: _RECORD_TILES_AND_STAGES}


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """`mla::portable::DecodeConfig`; without ``kv_format``, caches are of ``dtype``."""

    dtype: torch.dtype
    kv_format: CacheFormat | None = None
    kv_lora_rank: int
    qk_rope_head_dim: int
    rows: int
    tile: int
    stages: int
    row_groups: int
    arch: str
    lists: bool = False

    def variant(self) -> KernelVariant:
        """The translation unit that instantiates this kernel and the planner that goes with it."""
        fields = cpp_struct(
            "mla::portable::DecodeConfig",
            format=format_argument(self.kv_format),
            dim_latent=self.kv_lora_rank,
            dim_rope=self.qk_rope_head_dim,
            rows=self.rows,
            tile=self.tile,
            stages=self.stages,
            row_groups=self.row_groups,
            dependent_launch=dependent_launch(self.arch),
            lists=self.lists,
        )
        source = f"""\
#include "ffi/plan.cuh"
#include "ffi/portable_decode.cuh"
using Kernel = mla::ffi::PortableKernel<mla::portable::KernelConfig<{ELEMENTS[self.dtype]}, {fields}>>;
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, mla::ffi::decode<Kernel>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, mla::ffi::plan<Kernel::Config>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace, mla::ffi::workspace<Kernel>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(resident, mla::ffi::resident<Kernel>);
"""
        name = kernel_name(
            "portable_decode", self.dtype, self.kv_format, self.kv_lora_rank, self.qk_rope_head_dim
        )
        name += f"-r{self.rows}-t{self.tile}x{self.stages}" + "-lists" * self.lists
        return KernelVariant(name, source, self.arch)


def has_only_99k(arch: str) -> bool:
    """Whether a CTA of an architecture may have only 99 KB of shared memory."""
    return arch.rstrip("af") in _ARCHS_WITH_99K


def decode_config(
    dtype: torch.dtype,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    rows: int,
    arch: str,
    within_99k: bool,
    kv_format: CacheFormat | None = None,
    lists: bool = False,
) -> DecodeConfig:
    """The tuning decision: the kernel for requests of ``rows`` query rows (num_heads * query_len).

    A request with more rows than the largest m-block has several m-blocks. ``within_99k``: keep to 99 KB of
    shared memory. ``kv_format``: of the cache; None means elements of ``dtype``. ``lists``: attend to the
    keys in lists (`TableKind.LIST`).
    """
    index = next((i for i, most in enumerate(M_BLOCK_ROWS) if rows <= most), len(M_BLOCK_ROWS) - 1)
    tile, stages = _CHOICES[kv_format][kv_lora_rank, within_99k][index]
    if lists:
        stages = min(stages, 4)  # five leave no room to mark the entries of a list that name keys
    return DecodeConfig(
        dtype=dtype,
        kv_format=kv_format,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        rows=M_BLOCK_ROWS[index],
        tile=tile,
        stages=stages,
        # Two groups have fewer partial scores, but both read every key.
        row_groups=2 if M_BLOCK_ROWS[index] >= 32 else 1,
        arch=arch,
        lists=lists,
    )


def config_of(spec: DecoderSpec, rows: int, arch: str, within_99k: bool = False) -> DecodeConfig:
    """`decode_config` for a decoder of ``spec``. Always within 99 KB if the architecture has no more."""
    return decode_config(
        spec.dtype,
        spec.kv_lora_rank,
        spec.qk_rope_head_dim,
        rows,
        arch,
        within_99k or has_only_99k(arch),
        kernel_format(spec),
        lists=spec.table_kind is TableKind.LIST,
    )


def refusal(spec: DecoderSpec, capability: tuple[int, int]) -> str | None:
    """Why these kernels cannot serve ``spec``, or None."""
    if capability < FIRST_CAPABILITY:
        return f"kernels need compute capability 8.0 or newer, not {capability[0]}.{capability[1]}"
    if spec.products != "exact":
        return f"products={spec.products!r} {NEEDS_HOPPER}, not {capability[0]}.{capability[1]}"
    return unsupported(spec)


class PortableDecode(KernelDecode):
    """Runs `csrc/decode/portable/kernel.cuh`. ``within_99k``: use no more shared memory than Ada has."""

    name = "portable"

    def __init__(self, spec: DecoderSpec, within_99k: bool = False):
        self._arch = jit.arch_of(spec.device)
        self._within_99k = within_99k
        super().__init__(spec)

    def config(self, rows: int) -> DecodeConfig:
        return config_of(self._spec, rows, self._arch, self._within_99k)


def variants(
    arch: str,
    dtype: torch.dtype,
    dimensions: tuple[int, int],
    kv_format: CacheFormat | None = None,
    lists: bool = False,
) -> list[KernelVariant]:
    """All m-block sizes for one dtype, one pair of latent dimensions and one format of caches."""
    return [
        decode_config(dtype, *dimensions, rows, arch, has_only_99k(arch), kv_format, lists).variant()
        for rows in M_BLOCK_ROWS
    ]


def shipped_variants() -> list[KernelVariant]:
    """What ships (`LATENTS`), for sm_80 and sm_89; pages of DeepSeek's latents also for sm_86."""
    return [
        variant
        for d_c, d_rope, _, ships in LATENTS
        for dtype, kv_format, lists in ships
        for arch in (("80", "86", "89") if d_c == 512 and d_rope == 64 and not lists else ("80", "89"))
        for variant in variants(arch, dtype, (d_c, d_rope), kv_format, lists)
    ]
