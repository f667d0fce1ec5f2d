"""ThreadSanitizer judges whether what the kernels' threads access is ordered as CUDA demands (`order.h`)."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mla_backend.jit import KernelVariant
from tests.emulation.emulator import Compiler, EmulatedModule, IsolatedModule

E4M3 = torch.float8_e4m3fn


class Race(Exception):
    """ThreadSanitizer's report of accesses that nothing orders."""


class RaceCheckedModule(IsolatedModule):
    """The kernels in processes that ThreadSanitizer watches.

    Args:
        unwatched: without faults, for what `not_watched` names. ThreadSanitizer takes milliseconds for a
            thread, and the planner has more of them than the decode kernel of a small batch.
    """

    _host_options = "-fPIC,-w,-g1,-fsanitize=thread"
    not_watched = ("plan", "workspace", "resident")

    def __init__(self, variant: KernelVariant, root: Path, compiler: Compiler, unwatched: EmulatedModule):
        super().__init__(variant, root, compiler)
        self._unwatched = unwatched

    def _call(self, name: str, arguments: Sequence[Tensor | float | None]) -> list[int]:
        if name in self.not_watched:
            return self._unwatched._call(name, arguments)
        return super()._call(name, arguments)

    def _run(self, command: list[str]) -> subprocess.CompletedProcess:
        called = subprocess.run(
            command, env=watched("halt_on_error=1 exitcode=66"), capture_output=True, text=True
        )
        if called.returncode == 66:
            raise Race(called.stderr)
        return called


class WarpsAloneModule(RaceCheckedModule):
    """Where a warp knows nothing of the wgmma of the other warps of its warpgroup: see `cuda_on_cpu.h`."""

    _host_options = f"{RaceCheckedModule._host_options},-DWARPS_ALONE"


def libtsan() -> Path:
    """Of the host's compiler; does not exist if that has none."""
    command = ["g++", "-print-file-name=libtsan.so"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def watched(options: str = "") -> dict[str, str]:
    """The environment of a process that ThreadSanitizer watches."""
    return {**os.environ, "LD_PRELOAD": str(libtsan()), "TSAN_OPTIONS": options}


# Several threads write the same value here, which does no harm.
SAME_VALUES = [
    ("decode/portable/softmax.cuh", f"{to} = {value};", f"__atomic_store(&{to}, &{value}, __ATOMIC_RELAXED);")
    for to, value in (("smem.refreshed", "remaining"), ("smem.factor[mine.row(i)]", "factor[i]"))
]

SEVERAL = [0, 9, 60, 300, 33, 70, 2], 2
"""Lengths and CTAs: several m-blocks a CTA, one of which they share."""
THREE = [640, 200, 60], 4
"""An m-block of three CTAs, the last of which shares another one with the fourth."""
LONG = [570], 3
"""An m-block of three CTAs."""
TWO_WIDE = [519, 472, 76], 5
"""With 64 rows: of five CTAs, the third has the last of an m-block's three splits and the first of another's.
So each of its consumers combines one."""
PAIRS = [300, 190], 4
"""Two m-blocks of two CTAs each."""
WHOLE, HALVES = ([300], 1), ([300], 2)
"""An m-block of one CTA, or of two."""
TWO = [200, 70], 2
"""Two m-blocks, which are short: fp8 keys take several times as long as others."""
THIRDS = [300], 3
"""An m-block of three CTAs, or clusters."""
