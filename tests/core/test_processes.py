"""What a test shows of its processes when it is interrupted, by Ctrl-C or by its time limit."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.processes import run_forked, run_script, shown_if_interrupted


@pytest.fixture(autouse=True)
def interruptible():
    """Processes that a shell has started in the background ignore SIGINT, and so would these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def sleeper(ready):
    """A script that prints its process id, makes a file, and sleeps."""
    return f"""
import os, pathlib, time
print("engine", os.getpid(), flush=True)
pathlib.Path({str(ready)!r}).touch()
time.sleep(600)
"""


def interrupt_when_ready(*files):
    def interrupt():
        while not all(file.exists() for file in files):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


def assert_shown_and_dead(errors, count):
    ids = [int(line.split()[1]) for line in errors.splitlines() if line.startswith("engine")]
    assert len(ids) == count
    for process in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_an_interrupted_script(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(sleeper(tmp_path / "ready"))
    interrupt_when_ready(tmp_path / "ready")
    with pytest.raises(KeyboardInterrupt):
        run_script(script)
    errors = capfd.readouterr().err
    assert "script.py still ran:" in errors
    assert_shown_and_dead(errors, 1)


def test_an_interrupted_fork(tmp_path, capfd):
    interrupt_when_ready(tmp_path / "ready")
    with pytest.raises(KeyboardInterrupt):
        run_forked(exec, sleeper(tmp_path / "ready"))
    assert_shown_and_dead(capfd.readouterr().err, 1)


def test_two_interrupted_scripts_that_threads_wait_for(tmp_path, capfd):
    scripts, ready = [tmp_path / "a.py", tmp_path / "b.py"], [tmp_path / "a", tmp_path / "b"]
    for script, file in zip(scripts, ready, strict=True):
        script.write_text(sleeper(file))
    interrupt_when_ready(*ready)
    with pytest.raises(KeyboardInterrupt), ThreadPoolExecutor() as executor, shown_if_interrupted():
        list(executor.map(run_script, scripts))
    assert_shown_and_dead(capfd.readouterr().err, 2)
