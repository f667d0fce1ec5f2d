"""Our kernels in the place of fa3 in SGLang's dsa backend: its own method, hooked, against fp64."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from mla_backend import UnsupportedError
from mla_backend_sglang import hooks, refusals, registration, sparse
from mla_backend_sglang.names import DSA_VARIABLE
from tests.support.cases import make_list_case, relative_error

SIZES = {"d_c": 64, "d_rope": 16, "page_size": 1, "num_pages": 500, "device": "cpu", "dtype": torch.float32}


@pytest.fixture(scope="module")
def dsa():
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend

    return DeepseekSparseAttnBackend


@pytest.fixture(scope="module", autouse=True)
def hook_ends_with_these_tests(dsa):
    from sglang.srt.plugins.hook_registry import HookRegistry

    method = dsa._forward_fa3
    yield
    dsa._forward_fa3 = method
    HookRegistry._hooks.pop(sparse.TARGET, None)
    HookRegistry._patched.discard(sparse.TARGET)
    hooks.registered.pop(sparse.TARGET, None)


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
    """As SGLang does in forward_decode and forward_extend; metadata may be padded."""
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


def test_sglang_calls_the_method_with_these_arguments(dsa):
    """By name: the hook takes what the method takes, and nothing positional."""
    expected = set(inspect.signature(inspect.unwrap(dsa._forward_fa3)).parameters) - {"self"}
    hook = inspect.signature(sparse.attend).parameters
    named = {name for name, p in hook.items() if p.kind is p.KEYWORD_ONLY}
    assert named <= expected and expected - named == {"cu_seqlens_q", "cu_seqlens_k"}


def test_lists_of_layers_and_steps(dsa):
    hooks.hook_and_check(sparse.TARGET, sparse.attend)
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
    hooks.hook_and_check(sparse.TARGET, sparse.attend)
    monkeypatch.setattr(sparse, "_MIN_CAPACITY", 2)
    backend = backend_of(dsa)
    sizes = [[300, 70, 0, 64], [9, 200, 3], [5, 6], [7, 40, 30, 20, 10]]
    cases = [make_list_case(lengths, num_heads=4, seed=len(lengths), **SIZES) for lengths in sizes]
    for case in 2 * cases:
        assert relative_error(call(backend, case), case.expected()[0]) < 1e-5
    assert sorted(backend._mla_backend._decoders) == [2, 4, 8]


def test_a_plan_that_another_has_replaced_is_made_again(dsa):
    hooks.hook_and_check(sparse.TARGET, sparse.attend)
    backend = backend_of(dsa)
    first, second = (make_list_case([300, 70], num_heads=4, seed=seed, **SIZES) for seed in range(2))
    lengths = first.batch.seq_lens
    call(backend, first, lengths)
    attention = backend._mla_backend
    attention._decoder(2).plan(attention._plan.batch)
    assert relative_error(call(backend, second, lengths), second.expected()[0]) < 1e-5


def test_a_step_that_begins_with_another_layer_is_planned(dsa):
    """Its lengths may lie where those of the step before did: SGLang's metadata tell them apart."""
    hooks.hook_and_check(sparse.TARGET, sparse.attend)
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
    hooks.hook_and_check(sparse.TARGET, sparse.attend)
    sizes = SIZES | {"d_c": 512, "d_rope": 64, "dtype": torch.bfloat16, "kv_dtype": "fp8_ds_mla"}
    case = make_list_case([300, 70, 0, 64], num_heads=4, **sizes)
    records = {"dsa_kv_cache_store_fp8": True, "kv_cache_dtype": torch.float8_e4m3fn, "kv_lora_rank": 512}
    backend = backend_of(dsa, **records, qk_rope_head_dim=64)
    out = call(backend, case, kv_cache=case.cache.view(torch.float8_e4m3fn), v_head_dim=512)
    assert relative_error(out, case.expected()[0]) < 5e-3


def test_padded_metadata(dsa):
    hooks.hook_and_check(sparse.TARGET, sparse.attend)
    case = make_list_case([300, 70, 64], num_heads=4, **SIZES)
    padded = torch.cat([case.batch.seq_lens, torch.tensor([1, 1], dtype=torch.int32)])
    out = call(backend_of(dsa), case, padded)
    assert relative_error(out, case.expected()[0]) < 1e-5


@pytest.mark.parametrize(
    "changes", [{"max_seqlen_q": 2}, {"page_size": 64}, {"logit_cap": 30.0}, {"v_head_dim": 32}], ids=str
)
def test_other_calls_are_refused(dsa, changes):
    hooks.hook_and_check(sparse.TARGET, sparse.attend)
    case = make_list_case([300], num_heads=4, **SIZES)
    with pytest.raises(UnsupportedError, match="unset MLA_BACKEND_DSA"):
        call(backend_of(dsa), case, **changes)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dsa_decode_impl": "flashmla_kv"}, "use --dsa-decode-backend fa3"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "not in records: use --kv-cache-dtype bfloat16"),
        ({"dsa_index_kpool": 4}, "index_kpool"),
        ({"hisparse_coordinator": object()}, "--enable-hisparse"),
        ({"device_capability": (8, 9)}, "indexer needs compute capability 9.0"),
    ],
)
def test_refused_at_start(dsa, changes, reason):
    refusals.check_sparse_backend(backend_of(dsa), SimpleNamespace(dcp_size=1))
    with pytest.raises(UnsupportedError, match=reason):
        refusals.check_sparse_backend(backend_of(dsa, **changes), SimpleNamespace())
    with pytest.raises(UnsupportedError, match="leave --dcp-size out"):
        refusals.check_sparse_backend(backend_of(dsa), SimpleNamespace(dcp_size=2))
    records = backend_of(dsa, kv_cache_dtype=torch.float8_e4m3fn, dsa_kv_cache_store_fp8=True)
    refusals.check_sparse_backend(records, SimpleNamespace(dtype="bfloat16"))
    with pytest.raises(UnsupportedError, match="use --dtype bfloat16"):
        refusals.check_sparse_backend(records, SimpleNamespace(dtype="half"))


def test_one_phase_may_run_on_another_sub_backend(dsa):
    for decode, prefill in (("fa3", "flashmla_sparse"), ("flashmla_kv", "fa3")):
        refusals.check_sparse_backend(
            backend_of(dsa, dsa_decode_impl=decode, dsa_prefill_impl=prefill), SimpleNamespace()
        )


@pytest.mark.parametrize("num_splits", [0, 1])
def test_deterministic_inference_is_batch_invariant(dsa, num_splits):
    attention = sparse.SparseAttention(backend_of(dsa, num_splits=num_splits))
    assert attention._decoder(1).spec.batch_invariant is (num_splits == 1)


def test_a_backend_is_checked_and_hooked_when_it_is_made(dsa, monkeypatch):
    hooked = []
    monkeypatch.setattr(sparse.hooks, "hook_and_check", lambda *hook: hooked.append(hook))
    backend, runner = backend_of(dsa), SimpleNamespace(server_args=SimpleNamespace(dcp_size=1))
    create = sparse.wrap_factory(lambda given: backend)
    assert create(runner) is backend and hooked == [(sparse.TARGET, sparse.attend)]

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
    runner = SimpleNamespace(server_args=SimpleNamespace(dcp_size=1))
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
