"""Decode context parallelism in vLLM on the CPU: two ranks with half of the cache each."""

import types

import pytest
import torch

from mla_backend import UnsupportedError, counters
from mla_backend.batch import WHOLE
from mla_backend.cache_format import E4M3, RECORD_656
from mla_backend_vllm import selection_name, sharding
from tests.support.fp8_oracle import Fp8Latents, assert_greedy
from tests.support.vllm_rank_pair import RANKS, sequences_of_ranks
from tests.support.vllm_workload import NEW_TOKENS

ENGINE = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "enforce_eager": True}
ENGINE |= {"decode_context_parallel_size": 2, "block_size": 32}
ENGINE |= {"max_num_batched_tokens": 192, "enable_chunked_prefill": True, "cp_kv_cache_interleave_size": 16}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": selection_name()}


@pytest.mark.newest
def test_two_ranks_generate_huggingface_tokens(deepseek, deepseek_v3, tmp_path):
    """In chunks, as prefix hits, and with drafts whose keys lie on either rank."""
    engine = ENGINE | {"attention_backend": selection_name()}
    models = [(deepseek_v3, MTP), (deepseek, NGRAM)]  # numba, which n-gram drafts load, breaks a later start
    jobs = [
        {"model": str(model.path), "options": engine | {"speculative_config": drafts}}
        for model, drafts in models
    ]
    prompts = [expected.prompt for expected in deepseek.expected]
    assert prompts == [expected.prompt for expected in deepseek_v3.expected]
    made = sequences_of_ranks(jobs, prompts, tmp_path)
    for (model, _), sequences in zip(models, made, strict=True):
        assert [sequence.tokens for sequence in sequences] == [e.tokens for e in model.expected] * 2
    used = counters.read_folder(tmp_path / "counts")
    for path in ("absorbed_decode", "absorbed_extend", "vanilla_prefill"):
        assert used[path].calls


@pytest.mark.newest
def test_fp8_caches_in_two_parts(deepseek, tmp_path):
    """Context of both ranks in regular prefill, a last chunk that is absorbed, a prefix hit, and decode."""
    from transformers import AutoModelForCausalLM

    formats = {"fp8": E4M3.name, "fp8_ds_mla": RECORD_656.name}
    engine = ENGINE | {"attention_backend": selection_name(), "max_num_batched_tokens": 128}
    jobs = [
        {"model": str(deepseek.path), "options": engine | {"kv_cache_dtype": kv_cache_dtype}}
        for kv_cache_dtype in formats
    ]
    prompt = max((expected.prompt for expected in deepseek.expected), key=len)
    last = len(prompt) - 2 * 128
    assert 16 < last <= 64, "the last chunk is to be absorbed"
    made = sequences_of_ranks(jobs, [prompt], tmp_path)
    model = AutoModelForCausalLM.from_pretrained(deepseek.path, dtype=torch.float32).eval()
    for kv_format, sequences in zip(formats.values(), made, strict=True):
        for sequence in sequences:
            passes = [(128, True), (128, True), (last, False)]
            assert_greedy(sequence.tokens, model, prompt, passes, Fp8Latents(kv_format), may_end=False)


@pytest.mark.newest
def test_a_divided_cache_comes_from_another_server(servers, deepseek):
    """From ranks with half of the cache each, and then from one with all of it."""
    engine = ENGINE | {"attention_backend": selection_name(), "kv_cache_memory_bytes": 1 << 26}
    engine |= {"cp_kv_cache_interleave_size": None}  # vLLM chooses a page
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
    monkeypatch.setattr(sharding, "get_dcp_group", lambda: types.SimpleNamespace(rank_in_group=1))
    monkeypatch.setattr(sharding, "has_kv_transfer_group", lambda: True)
    inner = [{"kv_connector": "NixlConnector"}] if connector == "MultiConnector" else []
    transfer = types.SimpleNamespace(kv_connector=connector, kv_connector_extra_config={"connectors": inner})
    parallel = types.SimpleNamespace(decode_context_parallel_size=2, cp_kv_cache_interleave_size=64)
    config = types.SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)
    impl = types.SimpleNamespace(dcp_world_size=2)

    def interleave():
        return sharding.shard_of(config, impl, 64).interleave

    assert interleave() == 64
    parallel.cp_kv_cache_interleave_size = 16
    if connector == "OffloadingConnector":
        assert interleave() == 16
    else:
        with pytest.raises(UnsupportedError, match="set --cp-kv-cache-interleave-size to 64"):
            interleave()
    # When vLLM measures CUDA graphs, it has no connector and has not chosen the interleave.
    monkeypatch.setattr(sharding, "has_kv_transfer_group", lambda: False)
    assert interleave() == 16
    parallel.decode_context_parallel_size = 1
    assert sharding.shard_of(config, impl, 64) is WHOLE


def test_a_whole_draft_model_beside_a_divided_cache_is_refused():
    parallel = types.SimpleNamespace(decode_context_parallel_size=2, cp_kv_cache_interleave_size=1)
    config = types.SimpleNamespace(kv_transfer_config=None, parallel_config=parallel)
    with pytest.raises(UnsupportedError, match="leave out --decode-context-parallel-size, or set VLLM_USE"):
        sharding.shard_of(config, types.SimpleNamespace(dcp_world_size=1), 64)
