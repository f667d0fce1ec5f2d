#!/usr/bin/env python3
"""Generate with vLLM on mla-backend, offline, and say which backend did the work.

    python examples/generate.py                                   # a small local model, no GPU needed
    python examples/generate.py deepseek-ai/DeepSeek-V2-Lite      # any MLA checkpoint: a path or a hub name

The small model is trained at its first use, in some seconds. It knows a dozen sentences by heart: if it says
anything else, the attention is wrong, and the exit status is 1. The last line names the backend that attended
and its speed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from common import check_continuations, count_engine_calls, first_beginnings, model_path, report


def parse_args() -> argparse.Namespace:
    from mla_backend_vllm import selection_name

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="a path or a hub name; default: a small local model")
    parser.add_argument(
        "--prompt",
        action="append",
        help="may be repeated; default: the beginnings of what the small model knows",
    )
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument(
        "--attention-backend", default=selection_name(), help="default: %(default)s, this backend"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--dummy", action="store_true", help="random weights: the text then means nothing")
    return parser.parse_args()


def main() -> int:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; without a GPU only
    counters_folder = count_engine_calls()
    args = parse_args()
    model = model_path(args.model)

    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        attention_backend=args.attention_backend,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        tensor_parallel_size=args.tensor_parallel_size,
        load_format="dummy" if args.dummy else "auto",
        enforce_eager=args.model is None,  # compiling takes longer than all that the small model has to do
    )
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    prompts = args.prompt or first_beginnings(3)
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    del llm  # its processes say good-bye before the results are printed

    answers = [output.outputs[0] for output in outputs]
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"\nprompt: {prompt!r}\ntext:   {answer.text!r}\ntokens: {list(answer.token_ids)}")
    status = 0
    if args.model is None and not args.dummy:
        cut = [answer.finish_reason == "length" for answer in answers]
        status = check_continuations(prompts, [answer.text for answer in answers], cut)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    print(f"\n{report(counters_folder, args.attention_backend, num_tokens, seconds)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
