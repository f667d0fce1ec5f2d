"""Separate prefill and decode servers on a GPU, which they share: NIXL carries the cache between them."""

import functools

import pytest

from make_checkpoint import make_checkpoint
from mla_backend_vllm import selection_name
from tests.support.greedy import NEAR_TIE, assert_equal_up_to_near_ties, mean_deviation
from tests.support.vllm_workload import GRAPHS, options, prompts

pytestmark = pytest.mark.gpu

NAME = selection_name()
MTP = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": NAME}
PROMPTS = prompts()[:24]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("dense"))
    arguments = ("--architecture", "deepseek-v3", "--experts", "0", "--context-length", "16384")
    return make_checkpoint(folder, *arguments)


@pytest.fixture(scope="module")
def of_one_engine(servers, path):
    """A function from a dtype to what one engine generates, with a cache in this dtype."""

    @functools.cache
    def made(dtype):
        servers.start(path, attention_backend=NAME, **options(**GRAPHS, dtype=dtype))
        return servers.alone(PROMPTS)

    return made


def generate(servers):
    """What both servers generate, after a check that the decode server has read no prompt."""
    made = servers.generate(PROMPTS)
    assert sum(made.query_tokens.values()) < sum(map(len, PROMPTS))
    assert not made.query_tokens["vanilla_prefill"]
    return made.sequences


@pytest.mark.parametrize("drafts", [{}, {"speculative_config": MTP}], ids=["alone", "mtp"])
def test_tokens_are_those_of_one_engine(servers, path, of_one_engine, drafts):
    expected = of_one_engine("float16")
    assert expected.query_tokens["vanilla_prefill"]
    servers.start(path, attention_backend=NAME, **options(**GRAPHS, dtype="float16", **drafts))
    made = generate(servers)
    different = assert_equal_up_to_near_ties(made, expected.sequences, NEAR_TIE["float16"], drafts)
    assert different <= len(made) // 2, "too many differences, if only after near-ties"


@pytest.mark.parametrize("drafts", [{}, {"speculative_config": MTP}], ids=["alone", "mtp"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_ds_mla"])
def test_fp8_caches_lose_no_more_than_in_one_engine(servers, path, of_one_engine, kv_cache_dtype, drafts):
    expected = of_one_engine("bfloat16").sequences
    engine = options(**GRAPHS, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, **drafts)
    servers.start(path, attention_backend=NAME, **engine)
    made = generate(servers)
    most = 1.3 * mean_deviation(servers.alone(PROMPTS).sequences, expected, f"{kv_cache_dtype} alone")
    assert mean_deviation(made, expected, kv_cache_dtype) <= most
