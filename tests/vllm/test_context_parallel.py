"""Decode context parallelism in vLLM on the CPU: two ranks with half of the cache each."""

import pytest

from mla_backend import counters
from mla_backend_vllm import selection_name
from tests.support.vllm_rank_pair import sequences_of_ranks

ENGINE = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "enforce_eager": True}
ENGINE |= {"decode_context_parallel_size": 2, "block_size": 32}
ENGINE |= {"max_num_batched_tokens": 192, "enable_chunked_prefill": True, "cp_kv_cache_interleave_size": 16}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.newest
def test_two_ranks_generate_huggingface_tokens(deepseek, tmp_path):
    """In chunks, as prefix hits, and with drafts whose keys lie on either rank."""
    options = ENGINE | {"attention_backend": selection_name(), "speculative_config": NGRAM}
    job = {"model": str(deepseek.path), "options": options}
    (sequences,) = sequences_of_ranks([job], [expected.prompt for expected in deepseek.expected], tmp_path)
    assert [sequence.tokens for sequence in sequences] == [e.tokens for e in deepseek.expected] * 2
    used = counters.read_folder(tmp_path / "counts")
    for path in ("absorbed_decode", "absorbed_extend", "vanilla_prefill"):
        assert used[path].calls
