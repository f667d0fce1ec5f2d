"""Sparse attention on a GPU: tokens of a small model of DeepSeek-V3.2's form, its indexer real."""

import json

import pytest
import torch
from conftest import make_checkpoint

from mla_backend_sglang.names import DSA_VARIABLE
from tests.support.greedy import Sequence, mean_deviation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="SGLang's indexer (DeepGEMM) needs compute capability 9.0",
    ),
]

MOST = 0.1
"""Mean deviation in nats, bf16. A difference in rounding may also let the indexer choose another key."""

STOCK = {"dsa_decode_backend": "flashmla_sparse", "dsa_prefill_backend": "flashmla_sparse"}
TILELANG = {"dsa_decode_backend": "tilelang", "dsa_prefill_backend": "tilelang"}
OURS = {"dsa_decode_backend": "fa3", "dsa_prefill_backend": "fa3"}
MTP = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 2,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A checkpoint without routed experts: at a near-tie, rounding can select another expert."""
    folder = tmp_path_factory.mktemp("sparse")
    # SGLang's kernels choose 2,048 keys, and need a hidden size above 256 before the draft layer.
    sizes = ("--index-topk", "2048", "--hidden-size", "512", "--heads", "16", "--layers", "2")
    arguments = ("--experts", "0", "--context-length", "16384", *sizes)
    make_checkpoint(folder, "--architecture", "deepseek-v3.2", *arguments)
    return folder


COMMON = {"attention_backend": "dsa", "page_size": 64, "dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
# Short prompts, too: their dense prefill needs FlashAttention-3.
ENVIRONMENT = {"SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0"}


@pytest.fixture(scope="module")
def generate(run_engine, path):
    """A function from an engine's settings to the texts of each batch and the counts of the paths."""

    def run(settings, ours):
        if settings.get("speculative_algorithm"):
            settings = settings | {"speculative_draft_model_path": str(path)}
        environment = ENVIRONMENT | ({DSA_VARIABLE: "1"} if ours else {})
        result, counts = run_engine("on_gpu", json.dumps(COMMON | settings), model=path, **environment)
        assert bool(counts["sparse"].calls) is ours
        return sequences(result)

    return run


@pytest.fixture(scope="module")
def stock(generate):
    return generate(STOCK, ours=False)


def sequences(result):
    return [[Sequence(*sequence) for sequence in batch] for batch in result["batches"]]


def joined(batches):
    """The batches, the first with the second: it has one text, which may leave after one token."""
    return [batches[0] + batches[1], *batches[2:]]


@pytest.mark.parametrize(
    "settings",
    [{}, {"disable_cuda_graph": True, "chunked_prefill_size": 512}, MTP, TILELANG],
    ids=["graphs", "eager, chunks of 512", "mtp", "tilelang"],
)
def test_tokens_are_near_those_of_the_stock_backend(generate, stock, settings):
    for ours, theirs in zip(joined(generate(OURS | settings, ours=True)), joined(stock), strict=True):
        assert mean_deviation(ours, theirs, len(ours)) < MOST


@pytest.mark.parametrize("prefill", ["fa3", "flashmla_sparse"])
def test_records_lose_no_more_than_those_of_sglang(generate, stock, prefill):
    """SGLang's kernels for records multiply what they dequantize to bf16."""
    fp8, expected = {"kv_cache_dtype": "fp8_e4m3"}, sum(stock, [])
    stock_kernels = {"dsa_decode_backend": "flashmla_kv", "dsa_prefill_backend": "flashmla_kv"}
    theirs = generate(stock_kernels | fp8, ours=False)
    ours = generate(OURS | fp8 | {"dsa_prefill_backend": prefill}, ours=True)
    most = 1.2 * mean_deviation(sum(theirs, []), expected, "flashmla_kv")
    assert mean_deviation(sum(ours, []), expected, f"ours, prefill by {prefill}") <= most


def test_separate_prefill_and_decode_servers(run_pair, stock, path):
    """Of each page, latents and the indexer's keys are transferred."""
    settings = COMMON | OURS | {"device": "cuda"}
    result, prefill, decode = run_pair(settings, model=path, **ENVIRONMENT, **{DSA_VARIABLE: "1"})
    assert prefill["sparse"].calls and decode["sparse"].calls
    for ours, theirs in zip(joined(sequences(result)), joined(stock), strict=True):
        assert mean_deviation(ours, theirs, len(ours)) < MOST
