"""Shared test set-up: tests marked `gpu` are skipped, with the reason, where there is no GPU."""

import os
import sys
from pathlib import Path

import pytest
import torch

# For `tests.support`. Last, so that an installed `mla_backend` comes before the checkout's.
sys.path.append(str(Path(__file__).resolve().parents[1]))


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    """A folder of this run of pytest, for all of its processes."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
