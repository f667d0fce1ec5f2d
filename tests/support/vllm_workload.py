"""Prompts of all lengths, and what an engine generates from them; used in tests' own and other processes."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import random

from tests.support.greedy import Sequence

VOCABULARY = 448  # at most what the checkpoint's tokenizer has
NEW_TOKENS = 32
BATCHES = (1, 7, 16, 64)
CPU_ENGINE = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "enforce_eager": True}
CPU_ENGINE |= {"kv_cache_memory_bytes": 1 << 27}  # 128 MiB: vLLM sets all of it to zero at each start
"""Options of an engine whose tokens are compared with those of HuggingFace's model on a CPU."""
GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
"""Options of an engine that captures decode steps."""


UPDATES = {
    # TRL, OpenRLHF and verl
    "load_weights": lambda llm, path, weights: llm.apply_model(lambda m: m.load_weights(weights.items())),
    "copied into parameters": lambda llm, path, weights: llm.collective_rpc(
        "reload_weights", kwargs={"weights_iterator": weights.items(), "is_checkpoint_format": False}
    ),
    "from another checkpoint": lambda llm, path, weights: llm.collective_rpc(
        "reload_weights", kwargs={"weights_path": str(path)}
    ),
}
"""How trainers give a running engine other weights: functions of it, of a checkpoint and its tensors."""


def prompts() -> list[list[int]]:
    """Of 1 to 1,500 tokens, one of 3,500 and one of 8,192; some repeat themselves, for the ngram proposer."""
    generator = random.Random(0)
    lengths = [8192, 3500, 1, 2, 63, 64, 65, *(generator.randint(1, 1500) for _ in range(max(BATCHES) - 7))]
    made = []
    for i, length in enumerate(lengths):
        pattern = [generator.randrange(3, VOCABULARY) for _ in range(length if i % 2 else 16)]
        made.append((pattern * (length // len(pattern) + 1))[:length])
    return made


def generate(llm, some_prompts: list[list[int]], extra: list[dict] | None = None) -> list[Sequence]:
    """Greedy texts; ``extra`` has arguments of each prompt for vLLM's connectors.

    The end of a text is ignored, not forbidden (``min_tokens``): with several drafts, vLLM 0.26 allows it a
    few tokens too early.
    """
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            logprobs=2,
            extra_args=extra[i] if extra else None,
        )
        for i in range(len(some_prompts))
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in some_prompts], sampling, use_tqdm=False)
    sequences = []
    for output in outputs:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        best_two = [
            sorted((p.logprob for p in step.values()), reverse=True)[:2] for step in completion.logprobs
        ]
        chosen = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
        sequences.append(Sequence(tokens, chosen, [a - b for a, b in best_two]))
    return sequences


def sleep_and_wake(llm, level: int) -> None:
    """Let an engine with ``enable_sleep_mode`` sleep and wake up, and others use its memory meanwhile.

    Args:
        level: 1 keeps the weights in the host's memory; 2 discards them, and they are loaded again.
    """
    import torch

    llm.sleep(level=level)
    # Newly mapped memory is often zero by chance; memory that others have used is not.
    garbage = torch.full((1 << 30,), float("nan"), dtype=torch.float16, device="cuda")
    del garbage
    torch.cuda.empty_cache()
    llm.wake_up(tags=["weights"])
    if level == 2:
        llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])


def around_sleep(
    model: str, engine: dict, some_prompts: list[list[int]]
) -> tuple[list[Sequence], dict[str, list[Sequence]]]:
    """In a new process: what an engine generates at first, and after sleeps of each level."""
    from vllm import LLM

    llm = LLM(model, enable_sleep_mode=True, **engine)
    before, behind = generate(llm, some_prompts), {}
    for i, level in enumerate((1, 2, 1)):
        sleep_and_wake(llm, level)
        llm.reset_prefix_cache()
        behind[f"sleep {i}, level {level}"] = generate(llm, some_prompts)
    return before, behind


def together_and_alone(
    model: str, engine: dict, some_prompts: list[list[int]], environment: dict[str, str]
) -> tuple[list[Sequence], list[Sequence]]:
    """In a new process: what an engine generates for prompts in one batch, and for each of them alone."""
    os.environ |= environment
    from vllm import LLM

    llm = LLM(model, **engine)
    together = generate(llm, some_prompts)
    return together, [sequence for prompt in some_prompts for sequence in generate(llm, [prompt])]


def prefix_hits(model: str, engine: dict) -> tuple[list[Sequence], list[Sequence], list[int]]:
    """In a new process: what an engine generates from prefixes on the GPU, and from those on the host.

    Also returns how often regular prefill had run before, between and after these.
    """
    from vllm import LLM

    from mla_backend import counters

    llm = LLM(model, **engine)
    some = prompts()[6:18]  # none is a whole number of pages

    def one_by_one() -> list[Sequence]:
        return [sequence for prompt in some for sequence in generate(llm, [prompt])]

    calls = [counters.snapshot()["vanilla_prefill"].calls]
    one_by_one()
    on_the_gpu = one_by_one()
    generate(llm, prompts()[20:21])  # in these steps the last pages reach the host
    calls.append(counters.snapshot()["vanilla_prefill"].calls)
    assert llm.reset_prefix_cache()
    from_the_host = one_by_one()
    return on_the_gpu, from_the_host, [*calls, counters.snapshot()["vanilla_prefill"].calls]


@functools.cache
def freeze_for_good() -> None:
    """Before the first engine of this process: let garbage collections pass over what is here now.

    From the start of an engine to its end, several collections look at all objects, most of which belong to
    imported modules. vLLM freezes them too, but unfreezes everything at the end: from now on it does neither.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or else nanobind reports what is left as leaks
    gc.freeze = gc.unfreeze = lambda: None


def clean_up() -> None:
    """After an engine of this process: what would be in the way of the next one."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    ensure_kv_transfer_shutdown()  # else the next engine would use this one's connector
    gc.collect()
    cleanup_dist_env_and_memory()
    type(current_platform)._global_graph_pool = None  # else the next engine would capture its graphs into it


def options(**changes) -> dict:
    engine = {"dtype": "float16", "max_model_len": 8448, "max_num_seqs": max(BATCHES), "block_size": 64}
    # A cache of a fixed size, so that several of these engines can share a GPU (pytest -n).
    return engine | {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30} | changes
