"""Random decode problems with poison wherever nothing may be read, and their dense fp64 answer."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mla_backend import cache as mla_cache
from mla_backend.batch import WHOLE, DecodeBatch, Shard, TableKind
from mla_backend.cache_format import FLOAT_DTYPES, Scale, cache_format
from mla_backend.decode import MLADecoder
from tests.support.mla_oracle import (
    cos_sin_cache,
    nearest_e4m3,
    normalized,
    poisoned,
    rotary_angles,
    rotated_by,
    stored_rows,
    stored_values,
)
from tests.support.planner import KV_TILE_TOKENS

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
            token = tile * KV_TILE_TOKENS + i * step
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


def check_rotary_append(
    append: Callable[..., None],
    draw: random.Random,
    *,
    tokens: int,
    num_heads: int,
    dtype: torch.dtype,
    interleaved: bool,
    device: str,
    kv_dtype: torch.dtype | str | None = None,
) -> None:
    """What a kernel makes of new tokens that lie as in an engine, against fp64.

    ``append`` takes the arguments of a `RotaryAppend`, in their order. Layouts are drawn, whether latents are
    to be normalized, the dtype of the angles, and whether the new rows are wanted outside the cache, too.
    ``kv_dtype`` is that of the cache: None means ``dtype``; or "fp8_ds_mla".
    """
    kv_dtype = kv_dtype or dtype
    kv_format = cache_format(kv_dtype)
    d_c, d_rope = kv_format.dimensions or draw.choice([(512, 64), (256, 32), (64, 16), (512, 0)])
    width = kv_format.row_width(d_c, d_rope)
    kv_scale = None
    if kv_dtype is torch.float8_e4m3fn:
        kv_scale = torch.tensor([draw.choice([1.0, 0.3, 2.0**-8, 2.0**10])], device=device)
    page_size, gap, d_nope = draw.choice([1, 3, 8, 64]), draw.choice([0, 2]), draw.choice([0, 128])
    torch.manual_seed(draw.randrange(1 << 30))
    q = torch.randn(tokens, num_heads, d_nope + d_rope, device=device).to(dtype)
    latent = torch.randn(tokens, d_c + d_rope, device=device).to(dtype)
    pages = -(-tokens // page_size) + 3
    storage = poisoned(pages * (page_size + gap) * width, kv_dtype).to(device).view(pages, -1, width)
    cache, stored_before = storage[:, :page_size], storage.clone()
    slots = torch.randperm(pages * page_size, device=device)[:tokens]
    slots[1::5] = -1
    cos_sin = cos_sin_cache(rotary_angles(3000, d_rope)).to(draw.choice([torch.float32, dtype])).to(device)
    positions = torch.randint(3000, (tokens,), device=device)
    norm_weight = draw.choice([None, torch.randn(d_c, device=device).to(dtype)])
    kv_c_out, k_rope_out = _outputs(tokens, d_c, d_rope, dtype, device)
    outputs = draw.choice([{}, {"kv_c_out": kv_c_out, "k_rope_out": k_rope_out}])
    before = q.clone(), latent.clone()

    append(
        q[..., d_nope:],
        latent[:, :d_c],
        latent[:, d_c:],
        cache,
        slots.to(draw.choice([torch.int32, torch.int64])),
        positions,
        cos_sin,
        interleaved=interleaved,
        norm_weight=norm_weight,
        norm_eps=None if norm_weight is None else 0.01,
        kv_scale=kv_scale,
        **outputs,
    )
    near = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    expected = rotated_by(before[0][..., d_nope:], cos_sin[positions], interleaved)
    torch.testing.assert_close(q[..., d_nope:].double(), expected, **near)
    assert torch.equal(q[..., :d_nope], before[0][..., :d_nope])
    assert torch.equal(latent, before[1])
    expected_c = latent[:, :d_c].double()
    if norm_weight is not None:
        expected_c = normalized(latent[:, :d_c], norm_weight, 0.01)
    expected_k = rotated_by(latent[:, d_c:], cos_sin[positions], interleaved)
    if outputs:
        torch.testing.assert_close(outputs["kv_c_out"].double(), expected_c, **near)
        torch.testing.assert_close(outputs["k_rope_out"].double(), expected_k, **near)
        assert all(output._base[:, output.shape[1] :].isnan().all() for output in outputs.values())
    kept = slots >= 0
    page, row = slots[kept] // page_size, slots[kept] % page_size
    expected_c, expected = expected_c[kept], torch.cat([expected_c, expected_k], dim=1)[kept]
    written = bytes_of(cache)[page, row].view(cache.dtype)
    actual, scales = stored_values(written, 1.0 if kv_scale is None else kv_scale.item())
    if kv_format.scale is Scale.GROUP:
        groups = expected_c.abs().unflatten(1, (-1, kv_format.group)).amax(2)
        groups = groups.repeat_interleave(kv_format.group, dim=1)
        torch.testing.assert_close(scales[:, :d_c], groups / 448, rtol=torch.finfo(dtype).eps, atol=0)
    # Values are rounded to 16 bits first. e4m3 saturates at 448, and is half a step off: 1/16 of a value, or
    # 2^-10 where it is subnormal.
    expected = torch.where(scales > 0, expected.clamp(-448 * scales, 448 * scales), expected)
    in_16_bits = torch.finfo(kv_format.rope if kv_format.rope in FLOAT_DTYPES else dtype).eps
    allowed = expected.abs() * in_16_bits + 1e-6
    in_e4m3 = (expected.abs() / 16).clamp(min=scales / 1024) + allowed / 2 + 1e-6
    assert ((actual - expected).abs() <= torch.where(scales > 0, in_e4m3, allowed)).all()
    if norm_weight is None:
        exact = expected_c
        if kv_dtype != dtype:
            scales = scales[:, :d_c]
            exact = nearest_e4m3((expected_c.float() / scales.float()).double()) * scales
        assert torch.equal(actual[:, :d_c], exact)
    bytes_of(cache)[page, row] = bytes_of(stored_before)[page, row]
    assert torch.equal(bytes_of(storage), bytes_of(stored_before))


def _outputs(tokens: int, d_c: int, d_rope: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Of NaN, for a kernel's results; NaN between their rows, too."""
    like = {"dtype": dtype, "device": device}
    return [torch.full((tokens, width + 8), torch.nan, **like)[:, :width] for width in (d_c, d_rope)]


def check_appended_extremes(
    append: Callable[..., None], dtype: torch.dtype, kv_dtype: torch.dtype | str, device: str
) -> None:
    """A kernel stores what torch stores (which `tests/core` compares with an oracle), whatever the values."""
    d_c, d_rope, tokens = 512, 64, 4
    torch.manual_seed(0)
    kv = (torch.randn(tokens, d_c + d_rope) * 2.0 ** torch.randint(-20, 14, (tokens, 1))).to(dtype)
    kv[0, 3:6] = torch.tensor([torch.nan, 1e-30, -0.0])
    kv[1, 130:134] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.0])
    kv[2, :128] = 0
    kv[3, 256:384] = torch.nan
    slots, kv_scale = torch.tensor([5, 0, 3, 2]), None
    if kv_dtype is torch.float8_e4m3fn:
        kv_scale = torch.tensor([0.3])
    width = cache_format(kv_dtype).row_width(d_c, d_rope)
    expected = torch.zeros(3, 2, width, dtype=poisoned(1, kv_dtype).dtype)
    written = expected.to(device, copy=True)
    mla_cache.append(expected, kv[:, :d_c], kv[:, d_c:], slots, kv_scale)
    on_device = kv.to(device)
    append(
        torch.zeros(tokens, 1, d_rope, dtype=dtype, device=device),
        on_device[:, :d_c],
        on_device[:, d_c:],
        written,
        slots.to(device),
        torch.zeros(tokens, dtype=torch.int64, device=device),  # no rotation
        cos_sin_cache(rotary_angles(1, d_rope)).float().to(device),
        interleaved=True,
        norm_weight=None,
        norm_eps=None,
        kv_scale=None if kv_scale is None else kv_scale.to(device),
    )
    for actual, wanted in zip(
        stored_values(written.cpu().view(6, width)), stored_values(expected.view(6, width)), strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
