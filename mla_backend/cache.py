"""The paged latent cache: ``[num_pages, page_size, d_c + d_rope]``, kv_c first and k_rope after it.

The last dimension of record caches is 656; see :mod:`mla_backend.cache_format`.

Pages may lie further apart than their own size (``stride(0) > page_size * stride(1)``, as in engines that
interleave layers). Only the last dimension must be contiguous.
"""

from __future__ import annotations

import functools
import logging
import math

import torch
from torch import Tensor

from mla_backend.batch import DecodeBatch, TableKind, value_range
from mla_backend.cache_format import check_float, check_scale, format_of, quantize
from mla_backend.checks import (
    check_contiguous,
    check_not_expanded,
    check_one_device,
    check_tensor,
    check_tensors,
)
from mla_backend.errors import InvalidInputError, KernelBuildError
from mla_backend.kernels.append import module
from mla_backend.kernels.base import FIRST_CAPABILITY

logger = logging.getLogger(__name__)


def check_cache(
    latent_cache: Tensor, *, page_size: int | None = None, dimensions: tuple[int, int] | None = None
) -> None:
    """Check a latent cache's shape, dtype and layout.

    Args:
        page_size: tokens in a page, if known.
        dimensions: (d_c, d_rope), if known.

    Raises:
        InvalidInputError: says what is wrong and what it should be.
    """
    check_tensor("latent_cache", latent_cache)
    if latent_cache.ndim != 3 or latent_cache.shape[1] == 0:
        raise InvalidInputError(
            "latent_cache must be [num_pages, page_size, d_c + d_rope] with pages of a token or more, "
            f"got shape {tuple(latent_cache.shape)}"
        )
    kv_format = format_of(latent_cache)
    check_contiguous("latent_cache", latent_cache)
    if page_size is not None and latent_cache.shape[1] != page_size:
        raise InvalidInputError(
            f"latent_cache has pages of {latent_cache.shape[1]} tokens, expected {page_size}"
        )
    width = kv_format.fixed_width or latent_cache.shape[2]
    if dimensions is not None:
        width = kv_format.row_width(*dimensions)
    if latent_cache.shape[2] != width:
        what = f"d_c + d_rope = {width}"
        if kv_format.storage is torch.uint8:
            what = f"{width} bytes of {kv_format.name} (is it e4m3? view it as torch.float8_e4m3fn)"
        raise InvalidInputError(f"latent_cache rows are {latent_cache.shape[2]} wide, expected {what}")


def check_append(
    latent_cache: Tensor, kv_c: Tensor, k_rope: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None
) -> None:
    """Check the arguments of :func:`append`, except for the values of the slots.

    Raises:
        InvalidInputError: says what is wrong and what it should be.
    """
    check_cache(latent_cache)
    check_tensors(kv_c=kv_c, k_rope=k_rope, slot_mapping=slot_mapping)
    if kv_c.ndim != 2 or k_rope.ndim != 2 or kv_c.shape[0] != k_rope.shape[0]:
        raise InvalidInputError(
            "kv_c must be [T, d_c] and k_rope [T, d_rope] with the same T, "
            f"got {tuple(kv_c.shape)} and {tuple(k_rope.shape)}"
        )
    check_float("kv_c", kv_c.dtype)
    check_float("k_rope", k_rope.dtype)
    check_not_expanded("latent_cache", latent_cache)
    kv_format = format_of(latent_cache)
    check_scale(kv_format, kv_scale, latent_cache.device)
    if kv_format.row_width(kv_c.shape[1], k_rope.shape[1]) != latent_cache.shape[2]:
        raise InvalidInputError(
            f"kv_c and k_rope are {kv_c.shape[1]} + {k_rope.shape[1]} wide, "
            f"latent_cache rows are {latent_cache.shape[2]}"
        )
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise InvalidInputError(f"slot_mapping must be torch.int32 or torch.int64, got {slot_mapping.dtype}")
    if slot_mapping.shape != kv_c.shape[:1]:
        raise InvalidInputError(
            f"slot_mapping must have one entry per token, [{kv_c.shape[0]}], "
            f"got shape {tuple(slot_mapping.shape)}"
        )
    check_one_device(latent_cache=latent_cache, kv_c=kv_c, k_rope=k_rope, slot_mapping=slot_mapping)


@torch.inference_mode()
def append(
    latent_cache: Tensor,
    kv_c: Tensor,
    k_rope: Tensor,
    slot_mapping: Tensor,
    kv_scale: Tensor | None = None,
) -> None:
    """Write the latents of new tokens to the cache, converted to its format. Never synchronizes.

    Args:
        latent_cache: [num_pages, page_size, d_c + d_rope], or 656 wide records.
        kv_c: [T, d_c], normalized compressed KV.
        k_rope: [T, d_rope], rotated shared key.
        slot_mapping: int32 or int64 [T]; token i goes to page ``slot // page_size`` at ``slot % page_size``.
            Slots outside of the cache, such as -1, are skipped. On the CPU, which sees them, those other than
            -1 are an error. If several tokens have the same slot, it is not defined which one stays. On a
            GPU a kernel writes, which the first call builds or loads. Where that fails (a warning says why),
            torch writes, and if all tokens are skipped, it writes to slot 0 what slot 0 holds.
        kv_scale: fp32 tensor of one element, for an e4m3 cache: values are divided by it.

    Raises:
        InvalidInputError: a shape, dtype or layout is wrong; on the CPU also: a slot is outside the cache, or
            ``kv_scale`` is not finite and greater than 0.
    """
    check_append(latent_cache, kv_c, k_rope, slot_mapping, kv_scale)
    if kv_c.shape[0] == 0:
        return
    num_pages, page_size, _ = latent_cache.shape
    if num_pages and scatters_in_one_launch(latent_cache.device):
        rows = movable(quantize(format_of(latent_cache), kv_c, k_rope, kv_scale))
        module(latent_cache.device).scatter_rows(rows, movable(latent_cache), slot_mapping.contiguous())
        return
    slots = slot_mapping.long()
    may_skip = True
    if bounds := value_range(slots):
        low, high = bounds
        if low < -1 or high >= num_pages * page_size:
            raise InvalidInputError(
                f"slot_mapping holds slots from {low} to {high}, outside -1 .. {num_pages * page_size - 1}"
            )
        if high < 0:
            return
        may_skip = low < 0
    if num_pages == 0:
        return
    # Torch does not scatter or select float8, so bytes are moved instead.
    rows = movable(quantize(format_of(latent_cache), kv_c, k_rope, kv_scale))
    latent_cache = movable(latent_cache)
    if may_skip:
        # A skipped token repeats the write of the first token that is kept: the same bytes to the same place.
        # If none is kept, it writes what slot 0 already holds. So nothing has to be filtered on the host.
        kept = (slots >= 0) & (slots < num_pages * page_size)
        first = kept.int().argmax(dim=0, keepdim=True)
        fallback_row = torch.where(kept[first], rows[first], latent_cache[0, 0])
        rows = torch.where(kept.unsqueeze(1), rows, fallback_row)
        slots = torch.where(kept, slots, torch.where(kept[first], slots[first], 0))
    latent_cache[slots // page_size, slots % page_size] = rows


@functools.cache
def scatters_in_one_launch(device: torch.device) -> bool:
    """Whether our kernel writes rows on a device. Builds the kernel; if that fails, a warning says why."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        return False
    try:
        module(device)
    except (KernelBuildError, InvalidInputError) as error:
        logger.warning("torch appends to the latent cache here: %s", error)
        return False
    return True


def movable(rows: Tensor) -> Tensor:
    """A view of rows that torch can index: float8 as bytes."""
    return rows.view(torch.uint8) if rows.dtype is torch.float8_e4m3fn else rows


def token_slots(batch: DecodeBatch, requests: Tensor, positions: Tensor) -> Tensor:
    """Cache slots (``page * page_size + offset``, int64) of tokens of a batch.

    Args:
        requests: int64, index of each token's request in the batch.
        positions: int64, of a shape that broadcasts with ``requests``; each token's position among those
            tokens of its request that are in the batch's shard.
    """
    assert batch.table is not None
    rows = requests if batch.table_rows is None else batch.table_rows.long()[requests]
    if batch.table_kind is TableKind.LIST:
        return batch.table[rows, positions].long()
    if batch.table_kind is TableKind.TOKEN:
        rank, size, _ = batch.shard.as_integers
        return batch.table[rows, positions * size + rank].long() // size
    pages = batch.table[rows, positions // batch.page_size].long()
    return pages * batch.page_size + positions % batch.page_size


def select_rows(latent_cache: Tensor, slots: Tensor) -> Tensor:
    """Copies of the cache rows in some slots, as stored: [n, width] for int64 slots [n]."""
    num_pages, page_size, width = latent_cache.shape
    page_stride, row_stride, _ = latent_cache.stride()
    if page_stride != page_size * row_stride:
        # One index_select serves any strides: it reads a view with a row at every multiple of the greatest
        # common divisor of both strides. Rows of that view may overlap.
        step = math.gcd(page_stride, row_stride)
        last_row = ((num_pages - 1) * page_stride + (page_size - 1) * row_stride) // step
        num_rows = max(last_row + 1, 0)  # a cache may have no pages
        slots = (slots // page_size * page_stride + slots % page_size * row_stride) // step
        rows = latent_cache.as_strided((num_rows, width), (step, 1))
    else:
        rows = latent_cache.as_strided((num_pages * page_size, width), (row_stride, 1))
    return movable(rows).index_select(0, slots).view(rows.dtype)
