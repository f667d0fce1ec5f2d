"""Decode on Ampere, Ada and GPUs without a kernel of their own: which variant of `csrc/sm80` serves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mla_backend import jit
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

BLOCK_ROWS = (16, 24, 32, 48, 64)
MAX_ROWS = BLOCK_ROWS[-1]
MAX_STAGES = 8

FULL_SHARED_BYTES = 163 << 10
"""Of a CTA on sm_80, and what newer data-centre GPUs have at least."""
SMALL_SHARED_BYTES = 99 << 10
"""Of a CTA on sm_86, sm_89 and sm_120."""
_SMALL_ARCHS = ("86", "89", "120", "121")


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

    def variant(self) -> KernelVariant:
        """The translation unit that instantiates this kernel and the planner that goes with it."""
        sizes = (self.kv_lora_rank, self.qk_rope_head_dim, self.rows, self.tile, self.stages, self.row_groups)
        arguments = ", ".join([ELEMENTS[self.dtype], *map(str, sizes), dependent_launch(self.arch)])
        source = f"""\
#include "ffi/plan.cuh"
#include "ffi/sm80_decode.cuh"
using Config = mla::sm80::DecodeConfig<{arguments}>;
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, mla::ffi::sm80_decode<Config>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shared_bytes, mla::ffi::sm80_shared_bytes<Config>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, mla::ffi::plan<Config>);
"""
        dimensions = f"d{self.kv_lora_rank}_{self.qk_rope_head_dim}"
        name = f"sm80_decode-{ELEMENT_NAMES[self.dtype]}-{dimensions}-r{self.rows}-t{self.tile}x{self.stages}"
        return KernelVariant(name, source, self.arch)


def shared_bytes_of(arch: str) -> int:
    """Shared memory that a CTA may have, as far as these kernels use it."""
    return SMALL_SHARED_BYTES if arch.rstrip("af") in _SMALL_ARCHS else FULL_SHARED_BYTES


def decode_config(
    dtype: torch.dtype, kv_lora_rank: int, qk_rope_head_dim: int, rows: int, arch: str, shared_bytes: int
) -> DecodeConfig:
    """The tuning decision: the kernel for requests of ``rows`` query rows (num_heads * query_len).

    More rows than one block holds go in several.
    """
    rows = next((block for block in BLOCK_ROWS if rows <= block), MAX_ROWS)
    row_groups = 2 if rows >= 32 else 1  # fewer partial scores, but every key is read twice for them

    def stages_of(tile: int) -> int:
        # Beside the ring: partial scores, P, two floats a row, and where the CTA is.
        others = tile * rows * (8 // row_groups * 4 + 2) + 8 * rows + 384
        tile_bytes = tile * 128 * -(-(kv_lora_rank + qk_rope_head_dim) // 64)
        return min((shared_bytes - others) // tile_bytes, MAX_STAGES)

    # Larger tiles wait less often at barriers, but have fewer keys on their way.
    tile = 32 if stages_of(32) >= 3 else 16
    return DecodeConfig(
        dtype=dtype,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        rows=rows,
        tile=tile,
        stages=stages_of(tile),
        row_groups=row_groups,
        arch=arch,
    )


def refusal(spec: DecoderSpec, capability: tuple[int, int]) -> str | None:
    """Why these kernels cannot serve ``spec``, or None."""
    if capability < (8, 0):
        return (
            f"kernels need compute capability 8.0 or newer, this device has {capability[0]}.{capability[1]}"
        )
    return unsupported(spec)


class Sm80Decode(KernelDecode):
    """See `csrc/sm80/decode.cuh`. ``small`` keeps to the shared memory of sm_86 and sm_89 on any GPU."""

    max_rows = MAX_ROWS

    def __init__(self, spec: DecoderSpec, small: bool = False):
        self.name = "sm80_99k" if small else "sm80"
        self._arch = jit.arch_of(spec.device)
        self._shared_bytes = SMALL_SHARED_BYTES if small else shared_bytes_of(self._arch)
        super().__init__(spec)

    def config(self, rows: int) -> DecodeConfig:
        spec = self._spec
        return decode_config(
            spec.dtype, spec.kv_lora_rank, spec.qk_rope_head_dim, rows, self._arch, self._shared_bytes
        )


def variants(arch: str, dtype: torch.dtype, dimensions: tuple[int, int]) -> list[KernelVariant]:
    """All block sizes of one dtype and one pair of latent dimensions."""
    return [
        decode_config(dtype, *dimensions, rows, arch, shared_bytes_of(arch)).variant() for rows in BLOCK_ROWS
    ]


def shipped_variants() -> list[KernelVariant]:
    """DeepSeek's dimensions in bf16 and fp16 for Ampere and Ada; MiniCPM3's in bf16 for two of the three."""
    shapes = [("80", torch.bfloat16, DIMENSIONS[1]), ("89", torch.bfloat16, DIMENSIONS[1])]
    shapes += [(arch, dtype, DIMENSIONS[0]) for arch in ("80", "86", "89") for dtype in ELEMENTS]
    return [variant for shape in shapes for variant in variants(*shape)]
