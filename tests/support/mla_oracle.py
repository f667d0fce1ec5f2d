"""Independent oracles for the tests: dense fp64 attention, and paged problems poisoned with NaN.

Nothing here uses mla_backend to compute; it only fills in its `DecodeBatch`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_backend import DecodeBatch, TableKind
from mla_backend.cache_format import cache_format

SPARE_PAGES = 3
"""Pages of a `paged_problem` that belong to no request."""


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """One request, row by row, in fp64; the causal mask is bottom-right aligned.

    Takes q [n, H, d], k [m, H or 1, d] and v [m, H or 1, d_v]. Returns out [n, H, d_v] and lse [n, H]
    (natural logarithm), 0 and -inf for rows without keys.
    """
    q, k, v = q.double(), k.double(), v.double()
    n, heads, _ = q.shape
    m = k.shape[0]
    k, v = k.expand(m, heads, -1), v.expand(m, heads, -1)
    out = torch.zeros(n, heads, v.shape[2], dtype=torch.float64, device=q.device)
    lse = torch.full((n, heads), -math.inf, dtype=torch.float64, device=q.device)
    for i in range(n):
        seen = m - n + i + 1 if causal else m
        if seen > 0:
            scores = torch.einsum("hd,mhd->hm", q[i], k[:seen]) * scale
            lse[i] = torch.logsumexp(scores, dim=-1)
            out[i] = torch.einsum("hm,mhd->hd", torch.softmax(scores, dim=-1), v[:seen])
    return out, lse


def rotary_angles(positions: int, d_rope: int) -> Tensor:
    """fp64 [positions, d_rope / 2]: position / 10000^(2i / d_rope)."""
    frequencies = 10000.0 ** -(torch.arange(0, d_rope, 2, dtype=torch.float64) / d_rope)
    return torch.arange(positions, dtype=torch.float64)[:, None] * frequencies


def cos_sin_cache(angles: Tensor) -> Tensor:
    """Their cosines and sines, side by side, as engines keep them."""
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotated(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Pairs of x [T, ..., d] as complex numbers, turned by angles [T, d / 2]; in fp64."""
    return rotated_by(x, cos_sin_cache(angles), interleaved)


def rotated_by(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """`rotated`, by cosines and sines [T, d], side by side, which may be rounded."""
    cos, sin = cos_sin.double().view(len(x), *[1] * (x.ndim - 2), cos_sin.shape[-1]).chunk(2, dim=-1)
    half = x.shape[-1] // 2
    order = torch.arange(2 * half).view(half, 2) if interleaved else torch.arange(2 * half).view(2, half).T
    pairs = torch.view_as_complex(x.double()[..., order].contiguous())
    turned = torch.view_as_real(pairs * torch.complex(cos, sin))
    return torch.empty_like(x, dtype=torch.float64).index_copy_(
        -1, order.flatten().to(x.device), turned.flatten(-2)
    )


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, d] over its root mean square, times weight [d]; in fp64."""
    x = x.double()
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / (length**2 / x.shape[-1] + eps) ** 0.5 * weight.double()


@dataclass
class PagedProblem:
    """A batch over a paged cache in which everything that must not be read is NaN or garbage."""

    batch: DecodeBatch
    latent_cache: Tensor  # [pages, page_size, d_c + d_rope], or records of 656 bytes
    kv_scale: Tensor | None  # of an e4m3 cache
    q_nope: Tensor  # [T, H, d_c]
    q_rope: Tensor  # [T, H, d_rope]
    latents: list[Tensor]  # each request's values, [kv_len, d_c + d_rope]; in fp64 if stored in 8 bits
    query_lens: list[int]
    scale: float

    def expected(self, causal: bool = True) -> tuple[Tensor, Tensor]:
        """out [T, H, d_c] and lse [T, H] in fp64."""
        q = torch.cat([self.q_nope, self.q_rope], dim=-1)
        d_c = self.q_nope.shape[2]
        parts = [
            dense_attention(rows, latent[:, None], latent[:, None, :d_c], self.scale, causal)
            for rows, latent in zip(q.split(self.query_lens), self.latents, strict=True)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def nearest_e4m3(x: Tensor) -> Tensor:
    """The nearest finite e4m3 value to each element of x (fp64), the even one of two; NaN for NaN."""
    codes = torch.arange(127, dtype=torch.uint8, device=x.device)
    values = codes.view(torch.float8_e4m3fn).double()
    magnitudes = x.abs().clamp(max=448).nan_to_num().flatten()[:, None]
    distances = (magnitudes - values).abs()
    # Of equal distances, argmin may take either: prefer even codes.
    best = (distances - (codes % 2 == 0) * 1e-12 * magnitudes).argmin(dim=1)
    rounded = values[best].view(x.shape).copysign(x)
    return torch.where(x.isnan(), x, rounded)


def stored_values(rows: Tensor, kv_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Values of cache rows [n, width] in fp64, and the scale of each: 0 where it is not stored in e4m3."""
    if rows.dtype is torch.float8_e4m3fn:
        values = rows.double() * kv_scale
        return values, torch.full_like(values, kv_scale)
    if rows.dtype is not torch.uint8:
        return rows.double(), torch.zeros_like(rows, dtype=torch.float64)
    latents = rows[:, :512].contiguous().view(torch.float8_e4m3fn).double()
    scales = rows[:, 512:528].contiguous().view(torch.float32).double().repeat_interleave(128, dim=1)
    rope = rows[:, 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat([latents * scales, rope], dim=1), torch.cat([scales, torch.zeros_like(rope)], dim=1)


def stored_rows(
    x: Tensor, kv_dtype: torch.dtype | str, kv_scale: float, exponents: tuple[int, int], g: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows in the format of a cache, made of x (fp32 [n, width], about normal), and their values.

    Elements in e4m3 are 16 times x. Records have random scales between 2 to the powers of ``exponents``.
    """
    if kv_dtype is torch.float8_e4m3fn:
        rows = (x * 16).clamp(-448, 448).to(torch.float8_e4m3fn)
        return rows, stored_values(rows, torch.tensor(kv_scale).item())[0]
    if kv_dtype != "fp8_ds_mla":
        return x.to(kv_dtype), x.to(kv_dtype)
    low, high = exponents
    scales = 2.0 ** (low + (high - low) * torch.rand(len(x), 4, generator=g, device=x.device))
    latents = (x[:, :512] * 16).clamp(-448, 448).to(torch.float8_e4m3fn)
    rope = x[:, 512:].to(torch.bfloat16)
    rows = torch.cat([part.contiguous().view(torch.uint8) for part in (latents, scales, rope)], dim=1)
    return rows, stored_values(rows)[0]


def poisoned(size: int, kv_dtype: torch.dtype | str) -> Tensor:
    """Storage in which everything is NaN, whichever part of a row it is read as."""
    if kv_dtype == "fp8_ds_mla":
        return torch.full((size,), 0xFF, dtype=torch.uint8)
    return torch.full((size,), math.nan).to(kv_dtype)


def paged_problem(
    kv_lens: list[int],
    query_lens: list[int] | None = None,
    *,
    num_heads: int = 2,
    kv_lora_rank: int = 16,
    qk_rope_head_dim: int = 8,
    page_size: int = 4,
    table_kind: TableKind = TableKind.BLOCK,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | str | None = None,
    kv_scale: float = 2**-4,
    scale_exponents: tuple[int, int] = (-4, -4),
    uniform: bool = False,
    page_gap: int = 0,
    row_gap: int = 0,
    indirect_rows: bool = False,
    gain: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> PagedProblem:
    """Fresh random inputs.

    Args:
        query_lens: None means one query token each.
        kv_dtype: of the cache, None means ``dtype``; or "fp8_ds_mla".
        kv_scale: of an e4m3 cache.
        scale_exponents: bounds of the scales in records, as powers of 2.
        uniform: leave query_start_loc out (query_lens must be equal).
        page_gap, row_gap: elements between pages and between rows of the cache.
        indirect_rows: shuffle the table's rows, among garbage ones, and give table_rows.
        gain: standard deviation of the queries, hence the sharpness of the softmax.
    """
    g = torch.Generator().manual_seed(seed)
    width, kv_dtype = kv_lora_rank + qk_rope_head_dim, kv_dtype or dtype
    row_width = cache_format(kv_dtype).row_width(kv_lora_rank, qk_rope_head_dim)
    query_lens = [1] * len(kv_lens) if query_lens is None else query_lens
    pages = _shuffled_pages(kv_lens, page_size, g)
    num_pages = sum(map(len, pages)) + SPARE_PAGES
    storage, layout = _poisoned_storage(num_pages, page_size, row_width, page_gap, row_gap, kv_dtype)
    latent_cache = storage.as_strided(*layout)
    table = _garbage_table(pages, page_size, table_kind, 3 * indirect_rows, g)
    table_rows = torch.randperm(len(table), generator=g)[: len(kv_lens)] if indirect_rows else None

    latents = []
    for i, kv_len in enumerate(kv_lens):
        x = torch.randn(kv_len, width, generator=g)
        rows, latent = stored_rows(x, kv_dtype, kv_scale, scale_exponents, g)
        latents.append(latent.to(device))
        positions = torch.arange(kv_len)
        page, offset = pages[i][positions // page_size], positions % page_size
        for t in range(kv_len):
            latent_cache[page[t], offset[t]] = rows[t]
        entries = pages[i] if table_kind is TableKind.BLOCK else page * page_size + offset
        table[i if table_rows is None else table_rows[i], : len(entries)] = entries.int()

    q = (torch.randn(sum(query_lens), num_heads, width, generator=g) * gain).to(dtype).to(device)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    batch = DecodeBatch(
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        table=table.to(device),
        page_size=page_size,
        query_start_loc=None if uniform else starts.to(device),
        max_query_len=max([1, *query_lens]),
        table_kind=table_kind,
        table_rows=None if table_rows is None else table_rows.to(device),
    )
    return PagedProblem(
        batch=batch,
        latent_cache=storage.to(device).as_strided(*layout),  # a copy of the view would have other strides
        kv_scale=torch.tensor([kv_scale], device=device) if kv_dtype is torch.float8_e4m3fn else None,
        q_nope=q[..., :kv_lora_rank],
        q_rope=q[..., kv_lora_rank:],
        latents=latents,
        query_lens=query_lens,
        scale=width**-0.5,
    )


def _shuffled_pages(kv_lens: list[int], page_size: int, g: torch.Generator) -> list[Tensor]:
    """The pages of each request, among `SPARE_PAGES` more."""
    counts = [math.ceil(n / page_size) for n in kv_lens]
    order = torch.randperm(sum(counts) + SPARE_PAGES, generator=g)
    return list(order[: sum(counts)].split(counts))


def _poisoned_storage(
    num_pages: int, page_size: int, row_width: int, page_gap: int, row_gap: int, kv_dtype: torch.dtype | str
) -> tuple[Tensor, tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The memory of a cache, and the shape, strides and offset of the cache in it.

    With gaps, the cache starts inside of its storage, as one layer among several does.
    """
    row_stride = row_width + row_gap
    page_stride = page_size * row_stride + page_gap
    layout = (num_pages, page_size, row_width), (page_stride, row_stride, 1), page_gap
    return poisoned(page_gap + num_pages * page_stride, kv_dtype), layout


def _garbage_table(
    pages: list[Tensor], page_size: int, kind: TableKind, spare_rows: int, g: torch.Generator
) -> Tensor:
    width = max([1, *map(len, pages)]) + 2
    shape = (len(pages) + spare_rows, width * page_size if kind is TableKind.TOKEN else width)
    return torch.randint(-(2**31), 2**31 - 1, shape, generator=g).int()


def assert_attention_close(
    actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype
) -> None:
    """Compare out and lse with an fp64 oracle, infinities by position; no NaN passes."""
    tolerance = {
        torch.float64: (1e-6, 1e-6),  # lse is stored in fp32
        torch.float32: (2e-5, 2e-5),
        torch.float16: (2e-3, 1e-4),
        torch.bfloat16: (1.6e-2, 1e-3),
    }[dtype]
    for name, got, want, bound in zip(("out", "lse"), actual, expected, tolerance, strict=True):
        assert got.shape == want.shape, name
        assert not got.isnan().any(), f"NaN in {name}"
        torch.testing.assert_close(
            got.double(), want, atol=bound, rtol=bound, msg=lambda m, n=name: f"{n}: {m}"
        )
