"""How a token's row of the latent cache is stored: in 16 or more bits, or in e4m3 with scales.

A row holds the d_c columns of kv_c and the d_rope columns of k_rope.

===========  ====================  =====================================================================
format       tensor                row
===========  ====================  =====================================================================
bfloat16...  that dtype            d_c + d_rope values
fp8_e4m3     ``float8_e4m3fn``     d_c + d_rope values; value = stored * scale, one scale for the tensor,
                                   which the caller passes with it
fp8_ds_mla   ``uint8``, 656 wide   512 e4m3 values of kv_c, 4 fp32 scales, 64 bf16 values of k_rope;
                                   value = stored * scale of its 128 columns; k_rope is not scaled
===========  ====================  =====================================================================

The dtype of a cache's tensor says which format it has. (Engines allocate e4m3 caches as uint8: view them as
``float8_e4m3fn``.) vLLM gave ``fp8_ds_mla`` its name and layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_backend.checks import check_tensor
from mla_backend.errors import InvalidInputError

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

E4M3_MAX = 448.0
"""The largest finite e4m3 value. Appending saturates to it; NaN stays NaN."""

RECORD_DIMENSIONS = (512, 64)
"""(kv_lora_rank, qk_rope_head_dim) of records; there are no others."""
RECORD_BYTES = 656
RECORD_SCALES = 512
"""Byte at which a record's fp32 scales begin."""
RECORD_GROUP = 128
"""Columns of kv_c that share a scale."""
RECORD_ROPE = 528
"""Byte at which a record's bf16 k_rope begins."""


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """A format of cache rows.

    Attributes:
        name: as engines' options spell it.
        storage: dtype of the tensors that hold such a cache.
        takes_scale: whether a scale for the whole tensor must be passed with it.
    """

    name: str
    storage: torch.dtype
    takes_scale: bool = False

    @property
    def described(self) -> str:
        """The format in words, for messages."""
        return f"a{'n' * self.is_quantized} {self.name} cache"

    @property
    def is_quantized(self) -> bool:
        """Whether values are stored in fewer than 16 bits."""
        return self.storage not in FLOAT_DTYPES

    def row_width(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Last dimension of a cache tensor: elements of ``storage`` in a row.

        Raises:
            InvalidInputError: the format has no rows of these dimensions.
        """
        if self is not RECORD_656:
            return kv_lora_rank + qk_rope_head_dim
        if (kv_lora_rank, qk_rope_head_dim) != RECORD_DIMENSIONS:
            raise InvalidInputError(
                f"{self.name} records hold kv_lora_rank 512 with qk_rope_head_dim 64, not {kv_lora_rank} "
                f"with {qk_rope_head_dim}: use fp8_e4m3 or a 16-bit cache"
            )
        return RECORD_BYTES

    def row_bytes(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Bytes of a token in one layer; raises as `row_width` does."""
        return self.row_width(kv_lora_rank, qk_rope_head_dim) * self.storage.itemsize


E4M3 = CacheFormat("fp8_e4m3", torch.float8_e4m3fn, takes_scale=True)
RECORD_656 = CacheFormat("fp8_ds_mla", torch.uint8)
FORMATS = (
    *(CacheFormat(str(dtype).removeprefix("torch."), dtype) for dtype in FLOAT_DTYPES),
    E4M3,
    RECORD_656,
)

_OF_STORAGE = {known.storage: known for known in FORMATS}
_OF_NAME = {known.name: known for known in FORMATS}


def check_float(name: str, dtype: torch.dtype, remedy: str = "") -> None:
    """Check that a dtype is one of `FLOAT_DTYPES`.

    Raises:
        InvalidInputError: names the dtype and the right ones, and ends with the remedy.
    """
    if dtype not in FLOAT_DTYPES:
        allowed = ", ".join(map(str, FLOAT_DTYPES))
        raise InvalidInputError(f"{name} must be one of {allowed}, got {dtype!r}{remedy}")


def cache_format(kv_dtype: torch.dtype | str) -> CacheFormat:
    """The format that a ``kv_dtype`` argument means.

    Args:
        kv_dtype: the name of a format, or the dtype of a cache's values.

    Raises:
        InvalidInputError: there is no such format.
    """
    # uint8 is only how records are stored: nobody would guess that it means them.
    known = None
    if isinstance(kv_dtype, str):
        known = _OF_NAME.get(kv_dtype)
    elif isinstance(kv_dtype, torch.dtype):
        known = _OF_STORAGE.get(kv_dtype)
    if known is None or kv_dtype is torch.uint8:
        raise InvalidInputError(
            f"kv_dtype must be one of {', '.join(_OF_NAME)} or the torch.dtype of values, got {kv_dtype!r}"
        )
    return known


def format_of(latent_cache: Tensor) -> CacheFormat:
    """The format of a cache's tensor.

    Raises:
        InvalidInputError: no cache has the tensor's dtype.
    """
    known = _OF_STORAGE.get(latent_cache.dtype)
    if known is None:
        raise InvalidInputError(
            f"latent_cache must be one of {', '.join(map(str, _OF_STORAGE))}, got {latent_cache.dtype}"
        )
    return known


def check_storage(known: CacheFormat, latent_cache: Tensor) -> None:
    """Check that a cache is a tensor, and that an e4m3 one is not uint8, as engines allocate it.

    Raises:
        InvalidInputError: it is not a tensor, or an e4m3 cache is uint8.
    """
    check_tensor("latent_cache", latent_cache)
    if known is E4M3 and latent_cache.dtype is torch.uint8:
        raise InvalidInputError(
            "latent_cache must be torch.float8_e4m3fn, got torch.uint8: pass "
            "latent_cache.view(torch.float8_e4m3fn)"
        )


def check_scale(known: CacheFormat, kv_scale: Tensor | None, device: torch.device) -> None:
    """Check that a scale is given where a format takes one, and only there.

    Args:
        kv_scale: fp32, one element, on ``device``; finite and greater than 0, which is not checked on a GPU.

    Raises:
        InvalidInputError: says what is wrong and what it should be.
    """
    if not known.takes_scale:
        if kv_scale is not None:
            raise InvalidInputError(f"{known.described} takes no kv_scale: leave it out")
    elif kv_scale is None:
        raise InvalidInputError(f"{known.described} needs its kv_scale, an fp32 tensor of one element")
    elif not isinstance(kv_scale, Tensor):
        raise InvalidInputError(
            f"kv_scale must be an fp32 tensor of one element, got {kv_scale!r}: pass "
            f"torch.tensor([{kv_scale!r}], device={str(device)!r})"
        )
    elif kv_scale.dtype is not torch.float32 or kv_scale.numel() != 1 or kv_scale.device != device:
        raise InvalidInputError(
            f"kv_scale must be torch.float32 with one element on {device}, "
            f"got {kv_scale.dtype} {list(kv_scale.shape)} on {kv_scale.device}"
        )
    elif device.type == "cpu" and not 0 < kv_scale.item() < math.inf:
        raise InvalidInputError(f"kv_scale must be finite and greater than 0, got {kv_scale.item()}")


def dequantize(rows: Tensor, kv_scale: Tensor | None = None, *, dtype: torch.dtype) -> Tensor:
    """The values of cache rows.

    Args:
        rows: [n, width], as stored.
        kv_scale: where the format takes one, see `check_scale`.
        dtype: of the result; products with scales are computed in fp32, or in fp64 if ``dtype`` is fp64.

    Returns:
        [n, d_c + d_rope] in ``dtype``; ``rows`` itself if it has that dtype.
    """
    known = format_of(rows)
    if not known.is_quantized:
        return rows.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if known is E4M3:
        assert kv_scale is not None  # check_scale
        return (rows.to(wide) * kv_scale.to(wide).reshape(())).to(dtype)
    latents = rows[:, :RECORD_SCALES].view(torch.float8_e4m3fn).to(wide)
    # Rows of strided caches need not begin at multiples of 4 bytes, which a view as fp32 requires.
    scales = rows[:, RECORD_SCALES:RECORD_ROPE].contiguous().view(torch.float32).to(wide)
    values = latents.unflatten(1, (-1, RECORD_GROUP)) * scales.unsqueeze(2)
    rope = rows[:, RECORD_ROPE:].contiguous().view(torch.bfloat16)
    return torch.cat([values.flatten(1).to(dtype), rope.to(dtype)], dim=1)


def quantize(known: CacheFormat, kv_c: Tensor, k_rope: Tensor, kv_scale: Tensor | None = None) -> Tensor:
    """Convert latents to rows in a format, as appending writes them.

    Values beyond the range of e4m3, infinite ones included, become its largest; NaN stays NaN. A record's
    scales are the largest magnitude of each group over 448; infinity counts as the largest fp32 value.

    Args:
        kv_c: [n, d_c].
        k_rope: [n, d_rope].
        kv_scale: where the format takes one, see `check_scale`; values are divided by it.

    Returns:
        [n, width] in ``known.storage``.
    """
    if not known.is_quantized:
        return torch.cat([kv_c, k_rope], dim=-1).to(known.storage)
    if known is E4M3:
        assert kv_scale is not None  # check_scale
        return _to_e4m3(torch.cat([kv_c, k_rope], dim=-1).float() / kv_scale.reshape(()))
    groups = kv_c.float().unflatten(1, (-1, RECORD_GROUP))
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    largest = groups.abs().nan_to_num(nan=0.0, posinf=huge).amax(dim=2, keepdim=True)
    scales = (largest / E4M3_MAX).clamp(min=tiny)
    latents = _to_e4m3(groups / scales)
    parts = (latents.flatten(1), scales.flatten(1), k_rope.to(torch.bfloat16).contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def _to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(
        torch.float8_e4m3fn
    )  # older versions of torch turn values beyond the range into NaN
