"""The table of models, and docs/models.md, which shows it."""

from pathlib import Path

import pytest

from mla_backend.kernels.base import DIMENSIONS
from mla_backend.models import FAMILIES, NO_INDEXER, ModelFamily, State, Support, family_of
from tests.support import configs

PAGE = Path(__file__).parents[2] / "docs/models.md"
HEAD = """\
| model | latents | heads | key, value | vLLM: CPU | GPU | SGLang: CPU | GPU | remarks |
|---|---|---|---|---|---|---|---|---|
"""


def row(family: ModelFamily) -> str:
    """A line of the table in docs/models.md."""
    shape = family.geometry
    states = (s.value for engine in (family.vllm, family.sglang) for s in (engine.cpu, engine.gpu))
    cells = (
        f"{family.name}{f' ({family.also})' * bool(family.also)}",
        f"{shape.kv_lora_rank} + {shape.qk_rope_head_dim}",
        f"{shape.num_heads}",
        f"{shape.qk_nope_head_dim} + {shape.qk_rope_head_dim}, {shape.v_head_dim}",
        *states,
        "; ".join(filter(None, (family.special, *remarks(family)))),
    )
    return f"| {' | '.join(cells)} |\n"


def remarks(family: ModelFamily) -> list[str]:
    """What is to be said of engines."""
    texts = {"vLLM": family.vllm.reason, "SGLang": family.sglang.reason}
    if family.vllm.reason == family.sglang.reason:
        texts = {"vLLM and SGLang": family.vllm.reason}
    if family.vllm.options:
        texts["vLLM"] = f"`{family.vllm.options}`"
    # The page says for all sparse models that engines have no indexer.
    return [f"{name}: {text}" for name, text in texts.items() if text not in ("", NO_INDEXER)]


def test_the_page_shows_the_table():
    expected = HEAD + "".join(map(row, FAMILIES))
    assert expected in PAGE.read_text(), f"put this table into docs/models.md:\n\n{expected}"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_found_by_its_config(family):
    assert family_of(family.config) is family
    assert family_of({"model_type": "some_vlm", "text_config": family.config}) is family
    # Without the names of classes, DeepSeek-V3 and Mistral-Large-3 are alike.
    nameless = {key: value for key, value in family.config.items() if key != "architectures"}
    assert family_of(nameless) is family or family.name == "Mistral-Large-3-675B"


def test_models_with_other_dimensions_belong_to_the_first_family_with_their_code():
    found = family_of(configs.V3 | {"num_attention_heads": 8})
    assert found is not None and found.name == "DeepSeek-V3"
    assert family_of(configs.V3 | {"model_type": "another"}) is None


def test_reasons_are_given_for_what_is_not_served():
    for family in FAMILIES:
        for support in (family.vllm, family.sglang):
            served = {support.cpu.is_served, support.gpu.is_served}
            assert bool(support.reason) is (False in served), family.name
            assert not support.options or True in served, family.name


def test_gpu_states_agree_with_the_kernels():
    for family in FAMILIES:
        shape = family.geometry
        if (shape.kv_lora_rank, shape.qk_rope_head_dim) not in DIMENSIONS:
            assert not family.vllm.gpu.is_served and not family.sglang.gpu.is_served, family.name


@pytest.mark.parametrize(
    ("support", "words"),
    [
        (Support(State.TESTED, State.TESTED), "tested on the CPU and on GPUs"),
        (
            Support(State.TESTED, State.UNTESTED, options="--x"),
            "tested on the CPU, untested on GPUs; with --x",
        ),
        (Support(State.ABSENT, State.ABSENT, "why"), "no: why"),
        (Support(State.REFUSED, State.TESTED, "why"), "refused on the CPU, tested on GPUs: why"),
    ],
)
def test_support_in_words(support, words):
    assert str(support) == words
