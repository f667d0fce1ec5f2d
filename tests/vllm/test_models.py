"""vLLM on this backend generates the tokens of each family's own layers (`mla_backend.models`)."""

import pytest
import torch

from mla_backend import counters
from mla_backend.models import FAMILIES, State
from mla_backend_vllm import selection_name
from tests.support.processes import in_a_new_process
from tests.support.small_models import NEW_TOKENS, know_config, make_small_model
from tests.support.vllm_outputs import attended_tokens, attention_layers, counted_tokens

pytestmark = pytest.mark.newest
ELSEWHERE = ("Mistral-Small-4-119B", "Mistral-Large-3-675B", "Kimi-Linear-48B-A3B")
"""Families that test_other_models.py tests, because vLLM reads them in another form than transformers."""
SERVED = [f for f in FAMILIES if f.vllm.cpu is State.TESTED and f.name not in ELSEWHERE]


def route(self, hidden_states, router_logits, indices_type, *, input_ids=None):
    """LongCat's choice of experts, for which vLLM has kernels for GPUs only."""
    scores = router_logits.softmax(-1, dtype=torch.float32)
    chosen = (scores + self.e_score_correction_bias).topk(self.top_k).indices
    weights = self.routed_scaling_factor * scores.gather(1, chosen)
    has_no_weights = chosen >= self.num_logical_experts
    self._zero_expert_output = (weights * has_no_weights).sum(-1, keepdim=True) * hidden_states
    return weights.masked_fill(has_no_weights, 0), chosen.masked_fill(has_no_weights, 0).to(
        indices_type or torch.int32
    )


@pytest.fixture(autouse=True)
def routing_on_the_cpu(monkeypatch):
    module = pytest.importorskip("vllm.model_executor.layers.fused_moe.router.zero_expert_router")
    monkeypatch.setattr(module.ZeroExpertRouter, "_compute_routing", route)


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
def test_tokens(start_engine, tmp_path, family):
    from vllm import SamplingParams

    options: dict[str, str] = {}
    if "transformers" in family.vllm.options:
        options["model_impl"] = "transformers"
        # vLLM's Transformers backend changes the model's class in this process, perhaps in a test before.
        expected = in_a_new_process(make_small_model, family, tmp_path)
    else:
        expected = make_small_model(family, tmp_path)
    know_config(family.config["model_type"])
    llm = start_engine(
        tmp_path,
        attention_backend=selection_name(),
        skip_tokenizer_init=True,
        max_num_batched_tokens=256,
        **options,
    )
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": greedy.prompt} for greedy in expected]
    layers = len(attention_layers(llm))
    for _repetition in range(2):  # the second time, with cached prefixes
        before = counters.snapshot()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == [g.tokens for g in expected]
        # Each layer counts each token, so a token that another backend served would be missing.
        assert layers and sum(counted_tokens(before).values()) == attended_tokens(outputs, layers)
