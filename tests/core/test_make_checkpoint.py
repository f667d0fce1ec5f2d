"""examples/make_checkpoint.py where a package is missing. The engines' tests run it where none is."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples/make_checkpoint.py"


def test_it_names_what_is_missing():
    code = f"import runpy, sys; sys.modules['safetensors'] = None; runpy.run_path('{SCRIPT}')"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stderr.startswith("make_checkpoint.py: No module named 'safetensors")
    assert process.stderr.endswith("; pip install transformers tokenizers safetensors\n")
