"""The examples, which start SGLang's HTTP server and its engine as users do."""

import ast

import pytest
from conftest import REPOSITORY, run_script

from mla_backend_bench.ports import free_port

pytestmark = pytest.mark.newest

COMMON = ("--dtype", "float32", "--max-total-tokens", "4096", "--page-size", "64", "--max-tokens", "6")


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


def printed_tokens(output):
    lines = [line.removeprefix("tokens: ") for line in output.splitlines() if line.startswith("tokens: ")]
    return [ast.literal_eval(line) for line in lines]


def assert_our_tokens(output, prompts, tokenizer, oracle):
    tokens = printed_tokens(output)
    assert len(tokens) == len(prompts)
    for prompt, answer in zip(prompts, tokens, strict=True):
        assert answer == oracle.greedy(tokenizer(prompt).input_ids, len(answer))[0]
    assert "Attention backend: MLA_BACKEND." in output
    assert "absorbed_decode" in output and "vanilla_prefill" in output


def test_server_with_concurrent_clients(checkpoint, tokenizer, oracle):
    output = run_script(
        REPOSITORY / "examples/sglang_server.py", checkpoint, *COMMON, "--prompt", "one two", "--clients", 4,
        "--port", free_port(), "--skip-server-warmup", "--disable-cuda-graph",
    )  # fmt: skip
    assert_our_tokens(output, ["one two" + " please" * i for i in range(4)], tokenizer, oracle)
    assert "(no kernels for device type 'cpu'); cache: " in output
    assert "; page size: 64; prefill library: torch; " in output
    assert "norm, rotary embedding and cache append fused in 2 of 2 attention layers" in output


def test_offline_engine(checkpoint, tokenizer, oracle):
    prompts = ["one two three", "attention"]
    output = run_script(
        REPOSITORY / "examples/sglang_offline.py",
        checkpoint,
        *COMMON,
        "--prompt",
        prompts[0],
        "--prompt",
        prompts[1],
    )
    assert_our_tokens(output, prompts, tokenizer, oracle)
