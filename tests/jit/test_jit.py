"""The JIT: look-up order, one build per machine, errors; on a GPU the built kernel's answer."""

import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import ninja
import pytest
import torch

from mla_backend import jit
from mla_backend.errors import InvalidInputError, KernelBuildError
from mla_backend.jit import (
    KernelVariant,
    arch_of,
    build,
    builder,
    cache_dir,
    compile_report,
    find_entry,
    find_toolchain,
    load,
    load_all,
    prepare,
)
from mla_backend.jit import variant as variant_module
from mla_backend.jit.report import KernelResources, parse
from tests.support.missing import skip_without

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


@pytest.fixture(scope="module", autouse=True)
def compiler():
    try:
        find_toolchain()
    except KernelBuildError as error:
        skip_without("nvcc", error)


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
    script.write_text(f'#!/bin/sh\ncase "$1" in --*) ;; *) echo x >> {log};; esac\nexec {real.nvcc} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("MLA_BACKEND_NVCC", str(script))
    return lambda: len(log.read_text().split()) if log.exists() else 0


@pytest.fixture
def counting_ninja(tmp_path, monkeypatch):
    """ninja behind a script that writes a line for each run; returns a function that counts them."""
    log = tmp_path / "runs"
    script = tmp_path / "tools/ninja"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\necho x >> {log}\nexec {ninja.BIN_DIR}/ninja "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(ninja, "BIN_DIR", str(script.parent))
    return lambda: len(log.read_text().split()) if log.exists() else 0


def scripted_nvcc(path, monkeypatch, script: str) -> None:
    """An nvcc that runs `script` (of sh) in place of each compilation; $nvcc is the real one."""
    real = find_toolchain().nvcc
    path.write_text(f'#!/bin/sh\nnvcc={real}\ncase "$1" in --*) exec $nvcc "$@";; esac\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setenv("MLA_BACKEND_NVCC", str(path))


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


def run_at_once(functions) -> None:
    """Each in a process of its own, all of them starting together and succeeding."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(functions))

    def run(function):
        barrier.wait()
        function()

    processes = [context.Process(target=run, args=(function,)) for function in functions]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * len(functions)


def test_eight_processes_build_once(counting_nvcc, counting_ninja):
    run_at_once([lambda: prepare([tiny(2)])] * 8)
    assert (counting_nvcc(), counting_ninja()) == (1, 1)


def test_processes_that_ask_for_different_sets_build_each_kernel_once(counting_nvcc):
    sets = ((20, 21), (21, 22), (22, 20))
    run_at_once([lambda values=values: prepare(map(tiny, values)) for values in sets])
    assert counting_nvcc() == 3


def test_kernels_are_built_side_by_side_by_one_run_of_ninja(tmp_path, monkeypatch, counting_ninja):
    """Each compilation waits until the other one has begun."""
    begin_together = f"""
touch {tmp_path}/began-$$
for i in $(seq 300); do [ $(ls {tmp_path} | grep -c began-) = 2 ] && exec $nvcc "$@"; sleep 0.1; done
exit 1"""
    scripted_nvcc(tmp_path / "nvcc", monkeypatch, begin_together)
    variants = [tiny(30), tiny(31)]
    entries = prepare(variants)
    assert set(entries) == set(variants) and all(
        (entry / "kernel.so").is_file() for entry in entries.values()
    )
    assert counting_ninja() == 1


def test_a_hit_runs_no_build_tool(counting_nvcc, counting_ninja):
    prepare([tiny(32)])
    assert (counting_nvcc(), counting_ninja()) == (1, 1)
    prepare([tiny(32), tiny(32)])
    load_all([tiny(32)])
    assert (counting_nvcc(), counting_ninja()) == (1, 1)


def test_modules_come_in_the_order_asked_for():
    first, second, again = load_all([tiny(33), tiny(34), tiny(33)])
    assert first is again is load(tiny(33)) and second is load(tiny(34)) and first is not second


def test_a_build_is_logged_when_it_begins_and_when_it_ends(caplog, tmp_path, monkeypatch):
    scripted_nvcc(tmp_path / "nvcc", monkeypatch, 'sleep 1; exec $nvcc "$@"')
    with caplog.at_level(logging.INFO, "mla_backend"):
        prepare([tiny(35, arch="90a"), tiny(36, arch="90a")])
        begin, end = caplog.records
        prepare([tiny(35, arch="90a")])
    assert caplog.records == [begin, end], "a hit says nothing"
    assert "building 2 kernels for sm_90a, once per machine" in begin.message
    assert "`mla-backend build`" in begin.message
    assert end.created - begin.created >= 1
    assert "2 kernels" in end.message and str(cache_dir()) in end.message


def test_seconds_are_each_kernels_own(tmp_path, monkeypatch):
    scripted_nvcc(tmp_path / "nvcc", monkeypatch, 'sleep 1; exec $nvcc "$@"')
    begin = time.monotonic()
    seconds = [result.seconds for result in build([tiny(37), tiny(38), tiny(39)], jobs=1)]
    assert min(seconds) >= 1 and sum(seconds) <= time.monotonic() - begin


def test_a_failure_ends_its_own_kernel_only():
    """Whichever ninja takes first."""
    broken = [KernelVariant(name, "int f() { return undeclared; }\n", "80") for name in ("first", "second")]
    results = {result.variant: result for result in build([*broken, tiny(41)], jobs=1)}
    assert results[tiny(41)].error is None and find_entry(tiny(41)) == results[tiny(41)].entry
    for variant in broken:
        message = str(results[variant].error)
        assert variant.name in message and '"undeclared" is undefined' in message
        assert find_entry(variant) is None
    with pytest.raises(KernelBuildError, match="first"):
        prepare([tiny(41), broken[0]])


def test_builds_are_counted(monkeypatch):
    """But not kernels that are there already."""
    counted = []
    monkeypatch.setattr(builder.metrics, "count_build", lambda *args, failed: counted.append((*args, failed)))
    broken = KernelVariant("broken", "int f() { return undeclared; }\n", "80")
    results = [result for _ in range(2) for result in build([tiny(46), broken])]
    built = [("80", result.seconds, result.error is not None) for result in results if result.seconds]
    assert sorted(counted) == sorted(built) and len(counted) == 3


def test_what_a_failed_compiler_leaves_is_no_kernel(tmp_path, monkeypatch):
    write_and_fail = 'for out; do :; done; echo half > "$out"; echo out of memory; exit 1'
    scripted_nvcc(tmp_path / "nvcc", monkeypatch, write_and_fail)
    with pytest.raises(KernelBuildError, match="out of memory"):
        prepare([tiny(42)])
    assert find_entry(tiny(42)) is None


def test_the_end_of_ninja_itself_is_reported(tmp_path, monkeypatch):
    (tmp_path / "ninja").write_text("#!/bin/sh\necho ninja: fatal: no space left\nexit 7\n")
    (tmp_path / "ninja").chmod(0o755)
    monkeypatch.setattr(ninja, "BIN_DIR", str(tmp_path))
    named = r"exit code 7 before tiny .*, tiny .* were compiled with .*nvcc(.|\n)*no space left(.|\n)*remedy"
    with pytest.raises(KernelBuildError, match=named):
        prepare([tiny(43), tiny(44)])


def test_a_compiler_that_hangs_is_ended(tmp_path, monkeypatch):
    scripted_nvcc(tmp_path / "nvcc", monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 600")
    monkeypatch.setattr(builder, "_PATIENCE_S", 2)
    with pytest.raises(KernelBuildError, match=r"tiny(.|\n)*no compiler had ended for 2 s(.|\n)*remedy"):
        prepare([tiny(45)])
    deadline = time.monotonic() + 30
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(int((tmp_path / "pid").read_text()), 0)
            time.sleep(0.1)


def test_death_of_a_building_process_harms_nobody(tmp_path, monkeypatch):
    slow = tmp_path / "nvcc"
    slow.write_text(
        f'#!/bin/sh\ncase "$1" in --*) ;; *) sleep 60;; esac\nexec {find_toolchain().nvcc} "$@"\n'
    )
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
    assert not list(cache_dir().glob(".building-*")), "what the dead process left is gone"


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


def test_the_hosts_architecture_is_in_the_key(monkeypatch):
    """x86 and Arm machines may share a home directory."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    key = tiny(1).key()
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert tiny(1).key() != key


def test_an_upgrade_of_what_a_kernel_is_built_with_is_in_the_key(monkeypatch):
    """Of the library that it is loaded by, and of the flags of this package."""
    keys = {tiny(1).key()}
    with monkeypatch.context() as patch:
        patch.setattr(variant_module, "version", lambda name: "999.0")
        keys.add(tiny(1).key())
    monkeypatch.setattr(variant_module, "STANDARD_FLAGS", (*variant_module.STANDARD_FLAGS, "-G"))
    keys.add(tiny(1).key())
    assert len(keys) == 3


def test_the_key_keeps_its_parts_apart():
    assert tiny(1, flags=("-DA", "-DB")).key() != tiny(1, flags=("-DA-DB",)).key()


def test_headers_may_include_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(variant_module, "csrc_dir", lambda: tmp_path)
    (tmp_path / "a.cuh").write_text('#pragma once\n#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "a.cuh"\n')
    assert KernelVariant("v", '#include "a.cuh"\n', "80").key()


def test_another_compiler_version_is_another_entry(tmp_path, monkeypatch):
    variant = tiny(4)
    build([variant])
    (first,) = cache_dir().glob("tiny-*-nvcc*/")
    other = first.with_name(re.sub(r"nvcc[\d.]+", "nvcc1.0.0", first.name))
    first.rename(other)
    (result,) = build([variant])
    assert not result.cached


def test_without_a_compiler_a_cached_kernel_serves_and_a_new_one_is_refused(monkeypatch):
    build([tiny(5)])
    monkeypatch.setattr("mla_backend.jit.toolchain._candidates", lambda: iter(()))
    assert build([tiny(5)])[0].cached
    with pytest.raises(KernelBuildError, match=r"tiny \(sm_80\).*no usable CUDA compiler.*nvidia-cuda-nvcc"):
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


LOG = """\
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    64 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem
ptxas info    : Function properties for called_by_first
    8 bytes stack frame, 40 bytes spill stores, 20 bytes spill loads
ptxas info    : Compiling entry function 'second' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
kernel.cuh(3): warning #177-D: variable "x" was declared but never referenced
"""


def test_report_counts_functions_with_their_kernel_and_keeps_warnings():
    report = parse(LOG)
    assert report.kernels == (
        KernelResources("first", 168, 64, 44, 32, 1024),
        KernelResources("second", 32, 0, 0, 0, 0),
    )
    assert [text.partition(":")[0].strip() for text in report.warnings] == ["ptxas info", "kernel.cuh(3)"]


@pytest.mark.parametrize(
    ("name", "arch"), [("a/b", "80"), ("", "80"), ("a", "sm_80"), ("a", "ninety"), ("a", "80x")]
)
def test_bad_variants_are_refused(name, arch):
    with pytest.raises(InvalidInputError):
        KernelVariant(name, "", arch)


def test_no_kernel_is_loaded_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(InvalidInputError, match="kernel captured .* while a CUDA graph is captured"):
        jit.load(jit.KernelVariant("captured", "", "90a"))
