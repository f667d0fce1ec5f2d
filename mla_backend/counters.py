"""How often each attention path ran, and on how many query tokens.

Engines run attention in child processes and kill them without notice. If the environment variable
MLA_BACKEND_COUNTERS names a folder, each process therefore keeps its counts in a memory-mapped file in that
folder, `<host>-<process>-<random>.counts`. Any process can read them at any time, also after the process that
wrote them was killed.

Only calls from Python are counted. A captured CUDA graph counts once, when it is captured.

:mod:`mla_backend.metrics` has the tokens for Prometheus as well.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from mla_backend import metrics
from mla_backend.errors import InvalidInputError

AttentionPath = Literal["absorbed_decode", "absorbed_extend", "vanilla_prefill", "sparse"]
PATHS: tuple[str, ...] = get_args(AttentionPath)

ENVIRONMENT_VARIABLE = "MLA_BACKEND_COUNTERS"
_NUM_BYTES = len(PATHS) * 2 * 8  # calls and tokens of each path, int64

_cells: memoryview | None = None


class Count(NamedTuple):
    """Calls of one path, and the query tokens that they served; each layer adds its own."""

    calls: int
    tokens: int


def _open_cells() -> memoryview:
    folder = os.environ.get(ENVIRONMENT_VARIABLE)
    if not folder:
        return memoryview(bytearray(_NUM_BYTES)).cast("q")
    # Containers may share a folder and have the same process numbers, so a random part makes names unique.
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.counts"
    try:
        path = Path(folder).expanduser() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x+b") as file:
            # Reserve the space now: on a full disk, a write to the mapped memory would kill the process.
            os.posix_fallocate(file.fileno(), 0, _NUM_BYTES)
            return memoryview(mmap.mmap(file.fileno(), _NUM_BYTES)).cast("q")
    except (OSError, RuntimeError) as error:
        raise InvalidInputError(
            f"{ENVIRONMENT_VARIABLE}={folder}: no file can be written there ({error}); name a writable "
            "folder, or unset the variable"
        ) from error


def open_file() -> None:
    """Open this process's file, if MLA_BACKEND_COUNTERS names a folder; else `add` does so at its first call.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    global _cells
    if _cells is None:
        _cells = _open_cells()


def _forget_cells() -> None:
    global _cells
    _cells = None


os.register_at_fork(after_in_child=_forget_cells)  # a child counts in its own file


def _decode(cells: memoryview) -> dict[str, Count]:
    return {path: Count(cells[2 * i], cells[2 * i + 1]) for i, path in enumerate(PATHS)}


def add(path: AttentionPath, tokens: int, *, kernel: str = "", cache_format: str = "") -> None:
    """Count one call.

    Args:
        path: what was called.
        tokens: the number of query tokens that it served.
        kernel: what attended: a decoder's implementation, or the library of a vanilla prefill. Empty if
            that is unknown; so is ``cache_format``.
        cache_format: the name of the latent cache's format.
    """
    metrics.count_tokens(path, tokens, kernel, cache_format)
    open_file()
    assert _cells is not None
    i = 2 * PATHS.index(path)
    _cells[i] += 1
    _cells[i + 1] += tokens


def snapshot() -> dict[str, Count]:
    """The counts of this process so far."""
    return _decode(_cells if _cells is not None else memoryview(bytes(_NUM_BYTES)).cast("q"))


def read_folder(folder: str | os.PathLike[str]) -> dict[str, Count]:
    """The counts of all processes that ran with MLA_BACKEND_COUNTERS=`folder`, added up."""
    total = dict.fromkeys(PATHS, Count(0, 0))
    for file in Path(folder).glob("*.counts"):
        counts = file.read_bytes()
        if len(counts) < _NUM_BYTES:
            continue  # its process is still creating it
        for path, count in _decode(memoryview(counts).cast("q")).items():
            total[path] = Count(total[path].calls + count.calls, total[path].tokens + count.tokens)
    return total
