"""What `mla-backend doctor` finds: which attention each engine would use here, and whether it can run."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import mla_backend
from mla_backend import counters, jit, prefill, settings
from mla_backend.batch import TableKind
from mla_backend.cli.console import Report, Rows
from mla_backend.engines import SGLANG, VLLM, Engine, installed_version
from mla_backend.errors import InvalidInputError, KernelBuildError, MLABackendError
from mla_backend.geometry import MLAGeometry
from mla_backend.jit import toolchain
from mla_backend.kernels import variants_of
from mla_backend.policy import FLOPS_ALONE, Policy, default_rates, default_rates_and_origin
from mla_backend.spec import DecoderSpec

_ENGINES = {"mla_backend_vllm": VLLM, "mla_backend_sglang": SGLANG}
_LIBRARIES = ("apache-tvm-ffi", "triton", "flashinfer-python", "flash-attn", "flash-attn-3", "flash-mla")

_DEEPSEEK_V2_LITE = MLAGeometry(
    num_heads=16,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    softmax_scale=192**-0.5,
    hidden_size=2048,
)


@dataclass
class _Findings:
    """Results of the sections, from which the verdict follows.

    Attributes:
        attention: what attention runs on, in words; empty if it cannot run.
        on_cpu: whether attention runs on the CPU.
        engines: the installed engines that can use this package, with their versions.
        engine_problems: why other installed engines cannot.
        problems: why attention cannot run, and what to do.
    """

    attention: list[str] = field(default_factory=list)
    on_cpu: bool = False
    engines: list[str] = field(default_factory=list)
    engine_problems: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        is_of_use = self.engines or not self.engine_problems
        return bool(self.attention and is_of_use) and not self.problems

    def attention_failed(self, error: Exception) -> None:
        # Errors of this package say what to do.
        unexpected = "" if isinstance(error, MLABackendError) else "; please report it with this output"
        self.problems.append(f"{type(error).__name__}: {error}{unexpected}")

    def verdict(self) -> str:
        if not self.is_ready:
            problems = self.problems + ([] if self.engines else self.engine_problems)
            return "not ready: " + "; ".join(
                dict.fromkeys(problems) or ["no device that attention can run on"]
            )
        engines = ", ".join(self.engines) or "the library without an engine"
        where = " on the CPU" if self.on_cpu else ""
        ready = f"ready{where}: {engines}, {', '.join(dict.fromkeys(self.attention))}"
        return ". ".join([ready, *self.engine_problems])


def check_machine(report: Report) -> bool:
    """Report all sections and the verdict. Returns whether attention can run here."""
    findings = _Findings()
    sections: tuple[tuple[str, Callable[[], Rows]], ...] = (
        ("mla-backend", _package),
        ("settings", lambda: _settings(findings)),
        ("GPU", lambda: _gpus(findings)),
        ("compiler", _compiler),
        ("kernels", _kernels),
        ("attention", lambda: _attention(findings)),
        ("engines", lambda: _engines(findings)),
        ("libraries", _libraries),
    )
    for title, section in sections:
        report.section(title, _guarded(section))
    report.verdict(findings.is_ready, findings.verdict(), "green" if findings.is_ready else "red")
    return findings.is_ready


def _guarded(section: Callable[[], Rows], on_error: Callable[[Exception], None] | None = None) -> Rows:
    """The section's rows. Any error becomes a row, because errors are what doctor looks for."""
    rows = []
    try:
        for row in section():
            rows.append(row)
    except Exception as error:  # a broken engine or driver can raise anything at import
        rows.append(("error", f"{type(error).__name__}: {error}"))
        if on_error is not None:
            on_error(error)
    return rows


def _package() -> Rows:
    yield "version", installed_version("mla-backend") or "not installed (running from a checkout)"
    yield "location", str(Path(mla_backend.__file__).parent)
    yield "python", f"{platform.python_version()} on {platform.platform()}"


def _settings(findings: _Findings) -> Rows:
    names = [name for name in sorted(os.environ) if name.startswith("MLA_BACKEND_")]
    for name in names:
        remark = " (unknown: mla-backend reads no such variable)" if name in settings.unknown() else ""
        yield name, f"{os.environ[name]}{remark}"
    for name in settings.SWITCHES:
        try:
            settings.is_on(name)
        except InvalidInputError as error:
            findings.attention_failed(error)
    try:
        counters.open_file()
    except InvalidInputError as error:
        findings.attention_failed(error)
    if not names:
        yield "MLA_BACKEND_*", "none is set"


def _gpus(findings: _Findings) -> Rows:
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'no (CPU build)'}"
    if not torch.cuda.is_available():
        yield "GPU", "none visible to torch: everything runs on the CPU"
        if torch.version.cuda and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
            findings.problems.append(
                "torch is built for GPUs and sees none: see whether nvidia-smi works, or hide them "
                "(CUDA_VISIBLE_DEVICES=) to run on the CPU"
            )
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
    yield "host compiler", f"no {missing}: kernels cannot be built" if missing else named


def _kernels() -> Rows:
    yield "sources", f"{jit.csrc_dir()}" + ("" if jit.csrc_dir().is_dir() else " (MISSING)")
    shipped = [lambda folder=folder: folder for folder in jit.shipped_dirs()]
    for name, find in (*(("prebuilt", find) for find in shipped), ("cache", jit.cache_dir)):
        folder = find()
        entries = [path for path in folder.glob("*-nvcc*/") if path.is_dir()]
        megabytes = sum(file.stat().st_size for entry in entries for file in entry.iterdir()) / 1e6
        unwritable = ", NOT writable" if name == "cache" and not jit.is_writable(folder) else ""
        yield name, f"{folder}: {len(entries)} kernels, {megabytes:.1f} MB{unwritable}"
    if not settings.is_on("MLA_BACKEND_JIT"):
        yield "building", "forbidden by MLA_BACKEND_JIT=0"


def _attention(findings: _Findings) -> Rows:
    for device in [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]:
        for section in (_rates, _prefill):
            yield from _guarded(partial(section, device), findings.attention_failed)
        yield from _guarded(partial(_decode, device, findings), findings.attention_failed)


def _rates(device: str) -> Rows:
    rates, origin = default_rates_and_origin(device)
    if rates is FLOPS_ALONE:
        yield f"{device}, rates", origin
        return
    yield (
        f"{device}, rates",
        f"{origin}: GEMM {rates.gemm_flops / 1e12:.3g}, absorbed {rates.absorbed_flops / 1e12:.3g}, "
        f"vanilla {rates.vanilla_flops / 1e12:.3g} TFLOP/s, {rates.bytes_per_s / 1e12:.3g} TB/s",
    )


def _prefill(device: str) -> Rows:
    geometry = _DEEPSEEK_V2_LITE
    dimensions = (torch.bfloat16, geometry.qk_head_dim, geometry.v_head_dim)
    library, in_sglang = (prefill.library(device, *dimensions, with_plans=w) for w in (False, True))
    if in_sglang != library:
        library += f", in SGLang by {in_sglang}"
    limit = Policy(geometry, default_rates(device)).absorbed_query_limit()
    yield (
        f"{device}, prefill",
        f"requests with at most {limit} new tokens on a long prefix use absorbed attention, longer ones "
        f"vanilla attention by {library} (DeepSeek-V2-Lite; for another model: mla-backend doctor MODEL)",
    )


def _decode(device: str, findings: _Findings) -> Rows:
    """Report on a decoder of DeepSeek-V2-Lite's shape. Loads its kernels if they are built; builds none."""
    shape: dict[str, Any] = dict(
        num_heads=_DEEPSEEK_V2_LITE.num_heads,
        kv_lora_rank=_DEEPSEEK_V2_LITE.kv_lora_rank,
        qk_rope_head_dim=_DEEPSEEK_V2_LITE.qk_rope_head_dim,
        dtype=torch.bfloat16,
        page_size=64,
        max_batch=1,
    )
    all_built = True
    if device != "cpu":
        all_built, state = _kernel_state(device, shape, findings)
        yield f"{device}, kernels", state
    if all_built:
        decoder = mla_backend.MLADecoder(**shape, device=device)
        yield f"{device}, decode", f"{decoder.implementation}: {decoder.reason}"
        if device == "cpu":
            findings.attention.append("attention in plain torch")
            findings.on_cpu = True
        elif decoder.implementation == "torch":
            findings.problems.append(
                f"no kernel serves {device} ({decoder.reason}); use a GPU of compute capability 8.0 or "
                "newer, or hide this one (CUDA_VISIBLE_DEVICES=) to run on the CPU"
            )


def _kernel_state(device: str, shape: dict[str, Any], findings: _Findings) -> tuple[bool, str]:
    """Whether all kernels of a decoder are built, and a line about them."""
    spec = DecoderSpec(
        **shape,
        kv_dtype=shape["dtype"],
        table_kind=TableKind.BLOCK,
        device=torch.device(device),
        max_query_len=1,
        batch_invariant=False,
    )
    capability = torch.cuda.get_device_capability(device)
    variants = variants_of(spec, capability, with_append=True)
    missing = [variant for variant in variants if jit.find_entry(variant) is None]
    state = f"{len(variants) - len(missing)} of {len(variants)} are built"
    kernels = f"kernels for sm_{jit.arch_name(capability)}"
    if not missing:
        if variants:
            findings.attention.append(f"{kernels} cached")
        return True, state
    if why_not := jit.why_unavailable(missing):
        findings.problems.append(why_not)
        return False, f"{state}; {why_not}"
    findings.attention.append(f"{kernels} built at an engine's first start")
    return False, f"{state}; an engine's start builds the others, or `mla-backend build` now"


def _engines(findings: _Findings) -> Rows:
    registered = {
        point.value.partition(":")[0]
        for group in ("vllm.general_plugins", "vllm.platform_plugins", "sglang.srt.plugins")
        for point in importlib.metadata.entry_points(group=group)
    }
    for integration, engine in _ENGINES.items():
        if found := engine.installed():
            yield from _engine(engine, found, integration, integration in registered, findings)
        else:
            yield engine.distributions[0], f"not installed (supported versions: {engine.supported})"


def _engine(
    engine: Engine, found: list[tuple[str, str]], integration: str, is_registered: bool, findings: _Findings
) -> Rows:
    """An engine that is installed, as the distributions ``found``."""
    problems = []
    if not is_registered:
        problems.append("its plugin is not registered; install mla-backend in this environment")
    elif left_out := _left_out(engine):
        problems.append(left_out)
    for name, version in found:
        plugin = "plugin registered" if is_registered else "plugin NOT registered"
        yield f"{name} {version}", f"{plugin}; {engine.unsupported(version) or 'a supported version'}"
    yield from _guarded(
        partial(_describe, integration),
        lambda error: problems.append(f"its integration fails with {type(error).__name__}: {error}"),
    )
    _, version = found[0]
    if problems:
        findings.engine_problems.append(f"{engine.name} {version} cannot use it: {'; '.join(problems)}")
    else:
        remark = f" (outside the supported {engine.supported})" if engine.unsupported(version) else ""
        findings.engines.append(f"{engine.name} {version}{remark}")


def _left_out(engine: Engine) -> str | None:
    """Why the engine does not load this plugin, though it is installed; None if it does."""
    variable = f"{engine.name.upper()}_PLUGINS"
    value = os.environ.get(variable)
    if value is None or (engine is SGLANG and not value):
        return None  # the engine loads all plugins
    if "mla_backend" in (name.strip() for name in value.split(",")):
        return None
    return f"{variable}={value!r} leaves its plugin out; add mla_backend to it, or unset it"


def _describe(integration: str) -> Rows:
    describe = getattr(importlib.import_module(integration), "describe", None)
    if describe is not None:
        for line in describe():
            yield "", line


def _libraries() -> Rows:
    for name in _LIBRARIES:
        yield name, installed_version(name) or "not installed"
