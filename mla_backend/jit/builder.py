"""Builds and loads variants, once per machine even if many processes need them at once."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mla_backend import metrics, settings
from mla_backend.errors import InvalidInputError, KernelBuildError
from mla_backend.jit.report import CompileReport, parse
from mla_backend.jit.store import (
    LIBRARY,
    LOG,
    cache_dir,
    entry_of,
    find_entry,
    is_complete,
    locked,
    open_store,
    prebuilt_dir,
    publish,
    scratch_folder,
    shipped_dirs,
    store_errors,
    why_unfit,
)
from mla_backend.jit.toolchain import Toolchain, find_toolchain
from mla_backend.jit.trust import why_not_trusted
from mla_backend.jit.variant import STANDARD_FLAGS, KernelVariant, csrc_dir

if TYPE_CHECKING:
    import tvm_ffi

_UNFINISHED = "unfinished.so"
_LOG_TAIL_LINES = 30
_PATIENCE_S = 1800  # a kernel compiles in about 10 s, on a busy machine in minutes

# Each compilation writes its log next to its result. The result gets its final name only after the compiler
# has succeeded. The source's modification time says when the compilation began.
_NINJA_RULE = f"""\
rule compile
  command = touch $source && $compiler >> $entry/{LOG} 2>&1 && mv $entry/{_UNFINISHED} $entry/{LIBRARY}
  description = $entry
"""

logger = logging.getLogger("mla_backend.jit")

_loaded: dict[KernelVariant, tvm_ffi.Module] = {}
_load_lock = threading.Lock()


def _replace_lock() -> None:
    global _load_lock
    _load_lock = threading.Lock()


os.register_at_fork(after_in_child=_replace_lock)  # the thread that held it is not in the child


@dataclass(frozen=True)
class BuildResult:
    """The outcome of `build` for one variant.

    Attributes:
        variant: the variant.
        entry: its folder; None if the build failed.
        seconds: duration of the build; 0 if there was none.
        cached: whether the entry existed already.
        error: why the build failed; None if it did not.
    """

    variant: KernelVariant
    entry: Path | None
    seconds: float = 0.0
    cached: bool = False
    error: KernelBuildError | None = None


def load(variant: KernelVariant) -> tvm_ffi.Module:
    """`load_all` for one variant."""
    return load_all([variant])[0]


def load_all(variants: Iterable[KernelVariant]) -> list[tvm_ffi.Module]:
    """Return the variants' modules. Variants that are in no store are built first, in parallel.

    A module's functions take torch tensors without copies and run on torch's current stream.

    Raises:
        KernelBuildError: there is no compiler, compilation failed, MLA_BACKEND_JIT=0 forbids it, or a built
            kernel cannot be loaded.
        InvalidInputError: MLA_BACKEND_JIT is neither 0 nor 1; or a CUDA graph is being captured, and a kernel
            is not loaded yet.
    """
    variants = list(variants)
    if any(variant not in _loaded for variant in variants):  # others need not wait while a thread builds
        with _load_lock:
            _refuse_during_capture(next(variant for variant in variants if variant not in _loaded))
            for variant, entry in prepare(v for v in variants if v not in _loaded).items():
                _loaded[variant] = _load_entry(variant, entry)
    return [_loaded[variant] for variant in variants]


def _refuse_during_capture(variant: KernelVariant) -> None:
    """Loading a module synchronizes, which a capture does not allow, and a build takes long.

    Raises:
        InvalidInputError: a CUDA graph is being captured.
    """
    import torch

    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise InvalidInputError(
            f"kernel {variant} would have to be loaded while a CUDA graph is captured: before that, make "
            "decoders with the largest max_query_len, and make each call that is captured once"
        )


def _load_entry(variant: KernelVariant, entry: Path) -> tvm_ffi.Module:
    import tvm_ffi  # not at the top: it imports torch's CUDA parts

    if why_not := why_not_trusted(entry):
        raise KernelBuildError(f"kernel {variant} is not loaded: {why_not}")
    try:
        return tvm_ffi.load_module(str(entry / LIBRARY))
    except (RuntimeError, OSError) as error:
        raise KernelBuildError(
            f"kernel {variant} cannot be loaded: {error}; remedy: delete the folder {entry}, so that it is "
            "built again; or if files there must not be executed, set MLA_BACKEND_CACHE to another folder"
        ) from error


def prepare(variants: Iterable[KernelVariant]) -> dict[KernelVariant, Path]:
    """Build those variants that are in no store, in parallel, without loading any. Return their entries.

    Raises:
        KernelBuildError, InvalidInputError: as in `load_all`.
    """
    results = build(variants)
    for result in results:
        if result.error:
            raise result.error
    return {result.variant: result.entry for result in results if result.entry}


def why_unavailable(variants: Iterable[KernelVariant]) -> str | None:
    """One line saying why some of these kernels can be neither loaded nor built here; None if all can.

    This is fast and creates no CUDA context, so an engine can call it at its start, before it loads weights.
    It does not foresee compilations that fail.
    """
    try:
        entries = {variant: find_entry(variant) for variant in variants}
        for variant, entry in entries.items():
            if entry is not None and (why_not := why_not_trusted(entry)):
                return f"kernel {variant} is not loaded: {why_not}"
        if missing := [variant for variant, entry in entries.items() if entry is None]:
            _toolchain_for(missing)
            open_store(cache_dir())
    except (KernelBuildError, InvalidInputError) as error:
        return str(error)
    return None


def compile_report(variant: KernelVariant) -> CompileReport:
    """Registers, spills, stack and warnings of the variant's kernels, which are built if necessary.

    Raises:
        KernelBuildError, InvalidInputError: as in `load_all`.
    """
    return parse((prepare([variant])[variant] / LOG).read_text())


def build(
    variants: Iterable[KernelVariant],
    jobs: int | None = None,
    on_done: Callable[[BuildResult], None] = lambda result: None,
    prebuilt: bool = False,
) -> list[BuildResult]:
    """Build variants ahead of time.

    Args:
        variants: the variants to build. Those that have an entry already are not built again.
        jobs: compilations at once; None for ninja's default, a few more than there are CPUs.
        on_done: called for each variant that is done.
        prebuilt: write entries to `prebuilt_dir()`, not to the user's cache.

    Returns:
        One result per variant. A failure affects its own variant only; see `BuildResult.error`.

    Raises:
        InvalidInputError: as in `load_all`.
    """
    results = []

    def done(result: BuildResult) -> None:
        results.append(result)
        on_done(result)

    missing = []
    for variant in dict.fromkeys(variants):
        entry = find_entry(variant)
        if entry and (entry.parent in shipped_dirs() or not prebuilt):
            done(BuildResult(variant, entry, cached=True))
        else:
            missing.append(variant)
    if missing:
        try:
            _build(missing, prebuilt, jobs, done)
        except KernelBuildError as error:  # none of the remaining variants can be built
            known = {result.variant for result in results}
            for variant in (v for v in missing if v not in known):
                done(BuildResult(variant, None, error=error))
    return results


def _toolchain_for(variants: list[KernelVariant]) -> Toolchain:
    """The compiler for variants that are in no store.

    Raises:
        KernelBuildError: they cannot be built; the message has one line.
    """
    what = f"kernel {variants[0]}" + (f" and {len(variants) - 1} more" if len(variants) > 1 else "")
    if not settings.is_on("MLA_BACKEND_JIT"):
        folders = " and ".join(map(str, [*shipped_dirs(), cache_dir()]))
        found = why_unfit(variants[0]) or f"looked in {folders}"
        raise KernelBuildError(
            f"{what} cannot be loaded: not built yet, and MLA_BACKEND_JIT=0 forbids building; {found}; "
            f"remedy: run `mla-backend build --arch {variants[0].arch}` without MLA_BACKEND_JIT=0 and with "
            "the same MLA_BACKEND_CACHE"
        )
    try:
        toolchain = find_toolchain()
        for variant in variants:
            toolchain.check_arch(variant.arch)
    except KernelBuildError as error:
        unfit = why_unfit(variants[0])
        raise KernelBuildError(f"{what} cannot be built: {error}{f'; {unfit}' if unfit else ''}") from None
    return toolchain


def _build(
    variants: list[KernelVariant], prebuilt: bool, jobs: int | None, done: Callable[[BuildResult], None]
) -> None:
    """Compile variants by one run of ninja. One process at a time compiles, others wait."""
    toolchain = _toolchain_for(variants)
    store = prebuilt_dir() if prebuilt else cache_dir()
    entries = {variant: entry_of(store, variant, toolchain) for variant in variants}
    with store_errors(store), locked(open_store(store), lambda: all(map(is_complete, entries.values()))):
        missing = {}
        for variant, entry in entries.items():
            if is_complete(entry):  # another process has built it in the meantime
                done(BuildResult(variant, entry, cached=True))
            else:
                missing[entry.name] = variant
        if missing:
            with scratch_folder(store) as scratch:
                _run_ninja(missing, toolchain, scratch, jobs, done)


def _run_ninja(
    variants: dict[str, KernelVariant],
    toolchain: Toolchain,
    scratch: Path,
    jobs: int | None,
    done: Callable[[BuildResult], None],
) -> None:
    """Compile variants in `scratch` and move each entry next to it. Keys are the entries' names."""
    kernels = f"{len(variants)} kernel{'s' * (len(variants) > 1)}"
    archs = ", ".join(sorted({f"sm_{variant.arch}" for variant in variants.values()}))
    logger.info("building %s for %s, once per machine; `mla-backend build` does this ahead", kernels, archs)
    begin = time.monotonic()
    _write_build_file(variants, toolchain, scratch)
    left, output, num_built = dict(variants), [], 0
    with _start_ninja(scratch, jobs) as process:
        for line in _lines_of(process):
            output.append(line)
            name = line.rpartition(" ")[2].strip()
            if name in left:  # ninja prints an entry's name when its compiler has ended
                result = _finish(left.pop(name), toolchain, scratch / name)
                failed = result.error is not None
                metrics.count_build(result.variant.arch, result.seconds, failed=failed)
                num_built += not failed
                done(result)
    if left:
        raise KernelBuildError(
            f"ninja ended with exit code {process.returncode} before {', '.join(map(str, left.values()))} "
            f"{'were' if len(left) > 1 else 'was'} compiled with {toolchain.nvcc} {toolchain.version}:\n"
            + "".join(output[-_LOG_TAIL_LINES:])
            + "remedy: if the build was killed, use fewer jobs (`mla-backend build -j 1`); if there is no "
            "space left, set MLA_BACKEND_CACHE to a folder with more; if no compiler ended, check that "
            "the file systems of TMPDIR and MLA_BACKEND_CACHE respond"
        )
    seconds = time.monotonic() - begin
    logger.info("compiled %d of %s in %.0f s, into %s", num_built, kernels, seconds, scratch.parent)


def _start_ninja(scratch: Path, jobs: int | None) -> subprocess.Popen[str]:
    import ninja  # only for a build

    command = [str(Path(ninja.BIN_DIR, "ninja")), "-k0", *([f"-j{jobs}"] if jobs else [])]
    environment = os.environ | {"NINJA_STATUS": "[%f/%t] "}
    if not os.access(environment.get("TMPDIR") or "/tmp", os.W_OK | os.X_OK):  # of nvcc's temporary files
        environment["TMPDIR"] = str(scratch)
    try:
        return subprocess.Popen(
            command,
            cwd=scratch,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except OSError as error:
        raise KernelBuildError(
            f"{command[0]} cannot be run: {error}; remedy: pip install --force-reinstall ninja"
        ) from error


def _lines_of(ninja: subprocess.Popen[str]) -> Iterator[str]:
    """The lines that it prints.

    If no compiler ends for `_PATIENCE_S`, ninja is stopped, and ends the compilers. A last line says so.
    """
    assert ninja.stdout
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        ninja.terminate()

    while True:
        timer = threading.Timer(_PATIENCE_S, stop)
        timer.start()
        try:
            line = ninja.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            break
        yield line
    if stopped.is_set():
        yield f"stopped, as no compiler had ended for {_PATIENCE_S} s\n"


def _write_build_file(variants: dict[str, KernelVariant], toolchain: Toolchain, scratch: Path) -> None:
    statements = [_NINJA_RULE]
    for name, variant in variants.items():
        source = f"{name}/{variant.name}.cu"
        command = shlex.join(_command(variant, toolchain, source, f"{name}/{_UNFINISHED}"))
        (scratch / name).mkdir()
        (scratch / source).write_text(variant.source)
        (scratch / name / LOG).write_text(f"{command}\n")
        statements.append(f"build {name}/{LIBRARY}: compile\n  entry = {name}\n  source = {source}\n")
        statements.append("  compiler = " + command.replace("$", "$$") + "\n")
    (scratch / "build.ninja").write_text("".join(statements))


def _finish(variant: KernelVariant, toolchain: Toolchain, folder: Path) -> BuildResult:
    """Turn the folder of a compilation into an entry, or report why the compilation failed."""
    command, *log = (folder / LOG).read_text().splitlines()
    seconds = time.time() - (folder / f"{variant.name}.cu").stat().st_mtime
    if not (folder / LIBRARY).exists():
        tail = "\n".join(log[-_LOG_TAIL_LINES:])
        error = KernelBuildError(
            f"kernel {variant} failed to compile with {toolchain.nvcc} {toolchain.version} "
            f"({toolchain.origin})\ncommand: {command}\n{tail}\n"
            "remedy: if the log names a missing header, install it (`mla-backend doctor` shows the toolkit "
            "in use); if it names the host compiler, check that gcc and g++ work and that TMPDIR has space "
            "left; if there is no space left, set TMPDIR or MLA_BACKEND_CACHE to a folder with more; if the "
            "log names this package's sources, please report it with this message"
        )
        return BuildResult(variant, None, seconds, error=error)
    entry = folder.parents[1] / folder.name
    publish(folder, entry)
    return BuildResult(variant, entry, seconds)


def _command(variant: KernelVariant, toolchain: Toolchain, source: str, library: str) -> list[str]:
    from tvm_ffi.libinfo import find_include_path

    return [
        str(toolchain.nvcc),
        f"-gencode=arch=compute_{variant.arch},code=sm_{variant.arch}",
        *STANDARD_FLAGS,
        f"-I{csrc_dir()}",
        f"-isystem={find_include_path()}",
        *toolchain.flags,
        *variant.all_flags,
        source,
        "-o",
        library,
    ]
