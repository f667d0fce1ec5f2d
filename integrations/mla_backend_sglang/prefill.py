"""One prefill step: each request by its own method, whatever its batch mates do.

SGLang runs one attention forward for a whole batch, and stock backends choose it from sums over the batch:
a cache hit of one request moves all others to another path, and changes their tokens. Here the model always
calls its MHA forward (see :mod:`mla_backend_sglang.dispatch`), and the requests are sorted behind that one
call:

- VANILLA, without a cached prefix: the keys and values that the model expanded, causal.
- ABSORBED, where the policy says so, which is few new tokens on a prefix: our paged kernel on the cache.
- ONE_SHOT, if prefix and new tokens fit the expansion buffer: all latents are gathered from the cache and
  expanded, for one causal attention.
- CHUNKED otherwise: new tokens as VANILLA, then the prefix in chunks of that buffer's size, merged by LSE.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_backend import cache, counters
from mla_backend.batch import DecodeBatch, TableKind
from mla_backend.decode import DecodePlan, MLADecoder
from mla_backend.errors import UnsupportedError
from mla_backend.policy import Policy
from mla_backend.prefill import prefill
from mla_backend.torch_attention import merge_states
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


@dataclass(frozen=True)
class LayerInputs:
    """What one attention layer brings to a step.

    Attributes:
        q: [T, H, d_nope + d_rope].
        key: [T, H, d_nope + d_rope], of the new tokens.
        value: [T, H, d_v], of the new tokens.
        latent_cache: [pages, page_size, d_c + d_rope], which holds the new tokens already.
        scale: softmax scale.
        weights: the layer's absorbed weights and expansion; None if it has no ``kv_b_proj`` that we know.
    """

    q: Tensor
    key: Tensor
    value: Tensor
    latent_cache: Tensor
    scale: float
    weights: LayerWeights | None

    def expand(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the cached tokens in some slots."""
        return self.weights.expand(cache.select_rows(self.latent_cache, slots))


Rows = slice | Tensor
"""Query rows of some requests: a slice where they lie together, else an index."""


@dataclass(frozen=True)
class _Vanilla:
    """Requests that attend to the keys of their own new tokens."""

    path = "vanilla_prefill"
    rows: Rows
    offsets: Tensor
    max_query_len: int

    def attend(self, layer: LayerInputs) -> Tensor:
        return self.attend_with_lse(layer)[0]

    def attend_with_lse(self, layer: LayerInputs) -> tuple[Tensor, Tensor]:
        rows, offsets, length = self.rows, self.offsets, self.max_query_len
        q, key, value = layer.q[rows], layer.key[rows], layer.value[rows]
        return prefill(q, key, value, offsets, offsets, length, length, layer.scale, True, return_lse=True)


@dataclass(frozen=True)
class _OneShot:
    """Requests that attend to all of their tokens, expanded together."""

    path = "vanilla_prefill"
    rows: Rows
    slots: Tensor
    query_offsets: Tensor
    key_offsets: Tensor
    max_query_len: int
    max_key_len: int

    def attend(self, layer: LayerInputs) -> Tensor:
        key, value = layer.expand(self.slots)
        offsets, lengths = (self.query_offsets, self.key_offsets), (self.max_query_len, self.max_key_len)
        return prefill(layer.q[self.rows], key, value, *offsets, *lengths, layer.scale, causal=True)


@dataclass(frozen=True)
class _Chunked:
    """One request whose prefix is expanded piece by piece."""

    path = "vanilla_prefill"
    new_tokens: _Vanilla
    chunks: list[tuple[Tensor, Tensor]]  # slots, key offsets

    @property
    def rows(self) -> Rows:
        return self.new_tokens.rows

    def attend(self, layer: LayerInputs) -> Tensor:
        new = self.new_tokens
        out, lse = new.attend_with_lse(layer)
        for slots, key_offsets in self.chunks:
            offsets, lengths = (new.offsets, key_offsets), (new.max_query_len, slots.shape[0])
            chunk = prefill(
                layer.q[self.rows],
                *layer.expand(slots),
                *offsets,
                *lengths,
                layer.scale,
                causal=False,
                return_lse=True,
            )
            out, lse = merge_states(out, lse, *chunk)
        return out


class _AbsorbedBatch:
    """A batch of the decoder, planned when it is needed.

    A decoder has buffers for one plan. A step may need two batches in turn, of some requests in layers that
    attend with keys per head and of all of them in others. So a plan that another one replaced is made again.
    """

    def __init__(self, decoder: MLADecoder, batch: DecodeBatch):
        self._decoder, self._batch = decoder, batch
        self._plan: DecodePlan | None = None

    def run(
        self, q_nope: Tensor, q_rope: Tensor, latent_cache: Tensor, scale: float, out: Tensor | None = None
    ) -> Tensor:
        """q_nope [T, H, d_c], q_rope [T, H, d_rope] -> out [T, H, d_c], allocated if None."""
        if self._plan is None or not self._plan.is_current:
            self._plan = self._decoder.plan(self._batch)
        return self._decoder.run(q_nope, q_rope, latent_cache, self._plan, scale, out=out)[0]


@dataclass(frozen=True)
class _Absorbed:
    """Requests whose new queries are absorbed."""

    path = "absorbed_extend"
    rows: Rows
    batch: _AbsorbedBatch

    def attend(self, layer: LayerInputs) -> Tensor:
        absorbed = layer.weights.absorbed
        d_nope = absorbed.w_uk.shape[1]
        q_nope, q_rope = layer.q[self.rows].tensor_split([d_nope], dim=-1)
        q_latent = absorbed.absorb_query(q_nope)
        return absorbed.project_output(self.batch.run(q_latent, q_rope, layer.latent_cache, layer.scale))


class PrefillStep:
    """A prefill batch, planned from lengths that the host already has; shared by the step's layers.

    Args:
        query_lens: new tokens of each request.
        prefix_lens: cached tokens of each request.
        table: int32 [rows, width], token slots.
        table_rows: int64 [batch], row of each request.
        seq_lens: int32 [batch], both lengths together.
        decoder: made for TOKEN tables.
    """

    def __init__(
        self,
        query_lens: Sequence[int],
        prefix_lens: Sequence[int],
        *,
        table: Tensor,
        table_rows: Tensor,
        seq_lens: Tensor,
        decoder: MLADecoder,
    ):
        self._query_lens, self._prefix_lens = list(query_lens), list(prefix_lens)
        self._starts = _offsets(self._query_lens)
        self._num_tokens = self._starts[-1]
        self._table, self._table_rows, self._seq_lens = table, table_rows, seq_lens
        self._decoder = decoder
        self._parts: list[_Vanilla | _OneShot | _Chunked | _Absorbed] | None = None
        self._all_absorbed: _AbsorbedBatch | None = None

    def attend(self, layer: LayerInputs, chooser: PrefillChooser) -> Tensor:
        """Causal attention, each request by its method; [T, H, d_v].

        Rows that belong to no request (padding) are 0.

        Raises:
            UnsupportedError: cached tokens cannot be expanded.
        """
        if layer.weights is None and any(self._prefix_lens):
            raise UnsupportedError(
                "this model's attention layers have no kv_b_proj that mla_backend knows, and cached tokens "
                "cannot be expanded without it: start with --disable-radix-cache --chunked-prefill-size -1"
            )
        if self._parts is None:
            self._parts = self._plan(chooser)
        out = layer.q.new_empty(*layer.q.shape[:2], layer.value.shape[2])
        out[self._num_tokens :] = 0
        for part in self._parts:
            attended = part.attend(layer)
            counters.add(part.path, attended.shape[0])
            out[part.rows] = attended
        return out

    def attend_absorbed(self, q_nope: Tensor, q_rope: Tensor, latent_cache: Tensor, scale: float) -> Tensor:
        """Absorbed attention for all requests: q_nope [T, H, d_c], q_rope [T, H, d_rope] -> [T, H, d_c]."""
        if self._all_absorbed is None:
            self._all_absorbed = self._absorbed_batch(range(len(self._query_lens)))
        counters.add("absorbed_extend", self._num_tokens)
        out = q_nope.new_empty(q_nope.shape)
        out[self._num_tokens :] = 0
        rows = slice(0, self._num_tokens)
        self._all_absorbed.run(q_nope[rows], q_rope[rows], latent_cache, scale, out=out[rows])
        return out

    def _plan(self, chooser: PrefillChooser) -> list[_Vanilla | _OneShot | _Chunked | _Absorbed]:
        requests: dict[PrefillMethod, list[int]] = {method: [] for method in PrefillMethod}
        for i, lengths in enumerate(zip(self._query_lens, self._prefix_lens, strict=True)):
            requests[chooser(*lengths)].append(i)
        parts: list[_Vanilla | _OneShot | _Chunked | _Absorbed] = []
        if vanilla := requests[PrefillMethod.VANILLA]:
            parts.append(self._plan_vanilla(vanilla))
        for group in self._groups(requests[PrefillMethod.ONE_SHOT], chooser.chunk_tokens):
            parts.append(self._plan_one_shot(group))
        for request in requests[PrefillMethod.CHUNKED]:
            parts.append(self._plan_chunked(request, chooser.chunk_tokens))
        if absorbed := requests[PrefillMethod.ABSORBED]:
            parts.append(_Absorbed(self._rows(absorbed), self._absorbed_batch(absorbed)))
        return parts

    def _groups(self, requests: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Consecutive requests whose tokens, expanded together, fit the buffer."""
        groups: list[list[int]] = []
        total = 0
        for i in requests:
            tokens = self._query_lens[i] + self._prefix_lens[i]
            if not groups or total + tokens > max_tokens:
                groups.append([])
                total = 0
            groups[-1].append(i)
            total += tokens
        return groups

    def _plan_vanilla(self, requests: Sequence[int]) -> _Vanilla:
        query_lens = [self._query_lens[i] for i in requests]
        (offsets,) = self._upload(_offsets(query_lens))
        return _Vanilla(self._rows(requests), offsets, max(query_lens))

    def _plan_one_shot(self, requests: Sequence[int]) -> _OneShot:
        query_lens = [self._query_lens[i] for i in requests]
        key_lens = [self._query_lens[i] + self._prefix_lens[i] for i in requests]
        query_offsets, key_offsets = self._upload(_offsets(query_lens), _offsets(key_lens))
        slots = [self._slots(i, 0, length) for i, length in zip(requests, key_lens, strict=True)]
        return _OneShot(
            self._rows(requests), torch.cat(slots), query_offsets, key_offsets, max(query_lens), max(key_lens)
        )

    def _plan_chunked(self, request: int, chunk_tokens: int) -> _Chunked:
        prefix_len = self._prefix_lens[request]
        starts = range(0, prefix_len, chunk_tokens)
        bounds = [(start, min(start + chunk_tokens, prefix_len)) for start in starts]
        key_offsets = self._upload(*([0, stop - start] for start, stop in bounds))
        slots = [self._slots(request, start, stop) for start, stop in bounds]
        return _Chunked(self._plan_vanilla([request]), list(zip(slots, key_offsets, strict=True)))

    def _absorbed_batch(self, requests: Sequence[int]) -> _AbsorbedBatch:
        query_lens = [self._query_lens[i] for i in requests]
        offsets, members = self._upload(_offsets(query_lens), requests)
        members = members.long()
        batch = DecodeBatch(
            seq_lens=self._seq_lens[members],
            table=self._table,
            page_size=self._decoder.spec.page_size,
            query_start_loc=offsets,
            max_query_len=max(query_lens),
            table_kind=TableKind.TOKEN,
            table_rows=self._table_rows[members],
        )
        return _AbsorbedBatch(self._decoder, batch)

    def _rows(self, requests: Sequence[int]) -> Rows:
        first, last = requests[0], requests[-1]
        if last - first + 1 == len(requests):
            return slice(self._starts[first], self._starts[last + 1])
        (rows,) = self._upload([r for i in requests for r in range(self._starts[i], self._starts[i + 1])])
        return rows.long()

    def _slots(self, request: int, start: int, stop: int) -> Tensor:
        """int64 cache slots of a request's tokens start..stop."""
        return self._table[self._table_rows[request : request + 1], start:stop].squeeze(0).long()

    def _upload(self, *lists: Sequence[int]) -> tuple[Tensor, ...]:
        """Lists of ints as int32 tensors on the device, in one copy."""
        values = [value for numbers in lists for value in numbers]
        host = torch.tensor(values, dtype=torch.int32, pin_memory=self._table.is_cuda)
        device = host.to(self._table.device, non_blocking=True)
        return device.split([len(numbers) for numbers in lists])


def _offsets(lengths: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(lengths, initial=0))
