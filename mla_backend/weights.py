"""Absorbed weights: the up-projections of keys and values, folded into the queries and the output.

With ``k_nope = W_UK·c`` and ``v = W_UV·c`` for a latent c, ``q_nope·k_nope = (q_nope·W_UK)·c`` and
``Σ p·v = (Σ p·c)·W_UV``: attention can run on the latents themselves (DeepSeek-V2, arXiv:2405.04434,
section 2.1.2).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mla_backend import costs
from mla_backend.cache_format import FLOAT_DTYPES, check_float
from mla_backend.checks import check_int, check_one_device, check_output, check_tensor
from mla_backend.costs import Cost
from mla_backend.device import without_autocast
from mla_backend.errors import InvalidInputError
from mla_backend.geometry import MLAGeometry


class AbsorbedWeights:
    """W_UK and W_UV, split from ``kv_b_proj`` once at load: the factored form. Its addresses never change.

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


class MergedWeights:
    """The merged form: W_Q·W_UK and W_UV·W_O as single matrices, each rounded once.

    It has more bytes. :func:`mla_backend.weights.preferred_form` says which form is faster: for the
    dimensions of DeepSeek's, Kimi's, GLM's and MiniCPM3's models always the factored one, which engines use.

    Attributes:
        w_q_uk: [q_in, H * d_c], from the query's input (q_lora_rank or hidden_size wide) to absorbed queries.
        w_q_rope: [q_in, H * d_rope], to the rotary part before rotation.
        w_uv_o: [H * d_c, hidden_size], from absorbed outputs to the layer's output.
    """

    def __init__(self, w_q_uk: Tensor, w_q_rope: Tensor, w_uv_o: Tensor, num_heads: int):
        self.w_q_uk = w_q_uk
        self.w_q_rope = w_q_rope
        self.w_uv_o = w_uv_o
        self._num_heads = num_heads

    @classmethod
    @torch.no_grad()
    def from_projections(cls, w_q: Tensor, w_o: Tensor, absorbed: AbsorbedWeights) -> MergedWeights:
        """Merge the projections. Products accumulate in fp32 (in fp64 for fp64 weights) and are rounded once.

        Args:
            w_q: [H * (d_nope + d_rope), q_in], the weight of ``q_b_proj`` (or ``q_proj``), not quantized.
            w_o: [hidden_size, H * d_v], the weight of ``o_proj``, likewise.
            absorbed: the factored form; the result has its dtype.

        Raises:
            InvalidInputError: a shape or a dtype does not fit.
        """
        for name, weight in (("w_q", w_q), ("w_o", w_o)):
            check_tensor(name, weight)
            check_float(name, weight.dtype, ": dequantize it")
        heads, d_nope, d_c = absorbed.w_uk.shape
        d_v = absorbed.w_uv.shape[2]
        d_rope = w_q.shape[0] // heads - d_nope if w_q.ndim == 2 else 0
        if w_q.ndim != 2 or w_q.shape[0] % heads or d_rope < 0:
            raise InvalidInputError(
                f"w_q must be [H * (d_nope + d_rope), q_in] with H = {heads} and d_nope = {d_nope}, "
                f"got {list(w_q.shape)}"
            )
        if w_o.ndim != 2 or w_o.shape[1] != heads * d_v:
            raise InvalidInputError(
                f"w_o must be [hidden_size, H * d_v] = [*, {heads * d_v}], got {list(w_o.shape)}"
            )
        dtype = absorbed.w_uk.dtype
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        w_q_heads = w_q.view(heads, d_nope + d_rope, -1)
        w_q_uk = torch.bmm(w_q_heads[:, :d_nope].transpose(1, 2).to(wide), absorbed.w_uk.to(wide))
        w_o_heads = w_o.view(-1, heads, d_v).permute(1, 2, 0)
        w_uv_o = torch.bmm(absorbed.w_uv.to(wide), w_o_heads.to(wide))
        return cls(
            w_q_uk.transpose(0, 1).reshape(-1, heads * d_c).to(dtype),
            w_q_heads[:, d_nope:].flatten(0, 1).T.to(dtype).contiguous(),
            w_uv_o.flatten(0, 1).to(dtype),
            heads,
        )

    def project_query(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, q_in] -> absorbed queries [T, H, d_c], and rotary parts [T, H, d_rope] before rotation.

        All have the dtype of the weights.

        Raises:
            RuntimeError: torch's own, if the shape, dtype or device of ``x`` does not fit.
        """
        heads, q_rope = self._num_heads, x @ self.w_q_rope
        d_rope = q_rope.shape[1] // heads
        return (x @ self.w_q_uk).unflatten(1, (heads, -1)), q_rope.unflatten(1, (heads, d_rope))

    def project_output(self, o_latent: Tensor) -> Tensor:
        """o_latent [T, H, d_c] -> [T, hidden_size], both in the dtype of the weights.

        Raises:
            RuntimeError: torch's own, if the shape, dtype or device of ``o_latent`` does not fit.
        """
        return o_latent.flatten(1) @ self.w_uv_o


Form = Literal["factored", "merged"]


def absorption_cost(geometry: MLAGeometry, form: Form, num_tokens: int) -> Cost:
    """Bytes and FLOPs of a layer's projections, from the query's input to absorbed queries and from absorbed
    outputs to the layer's output, at ``num_tokens`` tokens per step."""
    g = geometry
    heads = g.num_heads
    if form == "merged":
        query = costs.linear(num_tokens, g.query_input_dim, heads * g.latent_dim)
        return query.plus(costs.linear(num_tokens, heads * g.kv_lora_rank, g.hidden_size))
    query = costs.linear(num_tokens, g.query_input_dim, heads * g.qk_head_dim)
    output = costs.linear(num_tokens, heads * g.v_head_dim, g.hidden_size)
    return query.plus(costs.absorb(g, num_tokens)).plus(output)


def preferred_form(geometry: MLAGeometry, num_tokens: int, *, flops_per_byte: float) -> Form:
    """The absorbed form whose projections take less time at ``num_tokens`` tokens per step.

    Args:
        flops_per_byte: the device's achieved FLOP/s over its achieved bytes/s, of its
            :class:`mla_backend.policy.Rates`.
    """

    def seconds_times_bandwidth(form: Form) -> float:
        cost = absorption_cost(geometry, form, num_tokens)
        return max(cost.bytes, cost.flops / flops_per_byte)

    return "merged" if seconds_times_bandwidth("merged") < seconds_times_bandwidth("factored") else "factored"
