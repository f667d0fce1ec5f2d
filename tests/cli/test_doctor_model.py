"""`mla-backend doctor MODEL`, on configs without weights."""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from mla_backend.cli import app
from mla_backend.jit.toolchain import Toolchain
from mla_backend.models import FAMILIES
from mla_backend.policy import Policy, default_rates
from tests.support.configs import KIMI_K2, MINICPM3, V2_LITE, V3

CONFIGS = {
    "V2-Lite": V2_LITE | {"num_hidden_layers": 27, "first_k_dense_replace": 1, "torch_dtype": "bfloat16"},
    "V3": V3 | {"num_hidden_layers": 61, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
    "MiniCPM3": MINICPM3 | {"num_hidden_layers": 62, "torch_dtype": "float16"},
    "multimodal": {"model_type": "kimi_k25", "text_config": KIMI_K2 | {"num_hidden_layers": 61}},
    "hybrid": V2_LITE | {"num_hidden_layers": 27, "linear_attn_config": {"full_attn_layers": [4, 8, 12]}},
    "types": V2_LITE | {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "groups": V2_LITE | {"num_hidden_layers": 80, "layer_group_size": 8},  # Ling-2.5
    "groups and a rest": V2_LITE | {"num_hidden_layers": 17, "layer_group_size": 5},
    "two a layer": V2_LITE | {"num_layers": 28},  # LongCat-Flash
}
HOPPER = ("--arch", "90a")
RESULTS = Path(__file__).parents[2] / "benchmarks/results"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("MLA_BACKEND_RATES", raising=False)
    monkeypatch.setenv("MLA_BACKEND_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    monkeypatch.setattr("mla_backend.engines.Engine.installed", lambda engine: [])


@pytest.fixture
def model(tmp_path):
    """Writes a model's config; its folder."""

    def write(config, folder=tmp_path / "model"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return write


def doctor(*arguments):
    """Exit code, and what was printed with every run of white space as one space."""
    outcome = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
    return outcome.exit_code, " ".join(outcome.output.split())


@pytest.mark.parametrize(
    ("name", "layers", "heads", "cache"),
    [
        (
            "V2-Lite",
            "27 with latent attention heads",
            "16",
            "1,152 per layer (512 + 64 values in bfloat16), 31,104",
        ),
        (
            "V3",
            "61 with latent attention, and 1 more for multi-token prediction",
            "128",
            "70,272 in all layers",
        ),
        ("MiniCPM3", "62 with", "40", "576 per layer (256 + 32 values in float16), 35,712 in all layers"),
        ("multimodal", "61 with latent attention heads", "64", "70,272 in all layers"),
        ("hybrid", "3 with latent attention", "16", "3,456 in all layers"),
        ("types", "1 with latent attention", "16", "1,152 in all layers"),
        ("groups", "10 with latent attention", "16", "11,520 in all layers"),
        ("groups and a rest", "5 with latent attention", "16", "5,760 in all layers"),
        ("two a layer", "56 with latent attention", "16", "64,512 in all layers"),
    ],
)
def test_geometry_and_cache(model, name, layers, heads, cache):
    code, output = doctor(model(CONFIGS[name]))
    assert code == 0, output
    assert f"layers {layers}" in output
    assert f"heads {heads} kv_lora_rank {CONFIGS[name].get('kv_lora_rank', 512)}" in output
    assert cache in output
    in_vllm = "; in vLLM with --model-impl transformers" if name == "MiniCPM3" else ""
    assert output.endswith(f"served on the CPU{in_vllm}")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("arch", [None, "90a", "120"])
def test_the_verdict_agrees_with_the_table_of_models(model, family, arch):
    code, output = doctor(model(family.config), *(("--arch", arch) if arch else ()))
    shape, device = family.geometry, "cuda" if arch else "cpu"
    assert f"heads {shape.num_heads} kv_lora_rank {shape.kv_lora_rank}:" in output
    assert f"qk_rope_head_dim {shape.qk_rope_head_dim}: " in output
    assert f"qk_nope_head_dim {shape.qk_nope_head_dim}: " in output
    assert f"v_head_dim {shape.v_head_dim}: " in output
    assert f"engines family {family.name}" in output
    assert f"vLLM {family.vllm} SGLang {family.sglang} " in output
    served = {"vLLM": family.vllm.on(device).is_served, "SGLang": family.sglang.on(device).is_served}
    assert code == (0 if any(served.values()) else 1)
    where = f"sm_{arch}" if arch else "the CPU"
    verdict = output[output.rindex(f"served on {where}") :]
    if any(served.values()):
        for engine, is_served in served.items():
            assert (f"not in {engine}, because" in verdict) is not is_served, verdict
    else:
        assert output[: -len(verdict)].endswith("not ")
    has_kernel = {None: "none on the CPU", "90a": "hopper (", "120": "portable ("}[arch]
    assert (f"kernels {has_kernel}" in output) is (code == 0 or not arch)


def test_a_model_is_found_by_folder_file_and_hub_name(model, tmp_path):
    snapshots = tmp_path / "hf" / "hub" / "models--deepseek-ai--V2-Lite" / "snapshots"
    folder = model(CONFIGS["V2-Lite"], snapshots / "abc")
    for way in (folder, folder / "config.json", "deepseek-ai/V2-Lite"):
        assert str(folder) in doctor(way)[1].replace(" ", "")
    model(CONFIGS["V3"], snapshots / "def")
    refs = snapshots.parent / "refs"
    refs.mkdir()
    for revision, layers in (("abc", 27), ("def", 61)):
        (refs / "main").write_text(revision)
        assert f"layers {layers} with" in doctor("deepseek-ai/V2-Lite")[1]


def test_without_a_named_revision_the_newest_snapshot_with_a_config_counts(model, tmp_path, monkeypatch):
    hub = tmp_path / "downloads"
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str(hub))
    snapshots = hub / "models--deepseek-ai--V2-Lite" / "snapshots"
    model(CONFIGS["V3"], snapshots / "old")
    model(CONFIGS["V2-Lite"], snapshots / "new")
    (snapshots / "without").mkdir()
    for age, name in enumerate(("without", "new", "old")):
        os.utime(snapshots / name, (1e9 - age,) * 2)
    assert "layers 27 with" in doctor("deepseek-ai/V2-Lite")[1]


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
def test_the_dtype_has_either_name(model, name):
    config = {key: value for key, value in CONFIGS["MiniCPM3"].items() if key != "torch_dtype"}
    assert "values in float16" in doctor(model(config | {name: "float16"}))[1]


def test_the_dtype_of_a_multimodal_model_may_be_that_of_the_whole(model):
    for name in ("torch_dtype", "dtype"):
        assert "values in float16" in doctor(model(CONFIGS["multimodal"] | {name: "float16"}))[1]


def test_tokens_that_fit(model):
    folder = model(CONFIGS["V2-Lite"])
    per_gib = (1 << 30) // 31104
    assert f"{per_gib:,} per GiB" in doctor(folder)[1]
    assert f"{10 * (1 << 30) // 31104:,} (10.0 GiB, without weights" in doctor(folder, "--gpu-memory", 10)[1]
    (folder / "model.safetensors").write_bytes(bytes(1 << 20))
    assert "80.0 GiB less 0.0 GiB of weights" in doctor(folder, "--gpu-memory", 80)[1]
    index = {"metadata": {"total_size": 4 << 30}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{6 * (1 << 30) // 31104:,} (10.0 GiB less 4.0 GiB" in doctor(folder, "--gpu-memory", 10)[1]
    two = doctor(folder, "--gpu-memory", 10, "--tensor-parallel-size", 2)[1]
    assert "10.0 GiB less 2.0 GiB" in two and "per GPU all of it" in two
    assert "none: 3.0 GiB less 4.0 GiB of weights" in doctor(folder, "--gpu-memory", 3)[1]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    assert "80.0 GiB less 0.0 GiB of weights" in doctor(folder, "--gpu-memory", 80)[1]


def test_gpus_that_divide_the_cache(model):
    gpus = ("--tensor-parallel-size", 8, "--gpu-memory", 10)
    whole = doctor(model(CONFIGS["V3"]), *gpus, *HOPPER)[1]
    code, output = doctor(model(CONFIGS["V3"]), *gpus, *HOPPER, "--decode-context-parallel-size", 4)
    assert code == 0 and "one in 4 tokens of each request, for the heads of 4 GPUs" in output
    fit = [
        int(re.search(r"tokens that fit\W+([\d,]+)", text)[1].replace(",", "")) for text in (whole, output)
    ]
    assert fit[1] == 4 * fit[0]
    assert "-r16-" in whole and "-r64-" in output
    code, output = doctor(model(CONFIGS["V3"]), *gpus, "--decode-context-parallel-size", 3)
    assert code == 2 and "does not divide --tensor-parallel-size 8" in output


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    "quantization",
    [
        MODELOPT,
        {"quant_method": "modelopt_fp4", "quantization": {"kv_cache_quant_algo": "fp8"}},
        {"quant_method": "modelopt", "kv_cache_scheme": SCHEME},
        None,
    ],
)
def test_checkpoints_that_ask_for_an_fp8_cache(model, quantization):
    folder = model(CONFIGS["V2-Lite"] | {"quantization_config": quantization})
    if quantization is None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": MODELOPT}))
    output = doctor(folder)[1]
    assert "format fp8_e4m3, as the checkpoint asks" in output
    assert "576 per layer (512 + 64 values in fp8_e4m3), 15,552 in all layers" in output
    assert f"tokens that fit {(1 << 30) // 15552:,} per GiB" in output
    assert f"--kv-cache-dtype bfloat16 {(1 << 30) // 31104:,} per GiB" in output


@pytest.mark.parametrize(
    "quantization",
    [
        MODELOPT | {"kv_cache_quant_algo": None},
        MODELOPT | {"quant_method": "fp8"},
        {"quant_method": "awq"},
        {"quant_method": "modelopt", "kv_cache_scheme": SCHEME | {"num_bits": 4}},
        {"quant_method": "modelopt", "kv_cache_scheme": SCHEME | {"type": "int"}},
    ],
)
def test_other_checkpoints_have_caches_in_16_bits(model, quantization):
    folder = model(CONFIGS["V2-Lite"] | {"quantization_config": quantization})
    # The config's own quantization counts, not this one.
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": MODELOPT}))
    output = doctor(folder)[1]
    assert "format bfloat16 bytes" in output
    assert f"--kv-cache-dtype fp8_e4m3 {(1 << 30) // 15552:,} per GiB" in output
    assert f"--kv-cache-dtype fp8_ds_mla (vLLM) {(1 << 30) // (27 * 656):,} per GiB" in output


@pytest.fixture
def a100(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (20 << 30, 80 << 30))


def test_the_indexers_cache_of_sparse_models(model):
    """By vLLM's own numbers: what it made of 3.2 GB for four layers (kv_cache_memory_bytes)."""
    results = json.loads((RESULTS / "serving-sparse-h200.json").read_text())
    made = {row["cache_tokens"] for row in results["rows"]}
    sparse = CONFIGS["V3"] | {"num_hidden_layers": 4, "index_topk": 2048, "index_head_dim": 128}
    gpus = ("--tensor-parallel-size", 8, "--gpu-memory", 3.2e9 / (1 << 30))
    output = doctor(model(sparse), *HOPPER, *gpus)[1]
    row = "1,152 per layer (512 + 64 values in bfloat16), 132 per indexer (4 of them), 5,136 in all layers"
    assert f"bytes per token {row}" in output
    options = ("tokens that fit", "--kv-cache-dtype fp8_ds_mla (vLLM), fp8_e4m3 (SGLang)")
    told = [int(output.split(f" {option} ")[1].split()[0].replace(",", "")) for option in options]
    assert {tokens - tokens % 64 for tokens in told} == made, "vLLM's cache has pages of 64 tokens"
    assert f"--kv-cache-dtype fp8_e4m3 (vLLM) {int(3.2e9) // (4 * (576 + 132)):,} " in output
    output = doctor(model(sparse | {"index_head_dim": 64, "quantization_config": MODELOPT}), *HOPPER, *gpus)[
        1
    ]
    assert "format fp8_e4m3 (records in SGLang), as the checkpoint asks" in output
    assert "576 per layer (512 + 64 values in fp8_e4m3), 68 per indexer (4 of them)" in output


@pytest.mark.parametrize(
    ("field", "indexers"),
    [
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 21),  # layers 0, 1, 2, 6, 10 and so on
        ({"index_topk_freq": 3}, 27),  # layers 0, 1, 4, 7 and so on
        ({"index_topk_pattern": "FS" * 39}, 39),
        ({"indexer_types": ["full", "shared", "shared"] * 26}, 26),
    ],
    ids=["GLM-5.2", "usual offset", "pattern", "types"],
)
def test_layers_may_share_an_indexer(model, field, indexers):
    sparse = CONFIGS["V3"] | {"num_hidden_layers": 78, "index_topk": 2048}
    output = doctor(model(sparse | field), *HOPPER)[1]
    expected = 78 * 1152 + indexers * 132
    assert f"132 per indexer ({indexers} of them), {expected:,} in all layers" in output


def test_free_memory_of_the_gpu_here_counts(model, monkeypatch, a100):
    monkeypatch.setattr("mla_backend.jit.why_unavailable", lambda variants: None)
    code, output = doctor(model(CONFIGS["V2-Lite"]))
    assert f"{20 * (1 << 30) // 31104:,} (20.0 GiB" in output
    assert "by the FLOPs of both alone" in output and code == 0
    assert "per GiB" in doctor(model(CONFIGS["V2-Lite"]), *HOPPER)[1], (
        "the memory of another GPU is not known"
    )


@pytest.mark.parametrize(
    ("name", "arch", "kernel"),
    [
        ("V3", "90a", "hopper_few_rows-bf16-d512_64-r16-tma (sm_90a): not built yet"),
        ("V2-Lite", "89", "portable_decode-bf16-d512_64-r16-t16x5 (sm_89)"),
        ("V2-Lite", "80", "pages of 64 tokens portable_decode-bf16-d512_64-r16-t32x4 (sm_80)"),
        ("V2-Lite", "120", ", within 99 KB of shared memory portable_decode-bf16-d512_64-r16-t16x5 (sm_120)"),
        ("MiniCPM3", "90a", "hopper_few_rows-fp16-d256_32-r8-tma"),
    ],
)
def test_kernels_of_a_gpu(model, name, arch, kernel):
    gpus = {"V3": 8, "V2-Lite": 1, "MiniCPM3": 8}[name]
    code, output = doctor(model(CONFIGS[name]), "--arch", arch, "--tensor-parallel-size", gpus)
    assert code == 0 and kernel in output
    assert f"served on sm_{arch}" in output


@pytest.mark.parametrize(
    ("arch", "verdict"),
    [
        ("90a", "served on sm_90a"),
        ("80", "served on sm_80 by the portable kernel, which has run on Hopper only"),
        ("120", "served on sm_120 by the portable kernel, which has run on Hopper only"),
        (
            "100",
            "served on sm_100 by the portable kernel, which has run on Hopper only; "
            "your engine has special kernels for this GPU",
        ),
    ],
)
def test_the_verdict_says_on_which_gpus_kernels_have_run(model, arch, verdict):
    code, output = doctor(model(CONFIGS["V2-Lite"]), "--arch", arch)
    assert code == 0 and output.endswith(verdict)


def test_the_verdict_foresees_what_sglang_refuses(model):
    unrotated = CONFIGS["V2-Lite"] | {"use_mla_nope": True}
    code, output = doctor(model(unrotated), *HOPPER)
    assert code == 0 and "served on sm_90a; not in SGLang, which with use_mla_nope makes a cache" in output
    assert "vllm serve" in output and "sglang.launch_server" not in output
    code, output = doctor(model(unrotated | {"qk_rope_head_dim": 0}), *HOPPER)
    assert code == 0 and "sglang.launch_server" in output and "not in SGLang" not in output


def test_the_verdict_names_an_engine_that_does_not_serve_the_model(model):
    code, output = doctor(model(CONFIGS["V2-Lite"] | {"model_type": "axk1"}), *HOPPER)
    assert code == 0
    assert output.endswith("served on sm_90a; not in SGLang, because the engine has no such model")
    assert "vllm serve" in output and "sglang.launch_server" not in output


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (
            {"learnable_sink": True},
            "its attention has sinks (learnable_sink in its config) and is not sparse",
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            "some of its layers have sliding windows (layer_types in its config)",
        ),
    ],
)
def test_attention_that_is_not_served(model, field, reason):
    code, output = doctor(model(CONFIGS["V2-Lite"] | field), *HOPPER)
    assert code == 1 and output.endswith(f"not served on sm_90a: {reason}: use another backend")
    for served in (
        {"layer_types": ["full_attention"] * 27},
        {"learnable_sink": True, "index_topk": 2048},
        {"qk_rope_head_dim": 0},
    ):
        assert doctor(model(CONFIGS["V2-Lite"] | served), *HOPPER)[0] == 0


def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("MLA_BACKEND_NVCC", "/nonexistent")
    return "/nonexistent is not an executable"


def forbidden(monkeypatch, tmp_path):
    monkeypatch.setenv("MLA_BACKEND_JIT", "0")
    return "MLA_BACKEND_JIT=0 forbids building"


def no_folder(monkeypatch, tmp_path):
    (tmp_path / "cache").touch()
    toolchain = Toolchain(Path("/no/nvcc"), "13.0.88", "PATH")
    monkeypatch.setattr("mla_backend.jit.builder.find_toolchain", lambda: toolchain)
    return f"kernels cannot be built in {tmp_path / 'cache'}"


@pytest.mark.parametrize("arch", [None, "80"])
@pytest.mark.parametrize("make", [no_compiler, forbidden, no_folder])
def test_not_served_where_an_engine_would_refuse_to_start(model, monkeypatch, tmp_path, a100, make, arch):
    reason = make(monkeypatch, tmp_path)
    code, output = doctor(model(CONFIGS["V2-Lite"]), *(("--arch", arch) if arch else ()))
    assert code == 1 and "engine's start" not in output
    verdict = output[output.index("not served on sm_80: ") :]
    assert reason.replace(" ", "") in verdict.replace(" ", "")  # long paths are folded
    for module in ("jit", "jit.builder"):
        monkeypatch.setattr(f"mla_backend.{module}.find_entry", lambda variant: "an entry")
    monkeypatch.setattr("mla_backend.jit.builder.why_not_trusted", lambda entry: None)
    assert doctor(model(CONFIGS["V2-Lite"]))[0] == 0, "what is built needs no compiler"


def test_another_machine_may_build_what_this_one_cannot(model, monkeypatch, tmp_path):
    reason = no_compiler(monkeypatch, tmp_path)
    code, output = doctor(model(CONFIGS["V2-Lite"]), *HOPPER)
    assert code == 0 and output.endswith("served on sm_90a")
    assert "engine's start" not in output
    assert "this machine cannot build what is missing: kernel " in output and reason in output


def test_what_no_kernel_serves(model):
    unknown = CONFIGS["V2-Lite"] | {"kv_lora_rank": 384}
    code, output = doctor(model(unknown), *HOPPER)
    assert code == 1
    assert "not served on sm_90a: kv_lora_rank 384 with qk_rope_head_dim 64: kernels exist for" in output
    code, output = doctor(model(CONFIGS["V2-Lite"]), *HOPPER, "--page-size", 12)
    assert (
        code == 0
        and "portable (Hopper kernels need a page_size of 1, 2, 4 or a multiple of 8, not 12)" in output
    )


@pytest.mark.parametrize(
    ("page_size", "is_sparse", "verdict"),
    [
        (24, False, "served on sm_90a; not in vLLM, whose --block-size must be a multiple of 16"),
        (7, False, "served on sm_90a; not in vLLM, whose --block-size must be a multiple of 16"),
        (48, True, "served on sm_90a; not in vLLM, whose --block-size must be a multiple of 64"),
        (48, False, "served on sm_90a"),
        (64, True, "served on sm_90a"),
    ],
)
def test_page_sizes_that_an_engine_refuses_are_in_the_verdict(model, page_size, is_sparse, verdict):
    folder = model(CONFIGS["V3"] | ({"index_topk": 2048} if is_sparse else {}))
    code, output = doctor(folder, *HOPPER, "--tensor-parallel-size", 8, "--page-size", page_size)
    assert code == 0 and output.endswith(verdict)
    assert ("vllm serve" in output) is ("not in vLLM" not in verdict)


def test_sparse_attention(model):
    sparse = model(CONFIGS["V3"] | {"index_topk": 2048})
    code, output = doctor(sparse, *HOPPER, "--tensor-parallel-size", 8)
    assert code == 0 and "hopper_few_rows-bf16-d512_64-r16-lists (sm_90a)" in output
    assert "those that the engine's indexer chooses" in output and "absorbed attention" not in output
    for options in ((), ("--arch", "89")):
        code, output = doctor(sparse, *options)
        assert code == 1 and "indexers need a GPU of compute capability 9.0 or newer" in output
    code, output = doctor(sparse, *HOPPER, "--tensor-parallel-size", 8, "--decode-context-parallel-size", 2)
    assert code == 1 and "leave out --decode-context-parallel-size" in output


def test_where_absorbed_meets_vanilla(model):
    from mla_backend.checkpoint import Checkpoint

    folder = model(CONFIGS["V2-Lite"])
    limit = Policy(Checkpoint.find(str(folder)).geometry, default_rates("cpu")).absorbed_query_limit()
    _, output = doctor(folder)
    assert f"requests with at most {limit} new tokens on a long prefix use absorbed attention" in output
    assert "by the shipped rates of one CPU core" in output
    assert "by the FLOPs of both alone" in doctor(folder, "--arch", "120")[1]
    assert "by the rates measured on an H200" in doctor(folder, *HOPPER)[1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4},
            "'llama' does not describe Multi-head",
        ),
        ([], "holds no object"),
        (V2_LITE, "num_hidden_layers must be a positive int, got None"),
        (
            CONFIGS["V3"] | {"num_attention_heads": "128"},
            "num_attention_heads must be a positive int, got '128'",
        ),
        (V2_LITE | {"num_hidden_layers": 0}, "num_hidden_layers must be a positive int, got 0"),
        (V2_LITE | {"num_layers": -1}, "num_layers must be a positive int, got -1"),
        (
            V2_LITE | {"num_hidden_layers": 8, "layer_group_size": -2},
            "layer_group_size must be a positive int",
        ),
        (
            CONFIGS["V3"] | {"num_nextn_predict_layers": "x"},
            "num_nextn_predict_layers must be an int of at least 0, got 'x'",
        ),
        (CONFIGS["V3"] | {"rope_scaling": "yarn"}, "rope_scaling must be an object, got 'yarn'"),
        (
            CONFIGS["V3"] | {"index_topk": 8, "index_head_dim": "x"},
            "index_head_dim must be a positive int, got",
        ),
        (CONFIGS["V3"] | {"index_topk": 8, "index_topk_freq": 0.5}, "index_topk_freq must be a positive int"),
        (CONFIGS["V3"] | {"qk_nope_head_dim": 10**400}, "is not a valid config: "),
        (CONFIGS["V3"] | {"layer_types": 5}, "layer_types must be a list, got 5"),
        (CONFIGS["V3"] | {"layer_types": ["linear_attention"] * 2}, "no layer has latent attention"),
        (CONFIGS["V3"] | {"quantization_config": "fp8"}, "quantization_config must be an object, got 'fp8'"),
    ],
)
def test_one_error_for_what_cannot_be_reported_on(model, config, message):
    code, output = doctor(model(config))
    assert code == 2 and message in output and " layers" not in output


def test_other_errors(model, tmp_path):
    code, output = doctor("nobody/nothing")
    assert code == 2 and "neither a folder with one nor a path to one" in output
    assert "huggingface_hub, which would fetch it, is not installed" in output
    assert output.count("no config.json") == 1
    code, output = doctor(model(CONFIGS["V3"]), "--tensor-parallel-size", 3)
    assert code == 2 and "128 heads cannot be split over 3 tensor-parallel GPUs" in output
    code, output = doctor(model(CONFIGS["V3"]), "--arch", "sm_80")
    assert code == 2 and "arch 'sm_80' must be a compute capability such as '80' or '90a'" in output
    for memory in ("nan", "0", "-1", "1e300"):
        code, output = doctor(model(CONFIGS["V3"]), "--gpu-memory", memory)
        assert code == 2 and "--gpu-memory must be a positive number of GiB" in output
    outcome = CliRunner().invoke(app, ["doctor", "--arch", "90a"])
    assert outcome.exit_code == 2 and "name one, too" in outcome.output
    (tmp_path / "model" / "config.json").write_text("{")
    code, output = doctor(tmp_path / "model")
    assert code == 2 and "cannot be read" in output
    beside = model(CONFIGS["V3"]) / "hf_quant_config.json"
    for text, message in {"{": "cannot be read", "[" * 200_000: "cannot be read", "[1]": "is not"}.items():
        beside.write_text(text)
        code, output = doctor(tmp_path / "model")
        assert code == 2 and f"hf_quant_config.json {message}" in output
    for name in ("~nobody-here/x", "x" * 5_000):
        code, output = doctor(name)
        assert code == 2 and "no config.json for " in output and len(output) < 400


def test_weights_of_a_size_that_cannot_be_do_not_count(model):
    folder = model(CONFIGS["V3"])
    for size in ("Infinity", "-5000000000"):
        (folder / "model.safetensors.index.json").write_text(f'{{"metadata": {{"total_size": {size}}}}}')
        code, output = doctor(folder, "--gpu-memory", 80)
        assert code == 0 and "80.0 GiB" in output and "of weights" not in output


def start_lines(output):
    """The commands that the report gives for each engine."""
    lines = output.split("start it by ")[1].split(" fp8 cache ")[0]
    vllm, _, sglang = lines.partition(" SGLang ")
    return shlex.split(vllm.removeprefix("vLLM ")), shlex.split(sglang)


def test_the_command_that_starts_each_engine(model):
    folder = model(CONFIGS["V2-Lite"])
    vllm, sglang = start_lines(doctor(folder, *HOPPER)[1])
    assert vllm == ["vllm", "serve", str(folder), "--attention-backend", "MLA_BACKEND"]
    launch = ["python", "-m", "sglang.launch_server", "--model-path", str(folder)]
    assert sglang == [*launch, "--attention-backend", "mla_backend", "--page-size", "64"]
    gpus = ("--tensor-parallel-size", 8, "--decode-context-parallel-size", 4, "--page-size", 128)
    vllm, sglang = start_lines(doctor(folder, *HOPPER, *gpus)[1])
    sizes = ["--tensor-parallel-size", "8", "--decode-context-parallel-size", "4", "--block-size", "128"]
    assert vllm[5:] == sizes
    assert sglang[7:] == ["--page-size", "128", "--tp-size", "8", "--dcp-size", "4"]


def test_the_command_depends_on_the_model_and_on_vllms_version(model, monkeypatch):
    assert start_lines(doctor(model(CONFIGS["MiniCPM3"]), *HOPPER)[1])[0][-1] == "transformers"
    sparse = doctor(model(CONFIGS["V3"] | {"index_topk": 2048}), *HOPPER)[1]
    sglang = start_lines(sparse)[1]
    assert sglang[0] == "MLA_BACKEND_DSA=1" and sglang[-2:] == ["--dsa-decode-backend", "fa3"]
    monkeypatch.setattr("mla_backend.engines.Engine.installed", lambda engine: [("vllm", "0.31.1")])
    assert start_lines(doctor(model(CONFIGS["V2-Lite"]), *HOPPER)[1])[0][-1] == "CUSTOM"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("arch", [None, "90a"])
def test_only_engines_that_serve_the_model_are_started(model, family, arch):
    output = doctor(model(family.config), *(("--arch", arch) if arch else ()))[1]
    device = "cuda" if arch else "cpu"
    in_vllm = family.vllm.on(device).is_served
    in_sglang = family.sglang.on(device).is_served and arch is not None  # on a CPU in tests only
    assert ("vllm serve" in output, "sglang.launch_server" in output) == (in_vllm, in_sglang)
    has_drafts = "num_nextn_predict_layers" in family.config
    assert ("MTP in vLLM" in output, "MTP in SGLang" in output) == (
        in_vllm and has_drafts,
        in_sglang and has_drafts,
    )
    has_fp8 = "fp8 cache add" in output or "fp8 cache in vLLM add" in output
    assert has_fp8 is (in_vllm or in_sglang)


def test_kernels_and_options_of_drafts(model):
    output = doctor(model(CONFIGS["V3"]), *HOPPER, "--tensor-parallel-size", 8)[1]
    assert "with MTP the same kernels verify drafts (2 tokens, so 32 query rows)" in output
    (drafts,) = re.findall(r"--speculative-config '(.*?)'", output)
    assert json.loads(drafts)["method"] == "mtp" and "--speculative-algorithm EAGLE" in output
    sparse = model(CONFIGS["V3"] | {"index_topk": 2048})
    # To sparse attention, each token is a request of its own.
    assert "with MTP the same kernels verify drafts start" not in output
    assert "query rows" not in doctor(sparse, *HOPPER, "--tensor-parallel-size", 8)[1]
    assert "with MTP" not in doctor(model(CONFIGS["V2-Lite"]), *HOPPER)[1]


def kernels_in(output):
    """The names of the kernels in a report, each as often as it is listed."""
    return re.findall(r"([a-z_]+(?:-\w+)*) \(sm_\w+\): ", output)


FEW = [f"hopper_few_rows-bf16-d512_64-r{rows}-tma" for rows in (8, 16, 24)]
MANY = ["hopper_many_rows-bf16-d512_64-r64-tma", "hopper_many_rows-bf16-d512_64-r64x2-tma"]
PRODUCTS = ["head_product-bf16-d128-columns", "head_product-bf16-d512-depth"]


@pytest.mark.parametrize(
    ("config", "options", "kernels"),
    [
        # Query rows of 1, 2, 3 and more tokens: 8, 16, 24, and more.
        (
            "V2-Lite",
            ("--tensor-parallel-size", 2),
            [FEW[0], "append", *FEW[1:], *MANY, *PRODUCTS],
        ),
        ("V2-Lite", (), [FEW[1], "append", *MANY, *PRODUCTS]),
        ("V3", (), [MANY[1], "append", *PRODUCTS]),
        (
            "V3",
            ("--tensor-parallel-size", 8, "--decode-context-parallel-size", 2),
            [MANY[0], "append", MANY[1]],
        ),
        ("V3", ("--page-size", 24), [MANY[1], "append"]),  # not in vLLM
    ],
    ids=["8 heads", "16 heads", "128 heads", "32 heads on a shard", "SGLang alone"],
)
def test_the_kernels_of_every_number_of_new_tokens_are_listed(model, config, options, kernels):
    assert kernels_in(doctor(model(CONFIGS[config]), *HOPPER, *options)[1]) == kernels


def test_the_kernels_of_sparse_attention_are_those_of_one_token(model):
    output = doctor(model(CONFIGS["V3"] | {"index_topk": 2048}), *HOPPER, "--tensor-parallel-size", 8)[1]
    assert kernels_in(output) == ["hopper_few_rows-bf16-d512_64-r16-lists"]


def test_kernels_that_one_engine_builds_are_marked(model):
    sharded = ("--tensor-parallel-size", 8, "--decode-context-parallel-size", 2)
    output = doctor(model(CONFIGS["V3"]), *HOPPER, *sharded)[1]
    assert re.search(
        r"up to \d+ tokens hopper_many_rows-bf16-d512_64-r64x2-tma [^)]*\)[^)]*\(in vLLM\)", output
    )
    # Without vLLM, drafts alone have more than one token: 64 query rows at most.
    output = doctor(model(CONFIGS["V3"]), *HOPPER, *sharded, "--page-size", 8)[1]
    assert kernels_in(output) == [MANY[0], "append"]


def test_products_that_vllm_computes_itself_are_not_listed(model, monkeypatch):
    folder = model(CONFIGS["V2-Lite"])
    assert "in vLLM head_product-bf16-d128-columns" in doctor(folder, *HOPPER)[1]
    assert "head_product" not in doctor(folder, "--arch", "80")[1]
    monkeypatch.setenv("MLA_BACKEND_AROUND_ATTENTION", "0")
    assert "head_product" not in doctor(folder, *HOPPER)[1]
    monkeypatch.delenv("MLA_BACKEND_AROUND_ATTENTION")
    assert "head_product" not in doctor(model(CONFIGS["MiniCPM3"] | {"v_head_dim": 40}), *HOPPER)[1]
    quantized = model(CONFIGS["V2-Lite"] | {"quantization_config": {"quant_method": "fp8"}})
    output = doctor(quantized, *HOPPER)[1]
    assert "for the layout to which vLLM dequantizes kv_b_proj" in output and "head_product" not in output


def test_weights_that_do_not_fit_are_the_verdict(model):
    folder = model(CONFIGS["V3"])
    index = {"metadata": {"total_size": 640 << 30}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    code, output = doctor(folder, *HOPPER, "--gpu-memory", 140)
    assert code == 1 and "640 GiB of weights do not fit into 140 GiB of a GPU's memory" in output
    assert output.endswith("use --tensor-parallel-size 8 or more") and "start it by" not in output
    code, output = doctor(folder, *HOPPER, "--gpu-memory", 140, "--tensor-parallel-size", 8)
    assert code == 0 and "start it by" in output


def test_the_report_as_json(model):
    folder = model(CONFIGS["V2-Lite"])
    code, output = doctor(folder, *HOPPER, "--json")
    told = json.loads(output)
    assert code == 0 and told["answer"] is True and told["verdict"].startswith("served on sm_90a")
    assert ["heads", "16"] in next(rows for title, rows in told["sections"].items() if "deepseek" in title)
    code, output = doctor(model(CONFIGS["V2-Lite"] | {"learnable_sink": True}), *HOPPER, "--json")
    assert code == 1 and json.loads(output)["answer"] is False


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub: `hub[name] = content` adds a file to each of its models; others are not found."""
    files = {}

    def hf_hub_download(model, name, **options):
        if name not in files:
            raise FileNotFoundError(f"404 for {model}/{name}\nsecond line")
        path = tmp_path / "fetched" / model / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(files[name]))
        return str(path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=hf_hub_download))
    return files


def test_a_config_is_fetched_from_the_hub(hub):
    code, output = doctor("somebody/model", *HOPPER)
    assert (
        code == 2 and "it cannot be fetched (FileNotFoundError: 404 for somebody/model/config.json)" in output
    )
    hub["config.json"] = CONFIGS["V2-Lite"]
    code, output = doctor("somebody/model", *HOPPER, "--gpu-memory", 80)
    assert code == 0 and "vllm serve somebody/model" in output and "without weights" in output
    hub["model.safetensors.index.json"] = {"metadata": {"total_size": 8 << 30}}
    hub["hf_quant_config.json"] = {"quantization": {"kv_cache_quant_algo": "FP8"}}
    output = doctor("somebody/model", *HOPPER, "--gpu-memory", 80)[1]
    assert "80.0 GiB less 8.0 GiB of weights" in output and "fp8_e4m3, as the checkpoint asks" in output


def test_errors_are_on_stderr(model):
    for arguments in (["nobody/nothing"], [str(model([]))]):
        outcome = CliRunner().invoke(app, ["doctor", *arguments])
        assert outcome.exit_code == 2 and not outcome.stdout and outcome.stderr.count("\n") == 1
