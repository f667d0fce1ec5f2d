"""Finds the CUDA compiler."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mla_backend.errors import KernelBuildError

REMEDY = (
    "install a CUDA toolkit and set CUDA_HOME or put nvcc on PATH, name it in MLA_BACKEND_NVCC, "
    "or take the compiler from wheels: pip install 'mla-backend[nvcc]'"
)


@dataclass(frozen=True)
class Toolchain:
    """A CUDA compiler that answers.

    Attributes:
        nvcc: path of the executable.
        version: release and build, such as "13.0.88".
        origin: what led to it: "MLA_BACKEND_NVCC", "CUDA_HOME", "PATH", "pip" or "/usr/local/cuda".
        flags: what nvcc needs to find its own libraries (wheels keep them in another folder than toolkits).
    """

    nvcc: Path
    version: str
    origin: str
    flags: tuple[str, ...] = ()


def find_toolchain() -> Toolchain:
    """Return the first compiler found.

    Looked up in this order: MLA_BACKEND_NVCC, CUDA_HOME, PATH, the wheels of `nvidia-cuda-nvcc`,
    /usr/local/cuda.

    Raises:
        KernelBuildError: there is none, or the one that MLA_BACKEND_NVCC names does not work.
    """
    tried = []
    for origin, nvcc in _candidates():
        if not os.access(nvcc, os.X_OK) or nvcc.is_dir():
            problem = f"{origin}: {nvcc} is not an executable file"
        else:
            found = _ask_version(nvcc)
            if found is not None:
                return Toolchain(nvcc, found, origin, _wheel_flags(nvcc))
            problem = f"{origin}: {nvcc} does not answer --version as nvcc does"
        if origin == "MLA_BACKEND_NVCC":  # an explicit choice is never overridden in silence
            raise KernelBuildError(f"{problem}; remedy: correct or unset MLA_BACKEND_NVCC")
        tried.append(problem)
    unset = "MLA_BACKEND_NVCC and CUDA_HOME are unset, nvcc is neither on PATH nor in a wheel"
    looked = "; ".join(tried) or unset
    raise KernelBuildError(f"no CUDA compiler found ({looked}); remedy: {REMEDY}")


def _candidates() -> Iterator[tuple[str, Path]]:
    if path := os.environ.get("MLA_BACKEND_NVCC"):
        yield "MLA_BACKEND_NVCC", Path(path)
    if home := os.environ.get("CUDA_HOME"):
        yield "CUDA_HOME", Path(home, "bin", "nvcc")
    if path := shutil.which("nvcc"):
        yield "PATH", Path(path)
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or ()) if wheels else ():
        for nvcc in sorted(Path(folder).glob("*/bin/nvcc"), reverse=True):
            yield "pip", nvcc
    default = Path("/usr/local/cuda/bin/nvcc")
    if default.exists():
        yield "/usr/local/cuda", default


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
