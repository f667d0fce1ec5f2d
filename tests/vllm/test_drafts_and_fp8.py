"""Drafts and fp8 caches in vLLM give HuggingFace's tokens, which fp8 caches round."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from make_checkpoint import make_checkpoint
from mla_backend import counters
from mla_backend_vllm import selection_name
from mla_backend_vllm.metadata import MetadataBuilder
from tests.support.eagle import eagle_head
from tests.support.fp8_oracle import Fp8Latents, assert_greedy
from tests.support.gptq import dequantized, gptq_checkpoint
from tests.support.modelopt import modelopt_checkpoint
from tests.support.vllm_outputs import (
    assert_tokens,
    attended_tokens,
    attention_layers,
    counted_tokens,
    generate,
)
from tests.support.vllm_workload import NEW_TOKENS
from tests.support.vllm_workload import generate as generate_with_margins

NAME = selection_name()


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


@pytest.mark.newest
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_eagle_heads_with_latent_attention(start_engine, deepseek_v3, tmp_path, method):
    """Their drafts are noise, so most are rejected; three layers of the model, and that of the head."""
    head = str(eagle_head(tmp_path / "head", method))
    speculation = {"method": method, "model": head, "num_speculative_tokens": 2}
    assert_drafts_are_verified(start_engine, deepseek_v3, speculation, num_layers=4)


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


@pytest.mark.parametrize(
    ("kv_cache_dtype", "k_scale"),
    [("fp8", 0.07), pytest.param("fp8_ds_mla", 1.0, marks=pytest.mark.newest)],
    ids=str,
)
def test_fp8_caches(start_engine, deepseek, monkeypatch, kv_cache_dtype, k_scale):
    """Chunks, context that regular prefill expands, prefix hits and decode: tokens from a rounded cache."""
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    builders, init = [], MetadataBuilder.__init__

    def recorded(builder, *arguments, **others):
        builders.append(builder)
        init(builder, *arguments, **others)

    monkeypatch.setattr(MetadataBuilder, "__init__", recorded)
    llm = start_engine(
        deepseek.path,
        attention_backend=NAME,
        kv_cache_dtype=kv_cache_dtype,
        max_num_batched_tokens=128,
        block_size=16,
    )
    assert {builder.chunked_prefill_workspace.dtype for builder in builders} == {torch.float32}
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


@pytest.mark.parametrize(
    "architecture, options",
    [
        ("deepseek-v2", {}),
        pytest.param("minicpm3", {"model_impl": "transformers"}, marks=pytest.mark.newest),
    ],
    ids=["deepseek-v2", "minicpm3"],
)
def test_a_modelopt_checkpoint_chooses_fp8(start_engine, tmp_path, architecture, options):
    from vllm import SamplingParams

    # The CPU has no kernels for ModelOpt's weights.
    scales = [0.03125, 0.046875, 0.0625]
    dense = make_checkpoint(str(tmp_path / "dense"), "--experts", "0", "--architecture", architecture)
    path = modelopt_checkpoint(dense, tmp_path / "modelopt", scales, fp8_weights=False)
    llm = start_engine(path, attention_backend=NAME, dtype="bfloat16", **options)
    before = counters.snapshot()
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": list(range(3, 60))}], sampling, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4
    assert counted_tokens(before)["absorbed_decode"] == 3 * len(attention_layers(llm))
    assert {layer.impl.kv_format.name for layer in attention_layers(llm)} == {"fp8_e4m3"}
    assert [float(layer._k_scale) for layer in attention_layers(llm)] == scales


@pytest.mark.newest
@torch.no_grad()
def test_kv_b_proj_in_int4(start_engine, deepseek, tmp_path):
    """Its prompts take regular prefill in chunks, and then prefix hits, which are absorbed."""
    model = AutoModelForCausalLM.from_pretrained(
        deepseek.path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.load_state_dict({name: dequantized(name, w) for name, w in model.state_dict().items()})
    path = gptq_checkpoint(deepseek.path, tmp_path / "int4")
    # vLLM computes int4 products in 16 bits only.
    options = {"dtype": "bfloat16", "max_num_batched_tokens": 256, "block_size": 16}
    llm = start_engine(path, attention_backend=NAME, **options)
    assert not any(hasattr(layer.kv_b_proj, "weight") for layer in attention_layers(llm))
    before = counters.snapshot()
    prompts = [expected.prompt for expected in deepseek.expected]
    for _repetition in range(2):
        for prompt, sequence in zip(prompts, generate_with_margins(llm, prompts), strict=True):
            logits = model(torch.tensor([prompt + sequence.tokens])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
            deviation = float((torch.tensor(sequence.logprobs) - expected).abs().mean())
            assert deviation < 0.2
    counted = counted_tokens(before)
    assert all(counted[path] for path in ("absorbed_decode", "absorbed_extend", "vanilla_prefill"))
