"""Seeds of random cases: the same in every run, or from TESTS_SEED on (`nox -s all` draws and prints one)."""

import os


def first_seed() -> int:
    return int(os.environ.get("TESTS_SEED") or 0)


def seeds(count: int) -> range:
    return range(first_seed(), first_seed() + count)
