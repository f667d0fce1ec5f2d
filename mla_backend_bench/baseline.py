"""The decoder of another checkout of this package, measured in the same process as this checkout's."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from mla_backend.errors import InvalidInputError
from mla_backend_bench.cases import Inputs
from mla_backend_bench.implementations import MlaBackend

_PACKAGE = "mla_backend"


class Checkout:
    """Another checkout of this package.

    Args:
        folder: its top folder, which holds `mla_backend` and `csrc`.

    Raises:
        InvalidInputError: ``folder`` is not a checkout of this package.
    """

    def __init__(self, folder: Path):
        self._folder = folder.absolute()
        if not (self._folder / _PACKAGE / "__init__.py").is_file():
            raise InvalidInputError(
                f"{folder} is not a checkout of mla-backend: it has no {_PACKAGE}/__init__.py"
            )
        self._modules: dict[str, ModuleType] = {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[ModuleType]:
        """Import this package from the checkout, under its usual name, while the context lasts."""
        ours = _take_modules()
        sys.modules.update(self._modules)
        sys.path.insert(0, str(self._folder))
        try:
            package = importlib.import_module(_PACKAGE)
            if not Path(str(package.__file__)).is_relative_to(self._folder):
                raise InvalidInputError(f"expected to import {self._folder}, not {package.__file__}")
            yield package
        finally:
            sys.path.remove(str(self._folder))
            self._modules = _take_modules()
            sys.modules.update(ours)


def _take_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


class Baseline(MlaBackend):
    """The decoder of another checkout."""

    def __init__(self, checkout: Checkout, inputs: Inputs):
        self._checkout = checkout
        self._planned = False
        with checkout.in_place() as package:
            batch = inputs.batch
            self._batch = package.DecodeBatch(
                seq_lens=batch.seq_lens,
                table=batch.table,
                page_size=batch.page_size,
                query_start_loc=None,
                max_query_len=batch.max_query_len,
            )
            super().__init__(inputs, decoder_class=package.MLADecoder)

    def plan(self) -> None:
        # Only the first plan imports modules. Later plans are timed, so they skip the switch.
        with contextlib.nullcontext() if self._planned else self._checkout.in_place():
            self.state = self.decoder.plan(self._batch)
        self._planned = True
