"""What the CUDA decode kernels share on the host: what they take, their buffers and their launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mla_backend import jit
from mla_backend.batch import DecodeBatch, TableKind
from mla_backend.decode import DecoderSpec
from mla_backend.jit import KernelVariant
from mla_backend.plan import ENTRY_COST, PLAN_WORDS

DIMENSIONS = ((512, 64), (256, 32))
"""(kv_lora_rank, qk_rope_head_dim) that the kernels are made for."""

FLAG_STRIDE = 32
"""Words from one CTA's flag to the next (`kFlagStride` in `csrc/common/params.cuh`)."""

MAX_CTAS = 192
"""Of a launch (`kMaxCtas` in `csrc/common/work.cuh`)."""

ELEMENTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
"""C++ types of the dtypes that the kernels are made for."""

ELEMENT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def dependent_launch(arch: str) -> str:
    """Whether kernels of an architecture may overlap in a stream (`kDependentLaunch`), in C++."""
    return str(int(arch.rstrip("af")) >= 90).lower()


def max_ctas(spec: DecoderSpec) -> int:
    """The most CTAs of a launch: one a multiprocessor, within the spec's own limit."""
    multiprocessors = torch.cuda.get_device_properties(spec.device).multi_processor_count
    return min(multiprocessors, spec.num_ctas or multiprocessors, MAX_CTAS)


def unsupported(spec: DecoderSpec) -> str | None:
    """Why no kernel is made for the dtypes or the dimensions of ``spec``, or None."""
    if spec.dtype not in ELEMENTS:
        return f"dtype {spec.dtype}: use bfloat16 or float16"
    if spec.kv_dtype != spec.dtype:
        return f"a {spec.kv_dtype} cache with {spec.dtype} queries: use a cache of the queries' dtype"
    if (spec.kv_lora_rank, spec.qk_rope_head_dim) not in DIMENSIONS:
        return (
            f"kv_lora_rank {spec.kv_lora_rank} with qk_rope_head_dim {spec.qk_rope_head_dim}: "
            f"kernels exist for {', '.join(map(str, DIMENSIONS))}"
        )
    return None


class Config(Protocol):
    """A kernel and its tuning; hashable."""

    def variant(self) -> KernelVariant:
        """The translation unit that instantiates this kernel and the planner that goes with it."""


@dataclass(frozen=True, slots=True)
class _Plan:
    batch: DecodeBatch
    module: object
    plans: Tensor
    num_ctas: int


def rows_of(spec: DecoderSpec, query_len: int) -> int:
    """Query rows of the requests that the kernel for ``query_len`` query tokens is made for."""
    # If batch-invariant, always the most: kernels for other numbers of rows add in other orders.
    return spec.num_heads * (spec.max_query_len if spec.batch_invariant else query_len)


def configs_of(spec: DecoderSpec, config: Callable[[int], Config]) -> list[Config]:
    """The kernels of a decoder for ``spec``; ``config`` gives the one for a number of query rows."""
    query_lens = range(1, spec.max_query_len + 1)
    return list(dict.fromkeys(config(rows_of(spec, query_len)) for query_len in query_lens))


class KernelDecode(ABC):
    """An implementation of `MLADecoder` by one family of kernels.

    Buffers are allocated here and keep their addresses.
    """

    name: str
    max_rows: ClassVar[int]
    """Query rows of the largest block."""

    stamps: Tensor | None = None
    """For the timestamps of profiling variants (`mla_backend.kernels.trace`)."""

    def __init__(self, spec: DecoderSpec):
        self._spec = spec
        configs = configs_of(spec, self.config)
        modules = jit.load_all(config.variant() for config in configs)
        self._modules = dict(zip(configs, modules, strict=True))

        self._plan_is_new = False
        # The planner may use fewer CTAs: no more than the stream that it runs on has multiprocessors.
        most_ctas = max_ctas(spec)
        # Without work until the first plan.
        self._plans = torch.zeros(most_ctas, PLAN_WORDS, dtype=torch.int32, device=spec.device)
        self._ends = torch.empty(2 * spec.max_batch, dtype=torch.int64, device=spec.device)
        # A CTA holds at most two partials: of the entry that its range starts in, and of the one it ends in.
        slot = self.max_rows * spec.kv_lora_rank // 4 + self.max_rows // 2
        self._partials = torch.empty(2 * most_ctas, slot, 4, dtype=torch.float32, device=spec.device)
        self._flags = torch.empty(most_ctas, FLAG_STRIDE, dtype=torch.int32, device=spec.device)

    @abstractmethod
    def config(self, rows: int) -> Config:
        """The kernel for requests of ``rows`` query rows (num_heads * query_len)."""

    def plan(self, batch: DecodeBatch) -> _Plan:
        config = self.config(rows_of(self._spec, batch.max_query_len))
        module = self._modules.get(config)
        if module is None:
            module = self._modules[config] = jit.load(config.variant())
        self._plan_is_new = True
        num_ctas = module.plan(
            batch.seq_lens,
            batch.query_start_loc,
            batch.table,
            batch.table_rows,
            self._plans,
            self._flags,
            self._ends,
            batch.max_query_len,
            self._spec.num_heads,
            batch.page_size,
            batch.table_kind is TableKind.TOKEN,
            ENTRY_COST,
            self._spec.batch_invariant,
        )
        return _Plan(batch, module, self._plans, num_ctas)

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
            state.plans,
            self._partials,
            self._flags,
            out,
            lse,
            self.stamps,
            batch.max_query_len,
            batch.table_kind is TableKind.TOKEN,
            causal,
            softmax_scale,
            state.num_ctas,
            not self._spec.batch_invariant,  # then nothing is split, and no CTA waits for another
            # A launch may begin before its predecessor in the stream has ended, but not before it has begun.
            # So once the first one behind a plan has been held back until that is complete, later ones find
            # it complete, too, and read it before they wait for anything. A captured graph is held back until
            # all before it is complete, whichever launch it begins with.
            not self._plan_is_new,
        )
        self._plan_is_new = False
