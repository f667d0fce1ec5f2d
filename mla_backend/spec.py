"""What a decoder is made for, and what an implementation of it provides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mla_backend.batch import DecodeBatch, TableKind
from mla_backend.cache import CACHE_DTYPES, FLOAT_DTYPES
from mla_backend.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """What a decoder is made for; see :class:`mla_backend.MLADecoder` for the fields."""

    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    table_kind: TableKind
    device: torch.device
    max_batch: int
    max_query_len: int
    batch_invariant: bool
    num_ctas: int | None = None

    def check(self) -> None:
        """Check every field on its own.

        Raises:
            InvalidInputError: says which field is wrong and what it should be.
        """
        sizes = ["num_heads", "kv_lora_rank", "qk_rope_head_dim", "page_size", "max_batch", "max_query_len"]
        if self.num_ctas is not None:
            sizes.append("num_ctas")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidInputError(f"{name} must be a positive int, got {value!r}")
        for name, allowed in (("dtype", FLOAT_DTYPES), ("kv_dtype", CACHE_DTYPES)):
            value = getattr(self, name)
            if value not in allowed:
                raise InvalidInputError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value}")
        if not isinstance(self.table_kind, TableKind):
            raise InvalidInputError(f"table_kind must be a TableKind, got {self.table_kind!r}")
        if self.table_kind is TableKind.LIST and self.max_query_len != 1:
            raise InvalidInputError(
                "with lists (TableKind.LIST) each query token is a request of its own: "
                f"max_query_len must be 1, got {self.max_query_len}"
            )


class Implementation(Protocol):
    """One way to run absorbed attention, constructed from a :class:`DecoderSpec` that it supports.

    A decoder calls ``plan`` once per step and ``run`` once per layer, with arguments that it has checked.
    """

    name: str

    def plan(self, batch: DecodeBatch) -> Any:
        """Prepare a step. Returns the ``state`` that ``run`` gets."""

    def run(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent_cache: Tensor,
        state: Any,
        softmax_scale: float,
        causal: bool,
        out: Tensor,
        lse: Tensor,
        lists: Tensor | None = None,
    ) -> None:
        """Write out [T, H, d_c] and lse [T, H] (fp32). ``lists``: this layer's table, with TableKind.LIST."""
