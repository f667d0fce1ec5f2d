"""A layer's work on new tokens: norm of their latents, rotary embedding, append to the latent cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mla_backend.batch import value_range
from mla_backend.cache import append, check_append
from mla_backend.cache_format import CacheFormat, check_float, format_of
from mla_backend.checks import as_float, check_operand, check_output, check_tensors, is_number
from mla_backend.device import with_index
from mla_backend.errors import InvalidInputError
from mla_backend.kernels import append as kernel
from mla_backend.kernels.base import ELEMENT_NAMES, FIRST_CAPABILITY


def rotate(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, interleaved: bool) -> Tensor:
    """Rotary embedding (Su et al., "RoFormer", 2021, equation 34), in plain torch.

    Args:
        x: [T, ..., d_rope].
        positions: [T].
        cos_sin_cache: [max_position, d_rope], cosines of d_rope / 2 angles, then their sines.
        interleaved: whether pairs are (2i, 2i + 1), as in DeepSeek's models, or (i, i + d_rope / 2).

    Returns:
        A new tensor in the dtype of x, computed in the widest of its dtype, that of the angles and fp32.
    """
    if x.shape[-1] == 0:
        return x.clone()
    angles = cos_sin_cache[positions].view(len(x), *[1] * (x.ndim - 2), cos_sin_cache.shape[1])
    angles = angles.to(torch.promote_types(angles.dtype, torch.float32))
    cos, sin = angles.chunk(2, dim=-1)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    pairs = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return rotated.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4) in torch.

    Args:
        x: [..., d].
        weight: [d].

    Returns:
        A new tensor in the dtype of x, computed in fp32 or wider.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)


def _check_norm(weight: Tensor | None, eps: float | None) -> None:
    if (weight is None) != (eps is None):
        raise InvalidInputError(
            "norm_weight and norm_eps go together: give both, such as norm_eps=1e-6, or none"
        )
    if eps is not None and not (is_number(eps) and 0 <= as_float(eps) < math.inf):
        raise InvalidInputError(f"norm_eps must be a number, finite and at least 0, got {eps!r}")


class RotaryAppend:
    """Rotates queries and keys of new tokens and appends the tokens to the latent cache, in one launch.

    With ``norm_weight`` it normalizes the latents as well. The decode kernel that follows may begin before
    this launch has ended.

    Args:
        dtype: of queries and keys; the cache has it too, or is fp8 (:mod:`mla_backend.cache_format`).
        device: where all tensors live. For 16-bit dtypes on a GPU there is a kernel, which the constructor
            builds if it is in no cache yet.

    Attributes:
        has_kernel: whether a kernel serves the dtype and device; otherwise torch does.

    Raises:
        InvalidInputError: the dtype is not a float of at least 16 bits, or no device is called that.
        KernelBuildError: the kernel cannot be built or loaded.
        UnsupportedError: torch sees no such device.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str):
        check_float("dtype", dtype)
        self._dtype, self._device = dtype, with_index(device)
        self._kernels: dict[CacheFormat, Any] = {}  # one for each format, as every layer calls one
        if (
            dtype in ELEMENT_NAMES
            and self._device.type == "cuda"
            and torch.cuda.get_device_capability(self._device) >= FIRST_CAPABILITY
        ):
            module = kernel.module(self._device)
            for kv_format in kernel.formats_of(dtype):
                self._kernels[kv_format] = getattr(module, kernel.function_name(dtype, kv_format))

    @property
    def has_kernel(self) -> bool:
        return bool(self._kernels)

    def __call__(
        self,
        q_rope: Tensor,
        kv_c: Tensor,
        k_rope: Tensor,
        latent_cache: Tensor,
        slot_mapping: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        *,
        interleaved: bool,
        norm_weight: Tensor | None = None,
        norm_eps: float | None = None,
        kv_scale: Tensor | None = None,
        kv_c_out: Tensor | None = None,
        k_rope_out: Tensor | None = None,
        check: bool = True,
    ) -> None:
        """Append T tokens. Never synchronizes.

        d_c and d_rope must be multiples of 8; d_rope may be 0. For the kernel, rows must begin at multiples
        of 16 bytes.

        Args:
            q_rope: [T, H, d_rope], the last dimension contiguous; rotated in place.
            kv_c: [T, d_c], compressed keys and values, likewise; not changed.
            k_rope: [T, d_rope], shared key before rotation, likewise; not changed.
            latent_cache: [num_pages, page_size, d_c + d_rope], or 656 wide records.
            slot_mapping: int32 or int64 [T], contiguous, see :func:`mla_backend.cache.append`. For a token
                with a slot outside of the cache, such as -1, only the query is rotated.
            positions: int64 [T], contiguous, below max_position. On a GPU, rotary parts at other positions
                become NaN.
            cos_sin_cache: [max_position, d_rope], fp32 or in ``dtype``, see :func:`rotate`.
            interleaved: see :func:`rotate`.
            norm_weight: [d_c], in ``dtype``, for :func:`rms_norm`; None if ``kv_c`` is normalized already.
            norm_eps: for :func:`rms_norm`, finite and at least 0; given with ``norm_weight``, and only then.
            kv_scale: fp32 tensor of one element, for an e4m3 cache: values are divided by it.
            kv_c_out: [T, d_c], where the normalized latents of all tokens go, too, those without a slot
                included; memory apart from all other arguments. Given with ``k_rope_out``, and only then.
            k_rope_out: [T, d_rope], likewise for the rotated keys.
            check: False if an earlier call with ``check`` had the same arguments but for the number of tokens
                and for what tensors hold. Then the kernel is launched without checks, which take longer on
                the host than the launch.

        Raises:
            InvalidInputError: a shape, dtype, layout, device or ``norm_eps`` is wrong; on the CPU also: a
                slot other than -1 is outside the cache, or a position outside ``cos_sin_cache``.
            ValueError: rows are not aligned.
        """
        if check or not self._kernels:
            tables = slot_mapping, positions, cos_sin_cache
            self._check(q_rope, kv_c, k_rope, latent_cache, *tables, norm_weight, kv_scale)
            _check_norm(norm_weight, norm_eps)
            if kv_c_out is not None or k_rope_out is not None:
                self._check_outputs(kv_c, k_rope, kv_c_out, k_rope_out)
        if norm_eps is None:
            norm_eps = 0.0
        if self._kernels:
            self._kernels[format_of(latent_cache)](
                q_rope,
                kv_c,
                k_rope,
                latent_cache,
                slot_mapping,
                positions,
                cos_sin_cache,
                interleaved,
                norm_weight,
                norm_eps,
                kv_scale,
                kv_c_out,
                k_rope_out,
            )
            return
        with torch.no_grad():
            if norm_weight is not None:
                kv_c = rms_norm(kv_c, norm_weight, norm_eps)
            k_rope = rotate(k_rope, positions, cos_sin_cache, interleaved=interleaved)
            if kv_c_out is not None and k_rope_out is not None:
                kv_c_out.copy_(kv_c)
                k_rope_out.copy_(k_rope)
            append(latent_cache, kv_c, k_rope, slot_mapping, kv_scale)
            q_rope.copy_(rotate(q_rope, positions, cos_sin_cache, interleaved=interleaved))

    def _check(
        self,
        q_rope: Tensor,
        kv_c: Tensor,
        k_rope: Tensor,
        latent_cache: Tensor,
        slot_mapping: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        norm_weight: Tensor | None,
        kv_scale: Tensor | None,
    ) -> None:
        check_append(latent_cache, kv_c, k_rope, slot_mapping, kv_scale)
        check_tensors(q_rope=q_rope, cos_sin_cache=cos_sin_cache)
        (tokens, d_rope), device = k_rope.shape, self._device
        heads = q_rope.shape[1] if q_rope.ndim == 3 else 1
        check_output("q_rope", q_rope, (tokens, heads, d_rope), self._dtype, device)  # it is written
        check_operand("kv_c", kv_c, (tokens, kv_c.shape[1]), self._dtype, device)
        check_operand("k_rope", k_rope, (tokens, d_rope), self._dtype, device)
        if not format_of(latent_cache).is_quantized:
            check_operand("latent_cache", latent_cache, latent_cache.shape, self._dtype, device)
        check_operand("positions", positions, (tokens,), torch.int64, device)
        check_operand("slot_mapping", slot_mapping, (tokens,), slot_mapping.dtype, device)
        num_angles = len(cos_sin_cache) if cos_sin_cache.ndim else 0
        angle_dtype = self._dtype if cos_sin_cache.dtype is self._dtype else torch.float32
        check_operand("cos_sin_cache", cos_sin_cache, (num_angles, d_rope), angle_dtype, device)
        if bounds := value_range(positions):
            low, high = bounds
            if low < 0 or high >= len(cos_sin_cache):
                raise InvalidInputError(
                    f"positions range from {low} to {high}, cos_sin_cache has 0 .. {len(cos_sin_cache) - 1}"
                )
        if norm_weight is not None:
            check_operand("norm_weight", norm_weight, (kv_c.shape[1],), self._dtype, device)
        if kv_c.shape[1] % 8 or d_rope % 8:
            raise InvalidInputError(
                f"d_c and d_rope must be multiples of 8, got {kv_c.shape[1]} and {d_rope}"
            )
        if not cos_sin_cache.is_contiguous() or cos_sin_cache.data_ptr() % 16:
            raise InvalidInputError(
                "cos_sin_cache must be contiguous and begin at a multiple of 16 bytes, "
                f"got strides {cos_sin_cache.stride()} at {cos_sin_cache.data_ptr():#x}"
            )

    def _check_outputs(
        self, kv_c: Tensor, k_rope: Tensor, kv_c_out: Tensor | None, k_rope_out: Tensor | None
    ) -> None:
        if kv_c_out is None or k_rope_out is None:
            raise InvalidInputError("kv_c_out and k_rope_out go together: give both, or none")
        check_output("kv_c_out", kv_c_out, tuple(kv_c.shape), self._dtype, self._device)
        check_output("k_rope_out", k_rope_out, tuple(k_rope.shape), self._dtype, self._device)
