"""Absorbed weights: the up-projections of keys and values, folded into the queries and the output.

With ``k_nope = W_UK·c`` and ``v = W_UV·c`` for a latent c, ``q_nope·k_nope = (q_nope·W_UK)·c`` and
``Σ p·v = (Σ p·c)·W_UV``: attention can run on the latents themselves (DeepSeek-V2, arXiv:2405.04434,
section 2.1.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_backend.cache_format import FLOAT_DTYPES, check_float
from mla_backend.checks import check_int, check_one_device, check_output, check_tensor
from mla_backend.device import without_autocast
from mla_backend.errors import InvalidInputError
from mla_backend.geometry import MLAGeometry


class AbsorbedWeights:
    """W_UK and W_UV, split from ``kv_b_proj`` once at load. Their addresses never change.

    Queries go through :meth:`absorb_query` before :meth:`MLADecoder.run`, and outputs through
    :meth:`project_output` after it.

    Attributes:
        w_uk: [H, d_nope, d_c], contiguous.
        w_uv: [H, d_c, d_v], contiguous.
    """

    def __init__(self, w_uk: Tensor, w_uv: Tensor, geometry: MLAGeometry):
        self.w_uk = w_uk
        self.w_uv = w_uv
        self._geometry = geometry

    @classmethod
    def from_kv_b_proj(
        cls,
        weight: Tensor,
        geometry: MLAGeometry,
        *,
        dtype: torch.dtype | None = None,
        scale: Tensor | None = None,
        block_size: tuple[int, int] | None = None,
    ) -> AbsorbedWeights:
        """Split and lay out ``kv_b_proj.weight``.

        Args:
            weight: [H * (d_nope + d_v), d_c], in bf16, fp16, fp32, fp64, or e4m3 with ``scale``.
            geometry: of this rank; its heads must match the weight.
            dtype: of the result; None keeps the weight's own (bf16 for e4m3).
            scale: fp32 factor that turns stored e4m3 values into weights ("inverse scale"): one element, or
                one per block of ``block_size``, [ceil(H * (d_nope + d_v) / b0), ceil(d_c / b1)]; on the
                weight's device.
            block_size: (b0, b1) of block scales, e.g. (128, 128).

        Raises:
            InvalidInputError: a shape, dtype, scale or block_size that does not fit.
        """
        check_tensor("weight", weight)
        if dtype is None:
            dtype = weight.dtype if weight.dtype in FLOAT_DTYPES else torch.bfloat16
        check_float("dtype", dtype)
        heads, d_c = geometry.num_heads, geometry.kv_lora_rank
        w_uk = torch.empty(heads, geometry.qk_nope_head_dim, d_c, dtype=dtype, device=weight.device)
        w_uv = torch.empty(heads, d_c, geometry.v_head_dim, dtype=dtype, device=weight.device)
        absorbed = cls(w_uk, w_uv, geometry)
        absorbed.update_(weight, scale=scale, block_size=block_size)
        return absorbed

    @torch.inference_mode()
    def update_(
        self, weight: Tensor, *, scale: Tensor | None = None, block_size: tuple[int, int] | None = None
    ) -> None:
        """Replace the values in place, so that captured CUDA graphs see them; see :meth:`from_kv_b_proj`."""
        check_tensor("weight", weight)
        g = self._geometry
        expected = (g.num_heads * (g.qk_nope_head_dim + g.v_head_dim), g.kv_lora_rank)
        if tuple(weight.shape) != expected:
            raise InvalidInputError(
                f"kv_b_proj.weight must be [H * (d_nope + d_v), d_c] = {list(expected)}, "
                f"got {list(weight.shape)}"
            )
        heads = _dequantize(weight, scale, block_size).view(g.num_heads, -1, g.kv_lora_rank)
        self.w_uk.copy_(heads[:, : g.qk_nope_head_dim])
        self.w_uv.copy_(heads[:, g.qk_nope_head_dim :].transpose(1, 2))

    def absorb_query(self, q_nope: Tensor, out: Tensor | None = None) -> Tensor:
        """q_nope [T, H, d_nope] -> [T, H, d_c]; without ``out`` the result is a strided view.

        Raises:
            InvalidInputError: a shape, or the dtype or device of ``out``, does not fit.
        """
        return _per_head("q_nope", q_nope, self.w_uk, out)

    def project_output(self, o_latent: Tensor, out: Tensor | None = None) -> Tensor:
        """o_latent [T, H, d_c] -> [T, H, d_v]; without ``out`` the result is a strided view.

        Raises:
            InvalidInputError: a shape, or the dtype or device of ``out``, does not fit.
        """
        return _per_head("o_latent", o_latent, self.w_uv, out)


def _per_head(name: str, x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    check_tensor(name, x)
    heads, columns, result_columns = weight.shape
    if x.ndim != 3 or x.shape[1:] != (heads, columns):
        raise InvalidInputError(f"{name} must be [T, {heads}, {columns}], got {list(x.shape)}")
    if x.dtype is not weight.dtype:
        raise InvalidInputError(f"{name} must be {weight.dtype}, as the weight, got {x.dtype}")
    check_one_device(**{name: x}, weight=weight)
    with without_autocast(x.device):
        if out is None:
            return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)
        # Checked first: torch would resize an `out` of another shape, and overwrite memory after a view.
        check_output("out", out, (len(x), heads, result_columns), weight.dtype, weight.device)
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


def _dequantize(weight: Tensor, scale: Tensor | None, block_size: tuple[int, int] | None) -> Tensor:
    """A weight's values: itself if it is not e4m3, else fp32 ``weight * scale``. See ``from_kv_b_proj``."""
    if weight.dtype in FLOAT_DTYPES:
        if scale is not None or block_size is not None:
            raise InvalidInputError(
                f"a {weight.dtype} weight takes no scale and no block_size; only torch.float8_e4m3fn ones do"
            )
        return weight
    if weight.dtype is not torch.float8_e4m3fn:
        raise InvalidInputError(
            f"the weight must be {', '.join(map(str, FLOAT_DTYPES))} or torch.float8_e4m3fn, "
            f"got {weight.dtype}"
        )
    if scale is None:
        raise InvalidInputError("a torch.float8_e4m3fn weight needs its scale (fp32 inverse scale)")
    check_tensor("scale", scale)
    if scale.dtype is not torch.float32:
        raise InvalidInputError(f"scale must be torch.float32, got {scale.dtype}")
    check_one_device(weight=weight, scale=scale)
    rows, columns = weight.shape
    if block_size is None:
        if scale.numel() != 1:
            raise InvalidInputError(f"a scale of shape {list(scale.shape)} needs block_size, e.g. (128, 128)")
        return weight.float() * scale.reshape(())
    if not isinstance(block_size, (tuple, list)) or len(block_size) != 2:
        raise InvalidInputError(f"block_size must be a pair, such as (128, 128), got {block_size!r}")
    for size in block_size:
        check_int("each of block_size", size)
    expected = [-(-rows // block_size[0]), -(-columns // block_size[1])]
    if list(scale.shape) != expected:
        raise InvalidInputError(
            f"scale must be {expected} for a {list(weight.shape)} weight in blocks of {block_size}, "
            f"got {list(scale.shape)}"
        )
    per_row = scale.repeat_interleave(block_size[0], 0)[:rows]
    return weight.float() * per_row.repeat_interleave(block_size[1], 1)[:, :columns]
