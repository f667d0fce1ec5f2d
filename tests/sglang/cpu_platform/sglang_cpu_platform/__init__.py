"""SGLang on plain CPU torch, without ``sgl_kernel``: chosen with ``SGLANG_PLATFORM=plain_cpu``.

SGLang's own CPU mode needs its compiled CPU kernels, which no package index has. Its out-of-tree platforms
need none; this is one, with torch in the few places where SGLang would start a Triton kernel.
"""

import os

NAME = "plain_cpu"


def is_selected() -> bool:
    return os.environ.get("SGLANG_PLATFORM") == NAME


def activate() -> str | None:
    """The platform's class for SGLang's entry point; None leaves the choice to others."""
    return "sglang_cpu_platform.platform.PlainCpuPlatform" if is_selected() else None
