"""On a GPU: real CUDA graphs, speculation and synchronization, which SGLang's engine cannot show on a CPU.

pytest -m gpu tests/sglang
"""

import functools
import json
import unittest

import pytest
import sgl_kernel_stub
import torch
from conftest import REPOSITORY, run_script

from tests.greedy import NEAR_TIE, Sequence, assert_equal_up_to_near_ties

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]

sgl_kernel_stub.install()

DIMENSIONS = dict(kv_lora_rank=512, qk_rope_head_dim=64, device="cuda", dtype=torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def plugins():
    from sglang.srt.plugins import load_plugins

    load_plugins()


def kit_case(mode, prefix_lens, extend_lens=(), page_size=64):
    from sglang.test.kits.attention_unittest.attention_methods.mla_attention import MLAAttentionCase

    return MLAAttentionCase(
        name=f"gpu_{mode.name}",
        backend="mla_backend",
        forward_mode=mode,
        num_heads=16,
        page_size=page_size,
        prefix_lens=prefix_lens,
        extend_lens=extend_lens,
    )


@pytest.fixture(scope="module")
def generate(run_engine, tmp_path_factory):
    """Sequences of each batch, from an engine with these settings, and the counts of our attention paths.

    The model has no routed experts: rounding picks another one at a near-tie, and the logits move by 0.3.
    """

    @functools.cache
    def make_model(q_lora_rank):
        path = tmp_path_factory.mktemp("dense")
        arguments = ("--heads", "16", "--layers", "2", "--experts", "0", "--context-length", "16384")
        script = REPOSITORY / "examples/make_checkpoint.py"
        run_script(script, path, *arguments, "--q-lora-rank", q_lora_rank)
        return path

    def run(q_lora_rank=0, **settings):
        path = make_model(q_lora_rank)
        if settings.get("speculative_algorithm") == "STANDALONE":
            settings["speculative_draft_model_path"] = str(path)  # the model drafts for itself
        result, counts = run_engine("on_gpu", json.dumps(settings), model=path)
        return [[Sequence(*sequence) for sequence in batch] for batch in result["batches"]], counts

    return run


@pytest.fixture(scope="module")
def stock(generate):
    """By dtype and q_lora_rank: what SGLang's Triton backend generates."""
    return functools.cache(
        lambda dtype, q_lora_rank: generate(q_lora_rank, attention_backend="triton", dtype=dtype)[0]
    )


DRAFT_MODEL = dict(
    speculative_algorithm="STANDALONE",
    speculative_num_steps=3,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=4,
)


@pytest.mark.parametrize(
    "settings",
    [
        dict(page_size=64),
        dict(page_size=1),
        dict(page_size=64, disable_cuda_graph=True, chunked_prefill_size=512),
        dict(page_size=64, dtype="bfloat16"),
        dict(page_size=64, enable_deterministic_inference=True),
        dict(page_size=64) | DRAFT_MODEL,
        dict(page_size=64, q_lora_rank=192),
    ],
    ids=["graphs", "page 1", "eager, chunks of 512", "bf16", "deterministic", "draft model", "q_lora"],
)
def test_tokens_equal_the_stock_backend(generate, stock, settings):
    dtype = settings.get("dtype", "float16")
    batches, counts = generate(**settings)
    different = 0
    for ours, theirs in zip(batches, stock(dtype, settings.get("q_lora_rank", 0)), strict=True):
        different += assert_equal_up_to_near_ties(ours, theirs, NEAR_TIE[dtype], len(ours))
    if dtype == "float16":
        assert different <= sum(map(len, batches)) // 4, "too many differences, if only after near-ties"
    assert all(counts[path].calls for path in ("absorbed_decode", "absorbed_extend"))
    assert counts["vanilla_prefill"].calls or "enable_deterministic_inference" in settings


@pytest.mark.parametrize("page_size", [1, 64])
def test_captured_draft_runners_of_the_kit(page_size):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.runner_modes import (
        speculative_draft_extend_runner,
        speculative_draft_runner,
    )

    kit = unittest.TestCase()
    speculative_draft_runner.run_mla_eagle_draft_cuda_graph_runner_case(
        kit, kit_case(ForwardMode.DECODE, (4, 7, 16), page_size=page_size), **DIMENSIONS
    )
    speculative_draft_extend_runner.run_mla_eagle_draft_extend_v2_cuda_graph_runner_case(
        kit, kit_case(ForwardMode.DRAFT_EXTEND_V2, (4, 7), (3, 3), page_size), **DIMENSIONS
    )


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_decode_step_never_synchronizes(page_size):
    """Eager, so that every call is seen: planning, cache write and attention."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention

    fixture = mla_attention.build_mla_attention_fixture(
        unittest.TestCase(), kit_case(ForwardMode.DECODE, (14, 15, 16), page_size=page_size), **DIMENSIONS
    )
    first = mla_attention.run_mla_fixture_eager(fixture)  # builds kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = mla_attention.run_mla_fixture_eager(fixture)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)


def test_a_captured_step_follows_its_lengths():
    """A real graph of planning and attention, replayed after the runner changed its tensors; with padding."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention

    fixture = mla_attention.build_mla_attention_fixture(
        unittest.TestCase(),
        kit_case(ForwardMode.DECODE, (14, 15, 40, 33)),
        **DIMENSIONS,
    )
    expected = mla_attention.run_mla_fixture_eager(fixture)
    backend, batch = fixture.backend, fixture.forward_batch
    lengths, rows = batch.seq_lens.clone(), batch.req_pool_indices.clone()
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)

    def step():
        backend.init_forward_metadata_in_graph(batch)
        return fixture.actual_module(fixture.input_hidden, batch)

    with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
        batch.seq_lens.fill_(backend.get_cuda_graph_seq_len_fill_value())
        batch.req_pool_indices.zero_()
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for real in (4, 2):
            batch.seq_lens[:real].copy_(lengths[:real])
            batch.req_pool_indices[:real].copy_(rows[:real])
            batch.seq_lens[real:] = 1
            batch.req_pool_indices[real:] = 0
            graph.replay()
            torch.testing.assert_close(captured[:real], expected[:real], atol=3e-2, rtol=3e-2)
            assert captured.isfinite().all()
