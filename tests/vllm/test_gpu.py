"""On a GPU: the decode step's host side, and tokens against a stock backend, with and without CUDA graphs."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from make_checkpoint import make_checkpoint
from mla_backend import MLADecoder, counters, reference
from tests.greedy import NEAR_TIE, Sequence, assert_equal_up_to_near_ties
from tests.vllm.workload import BATCHES, generate, options, prompts

pytestmark = pytest.mark.gpu

GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CUSTOM"}


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory):
    """By architecture: a checkpoint without routed experts.

    With them, rounding picks another one at a near-tie, and the logits move by 0.3.
    """

    @functools.cache
    def path(architecture):
        folder = str(tmp_path_factory.mktemp("dense"))
        arguments = ("--architecture", architecture, "--experts", "0", "--context-length", "16384")
        return make_checkpoint(folder, *arguments)

    return path


def stock_backend():
    return "FLASH_ATTN_MLA" if torch.cuda.get_device_capability()[0] == 9 else "TRITON_MLA"


@pytest.fixture(scope="module")
def stock_tokens():
    """By checkpoint and dtype: tokens of vLLM's own backend for each batch size, made eagerly."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    @functools.cache
    def tokens(path, dtype):
        before = counters.snapshot()
        # vLLM 0.26 can lose the context of a chunked prompt (see our MetadataBuilder.build): chunk none.
        whole_prompts = options(enforce_eager=True, dtype=dtype, max_num_batched_tokens=1 << 16)
        llm = LLM(str(path), attention_backend=stock_backend(), **whole_prompts)
        made = {batch: generate(llm, prompts()[:batch]) for batch in BATCHES}
        assert counters.snapshot() == before
        del llm
        cleanup_dist_env_and_memory()
        return made

    return tokens


@pytest.mark.parametrize(
    "changes",
    [
        GRAPHS,
        GRAPHS | {"block_size": 16},
        {"enforce_eager": True, "max_num_batched_tokens": 512},
        GRAPHS | {"dtype": "bfloat16"},
        {"enforce_eager": False},
        GRAPHS | {"speculative_config": MTP},
        GRAPHS | {"speculative_config": NGRAM},
        GRAPHS | {"dtype": "bfloat16", "speculative_config": NGRAM},
    ],
    ids=["graphs", "page 16", "eager, chunks of 512", "bf16", "compiled", "mtp", "ngram", "bf16, ngram"],
)
def test_tokens_equal_the_stock_backend(start_engine, dense_path, stock_tokens, changes):
    engine = options(**changes)
    path = dense_path("deepseek-v3" if changes.get("speculative_config") is MTP else "deepseek-v2")
    stock, near_tie = stock_tokens(path, engine["dtype"]), NEAR_TIE[engine["dtype"]]
    before = counters.snapshot()
    llm = start_engine(path, attention_backend="CUSTOM", **engine)
    different = 0
    for batch in BATCHES:
        ours = generate(llm, prompts()[:batch])
        different += assert_equal_up_to_near_ties(ours, stock[batch], near_tie, batch)
    # Now all prompts are in the prefix cache.
    batch = max(BATCHES)
    ours = generate(llm, prompts()[:batch])
    different += assert_equal_up_to_near_ties(ours, stock[batch], near_tie, f"{batch} cached")
    if engine["dtype"] == "float16":
        assert different <= (sum(BATCHES) + batch) // 4, "too many differences, if only after near-ties"
    after = counters.snapshot()
    used = {path for path in after if after[path].calls > before[path].calls}
    assert {"absorbed_decode" if "speculative_config" not in changes else "absorbed_extend"} <= used
    assert "vanilla_prefill" in used


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind, experts", [("tensor", "0"), ("data", "4")], ids=["tensor", "data"])
def test_two_gpus_generate_the_stock_backends_tokens(tmp_path, kind, experts):
    model = make_checkpoint(str(tmp_path / "model"), "--experts", experts, "--context-length", "16384")
    counts = tmp_path / "counts"

    def start(backend):
        # Whole prompts, as for `stock_tokens`.
        engine = options(**GRAPHS, attention_backend=backend, max_num_batched_tokens=1 << 16)
        script, result = Path(__file__).with_name("parallel.py"), tmp_path / f"{backend}.json"
        command = [sys.executable, script, kind, model, result, json.dumps(engine)]
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        if backend == "CUSTOM":
            environment[counters.ENVIRONMENT_VARIABLE] = str(counts)
        return subprocess.Popen(command, env=os.environ | environment), result

    runs = [start(backend) for backend in ("CUSTOM", stock_backend())]
    assert [process.wait() for process, _ in runs] == [0, 0]
    ours, stock = ([Sequence(*s) for s in json.loads(result.read_text())] for _, result in runs)
    # A token that goes to another expert moves the logits.
    near_tie = NEAR_TIE["float16"] if experts == "0" else NEAR_TIE["bfloat16"]
    different = assert_equal_up_to_near_ties(ours, stock, near_tie, f"{kind} parallel")
    assert different <= len(stock) // 4, "too many differences, if only after near-ties"
    used = counters.read_folder(counts)
    assert used["absorbed_decode"].calls and used["vanilla_prefill"].calls


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
