"""Times of sparse attention: in each layer, each query token attends to another list of slots."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from mla_backend.batch import DecodeBatch, TableKind
from mla_backend.cache_format import RECORD_656, quantize
from mla_backend.decode import MLADecoder
from mla_backend.errors import InvalidInputError, UnsupportedError
from mla_backend_bench import environment
from mla_backend_bench.cases import KV_LORA_RANK, LATENT_DIM, ROPE_DIM, SOFTMAX_SCALE
from mla_backend_bench.implementations import Flash3
from mla_backend_bench.prepared import Implementation, Prepared, prepare, still_right
from mla_backend_bench.results import CaseResults, Failure
from mla_backend_bench.timing import cold_cache_bytes, measure_in_turn, synchronize

PAGE_SIZE = 64
CONTEXT = {"decode": 1 << 15, "prefill": 1 << 16}
"""Tokens of a request. In decode each row is a request; in prefill all rows are of one."""

# The largest relative L2 error of a correct result against fp64 attention to the bf16 cache.
MAX_REL_L2 = {"bf16": 4e-3, "fp8": 8e-2}
_ROUNDS = 3
_CHECKED_ROWS = 16
_SHAPE = re.compile(r"(decode|prefill):(\d+)x(\d+)(?:@(\d+))?")


@dataclass(frozen=True)
class SparseCase:
    """A shape: query tokens, the entries of each one's list, and heads on this GPU."""

    phase: str
    rows: int
    topk: int
    heads: int

    def __str__(self) -> str:
        return f"{self.phase}:{self.rows}x{self.heads}@{self.topk}"

    @staticmethod
    def parse(text: str) -> SparseCase:
        """Read `PHASE:ROWSxHEADS[@TOPK]`, such as decode:64x16@2048.

        Raises:
            InvalidInputError: ``text`` is not such a shape, or the list is longer than `CONTEXT`.
        """
        match = _SHAPE.fullmatch(text)
        if match is None or any(int(group) == 0 for group in match.groups()[1:] if group):
            raise InvalidInputError(
                f"{text!r} is not a valid shape: write decode:ROWSxHEADS or prefill:ROWSxHEADS, "
                "with @TOPK if not 2048, such as decode:64x16"
            )
        case = SparseCase(match[1], int(match[2]), int(match[4] or 2048), int(match[3]))
        if case.topk > (context := CONTEXT[case.phase]):
            raise InvalidInputError(
                f"{text!r} asks for {case.topk} of {context} tokens: write a smaller @TOPK"
            )
        return case

    def flops(self) -> int:
        """FLOPs of QK^T and PV; a multiply-add counts as 2."""
        return 2 * self.rows * self.topk * self.heads * (LATENT_DIM + KV_LORA_RANK)


STANDARD_GRID = (
    *(f"decode:{rows}x{heads}" for heads in (16, 64, 128) for rows in (1, 8, 64, 128)),
    *(f"prefill:{rows}x{heads}" for heads in (16, 64, 128) for rows in (1024, 8192)),
)


class SparseInputs:
    """Random inputs of a case: queries, a cache, and the lists of as many layers as keep the L2 cache cold.

    In decode, each list of each layer is drawn from a separate request of `CONTEXT` tokens. So the layers'
    calls read `cold_bytes` in all before they read anything twice. In prefill, all lists of a layer are drawn
    from one request, which differs from layer to layer.

    Attributes:
        q: [rows, heads, 576]; q_nope, q_rope: contiguous copies of its parts.
        cache: [pages, PAGE_SIZE, 576].
        lists: int32 [layers, rows, topk], slots without duplicates.
        lengths: int32 [rows], all `topk`.
    """

    def __init__(self, case: SparseCase, device: torch.device, dtype: torch.dtype, cold_bytes: int):
        self.case, self.device = case, device
        generator = torch.Generator(device).manual_seed(0)
        options: dict[str, Any] = {"device": device, "generator": generator}
        context = CONTEXT[case.phase]
        requests = case.rows if case.phase == "decode" else 1
        key_bytes = LATENT_DIM * dtype.itemsize
        read = requests * min(case.rows // requests * case.topk, context) * key_bytes
        layers = max(2, math.ceil(cold_bytes / read))
        tokens = layers * requests * context
        self.cache = torch.empty(tokens // PAGE_SIZE, PAGE_SIZE, LATENT_DIM, device=device, dtype=dtype)
        self.cache.normal_(generator=generator)
        self.lists = torch.empty(layers, case.rows, case.topk, device=device, dtype=torch.int32)
        for layer, lists in enumerate(self.lists):
            for row in range(case.rows):
                request = layer * requests + (row if requests > 1 else 0)
                lists[row] = torch.randperm(context, **options)[: case.topk] + request * context
        self.q = torch.randn(case.rows, case.heads, LATENT_DIM, dtype=dtype, **options)
        self.q_nope = self.q[..., :KV_LORA_RANK].contiguous()
        self.q_rope = self.q[..., KV_LORA_RANK:].contiguous()
        self.lengths = torch.full((case.rows,), case.topk, dtype=torch.int32, device=device)

    @property
    def num_layers(self) -> int:
        return len(self.lists)

    def checked_rows(self) -> list[int]:
        """The rows whose results are compared with fp64."""
        step = max(1, self.case.rows // _CHECKED_ROWS)
        return list(range(0, self.case.rows, step))[:_CHECKED_ROWS]

    def expected(self, layer: int) -> Tensor:
        """The exact output of `checked_rows` in fp64: [n, heads, 512]."""
        outputs = []
        for row in self.checked_rows():
            keys = self.cache.view(-1, LATENT_DIM)[self.lists[layer, row].long()].double()
            weights = (self.q[row].double() @ keys.T * SOFTMAX_SCALE).softmax(-1)
            outputs.append(weights @ keys[:, :KV_LORA_RANK])
        return torch.stack(outputs)


class SparseImplementation(Implementation):
    """An implementation of sparse attention, in which each layer has its own lists.

    Attributes:
        kv_dtype: of the cache that it reads.
    """

    kv_dtype: str = "bf16"


class MlaBackend(SparseImplementation):
    """Our decoder.

    Args:
        implementation: as `MLADecoder` takes it; a GPU must have a kernel for it.
        records: attend to fp8 records of 656 bytes.
    """

    def __init__(self, inputs: SparseInputs, implementation: str = "auto", records: bool = False):
        self.inputs = inputs
        self.kv_dtype = "fp8" if records else "bf16"
        self.cache = fp8_records(inputs.cache) if records else inputs.cache
        self.decoder = MLADecoder(
            num_heads=inputs.case.heads,
            kv_lora_rank=KV_LORA_RANK,
            qk_rope_head_dim=ROPE_DIM,
            dtype=inputs.q.dtype,
            kv_dtype=RECORD_656.name if records else None,
            page_size=PAGE_SIZE,
            table_kind=TableKind.LIST,
            device=inputs.device,
            max_batch=inputs.case.rows,
            implementation=implementation,
        )
        if inputs.device.type == "cuda" and self.decoder.implementation == "torch":
            raise UnsupportedError(f"none of our kernels serves this: {self.decoder.reason}")
        self.batch = DecodeBatch(inputs.lengths, None, PAGE_SIZE, table_kind=TableKind.LIST)
        self.out = torch.empty_like(inputs.q_nope)
        self.lse = torch.empty(self.out.shape[:2], device=inputs.device)

    def plan(self) -> None:
        self.state = self.decoder.plan(self.batch)

    def run(self, layer: int) -> Tensor:
        i = self.inputs
        self.decoder.run(
            *(i.q_nope, i.q_rope, self.cache, self.state, SOFTMAX_SCALE),
            out=self.out,
            lse=self.lse,
            table=i.lists[layer],
        )
        return self.out


class FlashAttention3(SparseImplementation):
    """FlashAttention-3 with a page table of pages of one token.

    vLLM and SGLang call it so on Hopper, but let it plan in every call.
    """

    def __init__(self, inputs: SparseInputs):
        rows = inputs.case.rows
        starts = torch.arange(rows + 1, dtype=torch.int32, device=inputs.device)
        self.inputs = inputs
        self.flash3 = Flash3(
            inputs.q_nope, inputs.q_rope, starts, 1, inputs.lengths, inputs.case.topk, page_size=1
        )
        self.rows = inputs.cache.view(-1, 1, LATENT_DIM)

    def plan(self) -> None:
        self.flash3.plan()

    def run(self, layer: int) -> Tensor:
        return self.flash3.attend(self.rows, self.inputs.lists[layer])


class _FlashMLA(SparseImplementation):
    """FlashMLA, whose kernels serve 64 and 128 heads; fewer are padded, as in engines."""

    def __init__(self, inputs: SparseInputs):
        try:
            import flash_mla as library
        except ImportError:
            import vllm.third_party.flashmla.flash_mla_interface as library
        self.library, self.inputs = library, inputs
        heads = inputs.case.heads
        padded = 64 if heads <= 64 else 128
        self.q = torch.nn.functional.pad(inputs.q, (0, 0, 0, padded - heads))


class FlashMLADecode(_FlashMLA):
    """FlashMLA's sparse decode kernel, which reads fp8 records of 656 bytes."""

    kv_dtype = "fp8"
    plan_includes_a_run = True  # the first call with new metadata plans

    def __init__(self, inputs: SparseInputs):
        if inputs.case.phase != "decode":
            raise UnsupportedError("measured in decode only")
        super().__init__(inputs)
        self.cache = fp8_records(inputs.cache).unsqueeze(2)
        self.lists = inputs.lists.unsqueeze(2)

    def plan(self) -> None:
        self.metadata = self.library.get_mla_metadata()[0]
        self.run(0)

    def run(self, layer: int) -> Tensor:
        out, _ = self.library.flash_mla_with_kvcache(
            self.q.unsqueeze(1),
            self.cache,
            None,
            None,
            KV_LORA_RANK,
            self.metadata,
            softmax_scale=SOFTMAX_SCALE,
            is_fp8_kvcache=True,
            indices=self.lists[layer],
        )
        return out[:, 0, : self.inputs.case.heads]


class FlashMLAPrefill(_FlashMLA):
    """FlashMLA's sparse prefill kernel."""

    def run(self, layer: int) -> Tensor:
        cache = self.inputs.cache.view(-1, 1, LATENT_DIM)
        lists = self.inputs.lists[layer].unsqueeze(1)
        out = self.library.flash_mla_sparse_fwd(self.q, cache, lists, SOFTMAX_SCALE)[0]
        return out[:, : self.inputs.case.heads]


def fp8_records(cache: Tensor) -> Tensor:
    """The cache [pages, page_size, 576] in records, uint8 [pages, page_size, 656]."""
    pages = [
        quantize(RECORD_656, *some.flatten(0, 1).split([KV_LORA_RANK, ROPE_DIM], dim=-1))
        for some in cache.split(1024)
    ]
    return torch.cat(pages).unflatten(0, cache.shape[:2])


SPARSE_IMPLEMENTATIONS: dict[str, Callable[[SparseInputs], SparseImplementation]] = {
    "mla_backend": MlaBackend,
    "mla_backend-records": functools.partial(MlaBackend, records=True),
    "flashmla-decode": FlashMLADecode,
    "flashmla-prefill": FlashMLAPrefill,
    "fa3": FlashAttention3,
    "mla_backend_portable": functools.partial(MlaBackend, implementation="portable"),
}
DEFAULT = tuple(name for name in SPARSE_IMPLEMENTATIONS if name != "mla_backend_portable")


@dataclass(frozen=True)
class Row:
    """One implementation on one shape: the time of a call (the median over replays, and the deciles between
    which eight of ten are; None in older files), of a plan, FLOPs over time, and its error."""

    phase: str
    rows: int
    topk: int
    heads: int
    kv_dtype: str
    impl: str
    time_us: float
    plan_us: float
    tflops: float
    rel_l2: float
    p10_us: float | None = None
    p90_us: float | None = None


@dataclass
class Results(CaseResults):
    """The content of a results file."""

    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def run(
    cases: Iterable[SparseCase],
    names: Iterable[str],
    device: torch.device,
    on_case: Callable[[SparseCase, Results], None],
    commit: str | None = None,
) -> Results:
    """Measure implementations on each case, in bf16 (on a CPU, in fp32).

    An implementation that is missing, refuses a case or computes a wrong result gets a `Failure`.

    Args:
        names: keys of `SPARSE_IMPLEMENTATIONS`.
        on_case: called after each case, with the results so far.
        commit: recorded in the results; by default `environment.commit()`.
    """
    results = Results(**environment.origin(device, commit))
    names = list(names)
    results.measure(cases, device, lambda case: _run_case(case, names, device, results), on_case)
    return results


def _run_case(case: SparseCase, names: list[str], device: torch.device, results: Results) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = SparseInputs(case, device, dtype, cold_cache_bytes(device))
    expected = inputs.expected(0), inputs.expected(inputs.num_layers - 1)
    prepared: dict[str, Prepared] = {}
    kv_dtypes: dict[str, str] = {}
    for name in names:
        try:
            implementation = SPARSE_IMPLEMENTATIONS[name](inputs)
            kv_dtypes[name] = implementation.kv_dtype
            limit = MAX_REL_L2[implementation.kv_dtype]
            prepared[name] = prepare(
                implementation, expected, limit, inputs.num_layers, device, rows=inputs.checked_rows()
            )
        except Exception as error:  # other implementations may raise anything; the rest still runs
            results.fail(case, name, error)
        synchronize(device)
    times = measure_in_turn({name: p.replay for name, p in prepared.items()}, _ROUNDS)
    for name, p in still_right(prepared, case, results).items():
        seconds, fast, slow = times[name]
        speed = case.flops() / seconds / 1e12
        fp32 = kv_dtypes[name] == "bf16" and device.type != "cuda"
        results.rows.append(
            Row(**asdict(case), kv_dtype="fp32" if fp32 else kv_dtypes[name], impl=name,
                time_us=seconds * 1e6, plan_us=p.plan_seconds * 1e6, tflops=speed, rel_l2=p.rel_l2,
                p10_us=fast * 1e6, p90_us=slow * 1e6)
        )  # fmt: skip
