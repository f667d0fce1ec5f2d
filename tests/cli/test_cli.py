"""`mla-backend doctor` and `build`, the version, and that these take no time to start."""

import importlib.metadata
import itertools
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

import mla_backend
from mla_backend import counters, jit, kernels
from mla_backend.cli import add_commands, app
from mla_backend.engines import VLLM
from mla_backend.errors import KernelBuildError
from mla_backend.jit import KernelVariant
from mla_backend.policy import device_name
from tests.support.missing import skip_without

GOOD = 'extern "C" int good() { return 1; }\n'


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLA_BACKEND_JIT", raising=False)


@pytest.fixture
def compiler():
    try:
        return jit.find_toolchain()
    except KernelBuildError as error:
        skip_without("nvcc", error)


def test_doctor_names_what_it_finds(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_JIT", "0")
    outcome = invoke("doctor")
    assert outcome.exit_code == 0, outcome.output
    for part in (
        "compiler",
        "attention",
        "with at most 123 new tokens on a long prefix use absorbed attention",
        "torch: no kernels for device type 'cpu'",
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
    monkeypatch.setattr("mla_backend.jit.toolchain.find_toolchain", no_compiler)
    monkeypatch.setattr("mla_backend.engines.Engine.installed", lambda engine: [(engine.name, "9.9")])
    monkeypatch.setattr("mla_backend.MLADecoder", None)
    outcome = invoke("doctor")
    for name in ("mla_backend_vllm", "mla_backend_sglang"):
        sys.modules.pop(name, None)
    assert outcome.exit_code == 1, outcome.output
    for part in ("no CUDA compiler found", "OSError: libcuda.so is missing", "first line", "KeyError: 3"):
        assert part in outcome.output
    assert verdict(outcome).startswith(
        "not ready: TypeError: 'NoneType' object is not callable; please report"
    )


def verdict(outcome) -> str:
    """The paragraph that doctor ends with, in one line."""
    lines = reversed(outcome.output.rstrip().splitlines())
    paragraph = list(itertools.takewhile(lambda line: line.strip(), lines))
    return " ".join(" ".join(reversed(paragraph)).split())


def row(output: str, name: str) -> str:
    """What doctor's table says of `name`, in one line."""
    lines = output.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(f" {name} "))
    rest = [line for line in itertools.takewhile(lambda line: line.startswith("   "), lines[first + 1 :])]
    return " ".join(" ".join([lines[first].removeprefix(f" {name}"), *rest]).split())


def test_doctor_compares_toolkit_driver_and_torch(tmp_path, monkeypatch):
    def nvcc(version):
        script = tmp_path / version / "nvcc"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\necho "Cuda compilation tools, release x, V{version}"\n')
        script.chmod(0o755)
        monkeypatch.setenv("MLA_BACKEND_NVCC", str(script))

    monkeypatch.setattr("mla_backend.jit.toolchain.missing_host_compiler", lambda: "g++ on PATH")
    monkeypatch.setattr("mla_backend.jit.toolchain.driver_version", lambda: "12.8")
    nvcc("12.4.99")
    output = invoke("doctor").output
    assert "12.5" in row(output, "needed") and "12.4.99" in row(output, "nvcc")
    assert row(output, "host compiler").startswith("no g++ on PATH")
    assert row(output, "driver's CUDA").startswith("12.8")
    nvcc("13.0.99")
    assert "driver serves CUDA 12.8" in row(invoke("doctor").output, "nvcc")
    monkeypatch.setattr("mla_backend.jit.toolchain.missing_host_compiler", lambda: None)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    nvcc("12.9.99")
    assert "torch is built with CUDA 13.x" in row(invoke("doctor").output, "nvcc")
    monkeypatch.setattr("torch.version.cuda", "12.9")
    assert "torch is built" not in row(invoke("doctor").output, "nvcc")


def test_doctor_shows_settings_and_where_the_rates_come_from(tmp_path, monkeypatch):
    rates = {"gemm_flops": 1.5e12, "absorbed_flops": 2e12, "vanilla_flops": 3e12, "bytes_per_s": 4e12}
    path = tmp_path / "rates.json"
    machine = {"device": device_name("cpu")}
    path.write_text(json.dumps({"machine": machine, "dtype": "bfloat16", "rates": rates}))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "shipped" in row(invoke("doctor").output, "cpu, rates")
    monkeypatch.setenv("MLA_BACKEND_RATES", str(path))
    output = invoke("doctor").output
    assert row(output, "MLA_BACKEND_RATES") == str(path)
    assert str(path) in row(output, "cpu, rates") and "GEMM 1.5," in row(output, "cpu, rates")
    path.unlink()
    assert "No such file" in row(invoke("doctor").output, "error")


def test_doctor_checks_the_variables(monkeypatch):
    for name, value in (("MLA_BACKEND_DEFAULT", "yes"), ("MLA_BACKEND_NVC", "x"), ("MLA_BACKEND_DSA", "1")):
        monkeypatch.setenv(name, value)
    outcome = invoke("doctor")
    assert row(outcome.output, "MLA_BACKEND_NVC") == "x (unknown: mla-backend reads no such variable)"
    assert row(outcome.output, "MLA_BACKEND_DSA") == "1"
    expected = "not ready: InvalidInputError: MLA_BACKEND_DEFAULT must be 0 or 1, not 'yes'"
    assert (verdict(outcome), outcome.exit_code) == (expected, 1)


def test_doctor_says_that_there_is_no_folder_for_counts(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(counters, "_cells", None)
    monkeypatch.setenv("MLA_BACKEND_COUNTERS", str(tmp_path / "file"))
    outcome = invoke("doctor")
    assert verdict(outcome).startswith("not ready: InvalidInputError: MLA_BACKEND_COUNTERS=")
    assert outcome.exit_code == 1


def test_doctor_counts_shipped_kernels_where_no_cache_can_be(tmp_path, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_CACHE", "~nobody-of-this-name/cache")
    assert row(invoke("doctor").output, "prebuilt").endswith("0 kernels, 0.0 MB")


def test_doctor_says_that_the_cache_is_not_writable(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    assert row(invoke("doctor").output, "cache") == f"{cache}: 0 kernels, 0.0 MB"
    cache.touch()
    assert row(invoke("doctor").output, "cache") == f"{cache}: 0 kernels, 0.0 MB, NOT writable"
    monkeypatch.setattr("mla_backend.jit.is_writable", lambda folder: False)
    assert "NOT writable" not in row(invoke("doctor").output, "prebuilt"), "it need not be"


def test_doctor_says_which_engine_versions_are_supported(monkeypatch):
    installed = {"vllm": "0.25.1", "sglang": "0.5.20"}

    def version(name):
        if name in installed:
            return installed[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    output = invoke("doctor").output
    assert "0.25.1 is older than the versions" in row(output, "vllm 0.25.1")
    assert "a supported version" in row(output, "sglang 0.5.20")
    installed.clear()
    assert row(invoke("doctor").output, "vllm").startswith("not installed (supported versions: 0.")


@pytest.fixture
def h20(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H20")
    sms = SimpleNamespace(multi_processor_count=78)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: sms)


def test_doctor_builds_nothing_and_says_what_is_to_build(monkeypatch, compiler, h20):
    outcome = invoke("doctor")
    output = outcome.output
    assert row(output, "cuda:0, kernels").startswith("0 of 2 are built; an engine's start builds the others")
    assert "rates measured on an H200: GEMM 255, absorbed 604" in row(output, "cuda:0, rates")
    expected = "ready: the library without an engine, kernels for sm_90a built at an engine's first start"
    assert (verdict(outcome), outcome.exit_code) == (expected, 0)
    monkeypatch.setenv("MLA_BACKEND_JIT", "0")
    outcome = invoke("doctor")
    assert "MLA_BACKEND_JIT=0 forbids building" in row(outcome.output, "cuda:0, kernels")
    assert verdict(outcome).startswith("not ready: kernel ")
    assert "without MLA_BACKEND_JIT=0" in verdict(outcome)
    assert outcome.exit_code == 1
    assert not list(jit.cache_dir().glob("*"))


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """Pretends that both engines are installed; only vLLM's integration can be used."""
    (tmp_path / "mla_backend_vllm.py").write_text("def describe():\n  yield 'chosen by a flag'")
    (tmp_path / "mla_backend_sglang.py").write_text("raise ImportError('no sglang.srt')")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("mla_backend_vllm", "mla_backend_sglang")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    points = {
        group: [SimpleNamespace(value=f"{name}:register")]
        for group, name in zip(("vllm.general_plugins", "sglang.srt.plugins"), names, strict=True)
    }
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points.get(group, []))
    monkeypatch.setattr("mla_backend.engines.Engine.installed", lambda engine: [(engine.name, engine.last)])
    yield points
    for name in names:
        sys.modules.pop(name, None)


def test_doctor_names_the_engines_that_can_run(monkeypatch, engines, h20):
    monkeypatch.setattr("mla_backend.jit.find_entry", lambda variant: "an entry")
    decoder = SimpleNamespace(implementation="hopper", reason="compute capability 9.0")
    monkeypatch.setattr("mla_backend.MLADecoder", lambda **arguments: decoder)
    outcome = invoke("doctor")
    assert verdict(outcome) == (
        "ready: vLLM 0.33, kernels for sm_90a cached. SGLang 0.5.23 cannot use it: its "
        "integration fails with ImportError: no sglang.srt"
    )
    assert "NOT registered" not in outcome.output
    monkeypatch.setattr("mla_backend.engines.Engine.installed", lambda engine: [(engine.name, "0.1")])
    expected = f"ready: vLLM 0.1 (outside the supported {VLLM.supported}), kernels"
    assert verdict(invoke("doctor")).startswith(expected)
    assert outcome.exit_code == 0


@pytest.mark.parametrize(
    "variable, value, is_left_out",
    [
        ("VLLM_PLUGINS", "", True),
        ("VLLM_PLUGINS", "other,mla_backend", False),
        ("SGLANG_PLUGINS", "", False),
        ("SGLANG_PLUGINS", "other", True),
    ],
)
def test_doctor_sees_which_plugins_an_engine_loads(monkeypatch, engines, variable, value, is_left_out):
    monkeypatch.setenv(variable, value)
    left_out = (
        f"cannot use it: {variable}={value!r} leaves its plugin out; add mla_backend to it, or unset it"
    )
    outcome = invoke("doctor")
    assert (left_out in verdict(outcome)) is is_left_out


def test_doctor_is_not_ready_for_an_engine_that_leaves_the_plugin_out(monkeypatch, engines):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    outcome = invoke("doctor")
    assert verdict(outcome).startswith("not ready: vLLM 0.33 cannot use it: VLLM_PLUGINS=''")
    assert outcome.exit_code == 1


@pytest.mark.parametrize("hidden, code", [(None, 1), ("0", 1), ("", 0)])
def test_doctor_misses_the_gpu_that_torch_is_built_for(monkeypatch, hidden, code):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    if hidden is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    outcome = invoke("doctor")
    assert outcome.exit_code == code
    assert ("torch is built for GPUs and sees none" in verdict(outcome)) is bool(code)


def test_doctor_is_ready_on_a_cpu(monkeypatch, engines):
    engines.clear()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    outcome = invoke("doctor")
    expected = "not ready: vLLM 0.33 cannot use it: its plugin is not registered; install mla-backend"
    assert verdict(outcome).startswith(expected) and outcome.exit_code == 1
    monkeypatch.setattr("mla_backend.engines.Engine.installed", lambda engine: [])
    outcome = invoke("doctor")
    expected = "ready on the CPU: the library without an engine, attention in plain torch"
    assert (verdict(outcome), outcome.exit_code) == (expected, 0)
    monkeypatch.setenv("MLA_BACKEND_RATES", "/nowhere.json")
    outcome = invoke("doctor")
    assert verdict(outcome).startswith("not ready: InvalidInputError: MLA_BACKEND_RATES=/nowhere.json: ")
    assert "or unset the variable" in verdict(outcome) and outcome.exit_code == 1


def test_doctor_is_not_ready_where_torch_fails(monkeypatch):
    def fail():
        raise RuntimeError("driver too old")

    monkeypatch.setattr("torch.cuda.device_count", fail)
    outcome = invoke("doctor")
    assert row(outcome.output, "error") == "RuntimeError: driver too old"
    assert (verdict(outcome), outcome.exit_code) == ("not ready: no device that attention can run on", 1)


def test_doctor_names_the_library_of_prefills_in_sglang_if_it_is_another(monkeypatch):
    def library(*_, with_plans):
        return "FlashInfer" if with_plans else "torch"

    assert "in SGLang" not in row(invoke("doctor").output, "cpu, prefill")
    monkeypatch.setattr("mla_backend.prefill.library", library)
    assert "by torch, in SGLang by FlashInfer" in row(invoke("doctor").output, "cpu, prefill")


@pytest.mark.parametrize("option", [("--arch", "90a"), ("--gpu-memory", "0"), ("--page-size", "1")])
def test_doctor_refuses_options_of_a_model_without_one(option):
    outcome = invoke("doctor", *option)
    assert outcome.exit_code == 2 and "these options are about a model" in outcome.output


def test_doctor_is_not_ready_on_a_gpu_without_kernels(monkeypatch, h20):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    outcome = invoke("doctor")
    assert verdict(outcome).startswith("not ready: no kernel serves cuda:0 (kernels need compute capability")
    assert "hide this one (CUDA_VISIBLE_DEVICES=) to run on the CPU" in verdict(outcome)
    assert outcome.exit_code == 1


def test_the_machine_as_json(engines):
    told = json.loads(invoke("doctor", "--json").stdout)
    plain = invoke("doctor")
    assert told["verdict"] == verdict(plain) and told["answer"] is (plain.exit_code == 0)
    assert list(told["sections"])[0] == "mla-backend" and "engines" in told["sections"]
    assert dict(told["sections"]["mla-backend"])["location"] == str(Path(mla_backend.__file__).parent)


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["doctor", "--help"], ["bench", "decode", "--help"], ["dcotor"]]
)
def test_what_needs_no_torch_does_not_import_it(arguments):
    """It takes seconds, and help and completion should not."""
    code = "import sys\nfrom mla_backend.cli import app, add_commands\n"
    code += "import mla_backend_bench.cli\napp.add_typer(mla_backend_bench.cli.app, name='bench')\n"
    code += f"try: app({arguments!r})\nfinally: print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("False False\n"), done.stdout + done.stderr
    assert done.returncode == (2 if "dcotor" in arguments else 0)


def test_the_package_has_its_names():
    for name in mla_backend.__all__:
        assert getattr(mla_backend, name) is not None and name in dir(mla_backend)
    assert mla_backend.__version__ == importlib.metadata.version("mla-backend")
    with pytest.raises(AttributeError, match="no attribute 'Decoder'"):
        mla_backend.Decoder  # noqa: B018


def test_version():
    outcome = invoke("--version")
    assert outcome.output == f"mla-backend {importlib.metadata.version('mla-backend')}\n"
    assert outcome.exit_code == 0


@pytest.fixture
def variants(monkeypatch):
    shipped = [KernelVariant("good-a", GOOD, "80"), KernelVariant("good-b", GOOD, "90a")]
    monkeypatch.setattr("mla_backend.cli.build.local_archs", set)
    monkeypatch.setattr(
        kernels, "shipped_variants", lambda arch=None: [v for v in shipped if arch in (None, v.arch)]
    )
    return shipped


def test_build_builds_what_is_asked_for(variants, compiler):
    outcome = invoke("build", "--arch", "80", "-j", "1")
    assert outcome.exit_code == 0 and "built" in outcome.output and "good-b" not in outcome.output
    outcome = invoke("build", "--match", "good-*")
    assert outcome.exit_code == 0
    assert [line.split()[0] for line in outcome.output.splitlines() if "good-a" in line] == ["cached"]
    assert all(jit.find_entry(variant) for variant in variants)


def test_build_lists_what_is_near_if_none_matches(variants):
    outcome = invoke("build", "--arch", "80", "--match", "goood-a")
    assert outcome.exit_code == 2
    assert "good-a (sm_80)" in outcome.output and "good-b" not in outcome.output
    assert "`mla-backend build --arch 80 --list` lists all of them (1)" in outcome.output
    variants += [KernelVariant(f"good-a{number}", GOOD, "80") for number in range(20)]
    outcome = invoke("build", "--match", "goood-a")
    assert len([line for line in outcome.output.splitlines() if line.startswith("  good-a")]) == 10
    assert "`mla-backend build --list` lists all of them (22)" in outcome.output
    assert "good-" not in invoke("build", "--match", "zzz").output


def test_build_lists_the_variants(variants):
    outcome = invoke("build", "--list")
    assert (outcome.exit_code, outcome.output.split("\n")) == (0, ["good-a (sm_80)", "good-b (sm_90a)", ""])
    assert "good-b" not in invoke("build", "--list", "--arch", "80").output
    assert not any(jit.find_entry(variant) for variant in variants)


def test_build_lists_the_variants_as_json(variants, compiler):
    jit.prepare(variants[:1])
    listed = json.loads(invoke("build", "--list", "--json").stdout)
    assert listed == [
        {"name": "good-a", "arch": "80", "built": True},
        {"name": "good-b", "arch": "90a", "built": False},
    ]
    assert invoke("build", "--json").exit_code == 2


def test_builds_errors_are_on_stderr(variants, monkeypatch):
    monkeypatch.setattr("mla_backend.jit.toolchain._candidates", lambda: iter(()))
    for arguments, code in ((("--match", "zzz"), 2), (("--arch", "xx"), 2), ((), 1)):
        outcome = invoke("build", *arguments)
        assert outcome.exit_code == code and outcome.stderr
        assert "no variant" not in outcome.stdout and "cannot be built" not in outcome.stdout


def test_build_prints_what_users_wrote_as_it_is(variants, compiler, tmp_path, monkeypatch):
    outcome = invoke("build", "--match", "[/red]")
    assert outcome.exit_code == 2 and "name [/red]" in outcome.output
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path / "[/x]"))
    assert invoke("build", "--arch", "80").exit_code == 0
    monkeypatch.setenv("MLA_BACKEND_NVCC", str(tmp_path / "[/y]"))
    outcome = invoke("build")
    assert outcome.exit_code == 1 and "[/y] is not an executable" in " ".join(outcome.output.split())


def test_build_says_in_one_line_that_there_is_no_folder(variants, compiler, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_CACHE", "~nobody-of-this-name/cache")
    outcome = invoke("build")
    assert outcome.exit_code == 1 and "set MLA_BACKEND_CACHE to a writable folder" in outcome.output


def test_build_says_once_that_there_is_no_compiler(variants, monkeypatch):
    monkeypatch.setattr("mla_backend.jit.toolchain._candidates", lambda: iter(()))
    outcome = invoke("build")
    assert outcome.exit_code == 1 and "2 of 2 variants failed" in outcome.output
    assert outcome.output.count("cannot be built: no usable CUDA compiler") == 1


def test_build_says_in_one_line_what_the_switch_may_be(variants, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_JIT", "off")
    outcome = invoke("build")
    assert outcome.exit_code == 1 and "MLA_BACKEND_JIT must be 0 or 1, not 'off'" in outcome.output
    assert "Traceback" not in outcome.output and isinstance(outcome.exception, SystemExit)


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
    for module in ("jit", "jit.builder", "jit.store"):
        monkeypatch.setattr(f"mla_backend.{module}.prebuilt_dir", lambda: tmp_path / "prebuilt")
    assert invoke("build").exit_code == 0  # in the cache, which is not the package
    assert invoke("build", "--prebuilt").exit_code == 0
    assert all(jit.find_entry(variant).parent == tmp_path / "prebuilt" for variant in variants)
    # A shipped kernel serves with any compiler, and with none.
    monkeypatch.setattr("mla_backend.jit.toolchain._candidates", lambda: iter(()))
    assert invoke("build").exit_code == 0


def test_build_can_make_a_wheel(variants, compiler, tmp_path):
    outcome = invoke("build", "--arch", "80", "--wheel", str(tmp_path / "wheels"))
    assert outcome.exit_code == 0, outcome.output
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert f"wrote {wheel}" in outcome.output
    with zipfile.ZipFile(wheel) as archive:
        kernels = [name for name in archive.namelist() if name.endswith("kernel.so")]
    assert len(kernels) == 1 and "good-a" in kernels[0]
    variants.insert(0, KernelVariant("bad", "int f() { return undeclared; }\n", "80"))
    assert invoke("build", "--wheel", str(tmp_path / "others")).exit_code == 1
    assert not (tmp_path / "others").exists()


def test_bench_is_a_command_of_another_package(monkeypatch):
    group = "mla_backend.commands"
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    ((name, value),) = re.findall(rf'{group}"\]\n(\w+) = "([\w.:]+)"\n\n', pyproject)
    point = importlib.metadata.EntryPoint(name, value, group)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    add_commands(main := typer.Typer())
    outcome = CliRunner().invoke(main, ["bench", "--help"])
    assert outcome.exit_code == 0 and "crossover" in outcome.output


def test_the_library_does_not_name_the_benchmarks():
    sources = Path(mla_backend.__file__).parent.rglob("*.py")
    assert not [source for source in sources if "mla_backend_bench" in source.read_text()]
