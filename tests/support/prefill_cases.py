"""Random problems of vanilla attention, with NaN wherever nothing may be read, and their fp64 answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.bfloat16: 3e-3, torch.float16: 5e-4}
"""Of the relative L2 error."""


class PrefillCase:
    """Ragged requests of [query_len, kv_len] tokens; keys and values are parts of wider tensors.

    Tokens that belong to no request, before, between and behind them in memory, are NaN.
    """

    def __init__(
        self,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        d_qk: int,
        d_v: int,
        *,
        heads: int = 2,
        kv_heads: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        seed: int = 0,
        scale: float | None = None,
    ):
        generator = torch.Generator(device).manual_seed(seed)
        kv_heads = kv_heads or heads
        self.query_lens, self.kv_lens, self.max_q = list(query_lens), list(kv_lens), max(query_lens)
        self.scale = d_qk**-0.5 if scale is None else scale

        def random(tokens: int, num_heads: int, width: int) -> Tensor:
            """[tokens, num_heads, width], each row followed by 8 elements and the last by 70 rows of NaN."""
            wide = torch.randn(tokens + 70, num_heads, width + 8, device=device, generator=generator)
            wide[tokens:] = float("nan")
            wide[..., width:] = float("nan")
            return wide.to(dtype)[:tokens, :, :width]

        self.q = random(sum(query_lens), heads, d_qk)
        self.k = random(sum(kv_lens), kv_heads, d_qk)
        self.v = random(sum(kv_lens), kv_heads, d_v)
        starts = [torch.tensor([0, *accumulate(lens)], dtype=torch.int32) for lens in (query_lens, kv_lens)]
        self.starts_q, self.starts_k = (tensor.to(device) for tensor in starts)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As `mla_backend.kernels.prefill.attend` takes them, up to the scale."""
        offsets = (self.starts_q, self.starts_k, self.max_q, max(self.kv_lens))
        return (self.q, self.k, self.v, *offsets, self.scale)

    def run(self, module: Any, causal: bool, head_group: int = 1) -> tuple[Tensor, Tensor]:
        """out and lse of a kernel's module; what it does not write is NaN."""
        out = self.q.new_full((*self.q.shape[:2], self.v.shape[2]), float("nan"))
        lse = torch.full(self.q.shape[:2], float("nan"), device=self.q.device)
        tensors = (self.q, self.k, self.v, self.starts_q, self.starts_k, out, lse)
        module.prefill(*tensors, self.max_q, self.scale, causal, head_group)
        return out, lse

    def expected(self, causal: bool) -> tuple[Tensor, Tensor]:
        """out and lse in fp64."""
        group = self.q.shape[1] // self.k.shape[1]
        requests = zip(
            self.q.split(self.query_lens),
            self.k.repeat_interleave(group, 1).split(self.kv_lens),
            self.v.repeat_interleave(group, 1).split(self.kv_lens),
            strict=True,
        )
        outs, lses = zip(*(self._attend(*request, causal) for request in requests), strict=True)
        return torch.cat(outs), torch.cat(lses)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("qhd,khd->qhk", q.double(), k.double()) * self.scale
        if causal:
            limit = len(k) - len(q) + 1 + torch.arange(len(q), device=q.device)
            hidden = torch.arange(len(k), device=q.device) >= limit[:, None]
            scores.masked_fill_(hidden[:, None], float("-inf"))
        lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
        return torch.einsum("qhk,khd->qhd", weights, v.double()), lse

    def check(self, attend: Callable[[bool], tuple[Tensor, Tensor]], causal: bool) -> None:
        """Compare what ``attend(causal)`` returns with fp64."""
        (out, lse), (expected_out, expected_lse) = attend(causal), self.expected(causal)
        assert not out.isnan().any() and not lse.isnan().any()
        error = (out.double() - expected_out).norm() / expected_out.norm().clamp_min(1e-30)
        assert error <= TOLERANCE[out.dtype], float(error)
        empty = expected_lse.isinf()
        assert torch.equal(lse.isinf(), empty) and (lse[empty] < 0).all() and (out[empty] == 0).all()
        torch.testing.assert_close(lse[~empty].double(), expected_lse[~empty], rtol=1e-6, atol=2e-5)
