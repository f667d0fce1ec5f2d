"""The README's example of the library runs as it stands there."""

import re
from pathlib import Path

import torch

README = Path(__file__).parents[2] / "README.md"


def test_the_example_of_the_library_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {}
    exec(compile(example, str(README), "exec"), names)
    assert names["out"].shape == (2, 16, 512) and names["out"].isfinite().all()
    assert names["lse"].dtype is torch.float32 and names["lse"].isfinite().all()
