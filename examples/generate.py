#!/usr/bin/env python3
"""Generate with vLLM on mla-backend, offline, and say which backend did the work.

    python examples/generate.py                                   # a small local checkpoint, no GPU needed
    python examples/generate.py deepseek-ai/DeepSeek-V2-Lite      # any MLA checkpoint: a path or a hub name

The last line names the backend that attended and its speed.
"""

from __future__ import annotations

import argparse
import os
import time

from common import count_engine_calls, model_path, report

PROMPTS = (
    "The capital of France is",
    "Multi-head latent attention keeps one short vector per token, so that",
    "When a model reads a long prompt,",
)


def parse_args() -> argparse.Namespace:
    from mla_backend_vllm import selection_name

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="a path or a hub name; default: a small local checkpoint")
    parser.add_argument("--prompt", action="append", help="may be repeated")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument(
        "--attention-backend", default=selection_name(), help="default: %(default)s, this backend"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--dummy", action="store_true", help="random weights: the text then means nothing")
    return parser.parse_args()


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; without a GPU only
    counters_folder = count_engine_calls()
    args = parse_args()

    from vllm import LLM, SamplingParams

    llm = LLM(
        model_path(args.model),
        attention_backend=args.attention_backend,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        tensor_parallel_size=args.tensor_parallel_size,
        load_format="dummy" if args.dummy else "auto",
        enforce_eager=args.model is None,  # compiling takes longer than all that the small model has to do
    )
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=args.model is None)
    start = time.perf_counter()
    outputs = llm.generate(args.prompt or list(PROMPTS), sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    del llm  # its processes say good-bye before the results are printed

    for output in outputs:
        print(f"\nprompt: {output.prompt!r}\ntokens: {list(output.outputs[0].token_ids)}")
        print(f"text:   {output.outputs[0].text!r}")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"\n{report(counters_folder, args.attention_backend, num_tokens, seconds)}")


if __name__ == "__main__":
    main()
