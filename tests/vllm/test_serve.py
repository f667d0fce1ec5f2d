"""A server whose engine runs in spawned processes gives concurrent clients the right tokens."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from mla_backend import counters
from mla_backend_vllm import selection_name
from tests.support.ports import free_port
from tests.support.vllm_workload import CPU_ENGINE

pytestmark = pytest.mark.newest


def test_eight_concurrent_clients(deepseek, tmp_path, monkeypatch):
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
