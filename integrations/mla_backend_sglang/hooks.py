"""Hooks around functions of SGLang, by its ``HookRegistry``, and the check that they are in place."""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from mla_backend.errors import UnsupportedError

logger = logging.getLogger(__name__)

_REMEDY = "use a supported version, or another --attention-backend"


@dataclass(frozen=True)
class Hooked:
    """A function of SGLang for which a hook is registered."""

    original: Any  # None if SGLang has no such function
    otherwise: str | None


registered: dict[str, Hooked] = {}
"""By dotted path."""


def register(target: str, hook: Callable, kind: str, otherwise: str | None = None) -> None:
    """Register a hook around a function or method of SGLang, once in a process.

    Args:
        target: the function's dotted path, in a module that is imported already.
        hook: the hook, see SGLang's ``HookRegistry``.
        kind: the name of a ``HookType``.
        otherwise: the consequence for a user if the hook cannot be applied; None if results would be wrong.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if target in registered:
        return
    registered[target] = Hooked(resolve(target), otherwise)
    if registered[target].original is not None:
        HookRegistry.register(target, hook, HookType[kind])


def apply() -> None:
    """Apply all registered hooks, and check that they are in place.

    ``HookRegistry`` only logs a hook that it could not apply. It also skips a function that it has already
    hooked for another plugin. So the functions themselves are checked.

    Raises:
        UnsupportedError: a hook that results depend on is not in place.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    for target, hooked in registered.items():
        if hooked.original is not None and resolve(target) is not hooked.original:
            continue
        problem = f"mla_backend could not hook {target} in this version of SGLang"
        if hooked.otherwise is None:
            raise UnsupportedError(f"{problem}: {_REMEDY}")
        logger.warning("%s: %s", problem, hooked.otherwise)


def require(target: str) -> None:
    """Raises UnsupportedError if SGLang has no function with this dotted path."""
    if resolve(target) is None:
        raise mismatch(f"it has no {target}")


def require_parameters(target: str, names: Collection[str]) -> None:
    """Raises UnsupportedError if a function of SGLang lacks one of these parameters.

    Args:
        target: the function's dotted path.
        names: the parameters that a hook takes by name.
    """
    require(target)
    parameters = inspect.signature(inspect.unwrap(resolve(target))).parameters
    if missing := sorted(set(names) - parameters.keys()):
        raise mismatch(f"{target} has no parameter {', '.join(missing)}")


def mismatch(problem: str) -> UnsupportedError:
    """The error for a version of SGLang that is not as this backend expects."""
    return UnsupportedError(f"mla_backend does not fit this version of SGLang: {problem}: {_REMEDY}")


def resolve(target: str) -> Any:
    """The object with this dotted path; None if its module or class does not itself define such an object."""
    owner, _, name = target.rpartition(".")
    try:
        return vars(pkgutil.resolve_name(owner)).get(name)
    except (ImportError, AttributeError):
        return None


def hook_and_check(target: str, hook: Callable) -> None:
    """Hook a method without which results would be wrong.

    Raises:
        UnsupportedError: the hook is not in place.
    """
    require(target)
    register(target, hook, "AROUND")
    apply()
