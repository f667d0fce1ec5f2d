"""On a GPU: CUDA graphs, speculation and synchronization, which a CPU cannot test.

pytest -m gpu tests/sglang
"""

import functools
import json
import shutil
import unittest

import families
import pytest
import scenarios
import sgl_kernel_stub
import sglang
import torch
from conftest import Oracle, make_checkpoint
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from tests.support.block_fp8 import block_fp8_checkpoint
from tests.support.eagle import eagle_head
from tests.support.greedy import NEAR_TIE, Sequence, assert_equal_up_to_near_ties, mean_deviation
from tests.support.modelopt import modelopt_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]

sgl_kernel_stub.install()

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

DIMENSIONS = dict(kv_lora_rank=512, qk_rope_head_dim=64, device="cuda", dtype=torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def plugins():
    from sglang.srt.plugins import load_plugins

    load_plugins()


def kit_case(mode, prefix_lens, extend_lens=(), page_size=64):
    from sglang.test.kits.attention_unittest.attention_methods.mla_attention import MLAAttentionCase

    return MLAAttentionCase(
        name=f"gpu_{mode.name}",
        backend="mla_backend",
        forward_mode=mode,
        num_heads=16,
        page_size=page_size,
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
    )


ARCHITECTURES = {
    "deepseek-v2": (),
    "q_lora": ("--q-lora-rank", "192"),
    "without yarn": ("--rope", "default"),
    "whole blocks": ("--q-lora-rank", "256"),
    # SGLang's kernel before the draft layer needs a hidden size above 256.
    "mtp": ("--architecture", "deepseek-v3", "--hidden-size", "512"),
    "three layers": ("--architecture", "deepseek-v3", "--hidden-size", "512", "--layers", "3"),
    # SGLang computes the width of a value as hidden_size / heads.
    "minicpm3": ("--architecture", "minicpm3", "--hidden-size", "1024"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function from a name in ARCHITECTURES to a checkpoint without routed experts.

    With routed experts, rounding can select another expert at a near-tie, which moves logits by 0.3.
    """

    @functools.cache
    def make(name):
        path = tmp_path_factory.mktemp(name)
        arguments = ("--heads", "16", "--layers", "2", "--experts", "0", "--context-length", "16384")
        make_checkpoint(path, *arguments, *ARCHITECTURES[name])
        if name == "mtp":
            change_weights(path, path, make_predictable)
        return path

    return make


def change_weights(source, destination, change):
    """Copy a checkpoint; ``change`` maps its weights to new ones."""
    if source != destination:
        shutil.copytree(source, destination, dirs_exist_ok=True)
    weights = change({n: w.clone() for n, w in load_file(source / "model.safetensors").items()})
    save_file(weights, destination / "model.safetensors", metadata={"format": "pt"})


def make_predictable(weights):
    """Make the next token depend mostly on the last one, in the model and in its draft layer.

    The draft layer passes the embedding of the last token on. About half of its drafts are accepted.
    """
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= 0.2
    hidden = len(weights["model.norm.weight"])
    draft = "model.layers.2"
    weights[f"{draft}.eh_proj.weight"] = torch.eye(hidden, 2 * hidden).bfloat16()
    weights[f"{draft}.enorm.weight"].fill_(1)
    weights[f"{draft}.shared_head.norm.weight"] = weights["model.norm.weight"].clone()
    return weights


@pytest.fixture(scope="module")
def generate(run_engine, models):
    """A function that runs an engine on all batches.

    It returns the sequences of each batch, the tokens per step of each request, and the counts of the paths.
    """

    def run(model="deepseek-v2", **settings):
        path = models(model) if isinstance(model, str) else model
        if settings.get("speculative_algorithm"):
            settings.setdefault("speculative_draft_model_path", str(path))  # its draft layer, or all of it
        result, counts = run_engine("on_gpu", json.dumps(settings), model=path)
        batches = [[Sequence(*sequence) for sequence in batch] for batch in result["batches"]]
        return batches, result["accept_lengths"], counts

    return run


@pytest.fixture(scope="module")
def stock(generate):
    """A function from dtype and model to the sequences of SGLang's Triton backend."""
    return functools.cache(lambda dtype, model: generate(model, attention_backend="triton", dtype=dtype)[0])


def assert_same_tokens(batches, expected, dtype="float16"):
    different = 0
    for ours, theirs in zip(batches, expected, strict=True):
        different += assert_equal_up_to_near_ties(ours, theirs, NEAR_TIE[dtype], len(ours))
    if dtype == "float16":
        assert different <= sum(map(len, batches)) // 4, "too many differences, if only after near-ties"


SPECULATION = dict(
    page_size=64, speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4
)


@pytest.mark.parametrize(
    "settings",
    [
        dict(page_size=64),
        dict(page_size=1),
        dict(page_size=64, disable_cuda_graph=True, chunked_prefill_size=512),
        dict(page_size=64, dtype="bfloat16"),
        dict(page_size=64, enable_deterministic_inference=True),
        dict(page_size=64, model="q_lora"),
    ],
    ids=["graphs", "page 1", "eager, chunks of 512", "bf16", "deterministic", "q_lora"],
)
def test_tokens_equal_the_stock_backend(generate, stock, settings):
    dtype = settings.get("dtype", "float16")
    batches, _, counts = generate(**settings)
    assert_same_tokens(batches, stock(dtype, settings.get("model", "deepseek-v2")), dtype)
    assert all(counts[path].calls for path in ("absorbed_decode", "absorbed_extend"))
    assert counts["vanilla_prefill"].calls or "enable_deterministic_inference" in settings


@pytest.mark.parametrize(
    "model, settings",
    [
        ("deepseek-v2", {}),
        ("mtp", dict(speculative_algorithm="EAGLE", **SPECULATION)),
        pytest.param("deepseek-v2", dict(tp_size=2, dcp_size=2), marks=two_gpus),
    ],
    ids=["alone", "mtp", "dcp"],
)
def test_an_fp8_cache_is_as_near_to_bf16_as_that_of_sglang(generate, stock, model, settings):
    fp8 = dict(page_size=64, dtype="bfloat16", kv_cache_dtype="fp8_e4m3")
    ours, _, counts = generate(model, **fp8 | settings)
    theirs, _, _ = generate(model, attention_backend="triton", **fp8)
    assert counts["absorbed_decode"].calls and counts["vanilla_prefill"].calls
    assert bool(counts["absorbed_extend"].calls) is ("dcp_size" not in settings)
    expected = stock("bfloat16", model)
    for batch, cached in ((-2, ""), (-1, ", cached")):
        mean = mean_deviation(ours[batch], expected[batch], f"mla_backend{cached}")
        assert mean <= 1.1 * mean_deviation(theirs[batch], expected[batch], f"triton{cached}")


@pytest.mark.parametrize(
    "algorithm, model, accepted",
    [
        pytest.param("STANDALONE", "deepseek-v2", 3.0, id="the model drafts for itself"),
        pytest.param("EAGLE", "mtp", 1.2, id="multi-token prediction"),
    ],
)
def test_speculation(generate, stock, run_engine, algorithm, model, accepted):
    """The tokens are those without speculation, and the expected number of drafts is accepted.

    All of it is captured, draft extensions too.
    """
    batches, accept_lengths, counts = generate(model, speculative_algorithm=algorithm, **SPECULATION)
    for phase in ("draft decode", "draft extend"):
        assert f"Capture {phase} CUDA graph end" in run_engine.output
    assert_same_tokens(batches, stock("float16", model))
    mean = sum(accept_lengths) / len(accept_lengths)
    print(f"{algorithm}: {mean:.2f} tokens a step")
    assert mean > accepted
    assert counts["absorbed_decode"].calls


def test_eagle3_heads_with_latent_attention(generate, stock, run_engine, tmp_path):
    """Their drafts are noise, so most are rejected."""
    head = eagle_head(
        tmp_path, "eagle3", "--heads", "16", "--context-length", "16384", "--hidden-size", "512"
    )
    drafts = dict(speculative_algorithm="EAGLE3", speculative_draft_model_path=str(head))
    batches, _, counts = generate("three layers", **drafts, **SPECULATION)
    for phase in ("draft decode", "draft extend"):
        assert f"Capture {phase} CUDA graph end" in run_engine.output
    assert_same_tokens(batches, stock("float16", "three layers"))
    assert counts["absorbed_decode"].calls


def test_a_model_without_yarn(generate, stock, run_engine):
    """Its rotary embedding is of another class than one with YaRN."""
    batches, _, counts = generate("without yarn", page_size=64)
    assert "cache append fused in 2 of 2 attention layers" in run_engine.output
    assert all(counts[path].calls for path in ("absorbed_decode", "absorbed_extend", "vanilla_prefill"))
    assert_same_tokens(batches, stock("float16", "without yarn"))


@pytest.mark.skipif(
    "minicpm3" not in CONFIG_MAPPING, reason="this transformers does not know MiniCPM3's configuration"
)
def test_minicpm3(generate, stock):
    batches, _, counts = generate("minicpm3", page_size=64)
    assert_same_tokens(batches, stock("float16", "minicpm3"))
    assert counts["absorbed_decode"].calls and counts["absorbed_extend"].calls


ON_GPU = ("--heads", "16", "--context-length", "16384", "--dtype", "bfloat16")


def choices(oracle, batches):
    """What the oracle would choose in the place of each token of the engine's batches."""
    return [
        [oracle.choices(prompt, ours.tokens) for prompt, ours in zip(prompts, sequences, strict=True)]
        for prompts, sequences in zip(scenarios.batches_on_gpu(), batches, strict=True)
    ]


def test_mistral_small_4(generate, tmp_path):
    """Latents of 256 + 64; queries are scaled by their positions, in each replay of a captured step, too.

    Compared with HuggingFace: SGLang's Triton backend does not compile for these latents.
    """
    pytest.importorskip("transformers.models.mistral4", reason="this version of transformers lacks the model")
    ours, theirs = families.mistral(tmp_path, 1024, *ON_GPU, **families.SMALL_4)
    batches, _, counts = generate(ours, page_size=64)
    assert_same_tokens(batches, choices(Oracle(theirs, "cuda"), batches))
    assert all(counts[way].calls for way in ("absorbed_decode", "absorbed_extend", "vanilla_prefill"))
    _, unscaled = families.mistral(tmp_path / "unscaled", 16384, *ON_GPU, **families.SMALL_4)
    with pytest.raises(AssertionError):  # otherwise the scaling would change nothing
        assert_same_tokens(batches, choices(Oracle(unscaled, "cuda"), batches))


@pytest.mark.skipif(
    Version(sglang.__version__) < Version("0.5.23"), reason="SGLang 0.5.16 wants a layer of linear attention"
)
@pytest.mark.parametrize("settings", [{}, dict(kv_cache_dtype="fp8_e4m3")], ids=["16 bits", "e4m3"])
def test_kimi_linear(generate, stock, tmp_path, settings):
    """Without its layers of linear attention."""
    path, _ = families.kimi_linear(tmp_path, *ON_GPU)
    fp8 = dict(page_size=64, dtype="bfloat16") | settings
    ours, _, counts = generate(path, **fp8)
    assert counts["absorbed_decode"].calls and counts["vanilla_prefill"].calls
    if not settings:
        return assert_same_tokens(ours, stock("bfloat16", path), "bfloat16")
    theirs = generate(path, attention_backend="triton", **fp8)[0]
    for batch in (-2, -1):
        expected = stock("bfloat16", path)[batch]
        mean = mean_deviation(ours[batch], expected, f"mla_backend {batch}")
        assert mean <= 1.1 * mean_deviation(theirs[batch], expected, f"triton {batch}")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_beside_another_backend(generate, stock, phase):
    settings = dict(page_size=64, attention_backend="triton", **{f"{phase}_attention_backend": "mla_backend"})
    batches, _, counts = generate(**settings)
    assert_same_tokens(batches, stock("float16", "deepseek-v2"))
    assert bool(counts["absorbed_decode"].calls) is (phase == "decode")
    assert bool(counts["vanilla_prefill"].calls) is (phase == "prefill")


@two_gpus
@pytest.mark.parametrize(
    "settings",
    [dict(tp_size=2), dict(tp_size=2, dp_size=2, enable_dp_attention=True), dict(pp_size=2)],
    ids=["tensor", "data-parallel attention", "pipeline"],
)
def test_two_gpus(generate, stock, settings):
    batches, _, counts = generate(page_size=64, **settings)
    assert_same_tokens(batches, stock("float16", "deepseek-v2"))
    assert counts["absorbed_decode"].calls and counts["vanilla_prefill"].calls


@two_gpus
@pytest.mark.parametrize(
    "settings",
    [dict(page_size=64), dict(page_size=1, chunked_prefill_size=512)],
    ids=["pages of 64", "pages of 1, chunks of 512"],
)
def test_decode_context_parallelism(generate, stock, settings):
    batches, _, counts = generate(tp_size=2, dcp_size=2, **settings)
    assert_same_tokens(batches, stock("float16", "deepseek-v2"))
    assert counts["absorbed_decode"].calls and counts["vanilla_prefill"].calls
    assert not counts["absorbed_extend"].calls


def test_adapters_of_kv_b_proj(generate, stock, models, tmp_path):
    """Compared with a checkpoint that has the adapter merged in; the last batch has cached prefixes."""
    adapter, merged, rank = tmp_path / "adapter", tmp_path / "merged", 16
    adapter.mkdir()
    generator = torch.Generator().manual_seed(0)
    parts = {}

    def merge(weights):
        for name in [name for name in weights if name.endswith("kv_b_proj.weight")]:
            weight = weights[name]
            a = (torch.randn(rank, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5).bfloat16()
            b = (torch.randn(weight.shape[0], rank, generator=generator) * rank**-0.5).bfloat16()
            layer = "base_model.model." + name.removesuffix(".weight")
            parts[f"{layer}.lora_A.weight"], parts[f"{layer}.lora_B.weight"] = a, b
            weights[name] = (weight.float() + b.float() @ a.float()).to(weight.dtype)
        return weights

    change_weights(models("deepseek-v2"), merged, merge)
    save_file(parts, adapter / "adapter_model.safetensors")
    config = dict(peft_type="LORA", r=rank, lora_alpha=rank, target_modules=["kv_b_proj"], bias="none")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    batches, _, counts = generate(
        page_size=64, enable_lora=True, lora_paths={"a": str(adapter)}, lora_backend="triton"
    )
    expected = generate(merged, attention_backend="triton")[0]
    # Merging rounds the weights again, so log-probabilities differ by more than between backends.
    for ours, theirs in zip(batches, expected, strict=True):
        assert_equal_up_to_near_ties(ours, theirs, NEAR_TIE["bfloat16"], len(ours))
    plain = stock("float16", "deepseek-v2")
    changed = [ours.tokens != theirs.tokens for ours, theirs in zip(batches[-1], plain[-1], strict=True)]
    assert sum(changed) > len(changed) // 2, "the adapter changes nothing"
    assert counts["absorbed_extend"].calls and not counts["vanilla_prefill"].calls


@pytest.mark.parametrize("scales", ["of blocks", "per tensor"])
def test_weights_in_fp8(generate, stock, models, tmp_path, monkeypatch, scales):
    """As DeepSeek-V3's or ModelOpt's: as near to the model in 16 bits as with another backend."""
    monkeypatch.setenv("SGLANG_ENABLE_JIT_DEEPGEMM", "0")  # it would compile for minutes
    source, path = models("whole blocks"), tmp_path / "fp8"
    if scales == "of blocks":
        block_fp8_checkpoint(source, path)
    else:
        modelopt_checkpoint(source, path, [1.0, 1.0], fp8_weights=True)
    ours, _, counts = generate(path, page_size=64, dtype="bfloat16")
    theirs = generate(path, attention_backend="triton", dtype="bfloat16")[0]
    expected = stock("bfloat16", "whole blocks")
    assert counts["absorbed_decode"].calls and counts["vanilla_prefill"].calls
    assert counts["absorbed_extend"].calls
    for batch, cached in ((-2, ""), (-1, ", cached")):
        mean = mean_deviation(ours[batch], expected[batch], f"mla_backend{cached}")
        assert mean <= 1.3 * mean_deviation(theirs[batch], expected[batch], f"triton{cached}")


def test_torch_compile(generate, stock, monkeypatch):
    """Decode steps of one and of two requests are compiled before they are captured."""
    monkeypatch.setenv("SGLANG_TORCH_COMPILE_MODE", "default")
    sizes = dict(torch_compile_max_bs=2, cuda_graph_bs_decode=[1, 2, 64])
    batches, _, counts = generate(page_size=64, enable_torch_compile=True, **sizes)
    assert_same_tokens(batches, stock("float16", "deepseek-v2"))
    assert counts["absorbed_decode"].calls


@two_gpus
def test_expert_parallelism(generate, tmp_path):
    """Every token uses all experts: at a near-tie, rounding could select another one."""
    path = tmp_path / "experts"
    make_checkpoint(path, "--heads", "16", "--layers", "2", "--experts", "4", "--context-length", "16384")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 4}))
    batches, _, counts = generate(path, page_size=64, tp_size=2, ep_size=2)
    assert_same_tokens(batches, generate(path, attention_backend="triton")[0])
    assert counts["absorbed_decode"].calls and counts["vanilla_prefill"].calls


def generate_separately(run_pair, path, **settings):
    """The sequences of each batch from a decode server on the GPU that its prefill server uses, too."""
    common = dict(device="cuda", page_size=64)
    if "speculative_algorithm" in settings:
        common["speculative_draft_model_path"] = str(path)
    result, prefill, decode = run_pair(common | settings, model=path)
    assert prefill["vanilla_prefill"].calls and decode["absorbed_decode"].calls
    assert not decode["vanilla_prefill"].calls and not decode["absorbed_extend"].calls
    batches = [[Sequence(*sequence) for sequence in batch] for batch in result["batches"]]
    return batches, result["accept_lengths"]


@pytest.mark.parametrize(
    "model, speculation",
    [("deepseek-v2", {}), ("mtp", dict(speculative_algorithm="EAGLE", **SPECULATION))],
    ids=["alone", "mtp"],
)
def test_separate_prefill_and_decode_servers(run_pair, models, stock, model, speculation):
    batches, accept_lengths = generate_separately(run_pair, models(model), **speculation)
    assert_same_tokens(batches, stock("float16", model))
    if speculation:
        assert sum(accept_lengths) / len(accept_lengths) > 1.2


def test_separate_servers_with_fp8_caches(run_pair, generate, models, stock):
    """They lose no more than one server with such a cache."""
    fp8, expected = dict(dtype="bfloat16", kv_cache_dtype="fp8_e4m3"), stock("bfloat16", "deepseek-v2")
    apart, _ = generate_separately(run_pair, models("deepseek-v2"), **fp8)
    together = generate(page_size=64, **fp8)[0]
    for batch, cached in ((-2, ""), (-1, ", cached")):
        mean = mean_deviation(apart[batch], expected[batch], f"two servers{cached}")
        assert mean <= 1.3 * mean_deviation(together[batch], expected[batch], f"one server{cached}")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(hicache_mem_layout="layer_first"),
        dict(hicache_io_backend="direct", hicache_mem_layout="page_first_direct"),
        dict(hicache_io_backend="direct", hicache_mem_layout="layer_first"),
        dict(dtype="bfloat16", kv_cache_dtype="fp8_e4m3"),
    ],
    ids=["page first", "layer first", "direct, page first", "direct, layer first", "fp8"],
)
def test_hierarchical_caches(run_engine, models, settings):
    """A prefix gives the same text, whether it is still on the GPU or comes back from the host."""
    result, counts = run_engine("hierarchical", json.dumps(settings), model=models("deepseek-v2"))
    first, again, *_, later = [Sequence(*sequence) for (sequence,) in result["batches"]]
    (on_gpu, *_, from_host) = result["places"][1:]
    print(result["places"])
    assert on_gpu["device"] >= 1400 and not on_gpu["host"]
    assert from_host["host"] >= 1400
    assert later.tokens == again.tokens and later.logprobs == pytest.approx(again.logprobs, abs=1e-3)
    if "kv_cache_dtype" not in settings:
        assert_equal_up_to_near_ties([again], [first], NEAR_TIE["float16"], "on the cached prefix")
    assert counts["absorbed_decode"].calls and counts["absorbed_extend"].calls


@pytest.mark.parametrize(
    "model, settings",
    [
        ("deepseek-v2", {}),
        ("deepseek-v2", dict(enable_weights_cpu_backup=True)),
        ("mtp", dict(speculative_algorithm="EAGLE", **SPECULATION, enable_weights_cpu_backup=True)),
    ],
    ids=["loaded again", "kept by the host", "mtp"],
)
def test_memory_is_released_and_taken_back(run_engine, models, model, settings):
    """Weights, caches and graphs; what the engine generates stays the same."""
    pytest.importorskip("torch_memory_saver")
    path = models(model)
    if model == "mtp":
        settings = settings | dict(speculative_draft_model_path=str(path))
    environment = dict(SGLANG_MEMORY_SAVER_CUDA_GRAPH="1")
    result, counts = run_engine("released", json.dumps(settings), model=path, **environment)
    batches = [[Sequence(*sequence) for sequence in batch] for batch in result["batches"]]
    assert_same_tokens(batches[3:], batches[:3])
    assert counts["absorbed_decode"].calls
    lengths = result["accept_lengths"]
    half = len(lengths) // 2
    assert sum(lengths[half:]) == pytest.approx(sum(lengths[:half]), rel=0.1)
    print([round(free / (1 << 20)) for free in result["free"]], "MiB")
    before, released, after = result["free"]
    cache = 2 * 1152 * (1 << 17)  # layers x bytes x max_total_tokens
    assert released - max(before, after) > cache


@pytest.mark.parametrize("page_size", [1, 64])
def test_captured_draft_runners_of_the_kit(page_size, monkeypatch):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_draft_extend_runner,
        speculative_draft_runner,
    )

    # The kit's draft model has no layers. A backend refuses such a model, unless it has been adopted before.
    monkeypatch.setattr(speculative_draft_runner._TinyDraftModel, "mla_backend_layers", {}, raising=False)
    kit = unittest.TestCase()
    # In a batch of one, the slots of a step have one element each, and the stride of several steps.
    for prefix_lens in ((4, 7, 16), (9,)):
        speculative_draft_runner.run_mla_eagle_draft_cuda_graph_runner_case(
            kit, kit_case(ForwardMode.DECODE, prefix_lens, page_size=page_size), **DIMENSIONS
        )
    speculative_draft_extend_runner.run_mla_eagle_draft_extend_v2_cuda_graph_runner_case(
        kit, kit_case(ForwardMode.DRAFT_EXTEND_V2, (4, 7), (3, 3), page_size), **DIMENSIONS
    )


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_decode_step_never_synchronizes(page_size):
    """The step runs eagerly, so torch sees every call: planning, append and attention."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention

    fixture = mla_attention.build_mla_attention_fixture(
        unittest.TestCase(), kit_case(ForwardMode.DECODE, (14, 15, 16), page_size=page_size), **DIMENSIONS
    )
    first = mla_attention.run_mla_fixture_eager(fixture)  # builds kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = mla_attention.run_mla_fixture_eager(fixture)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)


def test_a_captured_step_follows_its_lengths():
    """A graph of planning and attention, replayed after its input tensors have changed; with padding."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention

    fixture = mla_attention.build_mla_attention_fixture(
        unittest.TestCase(),
        kit_case(ForwardMode.DECODE, (14, 15, 40, 33)),
        **DIMENSIONS,
    )
    expected = mla_attention.run_mla_fixture_eager(fixture)
    backend, batch = fixture.backend, fixture.forward_batch
    lengths, rows = batch.seq_lens.clone(), batch.req_pool_indices.clone()
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)

    def step():
        backend.init_forward_metadata_in_graph(batch)
        return fixture.actual_module(fixture.input_hidden, batch)

    with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
        batch.seq_lens.fill_(backend.get_cuda_graph_seq_len_fill_value())
        batch.req_pool_indices.zero_()
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for real in (4, 2):
            batch.seq_lens[:real].copy_(lengths[:real])
            batch.req_pool_indices[:real].copy_(rows[:real])
            batch.seq_lens[real:] = 1
            batch.req_pool_indices[real:] = 0
            graph.replay()
            torch.testing.assert_close(captured[:real], expected[:real], atol=3e-2, rtol=3e-2)
            assert captured.isfinite().all()
