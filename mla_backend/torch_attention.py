"""Absorbed and vanilla attention in plain torch, on any device.

These functions serve on a CPU, and tests compare kernels with them. They compute in fp32 by default (in fp64
for tests), vectorized over the batch. They read lengths on the host once per batch, so a captured CUDA graph
cannot contain them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from mla_backend import cache
from mla_backend.batch import DecodeBatch, check_batch, check_offsets
from mla_backend.cache_format import check_float, check_scale, dequantize, format_of
from mla_backend.checks import (
    check_contiguous,
    check_one_device,
    check_softmax_scale,
    check_tensor,
    check_tensors,
)
from mla_backend.errors import InvalidInputError
from mla_backend.grouped_batch import GroupedBatch, RequestGroup

# Bound on the scores of one block of queries.
_BLOCK_SCORES = 1 << 20
# With fewer query rows, a product of keys with queries is faster than one of queries with keys.
_FEW_QUERY_ROWS = 64


def paged_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    batch: DecodeBatch | GroupedBatch,
    softmax_scale: float,
    *,
    kv_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    compute_dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed attention over the paged latent cache, for decode (one query token) and extend (several).

    Args:
        q_nope: [T, H, d_c], absorbed queries (``q_nope @ W_UK``).
        q_rope: [T, H, d_rope], rotated queries.
        latent_cache: [num_pages, page_size, d_c + d_rope], or 656 wide records; see
            :mod:`mla_backend.cache_format`.
        batch: lengths, table and query tokens, or a grouped batch; with TableKind.LIST that of a batch that
            has its lists (:meth:`DecodeBatch.with_lists`).
        softmax_scale: factor on the scores, finite and greater than 0 in fp32.
        kv_scale: fp32 tensor of one element, for an e4m3 cache.
        sinks: fp32 [H], see :meth:`mla_backend.MLADecoder.run`. Every shard of a batch counts them.
        causal: query token i of n sees the keys up to ``seq_len - n + i`` (bottom-right aligned).
        compute_dtype: fp32 or fp64; scores, softmax and sums have this precision. Exception: with fp32, bf16
            queries and cache, and a CPU that multiplies bf16, probabilities and outputs are rounded to bf16.
        out: [T, H, d_c], written and returned if given; any dtype.
        lse: fp32 [T, H], likewise.

    Returns:
        out [T, H, d_c] in the dtype of q_nope, and lse [T, H] in fp32, natural logarithm. Query rows that see
        no key are 0 and -inf; those past the last query token of the batch are not written.

    Raises:
        InvalidInputError: shapes, dtypes or lengths that do not fit together; a softmax_scale that is not
            finite and greater than 0.
    """
    _check_compute_dtype(compute_dtype)
    check_softmax_scale(softmax_scale)
    _check_queries(q_nope, q_rope, latent_cache)
    grouped = batch
    if not isinstance(grouped, GroupedBatch):
        check_batch(grouped)
        grouped = GroupedBatch(grouped)
    if grouped.batch.table is None:
        raise InvalidInputError(
            "the batch (TableKind.LIST) has no lists: pass GroupedBatch(batch.with_lists(table))"
        )
    cache.check_cache(
        latent_cache, page_size=grouped.batch.page_size, dimensions=(q_nope.shape[2], q_rope.shape[2])
    )
    check_scale(format_of(latent_cache), kv_scale, latent_cache.device)
    if q_nope.shape[0] < grouped.num_tokens:
        raise InvalidInputError(
            f"q_nope has {q_nope.shape[0]} tokens, the batch has {grouped.num_tokens} query tokens"
        )
    q = torch.cat([q_nope, q_rope], dim=-1)
    q = q.to(_product_dtype(q, latent_cache, compute_dtype))
    out, lse = _outputs(q_nope, out, lse)
    if grouped.covered_tokens < grouped.num_tokens:
        out[: grouped.num_tokens] = 0
        lse[: grouped.num_tokens] = float("-inf") if sinks is None else sinks
    for group in grouped.groups:
        _attend_group(q, latent_cache, kv_scale, group, softmax_scale, causal, out, lse, sinks)
    return out, lse


def _outputs(q_nope: Tensor, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` as given, checked; allocated where they are None."""
    if out is None:
        out = torch.empty_like(q_nope, memory_format=torch.contiguous_format)
    _check_shape("out", out, q_nope.shape)
    if lse is None:
        lse = q_nope.new_empty(q_nope.shape[:2], dtype=torch.float32)
    check_tensor("lse", lse)
    if lse.shape != q_nope.shape[:2] or lse.dtype is not torch.float32:
        raise InvalidInputError(
            f"lse must be torch.float32 {list(q_nope.shape[:2])}, got {lse.dtype} {list(lse.shape)}"
        )
    return out, lse


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    check_tensor(name, tensor)
    if tensor.shape != shape:
        raise InvalidInputError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")


def _attend_group(
    q: Tensor,
    latent_cache: Tensor,
    kv_scale: Tensor | None,
    group: RequestGroup,
    softmax_scale: float,
    causal: bool,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
) -> None:
    """Attend with a group's queries in q [T, H, d_c + d_rope], and write their rows of out and lse."""
    heads, d_c = out.shape[1:]
    num_slots = latent_cache.shape[0] * latent_cache.shape[1]
    invalid = group.invalid(num_slots)
    if invalid is None:
        rows = cache.select_rows(latent_cache, group.slots)
    elif num_slots:
        rows = cache.select_rows(latent_cache, group.slots.masked_fill(invalid, 0))
    else:
        rows = latent_cache.new_zeros(len(group.slots), latent_cache.shape[2])
    keys = dequantize(rows, kv_scale, dtype=q.dtype)
    if invalid is not None:
        keys.masked_fill_(invalid[:, None], 0)  # a weight of 0 would not remove a NaN
    keys = keys.view(group.size, group.width, -1)
    # A bf16 product copies strided operands, which costs more than multiplying d_rope needless columns.
    values = keys if q.dtype is torch.bfloat16 else keys[:, :, :d_c]
    for first, last in _query_blocks(group, heads):
        tokens = group.query_tokens(first, last)
        # Cloned: a view's alignment, and with it the bits of the product, would depend on other requests.
        queries = q[tokens].clone().view(group.size, -1, q.shape[2])
        scores = _scores(queries, keys)
        block_out, block_lse = _attend(
            scores.view(group.size, last - first, heads, group.width),
            values,
            softmax_scale,
            group.hidden_keys(first, last, causal, invalid),
            group.has_blind_tokens or invalid is not None,
        )
        block_out, block_lse = block_out[:, :, :d_c].reshape(-1, heads, d_c), block_lse.view(-1, heads)
        if sinks is not None:
            block_out, block_lse = count_sinks(block_out, block_lse, sinks)
        out[tokens] = block_out.to(out.dtype)
        lse[tokens] = block_lse.to(lse.dtype)


def count_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The state of attention in which each head's sink counts as a key without values.

    Args:
        out, lse: [T, H, d] and [T, H], without sinks.
        sinks: [H].

    Returns:
        New tensors in the dtypes of ``out`` and ``lse``.
    """
    with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype))
    weights = (lse - with_sinks).exp().masked_fill(lse.isneginf(), 0)
    wide = torch.promote_types(out.dtype, torch.float32)
    return (out.to(wide) * weights.unsqueeze(-1)).to(out.dtype), with_sinks


def _product_dtype(q: Tensor, keys: Tensor, compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the matrix products' operands: bf16 where that loses nothing, else compute_dtype."""
    if (
        compute_dtype is torch.float32
        and q.dtype is keys.dtype is torch.bfloat16
        and q.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return torch.bfloat16
    return compute_dtype


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """q [B, M, d] times keys [B, S, d]; -> [B, M, S], in fp32 or fp64, contiguous."""
    if q.dtype is not torch.bfloat16:
        return torch.bmm(q, keys.transpose(1, 2))
    # The CPU's bf16 product accumulates in fp32 but rounds its result to bf16, too coarse for an exponent. A
    # second product subtracts that result before rounding, which gives the rounding error. Two bf16 products
    # are still cheaper than converting keys to fp32 for one. Products repack their right operand, so the
    # smaller one should be on the right.
    if q.shape[1] < _FEW_QUERY_ROWS:
        left, right = keys, q.transpose(1, 2)
    else:
        left, right = q, keys.transpose(1, 2)
    rounded = torch.bmm(left, right)
    lost = torch.baddbmm(rounded, left, right, beta=-1)
    scores = rounded.float().add_(lost)
    return scores.transpose(1, 2).contiguous() if left is keys else scores


def _attend(
    scores: Tensor, values: Tensor, softmax_scale: float, hidden: Tensor | None, has_blind: bool
) -> tuple[Tensor, Tensor]:
    """Softmax of scores [B, q, H, S] (overwritten) times values [B, S, d]; -> [B, q * H, d], lse [B, q, H].

    ``hidden`` broadcasts with the scores; ``has_blind`` says that it may hide every key of a query row.
    """
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    peak = scores.amax(dim=-1, keepdim=True)
    if has_blind:
        peak.clamp_(min=torch.finfo(peak.dtype).min)
    weights = scores.sub_(peak).mul_(softmax_scale).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    lse = total.log().add_(peak, alpha=softmax_scale).squeeze(-1)
    if has_blind:
        total.clamp_(min=torch.finfo(total.dtype).tiny)
    weights = weights.div_(total).to(values.dtype)
    return torch.bmm(weights.flatten(1, 2), values), lse


def _check_queries(q_nope: Tensor, q_rope: Tensor, latent_cache: Tensor) -> None:
    check_tensors(q_nope=q_nope, q_rope=q_rope, latent_cache=latent_cache)
    if q_nope.ndim != 3 or q_rope.ndim != 3 or q_nope.shape[:2] != q_rope.shape[:2]:
        raise InvalidInputError(
            "q_nope must be [T, H, d_c] and q_rope [T, H, d_rope] with the same T and H, "
            f"got {tuple(q_nope.shape)} and {tuple(q_rope.shape)}"
        )
    if q_nope.dtype != q_rope.dtype:
        raise InvalidInputError(
            f"q_nope and q_rope must have one dtype, got {q_nope.dtype} and {q_rope.dtype}"
        )
    check_one_device(q_nope=q_nope, q_rope=q_rope, latent_cache=latent_cache)


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    *,
    causal: bool,
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Vanilla attention over ragged requests.

    Args:
        q: [T, H, d_qk].
        k: [S, H, d_qk].
        v: [S, H, d_v].
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], offsets of the requests' tokens, starting at 0.
        softmax_scale: factor on the scores, finite and greater than 0 in fp32.
        causal: bottom-right aligned; False for a chunk of context that lies before all queries.
        compute_dtype: fp32 or fp64.

    Returns:
        out [T, H, d_v] in the dtype of q, and lse [T, H] in fp32, natural logarithm. Queries without keys
        are 0 and -inf.

    Raises:
        InvalidInputError: shapes or offsets that do not fit together, or a softmax_scale that is not finite
            and greater than 0.
    """
    _check_compute_dtype(compute_dtype)
    check_prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    check_offsets("cu_seqlens_q", starts_q, q.shape[0])
    check_offsets("cu_seqlens_k", starts_k, k.shape[0])
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    out[starts_q[-1] :] = 0
    lse[starts_q[-1] :] = float("-inf")
    dtype = _product_dtype(q, k, compute_dtype)
    for queries, keys in zip(_slices(starts_q), _slices(starts_k), strict=True):
        # Made contiguous once, so that no product has to do it again.
        q_heads, k_heads, v_heads = (
            x.to(dtype).transpose(0, 1).contiguous() for x in (q[queries], k[keys], v[keys])
        )
        _prefill_request(q_heads, k_heads, v_heads, softmax_scale, causal, out[queries], lse[queries])
    return out, lse


def _slices(offsets: list[int]) -> Iterator[slice]:
    return (slice(first, last) for first, last in itertools.pairwise(offsets))


def _prefill_request(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, out: Tensor, lse: Tensor
) -> None:
    """Vanilla attention of one request: q [H, n, d_qk], k [H, m, d_qk] and v [H, m, d_v] into out and lse."""
    heads, q_len, _ = q.shape
    kv_len = k.shape[1]
    if q_len == 0 or kv_len == 0:
        out.zero_()
        lse.fill_(float("-inf"))
        return
    for some_heads, first, last in _prefill_blocks(heads, q_len, kv_len):
        # No token of a causal block sees keys past the one that its last token sees.
        seen = max(1, kv_len - q_len + last) if causal else kv_len
        hidden = None
        if causal and q_len > 1:
            behind = torch.arange(first - q_len + 1, last - q_len + 1, device=q.device)
            hidden = (torch.arange(seen, device=q.device) >= kv_len + behind[:, None])[:, None]
        block_out, block_lse = _attend(
            _scores(q[some_heads, first:last], k[some_heads, :seen]).unsqueeze(2),
            v[some_heads, :seen],
            softmax_scale,
            hidden,
            causal and q_len > kv_len,
        )
        out[first:last, some_heads] = block_out.transpose(0, 1).to(out.dtype)
        lse[first:last, some_heads] = block_lse.squeeze(-1).T.to(lse.dtype)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two states of attention in plain torch; see :func:`mla_backend.prefill.merge_states`."""
    check_tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if out_a.ndim != 3 or out_a.shape != out_b.shape or not lse_a.shape == lse_b.shape == out_a.shape[:2]:
        raise InvalidInputError(
            "merge_states needs two outputs [T, H, d] and two lse [T, H], got "
            f"{tuple(out_a.shape)}, {tuple(out_b.shape)} and {tuple(lse_a.shape)}, {tuple(lse_b.shape)}"
        )
    if out_a.dtype != out_b.dtype:
        raise InvalidInputError(
            f"merge_states needs outputs of one dtype, got {out_a.dtype} and {out_b.dtype}"
        )
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("lse_b", lse_b)):
        check_float(name, tensor.dtype)
    check_one_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    lse_a, lse_b = lse_a.float(), lse_b.float()
    peak = torch.maximum(lse_a, lse_b)
    peak = peak.masked_fill(peak.isneginf(), 0.0)
    # Weights divided by their sum add up to 1. Divided by exp(lse) they would not: a large lse is rounded.
    total = (lse_a - peak).exp() + (lse_b - peak).exp()
    wide = torch.promote_types(out_a.dtype, torch.float32)
    merged = torch.zeros_like(out_a, dtype=wide)
    for side, side_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = ((side_lse - peak).exp() / total).unsqueeze(-1)
        # An empty side may hold anything, NaN included, which a weight of 0 would not remove.
        merged += (side.to(wide) * weight).masked_fill_(side_lse.isneginf().unsqueeze(-1), 0.0)
    return merged.to(out_a.dtype), peak + total.log()


def _prefill_blocks(heads: int, q_len: int, kv_len: int) -> Iterator[tuple[slice, int, int]]:
    """Blocks of heads and query tokens. Queries are split only in blocks of a single head, so that the keys
    that the block sees, the first ones of that head, are contiguous."""
    head_step = max(1, _BLOCK_SCORES // (q_len * kv_len))
    q_step = max(1, min(q_len, _BLOCK_SCORES // kv_len))
    for head in range(0, heads, head_step):
        for first in range(0, q_len, q_step):
            yield slice(head, head + head_step), first, min(first + q_step, q_len)


def _query_blocks(group: RequestGroup, heads: int) -> Iterator[tuple[int, int]]:
    step = max(1, _BLOCK_SCORES // (group.size * heads * group.width))
    for first in range(0, group.q_len, step):
        yield first, min(first + step, group.q_len)


def _check_compute_dtype(compute_dtype: torch.dtype) -> None:
    if compute_dtype not in (torch.float32, torch.float64):
        raise InvalidInputError(f"compute_dtype must be torch.float32 or torch.float64, got {compute_dtype}")


def check_prefill(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, softmax_scale: float
) -> None:
    """Check the arguments that every implementation of vanilla attention takes.

    Raises:
        InvalidInputError: says what is wrong and what it should be.
    """
    check_softmax_scale(softmax_scale)
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    check_tensors(**tensors)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise InvalidInputError(
            f"q, k and v must be [T, H, d_qk], [S, H, d_qk] and [S, H, d_v], got {shapes}"
        )
    if q.shape[1:] != k.shape[1:] or k.shape[:2] != v.shape[:2]:
        raise InvalidInputError(f"q and k must agree in H and d_qk, k and v in S and H, got {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise InvalidInputError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    check_float("q", q.dtype)
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.ndim != 1 or cu_seqlens_q.shape[0] < 1:
        raise InvalidInputError(
            "cu_seqlens_q and cu_seqlens_k must both be [batch + 1], got "
            f"{tuple(cu_seqlens_q.shape)} and {tuple(cu_seqlens_k.shape)}"
        )
    if not cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32:
        raise InvalidInputError(
            "cu_seqlens_q and cu_seqlens_k must be torch.int32, "
            f"got {cu_seqlens_q.dtype} and {cu_seqlens_k.dtype}"
        )
    check_contiguous("cu_seqlens_q", cu_seqlens_q)
    check_contiguous("cu_seqlens_k", cu_seqlens_k)
    check_one_device(**tensors)
