"""The JIT: look-up order, one build per machine, errors; on a GPU the built kernel's answer."""

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mla_backend.errors import InvalidInputError, KernelBuildError
from mla_backend.jit import KernelVariant, arch_of, build, cache_dir, compile_report, find_toolchain, load
from mla_backend.jit import variant as variant_module

SCALE = r"""
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

__global__ void scale_kernel(float* x, int n, float factor) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= factor;
}

void scale(tvm::ffi::TensorView x, double factor) {
  if (x.ndim() != 1) TVM_FFI_THROW(ValueError) << "x must have 1 dimension, not " << x.ndim();
  int n = static_cast<int>(x.size(0));
  if (n == 0) return;
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(x.device().device_type, x.device().device_id));
  scale_kernel<<<(n + 255) / 256, 256, 0, stream>>>(static_cast<float*>(x.data_ptr()), n, (float)factor);
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale, scale);
"""
# Host code without any library: builds fast, for the tests that are not about the module's content.
TINY = 'extern "C" __attribute__((visibility("default"))) int answer() {{ return {value}; }}\n'


def has_compiler() -> bool:
    try:
        find_toolchain()
    except KernelBuildError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a CUDA compiler")


def tiny(value: int, **kwargs) -> KernelVariant:
    return KernelVariant("tiny", TINY.format(value=value), kwargs.pop("arch", "80"), **kwargs)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    for name in ("MLA_BACKEND_NVCC", "MLA_BACKEND_JIT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def counting_nvcc(tmp_path, monkeypatch):
    """nvcc behind a script that writes a line for each compilation; returns a function that counts them."""
    log = tmp_path / "calls"
    script = tmp_path / "nvcc"
    real = find_toolchain()
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo x >> {log}\nexec {real.nvcc} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("MLA_BACKEND_NVCC", str(script))
    return lambda: len(log.read_text().split()) if log.exists() else 0


@pytest.fixture(scope="module")
def scale_module(tmp_path_factory):
    arch = arch_of(torch.device("cuda")) if torch.cuda.is_available() else "90a"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLA_BACKEND_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load(KernelVariant("scale", SCALE, arch))


def test_module_takes_torch_tensors_and_raises_python_exceptions(scale_module):
    scale_module.scale(torch.empty(0), 2.0)
    with pytest.raises(ValueError, match="x must have 1 dimension, not 2"):
        scale_module.scale(torch.empty(2, 0), 2.0)
    with pytest.raises(TypeError):
        scale_module.scale(torch.empty(0), "two")


@pytest.mark.gpu
def test_module_runs_on_torchs_current_stream(scale_module):
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)  # work on another stream would overtake this
        x.copy_(torch.arange(1000.0) + 1)
        scale_module.scale(x, 3.0)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(x.cpu(), (torch.arange(1000.0) + 1) * 3)


def test_second_process_takes_the_cached_entry_without_compiling(counting_nvcc):
    variant = tiny(1)
    assert [result.cached for result in build([variant])] == [False]
    assert [result.cached for result in build([variant])] == [True]
    assert counting_nvcc() == 1


def test_eight_processes_build_once(counting_nvcc):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)

    def build_at_once():
        barrier.wait()
        sys.exit(0 if build([tiny(2)])[0].error is None else 1)

    processes = [context.Process(target=build_at_once) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 8
    assert counting_nvcc() == 1


def test_death_of_a_building_process_harms_nobody(tmp_path, monkeypatch):
    slow = tmp_path / "nvcc"
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] || sleep 60\nexec {find_toolchain().nvcc} "$@"\n')
    slow.chmod(0o755)
    variant = tiny(3)
    code = f"from mla_backend.jit import *; build([KernelVariant('tiny', {variant.source!r}, '80')])"
    env = os.environ | {"MLA_BACKEND_NVCC": str(slow)}
    victim = subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not list(cache_dir().glob(".building-*/*/*.cu")):
            assert time.monotonic() < deadline and victim.poll() is None
            time.sleep(0.05)
    finally:
        os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()
    (result,) = build([variant])
    assert result.error is None and not result.cached


@pytest.mark.parametrize("changed", ["source", "arch", "flags", "header", "nested header"])
def test_every_input_of_the_build_is_in_the_key(changed, tmp_path, monkeypatch):
    monkeypatch.setattr(variant_module, "csrc_dir", lambda: tmp_path)
    (tmp_path / "common").mkdir()
    (tmp_path / "outer.cuh").write_text('#  include "common/inner.cuh"\n')
    (tmp_path / "common/inner.cuh").write_text('#include "sibling.cuh"\n')
    (tmp_path / "common/sibling.cuh").write_text("// 1\n")
    source = '#include "outer.cuh"\n#include <vector>\n#include "not/ours.h"\n'
    before = KernelVariant("v", source, "80")
    key, after = before.key(), before
    if changed == "source":
        after = KernelVariant("v", source + " ", "80")
    elif changed == "arch":
        after = KernelVariant("v", source, "86")
    elif changed == "flags":
        after = KernelVariant("v", source, "80", ("-lineinfo",))
    elif changed == "header":
        (tmp_path / "outer.cuh").write_text('#include "common/inner.cuh"\n// more\n')
    else:
        (tmp_path / "common/sibling.cuh").write_text("// 2\n")
    assert after.key() != key
    assert before.key() == before.key()


def test_another_compiler_version_is_another_entry(tmp_path, monkeypatch):
    variant = tiny(4)
    build([variant])
    (first,) = cache_dir().glob("tiny-*-nvcc*/")
    other = first.with_name(first.name.rpartition("nvcc")[0] + "nvcc1.0.0")
    first.rename(other)
    (result,) = build([variant])
    assert not result.cached


def test_without_a_compiler_a_cached_kernel_serves_and_a_new_one_is_refused(monkeypatch):
    build([tiny(5)])
    monkeypatch.setattr("mla_backend.jit.toolchain._candidates", lambda: iter(()))
    assert build([tiny(5)])[0].cached
    with pytest.raises(KernelBuildError, match=r"tiny \(sm_80\).*no CUDA compiler.*nvidia-cuda-nvcc"):
        load(tiny(6))


def test_building_can_be_forbidden(monkeypatch):
    build([tiny(7)])
    monkeypatch.setenv("MLA_BACKEND_JIT", "0")
    assert build([tiny(7)])[0].cached
    with pytest.raises(KernelBuildError, match="MLA_BACKEND_JIT=0 forbids"):
        load(tiny(8))


def test_failed_compilation_names_variant_arch_compiler_and_log():
    broken = KernelVariant("broken", "int f() { return undeclared; }\n", "90a")
    with pytest.raises(KernelBuildError) as failure:
        load(broken)
    message = str(failure.value)
    for part in (
        "broken",
        "sm_90a",
        find_toolchain().version,
        'identifier "undeclared" is undefined',
        "remedy:",
    ):
        assert part in message
    assert not list(cache_dir().glob("broken-*/"))


def test_unwritable_cache_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(KernelBuildError, match="MLA_BACKEND_CACHE"):
        load(tiny(9))


def test_explicit_compiler_that_does_not_work_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_NVCC", str(tmp_path / "absent"))
    with pytest.raises(KernelBuildError, match=r"MLA_BACKEND_NVCC: .*absent is not an executable file"):
        find_toolchain()


def fake_nvcc(path: Path, release: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release x, V{release}"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_order_of_compilers(tmp_path, monkeypatch):
    wheel = fake_nvcc(tmp_path / "site/nvidia/cu13/bin/nvcc", "13.0.4")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert (find_toolchain().origin, find_toolchain().nvcc) == ("pip", wheel)
    on_path = fake_nvcc(tmp_path / "bin/nvcc", "13.0.3")
    monkeypatch.setenv("PATH", f"{on_path.parent}:/usr/bin:/bin")
    assert (find_toolchain().origin, find_toolchain().version) == ("PATH", "13.0.3")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "empty"))
    assert find_toolchain().origin == "PATH"
    fake_nvcc(tmp_path / "cuda/bin/nvcc", "13.0.2")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert (find_toolchain().origin, find_toolchain().version) == ("CUDA_HOME", "13.0.2")
    monkeypatch.setenv("MLA_BACKEND_NVCC", str(fake_nvcc(tmp_path / "own/nvcc", "13.0.1")))
    assert (find_toolchain().origin, find_toolchain().version) == ("MLA_BACKEND_NVCC", "13.0.1")


SPILLING = r"""
__device__ __noinline__ float deep(const float* p, int n) {
  float local[64];
  for (int i = 0; i < n; ++i) local[i % 64] = p[i];
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += local[i * 7 % 64];
  return sum;
}
__global__ void clean(float* x) { __shared__ float s[32]; s[threadIdx.x] = x[threadIdx.x]; __syncthreads();
                                  x[threadIdx.x] = s[31 - threadIdx.x]; }
__global__ void calls(float* x, int n) { x[0] = deep(x, n); }
"""


def test_report_shows_stack_and_shared_memory():
    report = compile_report(KernelVariant("spilling", SPILLING, "90a"))
    by_name = {kernel.name: kernel for kernel in report.kernels}
    clean = next(kernel for name, kernel in by_name.items() if "clean" in name)
    calls = next(kernel for name, kernel in by_name.items() if "calls" in name)
    assert (clean.stack_bytes, clean.spill_store_bytes, clean.static_smem_bytes) == (0, 0, 128)
    assert calls.stack_bytes >= 256 and calls.registers > 0
    assert report.warnings == ()


@pytest.mark.parametrize(("name", "arch"), [("a/b", "80"), ("", "80"), ("a", "sm_80"), ("a", "ninety")])
def test_bad_variants_are_refused(name, arch):
    with pytest.raises(InvalidInputError):
        KernelVariant(name, "", arch)
