"""On a GPU: tokens against a stock backend, with and without CUDA graphs; decode steps that never wait."""

import functools
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from make_checkpoint import TOKENIZER_TEXT, make_checkpoint, make_tokenizer
from mla_backend import MLADecoder, counters, torch_attention
from mla_backend.batch import WHOLE
from mla_backend.cache_format import cache_format
from mla_backend.kernels import head_product
from mla_backend.models import FAMILIES
from mla_backend_vllm import selection_name
from tests.support.block_fp8 import block_fp8_checkpoint
from tests.support.greedy import NEAR_TIE, Sequence, assert_equal_up_to_near_ties, mean_deviation
from tests.support.mistral import in_mistrals_class
from tests.support.modelopt import modelopt_checkpoint
from tests.support.small_models import know_config, make_small_checkpoint
from tests.support.vllm_rank_pair import generate_on_ranks
from tests.support.vllm_workload import (
    BATCHES,
    GRAPHS,
    UPDATES,
    generate,
    options,
    prefix_hits,
    prompts,
    sleep_and_wake,
    together_and_alone,
)

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

NAME = selection_name()
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MTP = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": NAME}
EXPERTS = {"enable_expert_parallel": True}
# The test adds the model: the same that is served.
DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 2, "attention_backend": NAME}


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory):
    """A function that makes a checkpoint of an architecture, with more arguments, without routed experts.

    With routed experts, rounding can select another expert at a near-tie, which moves logits by 0.3.
    """

    @functools.cache
    def path(architecture, *more):
        folder = str(tmp_path_factory.mktemp("dense"))
        arguments = ("--architecture", architecture, "--experts", "0", "--context-length", "16384")
        return make_checkpoint(folder, *arguments, *more)

    return path


def stock_backend():
    return "FLASH_ATTN_MLA" if torch.cuda.get_device_capability()[0] == 9 else "TRITON_MLA"


@pytest.fixture(scope="module")
def stock_tokens():
    """A function from checkpoint and dtype to a stock backend's tokens for each batch size, run eagerly."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    @functools.cache
    def tokens(path, dtype):
        before = counters.snapshot()
        # No chunks: vLLM 0.26 can lose the context of a chunked prompt (see metadata.merge_all_context).
        whole_prompts = options(enforce_eager=True, dtype=dtype, max_num_batched_tokens=1 << 16)
        llm = LLM(str(path), attention_backend=stock_backend(), **whole_prompts)
        made = {batch: generate(llm, prompts()[:batch]) for batch in BATCHES}
        assert counters.snapshot() == before
        del llm
        cleanup_dist_env_and_memory()
        return made

    return tokens


@pytest.mark.parametrize(
    "changes",
    [
        GRAPHS,
        GRAPHS | {"block_size": 16},
        {"enforce_eager": True, "max_num_batched_tokens": 1024},
        GRAPHS | {"dtype": "bfloat16"},
        {"enforce_eager": False},
        GRAPHS | {"speculative_config": MTP},
        GRAPHS | {"speculative_config": MTP | {"num_speculative_tokens": 3}},
        GRAPHS | {"speculative_config": NGRAM},
        GRAPHS | {"dtype": "bfloat16", "speculative_config": NGRAM},
        GRAPHS | {"speculative_config": DRAFT_MODEL},
    ],
    ids=[
        "graphs",
        "page 16",
        "eager, chunks of 1024",
        "bf16",
        "compiled",
        "mtp",
        "mtp, 3 drafts",
        "ngram",
        "bf16, ngram",
        "draft model",
    ],
)
def test_tokens_equal_the_stock_backend(start_engine, dense_path, stock_tokens, changes):
    engine, drafts = options(**changes), changes.get("speculative_config", {})
    path = dense_path("deepseek-v3" if drafts.get("method") == "mtp" else "deepseek-v2")
    if drafts is DRAFT_MODEL:
        engine["speculative_config"] = DRAFT_MODEL | {"model": str(path)}
    stock = stock_tokens(path, engine["dtype"])
    assert_tokens_by_both_paths(start_engine(path, attention_backend=NAME, **engine), stock, engine["dtype"])


@pytest.mark.parametrize("switch", ["1", "0"])
def test_captured_steps_multiply_by_absorbed_weights_in_our_launches(
    start_engine, dense_path, monkeypatch, switch
):
    """Two in each layer and step; with the switch off none."""
    if torch.cuda.get_device_capability() != head_product.CAPABILITY:
        pytest.skip("the kernel is for compute capability 9.0")
    monkeypatch.setenv("MLA_BACKEND_AROUND_ATTENTION", switch)
    llm = start_engine(dense_path("deepseek-v2"), attention_backend=NAME, **options(**GRAPHS))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        generate(llm, prompts()[4:7])
        torch.cuda.synchronize()
    counts = {
        name: sum(event.count for event in profile.key_averages() if name in event.key)
        for name in ("head_product_kernel", "decode_kernel")
    }
    assert counts["decode_kernel"] > 0
    # Some steps also have prefill tokens, and keep vLLM's way.
    products = counts["head_product_kernel"]
    assert (
        counts["decode_kernel"] < products <= 2 * counts["decode_kernel"] if switch == "1" else products == 0
    )


def test_tokens_without_yarn_equal_the_stock_backend(start_engine, dense_path, stock_tokens):
    path, engine = dense_path("deepseek-v2", "--rope", "default"), options(**GRAPHS)
    stock = stock_tokens(path, engine["dtype"])
    assert_tokens_by_both_paths(start_engine(path, attention_backend=NAME, **engine), stock, engine["dtype"])


@pytest.mark.parametrize("name", ["DeepSeek-V3", "Kimi-K2", "Moonlight-16B-A3B", "GLM-4.7-Flash"])
def test_tokens_of_most_served_families_equal_the_stock_backend(start_engine, tmp_path, stock_tokens, name):
    """With all their heads. Each token uses both routed experts, so no choice among experts is close."""
    (family,) = (family for family in FAMILIES if family.name == name)
    heads = family.geometry.num_heads
    path = make_small_checkpoint(
        family,
        tmp_path,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        n_routed_experts=2,
        num_experts_per_tok=2,
        max_position_embeddings=16384,
    )
    make_tokenizer(path, TOKENIZER_TEXT)
    know_config(family.config["model_type"])
    engine = options(**GRAPHS)
    stock = stock_tokens(path, engine["dtype"])
    assert_tokens_by_both_paths(start_engine(path, attention_backend=NAME, **engine), stock, engine["dtype"])


def test_tokens_of_mistral_small_4_equal_the_stock_backend(start_engine, dense_path, stock_tokens, tmp_path):
    """Latents of 256 + 64, and queries scaled by a factor of the position."""
    path = in_mistrals_class(dense_path("mistral-small-4", "--heads", "32"), tmp_path / "model")
    engine = options(**GRAPHS)
    stock = stock_tokens(path, engine["dtype"])
    assert_tokens_by_both_paths(start_engine(path, attention_backend=NAME, **engine), stock, engine["dtype"])


@pytest.mark.parametrize(
    "architecture, changes",
    [("mistral-small-4", {}), ("kimi-linear", {}), ("kimi-linear", {"max_num_batched_tokens": 1024})],
    ids=["mistral-small-4", "kimi-linear", "kimi-linear, chunks of 1024"],
)
def test_e4m3_caches_of_mistral_small_4_and_kimi_linear(
    start_engine, dense_path, tmp_path, architecture, changes
):
    """Compared with 16 bits: vLLM has no backend for these on Hopper, or none that is fast."""
    if architecture == "kimi-linear":
        pytest.importorskip("vllm.models.kimi_k3.nvidia.mla")
    path = dense_path(architecture)
    if architecture == "mistral-small-4":
        path = in_mistrals_class(path, tmp_path / "model")
    made = {}
    for kv_cache_dtype in ("bfloat16", "fp8"):
        engine = options(**GRAPHS, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, **changes)
        llm = start_engine(path, attention_backend=NAME, **engine)
        made[kv_cache_dtype] = generate(llm, prompts()[: max(BATCHES)])
        cached = generate(llm, prompts()[: max(BATCHES)])
        del llm
    for what, texts in (("new", made["fp8"]), ("cached", cached)):
        deviation = mean_deviation(texts, made["bfloat16"], f"{architecture} e4m3, {what}")
        assert deviation < NEAR_TIE["bfloat16"] / 2


@pytest.mark.parametrize("architecture", ["deepseek-v2", "deepseek-v3.2"])
def test_the_first_process_does_not_touch_the_gpu(tmp_path, architecture):
    """It checks the configuration. If it had initialized CUDA, vLLM could not fork it."""
    path = make_checkpoint(str(tmp_path), "--architecture", architecture, "--config-only")
    code = (
        "import torch; from vllm.engine.arg_utils import EngineArgs\n"
        f"EngineArgs({str(path)!r}, attention_backend={NAME!r}).create_engine_config()\n"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def assert_tokens_by_both_paths(llm, stock, dtype):
    """An engine of ours, absorbed and vanilla, generates a stock backend's tokens, up to near-ties."""
    before = counters.snapshot()
    different = 0
    for batch in BATCHES:
        ours = generate(llm, prompts()[:batch])
        different += assert_equal_up_to_near_ties(ours, stock[batch], NEAR_TIE[dtype], batch)
    # By now all prompts are in the prefix cache.
    batch = max(BATCHES)
    ours = generate(llm, prompts()[:batch])
    different += assert_equal_up_to_near_ties(ours, stock[batch], NEAR_TIE[dtype], f"{batch} cached")
    if dtype == "float16":
        assert different <= (sum(BATCHES) + batch) // 4, "too many differences, if only after near-ties"
    after = counters.snapshot()
    used = {path for path in after if after[path].calls > before[path].calls}
    # Replayed decode steps are not counted. Those beside prefill are, as extend if one has a short prompt.
    assert "vanilla_prefill" in used and used & {"absorbed_decode", "absorbed_extend"}


@pytest.mark.parametrize(
    "engine",
    [GRAPHS, {"enforce_eager": True, "max_num_batched_tokens": 1024}],
    ids=["graphs", "eager, chunks of 1024"],
)
def test_fp8_caches_are_as_near_to_bf16_as_those_of_vllm(start_engine, dense_path, stock_tokens, engine):
    """The cache's rounding counts, whatever a kernel's queries and probabilities are rounded to."""
    path, expected = dense_path("deepseek-v2"), stock_tokens(dense_path("deepseek-v2"), "bfloat16")
    backends = [(NAME, "fp8"), ("TRITON_MLA", "fp8")]
    if torch.cuda.get_device_capability()[0] == 9:
        backends.append(("FLASHMLA", "fp8"))
    deviations = {}
    for name, kv_cache_dtype in backends:
        before = counters.snapshot()
        changes = {"attention_backend": name, "kv_cache_dtype": kv_cache_dtype, "dtype": "bfloat16"}
        llm = start_engine(path, **options(**engine) | changes)
        batch = max(BATCHES)
        for what in ("", ", cached"):
            made = generate(llm, prompts()[:batch])
            what = f"{name} {kv_cache_dtype}{what}"
            deviations[what] = mean_deviation(made, expected[batch], what)
        assert (counters.snapshot() != before) == (name == NAME)
        del llm
    for cached in ("", ", cached"):
        ours = deviations[f"{NAME} fp8{cached}"]
        # Such means vary by a third from run to run: a last bit decides how a latent is rounded.
        assert all(ours <= 1.33 * deviations[f"{name} fp8{cached}"] for name, _ in backends[1:])


def test_records_where_vllm_would_fuse_rotation_and_append(start_engine, dense_path):
    """In a compiled model that is not split at the cache's update, by a kernel that writes no records."""
    whole = {"splitting_ops": [], "cudagraph_mode": "FULL_DECODE_ONLY"}
    made = []
    for changes in ({"enforce_eager": True}, {"compilation_config": whole}):
        engine = options(**changes, dtype="bfloat16", kv_cache_dtype="fp8_ds_mla")
        llm = start_engine(dense_path("deepseek-v2"), attention_backend=NAME, **engine)
        made.append(generate(llm, prompts()[:7]))
        passes = llm.llm_engine.vllm_config.compilation_config.pass_config
        del llm
    assert passes.fuse_rope_kvcache_cat_mla is False
    assert mean_deviation(*made, "records in a compiled model") < NEAR_TIE["bfloat16"] / 2


def test_a_modelopt_checkpoint_serves_with_no_flag(start_engine, dense_path, tmp_path):
    """Weights and cache in fp8, as another backend serves them, which takes 1 for the cache's scales."""
    scales = [0.03125, 0.046875, 0.0625]
    path = modelopt_checkpoint(dense_path("deepseek-v2"), tmp_path / "fp8", scales, fp8_weights=True)
    made = {}
    for name in ("TRITON_MLA", NAME):
        before = counters.snapshot()
        llm = start_engine(path, attention_backend=name, **options(**GRAPHS) | {"dtype": "bfloat16"})
        made[name] = generate(llm, prompts()[: max(BATCHES)])
        assert (counters.snapshot() != before) == (name == NAME)
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        found = [float(layer._k_scale) for layer in layers]
        print(f"{name}: scales {found}")
        del llm
    assert found == scales
    assert {layer.impl.kv_format.name for layer in layers} == {"fp8_e4m3"}
    assert mean_deviation(made[NAME], made["TRITON_MLA"], "modelopt") < NEAR_TIE["bfloat16"] / 2


def test_a_checkpoint_with_weights_in_fp8_blocks(start_engine, tmp_path, monkeypatch):
    """DeepSeek-V3's form: kv_b_proj, too, has a scale for each block."""
    monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", "skip")  # it would compile thousands of kernels
    arguments = ("--architecture", "deepseek-v3", "--experts", "0", "--context-length", "16384")
    source = make_checkpoint(str(tmp_path / "bf16"), *arguments, "--q-lora-rank", "256")
    path = block_fp8_checkpoint(source, tmp_path / "fp8")
    made = {}
    for name, checkpoint in ((NAME, source), (stock_backend(), path), (NAME, path)):
        before = counters.snapshot()
        engine = options(**GRAPHS, dtype="bfloat16", max_num_batched_tokens=1 << 16)
        llm = start_engine(checkpoint, attention_backend=name, **engine)
        made[name, checkpoint] = generate(llm, prompts()[: max(BATCHES)])
        assert (counters.snapshot() != before) == (name == NAME)
        del llm
    ours, stock = made[NAME, path], made[stock_backend(), path]
    rounding = mean_deviation(stock, made[NAME, source], "fp8 blocks from bf16")
    assert mean_deviation(ours, stock, "fp8 blocks") < min(rounding, NEAR_TIE["bfloat16"] / 2)


def test_drafts_on_an_fp8_cache_lose_no_more(start_engine, dense_path, stock_tokens):
    """MTP drafts from an e4m3 cache, verified on one, against the same cache without drafts."""
    path, batch = dense_path("deepseek-v3"), max(BATCHES)
    expected = stock_tokens(path, "bfloat16")[batch]
    deviations = {}
    for what, drafts in (("alone", {}), ("mtp", {"speculative_config": MTP})):
        engine = options(**GRAPHS, dtype="bfloat16", kv_cache_dtype="fp8", **drafts)
        before = counters.snapshot()
        llm = start_engine(path, attention_backend=NAME, **engine)
        assert {layer.impl.kv_format.name for layer in attention_layers(llm)} == {"fp8_e4m3"}
        for repetition in ("new", "cached"):
            made = generate(llm, prompts()[:batch])
            deviations[what, repetition] = mean_deviation(made, expected, f"{what}, {repetition}")
        del llm
    after = counters.snapshot()
    assert after["absorbed_extend"].calls > before["absorbed_extend"].calls
    for repetition in ("new", "cached"):
        assert deviations["mtp", repetition] <= 1.3 * deviations["alone", repetition]


def attention_layers(llm):
    config = llm.llm_engine.vllm_config.compilation_config
    return [layer for layer in config.static_forward_context.values() if hasattr(layer, "impl")]


@pytest.mark.parametrize(
    "connector, kv_cache_dtype",
    [("OffloadingConnector", "auto"), ("OffloadingConnector", "fp8"), ("SimpleCPUOffloadConnector", "fp8")],
)
def test_prefixes_come_back_from_the_hosts_memory(dense_path, connector, kv_cache_dtype):
    """As prefixes that are on the GPU: nothing is left for regular prefill."""
    transfer = {"kv_connector": connector, "kv_role": "kv_both"}
    transfer["kv_connector_extra_config"] = {"cpu_bytes_to_use": 1 << 30}
    engine = options(**GRAPHS, kv_cache_dtype=kv_cache_dtype, kv_transfer_config=transfer)
    path = str(dense_path("deepseek-v2"))
    # In a process of its own: after such an engine no other can start (seen with SimpleCPUOffloadConnector).
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        run = process.submit(prefix_hits, path, engine | {"attention_backend": NAME})
        on_the_gpu, from_the_host, calls = run.result()
    assert calls[0] < calls[1] == calls[2], "prompts were not read once"
    assert from_the_host == on_the_gpu


@pytest.mark.parametrize(
    "option", [{"cpu_offload_gb": 1}, {"offload_group_size": 2}], ids=["read in place", "fetched"]
)
def test_weights_on_the_host(start_engine, dense_path, stock_tokens, monkeypatch, option):
    """In Model Runner V1: in vLLM 0.26, the other one ignores these options."""
    from vllm.model_executor import offloader

    path = dense_path("deepseek-v2")
    expected = stock_tokens(path, "float16")[16]
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    try:
        llm = start_engine(path, attention_backend=NAME, **options(**GRAPHS, **option))
        assert not isinstance(offloader.get_offloader(), offloader.NoopOffloader)
        for _ in range(2):  # then on cached prefixes
            assert_same(generate(llm, prompts()[:16]), expected)
    finally:
        offloader.set_offloader(offloader.NoopOffloader())


def test_batch_invariance(dense_path):
    """A request has the same bits alone and in a batch, in a process that is in this mode from its start."""
    path = str(dense_path("deepseek-v2"))
    engine = options(**GRAPHS, attention_backend=NAME, dtype="bfloat16", max_num_batched_tokens=1 << 16)
    arguments = (path, engine | {"enable_prefix_caching": False}, prompts()[2:18])
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        run = process.submit(together_and_alone, *arguments, {"VLLM_BATCH_INVARIANT": "1"})
        together, alone = run.result()
    assert together == alone


def sequences(llm, count=16):
    llm.reset_prefix_cache()
    return generate(llm, prompts()[2 : 2 + count])


def assert_same(ours, expected, dtype="float16"):
    different = assert_equal_up_to_near_ties(ours, expected, NEAR_TIE[dtype], len(ours))
    assert different <= len(ours) // 4, "too many differences, if only after near-ties"


@pytest.fixture(scope="module")
def updated(dense_path, tmp_path_factory):
    """New kv_b_proj weights, a checkpoint with them, and the stock backend's tokens for it."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    path = tmp_path_factory.mktemp("updated") / "model"
    shutil.copytree(dense_path("deepseek-v2"), path)
    (weights_file,) = path.glob("*.safetensors")
    weights = load_file(weights_file)
    changed = {n: torch.randn_like(w) * w.std() for n, w in weights.items() if "kv_b_proj" in n}
    save_file(weights | changed, weights_file, metadata={"format": "pt"})
    # Whole prompts, as for `stock_tokens`.
    engine = options(enforce_eager=True, max_num_batched_tokens=1 << 16)
    llm = LLM(str(path), attention_backend=stock_backend(), **engine)
    expected = sequences(llm)
    del llm
    cleanup_dist_env_and_memory()
    return changed, path, expected


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
@pytest.mark.parametrize("changes", [GRAPHS, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_weight_updates_reach_prefill_and_decode(start_engine, dense_path, updated, changes, update):
    weights, path, expected = updated
    llm = start_engine(dense_path("deepseek-v2"), attention_backend=NAME, **options(**changes))
    assert all(old.tokens != new.tokens for old, new in zip(sequences(llm), expected, strict=True))
    update(llm, path, weights)
    assert_same(sequences(llm), expected)


def test_sleep_keeps_tokens(start_engine, dense_path):
    engine = options(**GRAPHS, enable_sleep_mode=True)
    llm = start_engine(dense_path("deepseek-v2"), attention_backend=NAME, **engine)
    expected = sequences(llm)
    for level in (1, 2, 1):
        sleep_and_wake(llm, level)
        assert_same(sequences(llm), expected)


def test_sharded_state_is_saved_and_loaded(start_engine, dense_path, tmp_path):
    path = Path(dense_path("deepseek-v2"))
    llm = start_engine(path, attention_backend=NAME, **options(enforce_eager=True))
    expected = sequences(llm)
    llm.llm_engine.engine_core.save_sharded_state(path=str(tmp_path))
    del llm
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    for backend in (NAME, stock_backend()):
        # Whole prompts, as for `stock_tokens`.
        sharded = options(enforce_eager=True, load_format="sharded_state", max_num_batched_tokens=1 << 16)
        llm = start_engine(tmp_path, attention_backend=backend, **sharded)
        assert_same(sequences(llm), expected)
        del llm


def test_no_chunked_prompt_loses_its_context(start_engine, dense_path):
    """vLLM 0.26 sorts a batch by new tokens, and merges context only into its first rows."""
    long, short = prompts()[1][:2848], prompts()[1][2800:3500]
    engine = options(enforce_eager=True, enable_prefix_caching=False, max_num_batched_tokens=4096)
    llm = start_engine(dense_path("deepseek-v2"), attention_backend=NAME, **engine)
    expected = generate(llm, [long, short])
    del llm
    # In the second step the 700 tokens of the short prompt precede the last 800 of the long one. Both are
    # more than absorbed attention takes.
    chunked = engine | {"max_num_batched_tokens": 2048}
    llm = start_engine(dense_path("deepseek-v2"), attention_backend=NAME, **chunked)
    assert_equal_up_to_near_ties(generate(llm, [long, short]), expected, NEAR_TIE["float16"], "chunked")


@two_gpus
@pytest.mark.parametrize(
    "kind, experts, changes",
    [
        ("tensor", "0", {}),
        ("pipeline", "0", {}),
        ("data", "4", {}),
        ("tensor", "4", EXPERTS),
        ("data", "4", EXPERTS),
    ],
    ids=["tensor", "pipeline", "data", "tensor and experts", "data and experts"],
)
def test_two_gpus_generate_the_stock_backends_tokens(tmp_path, kind, experts, changes):
    model = make_checkpoint(str(tmp_path / "model"), "--experts", experts, "--context-length", "16384")
    counts = tmp_path / "counts"

    def start(backend):
        # Whole prompts, as for `stock_tokens`.
        engine = options(**GRAPHS, attention_backend=backend, max_num_batched_tokens=1 << 16, **changes)
        script = Path(__file__).parents[1] / "support/vllm_parallel.py"
        result = tmp_path / f"{backend}.json"
        command = [sys.executable, script, kind, model, result, json.dumps(engine)]
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        if backend == NAME:
            environment[counters.ENVIRONMENT_VARIABLE] = str(counts)
        return subprocess.Popen(command, env=os.environ | environment), result

    runs = [start(backend) for backend in (NAME, stock_backend())]
    assert [process.wait() for process, _ in runs] == [0, 0]
    ours, stock = ([Sequence(*s) for s in json.loads(result.read_text())] for _, result in runs)
    # If a token goes to another expert, its logits move.
    near_tie = NEAR_TIE["float16"] if experts == "0" else NEAR_TIE["bfloat16"]
    different = assert_equal_up_to_near_ties(ours, stock, near_tie, f"{kind} parallel")
    assert different <= len(stock) // 4, "too many differences, if only after near-ties"
    used = counters.read_folder(counts)
    assert used["absorbed_decode"].calls and used["vanilla_prefill"].calls


SHARDS = [{"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": i} for i in (1, 64)]


@pytest.fixture
def sequences_of(dense_path, tmp_path):
    """A function from an architecture and changes of the engine to what two ranks generate in each.

    Chunked prompts, and the same again as prefix hits. All paths are used, but with MTP there is a draft in
    each step, and so no query of one token.
    """

    def run(architecture, engines):
        sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
        graphs = {"enforce_eager": False, "compilation_config": GRAPHS["compilation_config"] | sizes}
        common = options(**graphs, attention_backend=NAME, max_num_batched_tokens=2048)
        model = str(dense_path(architecture))
        jobs = [{"model": model, "options": common | changes, "prompts": prompts()} for changes in engines]
        made = generate_on_ranks(jobs, tmp_path)
        for job, changes in zip(made, engines, strict=True):
            assert job.calls["absorbed_extend"] and job.calls["vanilla_prefill"]
            assert job.calls["absorbed_decode"] or changes.get("speculative_config") == MTP
        return [job.sequences for job in made]

    return run


@two_gpus
@pytest.mark.parametrize(
    "architecture, drafts",
    [("deepseek-v2", {}), ("deepseek-v2", NGRAM), ("deepseek-v3", MTP)],
    ids=["alone", "ngram", "mtp"],
)
def test_a_sharded_cache_gives_the_tokens_of_a_whole_one(sequences_of, architecture, drafts):
    """Runs of 1 and of 64 tokens on each GPU."""
    speculation = {"speculative_config": drafts} if drafts else {}
    whole, *sharded = sequences_of(architecture, [{}, *(shard | speculation for shard in SHARDS)])
    for sequences, shard in zip(sharded, SHARDS, strict=True):
        different = assert_equal_up_to_near_ties(sequences, whole, NEAR_TIE["float16"], shard)
        assert different <= len(whole) // 4, "too many differences, if only after near-ties"


@two_gpus
def test_a_sharded_fp8_cache_is_as_near_to_16_bits_as_a_whole_one(sequences_of):
    """The last digit of a hidden state can decide how a latent is rounded, so tokens differ."""
    fp8 = {"kv_cache_dtype": "fp8"}
    exact, whole, *sharded = sequences_of("deepseek-v2", [{}, fp8, *(shard | fp8 for shard in SHARDS)])
    most = 1.1 * mean_deviation(whole, exact, "whole")
    for sequences, shard in zip(sharded, SHARDS, strict=True):
        assert mean_deviation(sequences, exact, shard) <= most


@pytest.fixture
def decoder():
    return MLADecoder(
        num_heads=16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        dtype=torch.bfloat16,
        page_size=64,
        device="cuda",
        max_batch=8,
        max_query_len=4,
    )


@pytest.mark.parametrize(
    "query_lens, rows", [([1] * 6 + [0, 0], 8), ([4, 4, 4, 0], 16), ([1, 3, 2], 6)], ids=str
)
def test_a_step_neither_synchronizes_nor_reads_padding(decoder, query_lens, rows):
    """From vLLM's metadata to the output, with the padding of graphs, nothing waits for the GPU."""
    from mla_backend_vllm.impl import MLAImpl
    from mla_backend_vllm.metadata import MetadataBuilder

    builder = MetadataBuilder.__new__(MetadataBuilder)
    builder.decoder, builder._shard = decoder, WHOLE
    impl = MLAImpl.__new__(MLAImpl)
    impl.scale, impl.kv_lora_rank, impl.qk_rope_head_dim = 192**-0.5, 512, 64
    impl.kv_format = cache_format(torch.bfloat16)
    requests = len(query_lens)
    kv_cache = torch.full((requests * 4 + 1, 64, 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    kv_cache[1:] = torch.randn_like(kv_cache[1:])
    seq_lens = torch.tensor([40 * i + 8 if q else 0 for i, q in enumerate(query_lens)], dtype=torch.int32)
    tables = torch.arange(1, requests * 4 + 1, dtype=torch.int32).view(requests, 4)
    tables *= (seq_lens > 0)[:, None]
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    q_nope = torch.randn(16, rows, 512, dtype=torch.bfloat16, device="cuda").transpose(
        0, 1
    )  # the layout that vLLM passes
    q_rope = torch.randn(rows, 16, 64, dtype=torch.bfloat16, device="cuda")
    on_gpu = {"block_table_tensor": tables.cuda(), "seq_lens_device": seq_lens.cuda()}

    def step():
        decode = builder._build_decode(
            query_start_loc_cpu=starts,
            query_start_loc_device=starts_gpu,
            num_decode_tokens=rows,
            dcp_tot_seq_lens_device=None,
            **on_gpu,
        )
        metadata, layer = SimpleNamespace(decode=decode), SimpleNamespace(_k_scale=None)
        return impl.forward_mqa((q_nope, q_rope), kv_cache, metadata, layer), decode.plan

    starts_gpu = starts.cuda()
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (out, lse), plan = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, expected_lse = torch_attention.paged_attention(q_nope, q_rope, kv_cache, plan.batch, impl.scale)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
