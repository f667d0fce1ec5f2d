"""mla-backend for SGLang: ``--attention-backend mla_backend``.

SGLang calls :func:`register` through its entry point group ``sglang.srt.plugins``, in each of its processes,
before it parses its arguments. Modules that need the model's code are imported later, and only by workers.
"""

from __future__ import annotations

import sys
from typing import Any

from mla_backend_sglang.names import NAME


def register() -> None:
    """Make ``mla_backend`` an attention backend of this SGLang process.

    SGLang only logs an exception of a plugin, and does so before its logging is set up. The user would see
    only "invalid choice", so a registration that fails prints the reason on stderr.
    """
    try:
        from mla_backend_sglang.registration import register_choices

        register_choices(create_backend)
    except Exception as error:
        print(
            f"mla-backend could not register with this SGLang, so --attention-backend {NAME} is not "
            f"available: {type(error).__name__}: {error}",
            file=sys.stderr,
            flush=True,
        )
        raise


def describe() -> list[str]:
    """For `mla-backend doctor`: when SGLang uses this backend."""
    return [f"selected with --attention-backend {NAME}"]


def create_backend(runner: Any) -> Any:
    """The backend of one SGLang ``ModelRunner`` that has loaded its weights and allocated its KV pool.

    Raises:
        UnsupportedError: the model, cache or mode is not supported; the message names the remedy.
    """
    from mla_backend_sglang import hooks

    try:
        from mla_backend_sglang.attention_backend import SglangMLABackend
        from mla_backend_sglang.registration import register_model_side

        register_model_side()
    except (ImportError, AttributeError) as error:  # a name of SGLang's that is gone
        raise hooks.mismatch(str(error)) from error
    return SglangMLABackend(runner)
