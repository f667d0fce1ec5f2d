"""Models whose attention differs from DeepSeek's generate HuggingFace's tokens in vLLM."""

import pytest
import torch

from mla_backend import counters
from mla_backend_vllm import selection_name
from tests.support.fp8_oracle import Fp8Latents, assert_greedy
from tests.support.mistral import in_mistrals_class
from tests.support.vllm_outputs import (
    assert_tokens,
    attention_layers,
    counted_tokens,
    generate,
)

NAME = selection_name()
MISTRALS = {"mistral-small-4": "3", "mistral-large-3": "3"}
"""With seeds of weights that have no near-ties."""


@pytest.fixture(scope="module")
def mistrals(make_model):
    """Made before any engine: vLLM's Transformers backend changes HuggingFace's classes."""
    return {architecture: make_model(architecture, "--seed", seed) for architecture, seed in MISTRALS.items()}


@pytest.mark.newest
@pytest.mark.parametrize("model_impl", ["vllm", "transformers"])
@pytest.mark.parametrize("architecture", MISTRALS)
def test_queries_scaled_by_a_factor_of_the_position(
    start_engine, mistrals, tmp_path, architecture, model_impl
):
    """In regular prefill, short extends and decode; the rows of Mistral-Small-4's latents are 320 wide."""
    model = mistrals[architecture]
    path = in_mistrals_class(model.path, tmp_path / "model") if model_impl == "vllm" else model.path
    options = {"model_impl": model_impl, "max_num_batched_tokens": 256, "block_size": 64}
    llm = start_engine(path, attention_backend=NAME, **options)
    before = counters.snapshot()
    for _repetition in range(2):
        outputs = generate(llm, model)
        assert_tokens(outputs, model)
    counted = counted_tokens(before)
    assert all(counted[path] for path in ("absorbed_decode", "absorbed_extend", "vanilla_prefill"))
    assert {layer.impl.geometry.latent_dim for layer in attention_layers(llm)} == {
        320 if architecture == "mistral-small-4" else 576
    }


def on_the_cpu(monkeypatch):
    """Leave out of Kimi-Linear what only GPUs have, and keep the weight that vLLM's layers need on CPUs."""
    from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention

    init = MultiHeadLatentAttention.__init__

    def keeping_weight(layer, *args, **kwargs):
        init(layer, *args, **kwargs)
        layer.kv_b_proj._cpu_skip_gemm_dispatch = True  # as vLLM's MLAAttention does

    monkeypatch.setattr(MultiHeadLatentAttention, "__init__", keeping_weight)
    monkeypatch.setenv("VLLM_KIMI_K3_GEMM_AR", "0")
    monkeypatch.setattr(torch.cuda, "Stream", type("Stream", (), {}))


@pytest.mark.newest
def test_kimi_linear_with_an_e4m3_cache(start_engine, make_model, monkeypatch):
    """Its layers demand prefill in fp8, which vLLM has on few GPUs: two chunks, the second on context."""
    from transformers import KimiLinearForCausalLM  # of newer versions
    from vllm import SamplingParams

    on_the_cpu(monkeypatch)
    path = make_model("kimi-linear").path
    engine = {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 128, "block_size": 16}
    llm = start_engine(path, attention_backend=NAME, **engine)
    for layer in attention_layers(llm):
        assert type(layer).__module__ == "vllm.models.kimi_k3.nvidia.mla"
        layer._k_scale.fill_(0.07)  # as a reload of a checkpoint does
    model = KimiLinearForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    (prompt,) = (e.prompt for e in make_model("kimi-linear").expected if len(e.prompt) > 256)
    last = len(prompt) - 2 * 128
    before = counters.snapshot()
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    layers, counted = len(attention_layers(llm)), counted_tokens(before)
    assert counted["vanilla_prefill"] == layers * 2 * 128
    assert counted["absorbed_extend"] == layers * last and counted["absorbed_decode"] == layers * 23
    passes = [(128, True), (128, True), (last, False)]
    assert_greedy(list(output.outputs[0].token_ids), model, prompt, passes, Fp8Latents("fp8_e4m3", 0.07))
