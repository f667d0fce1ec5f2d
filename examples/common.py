"""What the examples share: the model they take by default, and the report of who did the work."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from mla_backend import counters

DEFAULT_MODEL = Path(__file__).parents[1] / ".checkpoints" / "deepseek-v2-small"


def model_path(model: str | None) -> str:
    """The model asked for, or else a small local checkpoint, made at its first use."""
    if model is not None:
        return model
    if not (DEFAULT_MODEL / "model.safetensors").exists():
        from make_checkpoint import make_checkpoint

        make_checkpoint(str(DEFAULT_MODEL))
    return str(DEFAULT_MODEL)


def count_engine_calls() -> str:
    """Have every engine process that starts from here count its calls in a folder, which is returned."""
    folder = tempfile.mkdtemp(prefix="mla-backend-counters-")
    os.environ[counters.ENVIRONMENT_VARIABLE] = folder
    return folder


def report(counters_folder: str, asked_for: str, num_tokens: int, seconds: float) -> str:
    """One line: the backend that attended (by its counters, not by what was asked for) and its speed."""
    counts = counters.read_folder(counters_folder)
    work = ", ".join(f"{path} {count.tokens}" for path, count in counts.items() if count.calls)
    speed = f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s"
    if not work:
        return f"Attention backend: {asked_for} (MLA_BACKEND did not run). {speed}."
    return f"Attention backend: MLA_BACKEND. {speed}. Tokens x layers by path: {work}."
