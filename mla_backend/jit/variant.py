"""A kernel to build: one CUDA translation unit for one architecture, and the hash that names its binary."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from mla_backend import settings
from mla_backend.errors import InvalidInputError

_QUOTED_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9_.]+(?:-[A-Za-z0-9_.]+)*")
_HOST_COMPILER = re.compile(r"(?<!\S)--?(?:ccbin|compiler-bindir)[\s=]+\S+")
_ARCH = re.compile(r"\d{2,3}[af]?")

STANDARD_FLAGS = (
    "-shared",
    "-O1",  # of host code, which takes half of the build's time; device code is always optimized fully
    "-std=c++20",
    "--expt-relaxed-constexpr",
    # nvcc's default, spelled out: the module needs no libcudart.so in the process.
    "--cudart=static",
    "-Xcompiler=-fPIC",
    # Variants instantiate templates of the same name. Hidden symbols keep their statics apart at load.
    "-Xcompiler=-fvisibility=hidden",
    "-Xptxas=-v",
)
"""nvcc's flags for every variant."""


def csrc_dir() -> Path:
    """The root of the CUDA sources: inside an installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    shipped = package / "csrc"
    return shipped if shipped.is_dir() else package.parent / "csrc"


def arch_of(device: torch.device) -> str:
    """The architecture of a CUDA device, such as "90a". Creates a CUDA context."""
    return arch_name(torch.cuda.get_device_capability(device))


def arch_name(capability: tuple[int, int]) -> str:
    """A compute capability as nvcc spells it; for Hopper "90a", which has all its instructions."""
    major, minor = capability
    return f"{major}{minor}a" if (major, minor) == (9, 0) else f"{major}{minor}"


def capability_of(arch: str) -> tuple[int, int]:
    """The compute capability of an architecture such as "89" or "90a".

    Raises:
        InvalidInputError: ``arch`` is not spelled like that.
    """
    _check_arch(arch)
    major, minor = divmod(int(arch.rstrip("af")), 10)
    return major, minor


def _check_arch(arch: str) -> None:
    if not _ARCH.fullmatch(arch):
        raise InvalidInputError(f"arch {arch!r} must be a compute capability such as '80' or '90a'")


@dataclass(frozen=True)
class KernelVariant:
    """One kernel binary to build.

    Attributes:
        name: human-readable, part of file names: letters, digits, `_`, `.` and `-`.
        source: the text of the `.cu` file. Quoted includes are looked up under `csrc_dir()`.
        arch: compute capability as nvcc spells it, without `sm_`: "80", "86", "89", "90a".
        flags: further nvcc flags, after the standard ones.
    """

    name: str
    source: str
    arch: str
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidInputError(f"variant name {self.name!r} must be letters, digits, '_', '.' and '-'")
        _check_arch(self.arch)

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.arch})"

    @property
    def all_flags(self) -> tuple[str, ...]:
        """nvcc's flags after the standard ones; with MLA_BACKEND_DEBUG=1 also the one that asks for checks.

        Raises:
            InvalidInputError: MLA_BACKEND_DEBUG is neither 0 nor 1.
        """
        return (*self.flags, "-DMLA_BACKEND_DEBUG") if settings.is_on("MLA_BACKEND_DEBUG") else self.flags

    def key(self) -> str:
        """Hex digest of what determines the binary, except for the versions of the compiler and of glibc."""
        digest = hashlib.sha256()
        # The host's architecture counts, because x86 and Arm machines may share a home directory.
        host = (platform.machine(), version("apache-tvm-ffi"))
        header = (self.source, self.arch, *STANDARD_FLAGS, *self.all_flags, *_flags_of_environment(), *host)
        for part in [text.encode() for text in header] + _include_closure(self.source.encode(), csrc_dir()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()[:20]


def _flags_of_environment() -> list[str]:
    """The flags that nvcc takes from the environment, except the host compiler's path, which does not change
    device code."""
    flags = []
    for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        if given := _HOST_COMPILER.sub("", os.environ.get(name, "")).split():
            flags += [name, *given]
    return flags


def _include_closure(source: bytes, root: Path) -> list[bytes]:
    """Path and content of every header under `root` that `source` includes in quotes, in order of first use.

    Conditional includes count, too: a hash of too many headers only causes an unnecessary build.
    """
    contents: dict[Path, bytes] = {}

    def visit(text: bytes, folder: Path) -> None:
        for match in _QUOTED_INCLUDE.finditer(text):
            name = match[1].decode()
            header = next((p for p in (folder / name, root / name) if p.is_file()), None)
            if header is None:
                continue  # a library's (its version is in the key) or the compiler's (in the entry's name)
            header = header.resolve()
            if header not in contents:
                contents[header] = header.read_bytes()
                visit(contents[header], header.parent)

    visit(source, root)
    root = root.resolve()
    return [part for path, text in contents.items() for part in (str(path.relative_to(root)).encode(), text)]
