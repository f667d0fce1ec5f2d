"""Decode context parallelism in vLLM on the CPU: two ranks with half of the cache each."""

import types

import pytest
import torch

from mla_backend import Shard, UnsupportedError
from mla_backend.batch import WHOLE
from mla_backend.cache_format import E4M3, RECORD_656
from mla_backend_vllm import refusals, selection_name, sharding
from tests.support.fp8_oracle import Fp8Latents, assert_greedy
from tests.support.vllm_rank_pair import RANKS, generate_on_ranks
from tests.support.vllm_workload import CPU_ENGINE, NEW_TOKENS

ENGINE = CPU_ENGINE | {"decode_context_parallel_size": 2, "block_size": 32}
ENGINE |= {"max_num_batched_tokens": 192, "enable_chunked_prefill": True, "cp_kv_cache_interleave_size": 16}
ENGINE |= {"attention_backend": selection_name()}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": selection_name()}
FP8 = {"fp8": E4M3.name, "fp8_ds_mla": RECORD_656.name}


@pytest.fixture(scope="module")
def generated(deepseek, deepseek_v3, tmp_path_factory):
    """What two ranks generate, by the option that a test names. Their processes start once for all tests."""

    def job(model, expected, **options):
        prompts = [e.prompt for e in expected]
        return {"model": str(model.path), "options": ENGINE | options, "prompts": prompts}

    longest = [max(deepseek.expected, key=lambda e: len(e.prompt))]
    jobs = {name: job(deepseek, longest, kv_cache_dtype=name, max_num_batched_tokens=128) for name in FP8}
    jobs["mtp"] = job(deepseek_v3, deepseek_v3.expected, speculative_config=MTP)
    # Last: numba, which n-gram drafts load, breaks a later start.
    jobs["ngram"] = job(deepseek, deepseek.expected, speculative_config=NGRAM)
    made = generate_on_ranks(list(jobs.values()), tmp_path_factory.mktemp("ranks"))
    return dict(zip(jobs, made, strict=True))


@pytest.mark.newest
@pytest.mark.parametrize("drafts", ["mtp", "ngram"])
def test_two_ranks_generate_huggingface_tokens(generated, deepseek, deepseek_v3, drafts):
    """In chunks, as prefix hits, and with drafts whose keys lie on either rank."""
    expected = {"mtp": deepseek_v3, "ngram": deepseek}[drafts].expected
    made = generated[drafts]
    assert [sequence.tokens for sequence in made.sequences] == [e.tokens for e in expected] * 2
    paths = {"absorbed_decode", "absorbed_extend", "vanilla_prefill"}
    if drafts == "mtp":  # there is a draft in each step, and so no query of one token
        paths.remove("absorbed_decode")
    assert {path for path, calls in made.calls.items() if calls} == paths


@pytest.mark.newest
@pytest.mark.parametrize("kv_cache_dtype", FP8)
def test_fp8_caches_in_two_parts(generated, deepseek, kv_cache_dtype):
    """Context of both ranks in regular prefill, a last chunk that is absorbed, a prefix hit, and decode."""
    from transformers import AutoModelForCausalLM

    prompt = max((expected.prompt for expected in deepseek.expected), key=len)
    last = len(prompt) - 2 * 128
    assert 16 < last <= 64, "the last chunk is to be absorbed"
    model = AutoModelForCausalLM.from_pretrained(deepseek.path, dtype=torch.float32).eval()
    for sequence in generated[kv_cache_dtype].sequences:
        passes, latents = [(128, True), (128, True), (last, False)], Fp8Latents(FP8[kv_cache_dtype])
        assert_greedy(sequence.tokens, model, prompt, passes, latents)


@pytest.mark.newest
def test_a_divided_cache_comes_from_another_server(servers, deepseek):
    """From ranks with half of the cache each, and then from one with all of it."""
    engine = ENGINE | {"cp_kv_cache_interleave_size": None}  # vLLM chooses a page
    engine |= {"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"}
    whole = {"tensor_parallel_size": 1, "decode_context_parallel_size": 1}
    whole |= {"distributed_executor_backend": "uni"}
    prompts = [expected.prompt for expected in deepseek.expected]
    servers.start(deepseek.path, **engine)
    for is_whole in (False, True):
        if is_whole:
            servers.replace_prefill(deepseek.path, **engine | whole)
        made = servers.generate(prompts)
        assert [sequence.tokens for sequence in made.sequences] == [e.tokens for e in deepseek.expected]
        # The last token of each prompt and those generated, in three layers, on each rank.
        decoded = made.query_tokens.pop("absorbed_decode")
        assert decoded == RANKS * 3 * NEW_TOKENS * len(prompts)
        assert not any(made.query_tokens.values())


@pytest.mark.newest
@pytest.mark.parametrize("connector", ["NixlConnector", "MultiConnector", "OffloadingConnector"])
def test_servers_exchange_only_whole_pages_of_a_rank(connector, monkeypatch):
    group = types.SimpleNamespace(rank_in_group=1, world_size=2)
    monkeypatch.setattr(sharding, "get_dcp_group", lambda: group)
    monkeypatch.setattr(refusals, "has_kv_transfer_group", lambda: True)
    inner = [{"kv_connector": "NixlConnector"}] if connector == "MultiConnector" else []
    transfer = types.SimpleNamespace(kv_connector=connector, kv_connector_extra_config={"connectors": inner})
    parallel = types.SimpleNamespace(cp_kv_cache_interleave_size=64)
    config = types.SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
    impl = types.SimpleNamespace(dcp_world_size=2)

    def interleave():
        return sharding.shard_of(config, impl, 64).interleave

    assert sharding.shard_of(config, impl, 64) == Shard(1, 2, 64)
    parallel.cp_kv_cache_interleave_size = 16
    if connector == "OffloadingConnector":
        assert interleave() == 16
    else:
        with pytest.raises(UnsupportedError, match="set --cp-kv-cache-interleave-size to 64"):
            interleave()
    # When vLLM measures CUDA graphs, it has no connector and has not chosen the interleave.
    monkeypatch.setattr(refusals, "has_kv_transfer_group", lambda: False)
    assert interleave() == 16
    group.world_size = 1
    assert sharding.shard_of(config, impl, 64) is WHOLE


def test_a_whole_draft_model_beside_a_divided_cache_is_refused(monkeypatch):
    """Also if vLLM gives the draft model a configuration of its own, without the ranks (0.33)."""
    group = types.SimpleNamespace(rank_in_group=0, world_size=2)
    monkeypatch.setattr(sharding, "get_dcp_group", lambda: group)
    parallel = types.SimpleNamespace(decode_context_parallel_size=1, cp_kv_cache_interleave_size=1)
    config = types.SimpleNamespace(kv_transfer_config=None, parallel_config=parallel)
    with pytest.raises(UnsupportedError, match="leave out --decode-context-parallel-size, or set VLLM_USE"):
        sharding.shard_of(config, types.SimpleNamespace(dcp_world_size=1), 64)
