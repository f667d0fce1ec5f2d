"""SGLang on plain CPU torch, without ``sgl_kernel``; selected with ``SGLANG_PLATFORM=plain_cpu``.

SGLang's own CPU mode needs compiled CPU kernels, which no package index has. An out-of-tree platform such as
this one needs none. It replaces the few Triton kernels that SGLang would launch by torch functions.
"""

import os

NAME = "plain_cpu"


def is_selected() -> bool:
    return os.environ.get("SGLANG_PLATFORM") == NAME


def activate() -> str | None:
    """The path of the platform class for SGLang's entry point; None if another platform is selected."""
    return "sglang_cpu_platform.platform.PlainCpuPlatform" if is_selected() else None
