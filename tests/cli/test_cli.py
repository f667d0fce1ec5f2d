"""`mla-backend doctor` and `build`."""

import sys

import pytest
from typer.testing import CliRunner

from mla_backend import jit, kernels
from mla_backend.cli import app
from mla_backend.errors import KernelBuildError
from mla_backend.jit import KernelVariant

GOOD = 'extern "C" int good() { return 1; }\n'


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLA_BACKEND_JIT", raising=False)


def test_doctor_names_what_it_finds(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_JIT", "0")
    outcome = invoke("doctor")
    assert outcome.exit_code == 0, outcome.output
    for part in (
        "compiler",
        "attention path",
        "reference",
        "forbidden by MLA_BACKEND_JIT=0",
        "vllm",
        "sglang",
    ):
        assert part in outcome.output


def test_doctor_survives_everything_being_broken(tmp_path, monkeypatch):
    """No compiler, and engines whose integrations fail in three ways."""

    def no_compiler():
        raise KernelBuildError("no CUDA compiler found")

    (tmp_path / "mla_backend_vllm.py").write_text("raise OSError('libcuda.so is missing')")
    (tmp_path / "mla_backend_sglang.py").write_text(
        "def describe():\n  yield 'first line'\n  raise KeyError(3)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mla_backend_vllm", "mla_backend_sglang"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("mla_backend.jit.find_toolchain", no_compiler)
    monkeypatch.setattr("mla_backend.cli.doctor._version", lambda name: "9.9")
    monkeypatch.setattr("mla_backend.MLADecoder", None)
    outcome = invoke("doctor")
    for name in ("mla_backend_vllm", "mla_backend_sglang"):
        sys.modules.pop(name, None)
    assert outcome.exit_code == 0, outcome.output
    for part in ("no CUDA compiler found", "OSError: libcuda.so is missing", "first line", "KeyError: 3"):
        assert part in outcome.output


@pytest.fixture
def variants(monkeypatch):
    shipped = [KernelVariant("good-a", GOOD, "80"), KernelVariant("good-b", GOOD, "90a")]
    monkeypatch.setattr("mla_backend.cli.build.local_archs", set)
    monkeypatch.setattr(
        kernels, "shipped_variants", lambda arch=None: [v for v in shipped if arch in (None, v.arch)]
    )
    return shipped


@pytest.fixture
def compiler():
    try:
        return jit.find_toolchain()
    except KernelBuildError as error:
        pytest.skip(str(error))


def test_build_builds_what_is_asked_for(variants, compiler):
    outcome = invoke("build", "--arch", "80", "-j", "1")
    assert outcome.exit_code == 0 and "built" in outcome.output and "good-b" not in outcome.output
    outcome = invoke("build", "--match", "good-*")
    assert outcome.exit_code == 0
    assert [line.split()[0] for line in outcome.output.splitlines() if "good-a" in line] == ["cached"]
    assert all(jit.find_entry(variant) for variant in variants)


def test_build_lists_the_variants_if_none_matches(variants):
    outcome = invoke("build", "--arch", "80", "--match", "*-b")
    assert outcome.exit_code == 2
    assert "good-a (sm_80)" in outcome.output and "good-b (sm_90a)" in outcome.output


def test_build_says_that_nothing_ships_for_the_gpu_here(variants, monkeypatch):
    monkeypatch.setattr("mla_backend.cli.build.local_archs", lambda: {"120"})
    outcome = invoke("build")
    assert outcome.exit_code == 2
    assert "no variant matches arch 120" in outcome.output


def test_build_goes_on_after_a_failure_and_ends_with_it(variants, compiler):
    variants.insert(0, KernelVariant("bad", "int f() { return undeclared; }\n", "80"))
    outcome = invoke("build")
    assert outcome.exit_code == 1
    assert "1 of 3 variants failed" in outcome.output and '"undeclared"' in outcome.output
    assert all(jit.find_entry(variant) for variant in variants[1:])


def test_build_can_store_inside_the_package(variants, compiler, tmp_path, monkeypatch):
    monkeypatch.setattr("mla_backend.jit.prebuilt_dir", lambda: tmp_path / "prebuilt")
    monkeypatch.setattr("mla_backend.jit.builder.prebuilt_dir", lambda: tmp_path / "prebuilt")
    assert invoke("build").exit_code == 0  # in the cache, which is not the package
    assert invoke("build", "--prebuilt").exit_code == 0
    assert all(jit.find_entry(variant).parent == tmp_path / "prebuilt" for variant in variants)
    # A shipped kernel serves with any compiler, and with none.
    monkeypatch.setattr("mla_backend.jit.toolchain._candidates", lambda: iter(()))
    assert invoke("build").exit_code == 0
