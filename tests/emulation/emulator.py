"""Builds kernels of csrc for the CPU and runs them on torch tensors there; see `cuda_on_cpu.h`."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from mla_backend.jit import KernelVariant, csrc_dir
from mla_backend.jit.toolchain import Toolchain
from tests.support.cases import relative_error

TOLERANCE = {torch.bfloat16: 2.7e-3, torch.float16: 4e-4}  # of few elements: more spread than on a GPU's many

_HERE = Path(__file__).parent

_KERNELS = {
    "mla::sm90::DecodeConfig": ("sm90/decode.cuh", "mla::sm90::decode_kernel", "mla::sm90::kThreads"),
    "mla::sm90::Decode64Config": ("sm90/decode64.cuh", "mla::sm90::decode64_kernel", "mla::sm90::kThreads"),
    "mla::sm80::DecodeConfig": ("sm80/decode.cuh", "mla::sm80::decode_kernel", "mla::sm80::kThreads"),
}


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
    shutil.copytree(_HERE / "overlay", folder, dirs_exist_ok=True)
    return folder


def compile_for_cpu(
    source: Path, library: Path, root: Path, toolchain: Toolchain, host_options: str = "-fPIC,-w"
) -> None:
    """Build a file that includes headers of ``root``, which `sources` made, and of this folder."""
    # nvcc hands C++ to the host's compiler, and knows where the toolkit's headers are.
    command = [str(toolchain.nvcc), "-std=c++17", "-O2", "-shared", "--cudart=none"]
    # Kernels move elements as vectors.
    command += ["-Xcompiler=-fno-strict-aliasing"]
    command += [f"-Xcompiler={host_options}", *toolchain.flags, f"-I{root}", f"-I{_HERE}"]
    made = subprocess.run([*command, str(source), "-o", str(library)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-4000:]


def call(library: ctypes.CDLL, name: str, *arguments: Tensor | int | float | None) -> None:
    """Call a function that launches: tensors are passed as addresses, ints as 64 bits."""
    converted = [
        ctypes.c_double(value)
        if isinstance(value, float)
        else ctypes.c_void_p(value.data_ptr() if isinstance(value, Tensor) else None)
        if value is None or isinstance(value, Tensor)
        else ctypes.c_int64(value)
        for value in arguments
    ]
    assert getattr(library, name)(*converted) == 0, f"{name}: all threads wait for each other"


class EmulatedModule:
    """What `mla_backend.jit.load` returns for a variant of a decode kernel, on the CPU.

    Args:
        variant: the kernel.
        root: of `sources`.
        toolchain: whose headers and host compiler are used.

    Attributes:
        multiprocessors: how many the stream has on which it is called.
    """

    _host_options = "-fPIC,-w"
    multiprocessors = 192

    def __init__(self, variant: KernelVariant, root: Path, toolchain: Toolchain):
        config = re.search(r"(mla::sm\d\d::\w+Config)<[^<>]*>", variant.source)
        assert config, variant.source
        header, kernel, threads = _KERNELS[config[1]]
        source, self._path = root / f"{variant.name}.cpp", root / f"{variant.name}.so"
        source.write_text(
            f'#define HEADER "{header}"\n#define KERNEL {kernel}\n#define THREADS {threads}\n'
            f'#define CONFIG {config[0]}\n#define MAP {int("sm90" in header)}\n#include "main.cpp"\n'
        )
        compile_for_cpu(source, self._path, root, toolchain, self._host_options)

    @functools.cached_property
    def _library(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(self._path))

    def _call(self, name: str, *arguments: Tensor | int | float | None) -> None:
        call(self._library, name, *arguments)

    def divide(self, dividend: int, divisor: int) -> int:
        """By `mla::Divisor`."""
        return self._library.divide(ctypes.c_int64(dividend), ctypes.c_int64(divisor))

    def plan(self, seq_lens, query_start_loc, table, table_rows, plans, flags, ends, *numbers) -> int:
        """As `mla::ffi::plan`."""
        batch, rows_64 = len(seq_lens), table_rows is not None and table_rows.element_size() == 8
        num_ctas = min(len(plans), self.multiprocessors)
        self._call(
            "plan",
            seq_lens, query_start_loc, batch, table, table.stride(0), table_rows, int(rows_64),
            plans, num_ctas, len(plans), flags, ends, *map(int, numbers),
        )  # fmt: skip
        return num_ctas

    def decode(
        self, q_nope, q_rope, cache, table, table_rows, seq_lens, query_start_loc, plans, partials, flags,
        out, lse, profile, query_len, token_table, causal, softmax_scale, num_ctas, may_wait, overlaps,
    ) -> None:  # fmt: skip
        """As `mla::ffi::sm90_decode` and `sm80_decode`."""
        assert profile is None
        partials.fill_(float("nan"))
        rows_64 = table_rows is not None and table_rows.element_size() == 8
        self._call(
            "decode",
            q_nope, *q_nope.stride()[:2], q_rope, *q_rope.stride()[:2],
            cache, *cache.stride()[:2], *cache.shape[:2],
            table, table.stride(0), table_rows, int(rows_64), seq_lens, query_start_loc,
            plans, num_ctas, partials, flags, out, *out.stride()[:2], lse, *lse.stride(),
            q_nope.shape[1], query_len, int(token_table), int(causal), softmax_scale,
        )  # fmt: skip
        self.wrote_partials = not bool(partials.isnan().all())


def run(implementation, case, causal=True, plan=None):
    """out and lse of a case, planned here if there is no plan of it."""
    out = torch.full(case.q_nope.shape, float("nan"), dtype=case.q_nope.dtype)
    lse = torch.full(case.q_nope.shape[:2], float("nan"))
    plan = plan or implementation.plan(case.batch)
    implementation.run(case.q_nope, case.q_rope, case.cache, plan, case.scale, causal, out, lse)
    return out, lse


def assert_right(case, out, lse, causal=True):
    expected_out, expected_lse = case.expected(causal)
    assert not out.isnan().any() and not lse.isnan().any()
    assert relative_error(out, expected_out) <= TOLERANCE[out.dtype]
    empty = expected_lse.isinf()
    assert torch.equal(lse.isinf(), empty) and (lse[empty] < 0).all() and (out[empty] == 0).all()
    torch.testing.assert_close(lse[~empty].double(), expected_lse[~empty], rtol=1e-6, atol=1e-5)
