"""Shared test set-up: tests marked `gpu` are skipped, with the reason, where there is no GPU."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
