"""The specification of a decoder, its plans and calls, and the interface of its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_backend.batch import DecodeBatch, TableKind
from mla_backend.cache_format import E4M3, CacheFormat, cache_format, check_float
from mla_backend.checks import check_int, check_positive, convert_integers
from mla_backend.errors import InvalidInputError

_SIZES = ("num_heads", "kv_lora_rank", "page_size", "max_batch", "max_query_len")


PRODUCTS = ("exact", "fp8")
"""How exact a decoder's products are; :class:`mla_backend.MLADecoder` describes them."""


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
    products: str = "exact"

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
        if self.products not in PRODUCTS:
            raise InvalidInputError(
                f"unknown products {self.products!r}: use {' or '.join(map(repr, PRODUCTS))}"
            )
        if self.products == "fp8" and self.kv_format is not E4M3:
            raise InvalidInputError(
                f"products='fp8' multiplies fp8_e4m3 caches, not {self.kv_format.described}: "
                "pass kv_dtype='fp8_e4m3', or products='exact'"
            )
        if not isinstance(self.table_kind, TableKind):
            raise InvalidInputError(f"table_kind must be a TableKind, got {self.table_kind!r}")
        if self.table_kind is TableKind.LIST and self.max_query_len != 1:
            raise InvalidInputError(
                "with lists (TableKind.LIST) each query token is a request of its own: "
                f"max_query_len must be 1, got {self.max_query_len}"
            )


class DecodeCall(NamedTuple):
    """The arguments of `MLADecoder.run`, which describes them, once it has checked them and allocated what it
    returns."""

    q_nope: Tensor
    q_rope: Tensor
    latent_cache: Tensor
    softmax_scale: float
    causal: bool
    kv_scale: Tensor | None
    lists: Tensor | None
    """This layer's lists (``table`` of ``run``); None unless the spec's table_kind is LIST."""
    out: Tensor
    lse: Tensor
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """The receipt for a step that a decoder has planned. The plan itself lies in the decoder's workspace, so
    the receipt is valid until the decoder plans again (:attr:`MLADecoder.current_plan`).

    Attributes:
        batch: the planned batch.
        state: what else the implementation's ``run`` needs.
    """

    batch: DecodeBatch
    state: Any


class Implementation(Protocol):
    """One way to run absorbed attention, constructed from a :class:`DecoderSpec` that it supports.

    A decoder calls ``plan`` once per step and ``run`` once per layer, with arguments that it has checked.
    """

    name: str

    def plan(self, batch: DecodeBatch) -> DecodePlan:
        """Prepare a step."""

    def run(self, call: DecodeCall, plan: DecodePlan) -> None:
        """Write ``out`` and ``lse`` of the call."""
