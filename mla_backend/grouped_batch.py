"""A batch as attention in plain torch takes it: in groups of requests that are attended to together."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from mla_backend import cache
from mla_backend.batch import DecodeBatch, check_offsets, value_range
from mla_backend.device import is_captured
from mla_backend.errors import InvalidInputError, UnsupportedError

# Requests of a group attend together, padded to the longest. A shorter one joins only if it fills this
# fraction of the padded length, which bounds the work lost to padding.
_MIN_FILL = 0.75
# Padded lengths are multiples of this, so that shapes recur while a decode batch grows: matrix libraries
# generate and cache their code by shape.
_LENGTH_STEP = 32
# The most keys gathered for a group of several requests.
_GROUP_KEYS = 1 << 12


class GroupedBatch:
    """A batch in groups of requests, for all layers of a step. With TableKind.LIST each layer has its own.

    Args:
        batch: one whose ``check()`` has passed.
        batch_invariant: compute every request separately, so that its bits do not depend on the others.

    Raises:
        InvalidInputError: lengths that do not fit the table, or query tokens that do not fit max_query_len.
        UnsupportedError: a CUDA graph is being captured.
    """

    def __init__(self, batch: DecodeBatch, *, batch_invariant: bool = False):
        device = batch.seq_lens.device
        if is_captured(device):
            raise UnsupportedError(
                "the torch implementation reads lengths on the host, which a CUDA graph cannot capture: "
                "run eagerly, or use a CUDA implementation"
            )
        self.batch = batch
        seq_lens = batch.seq_lens.tolist()
        if batch.query_start_loc is None:
            query_start = [i * batch.max_query_len for i in range(len(seq_lens) + 1)]
        else:
            query_start = batch.query_start_loc.tolist()
        batch.check_lengths(seq_lens)
        _check_query_start(batch, query_start)
        self.num_tokens = query_start[-1]
        kv_lens = [batch.shard.keys_of(length) for length in seq_lens]
        group_keys = 0 if batch_invariant else _GROUP_KEYS
        self.groups = [
            RequestGroup(batch, members, seq_lens, query_start)
            for members in _group_requests(kv_lens, query_start, group_keys)
            if batch.table is not None
        ]
        self.covered_tokens = sum(group.size * group.q_len for group in self.groups)


class RequestGroup:
    """Requests with the same query length and similar lengths, attended to in one batched product."""

    def __init__(self, batch: DecodeBatch, members: list[int], seq_lens: list[int], query_start: list[int]):
        device = batch.seq_lens.device
        self.size = len(members)
        self.q_len = query_start[members[0] + 1] - query_start[members[0]]
        # Query token i of a request sees the first self._limits[:, i] of its keys; the last one sees all.
        behind = torch.arange(1 - self.q_len, 1, device="cpu")
        whole = torch.tensor([seq_lens[i] for i in members], device="cpu")[:, None]
        limits = batch.shard.keys_of((whole + behind).clamp_min(0))
        self.width = _padded(int(limits.max()))
        self.has_blind_tokens = bool(limits.min() == 0)
        is_padded = bool(limits[:, -1].min() < self.width)
        self._limits = limits.to(device)
        kv_lens = self._limits[:, -1:]
        self._positions = torch.arange(self.width, device=device)
        # Padding repeats a request's last key, so that only slots of the batch are ever read. Slots may lie
        # outside of the cache: see `invalid`.
        self.slots = cache.token_slots(
            batch,
            torch.tensor(members, device=device)[:, None],
            torch.minimum(self._positions, kv_lens - 1),
        ).flatten()
        self._padding_mask: Tensor | None = None
        if is_padded:
            self._padding_mask = (self._positions >= kv_lens)[:, None, None, :]
        self._slot_range = value_range(self.slots)
        first = query_start[members[0]]
        if members == list(range(members[0], members[0] + self.size)):
            self._query_tokens: Tensor | slice = slice(first, first + self.size * self.q_len)
        else:
            starts = torch.tensor([query_start[i] for i in members], device=device)[:, None]
            self._query_tokens = starts + torch.arange(self.q_len, device=device)

    def invalid(self, num_slots: int) -> Tensor | None:
        """bool [size * width]: which ``slots`` lie outside of a cache of so many slots; None if none does."""
        if self._slot_range and self._slot_range[0] >= 0 and self._slot_range[1] < num_slots:
            return None
        return (self.slots < 0) | (self.slots >= num_slots)

    def query_tokens(self, first: int, last: int) -> Tensor | slice:
        """The positions, in the batch, of query tokens first..last of each request of the group."""
        tokens = self._query_tokens
        if last - first == self.q_len:
            return tokens if isinstance(tokens, slice) else tokens.flatten()
        if isinstance(tokens, slice):
            if self.size == 1:
                return slice(tokens.start + first, tokens.start + last)
            tokens = torch.arange(tokens.start, tokens.stop, device=self._positions.device)
            tokens = tokens.view(self.size, -1)
        return tokens[:, first:last].flatten()

    def hidden_keys(self, first: int, last: int, causal: bool, invalid: Tensor | None) -> Tensor | None:
        """bool [size, last - first or 1, 1, width], True where a key is hidden from query tokens first..last.

        None means that every query token sees every key. ``invalid``: see :meth:`invalid`.
        """
        hidden = self._padding_mask
        if causal and self.q_len > 1:
            hidden = self._positions >= self._limits[:, first:last, None, None]
        if invalid is None:
            return hidden
        invalid = invalid.view(self.size, 1, 1, self.width)
        return invalid if hidden is None else hidden | invalid


def _group_requests(kv_lens: list[int], query_start: list[int], group_keys: int) -> list[list[int]]:
    """Split the requests that have keys and queries into groups of equal query length and similar lengths.

    A group of more than one request holds at most ``group_keys`` keys, padding included.
    """
    order = sorted(
        (i for i in range(len(kv_lens)) if kv_lens[i] > 0 and query_start[i + 1] > query_start[i]),
        key=lambda i: (query_start[i + 1] - query_start[i], kv_lens[i]),
        reverse=True,
    )
    groups: list[list[int]] = []
    for i in order:
        if groups:
            longest = groups[-1][0]
            same_q_len = (
                query_start[i + 1] - query_start[i] == query_start[longest + 1] - query_start[longest]
            )
            width = _padded(kv_lens[longest])
            fits = (len(groups[-1]) + 1) * width <= group_keys
            if same_q_len and fits and _padded(kv_lens[i]) >= _MIN_FILL * width:
                groups[-1].append(i)
                continue
        groups.append([i])
    return [sorted(members) for members in groups]


def _padded(length: int) -> int:
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP


def _check_query_start(batch: DecodeBatch, query_start: list[int]) -> None:
    check_offsets("query_start_loc", query_start, query_start[-1])
    longest = max((b - a for a, b in itertools.pairwise(query_start)), default=0)
    if longest > batch.max_query_len:
        raise InvalidInputError(
            f"a request has {longest} query tokens, max_query_len is {batch.max_query_len}: set the batch's "
            f"max_query_len to {longest}"
        )
