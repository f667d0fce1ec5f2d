"""One prefill step: each request by its own method, whatever its batch mates do.

SGLang runs one attention forward for a whole batch, and stock backends choose it from sums over the batch: a cache hit
of one request moves all others to another path, and changes their tokens. Here the model always calls its MHA forward
(see :func:`mla_backend_sglang.registration.choose_forward_method`), and the requests of the batch are sorted behind
that one call:

========  =========================  ==================================================================================
method    when                       how
========  =========================  ==================================================================================
VANILLA   no cached prefix           the keys and values that the model expanded, causal
ONE_SHOT  prefix + new tokens fit    all latents gathered from the cache and expanded, one causal attention
          the expansion buffer
CHUNKED   they do not                new tokens as VANILLA, the prefix in chunks of the buffer's size, merged by LSE
ABSORBED  the policy says so         new queries absorbed, our paged kernel on the cache
          (few new tokens on a prefix)
========  =========================  ==================================================================================
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mla_backend import cache, counters
from mla_backend.batch import DecodeBatch, TableKind
from mla_backend.decode import DecodePlan, MLADecoder
from mla_backend.errors import UnsupportedError
from mla_backend.policy import Policy
from mla_backend.prefill import prefill
from mla_backend.reference import merge_states
from torch import Tensor

from mla_backend_sglang.weights import LayerWeights

# Bounds the expanded keys and values of cached tokens that exist at a time.
_EXPANSION_BYTES = 512 << 20


class PrefillMethod(enum.Enum):
    VANILLA = enum.auto()
    ONE_SHOT = enum.auto()
    CHUNKED = enum.auto()
    ABSORBED = enum.auto()


@dataclass(frozen=True)
class PrefillChooser:
    """Chooses by a request's own lengths and by what is fixed when the server starts, nothing else.

    Attributes:
        policy: absorbed or vanilla.
        chunk_tokens: how many cached tokens are expanded at a time.
        absorb_prefixes: every request with a prefix is absorbed.
    """

    policy: Policy
    chunk_tokens: int
    absorb_prefixes: bool = False

    def __call__(self, query_len: int, prefix_len: int) -> PrefillMethod:
        if prefix_len == 0:
            return PrefillMethod.VANILLA
        if self.absorb_prefixes or self.policy.absorbed(query_len, prefix_len):
            return PrefillMethod.ABSORBED
        if query_len + prefix_len <= self.chunk_tokens:
            return PrefillMethod.ONE_SHOT
        return PrefillMethod.CHUNKED


def expansion_tokens(policy: Policy, dtype: torch.dtype) -> int:
    """How many cached tokens' keys and values fit the buffer: fixed for a model, whatever is in a batch."""
    geometry = policy.geometry
    per_token = geometry.num_heads * (geometry.qk_head_dim + geometry.v_head_dim) * dtype.itemsize
    return max(4096, _EXPANSION_BYTES // per_token)


Rows = slice | Tensor


class _Upload:
    """Collects lists of ints and copies them to the device in one go."""

    def __init__(self) -> None:
        self._values: list[int] = []

    def add(self, values: Sequence[int]) -> slice:
        start = len(self._values)
        self._values += values
        return slice(start, len(self._values))

    def copy_to(self, device: torch.device) -> Tensor:
        host = torch.tensor(self._values, dtype=torch.int32, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)


def _offsets(lengths: Sequence[int]) -> list[int]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets


@dataclass(frozen=True)
class _Vanilla:
    """Requests that attend to the keys of their own new tokens."""

    rows: Rows
    offsets: Tensor
    max_query_len: int


@dataclass(frozen=True)
class _OneShot:
    """Requests that attend to all of their tokens, expanded together."""

    rows: Rows
    slots: Tensor
    query_offsets: Tensor
    key_offsets: Tensor
    max_query_len: int
    max_key_len: int


@dataclass(frozen=True)
class _Chunked:
    """One request with a prefix that is expanded piece by piece."""

    rows: slice
    query_offsets: Tensor
    query_len: int
    chunks: list[tuple[Tensor, Tensor]]  # slots, key offsets


@dataclass(frozen=True)
class _Absorbed:
    """Requests whose new queries are absorbed."""

    rows: Rows
    plan: DecodePlan


_Part = _Vanilla | _OneShot | _Chunked | _Absorbed


class PrefillStep:
    """A prefill batch, planned from lengths that the host already has; shared by the step's layers.

    Args:
        query_lens: new tokens of each request.
        prefix_lens: cached tokens of each request.
        table: int32 [rows, width], token slots.
        table_rows: int64 [batch], row of each request.
        seq_lens: int32 [batch], both lengths together.
    """

    def __init__(
        self,
        query_lens: Sequence[int],
        prefix_lens: Sequence[int],
        *,
        table: Tensor,
        table_rows: Tensor,
        seq_lens: Tensor,
        page_size: int,
        decoder: MLADecoder,
    ):
        self.query_lens = list(query_lens)
        self.prefix_lens = list(prefix_lens)
        self.num_tokens = sum(query_lens)
        self._starts = _offsets(self.query_lens)
        self._table, self._table_rows, self._seq_lens = table, table_rows, seq_lens
        self._page_size = page_size
        self._decoder = decoder
        self._parts: list[_Part] | None = None
        self._all_absorbed: DecodePlan | None = None

    def attend_absorbed(self, q_nope: Tensor, q_rope: Tensor, latent_cache: Tensor, scale: float) -> Tensor:
        """Absorbed attention for all requests: q_nope [T, H, d_c], q_rope [T, H, d_rope] -> [T, H, d_c]."""
        if self._all_absorbed is None:
            self._all_absorbed = self._plan_absorbed(range(len(self.query_lens)))
        counters.add("absorbed_extend", self.num_tokens)
        out = q_nope.new_empty(q_nope.shape)
        out[self.num_tokens :] = 0
        rows = slice(0, self.num_tokens)
        self._decoder.run(q_nope[rows], q_rope[rows], latent_cache, self._all_absorbed, scale, out=out[rows])
        return out

    def attend(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        latent_cache: Tensor,
        scale: float,
        chooser: PrefillChooser,
        weights: LayerWeights | None,
    ) -> Tensor:
        """Causal attention, each request by its method.

        Args:
            q: [T, H, d_nope + d_rope].
            key: [T, H, d_nope + d_rope], of the new tokens.
            value: [T, H, d_v].
            latent_cache: [pages, page_size, d_c + d_rope], which holds the new tokens already.

        Returns:
            [T, H, d_v]. Rows that belong to no request (padding) are 0.
        """
        if weights is None and any(self.prefix_lens):
            raise UnsupportedError(
                "this model's attention layers have no kv_b_proj that mla_backend knows, so that cached tokens "
                "cannot be expanded: start with --disable-radix-cache --chunked-prefill-size -1"
            )
        if self._parts is None:
            self._parts = self._plan(chooser)
        out = q.new_empty(q.shape[0], q.shape[1], value.shape[2])
        out[self.num_tokens :] = 0
        for part in self._parts:
            if isinstance(part, _Vanilla):
                counters.add("vanilla_prefill", q[part.rows].shape[0])
                out[part.rows] = self._vanilla(part, q, key, value, scale)
            elif isinstance(part, _OneShot):
                counters.add("vanilla_prefill", q[part.rows].shape[0])
                out[part.rows] = self._one_shot(part, q, latent_cache, scale, weights)
            elif isinstance(part, _Chunked):
                counters.add("vanilla_prefill", part.query_len)
                out[part.rows] = self._chunked(part, q, key, value, latent_cache, scale, weights)
            else:
                counters.add("absorbed_extend", q[part.rows].shape[0])
                out[part.rows] = self._absorbed(part, q, latent_cache, scale, weights)
        return out

    # How each part attends.

    @staticmethod
    def _vanilla(part: _Vanilla, q: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        rows = part.rows
        return prefill(
            q[rows], key[rows], value[rows], part.offsets, part.offsets, part.max_query_len, part.max_query_len,
            scale, causal=True, return_lse=False,
        )  # fmt: skip

    @staticmethod
    def _one_shot(part: _OneShot, q: Tensor, latent_cache: Tensor, scale: float, weights: LayerWeights) -> Tensor:
        key, value = weights.expand(cache.select_rows(latent_cache, part.slots))
        return prefill(
            q[part.rows], key, value, part.query_offsets, part.key_offsets, part.max_query_len, part.max_key_len,
            scale, causal=True, return_lse=False,
        )  # fmt: skip

    @staticmethod
    def _chunked(
        part: _Chunked,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        latent_cache: Tensor,
        scale: float,
        weights: LayerWeights,
    ) -> Tensor:
        rows, offsets, length = part.rows, part.query_offsets, part.query_len
        out, lse = prefill(
            q[rows], key[rows], value[rows], offsets, offsets, length, length, scale, causal=True, return_lse=True
        )
        for slots, key_offsets in part.chunks:
            chunk_key, chunk_value = weights.expand(cache.select_rows(latent_cache, slots))
            chunk_out, chunk_lse = prefill(
                q[rows], chunk_key, chunk_value, offsets, key_offsets, length, slots.shape[0],
                scale, causal=False, return_lse=True,
            )  # fmt: skip
            out, lse = merge_states(out, lse, chunk_out, chunk_lse)
        return out

    def _absorbed(
        self, part: _Absorbed, q: Tensor, latent_cache: Tensor, scale: float, weights: LayerWeights
    ) -> Tensor:
        absorbed = weights.absorbed
        q_nope, q_rope = q[part.rows].split([absorbed.w_uk.shape[1], q.shape[2] - absorbed.w_uk.shape[1]], dim=-1)
        latent_out, _ = self._decoder.run(absorbed.absorb_query(q_nope), q_rope, latent_cache, part.plan, scale)
        return absorbed.project_output(latent_out)

    # How a batch is divided.

    def _plan(self, chooser: PrefillChooser) -> list[_Part]:
        requests: dict[PrefillMethod, list[int]] = {method: [] for method in PrefillMethod}
        for i, (query_len, prefix_len) in enumerate(zip(self.query_lens, self.prefix_lens, strict=True)):
            requests[chooser(query_len, prefix_len)].append(i)
        parts: list[_Part] = []
        if vanilla := requests[PrefillMethod.VANILLA]:
            lengths = [self.query_lens[i] for i in vanilla]
            (offsets,) = self._upload(_offsets(lengths))
            parts.append(_Vanilla(self._rows(vanilla), offsets, max(lengths)))
        parts += [self._plan_one_shot(group) for group in self._groups(requests[PrefillMethod.ONE_SHOT], chooser)]
        parts += [self._plan_chunked(i, chooser.chunk_tokens) for i in requests[PrefillMethod.CHUNKED]]
        if absorbed := requests[PrefillMethod.ABSORBED]:
            parts.append(_Absorbed(self._rows(absorbed), self._plan_absorbed(absorbed)))
        return parts

    def _groups(self, requests: Sequence[int], chooser: PrefillChooser) -> list[list[int]]:
        """Consecutive requests whose tokens, expanded together, fit the buffer."""
        groups: list[list[int]] = []
        total = 0
        for i in requests:
            tokens = self.query_lens[i] + self.prefix_lens[i]
            if not groups or total + tokens > chooser.chunk_tokens:
                groups.append([])
                total = 0
            groups[-1].append(i)
            total += tokens
        return groups

    def _plan_one_shot(self, requests: Sequence[int]) -> _OneShot:
        query_lens = [self.query_lens[i] for i in requests]
        key_lens = [self.query_lens[i] + self.prefix_lens[i] for i in requests]
        query_offsets, key_offsets = self._upload(_offsets(query_lens), _offsets(key_lens))
        return _OneShot(
            self._rows(requests),
            torch.cat([self._slots(i, 0, length) for i, length in zip(requests, key_lens, strict=True)]),
            query_offsets,
            key_offsets,
            max(query_lens),
            max(key_lens),
        )

    def _plan_chunked(self, request: int, chunk_tokens: int) -> _Chunked:
        prefix_len = self.prefix_lens[request]
        bounds = [(start, min(start + chunk_tokens, prefix_len)) for start in range(0, prefix_len, chunk_tokens)]
        query_offsets, *key_offsets = self._upload(
            [0, self.query_lens[request]], *([0, stop - start] for start, stop in bounds)
        )
        return _Chunked(
            slice(self._starts[request], self._starts[request + 1]),
            query_offsets,
            self.query_lens[request],
            [(self._slots(request, *bound), offsets) for bound, offsets in zip(bounds, key_offsets, strict=True)],
        )

    def _plan_absorbed(self, requests: Sequence[int]) -> DecodePlan:
        lengths = [self.query_lens[i] for i in requests]
        offsets, members = self._upload(_offsets(lengths), list(requests))
        members = members.long()
        return self._decoder.plan(
            DecodeBatch(
                seq_lens=self._seq_lens[members],
                table=self._table,
                page_size=self._page_size,
                query_start_loc=offsets,
                max_query_len=max(lengths),
                table_kind=TableKind.TOKEN,
                table_rows=self._table_rows[members],
            )
        )

    def _rows(self, requests: Sequence[int]) -> Rows:
        """Query rows of some requests; without an index where they lie together."""
        first, last = requests[0], requests[-1]
        if last - first + 1 == len(requests):
            return slice(self._starts[first], self._starts[last + 1])
        (rows,) = self._upload([row for i in requests for row in range(self._starts[i], self._starts[i + 1])])
        return rows.long()

    def _slots(self, request: int, start: int, stop: int) -> Tensor:
        """int64 cache slots of a request's tokens start..stop."""
        return self._table[self._table_rows[request : request + 1], start:stop].squeeze(0).long()

    def _upload(self, *lists: Sequence[int]) -> list[Tensor]:
        upload = _Upload()
        places = [upload.add(values) for values in lists]
        values = upload.copy_to(self._table.device)
        return [values[place] for place in places]
