#!/usr/bin/env python3
"""A busy engine for minutes: random arrivals, lengths, shared prefixes and aborts.

    python tools/soak.py MODEL --seconds 600 --dtype float16

It fails if a log-probability is not finite, if a page of the cache stays taken at the end, or if a request
that ran among others gives other tokens than alone (near-ties aside, except in fp32).
"""

import argparse
import math
import os
import random
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams

from mla_backend import counters
from mla_backend_vllm import selection_name

MAX_MODEL_LEN = 2048
MAX_RUNNING = 64
ABORTED_SHARE = 0.1
REPLAYED = 32


def check(passed: bool, what: str) -> None:
    """Ends the run with exit code 1 if a check failed; `assert` would check nothing under ``python -O``."""
    if not passed:
        sys.exit(f"FAILED: {what}")


class Soak:
    """Feeds the engine, and keeps what it answered."""

    def __init__(self, llm: LLM, vocabulary: int, seed: int):
        self.engine = llm.llm_engine
        self.random = random.Random(seed)
        self.vocabulary = vocabulary
        self.prefixes = [self.tokens(length) for length in (16, 100, 700)]
        self.running: dict[str, list[int]] = {}
        self.finished: list[tuple[list[int], list[int], list[float]]] = []
        self.num_aborted = 0

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3, self.vocabulary) for _ in range(count)]

    def submit(self, prompt: list[int], num_tokens: int) -> str:
        name = f"{len(self.finished)}-{self.num_aborted}-{len(self.running)}-{time.monotonic_ns()}"
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=2)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        self.running[name] = prompt
        return name

    def arrive(self) -> None:
        prefix = self.random.choice([[], *self.prefixes])
        prompt = prefix + self.tokens(round(2 ** self.random.uniform(0, 10)))
        self.submit(prompt, self.random.randint(1, 64))

    def abort(self) -> None:
        name = self.random.choice(list(self.running))
        self.engine.abort_request([name])
        del self.running[name]
        self.num_aborted += 1

    def step(self) -> None:
        for output in self.engine.step():
            if not output.finished or output.request_id not in self.running:
                continue
            completion = output.outputs[0]
            gaps = []
            for token, step in zip(completion.token_ids, completion.logprobs, strict=True):
                best = sorted((entry.logprob for entry in step.values()), reverse=True)
                check(all(math.isfinite(value) and value <= 0 for value in best), f"token {token}: {best}")
                gaps.append(best[0] - best[1])
            prompt = self.running.pop(output.request_id)
            self.finished.append((prompt, list(completion.token_ids), gaps))

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            while len(self.running) < MAX_RUNNING and self.random.random() < 0.4:
                self.arrive()
            if self.running and self.random.random() < ABORTED_SHARE / 16:
                self.abort()
            self.step()
        self.drain()

    def replay_alone(self, near_tie: float) -> int:
        """Run some finished requests again, one at a time; how many differed, after near-ties only."""
        different = 0
        for prompt, tokens, gaps in self.random.sample(self.finished, min(REPLAYED, len(self.finished))):
            self.submit(prompt, len(tokens))
            self.drain()
            _, again, _ = self.finished.pop()
            step = next(
                (i for i, pair in enumerate(zip(tokens, again, strict=True)) if pair[0] != pair[1]), None
            )
            if step is not None:
                different += 1
                check(gaps[step] <= near_tie, f"alone, token {step} differs, with a gap of {gaps[step]} nats")
        return different


def free_pages(llm: LLM) -> int:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--enforce-eager", action="store_true")
    args = parser.parse_args()

    llm = LLM(
        args.model,
        attention_backend=selection_name(),
        dtype=args.dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_RUNNING,
        max_num_batched_tokens=512,
        enforce_eager=args.enforce_eager,
        distributed_executor_backend="uni",
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,
    )
    free_before = free_pages(llm)
    soak = Soak(llm, llm.get_tokenizer().vocab_size, args.seed)
    soak.run(args.seconds)
    free_after = free_pages(llm)
    check(free_after == free_before, f"{free_before - free_after} pages of the cache were not given back")
    different = soak.replay_alone(near_tie=0.0 if args.dtype == "float32" else 0.05)
    work = {path: count.tokens for path, count in counters.snapshot().items()}
    for path in ("absorbed_decode", "absorbed_extend", "vanilla_prefill"):
        check(work[path] > 0, f"no token took the path {path}: {work}")
    print(f"{len(soak.finished)} requests finished, {soak.num_aborted} aborted, no page lost")
    print(f"replayed alone: {min(REPLAYED, len(soak.finished))}, {different} differ after a near-tie; {work}")


if __name__ == "__main__":
    main()
