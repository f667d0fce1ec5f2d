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
from mla_backend.engines import SGLANG, VLLM

_ENGINES = {"mla_backend_vllm": VLLM, "mla_backend_sglang": SGLANG}
_LIBRARIES = ("apache-tvm-ffi", "triton", "flashinfer-python", "flash-attn", "flash-attn-3", "flash-mla")

Rows = Iterable[tuple[str, str]]


def doctor() -> None:
    """Show GPU, compiler, kernel cache, engines, and which attention path would run and why."""
    console = make_console()
    for title, section in (
        ("mla-backend", _package),
        ("settings", _settings),
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


def _settings() -> Rows:
    names = [name for name in sorted(os.environ) if name.startswith("MLA_BACKEND_")]
    for name in names:
        yield name, os.environ[name]
    if not names:
        yield "MLA_BACKEND_*", "none is set"


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
    from mla_backend.errors import KernelBuildError
    from mla_backend.jit import toolchain

    least = toolchain.LEAST_TOOLKIT
    yield "needed", f"nvcc {least} or newer, a driver of its CUDA major or newer, gcc and g++"
    driver = toolchain.driver_version()
    newest = (
        f"{driver}: serves kernels built with toolkits up to {toolchain.major(driver)}.x" if driver else None
    )
    yield "driver's CUDA", newest or "no driver here: kernels of any toolkit can be built, none can run"
    try:
        found = toolchain.find_toolchain()
    except KernelBuildError as error:
        yield "nvcc", str(error)
    else:
        other = toolchain.torch_major() not in (None, toolchain.major(found.version))
        note = f"; torch is built with CUDA {toolchain.torch_major()}.x" if other else ""
        yield "nvcc", f"{found.version} at {found.nvcc} (found by {found.origin}){note}"
    missing = toolchain.missing_host_compiler()
    named = os.environ.get("NVCC_CCBIN") or shutil.which("g++") or "as nvcc's flags in the environment say"
    yield "host compiler", f"no {missing} on PATH: kernels cannot be built" if missing else named


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

    for device in [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]:
        for section in (_rates, _prefill, _decode):
            yield from _guarded(lambda section=section, device=device: section(device))


def _rates(device: str) -> Rows:
    from mla_backend.policy import default_rates_and_origin

    rates, origin = default_rates_and_origin(device)
    yield (
        f"{device}, rates",
        f"{origin}: GEMM {rates.gemm_flops / 1e12:.3g}, absorbed {rates.absorbed_flops / 1e12:.3g}, "
        f"vanilla {rates.vanilla_flops / 1e12:.3g} TFLOP/s, {rates.bytes_per_s / 1e12:.3g} TB/s",
    )


def _prefill(device: str) -> Rows:
    import torch

    from mla_backend import Policy, prefill
    from mla_backend.bench.crossover import geometry_of
    from mla_backend.policy import default_rates

    geometry = geometry_of(num_heads=16)
    library = prefill.library(device, torch.bfloat16, geometry.qk_head_dim, geometry.v_head_dim)
    limit = Policy(geometry, default_rates(device)).absorbed_query_limit()
    yield (
        f"{device}, prefill",
        f"vanilla attention on {library}; absorbed for up to {limit} new tokens on a long prefix",
    )


def _decode(device: str) -> Rows:
    """A decoder of DeepSeek-V2-Lite's shape. Its kernels are loaded if they are there, but not built."""
    import torch

    from mla_backend import MLADecoder, jit
    from mla_backend.batch import TableKind
    from mla_backend.bench.crossover import geometry_of
    from mla_backend.spec import DecoderSpec

    geometry = geometry_of(num_heads=16)
    shape = dict(
        num_heads=geometry.num_heads,
        kv_lora_rank=geometry.kv_lora_rank,
        qk_rope_head_dim=geometry.qk_rope_head_dim,
        dtype=torch.bfloat16,
        page_size=64,
        max_batch=1,
    )
    if device != "cpu":
        from mla_backend.kernels import variants_of

        spec = DecoderSpec(
            **shape,
            kv_dtype=torch.bfloat16,
            table_kind=TableKind.BLOCK,
            device=torch.device(device),
            max_query_len=1,
            batch_invariant=False,
        )
        variants = variants_of(spec, torch.cuda.get_device_capability(device), with_append=True)
        missing = [variant for variant in variants if jit.find_entry(variant) is None]
        state = f"{len(variants) - len(missing)} of {len(variants)} are built"
        if missing:
            remedy = "an engine's start builds the others, or `mla-backend build` now"
            yield f"{device}, kernels", f"{state}; {jit.why_unavailable(missing) or remedy}"
            return
        yield f"{device}, kernels", state
    decoder = MLADecoder(**shape, device=device)
    yield f"{device}, decode", f"{decoder.implementation}: {decoder.reason}"


def _engines() -> Rows:
    registered = {
        point.value.partition(":")[0]
        for group in ("vllm.general_plugins", "vllm.platform_plugins", "sglang.srt.plugins")
        for point in importlib.metadata.entry_points(group=group)
    }
    for integration, engine in _ENGINES.items():
        found = engine.installed()
        if not found:
            yield engine.distributions[0], f"not installed (tested versions: {engine.tested})"
            continue
        for name, version in found:
            plugin = "plugin registered" if integration in registered else "plugin NOT registered"
            yield f"{name} {version}", f"{plugin}; {engine.untested(version) or 'a tested version'}"
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
