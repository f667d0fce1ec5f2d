"""Scenarios with a real SGLang engine. Each test runs one of them in a process of its own:

python scenarios.py SCENARIO CHECKPOINT RESULT.json [PARAMETERS]

or, which is faster, in a fork of a process that has imported SGLang (tests/support/processes.py).
"""

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import ranks_on_cpu
import renamed  # noqa: F401
import torch
from safetensors.torch import load_file, save_file

from mla_backend import counters

NEW_TOKENS = 32
# The weights from which the backend or SGLang derives others.
UPDATED_WEIGHTS = [
    f"model.layers.1.self_attn.{name}.weight" for name in ("kv_b_proj", "q_proj", "kv_a_proj_with_mqa")
]


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 320), k=length)


def fork_processes() -> None:
    """Let the engine's processes be forks of this one: to import SGLang again takes longer than a scenario.

    Not with a GPU, which a fork cannot use. SGLang spawns them; so it does in `tokens` and in the examples.
    """
    import sglang.srt.entrypoints.engine  # noqa: F401

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda method, force=False: None


def allow_models_without_yarn() -> None:
    """Let SGLang make rotary embeddings without YaRN on a CPU, where its own function refuses them."""
    from sglang.srt.layers.rotary_embedding import factory

    with_yarn = factory.get_rope_cpu

    def get_rope(*arguments):
        *others, _ = arguments
        return with_yarn(*arguments) if arguments[5] else factory.get_rope(*others)

    factory.get_rope_cpu = get_rope


def absorb_with_torch_native() -> None:
    """Let SGLang's backend for any device attend to latents in prefills, too: it cannot expand them."""
    from sglang.srt.models.deepseek_common import attention_backend_handler, attention_forward_methods

    absorbed = attention_forward_methods.AttnForwardMethod.MLA
    attention_backend_handler.AttentionBackendRegistry.register("torch_native", lambda *_: absorbed)


def start(checkpoint: Path, **arguments):
    from sglang.srt.entrypoints.engine import Engine

    defaults = dict(
        model_path=str(checkpoint),
        attention_backend="mla_backend",
        dtype="float32",
        device="cpu",
        max_total_tokens=8192,
        max_running_requests=8,
        mem_fraction_static=0.5,  # far more than the tokens need: other processes may take memory meanwhile
        disable_cuda_graph=True,
        skip_server_warmup=True,
        sleep_on_idle=True,
        log_level="warning",
        random_seed=0,
    )
    return Engine(**{**defaults, **arguments})


def sampling(num_tokens: int = NEW_TOKENS) -> dict:
    return dict(temperature=0, max_new_tokens=num_tokens, ignore_eos=True)


def record(prompts: list[list[int]], outputs: list[dict]) -> list[dict]:
    return [
        dict(
            prompt=p,
            tokens=o["output_ids"],
            cached=o["meta_info"]["cached_tokens"],
            logprobs=[entry[0] for entry in o["meta_info"].get("output_token_logprobs", ())],
        )
        for p, o in zip(prompts, outputs, strict=True)
    ]


def generate(engine, prompts: list[list[int]], **arguments) -> list[dict]:
    # With decode context parallelism, each step waits for a kernel that Triton interprets.
    num_tokens = NEW_TOKENS // 2 if engine.server_args.dcp_size > 1 else NEW_TOKENS
    parameters = dict(sampling_params=sampling(num_tokens), return_logprob=True)
    outputs = engine.generate(input_ids=prompts, **parameters, **arguments)
    return record(prompts, outputs)


def original_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    weights = load_file(checkpoint / "model.safetensors")
    return {name: weights[name] for name in UPDATED_WEIGHTS}


def updated_weights(checkpoint: Path, seed: int) -> dict[str, torch.Tensor]:
    """Weights clearly different from the checkpoint's."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: weight + 0.5 * weight.std() * torch.randn(weight.shape, generator=generator)
        for name, weight in original_weights(checkpoint).items()
    }


def update(engine, checkpoint: Path, seed: int, load_format: str | None) -> None:
    sessions = hasattr(engine, "begin_weight_update")  # from 0.5.23
    if sessions:
        engine.begin_weight_update()
    engine.update_weights_from_tensor(
        list(updated_weights(checkpoint, seed).items()),
        load_format=load_format,
        flush_cache=not sessions,
    )
    if sessions:
        engine.end_weight_update()
    engine.flush_cache()


def update_from_disk(engine, checkpoint: Path, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        updated = Path(folder) / "model"
        shutil.copytree(checkpoint, updated)
        weights = load_file(checkpoint / "model.safetensors") | updated_weights(checkpoint, seed)
        save_file(weights, updated / "model.safetensors")
        success, message, *_ = engine.update_weights_from_disk(str(updated))
        assert success, message
    engine.flush_cache()


def counts_so_far() -> dict[str, counters.Count]:
    return counters.read_folder(os.environ[counters.ENVIRONMENT_VARIABLE])


def metrics() -> dict[str, int]:
    """Tokens by path, kernel and cache format, as SGLang's server shows them under /metrics."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    ours = [sample for sample in samples if sample.name == "mla_backend_tokens_total"]
    return {" ".join(s.labels[n] for n in ("path", "kernel", "cache_format")): int(s.value) for s in ours}


def tokens(checkpoint: Path) -> dict:
    """Page size 1: one batch with cached prefixes of all sizes, then weight updates."""
    engine = start(checkpoint, enable_metrics=True)
    try:
        first = [prompt(1, 7), prompt(2, 90), prompt(3, 300)]
        # In one batch: one new token; few; many; more than fit a chunk with their prefix; and no prefix.
        second = [
            first[0],
            first[2] + prompt(4, 5),
            first[1] + prompt(5, 240),
            first[2] + prompt(6, 240),
            prompt(7, 40),
        ]
        result = dict(first=generate(engine, first))
        before = counts_so_far()
        result["second"] = generate(engine, second)
        result["counts"] = {
            path: [now - then for now, then in zip(count, before[path], strict=True)]
            for path, count in counts_so_far().items()
        }
        result["totals"], result["metrics"] = counts_so_far(), metrics()
        update(engine, checkpoint, seed=1, load_format=None)
        result["updated"] = generate(engine, first)
        update(engine, checkpoint, seed=2, load_format="direct")
        result["updated_directly"] = generate(engine, first)
        update_from_disk(engine, checkpoint, seed=3)
        result["updated_from_disk"] = generate(engine, first)
        return result
    finally:
        engine.shutdown()


def mixed(checkpoint: Path) -> dict:
    """Page size 64: chunks of prompts in the same batches as decode steps of other requests."""
    fork_processes()
    engine = start(
        checkpoint,
        page_size=64,
        chunked_prefill_size=128,
        enable_mixed_chunk=True,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
    )
    # Whole chunks, which have more new tokens than the policy absorbs.
    prompts = [prompt(11, 128), prompt(12, 256), prompt(15, 640), prompt(14, 384)]

    async def all_requests() -> list[dict]:
        others = None
        stream = await engine.async_generate(input_ids=prompts[0], sampling_params=sampling(80), stream=True)
        async for output in stream:
            first = output
            # The first request decodes: from now on, batches mix its decode steps with chunks of the others.
            others = others or asyncio.gather(
                *(engine.async_generate(input_ids=p, sampling_params=sampling()) for p in prompts[1:])
            )
        return [first, *await others]

    try:
        return dict(requests=record(prompts, engine.loop.run_until_complete(all_requests())))
    finally:
        engine.shutdown()


def deterministic(checkpoint: Path) -> dict:
    """--enable-deterministic-inference: a request alone, among others, and with a cached prefix."""
    fork_processes()
    engine = start(checkpoint, enable_deterministic_inference=True, page_size=16, chunked_prefill_size=256)
    try:
        tracked, others = prompt(21, 150), [prompt(22, 33), prompt(23, 300)]
        alone = generate(engine, [tracked])
        return dict(
            alone=alone, among=generate(engine, [*others, tracked]), cached=generate(engine, [tracked])
        )
    finally:
        engine.shutdown()


def briefly(checkpoint: Path, settings: str) -> dict:
    """Two prompts, and then longer ones that begin with them.

    Args:
        settings: JSON of further arguments of the engine.
    """
    fork_processes()
    allow_models_without_yarn()
    arguments = json.loads(settings)
    if "dcp_size" in arguments:
        ranks_on_cpu.allow_decode_context_parallelism()
    if arguments.get("attention_backend") == "torch_native":
        absorb_with_torch_native()
    engine = start(checkpoint, **arguments)
    try:
        first, second = two_batches()
        return dict(requests=generate(engine, first) + generate(engine, second))
    finally:
        engine.shutdown()


def continued(checkpoint: Path, prompts: str) -> dict:
    """Two batches of the same prompts, the longest of which has two chunks; then they are in the cache.

    Args:
        prompts: JSON of the prompts, each a list of tokens.
    """
    from tests.support.small_models import NEW_TOKENS, know_config

    fork_processes()
    allow_models_without_yarn()
    know_config(json.loads((checkpoint / "config.json").read_text())["model_type"])
    engine = start(checkpoint, chunked_prefill_size=256, skip_tokenizer_init=True, page_size=8)
    try:
        batches = [
            engine.generate(input_ids=json.loads(prompts), sampling_params=sampling(NEW_TOKENS))
            for _ in range(2)
        ]
        return dict(batches=[[output["output_ids"] for output in outputs] for outputs in batches])
    finally:
        engine.shutdown()


def interrupted(checkpoint: Path) -> dict:
    """Requests next to others that are aborted while they run; then requests whose prompts have logprobs."""
    fork_processes()
    engine = start(checkpoint, page_size=8, chunked_prefill_size=128)
    kept, aborted = [prompt(61, 20), prompt(62, 150)], [prompt(63, 30), prompt(64, 140), prompt(65, 300)]

    async def stream(name: str, tokens: list[int], length: int) -> dict:
        outputs = await engine.async_generate(
            input_ids=tokens, sampling_params=sampling(length), stream=True, rid=name
        )
        async for output in outputs:
            last = output
            if name.startswith("aborted"):
                engine.tokenizer_manager.abort_request(rid=name)
        return last

    async def all_requests() -> list[dict]:
        requests = [stream(f"kept {i}", p, NEW_TOKENS) for i, p in enumerate(kept)]
        requests += [stream(f"aborted {i}", p, 2000) for i, p in enumerate(aborted)]
        return await asyncio.gather(*requests)

    try:
        outputs = engine.loop.run_until_complete(all_requests())
        lengths = [len(output["output_ids"]) for output in outputs[len(kept) :]]
        # Their prompts are in the cache, which aborted requests shared.
        again = generate(engine, [p + prompt(66, 10) for p in kept + aborted])
        of_prompts = engine.generate(
            input_ids=kept, sampling_params=sampling(1), return_logprob=True, logprob_start_len=0
        )
        entries = [output["meta_info"]["input_token_logprobs"] for output in of_prompts]
        return dict(
            requests=record(kept, outputs[: len(kept)]) + again,
            aborted=lengths,
            prompts=[
                dict(tokens=p, logprobs=[logprob for logprob, *_ in each])
                for p, each in zip(kept, entries, strict=True)
            ],
        )
    finally:
        engine.shutdown()


def two_batches() -> tuple[list[list[int]], list[list[int]]]:
    """Two prompts, and longer ones that begin with them."""
    first = [prompt(31, 20), prompt(32, 150)]
    return first, [first[1] + prompt(33, 5), first[0] + prompt(34, 200)]


def save_sharded_state(checkpoint: Path, folder: str) -> None:
    """Save what an engine has loaded, and what else an engine needs to load it again."""
    fork_processes()
    engine = start(checkpoint)
    try:
        engine.save_sharded_model(path=folder, pattern=None, max_size=None)
    finally:
        engine.shutdown()
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)


def data_parallel(checkpoint: Path) -> dict:
    """--enable-dp-attention: three requests on two ranks; then one request, next to an idle rank."""
    fork_processes()
    ranks_on_cpu.allow_data_parallel_attention()
    engine = start(checkpoint, tp_size=2, dp_size=2, enable_dp_attention=True, page_size=8)
    try:
        together, alone = [prompt(46, 20), prompt(42, 150), prompt(43, 7)], [prompt(44, 90)]
        return dict(requests=generate(engine, together) + generate(engine, alone))
    finally:
        engine.shutdown()


def server_of_pair(checkpoint: Path, role: str, meeting_place: str, settings: str) -> dict:
    """A prefill or a decode server. Both get the requests of `briefly`, or on a GPU those of `on_gpu`.

    Args:
        role: "prefill" or "decode".
        meeting_place: a folder in which the servers wait for each other.
        settings: JSON of further arguments of the engine; those of one server are under its role.
    """
    arguments = dict(disaggregation_mode=role) | json.loads(settings)
    arguments |= {r: arguments.pop(r, {}) for r in ("prefill", "decode")}[role]
    on_cpu = arguments.get("device") != "cuda"
    if on_cpu:
        fork_processes()
        ranks_on_cpu.allow_separate_servers()
    if on_cpu and arguments.get("dcp_size", 1) > 1:
        ranks_on_cpu.allow_decode_context_parallelism()
    engine = start(checkpoint, **(arguments if on_cpu else ON_GPU | arguments))
    where = dict(bootstrap_host="127.0.0.1", bootstrap_port=arguments["disaggregation_bootstrap_port"])
    rooms = itertools.count(1)

    def meeting(size: int) -> dict:
        same = {name: [value] * size for name, value in where.items()}
        return same | dict(bootstrap_room=list(itertools.islice(rooms, size)))

    finished = Path(meeting_place) / "finished"
    try:
        (Path(meeting_place) / role).touch()
        wait_for(Path(meeting_place) / {"prefill": "decode", "decode": "prefill"}[role])
        if on_cpu:
            batches = [generate(engine, batch, **meeting(len(batch))) for batch in two_batches()]
            result = dict(requests=sum(batches, []))
        else:
            outputs = [generate_with_gaps(engine, batch, **meeting(len(batch))) for batch in batches_on_gpu()]
            result = with_gaps(outputs) if role == "decode" else {}
        if role == "prefill":
            wait_for(finished)  # the decode server gives up requests whose prefill server is gone
        return result
    finally:
        if role == "decode":
            finished.touch()
        engine.shutdown()


def wait_for(file: Path, seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < end, f"waited in vain for {file.name}"
        time.sleep(0.1)


# A cache of a fixed size, whatever else is in memory: several of these engines can share a GPU.
# Few sizes are captured, because each takes time: those of `batches_on_gpu`, but 8 for the batch of 7.
# A test that is interrupted shows the end of the log: which part of the start, or which batch.
ON_GPU = dict(
    device="cuda",
    dtype="float16",
    max_running_requests=64,
    disable_cuda_graph=False,
    cuda_graph_bs_decode=[1, 8, 16, 64],
    cuda_graph_bs_prefill=[64],
    max_total_tokens=1 << 17,
    mem_fraction_static=0.95,
    context_length=8448,
    log_level="info",
)


def batches_on_gpu() -> list[list[list[int]]]:
    """Batches of 1, 7, 16 and 64 prompts of 1 to 8,192 tokens; then the last again, in the prefix cache."""
    lengths = [8192, 3500, 1, 2, 63, 64, 65, *random.Random(0).choices(range(1, 1501), k=57)]
    prompts = [prompt(i, length) for i, length in enumerate(lengths)]
    return [prompts[:size] for size in (1, 7, 16, 64, 64)]


def generate_with_gaps(engine, prompts: list[list[int]], **arguments) -> list[dict]:
    parameters = dict(sampling_params=sampling(), return_logprob=True, top_logprobs_num=2)
    return engine.generate(input_ids=prompts, **parameters, **arguments)


def with_gaps(batches: list[list[dict]]) -> dict:
    """Of each output: its tokens, their log-probabilities, and by how much the best two differ."""
    sequences, accept_lengths = [], []
    for outputs in batches:
        sequences.append([])
        for output in outputs:
            meta = output["meta_info"]
            accept_lengths.append(meta.get("spec_accept_length", 1))
            best = [[entry[0] for entry in pair] for pair in meta["output_top_logprobs"]]
            chosen = [entry[0] for entry in meta["output_token_logprobs"]]
            sequences[-1].append((output["output_ids"], chosen, [first - second for first, second in best]))
    return dict(batches=sequences, accept_lengths=accept_lengths)


def on_gpu(checkpoint: Path, settings: str) -> dict:
    """The batches of `batches_on_gpu`.

    Args:
        settings: JSON of further arguments of the engine, e.g. another backend or speculation.
    """
    arguments = json.loads(settings)
    engine = start(checkpoint, **(ON_GPU | arguments))
    adapters = [*arguments.get("lora_paths", {})]

    def adapted(size: int) -> dict:
        return dict(lora_path=adapters * size) if adapters else {}

    try:
        return with_gaps([generate_with_gaps(engine, p, **adapted(len(p))) for p in batches_on_gpu()])
    finally:
        engine.shutdown()


def released(checkpoint: Path, settings: str) -> dict:
    """Batches; again, when the engine has released its memory and taken it back; and the free memory.

    If the host does not keep the weights, they are loaded again, as from a trainer.

    Args:
        settings: JSON of further arguments of the engine.
    """
    arguments = ON_GPU | dict(enable_memory_saver=True, page_size=64) | json.loads(settings)
    engine = start(checkpoint, **arguments)
    free, outputs = [], []

    def measure():
        free.append(torch.cuda.mem_get_info()[0])

    def generate_all():
        outputs.extend(generate_with_gaps(engine, batch) for batch in batches_on_gpu()[1:4])

    try:
        generate_all()
        measure()
        engine.release_memory_occupation()
        measure()
        engine.resume_memory_occupation(tags=["weights"])
        if not arguments.get("enable_weights_cpu_backup"):
            success, message, *_ = engine.update_weights_from_disk(str(checkpoint))
            assert success, message
        engine.resume_memory_occupation(tags=["kv_cache", "cuda_graph"])
        measure()
        generate_all()
        return with_gaps(outputs) | dict(free=free)
    finally:
        engine.shutdown()


def hierarchical(checkpoint: Path, settings: str) -> dict:
    """A prompt; again, on its cached prefix; and again, when others have taken its place on the GPU.

    Args:
        settings: JSON of further arguments of the engine.
    """
    arguments = ON_GPU | dict(enable_hierarchical_cache=True, page_size=64, max_total_tokens=4096)
    engine = start(checkpoint, **(arguments | json.loads(settings)))
    tracked, others = prompt(51, 1500), [prompt(seed, 1500) for seed in (52, 53, 54)]
    try:
        outputs = [generate_with_gaps(engine, [p]) for p in (tracked, tracked, *others, tracked)]
        places = [output["meta_info"].get("cached_tokens_details") for (output,) in outputs]
        return with_gaps(outputs) | dict(places=places)
    finally:
        engine.shutdown()


def run(scenario: str, checkpoint_path: str, result_path: str, *parameters: str) -> None:
    scenarios = (tokens, mixed, deterministic, briefly, interrupted, save_sharded_state, data_parallel)
    scenarios += (server_of_pair, continued)
    on_gpus = (on_gpu, released, hierarchical)
    outcome = {s.__name__: s for s in scenarios + on_gpus}[scenario](Path(checkpoint_path), *parameters)
    Path(result_path).write_text(json.dumps(outcome))


if __name__ == "__main__":
    run(*sys.argv[1:])
