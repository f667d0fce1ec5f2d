"""What tests need that may not be there."""

import os
from typing import NoReturn

import pytest


def skip_without(name: str, reason: object) -> NoReturn:
    """Skip the test; but fail it if TESTS_REQUIRE has this name in its list (noxfile.py)."""
    if name in os.environ.get("TESTS_REQUIRE", "").split(","):
        pytest.fail(f"{name} is required by TESTS_REQUIRE: {reason}", pytrace=False)
    pytest.skip(str(reason))
