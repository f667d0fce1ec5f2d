#!/usr/bin/env python3
"""Generate with SGLang's engine on mla-backend, offline, and say which backend did the work.

python examples/sglang_offline.py deepseek-ai/DeepSeek-V2-Lite     # any MLA checkpoint: a path or a hub name
python examples/sglang_offline.py                                  # a small local model

The small model is the one of generate.py: if it does not say what it learnt, the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import time

from common import check_continuations, count_engine_calls, first_beginnings, model_path, report


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="a path or a hub name; default: a small local model")
    parser.add_argument(
        "--prompt",
        action="append",
        help="may be repeated; default: the beginnings of what the small model knows",
    )
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--attention-backend", default="mla_backend", help="default: %(default)s")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context-length", type=int, default=4096)
    parser.add_argument("--max-total-tokens", type=int, help="size of the KV cache; default: SGLang's choice")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--dummy", action="store_true", help="random weights: the text then means nothing")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    counters_folder = count_engine_calls()
    model = model_path(args.model)

    import sglang

    engine = sglang.Engine(
        model_path=model,
        attention_backend=args.attention_backend,
        page_size=args.page_size,
        dtype=args.dtype,
        context_length=args.context_length,
        max_total_tokens=args.max_total_tokens,
        tp_size=args.tp_size,
        load_format="dummy" if args.dummy else "auto",
        log_level="warning",
    )
    sampling = {"temperature": 0, "max_new_tokens": args.max_tokens}
    prompts = args.prompt or first_beginnings(3)
    start = time.perf_counter()
    outputs = engine.generate(prompts, sampling)
    seconds = time.perf_counter() - start
    engine.shutdown()

    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\nprompt: {prompt!r}\ntext:   {output['text']!r}\ntokens: {output['output_ids']}")
    status = 0
    if args.model is None and not args.dummy:
        cut = [output["meta_info"]["finish_reason"]["type"] == "length" for output in outputs]
        status = check_continuations(prompts, [output["text"] for output in outputs], cut)
    num_tokens = sum(len(output["output_ids"]) for output in outputs)
    print(f"\n{report(counters_folder, args.attention_backend, num_tokens, seconds)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
