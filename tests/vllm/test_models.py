"""vLLM on this backend generates the tokens of each family's own layers (`mla_backend.models`)."""

import pytest

from mla_backend import counters
from mla_backend.models import FAMILIES, State
from mla_backend_vllm import selection_name
from tests.support.small_models import NEW_TOKENS, know_config, make_small_model
from tests.support.vllm_outputs import attended_tokens, attention_layers, counted_tokens

pytestmark = pytest.mark.newest
SERVED = [family for family in FAMILIES if family.vllm.cpu is State.TESTED]


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
def test_tokens(start_engine, tmp_path, family):
    from vllm import SamplingParams

    expected = make_small_model(family, tmp_path)
    know_config(family.config["model_type"])
    options = {"model_impl": "transformers"} if "transformers" in family.vllm.remark else {}
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
