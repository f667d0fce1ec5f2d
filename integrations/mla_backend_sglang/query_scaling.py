"""Queries that are scaled by their position: ``llama_4_scaling``, as in Mistral's models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mla_backend.checks import is_number
from mla_backend.errors import InvalidInputError, UnsupportedError

_FIELDS = ("beta", "original_max_position_embeddings")


class QueryScaling:
    """Factors 1 + beta * ln(1 + floor(position / original_max_position_embeddings)) on queries.

    SGLang's DeepSeek models compute these factors, but apply them only to absorbed queries that they
    concatenate: neither to those that they pass in two parts, nor in their MHA forward. The backend scales
    these.

    Args:
        beta: how fast the factor grows.
        original_length: the number of positions, from 0, whose factor is 1.
    """

    def __init__(self, beta: float, original_length: float):
        self._beta, self._original_length = beta, original_length
        self._step: Any = None
        self._factors: Tensor | None = None  # of this step

    @classmethod
    def of_config(cls, text_config: Any) -> QueryScaling | None:
        """What a HuggingFace config asks for; None if it scales no queries.

        Raises:
            InvalidInputError: ``llama_4_scaling`` is not as this class expects.
        """
        given = getattr(text_config, "llama_4_scaling", None)
        if not given:
            return None
        values = [given.get(name, 0) for name in _FIELDS] if isinstance(given, Mapping) else []
        if not values or not all(is_number(value) and 0 < value < math.inf for value in values):
            raise InvalidInputError(
                f"llama_4_scaling must have positive numbers {' and '.join(_FIELDS)}, got {given!r}"
            )
        return cls(*values)

    def scale_(self, step: Any, positions: Tensor, *queries: Tensor) -> None:
        """Scale the queries of one layer, in place.

        Args:
            step: what was planned for this step; all layers with the same one share their factors.
            positions: integers [T].
            queries: [T, H, width], of any width.

        Raises:
            UnsupportedError: there are more or fewer positions than query tokens.
        """
        if any(len(query) != len(positions) for query in queries):
            raise UnsupportedError(
                f"mla_backend does not fit this version of SGLang: {len(positions)} positions for "
                f"{len(queries[0])} query tokens: use a supported version, or another --attention-backend"
            )
        if self._step is not step:
            periods = positions.float().div_(self._original_length).floor_()
            self._factors = periods.log1p_().mul_(self._beta).add_(1).view(-1, 1, 1)
            self._step = step
        for query in queries:
            query.mul_(self._factors)
