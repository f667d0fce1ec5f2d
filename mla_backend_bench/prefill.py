"""Times of vanilla attention (prefill), ours and other libraries', over shapes of one request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from mla_backend.errors import InvalidInputError
from mla_backend_bench import environment
from mla_backend_bench.prefill_implementations import IMPLEMENTATIONS, Attend, PrefillInputs
from mla_backend_bench.prepared import Implementation, Prepared, prepare, still_right
from mla_backend_bench.results import MAX_REL_L2, CaseResults, Failure
from mla_backend_bench.timing import measure_in_turn, synchronize

_ROUNDS = 2
_CHECKED_ROWS = 48
_SHAPE = re.compile(r"(\d+)x(\d+)(?:x(\d+))?@(\d+)(?::(\d+))?(~full)?")

STANDARD_SHAPES = (
    *(
        f"48x8192@{dims}{mask}"
        for dims in ("256", "320", "512", "576", "768", "1024")
        for mask in ("", "~full")
    ),
    *(f"48x{tokens}@192:128" for tokens in (2048, 4096, 8192, 16384, 32768)),
)
"""Large head dimensions, and DeepSeek's."""


@dataclass(frozen=True)
class PrefillShape:
    """One request, written HEADSxQ_LEN[xKV_LEN]@D_QK[:D_V][~full]. By default it has as many keys as queries,
    d_v = d_qk, and a causal mask."""

    heads: int
    q_len: int
    kv_len: int
    d_qk: int
    d_v: int
    causal: bool = True

    @staticmethod
    def parse(text: str) -> PrefillShape:
        """Read a shape.

        Raises:
            InvalidInputError: the text is not a shape.
        """
        match = _SHAPE.fullmatch(text)
        if match is None:
            raise InvalidInputError(
                f"{text!r} is not HEADSxQ_LEN[xKV_LEN]@D_QK[:D_V][~full], as 16x2048@192:128"
            )
        heads, q_len, kv_len, d_qk, d_v = (int(number or 0) for number in match.groups()[:5])
        shape = PrefillShape(heads, q_len, kv_len or q_len, d_qk, d_v or d_qk, match[6] is None)
        if not min(heads, q_len, d_qk) or shape.kv_len < q_len:
            raise InvalidInputError(f"{text!r}: numbers must be positive, and KV_LEN at least Q_LEN")
        return shape

    def __str__(self) -> str:
        kv_len = f"x{self.kv_len}" if self.kv_len != self.q_len else ""
        d_v = f":{self.d_v}" if self.d_v != self.d_qk else ""
        return f"{self.heads}x{self.q_len}{kv_len}@{self.d_qk}{d_v}{'' if self.causal else '~full'}"

    def flops(self) -> int:
        """Multiplications and additions of both products, of the (query, key) pairs that the mask leaves."""
        pairs = self.q_len * self.kv_len
        if self.causal:
            pairs -= self.q_len * (self.q_len - 1) // 2
        return 2 * self.heads * pairs * (self.d_qk + self.d_v)

    def inputs(self, device: torch.device, dtype: torch.dtype) -> PrefillInputs:
        """Random tensors of this shape."""
        generator = torch.Generator(device).manual_seed(0)

        def random(tokens: int, dim: int) -> Tensor:
            return torch.randn(tokens, self.heads, dim, device=device, dtype=dtype, generator=generator)

        q, k, v = random(self.q_len, self.d_qk), random(self.kv_len, self.d_qk), random(self.kv_len, self.d_v)
        return PrefillInputs(q, k, v, self.causal)


@dataclass(frozen=True)
class PrefillRow:
    """One implementation on one shape.

    Attributes:
        d_qk, d_v, heads, q_len, kv_len, causal: the shape.
        impl: a key of `IMPLEMENTATIONS`.
        time_us: of a call: the median over replays.
        p10_us, p90_us: eight of ten replays are between these; None in older files.
        tflops: `PrefillShape.flops`, which do not count padding, over the time.
        rel_l2: relative L2 error against fp64, over some query tokens and all heads.
    """

    d_qk: int
    d_v: int
    heads: int
    q_len: int
    kv_len: int
    causal: bool
    impl: str
    time_us: float
    tflops: float
    rel_l2: float
    p10_us: float | None = None
    p90_us: float | None = None


@dataclass
class PrefillResults(CaseResults):
    """The content of a results file."""

    dtype: str
    rows: list[PrefillRow] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def run(
    shapes: Iterable[PrefillShape],
    names: Iterable[str],
    device: torch.device,
    dtype: torch.dtype,
    on_shape: Callable[[PrefillShape, PrefillResults], None],
    commit: str | None = None,
) -> PrefillResults:
    """Measure implementations on each shape.

    An implementation that is missing, refuses a shape or computes a wrong result gets a `Failure`.

    Args:
        names: keys of `IMPLEMENTATIONS`.
        on_shape: called after each shape, with the results so far.
        commit: recorded in the results; by default `environment.commit()`.
    """
    dtype_name = str(dtype).removeprefix("torch.")
    results = PrefillResults(**environment.origin(device, commit), dtype=dtype_name)
    names = list(names)
    results.measure(
        shapes,
        device,
        lambda shape: _run_shape(shape, names, shape.inputs(device, dtype), results),
        on_shape,
    )
    return results


def _run_shape(shape: PrefillShape, names: list[str], inputs: PrefillInputs, results: PrefillResults) -> None:
    device, limit = inputs.q.device, MAX_REL_L2[inputs.q.dtype]
    rows = checked_rows(inputs)
    expected = expected_rows(inputs, rows)
    prepared: dict[str, Prepared] = {}
    for name in names:
        try:
            implementation = _OneLayer(IMPLEMENTATIONS[name](inputs))
            prepared[name] = prepare(implementation, (expected, expected), limit, 1, device, rows.tolist())
        except Exception as error:  # other implementations may raise anything; the rest still runs
            results.fail(shape, name, error)
        synchronize(device)
    times = measure_in_turn({name: p.replay for name, p in prepared.items()}, _ROUNDS)
    for name, p in still_right(prepared, shape, results).items():
        seconds, fast, slow = times[name]
        tflops = shape.flops() / seconds / 1e12
        row = PrefillRow(
            **asdict(shape),
            impl=name,
            time_us=seconds * 1e6,
            tflops=tflops,
            rel_l2=p.rel_l2,
            p10_us=fast * 1e6,
            p90_us=slow * 1e6,
        )
        results.rows.append(row)


class _OneLayer(Implementation):
    """Attention to one layer's keys: all calls read the same tensors."""

    def __init__(self, attend: Attend):
        self._attend = attend

    def run(self, layer: int) -> Tensor:
        return self._attend()


def checked_rows(inputs: PrefillInputs) -> Tensor:
    """The query tokens whose results are checked: the first, the last, and others evenly spaced."""
    last = len(inputs.q) - 1
    spaced = torch.linspace(0, last, _CHECKED_ROWS, device=inputs.q.device).round().long()
    return torch.unique(torch.cat([spaced, (spaced + 1).clamp(max=last)]))


def expected_rows(inputs: PrefillInputs, rows: Tensor) -> Tensor:
    """out [rows, H, d_v] of some query tokens, in fp64, head by head."""
    limit = len(inputs.k) - len(inputs.q) + 1 + rows
    hidden = torch.arange(len(inputs.k), device=rows.device) >= limit[:, None]
    outs = []
    for head in range(inputs.q.shape[1]):
        q, k, v = (x[:, head].double() for x in (inputs.q[rows], inputs.k, inputs.v))
        scores = q @ k.T * inputs.scale
        if inputs.causal:
            scores.masked_fill_(hidden, float("-inf"))
        outs.append(scores.softmax(-1) @ v)
    return torch.stack(outs, dim=1)
