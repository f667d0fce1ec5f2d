"""The command `mla-backend`. It is outside of the package, which cannot be imported without torch."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    if importlib.util.find_spec("torch") is None:
        sys.exit("mla-backend needs torch: pip install torch")
    from mla_backend.cli import main

    main()
