"""Servers whose engines run in processes of their own."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import vllm

from mla_backend import counters
from mla_backend_bench.ports import free_port
from mla_backend_vllm import selection_name
from tests.support.loads import check_a_server_under_load
from tests.support.vllm_workload import CPU_ENGINE

pytestmark = pytest.mark.newest


def test_a_refusal_is_the_last_line_and_starts_no_engine(deepseek_path, monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(deepseek_path)]
    command += ["--attention-backend", selection_name(), "--block-size", "24"]
    server = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.returncode
    reason = "pages of 24 tokens are not supported: use a --block-size that is a multiple of 16"
    last = server.stdout.strip().splitlines()[-1]
    assert last.startswith("mla_backend.errors.UnsupportedError: MLA_BACKEND cannot serve") and reason in last
    assert server.stdout.count(reason) == 1
    assert "EngineCore" not in server.stdout, "its name is in front of what an engine's process logs"


def test_eight_concurrent_clients_get_the_right_tokens(deepseek, tmp_path, monkeypatch):
    from serve import running_server

    monkeypatch.setenv(counters.ENVIRONMENT_VARIABLE, str(tmp_path))
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    options = ["--attention-backend", selection_name(), "--dtype", "float32", "--enforce-eager"]
    options += ["--max-model-len", "1024", "--block-size", "32"]
    options += ["--kv-cache-memory-bytes", str(CPU_ENGINE["kv_cache_memory_bytes"])]
    with running_server(str(deepseek.path), free_port(), *options) as client:

        def ask(expected):
            count = len(expected.tokens)
            answer = client.completions.create(
                model=str(deepseek.path),
                prompt=expected.prompt,
                max_tokens=count,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            return answer.choices[0].token_ids

        with ThreadPoolExecutor(8) as pool:
            tokens = list(pool.map(ask, deepseek.expected))
    assert tokens == [expected.tokens for expected in deepseek.expected]
    counts = counters.read_folder(tmp_path)
    generated = sum(len(expected.tokens) - 1 for expected in deepseek.expected)
    assert counts["absorbed_decode"].tokens + counts["absorbed_extend"].tokens >= 3 * generated  # in 3 layers
    assert counts["vanilla_prefill"].calls > 0


def test_a_server_under_load(deepseek_path, tmp_path, monkeypatch):
    """`bench load` with vLLM's own generator, which has no tokenizer but the one that `bench load` makes."""
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    engine = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 26}
    check_a_server_under_load(vllm, deepseek_path, selection_name(), engine, tmp_path / "results.json")
