"""Which tests run: those marked `gpu` where there is a GPU; markers that follow from a test's folder.

CONTRIBUTING.md says what the markers are for.
"""

import os
import re
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent
# For `tests.support`. Last, so that an installed `mla_backend` comes before the checkout's.
sys.path.append(str(TESTS.parent))

# torch.compile keeps generated C++ by a key that lacks the vector instructions that it was generated for.
# With fewer of them it does not compile, or computes with vectors of another size.
if CAPABILITY := os.environ.get("ATEN_CPU_CAPABILITY"):
    GENERATED = Path(tempfile.gettempdir()) / f"torchinductor-{os.getuid()}-{CAPABILITY}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(GENERATED))

# Markers of tests that are not marked `faults`; the first folder that a test is in counts.
FOLDERS = {"emulation/races": "races", "emulation": "kernels", "compile": "kernels"}
GPU_TESTS = pytest.StashKey[int]()


def pytest_report_header() -> str:
    from tests.support.seeds import first_seed

    return f"random geometry: seeds from {first_seed()} on; TESTS_SEED sets the first"


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marker
def pytest_collection_modifyitems(config, items):
    keep_smoke_of_named_cases(config, items)
    for item in items:
        if not item.get_closest_marker("faults"):
            folder = item.path.relative_to(TESTS).parent
            names = [name for place, name in FOLDERS.items() if folder.is_relative_to(place)]
            for name in names[:1]:
                item.add_marker(name)
    if not torch.cuda.is_available():
        leave_out_gpu_tests(config, items)


def keep_smoke_of_named_cases(config, items) -> None:
    """`smoke(name=value)` marks the cases whose parameter has this value, or one of these values."""
    functions, named = {}, set()
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        for mark in [mark for mark in item.own_markers if mark.name == "smoke"]:
            functions[id(mark)] = item.originalname
            if all(
                params[name] in value if is_several(value) else params[name] == value
                for name, value in mark.kwargs.items()
            ):
                named.add(id(mark))
            else:
                item.own_markers.remove(mark)
    if not any("::" in argument for argument in config.args):  # else items lack cases
        unnamed = {function for mark, function in functions.items() if mark not in named}
        if unnamed:
            raise pytest.UsageError(f"smoke(...) names no case of {', '.join(sorted(unnamed))}")


def is_several(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str)


def leave_out_gpu_tests(config, items) -> None:
    """Deselect them; but if -m asks for them, skip each with the reason."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if re.search(r"\bgpu\b", config.option.markexpr):
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none"))
        return
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=gpu_tests)
    config.stash[GPU_TESTS] = len(gpu_tests)
    if hasattr(config, "workeroutput"):
        config.workeroutput["gpu_tests"] = len(gpu_tests)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Each process of pytest-xdist has collected all tests."""
    node.config.stash[GPU_TESTS] = getattr(node, "workeroutput", {}).get("gpu_tests", 0)


def pytest_terminal_summary(terminalreporter, config):
    if count := config.stash.get(GPU_TESTS, 0):
        terminalreporter.write_line(f"{count:,} GPU tests not run: torch sees no NVIDIA GPU")


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    """A folder of this run of pytest, for all of its processes."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
