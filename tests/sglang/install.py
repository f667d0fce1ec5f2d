"""Install SGLang for the tests into the current environment, which must have uv and a CPU build of torch.

    python tests/sglang/install.py 0.5.23

SGLang is installed from its unchanged wheel. Its dependencies come from a pinned list without the CUDA
packages: the platform of the tests never imports ``sgl_kernel``, flashinfer and the like.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Packages whose versions SGLang pins itself, in each release another one.
PINS = {
    "0.5.16": ("transformers==5.12.1", "tokenizers==0.22.2", "huggingface_hub==1.33.0", "xgrammar==0.2.1"),
    "0.5.23": ("transformers==5.19.0", "tokenizers==0.23.2", "huggingface_hub==2.4.0", "xgrammar==0.2.7"),
}
TORCHVISION = "torchvision==0.28.0"
DECLARED_OPERATORS = """import torch

_library = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _library.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def install(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "uv", "--quiet", "pip", "install", *arguments], check=True)


def declare_torchvision_operators() -> None:
    """Declare two operators that torchvision's Python code needs when SGLang and transformers import it.

    Torchvision's wheel is a CUDA build, so its library does not load next to a CPU build of torch.
    """
    module = Path(importlib.util.find_spec("torchvision").origin)
    source = module.read_text()
    if not source.startswith(DECLARED_OPERATORS):
        module.unlink()  # it may be a link into uv's cache, which other environments share
        module.write_text(DECLARED_OPERATORS + source)


def main() -> None:
    version = sys.argv[1]
    install("--no-deps", "-r", str(HERE / "requirements.txt"), *PINS[version], TORCHVISION)
    declare_torchvision_operators()
    # SGLang's wheel is tagged for one Python version, because of extension modules that no test uses.
    install(
        "--no-deps", "--python-version=3.12", "--python-platform=x86_64-manylinux_2_34", f"sglang=={version}"
    )
    install("--no-deps", "--reinstall-package=sglang-cpu-platform", str(HERE / "cpu_platform"))


if __name__ == "__main__":
    main()
