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
from mla_backend import counters, metrics
from mla_backend_vllm import impl, metadata, selection_name
from mla_backend_vllm.prefill_backend import attend_to_context
from tests.support.vllm_outputs import (
    assert_tokens,
    attended_tokens,
    attention_layers,
    counted_tokens,
    generate,
)
from tests.support.vllm_workload import UPDATES
from tests.vllm.conftest import Model, huggingface_tokens

NAME = selection_name()
ALL_PATHS = {"absorbed_decode", "absorbed_extend", "vanilla_prefill"}


@pytest.mark.parametrize(
    "options, paths",
    [
        pytest.param({}, ALL_PATHS, id="defaults", marks=[pytest.mark.newest, pytest.mark.smoke]),
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


def test_tokens_of_a_model_without_yarn(start_engine, make_model):
    """As Moonlight and GLM-4.7-Flash; in an eager engine, as everywhere here."""
    model = make_model("deepseek-v2", "--rope", "default")
    llm = start_engine(model.path, attention_backend=NAME, max_num_batched_tokens=256, block_size=64)
    assert_tokens(generate(llm, model), model)


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
    generator = torch.Generator().manual_seed(3)  # whose texts have no near-ties
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
def test_start_up_log_and_labels_of_metrics(start_engine, dense_path, monkeypatch):
    messages, labels = [], set()
    monkeypatch.setattr(metadata.logger, "info_once", lambda text, *values: messages.append(text % values))
    monkeypatch.setattr(metrics, "count_tokens", lambda path, _, *label: labels.add((path, *label)))
    llm = start_engine(dense_path, attention_backend=NAME, block_size=48)
    llm.generate({"prompt_token_ids": [5] * 900}, vllm.SamplingParams(max_tokens=2, ignore_eos=True))
    paths = ("vanilla_prefill", "absorbed_decode")
    assert labels == {(path, "torch", "float32") for path in paths}
    (message,) = messages
    version = importlib.metadata.version("mla-backend")
    assert message.startswith(f"mla-backend {version} in vLLM {vllm.__version__} (supported) on the CPU; ")
    assert "decode kernel: " in message and "(no kernels for device type 'cpu'); " in message
    assert "page size: 48; prefill library: torch; " in message
    assert re.search("at most [1-9][0-9]+ new tokens use absorbed attention, longer ones regular", message)


@pytest.mark.newest
@pytest.mark.parametrize("is_gathered", [True, False], ids=["gathered by vLLM", "gathered here"])
def test_minicpm3_through_the_transformers_backend(start_engine, minicpm3, monkeypatch, is_gathered):
    """In chunks, so that regular prefill attends to context; on a GPU vLLM does not gather rows of 288."""
    contexts = []
    monkeypatch.setattr(impl, "is_gathered_by_vllm", lambda width, device: is_gathered)
    monkeypatch.setattr(
        impl, "attend_to_context", lambda *inputs: contexts.append(1) or attend_to_context(*inputs)
    )
    options = {"model_impl": "transformers", "block_size": 32, "max_num_batched_tokens": 128}
    llm = start_engine(minicpm3.path, attention_backend=NAME, **options)
    before = counters.snapshot()
    outputs = generate(llm, minicpm3)
    assert_tokens(outputs, minicpm3)
    assert sum(counted_tokens(before).values()) == attended_tokens(outputs, len(attention_layers(llm)))
    assert bool(contexts) is not is_gathered
