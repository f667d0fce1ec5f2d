"""A prefill step, in which the method of a request does not depend on the other requests.

SGLang runs one attention forward for a whole batch. Its own backends choose it from sums over the batch, so a
cache hit of one request moves all others to another path and can change their tokens. With this backend the
model always calls its MHA forward (see :mod:`mla_backend_sglang.dispatch`), and its one attention call sorts
the requests by method:

- VANILLA, without a cached prefix: causal attention with the keys and values that the model expanded.
- ABSORBED, for few new tokens on a prefix, as the policy decides: the paged decode kernel on the cache.
- ONE_SHOT, if prefix and new tokens fit the expansion buffer: all latents are gathered from the cache and
  expanded, for one causal attention.
- CHUNKED otherwise: the new tokens as VANILLA, then the prefix in chunks of the buffer's size. The results
  are merged by their log-sum-exp.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from mla_backend import counters
from mla_backend.batch import WHOLE, DecodeBatch, Shard, TableKind
from mla_backend.decode import DecodePlan, MLADecoder
from mla_backend.errors import UnsupportedError
from mla_backend.policy import Policy
from mla_backend.prefill import Plans, merge_states, prefill
from mla_backend_sglang.shard import gather_rows
from mla_backend_sglang.weights import LayerWeights

# The largest size of the expanded keys and values of cached tokens at a time.
_EXPANSION_BYTES = 512 << 20


class PrefillMethod(enum.Enum):
    """How a request of a prefill attends; docs/integration-sglang.md says when each is taken."""

    VANILLA = enum.auto()
    ONE_SHOT = enum.auto()
    CHUNKED = enum.auto()
    ABSORBED = enum.auto()


@dataclass(frozen=True)
class PrefillChooser:
    """Chooses the method of a request from its own lengths and from settings that are fixed at start.

    Attributes:
        policy: decides between absorbed and vanilla attention.
        chunk_tokens: the largest number of cached tokens to expand at a time.
        absorb_prefixes: use absorbed attention for every request with a prefix, whatever the policy says.
        may_absorb: whether absorbed attention may be used at all. If ranks divide the cache it may not,
            because in a prefill a rank does not have the queries of the other ranks.
    """

    policy: Policy
    chunk_tokens: int
    absorb_prefixes: bool = False
    may_absorb: bool = True

    def __call__(self, query_len: int, prefix_len: int) -> PrefillMethod:
        if prefix_len == 0:
            return PrefillMethod.VANILLA
        if self.may_absorb and (self.absorb_prefixes or self.policy.absorbed(query_len, prefix_len)):
            return PrefillMethod.ABSORBED
        if query_len + prefix_len <= self.chunk_tokens:
            return PrefillMethod.ONE_SHOT
        return PrefillMethod.CHUNKED


def expansion_tokens(policy: Policy, dtype: torch.dtype) -> int:
    """The number of cached tokens whose keys and values fit the expansion buffer, whatever the batch is."""
    geometry = policy.geometry
    per_token = geometry.num_heads * (geometry.qk_head_dim + geometry.v_head_dim) * dtype.itemsize
    return max(4096, _EXPANSION_BYTES // per_token)


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of one layer's attention call.

    Attributes:
        q: [T, H, d_nope + d_rope].
        key: [T, H, d_nope + d_rope], of the new tokens.
        value: [T, H, d_v], of the new tokens.
        latent_cache: [pages, page_size, d_c + d_rope], which already holds the new tokens.
        weights: the layer's absorbed weights and expansion; None if it has no ``kv_b_proj`` to expand with.
        shard: which part of the cache ``latent_cache`` is.
        kv_scale: the scale of the cache, if its format has one.
    """

    q: Tensor
    key: Tensor
    value: Tensor
    latent_cache: Tensor
    softmax_scale: float
    weights: LayerWeights | None
    shard: Shard = WHOLE
    kv_scale: Tensor | None = None

    def expand(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of the cached tokens in some slots."""
        assert self.weights is not None  # PrefillStep.attend has checked this
        return self.weights.expand(
            gather_rows(self.latent_cache, slots, self.shard, self.kv_scale, self.q.dtype)
        )


@dataclass(frozen=True)
class _Ragged:
    """Offsets of requests' query tokens and keys, which nobody changes.

    Attributes:
        query_offsets, key_offsets: int32 [requests + 1].
        max_query_len, max_key_len: of the longest request.
        plans: what libraries have planned for these offsets. The plans are freed with the step.
    """

    query_offsets: Tensor
    key_offsets: Tensor
    max_query_len: int
    max_key_len: int
    plans: Plans = field(default_factory=dict)

    def attend(
        self, q: Tensor, key: Tensor, value: Tensor, softmax_scale: float, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Call `mla_backend.prefill.prefill`, and return out and lse."""
        out, lse = prefill(
            q,
            key,
            value,
            self.query_offsets,
            self.key_offsets,
            self.max_query_len,
            self.max_key_len,
            softmax_scale,
            causal,
            return_lse=True,
            plans=self.plans,
        )
        return out, lse


Tokens: TypeAlias = slice | Tensor
"""The query tokens of some requests: a slice if they are contiguous, otherwise an index."""


@dataclass(frozen=True)
class _Vanilla:
    """Requests without a cached prefix, which attend only to the keys of their new tokens."""

    path: ClassVar[counters.AttentionPath] = "vanilla_prefill"
    tokens: Tokens
    ragged: _Ragged

    def attend(self, layer: LayerInputs) -> Tensor:
        return self.attend_with_lse(layer)[0]

    def attend_with_lse(self, layer: LayerInputs) -> tuple[Tensor, Tensor]:
        q, key, value = layer.q[self.tokens], layer.key[self.tokens], layer.value[self.tokens]
        return self.ragged.attend(q, key, value, layer.softmax_scale, causal=True)


@dataclass(frozen=True)
class _OneShot:
    """Requests whose prefixes and new tokens are expanded together."""

    path: ClassVar[counters.AttentionPath] = "vanilla_prefill"
    tokens: Tokens
    slots: Tensor
    ragged: _Ragged

    def attend(self, layer: LayerInputs) -> Tensor:
        key, value = layer.expand(self.slots)
        return self.ragged.attend(layer.q[self.tokens], key, value, layer.softmax_scale, causal=True)[0]


@dataclass(frozen=True)
class _Chunked:
    """One request whose prefix is expanded in chunks."""

    path: ClassVar[counters.AttentionPath] = "vanilla_prefill"
    new_tokens: _Vanilla
    chunks: list[tuple[Tensor, _Ragged]]
    """The slots of each chunk; chunks of the same length share the rest, and so their plans."""

    @property
    def tokens(self) -> Tokens:
        return self.new_tokens.tokens

    def attend(self, layer: LayerInputs) -> Tensor:
        out, lse = self.new_tokens.attend_with_lse(layer)
        q = layer.q[self.tokens]
        for slots, ragged in self.chunks:
            chunk = ragged.attend(q, *layer.expand(slots), layer.softmax_scale, causal=False)
            out, lse = merge_states(out, lse, *chunk)
        return out


class _AbsorbedBatch:
    """A batch of the decoder, planned when it is needed.

    A decoder has buffers for one plan, but a step may need two batches in turn: in layers that attend with
    keys per head, a batch of some requests; in other layers, a batch of all requests. A plan that the other
    batch has replaced is therefore made again.
    """

    def __init__(self, decoder: MLADecoder, batch: DecodeBatch):
        self._decoder, self._batch = decoder, batch
        self._plan: DecodePlan | None = None

    def run(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        softmax_scale: float,
        kv_scale: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend, and plan the batch first if needed.

        Args:
            q_nope: [T, H, d_c], absorbed queries.
            q_rope: [T, H, d_rope].
            latent_cache: [pages, page_size, d_c + d_rope].
            kv_scale: the scale of the cache, if its format has one.
            out: [T, H, d_c]; allocated if None.

        Returns:
            out.
        """
        if self._plan is None or self._decoder.current_plan is not self._plan:
            self._plan = self._decoder.plan(self._batch)
        return self._decoder.run(
            q_nope, q_rope, latent_cache, self._plan, softmax_scale, kv_scale=kv_scale, out=out
        )[0]


@dataclass(frozen=True)
class _Absorbed:
    """Requests that use absorbed attention."""

    path: ClassVar[counters.AttentionPath] = "absorbed_extend"
    tokens: Tokens
    batch: _AbsorbedBatch

    def attend(self, layer: LayerInputs) -> Tensor:
        assert layer.weights is not None  # PrefillStep.attend has checked this
        absorbed = layer.weights.absorbed
        d_nope = absorbed.w_uk.shape[1]
        q_nope, q_rope = layer.q[self.tokens].tensor_split([d_nope], dim=-1)
        q_latent = absorbed.absorb_query(q_nope)
        out = self.batch.run(q_latent, q_rope, layer.latent_cache, layer.softmax_scale, layer.kv_scale)
        return absorbed.project_output(out)


_RequestGroup: TypeAlias = _Vanilla | _OneShot | _Chunked | _Absorbed
"""Requests that one method serves together."""


class PrefillStep:
    """The attention of a prefill batch. The first layer's call groups the requests; other layers reuse this.

    Grouping uses only lengths that are already on the host.

    Args:
        query_lens: the number of new tokens of each request.
        prefix_lens: the number of cached tokens of each request.
        table: int32 [rows, width], token slots.
        table_rows: int64 [batch], the table row of each request.
        seq_lens: int32 [batch], the number of cached and new tokens of each request.
        decoder: a decoder for TOKEN tables.
        library: the name of what `mla_backend.prefill` calls.
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
        library: str,
    ):
        self._query_lens, self._prefix_lens = list(query_lens), list(prefix_lens)
        self._starts = _offsets(self._query_lens)
        self._num_tokens = self._starts[-1]
        self._table, self._table_rows, self._seq_lens = table, table_rows, seq_lens
        self._decoder, self._library = decoder, library
        self._groups: list[_RequestGroup] | None = None
        self._all_absorbed: _AbsorbedBatch | None = None

    def attend(self, layer: LayerInputs, chooser: PrefillChooser) -> Tensor:
        """Causal attention, with a method for each request.

        Args:
            layer: the inputs of the layer, for T tokens.
            chooser: chooses the methods; the same one in each layer.

        Returns:
            the output [T, H, d_v]. Tokens that belong to no request (padding) get 0.

        Raises:
            UnsupportedError: cached tokens cannot be expanded.
        """
        if layer.weights is None and any(self._prefix_lens):
            raise UnsupportedError(
                "mla_backend cannot expand cached tokens, because this model's attention layers have no "
                "kv_b_proj that it supports: start with --disable-radix-cache --chunked-prefill-size -1"
            )
        if self._groups is None:
            self._groups = self._group_requests(chooser)
        if len(self._groups) == 1 and self._num_tokens == len(layer.q):  # nothing to put together
            self._count(self._groups[0].path, self._num_tokens)
            return self._groups[0].attend(layer)
        out = layer.q.new_empty(*layer.q.shape[:2], layer.value.shape[2])
        out[self._num_tokens :] = 0
        for group in self._groups:
            attended = group.attend(layer)
            self._count(group.path, attended.shape[0])
            out[group.tokens] = attended
        return out

    def attend_absorbed(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        softmax_scale: float,
        kv_scale: Tensor | None = None,
    ) -> Tensor:
        """Absorbed attention for all requests.

        Args:
            q_nope: [T, H, d_c], absorbed queries.
            q_rope: [T, H, d_rope].
            latent_cache: [pages, page_size, d_c + d_rope].
            kv_scale: the scale of the cache, if its format has one.

        Returns:
            the output [T, H, d_c]. Tokens that belong to no request (padding) get 0.
        """
        if self._all_absorbed is None:
            self._all_absorbed = self._absorbed_batch(range(len(self._query_lens)))
        self._count("absorbed_extend", self._num_tokens)
        out = q_nope.new_empty(q_nope.shape)
        out[self._num_tokens :] = 0
        tokens = slice(0, self._num_tokens)
        self._all_absorbed.run(
            q_nope[tokens], q_rope[tokens], latent_cache, softmax_scale, kv_scale, out=out[tokens]
        )
        return out

    def _count(self, path: counters.AttentionPath, tokens: int) -> None:
        kernel = self._decoder.implementation if path == "absorbed_extend" else self._library
        counters.add(path, tokens, kernel=kernel, cache_format=self._decoder.spec.kv_format.name)

    def _group_requests(self, chooser: PrefillChooser) -> list[_RequestGroup]:
        requests: dict[PrefillMethod, list[int]] = {method: [] for method in PrefillMethod}
        for i, lengths in enumerate(zip(self._query_lens, self._prefix_lens, strict=True)):
            requests[chooser(*lengths)].append(i)
        groups: list[_RequestGroup] = []
        if vanilla := requests[PrefillMethod.VANILLA]:
            groups.append(self._vanilla(vanilla))
        for together in self._split_by_tokens(requests[PrefillMethod.ONE_SHOT], chooser.chunk_tokens):
            groups.append(self._one_shot(together))
        for request in requests[PrefillMethod.CHUNKED]:
            groups.append(self._chunked(request, chooser.chunk_tokens))
        if absorbed := requests[PrefillMethod.ABSORBED]:
            groups.append(_Absorbed(self._tokens(absorbed), self._absorbed_batch(absorbed)))
        return groups

    def _split_by_tokens(self, requests: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Lists of consecutive requests with at most ``max_tokens`` cached and new tokens per list."""
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

    def _vanilla(self, requests: Sequence[int]) -> _Vanilla:
        query_lens = [self._query_lens[i] for i in requests]
        (offsets,) = self._upload(_offsets(query_lens))
        longest = max(query_lens)
        return _Vanilla(self._tokens(requests), _Ragged(offsets, offsets, longest, longest))

    def _one_shot(self, requests: Sequence[int]) -> _OneShot:
        query_lens = [self._query_lens[i] for i in requests]
        key_lens = [self._query_lens[i] + self._prefix_lens[i] for i in requests]
        query_offsets, key_offsets = self._upload(_offsets(query_lens), _offsets(key_lens))
        slots = [self._slots(i, 0, length) for i, length in zip(requests, key_lens, strict=True)]
        ragged = _Ragged(query_offsets, key_offsets, max(query_lens), max(key_lens))
        return _OneShot(self._tokens(requests), torch.cat(slots), ragged)

    def _chunked(self, request: int, chunk_tokens: int) -> _Chunked:
        new_tokens, prefix_len = self._vanilla([request]), self._prefix_lens[request]
        starts = range(0, prefix_len, chunk_tokens)
        bounds = [(start, min(start + chunk_tokens, prefix_len)) for start in starts]
        lengths = list(dict.fromkeys(stop - start for start, stop in bounds))
        query_offsets, query_len = new_tokens.ragged.query_offsets, self._query_lens[request]
        ragged = {
            length: _Ragged(query_offsets, key_offsets, query_len, length)
            for length, key_offsets in zip(
                lengths, self._upload(*([0, length] for length in lengths)), strict=True
            )
        }
        chunks = [(self._slots(request, start, stop), ragged[stop - start]) for start, stop in bounds]
        return _Chunked(new_tokens, chunks)

    def _absorbed_batch(self, requests: Sequence[int]) -> _AbsorbedBatch:
        query_lens = [self._query_lens[i] for i in requests]
        offsets, members = self._upload(_offsets(query_lens), requests)
        members = members.long()
        batch = DecodeBatch(
            seq_lens=self._seq_lens[members],
            table=self._table,
            page_size=self._decoder.spec.page_size,
            query_start_loc=offsets,
            max_query_len=max([1, *query_lens]),  # a batch may have no new tokens
            table_kind=TableKind.TOKEN,
            table_rows=self._table_rows[members],
        )
        return _AbsorbedBatch(self._decoder, batch)

    def _tokens(self, requests: Sequence[int]) -> Tokens:
        first, last = requests[0], requests[-1]
        if last - first + 1 == len(requests):
            return slice(self._starts[first], self._starts[last + 1])
        starts, device = self._starts, self._table.device
        return torch.cat([torch.arange(starts[i], starts[i + 1], device=device) for i in requests])

    def _slots(self, request: int, start: int, stop: int) -> Tensor:
        """The cache slots, int64, of a request's tokens from start to before stop."""
        return self._table[self._table_rows[request : request + 1], start:stop].squeeze(0).long()

    def _upload(self, *lists: Sequence[int]) -> tuple[Tensor, ...]:
        """Copy lists of ints to the device, all in one transfer, as int32 tensors."""
        values = [value for numbers in lists for value in numbers]
        host = torch.tensor(values, dtype=torch.int32, pin_memory=self._table.is_cuda)
        device = host.to(self._table.device, non_blocking=True)
        return device.split([len(numbers) for numbers in lists])


def _offsets(lengths: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(lengths, initial=0))
