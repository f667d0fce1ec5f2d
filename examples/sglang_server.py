#!/usr/bin/env python3
"""Launch an SGLang server on mla-backend, and ask it something, several clients at once.

    python examples/sglang_server.py deepseek-ai/DeepSeek-V2-Lite
    python examples/sglang_server.py deepseek-ai/DeepSeek-V2-Lite --tp-size 2

What it starts is `python -m sglang.launch_server --model-path MODEL --attention-backend mla_backend
--page-size 64`; options that are not its own are handed to SGLang. Without a model it takes the small one of
generate.py: if that does not say what it learnt, the exit status is 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from common import check_continuations, count_engine_calls, first_beginnings, model_path, report

STARTUP_SECONDS = 600


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="a path or a hub name; default: a small local model")
    parser.add_argument(
        "--prompt", help="each client lengthens it; default: the beginnings of what the small model knows"
    )
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--attention-backend", default="mla_backend", help="default: %(default)s")
    parser.add_argument("--page-size", type=int, default=64, help="default: %(default)s")
    args, of_sglang = parser.parse_known_args()
    args.of_sglang = of_sglang
    return args


@contextmanager
def running_server(args: argparse.Namespace) -> Iterator[str]:
    """Starts the server, and yields its URL when it answers."""
    from sglang.srt.utils import kill_process_tree
    from sglang.utils import wait_for_http_ready

    url = f"http://127.0.0.1:{args.port}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model_path(args.model)]
    command += ["--attention-backend", args.attention_backend, "--page-size", str(args.page_size)]
    server = subprocess.Popen([*command, "--port", str(args.port), *args.of_sglang])
    try:
        wait_for_http_ready(f"{url}/health", timeout=STARTUP_SECONDS, process=server)
        yield url
    finally:
        kill_process_tree(server.pid)


def main() -> int:
    args = parse_args()
    counters_folder = count_engine_calls()

    import requests

    sampling = {"temperature": 0, "max_new_tokens": args.max_tokens}
    prompts = first_beginnings(args.clients)
    if args.prompt:  # different lengths, so that the batch is not uniform
        prompts = [args.prompt + " please" * client for client in range(args.clients)]
    with running_server(args) as url:

        def ask(prompt: str) -> dict:
            answer = requests.post(f"{url}/generate", json={"text": prompt, "sampling_params": sampling})
            answer.raise_for_status()
            return answer.json()

        start = time.perf_counter()
        with ThreadPoolExecutor(args.clients) as pool:
            answers = list(pool.map(ask, prompts))
        seconds = time.perf_counter() - start
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"prompt: {prompt!r}\nanswer: {answer['text']!r}\ntokens: {answer['output_ids']}")
    status = 0
    if args.model is None:
        cut = [answer["meta_info"]["finish_reason"]["type"] == "length" for answer in answers]
        status = check_continuations(prompts, [answer["text"] for answer in answers], cut)
    num_tokens = sum(len(answer["output_ids"]) for answer in answers)
    print(f"\n{report(counters_folder, args.attention_backend, num_tokens, seconds)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
