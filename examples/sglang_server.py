#!/usr/bin/env python3
"""Launch an SGLang server on mla-backend, and ask it something, several clients at once.

    python examples/sglang_server.py deepseek-ai/DeepSeek-V2-Lite
    python examples/sglang_server.py deepseek-ai/DeepSeek-V2-Lite --page-size 64 --tp-size 2

What it starts is `python -m sglang.launch_server --model-path MODEL --attention-backend mla_backend`; options
that are not its own are handed to SGLang.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from common import count_engine_calls, model_path, report

PROMPT = "user: what does a decode step read? assistant:"
STARTUP_SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="a path or a hub name; default: a small local checkpoint")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--attention-backend", default="mla_backend", help="default: %(default)s")
    args, sglang_options = parser.parse_known_args()
    counters_folder = count_engine_calls()

    import requests
    from sglang.srt.utils import kill_process_tree
    from sglang.utils import wait_for_http_ready

    url = f"http://127.0.0.1:{args.port}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model_path(args.model)]
    command += ["--attention-backend", args.attention_backend, "--port", str(args.port), *sglang_options]
    sampling = {"temperature": 0, "max_new_tokens": args.max_tokens, "ignore_eos": args.model is None}
    server = subprocess.Popen(command)
    try:
        wait_for_http_ready(f"{url}/health", timeout=STARTUP_SECONDS, process=server)

        def ask(client: int) -> dict:
            text = args.prompt + " please" * client  # different lengths, so that the batch is not uniform
            answer = requests.post(f"{url}/generate", json={"text": text, "sampling_params": sampling})
            answer.raise_for_status()
            return answer.json()

        start = time.perf_counter()
        with ThreadPoolExecutor(args.clients) as pool:
            answers = list(pool.map(ask, range(args.clients)))
        seconds = time.perf_counter() - start
    finally:
        kill_process_tree(server.pid)
    for answer in answers:
        print(f"tokens: {answer['output_ids']}")
    print(f"\nprompt: {args.prompt!r}\nanswer: {answers[0]['text']!r} ({args.clients} clients)")
    num_tokens = sum(len(answer["output_ids"]) for answer in answers)
    print(report(counters_folder, args.attention_backend, num_tokens, seconds))


if __name__ == "__main__":
    main()
