"""Install SGLang for the tests into the environment that runs this, which has a CPU build of torch already.

    python tests/sglang/install.py 0.5.23

SGLang itself comes as it is from its wheel. What it depends on comes from a pinned list that leaves out the
CUDA packages: ``sgl_kernel``, flashinfer and the like are never imported on the platform of the tests.
"""

import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
# Of the packages that SGLang pins itself, the versions differ from release to release.
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


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def install_sglang(version: str) -> None:
    """Unpack the wheel. Its tag names one Python version, for extension modules that nothing here needs."""
    with tempfile.TemporaryDirectory() as folder:
        pip(
            "download", "--no-deps", "--only-binary=:all:", "--python-version=3.12",
            "--platform=manylinux_2_34_x86_64", "--dest", folder, f"sglang=={version}",
        )  # fmt: skip
        (wheel,) = Path(folder).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(sysconfig.get_path("purelib"))


def declare_torchvision_operators() -> None:
    """Torchvision's wheel is a CUDA build: beside a CPU torch its library does not load, and the Python code,
    which SGLang and transformers import but never call, then misses two operators."""
    module = Path(importlib.util.find_spec("torchvision").origin)
    source = module.read_text()
    if not source.startswith(DECLARED_OPERATORS):
        module.write_text(DECLARED_OPERATORS + source)


def main() -> None:
    version = sys.argv[1]
    pip("install", "--no-deps", "-r", str(HERE / "requirements.txt"), *PINS[version], TORCHVISION)
    install_sglang(version)
    declare_torchvision_operators()
    pip("install", "--no-deps", str(HERE / "cpu_platform"))


if __name__ == "__main__":
    main()
