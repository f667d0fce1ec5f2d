"""Host code that the CUDA decode kernels share: which inputs they accept, their buffers, their launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_backend import jit
from mla_backend.batch import DecodeBatch, TableKind
from mla_backend.cache_format import E4M3, FLOAT_DTYPES, RECORD_656, CacheFormat, Scale
from mla_backend.device import is_captured
from mla_backend.errors import InvalidInputError, UnsupportedError
from mla_backend.jit import KernelVariant
from mla_backend.spec import DecodeCall, DecodePlan, DecoderSpec

FIRST_CAPABILITY = (8, 0)
"""The lowest compute capability that there are kernels for."""

ELEMENTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
"""The dtypes that there are kernels for, with their C++ types."""

_GENERATIONS = (1 << 31) - 1

_FAILURES = {
    1: "the decoder's last plan was for another number of CTAs than the launch had: before a graph is "
    "replayed, plan on a stream with as many multiprocessors as the one on which it was captured",
    2: "its plan was no longer the decoder's last one, as a replayed graph had planned since: plan again "
    "before other runs",
}
"""What `Failure` in csrc/schedule/params.cuh means. CUDA calls such errors "unspecified launch failure"."""

ELEMENT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The same dtypes in the names of variants."""


class Stored(NamedTuple):
    """Caches and tables that a kernel is made for; ``kv_format`` None means elements of ``dtype``."""

    dtype: torch.dtype
    kv_format: CacheFormat | None = None
    lists: bool = False


class Latents(NamedTuple):
    """A width of latents that there are kernels for, in every format that holds it.

    Attributes:
        ships, ships_portable: what `mla-backend build` makes ahead of time of the kernels for Hopper, and of
            the portable ones. Everything else is built when it is first used.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    ships: tuple[Stored, ...] = ()
    ships_portable: tuple[Stored, ...] = ()


_16_BIT = Stored(torch.bfloat16)
_LISTS = Stored(torch.bfloat16, lists=True)
_FP16 = Stored(torch.float16)
_E4M3 = Stored(torch.bfloat16, E4M3)
_RECORDS = (Stored(torch.bfloat16, RECORD_656), Stored(torch.bfloat16, RECORD_656, lists=True))

LATENTS = (
    Latents(512, 64, (_16_BIT, _FP16, _E4M3, _LISTS, *_RECORDS), (_16_BIT, _FP16, _E4M3, _LISTS)),
    Latents(256, 32, (_16_BIT,), (_16_BIT,)),
    Latents(256, 64, (_16_BIT, _E4M3, _LISTS), (_16_BIT,)),
    Latents(512, 0, (_16_BIT, _E4M3, _LISTS), (_16_BIT,)),
    Latents(512, 32),
    Latents(256, 0),
)
"""The first one is DeepSeek's. Stages, limits and variants follow from the width and from shared memory."""

DIMENSIONS = tuple((latents.kv_lora_rank, latents.qk_rope_head_dim) for latents in LATENTS)
"""Pairs (kv_lora_rank, qk_rope_head_dim) that there are kernels for."""


_STORED = {torch.float8_e4m3fn: "kE4m3", torch.bfloat16: "kBf16"}


def format_argument(kv_format: CacheFormat | None) -> str:
    """`mla::CacheFormat` of csrc/numbers/cache_format.cuh; None means elements of the queries' dtype."""
    latents, rope, scale, group = "kAsQueries", "kAsQueries", Scale.NONE, 0
    if kv_format is not None:
        latents, rope = _STORED[kv_format.latents], _STORED[kv_format.rope]
        scale, group = kv_format.scale, kv_format.group
    return cpp_struct(
        "mla::CacheFormat",
        latents=f"mla::Stored::{latents}",
        rope=f"mla::Stored::{rope}",
        scale=f"mla::Scale::k{scale.value.title()}",
        group=group,
    )


def cpp_struct(name: str, **fields: object) -> str:
    """A C++ struct with these fields, as a template argument. Numbers, booleans and C++ expressions."""
    values = (str(value).lower() if isinstance(value, bool) else str(value) for value in fields.values())
    return (
        f"{name}{{{', '.join(f'.{field} = {value}' for field, value in zip(fields, values, strict=True))}}}"
    )


def kernel_name(family: str, dtype: torch.dtype, kv_format: CacheFormat | None, d_c: int, d_rope: int) -> str:
    """The beginning of the names of variants."""
    stored = [] if kv_format is None else [kv_format.short]
    return "-".join([family, ELEMENT_NAMES[dtype], *stored, f"d{d_c}_{d_rope}"])


def kernel_format(spec: DecoderSpec) -> CacheFormat | None:
    """The cache format of a spec that has kernels: None for elements of the queries' dtype."""
    return spec.kv_format if spec.kv_format.is_quantized else None


def dependent_launch(arch: str) -> bool:
    """Whether launches may overlap in a stream on an architecture."""
    return int(arch.rstrip("af")) >= 90


class Workspace(NamedTuple):
    """Sizes of the kernels' own buffers: what ``workspace()`` of a module returns."""

    max_ctas: int
    """CTAs of a launch, at most."""

    plan_words: int
    """int32 words of a CTA's plan."""

    request_words: int
    """int32 words of a request's plan."""

    flag_stride: int
    """int32 words from one CTA's flag to the next."""

    split_words: int
    """int32 words of a split buffer."""


def unsupported(spec: DecoderSpec) -> str | None:
    """Why there is no kernel for the dtypes or the dimensions of ``spec``; None if there is one."""
    if spec.dtype not in ELEMENTS:
        return f"dtype {spec.dtype}: use bfloat16 or float16"
    if spec.kv_format.rope in FLOAT_DTYPES and spec.kv_format.rope != spec.dtype:
        remedy = "a cache of the queries' dtype"
        if spec.kv_format.is_quantized:
            remedy = f"{str(spec.kv_format.rope).removeprefix('torch.')}, or an fp8_e4m3 cache"
        return f"{spec.kv_format.described} with {spec.dtype} queries: use {remedy}"
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
class PlannedLaunch:
    """The `DecodePlan.state` of `KernelDecode`.

    Attributes:
        module: the kernel that serves it.
        num_ctas: CTAs of the step's launches.
        generation: number of the plan, from which kernels know that it is still the decoder's last one.
        captured: whether the planning was captured in a CUDA graph, so that only a replay makes the plan.
    """

    module: Any
    num_ctas: int
    generation: int
    captured: bool


def rows_of(spec: DecoderSpec, query_len: int) -> int:
    """The number of query rows by which the kernel for requests of ``query_len`` tokens is chosen."""
    # Always the largest number if batch-invariant, because other kernels add in other orders.
    return spec.num_heads * (spec.max_query_len if spec.batch_invariant else query_len)


def configs_of(spec: DecoderSpec, config: Callable[[int], Config]) -> list[Config]:
    """The kernels of a decoder for ``spec``; ``config`` is the choice by the number of query rows."""
    query_lens = range(1, spec.max_query_len + 1)
    return list(dict.fromkeys(config(rows_of(spec, query_len)) for query_len in query_lens))


class KernelDecode(ABC):
    """An implementation of `MLADecoder` with one family of kernels.

    It allocates all buffers at construction, and their addresses never change, except that split buffers are
    replaced by larger ones if a plan for more query tokens than the spec has loads a kernel that needs them.
    """

    name: str
    stamps: Tensor | None = None
    """Timestamps of profiling variants (`mla_backend.kernels.trace`)."""

    def __init__(self, spec: DecoderSpec):
        self._spec = spec
        modules = jit.load_all(config.variant() for config in configs_of(spec, self.config))
        self._module_of_rows: dict[int, Any] = {}  # choosing a kernel takes as long as the rest of a plan

        # Indexed by whether a launch is captured: whether none has followed the last plan yet. The first one
        # must not overlap the plan.
        self._plan_is_new = [False, False]
        self._generation = 0  # of the last plan; 32 bits, so it begins again some time
        # Why a launch ended with an error, from `_FAILURES`. Host memory, which outlives such a launch.
        self._failure = torch.zeros(1, dtype=torch.int32, pin_memory=spec.device.type == "cuda")
        sizes = Workspace(*modules[0].workspace())  # the same of all kernels, but for split buffers
        # One CTA per multiprocessor. The planner uses fewer on a stream that has fewer multiprocessors. All
        # must be resident at once, because they wait for one another.
        multiprocessors = torch.cuda.get_device_properties(spec.device).multi_processor_count
        resident = min(module.resident(spec.device.index or 0) for module in modules)
        if resident == 0:
            raise UnsupportedError(
                f"no CTA of the decode kernels fits on {spec.device}: use implementation='torch'"
            )
        num_ctas = min(multiprocessors, spec.num_ctas or multiprocessors, sizes.max_ctas, resident)

        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=spec.device)

        self._plans = buffer(num_ctas, sizes.plan_words, dtype=torch.int32)
        self._ends = buffer(2 * spec.max_batch, dtype=torch.int64)
        self._requests = buffer(spec.max_batch, sizes.request_words, dtype=torch.int32)
        # A CTA writes at most two splits: one of the m-block in which its range begins, one of the m-block in
        # which it ends.
        split_words = max(Workspace(*module.workspace()).split_words for module in modules)
        self._split_buffers = buffer(2 * num_ctas, split_words, dtype=torch.int32)
        self._outgrown: list[Tensor] = []  # split buffers that captured graphs may still use
        self._flags = buffer(num_ctas, sizes.flag_stride, dtype=torch.int32)

    @abstractmethod
    def config(self, rows: int) -> Config:
        """The kernel for requests of ``rows`` query rows (num_heads * query_len)."""

    def _load(self, rows: int) -> Any:
        """The module for so many query rows, for which there are buffers then."""
        module = jit.load(self.config(rows).variant())
        ctas, split_words = len(self._plans), Workspace(*module.workspace()).split_words
        if (resident := module.resident(self._spec.device.index or 0)) < ctas:
            remedy = (
                f"num_ctas={resident}, or with the largest max_query_len"
                if resident
                else "implementation='torch'"
            )
            raise UnsupportedError(
                f"only {resident} CTAs of the kernel for {rows} query rows can be resident at once, and this "
                f"decoder has {ctas}: make it with {remedy}"
            )
        if split_words > self._split_buffers.shape[1]:
            self._outgrown.append(self._split_buffers)
            self._split_buffers = self._split_buffers.new_empty(2 * ctas, split_words)
        return module

    def plan(self, batch: DecodeBatch) -> DecodePlan:
        rows = rows_of(self._spec, batch.max_query_len)
        module = self._module_of_rows.get(rows)
        if module is None:
            module = self._module_of_rows[rows] = self._load(rows)
        self._plan_is_new[False] = True
        # A captured graph waits for all earlier work, so its launches wait only for a plan in that graph.
        captured = self._call(is_captured, self._spec.device)
        self._plan_is_new[True] |= captured
        self._generation = self._generation % _GENERATIONS + 1
        num_ctas = self._call(
            module.plan,
            batch.seq_lens,
            batch.query_start_loc,
            batch.table,
            batch.table_rows,
            self._plans,
            self._flags,
            self._ends,
            self._requests,
            batch.max_query_len,
            *batch.shard.as_integers,
            self._spec.num_heads,
            batch.page_size,
            batch.table_kind is not TableKind.BLOCK,
            self._spec.batch_invariant,
            self._generation,
        )
        return DecodePlan(batch, PlannedLaunch(module, num_ctas, self._generation, captured))

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a module. If it fails because an earlier launch did, say why that one failed."""
        try:
            return function(*arguments)
        except RuntimeError as error:
            if reason := _FAILURES.get(int(self._failure)):
                raise InvalidInputError(
                    f"an earlier run of this decoder has ended with an error: {reason}"
                ) from error
            raise

    def run(self, call: DecodeCall, plan: DecodePlan) -> None:
        batch, launch = plan.batch, plan.state
        captured = self._call(is_captured, self._spec.device)
        if launch.captured and not captured:
            raise InvalidInputError(
                "this plan was captured, so only replays of its graph make it: plan again for other runs"
            )
        self._call(
            launch.module.decode,
            call.q_nope,
            call.q_rope,
            call.latent_cache,
            call.kv_scale,
            call.sinks,
            batch.table if call.lists is None else call.lists,
            batch.table_rows,
            self._requests[: batch.batch_size],
            batch.query_start_loc is None,
            self._plans,
            self._split_buffers,
            self._flags,
            call.out,
            call.lse,
            self.stamps,
            batch.max_query_len,
            *batch.shard.as_integers,
            batch.table_kind is not TableKind.BLOCK,
            call.causal,
            call.softmax_scale,
            launch.num_ctas,
            # A captured run takes whatever plan there is when it is replayed, unless its graph makes it.
            0 if captured and not launch.captured else launch.generation,
            self._failure.data_ptr(),
            # Whether CTAs may wait for one another: only splits need this; batch-invariant plans have none.
            not self._spec.batch_invariant,
            # Whether the launch may begin before its predecessor in the stream has ended. The first launch
            # after a plan may not: it waits until the plan is complete. Later launches begin after the first
            # has begun, so the plan is complete by then. Captured launches do not run now, so other launches
            # do not rely on them.
            not self._plan_is_new[captured],
        )
        self._plan_is_new[captured] = False
