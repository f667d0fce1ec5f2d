"""The folders of built kernels: where they are, which of their entries are valid, who builds in them.

An entry is a folder `<name>-<key>-nvcc<version>-glibc<version>` with the source, `kernel.so` and `build.log`
(the command and the compiler's output). A build writes to a scratch folder and then renames it, so an entry
that has a `kernel.so` is complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from mla_backend import settings
from mla_backend.errors import KernelBuildError
from mla_backend.jit.toolchain import (
    ChosenCompilerError,
    Toolchain,
    driver_serves,
    find_toolchain,
    glibc_serves,
    glibc_version,
    why_not_served,
)
from mla_backend.jit.variant import KernelVariant

WHEEL_PACKAGE = "mla_backend_kernels"
"""The package in a wheel of kernels (`mla-backend build --wheel` makes it). Its folders are entries."""

LIBRARY = "kernel.so"
LOG = "build.log"
_KEY_AND_VERSIONS = re.compile(r"([0-9a-f]+)-nvcc(\d+(?:\.\d+)*)-glibc(\d+(?:\.\d+)*)")
_SCRATCH = ".building-"
_LOCK = ".lock"
_SCRATCH_SECONDS = 24 * 3600  # no build takes that long
_SILENT_SECONDS, _POLL_SECONDS = 1.0, 0.1
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

logger = logging.getLogger("mla_backend.jit")


def cache_dir() -> Path:
    """The folder of built kernels: MLA_BACKEND_CACHE, or `mla_backend` in the user's cache folder.

    Raises:
        KernelBuildError: the user has no home folder that it could be in.
    """
    try:
        if path := os.environ.get("MLA_BACKEND_CACHE"):
            return Path(path).expanduser().absolute()
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return caches.absolute() / "mla_backend"
    except RuntimeError as error:
        raise KernelBuildError(
            f"there is no folder to cache kernels in: {str(error).rstrip('.')}; "
            "remedy: set MLA_BACKEND_CACHE to a writable folder"
        ) from error


def prebuilt_dir() -> Path:
    """The folder of kernels inside the package (`mla-backend build --prebuilt` fills it)."""
    return Path(__file__).resolve().parents[1] / "prebuilt"


def shipped_dirs() -> list[Path]:
    """The folders of kernels that were installed: that of the package, and that of a wheel of kernels."""
    wheel = importlib.util.find_spec(WHEEL_PACKAGE)
    return [prebuilt_dir(), *map(Path, (wheel and wheel.submodule_search_locations) or ())]


def find_entry(variant: KernelVariant) -> Path | None:
    """The variant's entry, if it is shipped with the package, in a wheel of kernels, or cached.

    A shipped entry is valid with any compiler. A cached one must come from the installed compiler, so that an
    update of the toolkit takes effect. If nothing can be built, for lack of a compiler or because
    MLA_BACKEND_JIT=0 forbids it, any cached entry is valid; but none is if MLA_BACKEND_NVCC names a compiler
    that cannot be used, so that a build says why. An entry is never valid if its toolkit has a
    newer major version than the driver, or if it comes from a system with a newer C library.

    Raises:
        InvalidInputError: MLA_BACKEND_JIT is neither 0 nor 1.
    """
    for folder in shipped_dirs():
        if shipped := _newest(folder, variant):
            return shipped
    try:
        store = cache_dir()
    except KernelBuildError:
        return None
    if not settings.is_on("MLA_BACKEND_JIT"):
        return _newest(store, variant)
    try:
        toolchain = find_toolchain()
    except ChosenCompilerError:
        return None
    except KernelBuildError:
        return _newest(store, variant)
    return _newest(store, variant, toolchain.version)


def entry_of(store: Path, variant: KernelVariant, toolchain: Toolchain) -> Path:
    """The path, in a folder, of the entry that a compiler makes of a variant on this system."""
    return store / f"{variant.name}-{variant.key()}-nvcc{toolchain.version}-glibc{glibc_version()}"


def is_complete(entry: Path) -> bool:
    """Whether an entry has its kernel. False also if the folder cannot be read."""
    return os.path.isfile(entry / LIBRARY)  # unlike Path.is_file, it raises nothing


def _entries(
    store: Path, variant: KernelVariant, key: str = "*", toolkit: str = "*"
) -> Iterator[tuple[Path, str, str, str]]:
    """The complete entries of a variant's name, if the folder can be read.

    Yields:
        entry, key, and the versions of the toolkit and of glibc that it was built with.
    """
    entries: list[Path] = []
    with contextlib.suppress(OSError):
        entries += store.glob(f"{variant.name}-{key}-nvcc{toolkit}-glibc*")
    for entry in entries:
        named = _KEY_AND_VERSIONS.fullmatch(entry.name.removeprefix(f"{variant.name}-"))
        if named and is_complete(entry):
            yield entry, named[1], named[2], named[3]


def _newest(store: Path, variant: KernelVariant, toolkit: str = "*") -> Path | None:
    """Of the variant's entries that can be loaded here, the one from the newest toolkit; None if none can."""
    usable = {
        entry: (Version(nvcc), Version(glibc))
        for entry, _, nvcc, glibc in _entries(store, variant, variant.key(), toolkit)
        if driver_serves(nvcc) and glibc_serves(glibc)
    }
    return max(usable, key=lambda entry: usable[entry], default=None)


@dataclass(frozen=True)
class StoredKernel:
    """An entry of a folder, for those who look after it.

    Attributes:
        entry: its folder.
        name: the name of its variant.
        toolkit: the version of the nvcc that built it.
        num_bytes: of all its files.
        why_unused: why nothing here loads it any more; None if something may.
    """

    entry: Path
    name: str
    toolkit: str
    num_bytes: int
    why_unused: str | None


def stored_kernels(store: Path, known: Iterable[KernelVariant]) -> list[StoredKernel]:
    """The complete entries of a folder.

    Args:
        store: the folder.
        known: variants of this version. Entries with the name of one of them are of another version if their
            keys differ; entries with other names may be in use.
    """
    keys: dict[str, set[str]] = {}
    for variant in known:
        keys.setdefault(variant.name, set()).add(variant.key())
    try:
        own = find_toolchain().version if settings.is_on("MLA_BACKEND_JIT") else None
    except KernelBuildError:
        own = None  # kernels of any compiler are used
    found = []
    for entry in sorted(store.glob("*-nvcc*-glibc*")):
        name = entry.name.rpartition("-nvcc")[0].rpartition("-")[0]
        named = _KEY_AND_VERSIONS.fullmatch(entry.name.removeprefix(f"{name}-"))
        if named is None or not is_complete(entry):
            continue
        key, toolkit, _ = named.groups()
        why = None
        if name in keys and key not in keys[name]:
            why = "of another version"
        elif own not in (None, toolkit):
            why = f"of another compiler than {own}"
        size = sum(file.stat().st_size for file in entry.iterdir())
        found.append(StoredKernel(entry, name, toolkit, size, why))
    return found


def why_unfit(variant: KernelVariant) -> str | None:
    """Why the entry that exists for a variant's name cannot be used; call this if `find_entry` finds none.

    None if there is no such entry, or if it only comes from another compiler.
    """
    stores = shipped_dirs()
    with contextlib.suppress(KernelBuildError):  # no home folder
        stores.append(cache_dir())
    for store in stores:
        for entry, key, nvcc, glibc in sorted(_entries(store, variant)):
            if key != variant.key():
                reason = "of other sources, compiler flags or version of apache-tvm-ffi"
            elif refusal := why_not_served(nvcc):
                reason = refusal
            elif not glibc_serves(glibc):
                reason = f"of a system with glibc {glibc}, newer than {glibc_version()} here"
            else:  # from a compiler that is not the installed one
                continue
            return f"{entry} is there, but {reason}"
    return None


def is_writable(store: Path) -> bool:
    """Whether kernels can be built in a folder, which need not exist yet. Does not make it."""
    there = next(path for path in (store, *store.parents) if os.path.exists(path))
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)


def open_store(store: Path) -> Path:
    """Make a folder if necessary, and return it.

    Raises:
        KernelBuildError: the folder cannot be made or written to.
    """
    with store_errors(store):
        if not store.exists():
            store.mkdir(parents=True, exist_ok=True)
            store.chmod(stat.S_IMODE(store.stat().st_mode) & ~stat.S_IWOTH)  # umask 0 is common in containers
            if store == prebuilt_dir():  # for all users of the package
                _let_read(store, store.parent)
        if not store.is_dir():
            raise NotADirectoryError("it is not a folder")
        if not os.access(store, os.W_OK | os.X_OK):
            raise PermissionError("the folder is not writable")
        # In this order: another process may just be making it.
        if os.path.exists(lock := store / _LOCK) and not os.access(lock, os.W_OK):
            raise PermissionError(
                f"{_LOCK} is not writable: whoever made it may let others (chmod g+w {lock})"
            )
    return store


@contextlib.contextmanager
def store_errors(store: Path) -> Iterator[None]:
    """Turns an OSError into a KernelBuildError that names the folder and a remedy."""
    try:
        yield
    except OSError as error:
        if store == prebuilt_dir():
            remedy = "build as a user who may write to the package, on a disk with space left"
        else:
            remedy = (
                "set MLA_BACKEND_CACHE to a writable folder with space left, or MLA_BACKEND_JIT=0 to use "
                "kernels of another compiler that are there"
            )
        raise KernelBuildError(f"kernels cannot be built in {store}: {error}; remedy: {remedy}") from error


@contextlib.contextmanager
def locked(store: Path, is_done: Callable[[], bool]) -> Iterator[None]:
    """Let one process at a time build in a folder. Others wait until it has ended, or until ``is_done``.

    The system releases the lock of a process that dies. On a file system without locks nobody waits, and
    `publish` keeps the entry that is finished first.
    """
    descriptor = os.open(store / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # Whoever may write to the folder may take the lock, whatever the umask of the user who made the file.
        with contextlib.suppress(PermissionError):  # another user made it
            os.fchmod(descriptor, 0o644 | store.stat().st_mode & 0o022)
        begin, is_told = time.monotonic(), False
        while not _take_lock(descriptor) and not is_done():
            if not is_told and time.monotonic() - begin > _SILENT_SECONDS:
                logger.warning("waiting for another process that builds kernels in %s", store)
                is_told = True
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        # Closing is not enough: a process that was forked in the meantime has the descriptor, too.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _take_lock(descriptor: int) -> bool:
    """Whether the lock is ours now, or cannot be anybody's."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


@contextlib.contextmanager
def scratch_folder(store: Path) -> Iterator[Path]:
    """Make a folder to build in, inside `store`, whose lock must be held. Removes those of dead builders."""
    for folder in store.glob(f"{_SCRATCH}*"):
        if _is_left_over(folder):
            shutil.rmtree(folder, ignore_errors=True)
    prefix = f"{_SCRATCH}{socket.gethostname()}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=store) as folder_name:
        yield Path(folder_name)


def _is_left_over(folder: Path) -> bool:
    """Whether the builder of a scratch folder has died: its process on this host has, or the folder is old.

    A builder may run on another host, because locks of some network file systems do not reach other hosts.
    """
    host, _, pid = folder.name.removeprefix(_SCRATCH).rpartition("-")[0].rpartition("-")
    try:
        if host == socket.gethostname() and pid.isdigit():
            os.kill(int(pid), 0)
        return time.time() - folder.stat().st_mtime > _SCRATCH_SECONDS
    except ProcessLookupError:
        return True
    except OSError:  # another user's process, or a folder that is gone by now
        return False


def _let_read(path: Path, like: Path) -> None:
    """Give a file or a folder the read permissions of ``like``; nobody but owner and group may write it."""
    mode = path.stat().st_mode | like.stat().st_mode & (0o055 if path.is_dir() else 0o044)
    path.chmod(stat.S_IMODE(mode) & ~stat.S_IWOTH)


def publish(folder: Path, entry: Path) -> None:
    """Rename a finished folder to an entry. Keeps a complete entry that another host has published."""
    for path in (folder, *folder.iterdir()):
        _let_read(path, entry.parent)
    with open(folder / LIBRARY, "rb") as library:  # complete on disk before the rename makes it visible
        os.fsync(library.fileno())
    if not is_complete(entry):
        shutil.rmtree(entry, ignore_errors=True)
    try:
        os.rename(folder, entry)
    except OSError:
        if not is_complete(entry):
            raise
