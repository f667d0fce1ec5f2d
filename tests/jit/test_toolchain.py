"""Which compiler builds kernels, and the one line that says why none does."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mla_backend import jit
from mla_backend.errors import KernelBuildError
from mla_backend.jit import KernelVariant, builder, find_toolchain, toolchain

VARIANT = KernelVariant("never-built", "// nothing\n", "80")


def fake_nvcc(path: Path, version: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release x, V{version}"\n')
    path.chmod(0o755)
    return path


class Machine:
    """A machine that has a host compiler, and no CUDA compiler until it is given one."""

    def __init__(self, root: Path, monkeypatch):
        self._root, self._patch = root, monkeypatch
        for name in ("MLA_BACKEND_NVCC", "MLA_BACKEND_JIT", "CUDA_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name in ("NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("MLA_BACKEND_CACHE", str(root / "cache"))
        monkeypatch.setattr(toolchain, "_SYSTEM_NVCC", root / "system/bin/nvcc")
        (root / "site/nvidia").mkdir(parents=True)
        monkeypatch.syspath_prepend(root / "site")
        monkeypatch.delitem(sys.modules, "nvidia", raising=False)
        self.bin = root / "bin"
        self.bin.mkdir()
        for name in ("sh", "gcc", "g++"):
            (self.bin / name).symlink_to(shutil.which("sh"))
        monkeypatch.setenv("PATH", str(self.bin))
        self.torch(None)
        self.driver(None)

    def torch(self, cuda: str | None) -> None:
        self._patch.setattr(torch.version, "cuda", cuda)

    def driver(self, cuda: str | None) -> None:
        self._patch.setattr(toolchain, "driver_version", lambda: cuda)

    def on_path(self, version: str) -> None:
        fake_nvcc(self.bin / "nvcc", version)

    def wheel(self, version: str) -> None:
        fake_nvcc(self._root / "site/nvidia/cu13/bin/nvcc", version)

    def system(self, version: str) -> None:
        fake_nvcc(self._root / "system/bin/nvcc", version)

    def cuda_home(self, version: str) -> None:
        self._patch.setenv("CUDA_HOME", str(self._root / "home"))
        fake_nvcc(self._root / "home/bin/nvcc", version)

    def named(self, version: str) -> None:
        self._patch.setenv("MLA_BACKEND_NVCC", str(fake_nvcc(self._root / "own/nvcc", version)))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def found() -> tuple[str, str]:
    toolchain = find_toolchain()
    return toolchain.origin, toolchain.version


def test_places_in_order(machine, tmp_path, monkeypatch):
    machine.system("13.0.5")
    assert found() == ("/usr/local/cuda", "13.0.5")
    machine.wheel("13.0.4")
    assert found() == ("pip", "13.0.4")
    machine.on_path("13.0.3")
    assert found() == ("PATH", "13.0.3")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "empty"))
    assert found() == ("PATH", "13.0.3")
    machine.cuda_home("13.0.2")
    assert found() == ("CUDA_HOME", "13.0.2")
    machine.named("13.0.1")
    assert found() == ("MLA_BACKEND_NVCC", "13.0.1")


def test_the_newest_wheel_is_taken_with_its_libraries(machine, tmp_path):
    machine.wheel("13.0.4")
    lib = tmp_path / "site/nvidia/cu14/lib"
    fake_nvcc(lib.parent / "bin/nvcc", "14.0.1")
    assert found() == ("pip", "14.0.1") and find_toolchain().flags == ()
    lib.mkdir()
    (lib / "libcudart_static.a").touch()
    wheel = find_toolchain()
    assert wheel.flags == (f"-L{lib}",)
    assert f"-L{lib}" in builder._command(VARIANT, wheel, "kernel.cu", "kernel.so")


def test_a_relative_path_serves_in_any_folder(machine, tmp_path, monkeypatch):
    machine.named("13.0.1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLA_BACKEND_NVCC", "own/nvcc")
    assert find_toolchain().nvcc == tmp_path / "own/nvcc"


@pytest.mark.parametrize(
    ("torchs", "taken"),
    [("12.8", "pip"), ("13.0", "PATH"), ("14.1", "/usr/local/cuda"), (None, "PATH"), ("15.0", "PATH")],
)
def test_torchs_own_major_is_preferred(machine, torchs, taken):
    machine.on_path("13.0.1")
    machine.wheel("12.9.1")
    machine.system("14.0.1")
    machine.torch(torchs)
    assert found()[0] == taken


def test_an_explicit_choice_decides_whatever_torchs_major_is(machine):
    machine.torch("12.8")
    machine.on_path("12.8.1")
    machine.cuda_home("13.0.1")
    assert found() == ("CUDA_HOME", "13.0.1")
    machine.named("13.1.1")
    assert found() == ("MLA_BACKEND_NVCC", "13.1.1")


def test_a_toolkit_that_is_too_old_is_passed_over(machine):
    machine.on_path("12.4.131")
    with pytest.raises(KernelBuildError, match=r"PATH: .* is of CUDA 12\.4\.131: .* need 12\.5 or newer"):
        find_toolchain()
    machine.wheel("12.5.40")
    assert found() == ("pip", "12.5.40")


@pytest.mark.parametrize("place", ["cuda_home", "named"])
def test_an_explicit_choice_that_does_not_serve_is_refused(machine, place):
    """Though another compiler would serve."""
    machine.on_path("13.0.1")
    variable = {"cuda_home": "CUDA_HOME", "named": "MLA_BACKEND_NVCC"}[place]
    getattr(machine, place)("11.8.89")
    with pytest.raises(
        KernelBuildError, match=rf"{variable}: .*11\.8\.89.*12\.5 .*correct or unset {variable}"
    ):
        find_toolchain()


def test_an_explicit_compiler_that_does_not_exist_is_refused(machine, tmp_path, monkeypatch):
    machine.on_path("13.0.1")
    monkeypatch.setenv("MLA_BACKEND_NVCC", str(tmp_path / "absent"))
    with pytest.raises(KernelBuildError, match=r"MLA_BACKEND_NVCC: .*absent is not an executable file"):
        find_toolchain()


def test_a_compiler_that_fails_is_refused(machine):
    machine.on_path("13.0.1")
    nvcc = machine.bin / "nvcc"
    nvcc.write_text(nvcc.read_text() + "exit 1\n")
    with pytest.raises(KernelBuildError, match="nvcc is not an executable file that answers --version"):
        find_toolchain()


def test_a_toolkit_that_is_newer_than_the_driver_is_passed_over(machine):
    machine.driver("12.8")
    machine.on_path("13.0.88")
    with pytest.raises(KernelBuildError, match=r"13\.0\.88: the driver serves CUDA 12\.8 and no newer major"):
        find_toolchain()
    machine.system("12.9.1")  # a newer minor version than the driver's is fine
    assert found() == ("/usr/local/cuda", "12.9.1")
    machine.driver("13.0")
    assert found() == ("PATH", "13.0.88")
    machine.named("14.0.1")
    with pytest.raises(KernelBuildError, match=r"MLA_BACKEND_NVCC: .*14\.0\.1: the driver serves CUDA 13\.0"):
        find_toolchain()


@pytest.mark.parametrize("compiler", ["gcc", "g++"])
def test_a_missing_host_compiler_is_named(machine, compiler, monkeypatch):
    machine.on_path("13.0.1")
    (machine.bin / compiler).unlink()
    with pytest.raises(KernelBuildError, match=rf"no {compiler.replace('+', '.')} on PATH.*install"):
        find_toolchain()
    with monkeypatch.context() as patch:
        for named in (sys.executable, str(machine.bin)):  # nvcc takes a folder, too
            patch.setenv("NVCC_CCBIN", named)
            assert found()[0] == "PATH"
        patch.setenv("NVCC_CCBIN", "/opt/clang")
        with pytest.raises(KernelBuildError, match="no /opt/clang, named by NVCC_CCBIN"):
            find_toolchain()
    for flags in ("-O3 -ccbin=/opt/clang", "--compiler-bindir /opt/clang"):
        monkeypatch.setenv("NVCC_APPEND_FLAGS", flags)
        assert found()[0] == "PATH"


def test_why_unavailable_agrees_with_what_loading_says(machine, tmp_path, monkeypatch):
    def reason() -> str:
        with pytest.raises(KernelBuildError) as refusal:
            jit.load(VARIANT)
        line = jit.why_unavailable([VARIANT])
        assert line == str(refusal.value) and "\n" not in line and "never-built (sm_80)" in line
        return line

    assert jit.why_unavailable([]) is None
    assert "no usable CUDA compiler" in reason()
    machine.on_path("12.4.1")
    assert "12.5 or newer" in reason()
    machine.on_path("13.0.2")
    toolchain._ask_version.cache_clear()
    assert jit.why_unavailable([VARIANT]) is None
    machine.driver("12.8")
    assert "driver serves CUDA 12.8" in reason()
    machine.driver("13.0")
    (machine.bin / "g++").unlink()
    assert "no g++ on PATH" in reason()
    monkeypatch.setenv("MLA_BACKEND_JIT", "0")
    assert "MLA_BACKEND_JIT=0 forbids" in reason()
    monkeypatch.setenv("MLA_BACKEND_JIT", "off")
    assert jit.why_unavailable([VARIANT]) == "MLA_BACKEND_JIT must be 0 or 1, not 'off'"


def test_why_unavailable_tries_the_cache_folder(machine, tmp_path, monkeypatch):
    machine.on_path("13.0.1")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path / "file/cache"))
    assert "set MLA_BACKEND_CACHE to a writable folder" in jit.why_unavailable([VARIANT])


def test_wheels_are_named_where_they_serve(machine):
    assert "pip install nvidia-cuda-nvcc " in jit.why_unavailable([VARIANT])
    machine.driver("13.0")
    assert "pip install nvidia-cuda-nvcc " in jit.why_unavailable([VARIANT])
    machine.driver("12.9")  # wheels of CUDA 12 have no nvcc
    line = jit.why_unavailable([VARIANT])
    assert "pip" not in line and "12.5 to 12.x" in line
    machine.driver("11.8")  # no toolkit serves
    assert jit.why_unavailable([VARIANT]).endswith(
        "remedy: update the driver (R525 or newer): it serves CUDA 11.8, the kernels need 12.5"
    )


def entry_of(variant: KernelVariant, version: str) -> Path:
    entry = jit.cache_dir() / f"{variant.name}-{variant.key()}-nvcc{version}-glibc2.17"
    entry.mkdir(parents=True)
    (entry / "kernel.so").touch()
    return entry


def test_why_unavailable_is_about_kernels_that_are_not_built(machine):
    """Without a compiler, of a kernel that is there and one that is not."""
    entry_of(VARIANT, "13.0.88")
    assert jit.why_unavailable([VARIANT]) is None
    other = KernelVariant("other", "// nothing\n", "90a")
    assert "kernel other (sm_90a) cannot be built" in jit.why_unavailable([VARIANT, other])


def test_a_kernel_built_with_a_newer_toolkit_than_the_drivers_is_not_taken(machine):
    older, newer = entry_of(VARIANT, "12.8.93"), entry_of(VARIANT, "13.0.88")
    assert jit.find_entry(VARIANT) == newer
    machine.driver("12.9")
    assert jit.find_entry(VARIANT) == older
    (older / "kernel.so").unlink()
    assert jit.find_entry(VARIANT) is None and jit.why_unavailable([VARIANT])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")
def test_the_drivers_version_is_read_without_a_context(tmp_path):
    """From a driver that can do nothing else: any other call into it would fail."""
    driver = 'extern "C" int cuDriverGetVersion(int* version) { *version = 12080; return 0; }\n'
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", library], input=driver, text=True, check=True
    )
    code = "from mla_backend.jit import toolchain as t; print(t.driver_version(), t.driver_serves('13.0.1'))"
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert answer.stdout.split() == ["12.8", "False"], answer.stderr


def test_a_gpu_that_is_newer_than_the_compiler_is_named_before_a_build(machine):
    nvcc = fake_nvcc(machine.bin / "nvcc", "12.6.20")
    nvcc.write_text(nvcc.read_text() + "echo compute_80\necho compute_90\n")
    assert jit.why_unavailable([KernelVariant("never-built", "// nothing\n", "90a")]) is None
    reason = jit.why_unavailable([VARIANT, KernelVariant("never-built", "// nothing\n", "100")])
    assert "does not know sm_100, only 80, 90; remedy: install a newer CUDA toolkit" in reason
