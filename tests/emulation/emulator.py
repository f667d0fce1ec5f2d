"""Builds kernels of csrc for the CPU and runs them on torch tensors there; see `cuda_on_cpu.h`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from mla_backend.jit import KernelVariant, csrc_dir
from mla_backend.jit.toolchain import Toolchain
from mla_backend.jit.variant import _include_closure
from mla_backend.spec import DecodeCall
from tests.emulation.call import call
from tests.support.cases import relative_error

TOLERANCE = {torch.bfloat16: 2.7e-3, torch.float16: 4e-4}  # of few elements: more spread than on a GPU's many

_HERE = Path(__file__).parent


def sources(folder: Path, edits: Iterable[tuple[str, str, str]] = ()) -> Path:
    """csrc with its PTX replaced, in a new folder.

    Args:
        folder: where to put it.
        edits: a file, a text in it and what to put in its place.
    """
    shutil.copytree(csrc_dir(), folder)
    for path in folder.rglob("*.cuh"):  # dynamic shared memory: each CTA has its own
        declaration = r"extern __shared__ .* unsigned char bytes\[\];"
        own = "unsigned char* bytes = emulation::shared_memory();"
        path.write_text(re.sub(declaration, own, path.read_text()))
    for file, before, after in edits:
        text = (folder / file).read_text()
        assert before in text
        (folder / file).write_text(text.replace(before, after))
    overlay = _HERE / "overlay"
    for path in overlay.rglob("*.cuh"):
        assert (folder / path.relative_to(overlay)).exists(), f"{path} replaces nothing in csrc"
    shutil.copytree(overlay, folder, dirs_exist_ok=True)
    return folder


def shared_sources(folder: Path, edits: Iterable[tuple[str, str, str]] = ()) -> Path:
    """`sources` for all tests and processes that make the same edits."""
    with FileLock(f"{folder}.lock"):
        return folder if folder.exists() else sources(folder, edits)


class Compiler:
    """Builds C++ by nvcc, which hands it to the host's compiler and knows where the toolkit's headers are.

    Libraries are kept by what they are made of, so only changed kernels are built again.

    `precompiled.h` is precompiled once. That takes as long as a kernel does, and spares each kernel a third.

    Args:
        toolchain: whose nvcc it is.
        cache: a folder for what is built, which processes may share.
    """

    def __init__(self, toolchain: Toolchain, cache: Path):
        self._toolchain, self._cache = toolchain, cache
        # -O1: a test runs a kernel a few times, and -O2 takes longer to compile than it saves.
        self._command = [str(toolchain.nvcc), "-std=c++20", "-O1", "-x=c++", f"-I{_HERE}"]
        # Kernels move elements as vectors.
        self._command += ["-Xcompiler=-fno-strict-aliasing", *toolchain.flags]
        host = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
        environment = {name: value for name, value in os.environ.items() if name.startswith("NVCC_")}
        headers = [header.read_text() for header in sorted(_HERE.glob("*.h"))]
        self._common = [toolchain.version, host, environment, *headers]

    def build(self, source: str, root: Path, host_options: str) -> Path:
        """The library of a source that includes headers of ``root``."""
        options = [*self._command, f"-Xcompiler={host_options}"]
        # The host's compiler takes precompiled.h.gch, which fits these options, for precompiled.h.
        compiled = [*options, "-c", "-Xcompiler=-x,c++-header", str(_HERE / "precompiled.h")]
        precompiled = self._made("precompiled", ".h.gch", options, compiled)
        options += [f"-Xcompiler=-include,{precompiled.with_suffix('')}", "-shared", "--cudart=none"]
        content = [source, *(part.decode() for part in _include_closure(source.encode(), root))]
        with tempfile.NamedTemporaryFile("w", suffix=".cpp") as file:
            file.write(source)
            file.flush()
            return self._made("kernel", ".so", [*options, *content], [*options, f"-I{root}", file.name])

    def _made(self, name: str, suffix: str, content: list[str], command: list[str]) -> Path:
        """The file that a command makes of this content; made by the first process that needs it."""
        key = hashlib.sha256(json.dumps([self._common, content]).encode()).hexdigest()[:32]
        path = self._cache / f"{name}-{key}{suffix}"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                unfinished = path.with_name(f"unfinished-{path.name}")
                made = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
                if made.returncode:  # not an AssertionError, which tests of faults expect
                    raise RuntimeError(made.stderr[-4000:])
                unfinished.rename(path)
            path.touch()  # in use: see `remove_unused`
        return path


def remove_unused(cache: Path) -> None:
    """Remove what no test has needed for a month."""
    for path in cache.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            if time.time() - path.stat().st_mtime > 30 * 24 * 3600:
                path.unlink()


class EmulatedModule:
    """What `mla_backend.jit.load` returns for a variant, on the CPU: its functions are attributes.

    The variant's own source is compiled, so csrc/ffi runs too, but for what calls CUDA's runtime and driver.

    Args:
        variant: the kernel.
        root: of `sources`.
        compiler: builds it.

    Attributes:
        multiprocessors: of the stream that the functions launch on.
    """

    _host_options = "-fPIC,-w"
    multiprocessors = 192

    def __init__(self, variant: KernelVariant, root: Path, compiler: Compiler):
        self._variant, self._root, self._compiler = variant, root, compiler

    def __getattr__(self, name: str) -> Callable[..., int | list[int] | None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(self._call_function, name)

    def _call_function(self, name: str, *arguments: Tensor | float | None) -> int | list[int] | None:
        results = self._call(name, arguments)
        return results if len(results) > 1 else results[0] if results else None

    @functools.cached_property
    def _library(self) -> str:
        """Built by the first call: a decoder has kernels that its test never calls."""
        return str(self._compiler.build(self._variant.source, self._root, self._host_options))

    def _call(self, name: str, arguments: Sequence[Tensor | float | None]) -> list[int]:
        values = [describe(value) if isinstance(value, Tensor) else value for value in arguments]
        return call(self._library, name, self.multiprocessors, values)


class IsolatedModule(EmulatedModule):
    """An `EmulatedModule` each of whose calls has a process of its own, which may end early."""

    def _call(self, name: str, arguments: Sequence[Tensor | float | None]) -> list[int]:
        # All memory that a tensor's address may lead to: its storage from there on.
        memory = [
            torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())[
                t.storage_offset() * t.element_size() :
            ]
            for t in arguments
            if isinstance(t, Tensor)
        ]
        *offsets, size = accumulate((-(-len(m) // 256) * 256 for m in memory), initial=0)
        with tempfile.NamedTemporaryFile(dir=self._root) as temporary:
            file = torch.from_file(temporary.name, shared=True, size=max(size, 1), dtype=torch.uint8)
            copies = [file[offset : offset + len(m)] for offset, m in zip(offsets, memory, strict=True)]
            for copy, m in zip(copies, memory, strict=True):
                copy.copy_(m)
            remaining = iter(offsets)
            passed = [
                (next(remaining), *describe(value)[1:]) if isinstance(value, Tensor) else value
                for value in arguments
            ]
            place = self._library, name, str(self.multiprocessors), temporary.name
            called = self._run([sys.executable, str(_HERE / "call.py"), *place, json.dumps(passed)])
            assert called.returncode == 0, called.stderr
            for copy, m in zip(copies, memory, strict=True):
                m.copy_(copy)
        return json.loads(called.stdout)

    def _run(self, command: list[str]) -> subprocess.CompletedProcess:
        return subprocess.run(command, capture_output=True, text=True)


def describe(tensor: Tensor) -> tuple[int, int, list[int], list[int]]:
    """A tensor as an argument of `call`."""
    return tensor.data_ptr(), tensor.element_size() * 8, list(tensor.shape), list(tensor.stride())


def run(implementation, case, causal=True, plan=None):
    """out and lse of a case, planned here if there is no plan of it.

    Split buffers that the kernel does not write are -1 afterwards, which is NaN in fp16 and fp32.
    """
    implementation._split_buffers.fill_(-1)
    out = torch.full(case.q_nope.shape, float("nan"), dtype=case.q_nope.dtype)
    lse = torch.full(case.q_nope.shape[:2], float("nan"))
    plan = plan or implementation.plan(case.batch)
    tensors = case.q_nope, case.q_rope, case.cache
    arguments = DecodeCall(*tensors, case.scale, causal, case.kv_scale, case.lists, out, lse, case.sinks)
    implementation.run(arguments, plan)
    return out, lse


def assert_right(case, out, lse, causal=True, tolerance=None, of_lse=None):
    """Assert that results are right, up to a relative error, and an error of the LSE in nats. By default,
    those of exact products."""
    expected_out, expected_lse = case.expected(causal)
    assert not out.isnan().any() and not lse.isnan().any()
    assert (error := relative_error(out, expected_out)) <= (tolerance or TOLERANCE[out.dtype]), error
    empty = expected_lse.isinf()
    assert torch.equal(lse.isinf(), empty) and (lse[empty] < 0).all() and (out[empty] == 0).all()
    # Scaled values of records are rounded to fp16, which moves scores by about 2^-12 of them.
    near = {"rtol": 1e-3, "atol": 1e-2} if case.kv_dtype == "fp8_ds_mla" else {"rtol": 1e-6, "atol": 1e-5}
    near = {"rtol": 0, "atol": of_lse} if of_lse else near
    torch.testing.assert_close(lse[~empty].double(), expected_lse[~empty], **near)


def assert_alone_as_together(implementation, case):
    """Assert that each request has the same bits alone and among the others. Returns the results of all."""
    together = run(implementation, case)
    for request in range(case.batch.batch_size):
        only, rows = case.alone(request)
        alone = run(implementation, only)
        assert all(torch.equal(a, t[rows]) for a, t in zip(alone, together, strict=True))
    return together
