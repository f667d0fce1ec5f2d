"""One launch for norm, rotation and append of new tokens: its op, its mark, its place in compiled graphs, and
each condition under which vLLM's own way is kept."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Identity
from vllm.compilation import backends as compilation_backends
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.config.compilation import PassConfig
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms.cpu import CpuPlatform

import mla_backend_vllm
from mla_backend import RotaryAppend, counters
from mla_backend.cache_format import cache_format
from mla_backend_vllm import fused_append, impl, metadata, selection_name
from mla_backend_vllm.fused_append import FusedAppend, FusedWrapper, computes_the_same, why_not_fused
from mla_backend_vllm.impl import MLAImpl
from tests.support.mla_oracle import normalized, rotated_by
from tests.support.vllm_outputs import assert_tokens, attention_layers, generate

NAME = selection_name()
D_C, D_NOPE, D_ROPE, HEADS, EPS = 16, 8, 8, 2, 0.1
OP = torch.ops.mla_backend.normalize_rotate_append
NAME_OF_OP, NAME_OF_UPDATE = f"mla_backend::{fused_append.OP_NAME}", "vllm::unified_mla_kv_cache_update"


# ---- Engines


def wrappers(llm) -> list[FusedWrapper]:
    (found,) = llm.apply_model(lambda model: [m for m in model.modules() if isinstance(m, FusedWrapper)])
    return found


@pytest.fixture
def appended(monkeypatch):
    """Whether each cache update found its tokens in the cache already."""
    found, has_appended = [], FusedAppend.has_appended
    monkeypatch.setattr(
        FusedAppend,
        "has_appended",
        lambda self, *tensors: found.append(has_appended(self, *tensors)) or found[-1],
    )
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("changes", [{}, {"enforce_eager": False}], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["deepseek", "deepseek_v3"])
def test_tokens_equal_transformers(start_engine, request, appended, kind, changes):
    """Without low-rank queries and with them; prefill, decode and chunks behind cached prefixes."""
    model = request.getfixturevalue(kind)
    llm = start_engine(model.path, attention_backend=NAME, max_num_batched_tokens=256, **changes)
    layers = attention_layers(llm)
    assert [w.is_fused for w in wrappers(llm)] == [True] * len(layers)
    appended.clear()
    before = counters.snapshot()
    for _repetition in range(2):
        assert_tokens(generate(llm, model), model)
    calls = sum(count.calls - before[path].calls for path, count in counters.snapshot().items())
    assert appended and all(appended)
    assert len(appended) <= calls  # a step with decode and prefill calls attention twice


@pytest.fixture
def compiled_pieces(monkeypatch):
    """Makes vLLM compile the pieces between its attention ops on the CPU, as it does on a GPU."""
    check = CpuPlatform.check_and_update_config.__func__

    def check_and_split(platform, vllm_config):
        check(platform, vllm_config)
        compilation = vllm_config.compilation_config
        compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "inductor"
        compilation.splitting_ops = [fused_append._ATTENTION_OP, NAME_OF_UPDATE]
        compilation.compile_sizes = []
        compilation.pass_config = PassConfig()  # no passes: they fuse kernels that vLLM has on GPUs alone

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_split))
    # Not one that can be left out; it names such kernels.
    monkeypatch.setattr(FixFunctionalizationPass, "__call__", lambda self, graph: None)
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")


@pytest.mark.newest
def test_tokens_of_compiled_pieces_equal_transformers(start_engine, deepseek_v3, appended, compiled_pieces):
    llm = start_engine(
        deepseek_v3.path, attention_backend=NAME, max_num_batched_tokens=256, enforce_eager=False
    )
    assert NAME_OF_OP in llm.llm_engine.vllm_config.compilation_config.splitting_ops
    appended.clear()
    assert_tokens(generate(llm, deepseek_v3), deepseek_v3)
    assert appended and all(appended)


@pytest.mark.newest
def test_a_models_drafts_keep_vllms_way(start_engine, deepseek_v3):
    mtp = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": NAME}
    llm = start_engine(deepseek_v3.path, attention_backend=NAME, speculative_config=mtp)
    assert_tokens(generate(llm, deepseek_v3), deepseek_v3)
    *layers, draft = attention_layers(llm)
    assert [layer.impl.why_not_fused for layer in layers] == [None] * len(layers)
    assert draft.impl.why_not_fused == "in draft models"


def test_switched_off_it_leaves_all_to_vllm(start_engine, deepseek, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_AROUND_ATTENTION", "0")
    messages = []
    monkeypatch.setattr(metadata.logger, "info_once", lambda text, *values: messages.append(text % values))
    monkeypatch.setattr(FusedAppend, "run", None)
    llm = start_engine(deepseek.path, attention_backend=NAME)
    assert not any(w.is_fused for w in wrappers(llm))
    assert_tokens(generate(llm, deepseek), deepseek)
    assert "vLLM's kernels append new tokens (MLA_BACKEND_AROUND_ATTENTION=0)" in messages[0]


def test_other_backends_are_left_alone(start_engine, deepseek):
    llm = start_engine(deepseek.path, attention_backend="CPU_MLA")
    assert wrappers(llm) and not any(w.is_fused for w in wrappers(llm))


# ---- The op


def layer_of(kv_dtype=torch.float32) -> SimpleNamespace:
    """vLLM's attention layer, as far as the op looks at it; its attention has a launch."""
    attention = MLAImpl.__new__(MLAImpl)
    attention.kv_format = cache_format(kv_dtype)
    attention.fused_append = FusedAppend()
    attention.fused_append.launch = RotaryAppend(torch.float32, "cpu")
    width = attention.kv_format.row_width(D_C, D_ROPE)
    kv_cache = torch.zeros(5, 4, width * attention.kv_format.storage.itemsize, dtype=torch.uint8)
    return SimpleNamespace(
        impl=attention,
        kv_cache=kv_cache.view(attention.kv_format.storage),
        _k_scale=torch.tensor(0.5),
        layer_name="layer",
    )


@contextlib.contextmanager
def step(layer, slots):
    """vLLM's context of a forward pass; without slots that of a profiling run."""
    config = VllmConfig()
    config.compilation_config.static_forward_context["layer"] = layer
    with set_forward_context(None, config, slot_mapping={} if slots is None else {"layer": slots}):
        yield get_forward_context()


def arguments(tokens: int) -> dict:
    torch.manual_seed(tokens)
    return {
        "q": torch.randn(tokens, HEADS, D_NOPE + D_ROPE),
        "kv_lora": torch.randn(tokens, 5 + D_C + D_ROPE)[:, 5:],
        "positions": torch.arange(tokens) + 7,
        "norm_weight": torch.randn(D_C),
        "norm_eps": EPS,
        "cos_sin_cache": torch.randn(40, D_ROPE),
        "interleaved": True,
        "layer_name": fused_append._encode_layer_name("layer"),
        "kv_c_normed": torch.full((tokens, D_C), torch.nan),
        "k_pe": torch.full((tokens, 1, D_ROPE), torch.nan),
    }


def results_of(given: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalized latents and rotated keys that the op writes."""
    OP(*given.values())
    return given["kv_c_normed"], given["k_pe"]


def expected_rows(given: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries, normalized latents and rotated keys in fp64."""
    angles = given["cos_sin_cache"][given["positions"]]
    return (
        rotated_by(given["q"][..., D_NOPE:], angles, given["interleaved"]),
        normalized(given["kv_lora"][:, :D_C], given["norm_weight"], EPS),
        rotated_by(given["kv_lora"][:, D_C:], angles, given["interleaved"]),
    )


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("slots", [[17, -1, 2], [17], None], ids=str)
def test_the_op_normalizes_rotates_and_appends(slots, interleaved):
    """Also in a graph's batch, whose tokens without slots are padding, and in a profiling run."""
    layer, given = layer_of(), arguments(3) | {"interleaved": interleaved}
    q_nope, kv_lora = given["q"][..., :D_NOPE].clone(), given["kv_lora"].clone()
    q_rope, kv_c, k_rope = expected_rows(given)
    with step(layer, None if slots is None else torch.tensor(slots)):
        kv_c_normed, k_pe = results_of(given)
    real = 3 if slots is None else len(slots)
    close(given["q"][:real, :, D_NOPE:], q_rope[:real])
    close(kv_c_normed[:real], kv_c[:real])
    close(k_pe[:real, 0], k_rope[:real])
    assert torch.equal(given["q"][..., :D_NOPE], q_nope) and torch.equal(given["kv_lora"], kv_lora)
    rows = layer.kv_cache.view(20, -1)
    kept = [(token, slot) for token, slot in enumerate(slots or ()) if slot >= 0]
    for token, slot in kept:
        close(rows[slot], torch.cat([kv_c[token], k_rope[token]]))
    assert rows.any(dim=1).sum() == len(kept)


def test_a_layers_first_step_is_checked():
    """And the first one in another cache, which a layer has when its engine sleeps and wakes up."""
    layer, checked = layer_of(), []
    layer.impl.fused_append.launch = lambda *, check, **tensors: checked.append(check)
    for cache in (layer.kv_cache, layer.kv_cache, layer.kv_cache.clone()):
        layer.kv_cache = cache
        for tokens in (3, 2):
            with step(layer, torch.arange(tokens)):
                OP(*arguments(tokens).values())
    assert checked == [True, False, False, False, True, False]


def test_an_e4m3_cache_has_the_layers_scale():
    layer, given = layer_of(torch.float8_e4m3fn), arguments(2)
    layer.kv_cache = layer.kv_cache.view(torch.uint8)  # as vLLM keeps it
    _, kv_c, k_rope = expected_rows(given)
    with step(layer, torch.tensor([3, 4])):
        OP(*given.values())
    written = layer.kv_cache.view(torch.float8_e4m3fn).view(20, -1)[3:5].float() * 0.5
    torch.testing.assert_close(written.double(), torch.cat([kv_c, k_rope], 1), rtol=1 / 16, atol=2**-10)


def graph(q, kv_lora, *others):
    """Queries and latents from another operation, and the op."""
    *others, _, _ = others
    q, kv_lora = (q * 1.0).view(-1, HEADS, D_NOPE + D_ROPE), kv_lora * 1.0
    kv_c_normed, k_pe = kv_lora.new_empty(len(q), D_C), kv_lora.new_empty(len(q), 1, D_ROPE)
    OP(q, kv_lora, *others, kv_c_normed, k_pe)
    return q, kv_c_normed, k_pe


def doubled(*tensors):
    """Another piece behind that of the op."""
    return [2.0 * result for result in graph(*tensors)]


@pytest.mark.newest  # in vLLM 0.29, a finalizer of vLLM's linear layers leaves tracing broken in this process
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_graph_sees_rotated_queries(backend):
    """The op's mutation of a view of them is declared. The number of tokens may vary."""
    layer, given = layer_of(), arguments(3)
    for name in ("q", "kv_lora", "positions"):
        torch._dynamo.mark_dynamic(given[name], 0)
    q_rope, kv_c, k_rope = expected_rows(given)

    with step(layer, torch.tensor([5, 6, 7])):
        q, kv_c_normed, k_pe = torch.compile(doubled, backend=backend, fullgraph=True)(*given.values())
    close(q[..., D_NOPE:], 2 * q_rope)
    close(kv_c_normed, 2 * kv_c)
    close(k_pe[:, 0], 2 * k_rope)
    close(layer.kv_cache.view(20, -1)[5:8], torch.cat([kv_c, k_rope], 1))


def test_the_op_does_what_it_declares():
    """That it changes the queries and the tensors for its results, and nothing else."""
    layer, given = layer_of(), arguments(3)
    with step(layer, torch.tensor([5, 6, 7])):
        torch.library.opcheck(OP, tuple(given.values()), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.newest  # likewise
def test_vllm_runs_the_op_between_compiled_pieces():
    """Once `_fuse` has added its name to those at which vLLM splits graphs."""
    layer, given, pieces = layer_of(), arguments(3), []

    def split(traced, example_inputs):
        whole, items = compilation_backends.split_graph(traced, [NAME_OF_OP])
        pieces.extend([item.is_splitting_graph, item.graph.code] for item in items)
        return whole

    q_rope, kv_c, _ = expected_rows(given)
    with step(layer, torch.tensor([5, 6, 7])):
        q, kv_c_normed, _ = torch.compile(doubled, backend=split, fullgraph=True)(*given.values())
    close(q[..., D_NOPE:], 2 * q_rope)
    close(kv_c_normed, 2 * kv_c)
    assert [splits for splits, code in pieces] == [False, True, False]
    assert ["normalize_rotate_append" in code for _, code in pieces] == [False, True, False]


@pytest.mark.newest  # likewise
def test_vllm_runs_the_op_and_its_cache_update_as_one_piece():
    """Each piece takes time on the host, for which prompts wait."""
    given, pieces = arguments(3), []
    attention = SimpleNamespace(
        use_direct_call=False, layer_name="layer", kv_cache_dtype="auto", _k_scale=torch.tensor(0.5)
    )
    names = [NAME_OF_OP, NAME_OF_UPDATE, fused_append._ATTENTION_OP]

    def split(traced, example_inputs):
        _, items = compilation_backends.split_graph(traced, names)
        pieces.extend(item.graph.code for item in items if item.is_splitting_graph)
        raise NotImplementedError("not run")

    def attend(*tensors):
        q, *results = graph(*tensors)
        return MLAAttention.forward(attention, q, *results, output_shape=(len(q), 16))

    with pytest.raises(Exception, match="not run"):
        torch.compile(attend, backend=split, fullgraph=True)(*given.values())
    ops = [[name.partition("::")[2] in code for name in names] for code in pieces]
    assert ops == [[True, True, False], [False, False, True]]


# ---- The mark


def update(layer, kv_c_normed, k_pe, slots):
    layer.impl.do_kv_cache_update(kv_c_normed, k_pe, layer.kv_cache, slots, "auto", layer._k_scale)


def test_what_the_op_has_appended_is_appended_once():
    layer, given, slots = layer_of(), arguments(3), torch.tensor([5, 6, 7])
    with step(layer, slots):
        results = results_of(given)
    layer.kv_cache.zero_()
    update(layer, *results, slots)
    assert not layer.kv_cache.any(), "the update was to recognize these tokens"
    update(layer, *results, slots)
    assert layer.kv_cache.view(20, -1)[5:8].any(dim=1).all(), "the mark holds for one update"


def test_what_the_op_has_not_appended_is_appended():
    """Other tensors (of a vLLM that copies them), tokens of a run without slots, layers without the op."""
    slots = torch.tensor([5, 6, 7])
    for change in ("copied", "no slots", "no launch", "not fused"):
        layer, given = layer_of(), arguments(3)
        if change == "no launch":
            layer.impl.fused_append.launch = None
        with step(layer, None if change == "no slots" else slots):
            results = results_of(given)
        if change == "copied":
            results = [tensor.clone() for tensor in results]
        if change == "not fused":
            layer.impl.fused_append = None
        layer.kv_cache.zero_()
        update(layer, *results, slots)
        assert layer.kv_cache.view(20, -1)[5:8].any(dim=1).all(), change


def test_a_mark_that_nothing_took_does_not_hold_for_the_next_step():
    layer, given, slots = layer_of(), arguments(3), torch.tensor([5, 6, 7])
    with step(layer, slots):
        OP(*given.values())
    with step(layer, None):
        results = results_of(given)
    layer.impl.fused_append._appended, stale = None, layer.impl.fused_append._appended
    assert stale is None
    update(layer, *results, slots)
    assert layer.kv_cache.view(20, -1)[5:8].any(dim=1).all()


# ---- When vLLM's own way is kept


@pytest.fixture
def given_layer():
    """A layer that nothing speaks against, and the configuration of its engine."""
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.float32)
    config.compilation_config.mode = CompilationMode.NONE
    with set_current_vllm_config(config):
        norm = RMSNorm(D_C, eps=EPS)
        rotary = RotaryEmbedding(D_ROPE, D_ROPE, 40, 10000.0, False, torch.float32)
    layer = SimpleNamespace(
        mla_attn=MLAAttention.__new__(MLAAttention),
        kv_a_layernorm=norm,
        rotary_emb=rotary,
        indexer=None,
        is_sparse=False,
        kv_lora_rank=D_C,
        qk_rope_head_dim=D_ROPE,
        qk_nope_head_dim=D_NOPE,
        q_lora_rank=None,
    )
    vars(layer.mla_attn)["impl"] = SimpleNamespace(dcp_world_size=1)
    with set_current_vllm_config(config):
        yield layer, config


def reasons(layer, config):
    return list(why_not_fused(layer, config))


@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize("neox", [True, False])
def test_a_plain_layer_is_fused(given_layer, neox, q_lora_rank):
    layer, config = given_layer
    layer.q_lora_rank, layer.rotary_emb.is_neox_style = q_lora_rank, neox
    assert reasons(layer, config) == []


def in_engine(**changes):
    def change(layer, config):
        for path, value in changes.items():
            *owners, name = path.split("__")
            owner = config
            for part in owners:
                owner = getattr(owner, part)
            object.__setattr__(owner, name, value)

    return change


def in_layer(**changes):
    return lambda layer, config: vars(layer).update(changes)


def in_norm(**changes):
    return lambda layer, config: vars(layer.kv_a_layernorm).update(changes)


def in_rotary(**changes):
    return lambda layer, config: vars(layer.rotary_emb).update(changes)


class OtherNorm(RMSNorm):
    pass


class OtherAttention(MLAAttention):
    pass


def other_norm(layer, config):
    layer.kv_a_layernorm = OtherNorm(D_C)


def norm_in_16_bits(layer, config):
    layer.kv_a_layernorm.weight.data = layer.kv_a_layernorm.weight.data.half()


def angles_in(dtype):
    def change(layer, config):
        layer.rotary_emb.cos_sin_cache = layer.rotary_emb.cos_sin_cache.to(dtype)

    return change


def on_a_rank(layer, config):
    layer.mla_attn.impl.dcp_world_size = 2


def hisparse(layer, config):
    vars(layer.mla_attn)["hisparse_cache"] = object()


def fuse_in_vllm(layer, config):
    config.compilation_config.pass_config = copy.copy(config.compilation_config.pass_config)
    config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla = True


CONDITIONS = {
    "with decode context parallelism": on_a_rank,
    "with context parallelism of prefill": in_engine(parallel_config__prefill_context_parallel_size=2),
    "with LoRA adapters": in_engine(lora_config=object()),
    "scaled by their position": in_engine(
        model_config__hf_text_config=SimpleNamespace(llama_4_scaling={"beta": 0.1})
    ),
    "fuse_rope_kvcache_cat_mla fuses": fuse_in_vllm,
    "the attention is a OtherAttention": in_layer(mla_attn=OtherAttention.__new__(OtherAttention)),
    "with HiSparse": hisparse,
    "has an indexer (sparse)": in_layer(is_sparse=True),
    "has an indexer": in_layer(indexer=object()),
    "has a gate": in_layer(g_proj=Identity()),
    "one kernel (fuse_qkv_rmsnorm)": in_layer(fuse_qkv_rmsnorm=True),
    "with dcp_q_replicate": in_layer(dcp_q_replicate=True),
    "the norm is a OtherNorm": other_norm,
    "the norm has options (dtype)": norm_in_16_bits,
    "the norm has options (size)": in_norm(variance_size_override=8),
    "the norm has options (weight)": in_norm(has_weight=False),
    "the rotary embedding is missing": in_layer(rotary_emb=None),
    "the rotary embedding is a Identity": in_layer(rotary_emb=Identity()),
    "the rotary embedding has options (part)": in_rotary(rotary_dim=4),
    "the rotary embedding has options (head)": in_rotary(head_size=16),
    "the rotary embedding has options (fp16)": angles_in(torch.float16),
    "multiples of 8: 16, 8, 12, 0": in_layer(qk_nope_head_dim=12),
    "multiples of 8: 16, 8, 8, 20": in_layer(q_lora_rank=20),
    "vLLM's norm computes something else": in_norm(forward_native=lambda x: x),
    "vLLM's rotary embedding computes something else": in_rotary(forward_native=lambda p, q, k: (q, k)),
    "differs from those that were tested (TypeError": in_rotary(forward_native=lambda: None),
}


@pytest.mark.parametrize("reason", CONDITIONS)
def test_vllms_way_is_kept(given_layer, reason):
    layer, config = given_layer
    CONDITIONS[reason](layer, config)
    assert any(reason.split(" (")[0] in found for found in reasons(layer, config))


def test_draft_models_keep_vllms_way(given_layer):
    with compilation_backends.set_model_tag("eagle_head"):
        assert reasons(*given_layer) == ["in draft models"]


def test_switched_off_is_a_reason(given_layer, monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_AROUND_ATTENTION", "0")
    assert reasons(*given_layer) == ["MLA_BACKEND_AROUND_ATTENTION=0"]


@pytest.mark.parametrize(
    "mode, splitting_ops, partition, is_fused",
    [
        (CompilationMode.NONE, [], False, True),
        (CompilationMode.VLLM_COMPILE, [fused_append._ATTENTION_OP], False, True),
        (CompilationMode.VLLM_COMPILE, [], False, False),  # as fuse_attn_quant leaves it
        (CompilationMode.VLLM_COMPILE, None, False, False),
        (CompilationMode.VLLM_COMPILE, [fused_append._ATTENTION_OP], True, False),
        (CompilationMode.STOCK_TORCH_COMPILE, [fused_append._ATTENTION_OP], False, False),
        (CompilationMode.DYNAMO_TRACE_ONCE, [], False, False),
    ],
)
def test_on_a_gpu_graphs_must_be_split_at_attention(
    given_layer, monkeypatch, mode, splitting_ops, partition, is_fused
):
    layer, config = given_layer
    monkeypatch.setattr(fused_append, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(fused_append, "_why_without_kernel", lambda dtype: None)
    compilation = config.compilation_config
    compilation.mode, compilation.splitting_ops = mode, splitting_ops
    compilation.use_inductor_graph_partition = partition
    assert reasons(layer, config) == ([] if is_fused else ["the compiled graph is not split at attention"])


@pytest.mark.parametrize("lora", [None, object()], ids=["fused", "not fused"])
def test_vllm_is_told_where_to_split(given_layer, lora):
    layer, config = given_layer
    attention = layer.mla_attn
    vars(attention).update(_modules={}, impl=MLAImpl.__new__(MLAImpl))
    config.lora_config, config.compilation_config.mode = lora, CompilationMode.VLLM_COMPILE
    config.compilation_config.splitting_ops = [fused_append._ATTENTION_OP]
    assert [fused_append._fuse(layer) for _ in range(2)] == [lora is None] * 2
    added = ["mla_backend::normalize_rotate_append"] * (lora is None)
    assert config.compilation_config.splitting_ops == [fused_append._ATTENTION_OP, *added]
    assert attention.impl.why_not_fused == (None if lora is None else "with LoRA adapters")
    assert isinstance(attention.impl.fused_append, FusedAppend if lora is None else type(None))


@pytest.mark.parametrize(
    "dtype, capability, unavailable, reason",
    [
        (torch.float16, (9, 0), None, None),
        (torch.float32, (9, 0), None, "there is no kernel for torch.float32 on this GPU"),
        (torch.float16, (7, 5), None, "there is no kernel for torch.float16 on this GPU"),
        (torch.float16, (9, 0), "no compiler", "no compiler"),
    ],
)
def test_on_a_gpu_there_must_be_a_kernel(monkeypatch, dtype, capability, unavailable, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(fused_append.jit, "why_unavailable", lambda variants: unavailable)
    assert fused_append._why_without_kernel.__wrapped__(dtype) == reason


def test_a_layer_without_a_kernel_keeps_vllms_way(given_layer, monkeypatch):
    monkeypatch.setattr(fused_append, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(fused_append, "_why_without_kernel", lambda dtype: f"none for {dtype}")
    assert reasons(*given_layer) == ["none for torch.float32"]


STOCK = MultiHeadLatentAttentionWrapper.forward


def scales_queries(layer, positions, hidden_states):
    """As if vLLM scaled what comes out of q_proj: seen in what attention gets."""
    name = "q_proj" if layer.q_lora_rank is None else "q_b_proj"
    project = getattr(layer, name)
    setattr(layer, name, lambda x: (project(x)[0] * 2, None))
    return STOCK(layer, positions, hidden_states)


def gates_the_output(layer, positions, hidden_states):
    return STOCK(layer, positions, hidden_states) * 0.5


def normalizes_keys(layer, positions, hidden_states):
    attend = layer.mla_attn
    layer.mla_attn = lambda q, kv_c, k_pe, **options: attend(q, kv_c, k_pe.sin(), **options)
    return STOCK(layer, positions, hidden_states)


def attends_twice(layer, positions, hidden_states):
    STOCK(layer, positions, hidden_states)
    return STOCK(layer, positions, hidden_states)


def reads_another_attribute(layer, positions, hidden_states):
    return STOCK(layer, positions, hidden_states) + layer.bias


def passes_another_argument(layer, positions, hidden_states):
    attend = layer.mla_attn
    layer.mla_attn = lambda *tensors, **options: attend(*tensors, sinks=None, **options)
    return STOCK(layer, positions, hidden_states)


@pytest.mark.parametrize("has_q_lora", [False, True])
def test_this_vllms_forward_is_known(has_q_lora):
    assert computes_the_same(STOCK, has_q_lora)


@pytest.mark.parametrize("has_q_lora", [False, True])
@pytest.mark.parametrize(
    "changed",
    [scales_queries, gates_the_output, normalizes_keys, attends_twice],
)
def test_a_changed_forward_is_noticed(has_q_lora, changed):
    assert not computes_the_same(changed, has_q_lora)


@pytest.mark.parametrize("changed", [reads_another_attribute, passes_another_argument, gates_the_output])
def test_a_changed_vllm_keeps_its_way(given_layer, monkeypatch, changed):
    monkeypatch.setattr(MultiHeadLatentAttentionWrapper, "forward", changed)
    (reason,) = reasons(*given_layer)
    assert "vLLM" in reason and ("differs" in reason or "computes something else" in reason)


# ---- Registration


def test_the_wrapper_is_replaced_once():
    for _ in range(2):
        mla_backend_vllm.register()
    assert op_registry_oot["MultiHeadLatentAttentionWrapper"] is FusedWrapper


def test_another_plugins_wrapper_stays(monkeypatch, caplog):
    monkeypatch.setitem(op_registry_oot, "MultiHeadLatentAttentionWrapper", Identity)
    fused_append.replace_wrapper()
    assert op_registry_oot["MultiHeadLatentAttentionWrapper"] is Identity
    assert "another plugin has replaced vLLM's MultiHeadLatentAttentionWrapper" in caplog.text


def test_models_with_other_wrappers_say_so():
    assert MLAImpl.why_not_fused is not None and "MultiHeadLatentAttentionWrapper" in MLAImpl.why_not_fused
    assert MLAImpl.fused_append is None and impl.MLAImpl is MLAImpl
