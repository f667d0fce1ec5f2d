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

import enum
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_backend.checks import check_tensor
from mla_backend.errors import InvalidInputError

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

E4M3_MAX = 448.0
"""The largest finite e4m3 value. Appending saturates to it; NaN stays NaN."""


class Scale(enum.Enum):
    """What shares an fp32 scale; a value is what is stored times its scale."""

    NONE = "none"
    TENSOR = "tensor"
    """The whole tensor. The caller passes the scale with it."""
    GROUP = "group"
    """Some columns of a token's kv_c. Rows hold these scales between kv_c and k_rope."""


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """A format of cache rows: a row of the table that every user of caches reads, `FORMATS`.

    Attributes:
        name: as engines' options spell it.
        storage: dtype of the tensors that hold such a cache.
        latents, rope: dtypes of kv_c and k_rope in a row.
        scale: what shares a scale. With TENSOR, k_rope is scaled as well.
        group: with GROUP, how many columns of kv_c share a scale; kv_lora_rank means one for each token.
        dimensions: the only (kv_lora_rank, qk_rope_head_dim) that rows hold; None if they hold any.
        short: what kernels for it are called; empty if elements are not quantized.
    """

    name: str
    storage: torch.dtype
    latents: torch.dtype
    rope: torch.dtype
    scale: Scale = Scale.NONE
    group: int = 0
    dimensions: tuple[int, int] | None = None
    short: str = ""

    @property
    def described(self) -> str:
        """The format in words, for messages."""
        return f"a{'n' * self.is_quantized} {self.name} cache"

    @property
    def is_quantized(self) -> bool:
        """Whether values of kv_c are stored in fewer than 16 bits."""
        return self.latents not in FLOAT_DTYPES

    @property
    def takes_scale(self) -> bool:
        """Whether a scale for the whole tensor must be passed with it."""
        return self.scale is Scale.TENSOR

    @property
    def fixed_width(self) -> int | None:
        """`row_width` if there is only one."""
        return None if self.dimensions is None else self.row_width(*self.dimensions)

    def row_width(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Last dimension of a cache tensor: elements of ``storage`` in a row.

        Raises:
            InvalidInputError: the format has no rows of these dimensions.
        """
        return self.row_bytes(kv_lora_rank, qk_rope_head_dim) // self.storage.itemsize

    def row_bytes(self, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
        """Bytes of a token in one layer; raises as `row_width` does."""
        if self.dimensions not in (None, (kv_lora_rank, qk_rope_head_dim)):
            raise InvalidInputError(
                "{} rows hold kv_lora_rank {} with qk_rope_head_dim {}, ".format(self.name, *self.dimensions)
                + f"not {kv_lora_rank} with {qk_rope_head_dim}: use fp8_e4m3 or a 16-bit cache"
            )
        return sum(count * dtype.itemsize for dtype, count in self._parts(kv_lora_rank, qk_rope_head_dim))

    def scales_in_row(self, kv_lora_rank: int) -> int:
        """The number of scales in a row."""
        return kv_lora_rank // self.group if self.scale is Scale.GROUP else 0

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """kv_c, scales of groups and k_rope of rows [n, width], as they are stored. Rows of formats without
        fixed dimensions are all returned as kv_c."""
        parts, begin = [], 0
        for dtype, count in self._parts(*(self.dimensions or (rows.shape[1], 0))):
            end = begin + count * dtype.itemsize // rows.itemsize
            part = rows[:, begin:end]
            # Rows of strided caches need not begin at multiples of 4 bytes, which a view as fp32 requires.
            parts.append((part if dtype.itemsize == rows.itemsize else part.contiguous()).view(dtype))
            begin = end
        return parts[0], parts[1], parts[2]

    def _parts(self, kv_lora_rank: int, qk_rope_head_dim: int) -> list[tuple[torch.dtype, int]]:
        """dtype and count of a row's elements: kv_c, scales of groups, k_rope."""
        scales = self.scales_in_row(kv_lora_rank)
        return [(self.latents, kv_lora_rank), (torch.float32, scales), (self.rope, qk_rope_head_dim)]


_E4M3 = torch.float8_e4m3fn
E4M3 = CacheFormat("fp8_e4m3", _E4M3, _E4M3, _E4M3, Scale.TENSOR, short="e4m3")
RECORD_656 = CacheFormat(
    "fp8_ds_mla", torch.uint8, _E4M3, torch.bfloat16, Scale.GROUP, 128, (512, 64), short="rec656"
)
FORMATS = (
    *(CacheFormat(str(dtype).removeprefix("torch."), dtype, dtype, dtype) for dtype in FLOAT_DTYPES),
    E4M3,
    RECORD_656,
)

_OF_STORAGE = {kv_format.storage: kv_format for kv_format in FORMATS}
_OF_NAME = {kv_format.name: kv_format for kv_format in FORMATS}


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
    kv_format = None
    if isinstance(kv_dtype, str):
        kv_format = _OF_NAME.get(kv_dtype)
    elif isinstance(kv_dtype, torch.dtype):
        kv_format = _OF_STORAGE.get(kv_dtype)
    if kv_format is None or kv_dtype is torch.uint8:
        raise InvalidInputError(
            f"kv_dtype must be one of {', '.join(_OF_NAME)} or the torch.dtype of values, got {kv_dtype!r}"
        )
    return kv_format


def format_of(latent_cache: Tensor) -> CacheFormat:
    """The format of a cache's tensor.

    Raises:
        InvalidInputError: no cache has the tensor's dtype.
    """
    kv_format = _OF_STORAGE.get(latent_cache.dtype)
    if kv_format is None:
        raise InvalidInputError(
            f"latent_cache must be one of {', '.join(map(str, _OF_STORAGE))}, got {latent_cache.dtype}"
        )
    return kv_format


def check_storage(kv_format: CacheFormat, latent_cache: Tensor) -> None:
    """Check that a cache is a tensor, and that an e4m3 one is not uint8, as engines allocate it.

    Raises:
        InvalidInputError: it is not a tensor, or an e4m3 cache is uint8.
    """
    check_tensor("latent_cache", latent_cache)
    if kv_format.storage is torch.float8_e4m3fn and latent_cache.dtype is torch.uint8:
        raise InvalidInputError(
            "latent_cache must be torch.float8_e4m3fn, got torch.uint8: pass "
            "latent_cache.view(torch.float8_e4m3fn)"
        )


def check_scale(kv_format: CacheFormat, kv_scale: Tensor | None, device: torch.device) -> None:
    """Check that a scale is given where a format takes one, and only there.

    Args:
        kv_scale: fp32, one element, on ``device``; finite and greater than 0, which is not checked on a GPU.

    Raises:
        InvalidInputError: says what is wrong and what it should be.
    """
    if not kv_format.takes_scale:
        if kv_scale is not None:
            raise InvalidInputError(f"{kv_format.described} takes no kv_scale: leave it out")
    elif kv_scale is None:
        raise InvalidInputError(f"{kv_format.described} needs its kv_scale, an fp32 tensor of one element")
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
    kv_format = format_of(rows)
    if not kv_format.is_quantized:
        return rows.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    latents, scales, rope = kv_format.split(rows)
    if kv_format.scale is Scale.GROUP:
        values = latents.to(wide).unflatten(1, (-1, kv_format.group)) * scales.to(wide).unsqueeze(2)
    else:
        assert kv_scale is not None  # check_scale
        values = latents.to(wide).unsqueeze(2) * kv_scale.to(wide).reshape(())
    return torch.cat([values.flatten(1).to(dtype), rope.to(dtype)], dim=1)


def quantize(kv_format: CacheFormat, kv_c: Tensor, k_rope: Tensor, kv_scale: Tensor | None = None) -> Tensor:
    """Convert latents to rows in a format, as appending writes them.

    Values beyond the range of e4m3, infinite ones included, become its largest; NaN stays NaN. Scales
    of groups are each group's largest magnitude over 448; infinity counts as the largest fp32 value.

    Args:
        kv_c: [n, d_c].
        k_rope: [n, d_rope].
        kv_scale: where the format takes one, see `check_scale`; values are divided by it.

    Returns:
        [n, width] in ``kv_format.storage``.
    """
    if not kv_format.is_quantized:
        return torch.cat([kv_c, k_rope], dim=-1).to(kv_format.storage)
    if kv_format.scale is Scale.TENSOR:
        assert kv_scale is not None  # check_scale
        return _to_e4m3(torch.cat([kv_c, k_rope], dim=-1).float() / kv_scale.reshape(()))
    groups = kv_c.float().unflatten(1, (-1, kv_format.group))
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    largest = groups.abs().nan_to_num(nan=0.0, posinf=huge).amax(dim=2, keepdim=True)
    scales = (largest / E4M3_MAX).clamp(min=tiny)
    latents = _to_e4m3(groups / scales)
    parts = (latents.flatten(1), scales.flatten(1), k_rope.to(kv_format.rope).contiguous())
    return torch.cat([part.view(kv_format.storage) for part in parts], dim=1)


def _to_e4m3(x: Tensor) -> Tensor:
    # Clamped, because older versions of torch turn values beyond the range into NaN.
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
