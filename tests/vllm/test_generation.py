"""vLLM on this backend generates the tokens of HuggingFace transformers, without help of another backend."""

import importlib.metadata
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import vllm
from safetensors.torch import load_file, save_file

from make_checkpoint import make_checkpoint
from mla_backend import counters
from mla_backend_vllm import metadata, selection_name
from tests.support.fp8_oracle import Fp8Latents, assert_greedy
from tests.support.modelopt import modelopt_checkpoint
from tests.support.vllm_workload import UPDATES
from tests.vllm.conftest import NEW_TOKENS, Model, huggingface_tokens

NAME = selection_name()


def generate(llm, model):
    from vllm import SamplingParams

    count = len(model.expected[0].tokens)
    sampling = SamplingParams(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True)
    prompts = [{"prompt_token_ids": e.prompt} for e in model.expected]
    return llm.generate(prompts, sampling, use_tqdm=False)


def assert_tokens(outputs, model):
    for output, expected in zip(outputs, model.expected, strict=True):
        assert list(output.outputs[0].token_ids) == expected.tokens


def counted_tokens(before):
    """Tokens that went through each path since the snapshot `before`."""
    return {path: count.tokens - before[path].tokens for path, count in counters.snapshot().items()}


def attended_tokens(outputs, num_layers):
    """Tokens that attention layers must have seen: all but cached prompt tokens and the last sampled one."""
    per_layer = sum(
        len(o.prompt_token_ids) - o.num_cached_tokens + len(o.outputs[0].token_ids) - 1 for o in outputs
    )
    return num_layers * per_layer


def attention_layers(llm):
    config = llm.llm_engine.vllm_config.compilation_config
    return [layer for layer in config.static_forward_context.values() if hasattr(layer, "impl")]


ALL_PATHS = {"absorbed_decode", "absorbed_extend", "vanilla_prefill"}


@pytest.mark.parametrize(
    "options, paths",
    [
        pytest.param({}, ALL_PATHS, id="defaults", marks=pytest.mark.newest),
        pytest.param(
            {"max_num_batched_tokens": 64, "block_size": 16},
            # All queries, of at most 64 tokens, are below the policy's threshold.
            {"absorbed_decode", "absorbed_extend"},
            id="chunks-of-64, page 16",
            marks=pytest.mark.newest,
        ),
        pytest.param(
            {"max_num_batched_tokens": 256, "block_size": 64}, ALL_PATHS, id="chunks-of-256, page 64"
        ),
    ],
)
def test_tokens_equal_transformers(start_engine, deepseek, options, paths):
    llm = start_engine(deepseek.path, attention_backend=NAME, **options)
    start = counters.snapshot()
    for _repetition in range(2):
        before = counters.snapshot()
        outputs = generate(llm, deepseek)
        assert_tokens(outputs, deepseek)
        # Each layer counts each token, so a token that another backend served would be missing.
        expected_tokens = attended_tokens(outputs, len(attention_layers(llm)))
        assert sum(counted_tokens(before).values()) == expected_tokens
    assert sum(o.num_cached_tokens for o in outputs) > 100, "the repetition did not hit the prefix cache"
    assert {path for path, count in counted_tokens(start).items() if count} == paths


@pytest.mark.newest
def test_batch_invariant_mode_absorbs_only_decode(start_engine, deepseek, monkeypatch):
    # Only for the backend: the rest of vLLM's batch-invariant mode needs a GPU.
    monkeypatch.setattr("mla_backend_vllm.metadata.envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    llm = start_engine(deepseek.path, attention_backend=NAME, enable_prefix_caching=False)
    before = counters.snapshot()
    assert_tokens(generate(llm, deepseek), deepseek)
    # vLLM treats prompts of one token as decode; there is none here.
    assert all(len(expected.prompt) > 1 for expected in deepseek.expected)
    new_tokens = sum(len(expected.tokens) - 1 for expected in deepseek.expected)
    prompts = sum(len(expected.prompt) for expected in deepseek.expected)
    layers = len(attention_layers(llm))
    counted = counted_tokens(before)
    assert counted.pop("absorbed_decode") == layers * new_tokens
    assert counted.pop("vanilla_prefill") == layers * prompts
    assert not any(counted.values())


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory):
    """A checkpoint without routed experts: vLLM's CPU platform does not reload those correctly."""
    return make_checkpoint(str(tmp_path_factory.mktemp("dense") / "model"), "--experts", "0")


@pytest.fixture(scope="module")
def updated(dense_path, tmp_path_factory) -> tuple[Model, dict[str, torch.Tensor]]:
    """A checkpoint whose kv_b_proj weights differ from those of `dense_path`, and these weights."""
    path = tmp_path_factory.mktemp("updated") / "model"
    shutil.copytree(dense_path, path)
    (weights_file,) = path.glob("*.safetensors")
    weights = load_file(weights_file)
    generator = torch.Generator().manual_seed(1)
    changed = {
        name: torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * weight.std()
        for name, weight in weights.items()
        if "kv_b_proj" in name
    }
    save_file(weights | changed, weights_file, metadata={"format": "pt"})
    return Model(path, huggingface_tokens(path)), changed


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_weight_updates_reach_prefill_and_decode(start_engine, dense_path, updated, update):
    model, weights = updated
    llm = start_engine(dense_path, attention_backend=NAME)
    for output, expected in zip(generate(llm, model), model.expected, strict=True):
        assert list(output.outputs[0].token_ids) != expected.tokens, "the update must change every sequence"
    update(llm, model.path, weights)
    llm.reset_prefix_cache()
    assert_tokens(generate(llm, model), model)


def test_absorbed_weights_take_no_memory_and_are_not_saved(start_engine, dense_path, tmp_path):
    llm = start_engine(dense_path, attention_backend=NAME)
    for layer in attention_layers(llm):
        storage = layer.kv_b_proj.weight.untyped_storage().data_ptr()
        for absorbed in (layer.W_UK_T, layer.W_UV):
            assert absorbed.untyped_storage().data_ptr() == storage
    # The CPU platform repacks other weights and cannot load the result; test_gpu.py loads it on a GPU.
    llm.llm_engine.engine_core.save_sharded_state(path=str(tmp_path))
    (saved,) = tmp_path.glob("*.safetensors")
    names = list(load_file(saved))
    assert any(name.endswith("kv_b_proj.weight") for name in names)
    assert not any(name.endswith(("W_UK_T", "W_UV")) for name in names)


@pytest.mark.newest
def test_start_up_log(start_engine, dense_path, monkeypatch):
    messages = []
    monkeypatch.setattr(metadata.logger, "info_once", lambda text, *values: messages.append(text % values))
    start_engine(dense_path, attention_backend=NAME, block_size=48)
    (message,) = messages
    version = importlib.metadata.version("mla-backend")
    assert message.startswith(f"mla-backend {version} in vLLM {vllm.__version__} (supported) on the CPU; ")
    assert "decode kernel: " in message and "(no kernels for device type 'cpu'); " in message
    assert "page size: 48; prefill library: torch; " in message
    assert re.search("at most [1-9][0-9]+ new tokens use absorbed attention, longer ones regular", message)


@pytest.mark.newest
def test_minicpm3_through_the_transformers_backend(start_engine, minicpm3):
    llm = start_engine(minicpm3.path, attention_backend=NAME, model_impl="transformers", block_size=32)
    before = counters.snapshot()
    outputs = generate(llm, minicpm3)
    assert_tokens(outputs, minicpm3)
    assert sum(counted_tokens(before).values()) == attended_tokens(outputs, len(attention_layers(llm)))


def assert_drafts_are_verified(start_engine, model, speculation, num_layers, **options):
    """``num_layers`` counts those of the model and of what drafts, whose backend vLLM selects separately.

    Returns the outputs, and the number of tokens that went through all of these layers.
    """
    speculation = speculation | {"attention_backend": NAME}
    llm = start_engine(model.path, attention_backend=NAME, speculative_config=speculation, **options)
    assert len(attention_layers(llm)) == num_layers
    before = counters.snapshot()
    outputs = generate(llm, model)
    assert_tokens(outputs, model)
    tokens = counted_tokens(before)
    assert sum(tokens.values()) > attended_tokens(outputs, num_layers)
    assert tokens["absorbed_extend"] > 0
    return outputs, sum(tokens.values())


def test_multi_token_prediction(start_engine, deepseek_v3):
    """Three layers of the model and one draft layer."""
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    assert_drafts_are_verified(start_engine, deepseek_v3, speculation, num_layers=4)


def test_a_draft_model(start_engine, deepseek):
    """The same model as its own draft: three layers of either, and all drafts are accepted.

    In the first step, a prompt finds its beginning in the cache, and others have no context.
    """
    drafts = 2
    speculation = {"method": "draft_model", "model": str(deepseek.path), "num_speculative_tokens": drafts}
    outputs, tokens = assert_drafts_are_verified(
        start_engine, deepseek, speculation, num_layers=6, block_size=16
    )
    new = [len(o.prompt_token_ids) - o.num_cached_tokens for o in outputs]
    assert {o.num_cached_tokens > 0 for o in outputs} == {True, False}
    # The draft model reads what the model reads and the sampled token, and then its own drafts but the last.
    prompts = sum(n + (n + 1) + (drafts - 1) for n in new)
    step = (drafts + 1) + (drafts + 2) + (drafts - 1)
    steps = -(-(NEW_TOKENS - 1) // (drafts + 1))
    assert tokens == 3 * (prompts + len(outputs) * steps * step)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "k_scale"),
    [("fp8", 0.07), pytest.param("fp8_ds_mla", 1.0, marks=pytest.mark.newest)],
    ids=str,
)
def test_fp8_caches(start_engine, deepseek, kv_cache_dtype, k_scale):
    """Chunks, context that regular prefill expands, prefix hits and decode: tokens from a rounded cache."""
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    llm = start_engine(
        deepseek.path,
        attention_backend=NAME,
        kv_cache_dtype=kv_cache_dtype,
        max_num_batched_tokens=128,
        block_size=16,
    )
    for layer in attention_layers(llm):
        layer._k_scale.fill_(k_scale)  # as a reload of a checkpoint does
        assert layer.kv_cache.dtype is torch.uint8
        assert layer.kv_cache.shape[-1] == (656 if kv_cache_dtype == "fp8_ds_mla" else 576)
    model = AutoModelForCausalLM.from_pretrained(deepseek.path, dtype=torch.float32).eval()
    prompt = max((expected.prompt for expected in deepseek.expected), key=len)
    last = len(prompt) - 2 * 128
    assert 16 < last <= 64, "the last chunk is to be absorbed"
    for cached in (0, len(prompt) // 16 * 16):
        before = counters.snapshot()
        sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        assert output.num_cached_tokens == cached
        layers, counted = len(attention_layers(llm)), counted_tokens(before)
        assert counted["vanilla_prefill"] == (0 if cached else layers * 2 * 128)
        assert counted["absorbed_extend"] == layers * (len(prompt) - cached if cached else last)
        passes = [(128, True), (128, True), (last, False)]
        latents = Fp8Latents("fp8_ds_mla" if kv_cache_dtype == "fp8_ds_mla" else "fp8_e4m3", k_scale)
        assert_greedy(list(output.outputs[0].token_ids), model, prompt, passes, latents)


def test_a_draft_model_on_fp8_caches(start_engine, deepseek):
    """The same model as its own draft, each with a cache in e4m3; new prompts and prefix hits."""
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    path = str(deepseek.path)
    drafts = {"method": "draft_model", "model": path, "num_speculative_tokens": 2, "attention_backend": NAME}
    engine = {"kv_cache_dtype": "fp8", "block_size": 16, "speculative_config": drafts}
    llm = start_engine(path, attention_backend=NAME, **engine)
    assert len(attention_layers(llm)) == 6
    assert all(layer.kv_cache.dtype is torch.uint8 for layer in attention_layers(llm))
    prompt = max((expected.prompt for expected in deepseek.expected), key=len)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    before = counters.snapshot()
    for cached in (0, (len(prompt) - 1) // 16 * 16):
        sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        assert output.num_cached_tokens == cached
        tokens = list(output.outputs[0].token_ids)
        assert_greedy(tokens, model, prompt, [(len(prompt), True)], Fp8Latents("fp8_e4m3"))
    counted = counted_tokens(before)
    assert counted["absorbed_extend"] > counted["absorbed_decode"] > 0


def test_a_modelopt_checkpoint_chooses_fp8(start_engine, dense_path, tmp_path):
    from vllm import SamplingParams

    # The CPU has no kernels for ModelOpt's weights.
    scales = [0.03125, 0.046875, 0.0625]
    path = modelopt_checkpoint(dense_path, tmp_path / "modelopt", scales, fp8_weights=False)
    llm = start_engine(path, attention_backend=NAME, dtype="bfloat16")
    before = counters.snapshot()
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": list(range(3, 60))}], sampling, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    assert counted_tokens(before)["absorbed_decode"] == 3 * len(attention_layers(llm))
    assert {layer.impl.kv_format.name for layer in attention_layers(llm)} == {"fp8_e4m3"}
    assert [float(layer._k_scale) for layer in attention_layers(llm)] == scales


# Must be the last engine of this process: once the ngram proposer has loaded numba, no other can start.
@pytest.mark.newest
def test_ngram_speculation(start_engine, deepseek):
    llm = start_engine(
        deepseek.path,
        attention_backend=NAME,
        block_size=128,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        },
    )
    generate(llm, deepseek)
    before = counters.snapshot()
    outputs = generate(llm, deepseek)
    assert_tokens(outputs, deepseek)
    tokens = counted_tokens(before)
    # Attention layers also see rejected drafts, in queries of more than one token.
    assert sum(tokens.values()) > attended_tokens(outputs, len(attention_layers(llm)))
    assert tokens["absorbed_extend"] > tokens["absorbed_decode"]
