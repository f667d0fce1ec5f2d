"""Decode on Hopper: which variant of `csrc/sm90` serves a shape, its buffers and its launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_backend import jit
from mla_backend.batch import DecodeBatch, TableKind
from mla_backend.decode import DecoderSpec
from mla_backend.jit import KernelVariant
from mla_backend.kernels import trace
from mla_backend.plan import RANGE_FIELDS, PlanCosts

ARCH = "90a"
DIMENSIONS = ((512, 64), (256, 32))
"""(kv_lora_rank, qk_rope_head_dim) that the kernels are made for."""

COSTS = PlanCosts(entry=12, min_part=4, min_split=4)
SWAPPED_ROWS = 32
"""Up to how many rows of a request the swapped kernel serves; more go in blocks of 64 rows."""
MAX_ROWS = 64
ABSENT = -1
"""What every word of the partials holds between launches (`kAbsent` in `csrc/common/reduce.cuh`)."""

_ELEMENTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(ABC):
    """A kernel and its tuning. Each subclass is one of `csrc/sm90`."""

    dtype: torch.dtype
    kv_lora_rank: int
    qk_rope_head_dim: int
    rows: int
    stages: int
    tma: bool
    profile: bool = False

    @abstractmethod
    def kernel(self) -> str:
        """Its type in C++."""

    def variant(self) -> KernelVariant:
        """The translation unit that instantiates this kernel and the planner that goes with it."""
        source = f"""\
#include "ffi/plan.cuh"
#include "ffi/sm90_decode.cuh"
using Kernel = mla::ffi::{self.kernel()};
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decode, mla::ffi::sm90_decode<Kernel>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shared_bytes, mla::ffi::sm90_shared_bytes<Kernel>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, (mla::ffi::plan<Kernel::Config::kRows, Kernel::Config::kUnit>));
"""
        element = "bf16" if self.dtype is torch.bfloat16 else "fp16"
        loads = "tma" if self.tma else "rows"
        name = f"sm90_decode-{element}-d{self.kv_lora_rank}_{self.qk_rope_head_dim}-r{self.rows}-{loads}"
        return KernelVariant(name + "-profile" * self.profile, source, ARCH)

    def _arguments(self, *sizes: int) -> str:
        """Template arguments; ``sizes`` are what the kernels have each for itself."""
        values = (self.kv_lora_rank, self.qk_rope_head_dim, *sizes)
        flags = (str(flag).lower() for flag in (self.tma, self.profile))
        return ", ".join([_ELEMENTS[self.dtype], *map(str, values), *flags])


@dataclass(frozen=True, kw_only=True)
class SwappedConfig(DecodeConfig):
    """`decode.cuh`: any multiple of 8 rows up to `SWAPPED_ROWS`."""

    tile: int
    query_buffers: int
    exchange_rounds: int

    def kernel(self) -> str:
        arguments = self._arguments(
            self.rows, self.tile, self.stages, self.query_buffers, self.exchange_rounds
        )
        return f"SwappedKernel<mla::sm90::DecodeConfig<{arguments}>>"


@dataclass(frozen=True, kw_only=True)
class Rows64Config(DecodeConfig):
    """`decode64.cuh`: blocks of 64 rows."""

    def kernel(self) -> str:
        return f"Rows64Kernel<mla::sm90::Decode64Config<{self._arguments(self.stages)}>>"


def decode_config(
    dtype: torch.dtype, kv_lora_rank: int, qk_rope_head_dim: int, page_size: int, rows: int
) -> DecodeConfig:
    """The tuning decision: the kernel for requests of ``rows`` query rows (num_heads * query_len).

    More rows than one block holds are divided over several.
    """
    dimensions = {"dtype": dtype, "kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    tma = page_size % 8 == 0
    if rows > SWAPPED_ROWS:
        return Rows64Config(**dimensions, rows=MAX_ROWS, stages=4 if kv_lora_rank == 512 else 8, tma=tma)
    rows = -(-rows // 8) * 8
    return SwappedConfig(
        **dimensions,
        rows=rows,
        tile=64,
        stages=2,
        query_buffers=2 if rows <= 16 else 1,
        exchange_rounds=1 if rows <= 24 else kv_lora_rank // 128,
        tma=tma,
    )


def refusal(spec: DecoderSpec, capability: tuple[int, int]) -> str | None:
    """Why these kernels cannot serve ``spec``, or None."""
    if capability[0] != 9:
        return f"sm90 kernels need compute capability 9.x, this device has {capability[0]}.{capability[1]}"
    if spec.dtype not in _ELEMENTS:
        return f"dtype {spec.dtype}: use bfloat16 or float16"
    if spec.kv_dtype != spec.dtype:
        return f"a {spec.kv_dtype} cache with {spec.dtype} queries: use a cache of the queries' dtype"
    if (spec.kv_lora_rank, spec.qk_rope_head_dim) not in DIMENSIONS:
        return (
            f"kv_lora_rank {spec.kv_lora_rank} with qk_rope_head_dim {spec.qk_rope_head_dim}: "
            f"kernels exist for {', '.join(map(str, DIMENSIONS))}"
        )
    if spec.page_size % 8 != 0 and spec.page_size not in (1, 2, 4):
        return f"page_size {spec.page_size}: use 1, 2, 4 or a multiple of 8"
    return None


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: DecodeBatch
    module: object
    ranges: Tensor


class Sm90Decode:
    """See `csrc/sm90/decode.cuh` and `decode64.cuh`. Buffers are allocated here and keep their addresses.

    With ``profile``, each run leaves its timestamps in `stamps`, for `mla_backend.kernels.trace`.
    """

    name = "sm90"

    def __init__(self, spec: DecoderSpec, profile: bool = False):
        self._spec = spec
        self._costs = replace(COSTS, min_split=PlanCosts.NEVER) if spec.batch_invariant else COSTS
        self._num_ctas = torch.cuda.get_device_properties(spec.device).multi_processor_count
        self.stamps = trace.stamp_buffer(self._num_ctas, spec.device) if profile else None
        self._modules = {
            config: jit.load(config.variant())
            for config in {self._config(q) for q in range(1, spec.max_query_len + 1)}
        }

        # Without work until the first plan.
        self._ranges = torch.zeros(self._num_ctas, RANGE_FIELDS, dtype=torch.int32, device=spec.device)
        self._ends = torch.empty(2 * spec.max_batch, dtype=torch.int64, device=spec.device)
        # A CTA holds at most two partials: of the entry that its range starts in, and of the one it ends in.
        slot = MAX_ROWS * spec.kv_lora_rank // 4 + MAX_ROWS // 2 + self._num_ctas
        self._partials = torch.full(
            (2 * self._num_ctas, slot, 4), ABSENT, dtype=torch.int32, device=spec.device
        )

    def _config(self, query_len: int) -> DecodeConfig:
        spec = self._spec
        if spec.batch_invariant:  # kernels for other numbers of rows add in other orders
            query_len = spec.max_query_len
        rows = spec.num_heads * query_len
        config = decode_config(spec.dtype, spec.kv_lora_rank, spec.qk_rope_head_dim, spec.page_size, rows)
        return replace(config, profile=self.stamps is not None)

    def plan(self, batch: DecodeBatch) -> _Plan:
        config = self._config(batch.max_query_len)
        module = self._modules.get(config)
        if module is None:
            module = self._modules[config] = jit.load(config.variant())
        module.plan(
            batch.seq_lens,
            batch.query_start_loc,
            self._ranges,
            self._ends,
            batch.max_query_len,
            self._spec.num_heads,
            self._costs.entry,
            self._costs.min_part,
            self._costs.min_split,
        )
        return _Plan(batch, module, self._ranges)

    def run(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        state: _Plan,
        softmax_scale: float,
        causal: bool,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        batch = state.batch
        state.module.decode(
            q_nope,
            q_rope,
            latent_cache,
            batch.table,
            batch.table_rows,
            batch.seq_lens,
            batch.query_start_loc,
            state.ranges,
            self._partials,
            out,
            lse,
            self.stamps,
            batch.max_query_len,
            batch.table_kind is TableKind.TOKEN,
            causal,
            softmax_scale,
        )


def shipped_variants() -> list[KernelVariant]:
    """Variants for any number of rows, both dtypes, both page modes."""
    return list(
        dict.fromkeys(
            decode_config(dtype, *dimensions, page_size, rows).variant()
            for dimensions in DIMENSIONS
            for dtype in _ELEMENTS
            for page_size in (64, 1)
            for rows in (*range(8, SWAPPED_ROWS + 1, 8), MAX_ROWS)
        )
    )
