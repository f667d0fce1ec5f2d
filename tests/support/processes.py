"""Processes of their own for what tests run in an engine: new ones, or forks of one that has imported it."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

LIMIT = 500  # seconds: on a GPU, FlashInfer may first compile its prefill for minutes

_forks = multiprocessing.get_context("forkserver")


def preload(*modules: str) -> None:
    """Have the process whose forks run import these modules, when it starts."""
    _forks.set_forkserver_preload(list(modules))


def in_a_new_process(function: Callable[..., Any], *arguments: object) -> Any:
    """What ``function`` returns in a process that has imported nothing yet."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def run_script(script: Path, *arguments: object, **environment: str) -> str:
    """Run a Python script in its own process group; return its output, or fail the test with it."""
    with tempfile.NamedTemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT)
            status = process.returncode
        finally:
            kill_group(process.pid)
            process.wait()
        return _checked(script.name, status, Path(output.name))


def run_forked(function: Callable[..., None], *arguments: str, **environment: str) -> str:
    """Call a function in a fork with its own process group; return its output, or fail the test with it.

    What is `preload`ed was imported in the environment that the tests had when they forked first.
    """
    with tempfile.NamedTemporaryFile() as output:
        process = _forks.Process(target=_call, args=(output.name, environment, function, *arguments))
        process.start()
        try:
            process.join(LIMIT)
            status = process.exitcode
        finally:
            kill_group(process.pid)
            process.join()
        return _checked(f"{function.__name__}{arguments}", status, Path(output.name))


def _call(output: str, environment: dict[str, str], function: Callable[..., None], *arguments: str) -> None:
    os.setsid()
    with open(output, "wb") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    os.environ |= environment
    function(*arguments)


def kill_group(group: int) -> None:
    """End what is left of a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _checked(name: str, status: int | None, file: Path) -> str:
    output = file.read_text(errors="replace")
    if status is None:
        pytest.fail(f"{name} did not end within {LIMIT} s:\n{output[-6000:]}")
    if status:
        pytest.fail(f"{name} ended with {status}:\n{output[-6000:]}")
    return output
