"""Random decode problems with poison wherever nothing may be read, and their dense fp64 answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_backend.batch import WHOLE, DecodeBatch, Shard, TableKind
from mla_backend.decode import MLADecoder
from tests.support.mla_oracle import cos_sin_cache, normalized, rotary_angles, rotated
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

    def expected(self, causal: bool = True) -> tuple[Tensor, Tensor]:
        """out [T, H, d_c] and lse [T, H] in fp64, one request at a time over its dense keys."""
        outs, lses, begin = [], [], 0
        d_c = self.q_nope.shape[-1]
        for request, (seq_len, query_len) in enumerate(zip(self.seq_lens, self.query_lens, strict=True)):
            q = torch.cat([self.q_nope, self.q_rope], -1)[begin : begin + query_len].double()
            begin += query_len
            keys = self.keys(request, seq_len).double()
            scores = torch.einsum("qhd,kd->qhk", q, keys) * self.scale
            if causal:
                limit = seq_len - query_len + 1 + torch.arange(query_len, device=q.device)
                hidden = torch.arange(seq_len, device=q.device)[None] >= limit[:, None]
                scores.masked_fill_(hidden[:, None], float("-inf"))
            lse = torch.logsumexp(scores, -1)
            p = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
            outs.append(torch.einsum("qhk,kd->qhd", p, keys[:, :d_c]))
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)

    def alone(self, request: int) -> tuple[Case, slice]:
        """One request in a batch of its own (tables of blocks only), and which query rows it has here."""
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

    def keys(self, request: int, seq_len: int) -> Tensor:
        batch, page = self.batch, self.batch.page_size
        row = request if batch.table_rows is None else int(batch.table_rows[request])
        tokens = torch.arange(seq_len, device=self.cache.device)
        if batch.table_kind is TableKind.TOKEN:
            slots = batch.table[row, tokens].long()
            return self.cache[slots // page, slots % page]
        return self.cache[batch.table[row, tokens // page].long(), tokens % page]


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

    ``plans`` is what the device planner wrote (`CtaPlan` in csrc/common/work.cuh), ``rows`` and ``kind`` are
    as in a `DecodeBatch`.
    """
    for words in plans.tolist():
        request, _, tile = words[:3]
        has_work = words[:3] < words[4:7] and query_lens[request] > 0
        whole = seq_lens[request] if has_work else 0
        length = shard.keys_of(whole)
        assert words[12:14] == [whole, length]
        slots = []
        for token in range(tile * KV_TILE_TOKENS, tile * KV_TILE_TOKENS + 32 * step, step):
            if token >= length:
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
    strided views. ``page_gap`` rows lie between consecutive pages in memory.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    pages_of = [-(-max(length, 0) // page_size) for length in seq_lens]
    num_pages = sum(pages_of) + spare_pages
    storage = torch.full(
        (num_pages, page_size + page_gap, d_c + d_rope), float("nan"), dtype=dtype, device=device
    )
    cache = storage[:, :page_size]
    order = torch.randperm(num_pages, generator=generator, device=device)

    width = max(pages_of, default=0) + 3
    if table_kind is TableKind.TOKEN:
        width *= page_size
    rows = torch.arange(len(seq_lens), device=device).flip(0) if table_kind is TableKind.TOKEN else None
    table = torch.full((len(seq_lens), width), GARBAGE, dtype=torch.int32, device=device)
    first = 0
    for request, (seq_len, count) in enumerate(zip(seq_lens, pages_of, strict=True)):
        pages = order[first : first + count]
        first += count
        tokens = torch.arange(max(seq_len, 0), device=device)
        page, offset = pages[tokens // page_size], tokens % page_size
        cache[page, offset] = torch.randn(
            len(tokens), d_c + d_rope, generator=generator, device=device, dtype=torch.float32
        ).to(dtype)
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
    return Case(q[..., :d_c], q[..., d_c : d_c + d_rope], cache, batch, seq_lens, query_lens, scale)


def decoder_for(case: Case, **options) -> MLADecoder:
    """A decoder that a case fits; ``options`` are further arguments of `MLADecoder`."""
    batch = case.batch
    return MLADecoder(
        num_heads=case.q_nope.shape[1],
        kv_lora_rank=case.q_nope.shape[2],
        qk_rope_head_dim=case.q_rope.shape[2],
        dtype=case.q_nope.dtype,
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
    device: str = "cuda",
) -> Case:
    """Of any geometry.

    Args:
        draw: what chooses.
        requests: numbers of requests to choose from; likewise `num_heads`, `page_sizes`, and `latents`,
            which are (d_c, d_rope).
        keys: how many a short request has at most, and a long one.
        max_query_len: query rows of a request, at most.
        seed: of the values.
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
        dtype=draw.choice([torch.bfloat16, torch.float16]),
        d_c=d_c,
        d_rope=d_rope,
        table_kind=draw.choice(list(TableKind)),
        page_gap=draw.choice([0, 3]),
        seed=seed,
        device=device,
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def check_rotary_append(
    append: Callable[..., None],
    draw: random.Random,
    *,
    tokens: int,
    num_heads: int,
    dtype: torch.dtype,
    interleaved: bool,
    device: str,
) -> None:
    """What a kernel makes of new tokens that lie as in an engine, against fp64.

    ``append`` takes the arguments of a `RotaryAppend`, in their order. Layouts are drawn, and whether latents
    are to be normalized.
    """
    d_c, d_rope = draw.choice([(512, 64), (256, 32), (64, 16)])
    page_size, gap, d_nope = draw.choice([1, 3, 8, 64]), draw.choice([0, 2]), draw.choice([0, 128])
    torch.manual_seed(draw.randrange(1 << 30))
    q = torch.randn(tokens, num_heads, d_nope + d_rope, device=device).to(dtype)
    latent = torch.randn(tokens, d_c + d_rope, device=device).to(dtype)
    pages = -(-tokens // page_size) + 3
    storage = torch.full((pages, page_size + gap, d_c + d_rope), float("nan"), dtype=dtype, device=device)
    cache = storage[:, :page_size]
    slots = torch.randperm(pages * page_size, device=device)[:tokens]
    slots[1::5] = -1
    angles = rotary_angles(3000, d_rope).to(device)
    positions = torch.randint(3000, (tokens,), device=device)
    norm_weight = draw.choice([None, torch.randn(d_c, device=device).to(dtype)])
    before = q.clone(), latent.clone()

    append(
        q[..., d_nope:],
        latent[:, :d_c],
        latent[:, d_c:],
        cache,
        slots.to(draw.choice([torch.int32, torch.int64])),
        positions,
        cos_sin_cache(angles).float(),
        interleaved=interleaved,
        norm_weight=norm_weight,
        norm_eps=0.01,
    )
    near = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    expected = rotated(before[0][..., d_nope:], angles[positions], interleaved)
    torch.testing.assert_close(q[..., d_nope:].double(), expected, **near)
    assert torch.equal(q[..., :d_nope], before[0][..., :d_nope])
    assert torch.equal(latent, before[1])
    kept = slots >= 0
    page, row = slots[kept] // page_size, slots[kept] % page_size
    written = cache[page, row]
    if norm_weight is None:
        assert torch.equal(written[:, :d_c], latent[kept, :d_c])
    else:
        expected = normalized(latent[kept, :d_c], norm_weight, 0.01)
        torch.testing.assert_close(written[:, :d_c].double(), expected, **near)
    expected = rotated(latent[kept, d_c:], angles[positions[kept]], interleaved)
    torch.testing.assert_close(written[:, d_c:].double(), expected, **near)
    cache[page, row] = float("nan")
    assert storage.isnan().all()
