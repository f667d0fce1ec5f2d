"""Our kernels in the place of fa3 in SGLang's dsa backend: its own method, hooked, against fp64."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from mla_backend import UnsupportedError
from mla_backend_sglang import hooks, refusals, registration, sparse
from mla_backend_sglang.names import DSA_VARIABLE
from tests.support.cases import make_list_case, relative_error

METHODS = ("fa3", "tilelang", "flashmla_sparse")
TILELANG = {"dsa_decode_impl": "tilelang", "dsa_prefill_impl": "tilelang"}
FP8_TILELANG = TILELANG | {"kv_cache_dtype": torch.float8_e4m3fn}
SINKS = {"dsa_decode_impl": "flashmla_sparse", "dsa_prefill_impl": "flashmla_sparse"}
SIZES = {"d_c": 64, "d_rope": 16, "page_size": 1, "num_pages": 500, "device": "cpu", "dtype": torch.float32}


@pytest.fixture(scope="module")
def dsa():
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    return DeepseekSparseAttnBackend


@pytest.fixture(scope="module", autouse=True)
def hook_ends_with_these_tests(dsa):
    from sglang.srt.plugins.hook_registry import HookRegistry

    methods = {name: getattr(dsa, f"_forward_{name}") for name in METHODS}
    yield
    for name, method in methods.items():
        setattr(dsa, f"_forward_{name}", method)
        HookRegistry._hooks.pop(sparse.target(name), None)
        HookRegistry._patched.discard(sparse.target(name))
        hooks.registered.pop(sparse.target(name), None)


def backend_of(cls, **changes):
    made = cls.__new__(cls)
    made.__dict__ |= {
        "num_q_heads": 4,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "kv_cache_dtype": torch.float32,
        "device": torch.device("cpu"),
        "num_splits": 0,
        "dsa_decode_impl": "fa3",
        "dsa_prefill_impl": "flashmla_sparse",
        "dsa_kv_cache_store_fp8": False,
        "hisparse_coordinator": None,
        "device_capability": (9, 0),
        "forward_metadata": None,
    } | changes
    return made


def call(backend, case, lengths=None, **changes):
    """Of fa3, as SGLang does in forward_decode and forward_extend; metadata may be padded."""
    rows = len(case.seq_lens)
    starts = torch.arange(rows + 1, dtype=torch.int32)
    arguments = {
        "q_rope": case.q_rope,
        "kv_cache": case.cache,
        "v_head_dim": 64,
        "q_nope": case.q_nope,
        "page_table": case.lists,
        "cache_seqlens": case.batch.seq_lens if lengths is None else lengths,
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": 1,
        "sm_scale": case.scale,
        "logit_cap": 0.0,
        "page_size": 1,
    }
    return backend._forward_fa3(**arguments | changes)


def call_whole(backend, case, method="tilelang", **changes):
    """Of a method that takes whole queries. Its lists end with entries of -1."""
    backend.forward_metadata = SimpleNamespace(dsa_cache_seqlens_int32=case.batch.seq_lens)
    arguments = {
        "q_all": torch.cat([case.q_nope, case.q_rope], dim=-1),
        "kv_cache": case.cache,
        "page_table_1": case.lists,
        "sm_scale": case.scale,
        "v_head_dim": case.q_nope.shape[-1],
    }
    return getattr(backend, f"_forward_{method}")(**arguments | changes)


def test_sglang_calls_the_method_with_these_arguments(dsa):
    """By name: the hook takes what the method takes, and nothing positional."""
    expected = set(inspect.signature(inspect.unwrap(dsa._forward_fa3)).parameters) - {"self"}
    hook = inspect.signature(sparse.attend).parameters
    named = {name for name, p in hook.items() if p.kind is p.KEYWORD_ONLY}
    assert named <= expected and expected - named == {"cu_seqlens_q", "cu_seqlens_k"}


def test_lists_of_layers_and_steps(dsa):
    sparse.hook("fa3")
    backend = backend_of(dsa)
    layers = [make_list_case([300, 70, 0, 64], num_heads=4, seed=seed, **SIZES) for seed in range(3)]
    lengths = layers[0].batch.seq_lens
    plans = []
    for _ in range(2):  # steps
        for layer in layers:
            out = call(backend, layer, lengths)
            assert relative_error(out, layer.expected()[0]) < 1e-5
            plans.append(backend._mla_backend._plan)
    assert plans[0] is plans[1] is plans[2] is not plans[3] and plans[3] is plans[4] is plans[5]


def test_batches_of_several_sizes_alternate(dsa, monkeypatch):
    """Their decoders are made for powers of 2, of which there are few."""
    sparse.hook("fa3")
    monkeypatch.setattr(sparse, "_MIN_CAPACITY", 2)
    backend = backend_of(dsa)
    sizes = [[300, 70, 0, 64], [9, 200, 3], [5, 6], [7, 40, 30, 20, 10]]
    cases = [make_list_case(lengths, num_heads=4, seed=len(lengths), **SIZES) for lengths in sizes]
    for case in 2 * cases:
        assert relative_error(call(backend, case), case.expected()[0]) < 1e-5
    assert sorted(backend._mla_backend._decoders) == [2, 4, 8]


def test_a_plan_that_another_has_replaced_is_made_again(dsa):
    sparse.hook("fa3")
    backend = backend_of(dsa)
    first, second = (make_list_case([300, 70], num_heads=4, seed=seed, **SIZES) for seed in range(2))
    lengths = first.batch.seq_lens
    call(backend, first, lengths)
    attention = backend._mla_backend
    attention._decoder(2).plan(attention._plan.batch)
    assert relative_error(call(backend, second, lengths), second.expected()[0]) < 1e-5


def test_a_step_that_begins_with_another_layer_is_planned(dsa):
    """Its lengths may lie where those of the step before did: SGLang's metadata tell them apart."""
    sparse.hook("fa3")
    backend = backend_of(dsa, forward_metadata=object())
    layers = [make_list_case([300, 70], num_heads=4, seed=seed, **SIZES) for seed in range(3)]
    plans = []
    for layer, metadata in zip(layers, [backend.forward_metadata] * 2 + [object()], strict=True):
        backend.forward_metadata = metadata
        call(backend, layer, layers[0].batch.seq_lens)
        plans.append(backend._mla_backend._plan)
    assert plans[0] is plans[1] is not plans[2]


def test_records(dsa):
    """SGLang gives an fp8 cache of these layers as e4m3; it has rows of 656 bytes."""
    sparse.hook("fa3")
    sizes = SIZES | {"d_c": 512, "d_rope": 64, "dtype": torch.bfloat16, "kv_dtype": "fp8_ds_mla"}
    case = make_list_case([300, 70, 0, 64], num_heads=4, **sizes)
    records = {"dsa_kv_cache_store_fp8": True, "kv_cache_dtype": torch.float8_e4m3fn, "kv_lora_rank": 512}
    backend = backend_of(dsa, **records, qk_rope_head_dim=64)
    out = call(backend, case, kv_cache=case.cache.view(torch.float8_e4m3fn), v_head_dim=512)
    assert relative_error(out, case.expected()[0]) < 5e-3


@pytest.mark.parametrize("d_rope", [64, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_whole_queries_and_latents_without_a_rotary_part(dsa, dtype, d_rope):
    """As GLM-5.3-Flash's, and in fp8 without scales, as SGLang stores them for tilelang."""
    sparse.hook("tilelang")
    is_fp8 = dtype is torch.float8_e4m3fn
    sizes = SIZES | {"d_c": 512, "d_rope": d_rope, "dtype": torch.bfloat16}
    sizes |= {"kv_dtype": torch.float8_e4m3fn, "kv_scale": 1.0} if is_fp8 else {}
    case = make_list_case([300, 70, 0, 64], num_heads=4, **sizes)
    backend = backend_of(dsa, kv_cache_dtype=dtype, kv_lora_rank=512, qk_rope_head_dim=d_rope)
    assert relative_error(call_whole(backend, case), case.expected()[0]) < 5e-3


def forward_decode(backend, case, **sinks):
    """SGLang's own forward of a layer, from the lists of its indexer on."""
    tokens, heads, d_c = case.q_nope.shape
    starts = torch.arange(tokens + 1, dtype=torch.int32)
    backend.forward_metadata = SimpleNamespace(
        dsa_cache_seqlens_int32=case.batch.seq_lens,
        dsa_cu_seqlens_q=starts,
        dsa_cu_seqlens_k=starts,
        dsa_max_seqlen_q=1,
    )
    backend.use_fused_topk, backend.dsa_topk_backend = True, SimpleNamespace(is_sgl_kernel=lambda: True)
    backend.device_sm_major = 9
    backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer_id: case.cache)
    layer = SimpleNamespace(
        is_cross_attention=False,
        layer_id=0,
        tp_q_head_num=heads,
        v_head_dim=d_c,
        head_dim=d_c + case.q_rope.shape[-1],
        scaling=case.scale,
        logit_cap=0.0,
    )
    given = {"q_rope": case.q_rope, "topk_indices": case.lists} | sinks
    return backend.forward_decode(case.q_nope, None, None, layer, None, **given)


@pytest.mark.newest
@pytest.mark.parametrize("method", ["fa3", "tilelang"])
def test_glm_5_3_flash(dsa, method):
    """Latents of 512 + 0; lists of pooled keys are a little wider than index_topk. In fp8 without scales."""
    sparse.hook(method)
    fp8 = {"kv_dtype": torch.float8_e4m3fn, "kv_scale": 1.0} if method == "tilelang" else {}
    sizes = SIZES | {"d_c": 512, "d_rope": 0, "dtype": torch.bfloat16} | fp8
    case = make_list_case([300, 71, 0, 2], num_heads=4, **sizes)
    implementation = {"dsa_decode_impl": method, "dsa_prefill_impl": method, "dsa_index_kpool": 4}
    dimensions = {"kv_cache_dtype": case.cache.dtype, "kv_lora_rank": 512, "qk_rope_head_dim": 0}
    out = forward_decode(backend_of(dsa, **implementation, **dimensions), case)
    assert relative_error(out, case.expected()[0]) < 5e-3


@pytest.mark.newest
def test_hy_v4(dsa):
    """Attention sinks, which SGLang passes to the method of flashmla_sparse alone."""
    sparse.hook("flashmla_sparse")
    case = make_list_case([300, 70, 0, 64], num_heads=4, **SIZES)
    sinks = torch.tensor([-1.0, 0.5, 3.0, float("-inf")])
    out = forward_decode(backend_of(dsa, **SINKS, dsa_index_kpool=1), case, attn_sink=sinks)
    expected, lse = case.expected()
    share = torch.sigmoid(lse.double() - sinks).nan_to_num(0)
    assert relative_error(out, expected * share.unsqueeze(-1)) < 1e-5


def test_layers_without_sinks_are_left_to_sglang(dsa):
    asked = []

    def original(backend, **arguments):
        asked.append(sorted(arguments))

    names = ["q_all", "kv_cache", "v_head_dim", "page_table_1", "sm_scale", "attn_sink", "topk_length"]
    sparse.attend_with_sinks(original, backend_of(dsa), **dict.fromkeys(names))
    assert asked == [sorted(names)]


def test_padded_metadata(dsa):
    sparse.hook("fa3")
    case = make_list_case([300, 70, 64], num_heads=4, **SIZES)
    padded = torch.cat([case.batch.seq_lens, torch.tensor([1, 1], dtype=torch.int32)])
    out = call(backend_of(dsa), case, padded)
    assert relative_error(out, case.expected()[0]) < 1e-5


@pytest.mark.parametrize(
    "changes", [{"max_seqlen_q": 2}, {"page_size": 64}, {"logit_cap": 30.0}, {"v_head_dim": 32}], ids=str
)
def test_other_calls_are_refused(dsa, changes):
    sparse.hook("fa3")
    case = make_list_case([300], num_heads=4, **SIZES)
    with pytest.raises(UnsupportedError, match="unset MLA_BACKEND_DSA"):
        call(backend_of(dsa), case, **changes)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dsa_decode_impl": "flashmla_kv"}, "use --dsa-decode-backend fa3"),
        (
            {"kv_cache_dtype": torch.float8_e4m3fn},
            "fp8 without records, .* fa3 and flashmla_sparse .*: use --kv-cache-dtype bfloat16",
        ),
        (
            {"kv_cache_dtype": torch.float8_e4m3fn, "dsa_kv_cache_store_fp8": True, "qk_rope_head_dim": 0},
            "without a rotary part: use --dsa-decode-backend tilelang --dsa-prefill-backend tilelang",
        ),
        ({"hisparse_coordinator": object()}, "--enable-hisparse"),
        ({"device_capability": (8, 9)}, "indexer needs compute capability 9.0"),
    ],
)
def test_refused_at_start(dsa, changes, reason):
    check_backend(backend_of(dsa), dcp_size=1)
    with pytest.raises(UnsupportedError, match=reason):
        check_backend(backend_of(dsa, **changes))
    with pytest.raises(UnsupportedError, match="leave --dcp-size out"):
        check_backend(backend_of(dsa), dcp_size=2)
    records = backend_of(dsa, kv_cache_dtype=torch.float8_e4m3fn, dsa_kv_cache_store_fp8=True)
    check_backend(records, dtype="bfloat16")
    with pytest.raises(UnsupportedError, match="use --dtype bfloat16"):
        check_backend(records, dtype="half")


def check_backend(backend, with_sinks=False, **settings):
    refusals.check_sparse_backend(backend, SimpleNamespace(**settings), with_sinks)


@pytest.mark.parametrize(
    "changes, with_sinks, methods",
    [
        ({}, False, ["fa3"]),
        ({"dsa_decode_impl": "flashmla_kv", "dsa_prefill_impl": "fa3"}, False, ["fa3"]),
        ({"dsa_prefill_impl": "tilelang"}, False, ["fa3", "tilelang"]),
        (FP8_TILELANG, False, ["tilelang"]),
        (FP8_TILELANG | {"qk_rope_head_dim": 0, "dsa_index_kpool": 4}, False, ["fa3", "tilelang"]),
        (SINKS, True, ["flashmla_sparse"]),
    ],
    ids=["decode", "prefill", "both", "fp8 without records", "pooled", "sinks"],
)
def test_the_methods_of_chosen_sub_backends_are_replaced(dsa, changes, with_sinks, methods):
    backend = backend_of(dsa, **changes)
    check_backend(backend, with_sinks)
    assert sparse._methods_of(backend, with_sinks) == methods


@pytest.mark.parametrize("num_splits", [0, 1])
def test_deterministic_inference_is_batch_invariant(dsa, num_splits):
    attention = sparse.SparseAttention(backend_of(dsa, num_splits=num_splits))
    assert attention._decoder(1).spec.batch_invariant is (num_splits == 1)


def runner_of(**settings):
    config = SimpleNamespace(hf_text_config=SimpleNamespace())
    return SimpleNamespace(server_args=SimpleNamespace(**settings), model_config=config)


def test_a_backend_is_checked_and_hooked_when_it_is_made(dsa, monkeypatch):
    hooked = []
    monkeypatch.setattr(sparse.hooks, "hook_and_check", lambda *hook: hooked.append(hook))
    backend, runner = backend_of(dsa), runner_of(dcp_size=1)
    create = sparse.wrap_factory(lambda given: backend)
    assert create(runner) is backend and hooked == [(sparse.target("fa3"), sparse.attend)]

    def refuse(attention):
        raise UnsupportedError("no kernel")

    with monkeypatch.context() as patch:
        patch.setattr(sparse.SparseAttention, "check", refuse)
        with pytest.raises(UnsupportedError, match="no kernel"):
            create(runner)
    runner.server_args.dcp_size = 2
    with pytest.raises(UnsupportedError, match="leave --dcp-size out"):
        create(runner)


def test_a_method_with_other_parameters_is_refused(dsa, monkeypatch):
    """As a later version may have it; its first call would fail otherwise."""
    create = sparse.wrap_factory(lambda given: backend_of(dsa))
    runner = runner_of(dcp_size=1)
    monkeypatch.setattr(dsa, "_forward_fa3", lambda self, q_rope, kv_cache, v_head_dim, q_nope, slots: None)
    with pytest.raises(UnsupportedError, match="_forward_fa3 has no parameter cache_seqlens, .*page_table"):
        create(runner)
    monkeypatch.delattr(dsa, "_forward_fa3")
    with pytest.raises(UnsupportedError, match="it has no .*_forward_fa3: use a supported version"):
        create(runner)


def test_plain_torch_on_a_gpu_is_refused(dsa):
    attention = sparse.SparseAttention(backend_of(dsa))
    attention.check()
    spec = SimpleNamespace(device=torch.device("cuda"))
    decoder = SimpleNamespace(spec=spec, implementation="torch", reason="kernels exist for other dimensions")
    attention._decoder = lambda rows: decoder
    with pytest.raises(
        UnsupportedError, match="kernels exist for other dimensions.*use --kv-cache-dtype bfloat16"
    ):
        attention.check()


def test_sglangs_factory_is_wrapped_on_request_only(monkeypatch):
    from sglang.srt.layers.attention import attention_registry

    stock = attention_registry.ATTENTION_BACKENDS["dsa"]
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", dict(attention_registry.ATTENTION_BACKENDS))
    registration._serve_sparse_layers()
    assert attention_registry.ATTENTION_BACKENDS["dsa"] is stock
    monkeypatch.setenv(DSA_VARIABLE, "1")
    registration._serve_sparse_layers()
    wrapped = attention_registry.ATTENTION_BACKENDS["dsa"]
    assert wrapped is not stock and wrapped.__wrapped__ is stock
    registration._serve_sparse_layers()
    assert attention_registry.ATTENTION_BACKENDS["dsa"] is wrapped
