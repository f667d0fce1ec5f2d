"""On a GPU: the decode step's host side, and tokens against a stock backend, with and without CUDA graphs."""

import functools
import random
from types import SimpleNamespace

import pytest
import torch

from make_checkpoint import make_checkpoint
from mla_backend import MLADecoder, counters, reference
from tests.greedy import NEAR_TIE, Sequence, assert_equal_up_to_near_ties

pytestmark = pytest.mark.gpu

VOCABULARY = 448  # at most what the checkpoint's tokenizer has
NEW_TOKENS = 32
BATCHES = (1, 7, 16, 64)
GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def prompts():
    """Of 1 to 1,500 tokens, one of 3,500 and one of 8,192; some repeat themselves, for the ngram proposer."""
    generator = random.Random(0)
    lengths = [8192, 3500, 1, 2, 63, 64, 65, *(generator.randint(1, 1500) for _ in range(max(BATCHES) - 7))]
    made = []
    for i, length in enumerate(lengths):
        pattern = [generator.randrange(3, VOCABULARY) for _ in range(length if i % 2 else 16)]
        made.append((pattern * (length // len(pattern) + 1))[:length])
    return made


def generate(llm, batch):
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()[:batch]], sampling, use_tqdm=False)
    sequences = []
    for output in outputs:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        best_two = [
            sorted((p.logprob for p in step.values()), reverse=True)[:2] for step in completion.logprobs
        ]
        chosen = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
        sequences.append(Sequence(tokens, chosen, [a - b for a, b in best_two]))
    return sequences


def options(**changes):
    engine = {"dtype": "float16", "max_model_len": 8448, "max_num_seqs": max(BATCHES), "block_size": 64}
    # A cache of a fixed size, so that several of these tests can share a GPU (pytest -n).
    return engine | {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30} | changes


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory):
    """No routed experts: rounding picks another one at a near-tie, and the logits move by 0.3."""
    path = str(tmp_path_factory.mktemp("dense"))
    return make_checkpoint(path, "--experts", "0", "--context-length", "16384")


@pytest.fixture(scope="module")
def stock_tokens(dense_path):
    """By dtype: tokens of vLLM's own backend for each batch size, made eagerly."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    @functools.cache
    def tokens(dtype):
        backend = "FLASH_ATTN_MLA" if torch.cuda.get_device_capability()[0] == 9 else "TRITON_MLA"
        before = counters.snapshot()
        # vLLM 0.26 can lose the context of a chunked prompt (see our MetadataBuilder.build): chunk none.
        whole_prompts = options(enforce_eager=True, dtype=dtype, max_num_batched_tokens=1 << 16)
        llm = LLM(str(dense_path), attention_backend=backend, **whole_prompts)
        made = {batch: generate(llm, batch) for batch in BATCHES}
        assert counters.snapshot() == before
        del llm
        cleanup_dist_env_and_memory()
        return made

    return tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"enforce_eager": True, "max_num_batched_tokens": 512},
        GRAPHS,
        GRAPHS | {"block_size": 16},
        GRAPHS | {"speculative_config": NGRAM},
        GRAPHS | {"dtype": "bfloat16"},
        GRAPHS | {"dtype": "bfloat16", "speculative_config": NGRAM},
        {"enforce_eager": False},
    ],
    ids=["eager, chunks of 512", "graphs", "page 16", "ngram", "bf16", "bf16, ngram", "compiled"],
)
def test_tokens_equal_the_stock_backend(start_engine, dense_path, stock_tokens, changes):
    engine = options(**changes)
    stock, near_tie = stock_tokens(engine["dtype"]), NEAR_TIE[engine["dtype"]]
    before = counters.snapshot()
    llm = start_engine(dense_path, attention_backend="CUSTOM", **engine)
    different = 0
    for batch in BATCHES:
        different += assert_equal_up_to_near_ties(generate(llm, batch), stock[batch], near_tie, batch)
    # Now all prompts are in the prefix cache.
    batch = max(BATCHES)
    different += assert_equal_up_to_near_ties(generate(llm, batch), stock[batch], near_tie, f"{batch} cached")
    if engine["dtype"] == "float16":
        assert different <= (sum(BATCHES) + batch) // 4, "too many differences, if only after near-ties"
    after = counters.snapshot()
    used = {path for path in after if after[path].calls > before[path].calls}
    assert {"absorbed_decode" if "speculative_config" not in changes else "absorbed_extend"} <= used
    assert "vanilla_prefill" in used


@pytest.fixture
def decoder():
    return MLADecoder(
        num_heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        dtype=torch.bfloat16,
        page_size=64,
        device="cuda",
        max_batch=8,
        max_query_len=4,
    )


@pytest.mark.parametrize(
    "query_lens, rows", [([1] * 6 + [0, 0], 8), ([4, 4, 4, 0], 16), ([1, 3, 2], 6)], ids=str
)
def test_a_step_neither_synchronizes_nor_reads_padding(decoder, query_lens, rows):
    """From vLLM's metadata to the output, graph padding included, without waiting for the GPU once."""
    from mla_backend_vllm.backend import MetadataBuilder, MLAImpl

    builder = MetadataBuilder.__new__(MetadataBuilder)
    builder.decoder = decoder
    impl = MLAImpl.__new__(MLAImpl)
    impl.scale, impl.kv_lora_rank, impl.qk_rope_head_dim = 192**-0.5, 512, 64
    requests = len(query_lens)
    kv_cache = torch.full((requests * 4 + 1, 64, 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    kv_cache[1:] = torch.randn_like(kv_cache[1:])
    seq_lens = torch.tensor([40 * i + 8 if q else 0 for i, q in enumerate(query_lens)], dtype=torch.int32)
    tables = torch.arange(1, requests * 4 + 1, dtype=torch.int32).view(requests, 4)
    tables *= (seq_lens > 0)[:, None]
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    q_nope = torch.randn(16, rows, 512, dtype=torch.bfloat16, device="cuda").transpose(
        0, 1
    )  # as vLLM hands it over
    q_rope = torch.randn(rows, 16, 64, dtype=torch.bfloat16, device="cuda")
    on_gpu = {"block_table_tensor": tables.cuda(), "seq_lens_device": seq_lens.cuda()}

    def step():
        decode = builder._build_decode(
            query_start_loc_cpu=starts,
            query_start_loc_device=starts_gpu,
            num_decode_tokens=rows,
            dcp_tot_seq_lens_device=None,
            **on_gpu,
        )
        return impl.forward_mqa((q_nope, q_rope), kv_cache, SimpleNamespace(decode=decode), None), decode.plan

    starts_gpu = starts.cuda()
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (out, lse), plan = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, expected_lse = reference.paged_attention(q_nope, q_rope, kv_cache, plan.batch, impl.scale)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
