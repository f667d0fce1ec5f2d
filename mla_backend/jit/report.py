"""Reads ptxas' report on each kernel that it compiled."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class KernelResources:
    """Resources of one kernel (`__global__` function), from `ptxas -v`.

    Attributes:
        name: mangled name.
        registers: per thread.
        stack_bytes: local memory per thread, which is off-chip.
        spill_store_bytes, spill_load_bytes: register spills per thread.
        static_smem_bytes: statically allocated shared memory per CTA. Dynamic shared memory is chosen at
            launch and not in the report.
    """

    name: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_smem_bytes: int


@dataclass(frozen=True)
class CompileReport:
    """The compiler's report on one variant: its kernels, and every warning or performance advisory."""

    kernels: tuple[KernelResources, ...]
    warnings: tuple[str, ...]


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")
_ADVICE = re.compile(
    r"\bwarning\b|potential performance loss|setmaxnreg|serialized|is injected", re.IGNORECASE
)


def parse(log: str) -> CompileReport:
    """Parse the output of `nvcc -Xptxas -v`.

    A function that was not inlined is listed after the kernel that was compiled with it. Its stack and spills
    count for that kernel, so a report without spills means that there are none anywhere.
    """
    kernels: list[KernelResources] = []
    warnings: list[str] = []
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            kernels.append(KernelResources(match[1], 0, 0, 0, 0, 0))
        elif kernels and (match := _FRAME.search(line)):
            stack, stores, loads = map(int, match.groups())
            last = kernels[-1]
            kernels[-1] = replace(
                last,
                stack_bytes=max(last.stack_bytes, stack),
                spill_store_bytes=last.spill_store_bytes + stores,
                spill_load_bytes=last.spill_load_bytes + loads,
            )
        elif kernels and (match := _USED.search(line)):
            smem = _SMEM.search(line)
            kernels[-1] = replace(
                kernels[-1], registers=int(match[1]), static_smem_bytes=int(smem[1]) if smem else 0
            )
        elif _ADVICE.search(line):
            warnings.append(line.strip())
    return CompileReport(tuple(kernels), tuple(warnings))
