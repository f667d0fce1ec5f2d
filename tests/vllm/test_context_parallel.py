"""Decode context parallelism in vLLM on the CPU: two ranks with half of the cache each."""

import pytest
import torch

from mla_backend import counters
from mla_backend.cache_format import E4M3, RECORD_656
from mla_backend_vllm import selection_name
from tests.support.fp8_oracle import Fp8Latents, assert_greedy
from tests.support.vllm_rank_pair import sequences_of_ranks

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
