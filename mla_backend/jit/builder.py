"""Looks a variant up, or builds it: once per machine, whatever number of processes asks at the same moment.

An entry is a folder `<name>-<key>-nvcc<version>` that holds the source, `kernel.so` and `build.log`
(the command and all that the compiler said). It is written under another name and then renamed, so an
entry that exists is complete.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from mla_backend.errors import KernelBuildError
from mla_backend.jit.report import CompileReport, parse
from mla_backend.jit.toolchain import Toolchain, find_toolchain
from mla_backend.jit.variant import STANDARD_FLAGS, KernelVariant, csrc_dir

if TYPE_CHECKING:
    import tvm_ffi

LIBRARY = "kernel.so"
LOG = "build.log"
_LOG_TAIL_LINES = 30

_loaded: dict[KernelVariant, tvm_ffi.Module] = {}
_load_lock = threading.Lock()


def cache_dir() -> Path:
    """Where built kernels are kept: MLA_BACKEND_CACHE, or `mla_backend` in the user's cache folder."""
    if path := os.environ.get("MLA_BACKEND_CACHE"):
        return Path(path).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mla_backend"


def prebuilt_dir() -> Path:
    """Where kernels that travel inside the package lie (`mla-backend build --prebuilt` fills it)."""
    return Path(__file__).resolve().parents[1] / "prebuilt"


def load(variant: KernelVariant) -> tvm_ffi.Module:
    """Return the variant's module, building it if it was never built here.

    The module's functions take torch tensors without copies and run on torch's current stream.

    Raises:
        KernelBuildError: there is no compiler, compilation failed, or MLA_BACKEND_JIT=0 forbids it.
    """
    with _load_lock:
        if variant not in _loaded:
            entry = find_entry(variant) or _build(variant, cache_dir())
            import tvm_ffi  # imports torch's CUDA parts: not before a kernel is really wanted

            _loaded[variant] = tvm_ffi.load_module(str(entry / LIBRARY))
        return _loaded[variant]


def compile_report(variant: KernelVariant) -> CompileReport:
    """Registers, spills, stack and warnings of the variant's kernels, as built for `load`.

    Raises:
        KernelBuildError: as `load`.
    """
    entry = find_entry(variant) or _build(variant, cache_dir())
    return parse((entry / LOG).read_text())


@dataclass(frozen=True)
class BuildResult:
    """How one variant of `build` went: built in `seconds`, found there (`cached`), or failed (`error`)."""

    variant: KernelVariant
    seconds: float
    cached: bool = False
    error: KernelBuildError | None = None


def build(
    variants: Iterable[KernelVariant],
    jobs: int | None = None,
    on_done: Callable[[BuildResult], None] = lambda result: None,
    prebuilt: bool = False,
) -> list[BuildResult]:
    """Build variants ahead of time, `jobs` at once (default: the number of CPUs).

    `on_done` is called in the caller's thread as each one finishes. Entries go to the user's cache, or with
    `prebuilt` to `prebuilt_dir()`. A failure ends its own variant only: see `BuildResult.error`.
    """

    def one(variant: KernelVariant) -> BuildResult:
        start = time.monotonic()
        try:
            entry = find_entry(variant)
            if entry and (entry.parent == prebuilt_dir() or not prebuilt):
                return BuildResult(variant, time.monotonic() - start, cached=True)
            _build(variant, prebuilt_dir() if prebuilt else cache_dir())
        except KernelBuildError as error:
            return BuildResult(variant, time.monotonic() - start, error=error)
        return BuildResult(variant, time.monotonic() - start)

    results = []
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        for future in as_completed([pool.submit(one, variant) for variant in variants]):
            results.append(future.result())
            on_done(results[-1])
    return results


def find_entry(variant: KernelVariant) -> Path | None:
    """The variant's entry, if it is shipped with the package or cached.

    A shipped entry serves whatever compiler is installed; a cached one must come from the installed
    compiler, so that an update of the toolkit takes effect. Without a compiler any cached entry serves.
    """
    stem = f"{variant.name}-{variant.key()}-nvcc"
    shipped = _newest(prebuilt_dir(), stem)
    if shipped:
        return shipped
    try:
        toolchain = find_toolchain()
    except KernelBuildError:
        return _newest(cache_dir(), stem)
    entry = cache_dir() / (stem + toolchain.version)
    return entry if entry.is_dir() else None


def _newest(store: Path, stem: str) -> Path | None:
    entries = [path for path in store.glob(f"{stem}*") if path.is_dir()]
    return max(entries, key=lambda path: [int(n) for n in path.name[len(stem) :].split(".")], default=None)


def _build(variant: KernelVariant, store: Path) -> Path:
    """Compile the variant into `store`, return its entry. Of many callers one compiles, the others wait."""
    if os.environ.get("MLA_BACKEND_JIT") == "0":
        raise KernelBuildError(
            f"kernel {variant} is not built yet and MLA_BACKEND_JIT=0 forbids building; looked in "
            f"{prebuilt_dir()} and {cache_dir()}; remedy: run `mla-backend build --arch {variant.arch}` with "
            "the same MLA_BACKEND_CACHE, or unset MLA_BACKEND_JIT"
        )
    try:
        toolchain = find_toolchain()
    except KernelBuildError as error:
        raise KernelBuildError(f"kernel {variant} cannot be built: {error}") from None
    entry = store / f"{variant.name}-{variant.key()}-nvcc{toolchain.version}"
    try:
        store.mkdir(parents=True, exist_ok=True)
        # The system drops the lock of a process that dies; what it left behind is a folder nobody looks at.
        with FileLock(store / f"{entry.name}.lock"):
            if not entry.is_dir():
                with tempfile.TemporaryDirectory(prefix=".building-", dir=store) as scratch:
                    _compile(variant, toolchain, Path(scratch, "entry"))
                    os.rename(Path(scratch, "entry"), entry)
    except OSError as error:
        raise KernelBuildError(
            f"kernel {variant} cannot be built in {store}: {error}; "
            "remedy: set MLA_BACKEND_CACHE to a writable folder with space left"
        ) from error
    return entry


def _compile(variant: KernelVariant, toolchain: Toolchain, entry: Path) -> None:
    entry.mkdir()
    source = entry / f"{variant.name}.cu"
    source.write_text(variant.source)
    command = _command(variant, toolchain, source, entry / LIBRARY)
    start = time.monotonic()
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=entry)
    seconds = time.monotonic() - start
    if process.returncode != 0:
        tail = "\n".join(process.stdout.splitlines()[-_LOG_TAIL_LINES:])
        raise KernelBuildError(
            f"kernel {variant} failed to compile with {toolchain.nvcc} {toolchain.version} "
            f"({toolchain.origin}), exit code {process.returncode}\n"
            f"command: {shlex.join(command)}\n{tail}\n"
            "remedy: if the log names a missing host compiler or header, install it (g++; `mla-backend "
            "doctor` shows the toolkit in use); if it names this package's sources, please report it with "
            "this message"
        )
    (entry / LOG).write_text(f"{shlex.join(command)}\n# {seconds:.1f} s\n{process.stdout}")
    with open(entry / LIBRARY, "rb") as library:  # complete on disk before the rename makes it visible
        os.fsync(library.fileno())


def _command(variant: KernelVariant, toolchain: Toolchain, source: Path, library: Path) -> list[str]:
    from tvm_ffi.libinfo import find_include_path

    return [
        str(toolchain.nvcc),
        f"-gencode=arch=compute_{variant.arch},code=sm_{variant.arch}",
        *STANDARD_FLAGS,
        f"-I{csrc_dir()}",
        f"-isystem={find_include_path()}",
        *toolchain.flags,
        *variant.flags,
        str(source),
        "-o",
        str(library),
    ]
