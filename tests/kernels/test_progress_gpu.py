"""Decode ends, and is right, whatever else runs on the GPU; see `tests.support.progress`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

CHECKOUT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("MLA_BACKEND_PROGRESS_SECONDS", "0.5"))
"""How long each combination of a case runs; the processes beside each other run ten times as long."""

START = 300
"""Seconds that a process may take besides: it builds kernels, and waits while others build."""


def start(case: str, implementation: str, seconds: float, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.support.progress", case, implementation, str(seconds)]
    return subprocess.Popen(
        command,
        cwd=CHECKOUT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(timeout: float, *processes: subprocess.Popen) -> None:
    """Wait for all of them; whatever happens, none is left."""
    try:
        for process in processes:
            output, _ = process.communicate(timeout=timeout)
            assert process.returncode == 0, output
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"no end within {timeout:.0f} s:\n{process.communicate()[0]}")
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(params=["hopper", "portable"])
def implementation(implementation_of_a_family, request):
    return implementation_of_a_family(request.param)


@pytest.mark.parametrize("case", ["streams", "graphs", "gangs"])
def test_decoders_on_several_streams(case, implementation):
    finish(START + 20 * SECONDS, start(case, implementation, SECONDS))


@pytest.mark.parametrize("case", ["green", "green_context", "limited", "misfit"])
def test_streams_with_a_part_of_the_gpu(case, implementation):
    finish(START, start(case, implementation, SECONDS))


def test_two_processes():
    """Without MPS they take turns on the GPU."""
    finish(START + 20 * SECONDS, *(start("process", "auto", 10 * SECONDS) for _ in range(2)))


@pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="needs nvidia-cuda-mps-control")
@pytest.mark.parametrize("percentage", ["100", "40"], ids=lambda percentage: f"{percentage}% each")
def test_two_processes_under_mps(percentage, tmp_path):
    """Under MPS they run at the same time, each on the part of the GPU that it is granted."""
    folders = {f"CUDA_MPS_{name}_DIRECTORY": str(tmp_path / name) for name in ("PIPE", "LOG")}
    for folder in folders.values():
        os.mkdir(folder)
    daemon = subprocess.run(
        ["nvidia-cuda-mps-control", "-d"], env=os.environ | folders, capture_output=True, text=True
    )
    if daemon.returncode:
        pytest.skip(f"MPS does not start here: {daemon.stdout}{daemon.stderr}")
    try:
        # The daemon has numbered the GPUs that it was given anew.
        clients = folders | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage, "CUDA_VISIBLE_DEVICES": "0"}
        finish(START + 20 * SECONDS, *(start("process", "auto", 10 * SECONDS, **clients) for _ in range(2)))
    finally:
        quit_it = ["nvidia-cuda-mps-control"]
        subprocess.run(quit_it, env=os.environ | folders, input="quit -t 1\n", text=True, timeout=60)
