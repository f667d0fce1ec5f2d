"""`mla-backend cache`: which built kernels are listed as in use, and which are removed."""

import pytest
from typer.testing import CliRunner

from mla_backend import jit, kernels
from mla_backend.cli import app
from mla_backend.jit import KernelVariant
from mla_backend.jit.toolchain import Toolchain

KNOWN = KernelVariant("known", "// of this version\n", "80")


def cache(*arguments):
    return CliRunner().invoke(app, ["cache", *arguments])


@pytest.fixture
def entries(tmp_path, monkeypatch):
    """Kernels of this version and of others, by what they are."""
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path))
    monkeypatch.delenv("MLA_BACKEND_JIT", raising=False)
    monkeypatch.setattr(kernels, "shipped_variants", lambda arch=None: [KNOWN])
    nvcc = Toolchain(tmp_path / "nvcc", "13.0.88", "PATH")
    monkeypatch.setattr("mla_backend.jit.store.find_toolchain", lambda: nvcc)
    names = {
        "current": f"known-{KNOWN.key()}-nvcc13.0.88",
        "other version": "known-0123456789abcdef-nvcc13.0.88",
        "other compiler": f"known-{KNOWN.key()}-nvcc12.9.1",
        "unknown": "mine-r16-0123456789abcdef-nvcc13.0.88",
    }
    made = {what: tmp_path / f"{name}-glibc2.36" for what, name in names.items()}
    for folder in made.values():
        folder.mkdir()
        (folder / "kernel.so").write_bytes(bytes(1_500_000))
    (tmp_path / ".building-host-1-abc").mkdir()
    (tmp_path / "notes.txt").touch()
    return made


def test_kernels_are_listed_with_their_use(entries, tmp_path):
    for arguments in ((), ("list",)):
        outcome = cache(*arguments)
        assert outcome.exit_code == 0
        states = {tuple(line.split()[:2]): " ".join(line.split()[4:]) for line in outcome.stdout.splitlines()}
        assert states["known", "12.9.1"] == "of another compiler than 13.0.88"
        assert states["mine-r16", "13.0.88"] == "may be used"
        assert outcome.stdout.count("of another version") == 1
        assert outcome.stdout.endswith(f"4 kernels, 6.0 MB in {tmp_path}\n")


def test_what_is_not_used_is_removed(entries, tmp_path):
    outcome = cache("clean")
    assert outcome.exit_code == 0
    assert outcome.stdout == f"removed 2 kernels, 3.0 MB, from {tmp_path}; 2 are left\n"
    assert [what for what, folder in entries.items() if folder.exists()] == ["current", "unknown"]
    assert (tmp_path / "notes.txt").exists() and (tmp_path / ".building-host-1-abc").exists()


def test_where_nothing_is_built_kernels_of_any_compiler_stay(entries, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_JIT", "0")
    cache("clean")
    assert [what for what, folder in entries.items() if not folder.exists()] == ["other version"]


def test_all_kernels_can_be_removed(entries, tmp_path):
    cache("clean", "--all")
    assert not any(folder.exists() for folder in entries.values()) and (tmp_path / "notes.txt").exists()
    assert cache().stdout == f"0 kernels, 0.0 MB in {tmp_path}\n"


def test_a_cache_that_is_not_there_is_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path / "none"))
    assert cache().exit_code == 0
    monkeypatch.setenv("MLA_BACKEND_CACHE", "~nobody-of-this-name/cache")
    outcome = cache("clean")
    assert outcome.exit_code == 1 and "set MLA_BACKEND_CACHE" in outcome.stderr


def test_the_commands_lines_are_of_the_store(entries):
    stored = jit.stored_kernels(jit.cache_dir(), [KNOWN])
    assert {kernel.entry for kernel in stored} == set(entries.values())
    assert {kernel.num_bytes for kernel in stored} == {1_500_000}
