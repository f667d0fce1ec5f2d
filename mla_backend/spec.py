"""The specification of a decoder, and the interface of its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mla_backend.batch import DecodeBatch, TableKind
from mla_backend.cache_format import CacheFormat, cache_format, check_float
from mla_backend.checks import check_int, check_positive, convert_integers
from mla_backend.errors import InvalidInputError

_SIZES = ("num_heads", "kv_lora_rank", "page_size", "max_batch", "max_query_len")


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The arguments of a decoder; :class:`mla_backend.MLADecoder` describes the fields."""

    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype | str
    page_size: int
    table_kind: TableKind
    device: torch.device
    max_batch: int
    max_query_len: int
    batch_invariant: bool
    num_ctas: int | None = None

    def __post_init__(self) -> None:
        convert_integers(self, *_SIZES, "qk_rope_head_dim", "num_ctas")

    @property
    def kv_format(self) -> CacheFormat:
        """The format that ``kv_dtype`` means."""
        return cache_format(self.kv_dtype)

    def check(self) -> None:
        """Check every field separately.

        Raises:
            InvalidInputError: says which field is wrong and what it should be.
        """
        check_positive(self, *_SIZES, *(["num_ctas"] if self.num_ctas is not None else []))
        check_int("qk_rope_head_dim", self.qk_rope_head_dim, least=0)
        check_float("dtype", self.dtype)
        self.kv_format.row_width(self.kv_lora_rank, self.qk_rope_head_dim)
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
        kv_scale: Tensor | None = None,
        lists: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Write out [T, H, d_c] and lse [T, H] (fp32).

        ``kv_scale``: None if the format takes none. ``lists``: this layer's lists (``table`` of
        `MLADecoder.run`); None unless the spec's table_kind is LIST. ``sinks``: fp32 [H], or None.
        """
