"""Tokens through vLLM on our backend equal HuggingFace transformers', and our code made all of them."""

from types import SimpleNamespace

import pytest
import torch

from mla_backend import counters


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
    """Tokens that must have passed the attention layers: all but cached prompts and the last sampled."""
    per_layer = sum(
        len(o.prompt_token_ids) - o.num_cached_tokens + len(o.outputs[0].token_ids) - 1 for o in outputs
    )
    return num_layers * per_layer


def attention_layers(llm):
    config = llm.llm_engine.vllm_config.compilation_config
    return [layer for layer in config.static_forward_context.values() if hasattr(layer, "impl")]


CONFIGURATIONS = {
    "defaults": ({}, {"absorbed_decode", "absorbed_extend", "vanilla_prefill"}),
    # Queries of at most 64 tokens are all below the policy's threshold.
    "chunks-of-64, page 16": (
        {"max_num_batched_tokens": 64, "block_size": 16},
        {"absorbed_decode", "absorbed_extend"},
    ),
    "chunks-of-256, page 64": (
        {"max_num_batched_tokens": 256, "block_size": 64},
        {"absorbed_decode", "absorbed_extend", "vanilla_prefill"},
    ),
}


@pytest.mark.parametrize("options, paths", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_tokens_equal_transformers(start_engine, deepseek, options, paths):
    llm = start_engine(deepseek.path, attention_backend="CUSTOM", **options)
    start = counters.snapshot()
    for _repetition in range(2):
        before = counters.snapshot()
        outputs = generate(llm, deepseek)
        assert_tokens(outputs, deepseek)
        # Each token is counted in each layer: a backend that took over a part of them would be missed here.
        expected_tokens = attended_tokens(outputs, len(attention_layers(llm)))
        assert sum(counted_tokens(before).values()) == expected_tokens
    assert sum(o.num_cached_tokens for o in outputs) > 100, "the repetition did not hit the prefix cache"
    assert {path for path, count in counted_tokens(start).items() if count} == paths


def test_batch_invariant_mode_absorbs_decode_alone(start_engine, deepseek, monkeypatch):
    # For the backend only: the rest of vLLM's mode needs a GPU.
    monkeypatch.setattr("mla_backend_vllm.backend.envs", SimpleNamespace(VLLM_BATCH_INVARIANT=True))
    llm = start_engine(deepseek.path, attention_backend="CUSTOM", enable_prefix_caching=False)
    before = counters.snapshot()
    assert_tokens(generate(llm, deepseek), deepseek)
    # Prompts of one token count as decode in vLLM; there is none here.
    assert all(len(expected.prompt) > 1 for expected in deepseek.expected)
    new_tokens = sum(len(expected.tokens) - 1 for expected in deepseek.expected)
    prompts = sum(len(expected.prompt) for expected in deepseek.expected)
    layers = len(attention_layers(llm))
    counted = counted_tokens(before)
    assert counted.pop("absorbed_decode") == layers * new_tokens
    assert counted.pop("vanilla_prefill") == layers * prompts
    assert not any(counted.values())


def test_absorbed_weights_are_the_layers_own_and_reload_in_place(start_engine, deepseek):
    llm = start_engine(deepseek.path, attention_backend="CUSTOM")
    layer = attention_layers(llm)[0]
    absorbed = layer.impl.absorbed
    addresses = absorbed.w_uk.data_ptr(), absorbed.w_uv.data_ptr()
    assert (layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()) == addresses

    weight = layer.kv_b_proj.weight
    weight.data.copy_(torch.randn_like(weight))
    layer.process_weights_after_loading(torch.float32)
    assert (layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()) == addresses
    heads = weight.view(layer.num_heads, -1, layer.kv_lora_rank)
    w_uk, w_uv = heads.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1)
    torch.testing.assert_close(absorbed.w_uk, w_uk, rtol=0, atol=0)
    torch.testing.assert_close(absorbed.w_uv, w_uv.transpose(1, 2), rtol=0, atol=0)


def test_minicpm3_through_the_transformers_backend(start_engine, minicpm3):
    llm = start_engine(minicpm3.path, attention_backend="CUSTOM", model_impl="transformers", block_size=32)
    before = counters.snapshot()
    outputs = generate(llm, minicpm3)
    assert_tokens(outputs, minicpm3)
    assert sum(counted_tokens(before).values()) == attended_tokens(outputs, len(attention_layers(llm)))


def test_drafts_by_the_models_own_layer(start_engine, deepseek_v3):
    # The layer that drafts has a backend of its own.
    speculation = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CUSTOM"}
    llm = start_engine(deepseek_v3.path, attention_backend="CUSTOM", speculative_config=speculation)
    layers = attention_layers(llm)
    assert len(layers) == 4, "three of the model, one that drafts"
    before = counters.snapshot()
    outputs = generate(llm, deepseek_v3)
    assert_tokens(outputs, deepseek_v3)
    tokens = counted_tokens(before)
    assert sum(tokens.values()) > attended_tokens(outputs, len(layers))
    assert tokens["absorbed_extend"] > 0


# The last engine of this process: the ngram proposer loads numba, after which vLLM starts no other here.
def test_ngram_speculation(start_engine, deepseek):
    llm = start_engine(
        deepseek.path,
        attention_backend="CUSTOM",
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
    # Rejected drafts pass the layers too, so there are more tokens than were kept; they come with q_len > 1.
    assert sum(tokens.values()) > attended_tokens(outputs, len(attention_layers(llm)))
    assert tokens["absorbed_extend"] > tokens["absorbed_decode"]
