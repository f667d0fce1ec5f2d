"""Another checkout of this package, measured beside this one in the same process."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from mla_backend.bench.cases import Inputs
from mla_backend.bench.implementations import MlaBackend
from mla_backend.errors import InvalidInputError

_PACKAGE = "mla_backend"


class Checkout:
    """A checkout, whose package is imported under its usual name while :meth:`in_place` lasts.

    Args:
        folder: its top, which holds `mla_backend` and `csrc`.

    Raises:
        InvalidInputError: it is not a checkout of this package.
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
        """The checkout's modules in place of ours: whatever is imported meanwhile comes from it."""
        ours = _take_modules()
        sys.modules.update(self._modules)
        sys.path.insert(0, str(self._folder))
        try:
            package = importlib.import_module(_PACKAGE)
            if not Path(package.__file__).is_relative_to(self._folder):
                raise InvalidInputError(f"{self._folder} was asked for, and {package.__file__} was imported")
            yield package
        finally:
            sys.path.remove(str(self._folder))
            self._modules = _take_modules()
            sys.modules.update(ours)


def _take_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


class Baseline(MlaBackend):
    """The decoder of a checkout."""

    def __init__(self, checkout: Checkout, inputs: Inputs):
        self._checkout = checkout
        self.state = None
        with checkout.in_place() as package:
            batch = inputs.batch
            self._batch = package.DecodeBatch(
                seq_lens=batch.seq_lens,
                table=batch.table,
                page_size=batch.page_size,
                query_start_loc=None,
                max_query_len=batch.max_query_len,
            )
            super().__init__(inputs, package.MLADecoder)

    def plan(self) -> None:
        # Only the first one imports anything; later ones are timed.
        with self._checkout.in_place() if self.state is None else contextlib.nullcontext():
            self.state = self.decoder.plan(self._batch)
