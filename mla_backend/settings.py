"""The environment variables that this package reads, and functions that read its switches."""

from __future__ import annotations

import os

from mla_backend.errors import InvalidInputError

SWITCHES = {
    "MLA_BACKEND_AROUND_ATTENTION": True,
    "MLA_BACKEND_DEBUG": False,
    "MLA_BACKEND_DEFAULT": False,
    "MLA_BACKEND_DSA": False,
    "MLA_BACKEND_JIT": True,
}
"""The variables that are 0 or 1, with what they are if unset. docs/jit.md says what each means."""

VARIABLES = (*SWITCHES, "MLA_BACKEND_CACHE", "MLA_BACKEND_COUNTERS", "MLA_BACKEND_NVCC", "MLA_BACKEND_RATES")


def unknown() -> list[str]:
    """Variables of the environment that look like this package's, but are not."""
    return sorted(name for name in os.environ if name.startswith("MLA_BACKEND_") and name not in VARIABLES)


def is_on(switch: str) -> bool:
    """Whether one of `SWITCHES` is on. An empty value counts as unset, as for all variables here.

    Raises:
        InvalidInputError: its value is neither 0 nor 1.
    """
    value = os.environ.get(switch)
    if not value:
        return SWITCHES[switch]
    if value not in ("0", "1"):
        raise InvalidInputError(f"{switch} must be 0 or 1, not {value!r}")
    return value == "1"
