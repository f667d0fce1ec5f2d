"""SGLang on mla_backend: ``--attention-backend mla_backend``.

SGLang calls :func:`register` through its entry point group ``sglang.srt.plugins``, in every one of its
processes and before it parses its arguments. Everything that needs the model's code is imported later, in the
workers alone.
"""

from __future__ import annotations

import sys
from typing import Any

NAME = "mla_backend"


def register() -> None:
    """Make ``mla_backend`` an attention backend of this SGLang process.

    SGLang only logs what a plugin raises, before its logging is set up, and the user is left with "invalid
    choice". So a registration that fails says why on stderr.
    """
    try:
        from mla_backend_sglang.registration import register_choices

        register_choices(NAME, create_backend)
    except Exception as error:
        print(
            f"mla_backend: could not register with SGLang, --attention-backend {NAME} will not be known: "
            f"{type(error).__name__}: {error}",
            file=sys.stderr,
            flush=True,
        )
        raise


def describe() -> list[str]:
    """For `mla-backend doctor`: how SGLang comes to use this backend."""
    return [f"chosen by --attention-backend {NAME}"]


def create_backend(runner: Any) -> Any:
    """The backend of one SGLang ``ModelRunner``, whose weights are loaded and whose KV pool exists.

    Raises:
        UnsupportedError: the model, cache or mode is not served; says which and what to do.
    """
    from mla_backend_sglang.backend import MLABackend
    from mla_backend_sglang.registration import register_model_side

    register_model_side(NAME)
    return MLABackend(runner)
