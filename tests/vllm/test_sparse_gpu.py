"""Sparse attention on a GPU: tokens of a small model of DeepSeek-V3.2's form, its indexer real.

A difference in rounding may let the indexer choose another key, which may weigh much. So log-probabilities of
two stock backends differ by up to 0.7 in bf16, and tokens leave at more than near-ties.
"""

import functools
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from make_checkpoint import make_checkpoint
from mla_backend import counters
from mla_backend_vllm import selection_name
from mla_backend_vllm.sparse import SparseImpl
from mla_backend_vllm.sparse_step import CopiedPrompts
from tests.support.greedy import NEAR_TIE, mean_deviation
from tests.support.vllm_workload import GRAPHS, around_sleep, generate, options, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="vLLM's indexer (DeepGEMM) needs compute capability 9.0",
    ),
]

NAME = selection_name()
STOCK, OTHER_STOCK = "FLASH_ATTN_MLA_SPARSE", "FLASHMLA_SPARSE"
TOPK, BATCH = 512, 32
MTP = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": NAME}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A function from a number of heads, and in how many layers one has an indexer, to a checkpoint.

    Without routed experts: at a near-tie, rounding can select another expert.
    """

    @functools.cache
    def make(heads=16, indexer_in=1):
        folder = str(tmp_path_factory.mktemp("sparse"))
        arguments = ("--experts", "0", "--context-length", "16384", "--index-topk", str(TOPK))
        arguments += ("--heads", str(heads))
        path = make_checkpoint(folder, "--architecture", "deepseek-v3.2", *arguments)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"index_topk_freq": indexer_in}))
        return path

    return make


def sparse_options(**changes):
    return options(dtype="bfloat16", tokenizer_mode="hf", max_num_seqs=BATCH, **changes)


def on(backend, path, start_engine, **changes):
    """The texts that a backend generates, for new prompts and for the same ones as prefix hits."""
    llm = start_engine(path, attention_backend=backend, **sparse_options(**changes))
    some = prompts()[:BATCH]
    assert sum(len(prompt) > TOPK for prompt in some) > BATCH // 4
    return generate(llm, some), generate(llm, some)


@pytest.fixture(scope="module")
def stock_tokens(checkpoint):
    """A function from a stock backend, a format of the cache and a checkpoint's form to the texts that the
    backend generates eagerly, from whole prompts."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    def start(path, **engine):
        cleanup_dist_env_and_memory()
        return LLM(str(path), distributed_executor_backend="uni", **engine)

    @functools.cache
    def tokens(backend, kv_cache_dtype="auto", **form):
        before = counters.snapshot()
        whole_prompts = {"enforce_eager": True, "max_num_batched_tokens": 1 << 16}
        made, _ = on(backend, checkpoint(**form), start, kv_cache_dtype=kv_cache_dtype, **whole_prompts)
        assert counters.snapshot() == before
        return made

    return tokens


@pytest.mark.parametrize(
    "changes",
    [
        {"enforce_eager": True, "max_num_batched_tokens": 1 << 16},
        {"enforce_eager": True, "max_num_batched_tokens": 512},
        GRAPHS,
        GRAPHS | {"speculative_config": MTP},
    ],
    ids=["eager", "eager, chunks of 512", "graphs", "mtp"],
)
def test_tokens_are_as_near_to_a_stock_backends_as_those_of_another(
    start_engine, checkpoint, stock_tokens, changes
):
    stock = stock_tokens(STOCK)
    # Such means vary by a third from run to run.
    most = 2 * mean_deviation(stock_tokens(OTHER_STOCK), stock, OTHER_STOCK)
    before = counters.snapshot()
    for ours, what in zip(on(NAME, checkpoint(), start_engine, **changes), ("new", "cached"), strict=True):
        assert mean_deviation(ours, stock, what) <= most
    after = counters.snapshot()
    used = {path for path in after if after[path].calls > before[path].calls}
    assert "sparse" in used and used <= {"sparse", "vanilla_prefill"}


def test_layers_that_share_an_indexer(start_engine, checkpoint, stock_tokens):
    """As GLM-5.2's: the last layer attends to the keys that were chosen for the one before."""
    form = {"indexer_in": 2}
    expected = stock_tokens(STOCK, **form)
    llm = start_engine(checkpoint(**form), attention_backend=NAME, **sparse_options(**GRAPHS))
    caches = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    assert sum(name.endswith("k_cache") for name in caches) == 2 and len(caches) == 3 + 2
    most = 2 * mean_deviation(stock_tokens(OTHER_STOCK, **form), expected, OTHER_STOCK)
    assert mean_deviation(generate(llm, prompts()[:BATCH]), expected, NAME) <= most


@pytest.mark.parametrize("kv_cache_dtype, factor", [("fp8", 2.5), ("fp8_ds_mla", 1.2)])
def test_fp8_caches(start_engine, checkpoint, stock_tokens, kv_cache_dtype, factor):
    """Records lose no more than a stock backend's; one scale, and rotary parts in e4m3, somewhat more."""
    expected, what = stock_tokens(STOCK), {"kv_cache_dtype": kv_cache_dtype}
    theirs = mean_deviation(stock_tokens(OTHER_STOCK, "fp8_ds_mla"), expected, f"{OTHER_STOCK} records")
    ours, cached = on(NAME, checkpoint(), start_engine, **GRAPHS, **what)
    for made, which in ((ours, "new"), (cached, "cached")):
        assert mean_deviation(made, expected, f"{NAME} {kv_cache_dtype} {which}") <= factor * theirs


@pytest.mark.parametrize("batched_tokens", [1 << 16, 2048])
def test_prompts_of_many_heads_attend_to_copies_of_records(
    start_engine, checkpoint, stock_tokens, monkeypatch, batched_tokens
):
    """Copies hold several prompts; steps of 65,536 tokens have more than fit the buffer together."""
    copies, copy = [], CopiedPrompts.copy
    monkeypatch.setattr(CopiedPrompts, "copy", lambda part, *args: copies.append(part) or copy(part, *args))
    expected = stock_tokens(STOCK, heads=64)
    most = 1.5 * mean_deviation(
        stock_tokens(OTHER_STOCK, "fp8_ds_mla", heads=64), expected, f"{OTHER_STOCK} records"
    )
    changes = GRAPHS | {"kv_cache_dtype": "fp8_ds_mla", "max_num_batched_tokens": batched_tokens}
    ours, cached = on(NAME, checkpoint(64), start_engine, **changes)
    assert mean_deviation(ours, expected, "new") <= most
    assert mean_deviation(cached, expected, "cached") <= most
    assert copies
    if batched_tokens > 2048:  # a part begins where another one ends
        assert {part.tokens.start for part in copies} & {part.tokens.stop for part in copies}


@pytest.mark.parametrize("changes", [{}, {"speculative_config": MTP}], ids=["alone", "mtp"])
def test_sleep_keeps_texts(checkpoint, changes):
    engine = sparse_options(**GRAPHS, attention_backend=NAME, **changes)
    # In a process of its own: it can have one engine with sleep mode, whose memory may never be freed.
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        run = process.submit(around_sleep, str(checkpoint()), engine, prompts()[:BATCH])
        expected, behind = run.result()
    for when, made in behind.items():
        assert mean_deviation(made, expected, when) < NEAR_TIE["bfloat16"] / 10


@pytest.mark.parametrize(
    "changes, theirs, factor",
    [
        ({}, "auto", 2),
        ({"speculative_config": MTP}, "auto", 2),
        ({"kv_cache_dtype": "fp8"}, "fp8_ds_mla", 2.5),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "fp8_ds_mla", 1.2),
    ],
    ids=["16 bits", "mtp", "fp8", "records"],
)
def test_separate_prefill_and_decode_servers(servers, checkpoint, stock_tokens, changes, theirs, factor):
    """The indexer's cache moves, too: the decode server reads no prompt."""
    expected = stock_tokens(STOCK)
    most = factor * mean_deviation(stock_tokens(OTHER_STOCK, theirs), expected, f"{OTHER_STOCK} {theirs}")
    servers.start(checkpoint(), attention_backend=NAME, **sparse_options(**GRAPHS | changes))
    made = servers.generate(prompts()[:BATCH])
    assert mean_deviation(made.sequences, expected, changes) <= most
    assert sum(made.query_tokens.values()) < sum(map(len, prompts()[:BATCH]))


GLM_TOPK, POOL = 512, 16


@pytest.fixture(scope="module")
def glm_path(tmp_path_factory):
    """A function from a number of heads to a config of GLM-5.3-Flash's form, one layer in two being linear.

    With the residual of other models, and without experts: only the attention is meant. There are no weights.
    """
    pytest.importorskip("vllm.models.glm5next")

    @functools.cache
    def make(heads):
        path = make_checkpoint(
            str(tmp_path_factory.mktemp("glm")), "--config-only", "--context-length", "16384"
        )
        kept = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
        config = json.loads((path / "config.json").read_text())
        config = {name: config[name] for name in kept} | {"torch_dtype": "bfloat16", "hidden_act": "silu"}
        config |= {"architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next_text", "mhc": False}
        config |= {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 4}
        config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "kv_lora_rank": 512}
        config |= {"q_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256}
        config |= {"mla_use_nope": True, "index_topk": GLM_TOPK, "index_kpool": POOL, "index_n_heads": 32}
        config["indexer_rope_interleave"] = True
        config |= {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense"] * 4,
        }
        config["linear_attn_config"] = {"head_dim": 128, "num_heads": 8, "short_conv_kernel_size": 4}
        (path / "config.json").write_text(json.dumps(config))
        return path

    return make


def assert_attends_to_its_list(layer_impl, q, cache, metadata, layer, actual, token):
    """A token's output and LSE from the positions that the indexer wrote, in fp32."""
    positions = layer_impl.topk_indices_buffer[token]
    positions = positions[positions >= 0].long()
    request = metadata.req_id_per_token[token].long()
    first = metadata.query_start_loc[request]
    keys_before = int(metadata.seq_lens[request] - metadata.query_start_loc[request + 1] + first)
    context = keys_before + token - int(first) + 1
    assert len(positions) == (context if context <= GLM_TOPK else GLM_TOPK + context % POOL)
    pages = metadata.block_table[request, positions // cache.shape[1]].long()
    keys = cache[pages, positions % cache.shape[1]].float()
    if layer_impl.kv_format.takes_scale:
        keys *= layer._k_scale
    scores = torch.cat(layer_impl.split_queries(q), dim=-1)[token].float() @ keys.T * layer_impl.scale
    out, lse = (values[token].float() for values in actual)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=5e-3)
    expected = scores.softmax(-1) @ keys[:, :512]
    assert (out - expected).norm() <= 2e-2 * expected.norm()


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_lists_of_pools_in_glm_5_3_flash(start_engine, glm_path, monkeypatch, heads, kv_cache_dtype):
    """Real lists of vLLM's indexer, in steps that mix short and long prompts, chunks and decode."""
    checked, forward = [], SparseImpl.forward_mqa

    def forward_mqa(layer_impl, q, cache, metadata, layer):
        actual = forward(layer_impl, q, cache, metadata, layer)
        for token in {0, len(actual[0]) // 2, len(actual[0]) - 1}:
            if int(metadata.seq_lens[metadata.req_id_per_token[token].long()]) > 0 and cache.numel():
                assert_attends_to_its_list(layer_impl, q, cache, metadata, layer, actual, token)
                checked.append(len(actual[0]))
        return actual

    engine = {"kv_cache_dtype": kv_cache_dtype, "load_format": "dummy", "attention_backend": NAME}
    eager = sparse_options(enforce_eager=True, max_num_batched_tokens=2048, **engine)
    llm = start_engine(glm_path(heads), **eager)
    with monkeypatch.context() as patch:
        patch.setattr(SparseImpl, "forward_mqa", forward_mqa)
        eager_texts = generate(llm, prompts()[:BATCH])
    del llm
    assert max(checked) > BATCH >= min(checked), "there are to be prompts and decode steps"
    graphs_texts = generate(
        start_engine(glm_path(heads), **sparse_options(**GRAPHS, **engine)), prompts()[:BATCH]
    )
    assert mean_deviation(graphs_texts, eager_texts, "graphs") < NEAR_TIE["bfloat16"] / 10
