"""A wheel of built kernels, for machines that have no compiler."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import platform
import zipfile
from collections.abc import Iterable
from pathlib import Path

from mla_backend.errors import InvalidInputError
from mla_backend.jit.store import LIBRARY, WHEEL_PACKAGE
from mla_backend.jit.toolchain import glibc_version

_INIT = '"""Kernels of mla-backend, built ahead of time. `mla-backend build --wheel` makes this package."""\n'


def write_wheel(entries: Iterable[Path], folder: Path) -> Path:
    """Write a wheel of these entries, for the installed version of mla-backend and this system's glibc.

    Installed beside mla-backend, its kernels serve as those inside the package do.

    Args:
        entries: folders of built kernels.
        folder: where the wheel is written; made if necessary.

    Returns:
        The wheel's path.

    Raises:
        InvalidInputError: mla-backend is not installed, or the wheel cannot be written.
    """
    try:
        version = importlib.metadata.version("mla-backend")
    except importlib.metadata.PackageNotFoundError:
        raise InvalidInputError("mla-backend is not installed here: pip install it before") from None
    libc = glibc_version()
    system = "linux" if libc == "0" else f"manylinux_{libc.replace('.', '_')}"
    tag = f"py3-none-{system}_{platform.machine()}"
    info = f"{WHEEL_PACKAGE}-{version}.dist-info"
    files = {
        f"{WHEEL_PACKAGE}/__init__.py": _INIT.encode(),
        f"{info}/METADATA": _lines(
            "Metadata-Version: 2.1",
            "Name: mla-backend-kernels",
            f"Version: {version}",
            "Summary: Kernels of mla-backend, built ahead of time",
            "License: Apache-2.0",
            f"Requires-Dist: mla-backend=={version}",
        ),
        f"{info}/WHEEL": _lines(
            "Wheel-Version: 1.0", "Generator: mla-backend", "Root-Is-Purelib: false", f"Tag: {tag}"
        ),
    }
    files |= {f"{WHEEL_PACKAGE}/{entry.name}/{LIBRARY}": (entry / LIBRARY).read_bytes() for entry in entries}
    records = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = _lines(*records, f"{info}/RECORD,,")
    wheel = folder / f"{WHEEL_PACKAGE}-{version}-{tag}.whl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    except OSError as error:
        raise InvalidInputError(f"{wheel} cannot be written: {error.strerror}") from None
    return wheel


def _lines(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _digest(content: bytes) -> str:
    """The SHA-256 as RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
