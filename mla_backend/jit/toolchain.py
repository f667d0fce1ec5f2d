"""Finds a CUDA compiler that can build kernels for this machine, or says why there is none.

Nothing here creates a CUDA context: engines call this before their processes have chosen a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from packaging.version import Version

from mla_backend.errors import KernelBuildError

LEAST_TOOLKIT = Version("12.5")
"""The oldest CUDA toolkit with every function that the kernels call (`cudaGetDriverEntryPointByVersion`)."""

WHEELS = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl"
"""The distributions that make up a compiler without a system toolkit."""
_WHEELS_MAJOR = 13  # the wheels of CUDA 12 do not contain nvcc


class ChosenCompilerError(KernelBuildError):
    """The compiler that MLA_BACKEND_NVCC names cannot be used."""


# Variables by which the user chooses a compiler; without them several places are searched.
_EXPLICIT = ("MLA_BACKEND_NVCC", "CUDA_HOME")
_SYSTEM_NVCC = Path("/usr/local/cuda/bin/nvcc")
_HOST_COMPILERS = ("gcc", "g++")  # nvcc calls both


@dataclass(frozen=True)
class Toolchain:
    """A CUDA compiler that can build for this machine.

    Attributes:
        nvcc: path of the executable.
        version: release and build, such as "13.0.88".
        origin: where it was found: "MLA_BACKEND_NVCC", "CUDA_HOME", "PATH", "pip" or "/usr/local/cuda".
        flags: nvcc's, for its own libraries, which wheels keep in another folder than toolkits.
    """

    nvcc: Path
    version: str
    origin: str
    flags: tuple[str, ...] = ()

    def check_arch(self, arch: str) -> None:
        """Check that it can compile for an architecture, such as "90a".

        Raises:
            KernelBuildError: nvcc does not know it.
        """
        known = _archs_of(self.nvcc)
        if known and arch.rstrip("af") not in known:
            raise KernelBuildError(
                f"{self.nvcc} (CUDA {self.version}) does not know sm_{arch}, only {', '.join(known)}; "
                "remedy: install a newer CUDA toolkit"
            )


@functools.cache
def _archs_of(nvcc: Path) -> list[str]:
    """The architectures that a compiler lists, such as "90"; empty if it lists none."""
    try:
        told = subprocess.run([str(nvcc), "--list-gpu-arch"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^compute_(\d+)$", told.stdout, re.MULTILINE)


def find_toolchain() -> Toolchain:
    """Return the compiler for kernels.

    The user chooses it by MLA_BACKEND_NVCC, or else by CUDA_HOME. Otherwise nvcc is looked for on PATH, in
    the wheels of `nvidia-cuda-nvcc` and in /usr/local/cuda, in this order. The first compiler with torch's
    CUDA major version is used, or else the first one. Compilers that are too old, or too new for the driver,
    are skipped.

    Raises:
        KernelBuildError: there is no compiler, the one that the user chose cannot be used
            (`ChosenCompilerError` if by MLA_BACKEND_NVCC), or the host compiler that nvcc calls is missing.
            The message has one line.
    """
    toolchain = _choose()
    if (missing := missing_host_compiler()) is not None:
        raise KernelBuildError(
            f"no {missing}, which {toolchain.nvcc} calls; remedy: install it (apt-get install g++, "
            "dnf install gcc-c++), or name another host compiler in NVCC_CCBIN"
        )
    return toolchain


def _choose() -> Toolchain:
    usable, problems = [], []
    for origin, path in _candidates():
        nvcc = path.absolute()  # it runs in another folder
        version = _ask_version(nvcc)
        problem = _why_not(version)
        if version is not None and problem is None:
            usable.append(Toolchain(nvcc, version, origin, _wheel_flags(nvcc)))
            if origin in _EXPLICIT or torch_major() in (None, major(version)):
                return usable[-1]
            continue
        problems.append(f"{origin}: {nvcc} {problem}")
        # If the user's choice cannot be used, that is an error. A CUDA_HOME without a compiler is no choice.
        if origin == "MLA_BACKEND_NVCC" or (origin == "CUDA_HOME" and version):
            kind = ChosenCompilerError if origin == "MLA_BACKEND_NVCC" else KernelBuildError
            raise kind(f"{problems[-1]}; remedy: correct or unset {origin}")
    if usable:
        return usable[0]
    unset = "MLA_BACKEND_NVCC and CUDA_HOME are unset, nvcc is neither on PATH nor in a wheel"
    reasons = "; ".join(problems) or unset
    raise KernelBuildError(f"no usable CUDA compiler found ({reasons}); remedy: {_remedy()}")


def _remedy() -> str:
    driver = driver_version()
    if driver and major(driver) < LEAST_TOOLKIT.major:
        return f"update the driver (R525 or newer): it serves CUDA {driver}, the kernels need {LEAST_TOOLKIT}"
    versions = f"to {major(driver)}.x, as the driver allows" if driver else "or newer"
    remedy = (
        f"install a CUDA toolkit ({LEAST_TOOLKIT} {versions}) and put nvcc on PATH, or name it in CUDA_HOME "
        "or MLA_BACKEND_NVCC"
    )
    if driver is None or major(driver) >= _WHEELS_MAJOR:
        remedy += f", or take the compiler from wheels: pip install {WHEELS}"
    return remedy


def _why_not(version: str | None) -> str | None:
    if version is None:
        return "is not an executable file that answers --version like nvcc, within a minute"
    if Version(version) < LEAST_TOOLKIT:
        return f"is of CUDA {version}: the kernels need {LEAST_TOOLKIT} or newer"
    reason = why_not_served(version)
    return f"is {reason}" if reason else None


def _candidates() -> Iterator[tuple[str, Path]]:
    if path := os.environ.get("MLA_BACKEND_NVCC"):
        yield "MLA_BACKEND_NVCC", Path(os.path.expanduser(path))  # keeps "~" if no home folder is known
    if home := os.environ.get("CUDA_HOME"):
        yield "CUDA_HOME", Path(home, "bin", "nvcc")
    if path := shutil.which("nvcc"):
        yield "PATH", Path(path)
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or ()) if wheels else ():
        for nvcc in sorted(Path(folder).glob("*/bin/nvcc"), reverse=True):
            yield "pip", nvcc
    if _SYSTEM_NVCC.exists():
        yield "/usr/local/cuda", _SYSTEM_NVCC


def major(version: str) -> int:
    """The major version in a version such as "13.0.88"."""
    return int(version.partition(".")[0])


def torch_major() -> int | None:
    """The major version of the CUDA that torch was built with; None for a CPU build."""
    return major(torch.version.cuda) if torch.version.cuda else None


def driver_version() -> str | None:
    """The newest CUDA version that the driver supports, such as "12.8"; None if there is no driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):  # no such library, or one that is not the driver's
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def driver_serves(toolkit: str) -> bool:
    """Whether kernels built with a toolkit of this version run on this machine's driver.

    They contain the toolkit's CUDA runtime, which needs a driver of its own major version or newer. True if
    there is no driver, because kernels may be built for other machines.
    """
    driver = driver_version()
    return driver is None or major(driver) >= major(toolkit)


def why_not_served(toolkit: str) -> str | None:
    """Why the driver does not run what a toolkit of this version builds; None if it does."""
    if driver_serves(toolkit):
        return None
    return f"of CUDA {toolkit}: the driver serves CUDA {driver_version()} and no newer major"


def glibc_version() -> str:
    """The version of this system's C library, such as "2.36"; "0" if it is not glibc."""
    name, version = platform.libc_ver()
    return version if name == "glibc" else "0"


def glibc_serves(built_with: str) -> bool:
    """Whether kernels built on a system with this version of glibc can be loaded here.

    They may use functions of that version, which older versions lack.
    """
    return Version(built_with) <= Version(glibc_version())


def missing_host_compiler() -> str | None:
    """Which host compiler of nvcc is missing, such as "g++ on PATH".

    None if none is, or if nvcc's flags name another compiler.
    """
    if named := os.environ.get("NVCC_CCBIN"):
        # nvcc also takes a folder, in which it looks for g++.
        return None if shutil.which(named) or os.path.isdir(named) else f"{named}, named by NVCC_CCBIN"
    flags = " ".join(os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"))
    if "-ccbin" in flags or "--compiler-bindir" in flags:
        return None
    return next((f"{name} on PATH" for name in _HOST_COMPILERS if shutil.which(name) is None), None)


@functools.cache
def _ask_version(nvcc: Path) -> str | None:
    try:
        answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bV(\d+\.\d+\.\d+)", answer.stdout)
    return match[1] if match and answer.returncode == 0 else None


def _wheel_flags(nvcc: Path) -> tuple[str, ...]:
    lib = nvcc.parent.parent / "lib"
    return (f"-L{lib}",) if (lib / "libcudart_static.a").is_file() else ()
