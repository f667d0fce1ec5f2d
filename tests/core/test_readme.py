"""The examples of the library in the documentation run as they stand there."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def run_example(document: str, names: dict) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    exec(compile(example, document, "exec"), names)
    assert names["out"].shape == (2, 16, 512) and names["out"].isfinite().all()
    assert names["lse"].dtype is torch.float32 and names["lse"].isfinite().all()


def test_the_examples_of_the_library_run():
    names: dict = {}
    run_example("README.md", names)
    run_example("docs/kernels-sm90.md", names)
