"""Separate prefill and decode servers on the CPU: NIXL carries the cache from one engine to the other."""

import pytest
import torch

from mla_backend.cache_format import E4M3
from mla_backend_vllm import selection_name
from tests.support.fp8_oracle import Fp8Latents, assert_greedy
from tests.support.vllm_workload import CPU_ENGINE, NEW_TOKENS

pytestmark = pytest.mark.newest

NAME = selection_name()
ENGINE = CPU_ENGINE | {"attention_backend": NAME, "block_size": 32, "distributed_executor_backend": "uni"}


def assert_tokens(made, model):
    assert [sequence.tokens for sequence in made.sequences] == [e.tokens for e in model.expected]


def test_the_decode_server_reads_no_prompt(servers, deepseek):
    """It attends with the last token of each prompt and with those that it generates, in three layers."""
    servers.start(deepseek.path, **ENGINE)
    made = servers.generate([expected.prompt for expected in deepseek.expected])
    assert_tokens(made, deepseek)
    decoded = made.query_tokens.pop("absorbed_decode")
    assert decoded == 3 * NEW_TOKENS * len(deepseek.expected)
    assert not any(made.query_tokens.values())


def test_fp8_caches(servers, deepseek):
    from transformers import AutoModelForCausalLM

    servers.start(deepseek.path, kv_cache_dtype="fp8", **ENGINE)
    prompt = max((expected.prompt for expected in deepseek.expected), key=len)
    made = servers.generate([prompt])
    assert made.query_tokens["absorbed_decode"] == sum(made.query_tokens.values()) == 3 * NEW_TOKENS
    model = AutoModelForCausalLM.from_pretrained(deepseek.path, dtype=torch.float32).eval()
    passes = [(len(prompt) - 1, True), (1, False)]  # the decode server computes the last token again
    (sequence,) = made.sequences
    assert_greedy(sequence.tokens, model, prompt, passes, Fp8Latents(E4M3.name))


def test_a_draft_model(servers, deepseek):
    """The same model as its own draft. All drafts are accepted, so its part of the cache has arrived, too."""
    drafts = {"method": "draft_model", "model": str(deepseek.path), "num_speculative_tokens": 2}
    servers.start(deepseek.path, speculative_config=drafts | {"attention_backend": NAME}, **ENGINE)
    made = servers.generate([expected.prompt for expected in deepseek.expected])
    assert_tokens(made, deepseek)
    # In each step, also in the first without drafts, the model reads 3 tokens, and its draft 4 and 1.
    steps = 1 + -(-(NEW_TOKENS - 1) // 3)
    assert sum(made.query_tokens.values()) == 3 * (3 + 4 + 1) * steps * len(deepseek.expected)
    assert not made.query_tokens["vanilla_prefill"]
