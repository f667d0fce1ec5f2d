"""Random decode problems with poison wherever nothing may be read, and their dense fp64 answer."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mla_backend.batch import WHOLE, DecodeBatch, Shard, TableKind
from mla_backend.cache_format import cache_format
from mla_backend.decode import MLADecoder
from tests.support.mla_oracle import poisoned, stored_rows
from tests.support.planner import PLAN_TILE_TOKENS

GARBAGE = 2147480000
"""In unused table entries: as a page id it lies far outside any cache."""


@dataclass
class Case:
    q_nope: Tensor
    q_rope: Tensor
    cache: Tensor
    batch: DecodeBatch
    seq_lens: list[int]
    query_lens: list[int]
    scale: float
    kv_dtype: torch.dtype | str
    kv_scale: Tensor | None = None
    values: Tensor | None = None
    """fp64, of the cache's shape: what a cache of fewer than 16 bits stands for."""
    lists: Tensor | None = None  # what `run` gets, if tables are TableKind.LIST
    sinks: Tensor | None = None  # likewise, fp32 [H]

    def expected(self, causal: bool = True) -> tuple[Tensor, Tensor]:
        """out [T, H, d_c] and lse [T, H] in fp64, one request at a time over its dense keys."""
        outs, lses, begin = [], [], 0
        d_c = self.q_nope.shape[-1]
        for request, (seq_len, query_len) in enumerate(zip(self.seq_lens, self.query_lens, strict=True)):
            q = torch.cat([self.q_nope, self.q_rope], -1)[begin : begin + query_len].double()
            begin += query_len
            positions, keys = self.named_keys(request, seq_len)
            keys = keys.double()
            scores = torch.einsum("qhd,kd->qhk", q, keys) * self.scale
            if causal:
                limit = seq_len - query_len + 1 + torch.arange(query_len, device=q.device)
                hidden = positions[None] >= limit[:, None]
                scores.masked_fill_(hidden[:, None], float("-inf"))
            if self.sinks is not None:
                as_keys = self.sinks.double().view(1, -1, 1).expand(query_len, -1, 1)
                scores = torch.cat([scores, as_keys], -1)
            lse = torch.logsumexp(scores, -1)
            p = torch.exp(scores - lse[..., None]).nan_to_num(0.0)[..., : len(keys)]
            outs.append(torch.einsum("qhk,kd->qhd", p, keys[:, :d_c]))
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    def alone(self, request: int) -> tuple[Case, slice]:
        """One request in a batch of its own (tables of blocks only), and which query tokens it has here."""
        begin, query_len = sum(self.query_lens[:request]), self.query_lens[request]
        rows = slice(begin, begin + query_len)
        batch = replace(
            self.batch,
            seq_lens=self.batch.seq_lens[request : request + 1],
            table=self.batch.table[request : request + 1],
            query_start_loc=None,
            max_query_len=query_len,
        )
        case = replace(
            self,
            q_nope=self.q_nope[rows],
            q_rope=self.q_rope[rows],
            batch=batch,
            seq_lens=[self.seq_lens[request]],
            query_lens=[query_len],
        )
        return case, rows

    def far_away(self, num_elements: int) -> Case:
        """With the pages at the end of a cache of so many elements (tables of blocks only).

        Nothing touches the others, which on the CPU therefore cost no memory.
        """
        used, *row = self.cache.shape
        cache = self.cache.new_empty(-(-num_elements // math.prod(row)), *row)
        cache[-used:] = self.cache
        table = self.batch.table
        table = torch.where(table < used, table + len(cache) - used, table)
        return replace(self, cache=cache, batch=replace(self.batch, table=table))

    def keys(self, request: int, seq_len: int) -> Tensor:
        return self.named_keys(request, seq_len)[1]

    def named_keys(self, request: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Of a request's first tokens those whose entry lies in the cache, and their keys."""
        batch, page = self.batch, self.batch.page_size
        values = self.cache if self.values is None else self.values
        tokens = torch.arange(seq_len, device=self.cache.device)
        row = request if batch.table_rows is None or not seq_len else int(batch.table_rows[request])
        if self.lists is not None:
            slots = self.lists[row, tokens].long()
        elif batch.table_kind is TableKind.TOKEN:
            slots = batch.table[row, tokens].long()
        else:
            slots = batch.table[row, tokens // page].long() * page + tokens % page
        named = (slots >= 0) & (slots < len(values) * page)
        slots = slots[named]
        return tokens[named], values[slots // page, slots % page]


def assert_first_keys(
    plans: Tensor,
    seq_lens: list[int],
    query_lens: list[int],
    table: Tensor,
    rows: Tensor | None,
    page_size: int,
    kind: TableKind,
    step: int,
    shard: Shard = WHOLE,
) -> None:
    """Each range has its first request's length and the slots of its first 32 keys, ``step`` tokens apart.

    With a step of 0 the planner writes no slots, which were -1 before.

    ``plans`` is what the device planner wrote (`CtaPlan` in csrc/schedule/work.cuh), ``rows`` and ``kind``
    are as in a `DecodeBatch`.
    """
    for words in plans.tolist():
        request, _, tile = words[:3]
        has_work = words[:3] < words[4:7] and query_lens[request] > 0
        whole = seq_lens[request] if has_work else 0
        length = shard.keys_of(whole)
        assert words[12:14] == [whole, length]
        slots = []
        for i in range(32):
            token = tile * PLAN_TILE_TOKENS + i * step
            if step == 0 or token >= length:
                slots.append(-1)
                continue
            row = table[request if rows is None else int(rows[request])]
            if kind is TableKind.TOKEN:
                slots.append(int(row[token * shard.size + shard.rank]) // shard.size)
            else:
                slots.append(int(row[token // page_size] * page_size + token % page_size))
        assert words[14:46] == slots


def make_case(
    seq_lens: list[int],
    query_lens: list[int],
    *,
    num_heads: int,
    page_size: int,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | str | None = None,
    kv_scale: float = 0.07,
    scale_exponents: tuple[int, int] = (-6, -2),
    d_c: int = 512,
    d_rope: int = 64,
    table_kind: TableKind = TableKind.BLOCK,
    seed: int = 0,
    spare_pages: int = 7,
    page_gap: int = 0,
    device: str = "cuda",
) -> Case:
    """A batch over randomly placed pages.

    Rows of the cache that belong to no request are NaN, unused table entries are `GARBAGE`, queries are
    strided views. ``page_gap`` rows lie between consecutive pages in memory. ``kv_dtype`` (None: ``dtype``)
    and the scales are as for `stored_rows`.
    """
    kv_dtype = kv_dtype or dtype
    generator = torch.Generator(device=device).manual_seed(seed)
    pages_of = [-(-max(length, 0) // page_size) for length in seq_lens]
    num_pages = sum(pages_of) + spare_pages
    cache = _poisoned_cache(num_pages, page_size, page_gap, d_c + d_rope, kv_dtype, device)
    values = _poisoned_values(cache, d_c + d_rope) if kv_dtype != dtype else None
    order = torch.randperm(num_pages, generator=generator, device=device)

    table_width = max(pages_of, default=0) + 3
    if table_kind is TableKind.TOKEN:
        table_width *= page_size
    rows = torch.arange(len(seq_lens), device=device).flip(0) if table_kind is TableKind.TOKEN else None
    table = torch.full((len(seq_lens), table_width), GARBAGE, dtype=torch.int32, device=device)
    first = 0
    for request, (seq_len, count) in enumerate(zip(seq_lens, pages_of, strict=True)):
        pages = order[first : first + count]
        first += count
        tokens = torch.arange(max(seq_len, 0), device=device)
        page, offset = pages[tokens // page_size], tokens % page_size
        x = torch.randn(len(tokens), d_c + d_rope, generator=generator, device=device, dtype=torch.float32)
        stored, row_values = stored_rows(x, kv_dtype, kv_scale, scale_exponents, generator)
        cache.view(torch.uint8)[page, offset] = stored.view(torch.uint8)
        if values is not None:
            values[page, offset] = row_values
        if table_kind is TableKind.TOKEN:
            table[len(seq_lens) - 1 - request, : len(tokens)] = (page * page_size + offset).int()
        else:
            table[request, :count] = pages.int()

    total = sum(query_lens)
    q = torch.randn(total, num_heads, d_c + d_rope + 8, generator=generator, device=device).to(dtype)
    uniform = len(set(query_lens)) == 1
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
    batch = DecodeBatch(
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        table=table,
        page_size=page_size,
        query_start_loc=None if uniform else starts,
        max_query_len=max(query_lens),
        table_kind=table_kind,
        table_rows=rows,
    )
    scale = 1.7 * (d_c + d_rope) ** -0.5
    parts = q[..., :d_c], q[..., d_c : d_c + d_rope]
    case = Case(*parts, cache, batch, seq_lens, query_lens, scale, kv_dtype, values=values)
    _scale_elements(case, kv_scale)
    return case


def _poisoned_cache(
    pages: int, page_size: int, page_gap: int, latent_dim: int, kv_dtype: torch.dtype | str, device: str
) -> Tensor:
    width = cache_format(kv_dtype).fixed_width or latent_dim
    shape = (pages, page_size + page_gap, width)
    return poisoned(math.prod(shape), kv_dtype).to(device).view(shape)[:, :page_size]


def _poisoned_values(cache: Tensor, latent_dim: int) -> Tensor:
    return cache.new_full((*cache.shape[:2], latent_dim), math.nan, dtype=torch.float64)


def _scale_elements(case: Case, kv_scale: float) -> None:
    """Give a case with an e4m3 cache its scale; what `stored_rows` stores is 16 times normal."""
    if case.kv_dtype is torch.float8_e4m3fn:
        case.kv_scale = torch.tensor([kv_scale], dtype=torch.float32, device=case.cache.device)
        case.scale /= 16 * kv_scale


def make_dominated_case(
    length: int, dominant: list[int], gap: float, requests: int = 1, **sizes: Any
) -> Case:
    """Requests whose keys score alike, except ``dominant`` ones: ``gap`` nats more, and without values.

    The other keys in their tiles of 64 have no values either, as kernels may be inexact there. Keyword
    arguments are those of `make_case`; ``kv_dtype`` must be e4m3 or records.
    """
    case = make_case([length] * requests, [1] * requests, **sizes)
    rope, unit = torch.tensor([1.0]).bfloat16(), 1.0
    if case.kv_scale is not None:
        rope, unit = torch.tensor([32.0]).to(torch.float8_e4m3fn), case.kv_scale.item()
    stored = rope.repeat(64).view(torch.uint8)
    page_size = case.batch.page_size
    tokens = torch.arange(length, device=case.cache.device)
    for rows, rotary in ((case.cache.view(torch.uint8), stored), (case.values, rope.double() * unit)):
        columns = len(stored) if rows.dtype is torch.uint8 else 64
        for table in case.batch.table:
            places = table[tokens // page_size].long(), tokens % page_size
            changed = rows[places]
            changed[:, -columns:] = 0
            for key in dominant:
                changed[key // 64 * 64 : (key // 64 + 1) * 64, :512] = 0
                changed[key, -columns:] = rotary.to(changed.device)
            rows[places] = changed
    case.q_nope.zero_()
    case.q_rope.fill_(1)
    case.scale = gap / (64 * rope.item() * unit)
    return case


def with_sinks(case: Case, spread: float = 5.0, seed: int = 0) -> Case:
    """The case with a sink for each head: normally distributed ones, the first head's among them, -inf."""
    generator = torch.Generator().manual_seed(seed)
    sinks = torch.randn(case.q_nope.shape[1], generator=generator) * spread
    sinks[0] = -math.inf
    return replace(case, sinks=sinks.to(case.q_nope.device))


def make_list_case(
    lengths: list[int],
    *,
    num_heads: int,
    width: int | None = None,
    page_size: int = 64,
    num_pages: int = 40,
    unnamed: float = 0.1,
    shared: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | str | None = None,
    kv_scale: float = 0.07,
    scale_exponents: tuple[int, int] = (-6, -2),
    d_c: int = 512,
    d_rope: int = 64,
    page_gap: int = 0,
    seed: int = 0,
    device: str = "cuda",
) -> Case:
    """Query tokens with lists of random slots: unsorted, with duplicates. Slots that no list names are NaN.

    Args:
        lengths: entries of each list.
        width: of the table, whose entries behind a list's last are `GARBAGE`.
        unnamed: the fraction of entries that are -1. If not 0, the first list names one slot, by its last
            entry, the second one has no such entries, and lists of a single entry have no others.
        shared: lists draw from all slots; otherwise each from slots of its own.
        kv_dtype: None means ``dtype``; it and the scales are as for `stored_rows`.
        page_gap: rows between consecutive pages in memory.
    """
    kv_dtype = kv_dtype or dtype
    generator = torch.Generator(device=device).manual_seed(seed)
    options = {"generator": generator, "device": device}
    rows, width = len(lengths), width or max([1, *lengths]) + 3
    slots = num_pages * page_size
    pool = slots if shared else max(slots // max(rows, 1), 1)
    lists = torch.randint(pool, (rows, width), dtype=torch.int32, **options)
    if not shared:
        order = torch.randperm(slots, **options).int()
        lists = order[(lists + torch.arange(rows, device=device)[:, None] * pool).long() % slots]
    sizes = torch.tensor(lengths, dtype=torch.int32, device=device)[:, None]
    position = torch.arange(width, device=device)
    keeps = torch.rand(rows, width, **options) >= unnamed
    if unnamed > 0:
        keeps[:1] = position == sizes[:1] - 1
        keeps[1:2] = True
        keeps &= sizes != 1
    lists = torch.where(keeps, lists, -1)
    named = lists[(position < sizes) & keeps].long().unique()
    cache = _poisoned_cache(num_pages, page_size, page_gap, d_c + d_rope, kv_dtype, device)
    values = _poisoned_values(cache, d_c + d_rope) if kv_dtype != dtype else None
    keys = torch.randn(len(named), d_c + d_rope, **options)
    stored, key_values = stored_rows(keys, kv_dtype, kv_scale, scale_exponents, generator)
    page, offset = named // page_size, named % page_size
    cache.view(torch.uint8)[page, offset] = stored.view(torch.uint8)
    if values is not None:
        values[page, offset] = key_values
    lists = torch.where(position < sizes, lists, GARBAGE).contiguous()
    q = torch.randn(rows, num_heads, d_c + d_rope + 8, **options).to(dtype)
    batch = DecodeBatch(sizes[:, 0].contiguous(), None, page_size, None, 1, TableKind.LIST)
    scale = 1.7 * (d_c + d_rope) ** -0.5
    parts = q[..., :d_c], q[..., d_c : d_c + d_rope]
    case = Case(*parts, cache, batch, lengths, [1] * rows, scale, kv_dtype, values=values, lists=lists)
    _scale_elements(case, kv_scale)
    return case


def decoder_for(case: Case, **options) -> MLADecoder:
    """A decoder that a case fits; ``options`` are further arguments of `MLADecoder`."""
    batch = case.batch
    return MLADecoder(
        num_heads=case.q_nope.shape[1],
        kv_lora_rank=case.q_nope.shape[2],
        qk_rope_head_dim=case.q_rope.shape[2],
        dtype=case.q_nope.dtype,
        kv_dtype=case.kv_dtype,
        page_size=batch.page_size,
        table_kind=batch.table_kind,
        device=case.q_nope.device,
        max_batch=batch.batch_size,
        max_query_len=batch.max_query_len,
        **options,
    )


def random_case(
    draw: random.Random,
    *,
    requests: Sequence[int],
    keys: tuple[int, int],
    max_query_len: int,
    num_heads: Sequence[int],
    page_sizes: Sequence[int],
    latents: Sequence[tuple[int, int]],
    seed: int,
    kv_dtype: torch.dtype | str | None = None,
    scale_exponents: tuple[int, int] = (-6, -2),
    device: str = "cuda",
) -> Case:
    """Of any geometry.

    Args:
        draw: what chooses.
        requests: numbers of requests to choose from; likewise `num_heads`, `page_sizes`, and `latents`,
            which are (d_c, d_rope).
        keys: how many a short request has at most, and a long one.
        max_query_len: query tokens of a request, at most.
        seed: of the values.
        kv_dtype: of the cache; None: of the queries.
        scale_exponents: as for `stored_rows`.
        device: where the tensors are.
    """
    count = draw.choice(requests)
    short, long = keys
    lengths = [draw.choice([0, 1, draw.randint(2, short), draw.randint(2, long)]) for _ in range(count)]
    if draw.random() < 0.5:
        query_lens = [draw.randint(1, max_query_len)] * count
    else:
        query_lens = [draw.randint(0, max_query_len) for _ in range(count)]
    query_lens[0] = max(query_lens[0], 1)
    d_c, d_rope = draw.choice(latents)
    return make_case(
        lengths,
        query_lens,
        num_heads=draw.choice(num_heads),
        page_size=draw.choice(page_sizes),
        dtype=draw.choice([torch.bfloat16, torch.float16]) if kv_dtype is None else torch.bfloat16,
        kv_dtype=kv_dtype,
        kv_scale=2.0 ** draw.uniform(-10, 10),
        scale_exponents=scale_exponents,
        d_c=d_c,
        d_rope=d_rope,
        table_kind=draw.choice([TableKind.BLOCK, TableKind.TOKEN]),
        page_gap=draw.choice([0, 3]),
        seed=seed,
        device=device,
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
