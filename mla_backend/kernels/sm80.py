"""Decode on Ampere, Ada and GPUs without kernels of their own: the choice among those of `csrc/sm80`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_backend import jit
from mla_backend.batch import TableKind
from mla_backend.jit import KernelVariant
from mla_backend.kernels.base import (
    DIMENSIONS,
    ELEMENT_NAMES,
    ELEMENTS,
    KernelDecode,
    dependent_launch,
    unsupported,
)
from mla_backend.spec import DecoderSpec

M_BLOCK_ROWS = (16, 24, 32, 48, 64)
MAX_ROWS = M_BLOCK_ROWS[-1]

_SMALL_ARCHS = ("86", "89", "120", "121")

# By kv_lora_rank and whether shared memory is small (99 KB instead of 163 KB): the tokens of a KV tile and as
# many stages as fit, for each of M_BLOCK_ROWS. Larger tiles wait less often at barriers, but fewer than three
# of them would leave too few keys on their way. Compilation checks that they fit.
_TILES_AND_STAGES: dict[tuple[int, bool], tuple[tuple[int, int], ...]] = {
    (512, False): ((32, 4), (32, 3), (32, 4), (32, 3), (32, 3)),
    (512, True): ((16, 5), (16, 4), (16, 4), (16, 4), (16, 4)),
    (256, False): ((32, 7), (32, 6), (32, 7), (32, 6), (32, 6)),
    (256, True): ((32, 4), (32, 3), (32, 4), (32, 3), (32, 3)),
}


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Template arguments of `mla::sm80::DecodeConfig`."""

    dtype: torch.dtype
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
        sizes = (self.kv_lora_rank, self.qk_rope_head_dim, self.rows, self.tile, self.stages, self.row_groups)
        flags = (dependent_launch(self.arch), str(self.lists).lower())
        arguments = ", ".join([ELEMENTS[self.dtype], *map(str, sizes), *flags])
        source = f"""\
#include "ffi/plan.cuh"
#include "ffi/sm80_decode.cuh"
using Kernel = mla::ffi::PortableKernel<mla::sm80::DecodeConfig<{arguments}>>;
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, mla::ffi::decode<Kernel>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, mla::ffi::plan<Kernel::Config>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace, mla::ffi::workspace<Kernel::Config>);
"""
        dimensions = f"d{self.kv_lora_rank}_{self.qk_rope_head_dim}"
        name = f"sm80_decode-{ELEMENT_NAMES[self.dtype]}-{dimensions}-r{self.rows}-t{self.tile}x{self.stages}"
        return KernelVariant(name + "-lists" * self.lists, source, self.arch)


def is_small(arch: str) -> bool:
    """Whether a CTA of an architecture may have only 99 KB of shared memory."""
    return arch.rstrip("af") in _SMALL_ARCHS


def decode_config(
    dtype: torch.dtype,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    rows: int,
    arch: str,
    small: bool,
    lists: bool = False,
) -> DecodeConfig:
    """The tuning decision: the kernel for requests of ``rows`` query rows (num_heads * query_len).

    A request with more rows than the largest m-block has several. ``small`` keeps to 99 KB of shared memory.
    ``lists``: keys are those of lists (`TableKind.LIST`).
    """
    index = next((i for i, most in enumerate(M_BLOCK_ROWS) if rows <= most), len(M_BLOCK_ROWS) - 1)
    tile, stages = _TILES_AND_STAGES[kv_lora_rank, small][index]
    if lists:
        stages = min(stages, 4)  # five leave no room for what tells which entries of a list name keys
    return DecodeConfig(
        dtype=dtype,
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


def refusal(spec: DecoderSpec, capability: tuple[int, int]) -> str | None:
    """Why these kernels cannot serve ``spec``, or None."""
    if capability < (8, 0):
        return (
            f"kernels need compute capability 8.0 or newer, this device has {capability[0]}.{capability[1]}"
        )
    return unsupported(spec)


class Sm80Decode(KernelDecode):
    """See `csrc/sm80/decode.cuh`. ``small`` limits it to the shared memory of sm_86 and sm_89 on any GPU."""

    max_rows = MAX_ROWS

    def __init__(self, spec: DecoderSpec, small: bool = False):
        self.name = "sm80_99k" if small else "sm80"
        self._arch = jit.arch_of(spec.device)
        self._small = small or is_small(self._arch)
        super().__init__(spec)

    def config(self, rows: int) -> DecodeConfig:
        spec = self._spec
        sizes = (spec.kv_lora_rank, spec.qk_rope_head_dim)
        lists = spec.table_kind is TableKind.LIST
        return decode_config(spec.dtype, *sizes, rows, self._arch, self._small, lists)


def variants(
    arch: str, dtype: torch.dtype, dimensions: tuple[int, int], lists: bool = False
) -> list[KernelVariant]:
    """All m-block sizes for one dtype and one pair of latent dimensions."""
    small = is_small(arch)
    return [decode_config(dtype, *dimensions, rows, arch, small, lists).variant() for rows in M_BLOCK_ROWS]


def shipped_variants() -> list[KernelVariant]:
    """DeepSeek's dimensions in bf16 and fp16 for sm_80, sm_86 and sm_89; MiniCPM3's in bf16 for 80 and 89.
    For lists, DeepSeek's in bf16 for 80 and 89."""
    shapes = [("80", torch.bfloat16, DIMENSIONS[1]), ("89", torch.bfloat16, DIMENSIONS[1])]
    shapes += [(arch, dtype, DIMENSIONS[0]) for arch in ("80", "86", "89") for dtype in ELEMENTS]
    dense = [variant for shape in shapes for variant in variants(*shape)]
    lists = [variants(arch, torch.bfloat16, DIMENSIONS[0], lists=True) for arch in ("80", "89")]
    return dense + sum(lists, [])
