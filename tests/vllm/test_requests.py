"""What engines do besides generating texts: embeddings, log-probabilities of prompts, aborted requests."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from mla_backend_vllm import selection_name
from tests.support.vllm_outputs import assert_tokens, generate
from tests.support.vllm_workload import NEW_TOKENS

pytestmark = pytest.mark.newest

NAME = selection_name()
CHUNKS = {"max_num_batched_tokens": 256, "block_size": 64}
"""Longer prompts are prefilled in several steps, which attend to context."""


@pytest.fixture
def transformers_model(deepseek):
    return AutoModelForCausalLM.from_pretrained(
        deepseek.path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.no_grad()
def test_embeddings(start_engine, deepseek, transformers_model):
    llm = start_engine(deepseek.path, attention_backend=NAME, runner="pooling", convert="embed", **CHUNKS)
    prompts = [{"prompt_token_ids": expected.prompt} for expected in deepseek.expected]
    for output, expected in zip(llm.embed(prompts, use_tqdm=False), deepseek.expected, strict=True):
        states = transformers_model.model(torch.tensor([expected.prompt])).last_hidden_state
        embedding = torch.nn.functional.normalize(states[0, -1], dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), embedding, atol=1e-4, rtol=0)


@torch.no_grad()
def test_log_probabilities_of_prompts(start_engine, deepseek, transformers_model):
    llm = start_engine(deepseek.path, attention_backend=NAME, **CHUNKS)
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": expected.prompt} for expected in deepseek.expected]
    llm.generate(prompts, sampling, use_tqdm=False)
    for output in llm.generate(prompts, sampling, use_tqdm=False):  # whose prefixes are in the cache
        tokens = torch.tensor(output.prompt_token_ids)
        expected = transformers_model(tokens[None]).logits[0, :-1].log_softmax(-1)
        expected = expected.gather(1, tokens[1:, None])[:, 0]
        steps = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        ours = torch.tensor([step[token].logprob for step, token in steps])
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)


def test_aborted_requests_leave_the_others_their_tokens(start_engine, deepseek):
    """Of which one is in the middle of its prompt. Later requests get the pages of aborted ones."""
    llm = start_engine(deepseek.path, attention_backend=NAME, **CHUNKS)
    engine, sampling = llm.llm_engine, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    longest = len(deepseek.expected) - 1
    assert len(deepseek.expected[longest].prompt) > CHUNKS["max_num_batched_tokens"]
    for i in reversed(range(len(deepseek.expected))):
        engine.add_request(str(i), {"prompt_token_ids": deepseek.expected[i].prompt}, sampling)
    engine.step()
    engine.abort_request([str(longest)])
    finished = {}
    for step in range(200):
        if step == 10:
            engine.abort_request(["0", "3"])
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    assert not engine.has_unfinished_requests()
    assert finished.keys() == {str(i) for i in range(longest)} - {"0", "3"}
    for name, output in finished.items():
        assert list(output.outputs[0].token_ids) == deepseek.expected[int(name)].tokens
    assert_tokens(generate(llm, deepseek), deepseek)
