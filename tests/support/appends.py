"""What a kernel that appends makes of new tokens, against fp64 and against torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_backend import cache as mla_cache
from mla_backend.cache_format import FLOAT_DTYPES, CacheFormat, Scale, cache_format
from tests.support.cases import bytes_of
from tests.support.mla_oracle import (
    cos_sin_cache,
    nearest_e4m3,
    normalized,
    poisoned,
    rotary_angles,
    rotated_by,
    stored_values,
)

NORM_EPS = 0.01
POSITIONS = 3000


@dataclass
class NewTokens:
    """New tokens of a layer, as they lie in an engine, and a cache in which everything is NaN."""

    q: Tensor  # [T, H, d_nope + d_rope]
    latent: Tensor  # [T, d_c + d_rope]
    d_nope: int
    d_c: int
    storage: Tensor  # [pages, page_size or more, width]
    page_size: int
    slots: Tensor  # int64 [T]; -1 for every fifth token
    positions: Tensor  # int64 [T]
    cos_sin: Tensor  # [POSITIONS, d_rope]
    norm_weight: Tensor | None  # [d_c]; None: latents are not normalized
    kv_format: CacheFormat
    kv_scale: Tensor | None
    outputs: dict[str, Tensor]  # where the new rows are wanted outside the cache, too; may be empty

    def append_by(self, append: Callable[..., None], slots: Tensor, interleaved: bool) -> None:
        append(
            self.q[..., self.d_nope :],
            self.latent[:, : self.d_c],
            self.latent[:, self.d_c :],
            self.storage[:, : self.page_size],
            slots,
            self.positions,
            self.cos_sin,
            interleaved=interleaved,
            norm_weight=self.norm_weight,
            norm_eps=None if self.norm_weight is None else NORM_EPS,
            kv_scale=self.kv_scale,
            **self.outputs,
        )

    def rotated(self, x: Tensor, interleaved: bool) -> Tensor:
        """Queries or keys, rotated in fp64."""
        return rotated_by(x, self.cos_sin[self.positions], interleaved)

    def expected_rows(self, interleaved: bool) -> tuple[Tensor, Tensor]:
        """The latents and the rotated keys in fp64, before any conversion to the cache's format."""
        kv_c = self.latent[:, : self.d_c].double()
        if self.norm_weight is not None:
            kv_c = normalized(self.latent[:, : self.d_c], self.norm_weight, NORM_EPS)
        return kv_c, self.rotated(self.latent[:, self.d_c :], interleaved)


def draw_new_tokens(
    draw: random.Random,
    *,
    tokens: int,
    num_heads: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | str,
    device: str,
) -> NewTokens:
    """Draws layouts, whether latents are to be normalized, the dtype of the angles, and the outputs."""
    kv_format = cache_format(kv_dtype)
    d_c, d_rope = kv_format.dimensions or draw.choice([(512, 64), (256, 32), (64, 16), (512, 0)])
    width = kv_format.row_width(d_c, d_rope)
    kv_scale = None
    if kv_format.takes_scale:
        kv_scale = torch.tensor([draw.choice([1.0, 0.3, 2.0**-8, 2.0**10])], device=device)
    page_size, gap, d_nope = draw.choice([1, 3, 8, 64]), draw.choice([0, 2]), draw.choice([0, 128])
    torch.manual_seed(draw.randrange(1 << 30))
    q = torch.randn(tokens, num_heads, d_nope + d_rope, device=device).to(dtype)
    latent = torch.randn(tokens, d_c + d_rope, device=device).to(dtype)
    pages = -(-tokens // page_size) + 3
    slots = torch.randperm(pages * page_size, device=device)[:tokens]
    slots[1::5] = -1
    angles = cos_sin_cache(rotary_angles(POSITIONS, d_rope))
    kv_c_out, k_rope_out = _outputs(tokens, d_c, d_rope, dtype, device)
    return NewTokens(
        q=q,
        latent=latent,
        d_nope=d_nope,
        d_c=d_c,
        storage=poisoned(pages * (page_size + gap) * width, kv_dtype).to(device).view(pages, -1, width),
        page_size=page_size,
        slots=slots,
        positions=torch.randint(POSITIONS, (tokens,), device=device),
        cos_sin=angles.to(draw.choice([torch.float32, dtype])).to(device),
        norm_weight=draw.choice([None, torch.randn(d_c, device=device).to(dtype)]),
        kv_format=kv_format,
        kv_scale=kv_scale,
        outputs=draw.choice([{}, {"kv_c_out": kv_c_out, "k_rope_out": k_rope_out}]),
    )


def _outputs(tokens: int, d_c: int, d_rope: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Of NaN, for a kernel's results; NaN between their rows, too."""
    like: dict[str, Any] = {"dtype": dtype, "device": device}
    return [torch.full((tokens, width + 8), torch.nan, **like)[:, :width] for width in (d_c, d_rope)]


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

    ``append`` takes the arguments of a `RotaryAppend`, in their order. ``kv_dtype`` is that of the cache;
    None means ``dtype``.
    """
    new = draw_new_tokens(
        draw, tokens=tokens, num_heads=num_heads, dtype=dtype, kv_dtype=kv_dtype or dtype, device=device
    )
    q, latent, storage = new.q.clone(), new.latent.clone(), new.storage.clone()
    new.append_by(append, new.slots.to(draw.choice([torch.int32, torch.int64])), interleaved)
    near = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    assert torch.equal(new.latent, latent)
    assert torch.equal(new.q[..., : new.d_nope], q[..., : new.d_nope])
    rotated = new.rotated(q[..., new.d_nope :], interleaved)
    torch.testing.assert_close(new.q[..., new.d_nope :].double(), rotated, **near)
    kv_c, k_rope = new.expected_rows(interleaved)
    if new.outputs:
        torch.testing.assert_close(new.outputs["kv_c_out"].double(), kv_c, **near)
        torch.testing.assert_close(new.outputs["k_rope_out"].double(), k_rope, **near)
        assert all(output._base[:, output.shape[1] :].isnan().all() for output in new.outputs.values())
    _check_cache(new, kv_c, k_rope, storage)


def _check_cache(new: NewTokens, kv_c: Tensor, k_rope: Tensor, storage_before: Tensor) -> None:
    """The rows of tokens with a slot have these values, and all else is as it was."""
    kept = new.slots >= 0
    page, row = new.slots[kept] // new.page_size, new.slots[kept] % new.page_size
    _check_rows(new, bytes_of(new.storage)[page, row].view(new.storage.dtype), kv_c[kept], k_rope[kept])
    bytes_of(new.storage)[page, row] = bytes_of(storage_before)[page, row]
    assert torch.equal(bytes_of(new.storage), bytes_of(storage_before))


def _check_rows(new: NewTokens, written: Tensor, kv_c: Tensor, k_rope: Tensor) -> None:
    kv_format, eps = new.kv_format, torch.finfo(new.q.dtype).eps
    actual, scales = stored_values(written, 1.0 if new.kv_scale is None else new.kv_scale.item())
    if kv_format.scale is Scale.GROUP:
        groups = kv_c.abs().unflatten(1, (-1, kv_format.group)).amax(2)
        groups = groups.repeat_interleave(kv_format.group, dim=1)
        torch.testing.assert_close(scales[:, : new.d_c], groups / 448, rtol=eps, atol=0)
    # Values are rounded to 16 bits first. e4m3 saturates at 448, and is half a step off: 1/16 of a value, or
    # 2^-10 where it is subnormal.
    expected = torch.cat([kv_c, k_rope], dim=1)
    expected = torch.where(scales > 0, expected.clamp(-448 * scales, 448 * scales), expected)
    in_16_bits = torch.finfo(kv_format.rope if kv_format.rope in FLOAT_DTYPES else new.q.dtype).eps
    allowed = expected.abs() * in_16_bits + 1e-6
    in_e4m3 = (expected.abs() / 16).clamp(min=scales / 1024) + allowed / 2 + 1e-6
    assert ((actual - expected).abs() <= torch.where(scales > 0, in_e4m3, allowed)).all()
    if new.norm_weight is None:
        exact = kv_c
        if kv_format.is_quantized:
            latent_scales = scales[:, : new.d_c]
            exact = nearest_e4m3((kv_c.float() / latent_scales.float()).double()) * latent_scales
        assert torch.equal(actual[:, : new.d_c], exact)


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
