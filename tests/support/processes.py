"""Processes of their own for what tests run in an engine: new ones, or forks of one that has imported it."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
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
            with _running_group(process.pid, script.name, Path(output.name)):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LIMIT)
                status = process.returncode
        finally:
            process.wait()
        return _checked(script.name, status, Path(output.name))


def run_forked(function: Callable[..., None], *arguments: str, **environment: str) -> str:
    """Call a function in a fork with its own process group; return its output, or fail the test with it.

    What is `preload`ed was imported in the environment that the tests had when they forked first.
    """
    with tempfile.NamedTemporaryFile() as output:
        name = f"{function.__name__}{arguments}"
        process = _forks.Process(target=_call, args=(output.name, environment, function, *arguments))
        process.start()
        try:
            with _running_group(process.pid, name, Path(output.name)):
                process.join(LIMIT)
                status = process.exitcode
        finally:
            process.join()
        return _checked(name, status, Path(output.name))


_running: dict[int, tuple[str, Path]] = {}
"""By process group: the name of what it runs, and the file with its output."""


@contextlib.contextmanager
def _running_group(group: int, name: str, output: Path) -> Iterator[None]:
    """While a test waits for a process group. At the end, what is left of the group is killed."""
    _running[group] = name, output
    try:
        with shown_if_interrupted():
            yield
    finally:
        kill_group(group)
        del _running[group]


@contextlib.contextmanager
def shown_if_interrupted() -> Iterator[None]:
    """If an exception ends the block, kill all that runs, and print the end of its output.

    A test's time limit and Ctrl-C raise such exceptions, in the main thread only. After Ctrl-C, pytest shows
    what was printed only with -s.
    """
    try:
        yield
    except BaseException:
        for group, (name, output) in list(_running.items()):
            print(f"{name} still ran:\n{_end(output)}", file=sys.stderr)
            kill_group(group)
        raise


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


def _end(file: Path) -> str:
    return file.read_text(errors="replace")[-6000:]


def _checked(name: str, status: int | None, file: Path) -> str:
    if status is None:
        pytest.fail(f"{name} did not end within {LIMIT} s:\n{_end(file)}")
    if status:
        pytest.fail(f"{name} ended with {status}:\n{_end(file)}")
    return file.read_text(errors="replace")
