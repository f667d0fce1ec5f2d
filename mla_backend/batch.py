"""What a decode step attends to: lengths, page table and query tokens of each request."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from mla_backend.checks import (
    check_contiguous,
    check_int,
    check_positive,
    check_tensor,
    convert_integers,
)
from mla_backend.errors import InvalidInputError


class TableKind(enum.Enum):
    """How :attr:`DecodeBatch.table` addresses the latent cache."""

    BLOCK = "block"
    """Entries are page ids: token t lies in page ``table[row, t // page_size]`` at ``t % page_size``."""

    TOKEN = "token"
    """Entries are slots, ``page * page_size + t % page_size``: token t lies in slot ``table[row, t]``."""

    LIST = "list"
    """Sparse attention: a batch has no table, and each call of ``run`` gets its layer's own. Row i lists the
    slots that request i, a single query token, attends to: in any order; a slot listed twice counts twice.
    Entries outside of the cache, such as -1, stand for no key: they count in the length, but have no
    weight."""


Lengths = TypeVar("Lengths", int, Tensor)


@dataclass(frozen=True, slots=True)
class Shard:
    """Which tokens of each request this device's cache holds, if ``size`` devices divide them.

    Tokens are dealt out in runs of ``interleave``: token t belongs to rank ``t // interleave % size``. A
    cache with all tokens is a shard of one.

    Attributes:
        rank: this device's number, 0 .. size - 1.
        size: number of devices, 1 or more.
        interleave: length of a run, 1 or more.

    Raises:
        InvalidInputError: an attribute is not an integer, or is out of its range.
    """

    rank: int = 0
    size: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        convert_integers(self, "rank", "size", "interleave")
        check_positive(self, "size", "interleave")
        check_int("rank", self.rank, 0)
        if self.rank >= self.size:
            raise InvalidInputError(f"rank must be below the size of {self.size}, got {self.rank}")
        if self.size * self.interleave >= 1 << 31:  # kernels divide by it in 32 bits
            raise InvalidInputError(
                f"size * interleave must be below 2^31, got {self.size} * {self.interleave}: "
                "give a shorter interleave"
            )

    @property
    def as_integers(self) -> tuple[int, int, int]:
        """rank, size and interleave, as kernels take them."""
        return self.rank, self.size, self.interleave

    def keys_of(self, tokens: Lengths) -> Lengths:
        """How many of a request's first ``tokens`` tokens (0 or more) are in this shard; elementwise."""
        period = self.size * self.interleave
        first = self.rank * self.interleave
        rest = tokens % period - first
        if isinstance(rest, Tensor):
            rest = rest.clamp(0, self.interleave)
        else:
            rest = min(max(rest, 0), self.interleave)
        return tokens // period * self.interleave + rest


WHOLE = Shard()
"""The shard of a device that has all tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeBatch:
    """The requests of one absorbed pass (decode, verification of drafts, or short extend).

    Attributes:
        seq_lens: int32 [batch]. Keys of each request, INCLUDING its new tokens, on all shards together; 0
            marks a padding request. With LIST, the entries of each request's list. All of these keys must be
            finite: a NaN also reaches those query tokens of its request from which the mask hides it.
        table: int32 [table rows, width], the last dimension contiguous. See :class:`TableKind`. Entries
            after the last one that a request uses may hold anything; they are never read. None with LIST.
        page_size: tokens in a page, 1 or more.
        query_start_loc: int32 [batch + 1], offsets of the requests' query tokens, starting at 0; None means
            that every request has exactly ``max_query_len`` query tokens. ``run`` must get at least as
            many query tokens as the last offset.
        max_query_len: the largest number of query tokens of a request, 1 or more.
        table_kind: BLOCK, TOKEN or LIST. With LIST, ``query_start_loc`` and ``table_rows`` are None and
            ``max_query_len`` is 1.
        table_rows: int32 or int64 [batch]. The row of ``table`` that belongs to request i; None means row i.
        shard: which of the keys this device has. Of the first ``seq_len - n + i + 1`` keys of a request,
            query token i of n sees those that this device has, possibly none.
            BLOCK tables have the pages of this device: its j-th token of a request lies in page
            ``table[row, j // page_size]``. TOKEN tables have an entry for every token of the request, and
            number the slots of all ranks together: token t, if this device has it, lies in slot
            ``table[row, t] // shard.size``. They need an interleave of 1. Tokens of other ranks are appended
            to slot -1.

    All tensors live on one device, and those of one dimension are contiguous.

    Values are safe, whatever they are: no implementation reads or writes outside of the tensors that it gets.
    A page, slot or list entry below 0 or beyond the cache stands for no key, so its tokens have no weight.
    (From a token table, kernels for Hopper read one entry for 8 to 64 tokens of a page, if pages have a
    multiple of 8.) The torch implementation has lengths on the host, and raises an error for other wrong
    values. Kernels do not report them: a length below 0 counts as 0, and one beyond the table ends with its
    row; a request whose row does not exist has no keys; a request has no more than ``max_query_len`` query
    tokens; query tokens below 0 or beyond the tensors of ``run`` are neither read nor written.
    """

    seq_lens: Tensor
    table: Tensor | None
    page_size: int
    query_start_loc: Tensor | None = None
    max_query_len: int = 1
    table_kind: TableKind = TableKind.BLOCK
    table_rows: Tensor | None = None
    shard: Shard = WHOLE

    def __post_init__(self) -> None:
        convert_integers(self, "page_size", "max_query_len")

    @property
    def batch_size(self) -> int:
        """Requests, padding included."""
        return self.seq_lens.shape[0]

    @property
    def num_uniform_tokens(self) -> int:
        """Query tokens of a batch without ``query_start_loc``."""
        return self.batch_size * self.max_query_len

    def check(self) -> None:
        """Check shapes, dtypes, layouts and devices. Reads no values, so it never synchronizes.

        Raises:
            InvalidInputError: says which field is wrong and what it should be.
        """
        _check_tensor("seq_lens", self.seq_lens, (torch.int32,), 1)
        check_positive(self, "page_size", "max_query_len")
        if not isinstance(self.shard, Shard):
            raise InvalidInputError(f"shard must be a Shard, got {self.shard!r}")
        if not isinstance(self.table_kind, TableKind):
            raise InvalidInputError(f"table_kind must be a TableKind, got {self.table_kind!r}")
        if self.table_kind is TableKind.LIST:
            self._check_lists()
            return
        _check_tensor("table", self.table, (torch.int32,), 2)
        assert self.table is not None
        if self.table_kind is TableKind.TOKEN and self.shard.size > 1 and self.shard.interleave > 1:
            raise InvalidInputError(
                f"token tables of shards need an interleave of 1, got {self.shard.interleave}: use block "
                "tables"
            )
        batch = self.batch_size
        if self.query_start_loc is not None:
            _check_tensor("query_start_loc", self.query_start_loc, (torch.int32,), 1)
            _check_length("query_start_loc", self.query_start_loc, batch + 1, "batch + 1")
        if self.table_rows is not None:
            _check_tensor("table_rows", self.table_rows, (torch.int32, torch.int64), 1)
            _check_length("table_rows", self.table_rows, batch, "batch")
        elif self.table.shape[0] < batch:
            raise InvalidInputError(
                f"table has {self.table.shape[0]} rows for a batch of {batch}: give one row per request, "
                "or table_rows"
            )
        for name in ("table", "query_start_loc", "table_rows"):
            tensor = getattr(self, name)
            if tensor is not None:
                self._check_device(name, tensor)

    def _check_lists(self) -> None:
        if self.table is not None:
            raise InvalidInputError(
                "a batch of lists (TableKind.LIST) has no table: give each layer's own to run(table=...)"
            )
        if self.max_query_len != 1 or self.query_start_loc is not None or self.table_rows is not None:
            raise InvalidInputError(
                "in a batch of lists (TableKind.LIST) each query token is a request with a list of its own: "
                "leave out query_start_loc and table_rows, with a max_query_len of 1"
            )
        if self.shard.size > 1:
            raise InvalidInputError(
                "lists (TableKind.LIST) name slots of a cache with all tokens, but this batch is of shard "
                f"{self.shard.rank} of {self.shard.size}: leave out shard"
            )

    def _check_device(self, name: str, tensor: Tensor) -> None:
        if tensor.device != self.seq_lens.device:
            raise InvalidInputError(
                f"{name} is on {tensor.device}, seq_lens on {self.seq_lens.device}: "
                "all tensors of a batch must be on one device"
            )

    def with_lists(self, table: Tensor) -> DecodeBatch:
        """A copy of this batch that has a layer's lists, int32 [batch or more, width]. Reads no values.

        Raises:
            InvalidInputError: the table's shape, dtype, layout or device is wrong.
        """
        _check_tensor("table", table, (torch.int32,), 2)
        if table.shape[0] < self.batch_size:
            raise InvalidInputError(
                f"table has {table.shape[0]} rows for {self.batch_size} query tokens: give one list for each"
            )
        self._check_device("table", table)
        return replace(self, table=table)

    def check_lengths(self, kv_lens: list[int]) -> None:
        """Check ``table_rows``, and lengths read on the host (``seq_lens.tolist()``).

        Raises:
            InvalidInputError: a request is longer than a row of the table holds, or its row does not exist.
        """
        if self.table is None:
            if kv_lens and min(kv_lens) < 0:
                raise InvalidInputError(f"seq_lens must not be negative, got {min(kv_lens)}")
            return
        of_blocks = self.table_kind is TableKind.BLOCK
        capacity = self.table.shape[1] * (self.page_size if of_blocks else 1)
        longest = max(kv_lens, default=0)
        needed = self.shard.keys_of(longest) if of_blocks else longest
        if kv_lens and (min(kv_lens) < 0 or needed > capacity):
            raise InvalidInputError(
                f"seq_lens range from {min(kv_lens)} to {longest}, "
                f"the table holds 0 .. {capacity} tokens a request"
                + (f" here, and {needed} of the longest one's are here" if needed < longest else "")
            )
        if kv_lens and self.table_rows is not None and (bounds := value_range(self.table_rows.cpu())):
            low, high = bounds
            if low < 0 or high >= self.table.shape[0]:
                raise InvalidInputError(
                    f"table_rows range from {low} to {high}, "
                    f"the table has rows 0 .. {self.table.shape[0] - 1}"
                )


def check_batch(batch: DecodeBatch) -> None:
    """Check that an argument is a batch, and call its :meth:`DecodeBatch.check`.

    Raises:
        InvalidInputError: says what is wrong and what it should be.
    """
    if not isinstance(batch, DecodeBatch):
        raise InvalidInputError(f"batch must be a DecodeBatch, got {type(batch).__name__}")
    batch.check()


def value_range(values: Tensor) -> tuple[int, int] | None:
    """The least and the greatest of some integers.

    None if there are none, and on a GPU, where reading them would synchronize.
    """
    if values.device.type != "cpu" or not values.numel():
        return None
    low, high = values.aminmax()
    return int(low), int(high)


def check_offsets(name: str, offsets: list[int], tokens: int) -> None:
    """Check the offsets of the requests' tokens, read on the host.

    Raises:
        InvalidInputError: they do not start at 0, are not sorted, or end after the last token.
    """
    if offsets[0] != 0 or any(b < a for a, b in itertools.pairwise(offsets)) or offsets[-1] > tokens:
        raise InvalidInputError(f"{name} must rise from 0 to at most {tokens}, and never fall, got {offsets}")


def _check_tensor(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], ndim: int) -> None:
    check_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(d) for d in dtypes)
        raise InvalidInputError(f"{name} must be {allowed}, got {tensor.dtype}")
    if tensor.ndim != ndim:
        raise InvalidInputError(f"{name} must have {ndim} dimension(s), got shape {tuple(tensor.shape)}")
    check_contiguous(name, tensor)


def _check_length(name: str, tensor: Tensor, length: int, meaning: str) -> None:
    if tensor.shape[0] != length:
        raise InvalidInputError(f"{name} must have {meaning} = {length} entries, got {tensor.shape[0]}")
