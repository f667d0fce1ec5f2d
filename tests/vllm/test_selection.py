"""vLLM selects this backend only on request, and refuses it with a reason where it cannot serve."""

import dataclasses
import inspect
import json
import logging
import math
import operator
import pickle
import re
import sys
import types

import pytest
import torch
from vllm.config import AttentionConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import AttentionSelectorConfig

import mla_backend_vllm
from make_checkpoint import make_checkpoint
from mla_backend import UnsupportedError, jit
from mla_backend_vllm import BACKEND_NAME, BACKEND_PATH, SPARSE_PATH, selection_name
from mla_backend_vllm import platform as selection
from mla_backend_vllm.platform import extend_selection
from mla_backend_vllm.prefill_backend import MLAPrefill
from tests.support.processes import preload, run_forked

pytestmark = pytest.mark.smoke

mla_backend_vllm.register()

NAME = selection_name()
OURS = AttentionBackendEnum[NAME]
STOCK = {backend.get_path() for backend in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA)}


def selector_config(**changes):
    config = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None}
    config |= {"use_mla": True} | changes
    return AttentionSelectorConfig(**config)


def select(backend, platform=current_platform, **changes):
    return platform.get_attn_backend_cls(backend, selector_config(**changes), num_heads=16)


@pytest.fixture
def vllm_log(monkeypatch):
    """The records that vLLM prints from now on. As in vLLM 0.32, logging is configured after plugins load."""
    mla_backend_vllm.register()
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("vllm")
    monkeypatch.setattr(log, "handlers", [handler])
    level = log.level
    log.setLevel(logging.INFO)
    yield records
    log.setLevel(level)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"head_size": 288},
        {"kv_cache_dtype": "bfloat16"},
        *({"kv_cache_dtype": name} for name in ("fp8", "fp8_e4m3", "fp8_ds_mla")),
        {"kv_cache_dtype": "fp8", "head_size": 288, "dtype": torch.float16},
        {"use_batch_invariant": True},
        pytest.param({"use_non_causal": True}, marks=pytest.mark.newest),
        *({"block_size": size} for size in (16, 32, 64, 128)),
    ],
    ids=str,
)
def test_selected_on_the_cpu(changes):
    assert select(OURS, **changes) == BACKEND_PATH


REFUSED = {
    "asks for 'fp8_e5m2': use --kv-cache-dtype bfloat16 or fp8_e4m3": {"kv_cache_dtype": "fp8_e5m2"},
    "asks for 'nvfp4': use --kv-cache-dtype bfloat16 or fp8_e4m3": {"kv_cache_dtype": "nvfp4"},
    "asks for 'fp8_per_token_head': use": {"kv_cache_dtype": "fp8_per_token_head"},
    "asks for 'float16'": {"kv_cache_dtype": "float16"},
    "have 288, but": {"kv_cache_dtype": "fp8_ds_mla", "head_size": 288},
    "or --dtype bfloat16": {"kv_cache_dtype": "fp8_ds_mla", "dtype": torch.float16},
    "pages of 24 tokens are not supported: use a --block-size": {"block_size": 24},
    "dtype not supported: use --dtype bfloat16": {"dtype": torch.float64},
    f'"mla_attention": "{NAME}"': {"use_mla": False, "head_size": 128},
    "no indexer for sparse attention": {"use_sparse": True},
    "sink": {"has_sink": True},
    "sliding window": {"has_sliding_window": True},
    "context parallelism of prefill (PCP)": {"use_pcp": True},
    "attention type encoder": {"attn_type": "encoder"},
    "leave enable_adaptive_verification out": {"use_adaptive_verification": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused_with_a_reason(reason):
    changes = REFUSED[reason]
    if not changes.keys() <= set(AttentionSelectorConfig._fields):
        pytest.skip(f"this vLLM has no {', '.join(changes)}")
    with pytest.raises(ValueError, match=re.escape(reason)) as refusal:
        select(OURS, **changes)
    assert re.search("use |choose |leave |name it ", str(refusal.value)), "what to type instead"
    if changes.keys() & {"block_size", "kv_cache_dtype", "use_pcp"}:
        assert "not supported: choose" not in str(refusal.value), "there is a reason with a remedy"
        assert str(refusal.value).count("not supported") == ("block_size" in changes)


CLASSIC = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64}
CLASSIC |= {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
REFUSED_AT_START = {
    "pages of 24 tokens": {"block_size": 24},
    "asks for 'fp8_e5m2': use": {"kv_cache_dtype": "fp8_e5m2"},
    "have 288, but": {
        "architecture": "minicpm3",
        "model_impl": "transformers",
        "kv_cache_dtype": "fp8_ds_mla",
    },
    "leave out --decode-context-parallel-size": {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
    },
    "no indexer for sparse attention": {"architecture": "deepseek-v3.2"},
    "add --model-impl transformers": {"architecture": "minicpm3"},
    "serves layers with latent attention (MLA), and this model has none": {"architecture": "llama"},
}


@pytest.fixture
def configured(tmp_path):
    """A function that makes the configuration of an engine, as vLLM's first process does."""

    def configure(architecture="deepseek-v2", backend=NAME, **options):
        if architecture == "llama":
            (tmp_path / "config.json").write_text(json.dumps(CLASSIC))
        else:
            make_checkpoint(str(tmp_path), "--architecture", architecture, "--config-only")
        return EngineArgs(str(tmp_path), attention_backend=backend, **options).create_engine_config()

    return configure


@pytest.mark.newest
@pytest.mark.parametrize("reason", REFUSED_AT_START)
def test_what_the_configuration_shows_is_refused_in_the_first_process(configured, reason):
    options = REFUSED_AT_START[reason]
    with pytest.raises(UnsupportedError, match=re.escape(reason)) as refusal:
        configured(**options)
    message = str(refusal.value)
    assert message.startswith(f"{BACKEND_NAME} cannot serve this configuration: ")
    assert message.count("; ") == 0, "one reason"


def test_other_backends_start_with_what_this_one_refuses(configured, monkeypatch):
    configured("minicpm3", backend=None)
    configured("llama", backend=None)
    configured(backend="CPU_MLA", block_size=24)
    monkeypatch.setenv("MLA_BACKEND_DEFAULT", "1")  # vLLM then chooses another backend
    configured(backend=None, block_size=24)


def test_at_the_start_a_gpu_is_known_only_if_it_is_this_hosts(cuda_platform, configured, monkeypatch):
    from mla_backend_vllm.refusals import refuse_at_start

    config = configured()
    refuse_at_start(cuda_platform(9, 0), config)
    with pytest.raises(UnsupportedError, match="this GPU has 7.5"):
        cuda_platform(7, 5).check_and_update_config(config)
    for name, value in {
        "distributed_executor_backend": "ray",
        "nnodes": 2,
        "data_parallel_size_local": 0,
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(config.parallel_config, name, value)
            refuse_at_start(cuda_platform(7, 5), config)


def test_latent_rows_are_known_by_both_of_their_parts(cuda_platform, configured, monkeypatch):
    """448 + 128 values are as many as 512 + 64."""
    from mla_backend_vllm.impl import MLAImpl
    from mla_backend_vllm.refusals import current_platform as platform_of_refusals

    config, platform = configured(), cuda_platform(9, 0)
    for name, value in {"kv_lora_rank": 448, "qk_rope_head_dim": 128}.items():
        monkeypatch.setattr(config.model_config.hf_text_config, name, value)
    reason = r"latent rows of 512 \+ 64, 256 \+ 32, .* model's rows have 448 \+ 128: choose another"
    with set_current_vllm_config(config), pytest.raises(ValueError, match=reason):
        select(OURS, platform)
    # Layers of a draft may be others than those of the model.
    monkeypatch.setattr(type(platform_of_refusals), "is_cuda", lambda self: True)
    with set_current_vllm_config(config), pytest.raises(UnsupportedError, match=reason):
        MLAImpl(**_layer() | {"kv_lora_rank": 448, "qk_rope_head_dim": 128})


def test_fp32_is_refused_on_a_gpu(monkeypatch):
    from mla_backend_vllm import backend

    assert backend.VllmMLABackend.supports_dtype(torch.float32)
    monkeypatch.setattr(backend, "current_platform", types.SimpleNamespace(is_cpu=lambda: False))
    assert not backend.VllmMLABackend.supports_dtype(torch.float32)


def test_a_cpu_platform_without_prefill_for_mla_is_refused(monkeypatch):
    from mla_backend_vllm import refusals

    enum = types.SimpleNamespace(__members__={})
    monkeypatch.setattr(refusals, "MLAPrefillBackendEnum", enum)
    with pytest.raises(ValueError, match="has no prefill for MLA: use 0.29 or later"):
        select(OURS)


def test_the_cache_of_records_has_rows_of_656_bytes():
    """Older versions of vLLM ask for the shape."""
    from mla_backend_vllm.backend import VllmMLABackend

    for name, width in (("auto", 576), ("fp8", 576), ("fp8_ds_mla", 656)):
        assert VllmMLABackend.get_kv_cache_shape(3, 64, 1, 576, name) == (3, 64, width)


def test_a_divided_cache_is_refused_on_the_cpu(monkeypatch):
    """vLLM's CPU platform would fail at the first request."""
    from mla_backend_vllm import refusals

    monkeypatch.setattr(refusals, "_divides_cache", lambda: True)
    with pytest.raises(ValueError, match="leave out --decode-context-parallel-size"):
        select(OURS)


@pytest.mark.parametrize(
    "changes",
    [
        {"alibi_slopes": [1.0]},
        {"sliding_window": 128},
        {"logits_soft_cap": 30.0},
        {"attn_type": "encoder"},
        {"kv_sharing_target_layer_name": "model.layers.0.attn"},
    ],
    ids=str,
)
def test_unsupported_layer_options_are_refused(deepseek_path, changes):
    """vLLM does not check these when it selects a backend, so each layer does."""
    from mla_backend_vllm.impl import MLAImpl

    layer = _layer()
    config = EngineArgs(str(deepseek_path), attention_backend=NAME).create_engine_config()
    with set_current_vllm_config(config):
        MLAImpl(**layer)
        with pytest.raises(UnsupportedError, match=re.escape(next(iter(changes)))):
            MLAImpl(**layer | changes)


def test_each_layer_has_its_own_cache_format(deepseek_path):
    from mla_backend_vllm.impl import MLAImpl

    config = EngineArgs(str(deepseek_path), attention_backend=NAME).create_engine_config()
    with set_current_vllm_config(config):
        formats = {
            name: MLAImpl(**_layer() | {"kv_cache_dtype": name}).kv_format.name
            for name in ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")
        }
        assert not MLAImpl(**_layer() | {"kv_cache_dtype": "fp8"}).supports_quant_query_input
    assert formats == {
        "auto": "bfloat16",
        "bfloat16": "bfloat16",
        "fp8": "fp8_e4m3",
        "fp8_e4m3": "fp8_e4m3",
        "fp8_ds_mla": "fp8_ds_mla",
    }


def test_a_layer_refuses_again_what_its_selection_refuses(deepseek_path, monkeypatch):
    """vLLM selects once for engines that follow each other in a process."""
    from mla_backend_vllm.impl import MLAImpl

    config = EngineArgs(str(deepseek_path), attention_backend=NAME).create_engine_config()
    with set_current_vllm_config(config):
        MLAImpl(**_layer())
        monkeypatch.setattr(config.model_config.hf_text_config, "learnable_sink", True, raising=False)
        with pytest.raises(UnsupportedError, match="attention sinks"):
            MLAImpl(**_layer())


def test_a_layer_refuses_again_a_connector_that_does_not_see_ranks(divided):
    from mla_backend_vllm.impl import MLAImpl

    divided.kv_connector = "OffloadingConnector"
    MLAImpl(**_layer())
    divided.kv_connector = "MooncakeConnector"
    with pytest.raises(UnsupportedError, match="MooncakeConnector does not see that ranks divide the cache"):
        MLAImpl(**_layer())


def test_a_layer_warns_once_of_an_untested_version(deepseek_path, monkeypatch, vllm_log):
    from mla_backend_vllm import impl

    config = EngineArgs(str(deepseek_path), attention_backend=NAME).create_engine_config()
    vllm_log.clear()
    monkeypatch.setattr("vllm.__version__", "99.0")
    impl.warn_if_unsupported.cache_clear()
    with set_current_vllm_config(config):
        for _ in range(2):
            impl.MLAImpl(**_layer())
    impl.warn_if_unsupported.cache_clear()
    (message,) = [record.getMessage() for record in vllm_log if record.levelname == "WARNING"]
    assert "99.0 is newer than" in message


def _layer():
    """The arguments of an implementation of DeepSeek-V2's layers."""
    layer = {"num_heads": 16, "head_size": 576, "scale": 0.1, "num_kv_heads": 1, "alibi_slopes": None}
    layer |= {"sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None}
    layer |= {"attn_type": "decoder", "kv_sharing_target_layer_name": None, "q_lora_rank": None}
    layer |= {"kv_lora_rank": 512, "kv_b_proj": None}
    return layer | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128}


@pytest.mark.parametrize(
    "version, relation", [("99.0.1", "newer"), ("0.1", "older"), ("0.33.7", None), ("dev", "dev")]
)
def test_an_untested_vllm_is_logged_once(monkeypatch, vllm_log, version, relation):
    from mla_backend_vllm import impl

    monkeypatch.setattr("vllm.__version__", version)
    impl.warn_if_unsupported.cache_clear()
    for _layer in range(2):
        impl.warn_if_unsupported()
    messages = [record.getMessage() for record in vllm_log]
    assert len(messages) == (relation is not None)
    assert all(f"{relation}" in message and "0.26 to 0.33" in message for message in messages)


@pytest.mark.parametrize("backend", [None, AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.TRITON_MLA])
def test_a_stock_backend_is_selected_without_a_request(backend):
    assert select(backend) in STOCK


def test_default_on_request(monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_DEFAULT", "1")
    assert select(None) == BACKEND_PATH
    assert select(AttentionBackendEnum.CPU_MLA) in STOCK
    assert select(None, has_sink=True) in STOCK, "vLLM must choose where this backend refuses"
    assert select(None, use_mla=False) == AttentionBackendEnum.CPU_ATTN.get_path()


def test_a_mistaken_default_is_an_error_only_where_it_counts(monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_DEFAULT", "yes")
    mla_backend_vllm.register()
    with pytest.raises(ValueError, match="MLA_BACKEND_DEFAULT must be 0 or 1, not 'yes'"):
        select(None)
    assert select(OURS) == BACKEND_PATH
    assert select(None, use_mla=False) == AttentionBackendEnum.CPU_ATTN.get_path()


@pytest.mark.parametrize("block_size", [16, 64])
def test_cpu_without_amx_keeps_the_users_configuration(deepseek_path, monkeypatch, vllm_log, block_size):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)

    def config(backend):
        return EngineArgs(
            str(deepseek_path),
            attention_backend=backend,
            block_size=block_size,
            max_model_len=1024,
            max_num_batched_tokens=96,
            enable_prefix_caching=True,
        ).create_engine_config()

    ours, stock = config(NAME), config("CPU_MLA")
    assert ours.cache_config.block_size == block_size
    messages = [record.getMessage() for record in vllm_log]
    kept = [text for text in messages if text.startswith(f"{BACKEND_NAME} keeps as configured")]
    assert kept and all(("pages of 64 tokens" in text) == (block_size == 64) for text in kept)
    assert ours.cache_config.enable_prefix_caching
    assert ours.scheduler_config.enable_chunked_prefill
    assert ours.scheduler_config.max_num_batched_tokens == 96
    assert stock.cache_config.block_size == 16
    assert not stock.cache_config.enable_prefix_caching


@pytest.mark.parametrize(
    ("backend", "of_mla", "is_default", "selected"),
    [
        (NAME, None, False, True),
        ("CPU_MLA", NAME, False, True),
        (NAME, "CPU_MLA", False, False),
        (None, None, True, True),
        ("CPU_MLA", None, True, False),
        (None, None, False, False),
    ],
)
def test_the_configuration_is_kept_where_this_backend_will_serve(
    monkeypatch, backend, of_mla, is_default, selected
):
    monkeypatch.setenv("MLA_BACKEND_DEFAULT", str(int(is_default)))
    members = {name: name and AttentionBackendEnum[name] for name in (backend, of_mla)}
    per_kind = {"mla_attention": members[of_mla]} if of_mla else {}
    options = types.SimpleNamespace(backend=members[backend], backend_per_kind=per_kind)
    model = types.SimpleNamespace(use_mla=True)
    config = types.SimpleNamespace(attention_config=options, model_config=model)
    assert selection._will_be_selected(config) == selected
    model.use_mla = False
    assert not (is_default and selection._will_be_selected(config))


def test_no_other_option_of_vllm_names_a_backend_of_latent_layers():
    """vLLM plans options for prefill and decode apart (its #48029): `_named_for_mla` has to know them."""
    of_latent_layers = {"backend", "backend_per_kind", "mla_prefill_backend"}
    of_others = {"minimax_m3_msa_decode_backend", "trtllm_ragged_backend"}
    named = {field.name for field in dataclasses.fields(AttentionConfig) if "backend" in field.name}
    assert named <= of_latent_layers | of_others


def reasons(config, kv_format):
    from mla_backend_vllm import refusals

    return "; ".join(refusals.reasons_against_engine(config, kv_format))


def test_prefill_in_fp8_that_reads_context_without_its_scale_is_refused(deepseek_path, monkeypatch):
    from mla_backend.cache_format import E4M3, RECORD_656

    monkeypatch.setattr(
        current_platform, "is_device_capability_family", lambda family: family == 100, raising=False
    )
    config = EngineArgs(str(deepseek_path)).create_engine_config()
    assert not reasons(config, E4M3)
    monkeypatch.setattr(config.attention_config, "use_prefill_query_quantization", True, raising=False)
    assert not reasons(config, RECORD_656) and not reasons(config, None)
    assert "leave it out of --attention-config" in reasons(config, E4M3)


@pytest.mark.parametrize(
    "owner, option, value, reason",
    [
        ("parallel_config", "enable_elastic_ep", True, "leave --enable-elastic-ep off"),
        ("cache_config", "calculate_kv_scales", True, "leave --calculate-kv-scales off"),
        (
            "model_config.hf_text_config",
            "learnable_sink",
            True,
            "attention sinks, .* for sparse attention alone",
        ),
    ],
)
def test_configurations_that_vllm_does_not_check_are_refused_at_selection(
    deepseek_path, monkeypatch, owner, option, value, reason
):
    """With MLA_BACKEND_DEFAULT=1 vLLM then makes its own choice."""
    config = EngineArgs(str(deepseek_path)).create_engine_config()
    with set_current_vllm_config(config):
        select(OURS)
        monkeypatch.setattr(operator.attrgetter(owner)(config), option, value, raising=False)
        with pytest.raises(ValueError, match=reason):
            select(OURS)
        monkeypatch.setenv("MLA_BACKEND_DEFAULT", "1")
        assert select(None) in STOCK


def test_why_vllm_does_not_use_the_latent_attention_of_a_model(deepseek_path, monkeypatch):
    config = EngineArgs(str(deepseek_path)).create_engine_config()
    with set_current_vllm_config(config):
        with pytest.raises(ValueError, match="this layer has none: .*mla_attention.*, or choose another"):
            select(OURS, use_mla=False, head_size=128)
        with monkeypatch.context() as patch:  # as of vLLM's own MiniCPM3
            patch.setattr(type(config.model_config), "use_mla", False)
            with pytest.raises(ValueError, match="does not use its latent .*: add --model-impl transformers"):
                select(OURS, use_mla=False, head_size=128)
        monkeypatch.setattr(type(config.model_config), "using_transformers_backend", lambda model: True)
        with pytest.raises(ValueError, match="use vLLM 0.28 or later with transformers 5.19"):
            select(OURS, use_mla=False, head_size=128)
        monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
        with pytest.raises(ValueError, match="VLLM_MLA_DISABLE .*: unset it"):
            select(OURS, use_mla=False, head_size=128)


def test_records_are_not_appended_by_vllms_fused_kernel():
    from mla_backend.cache_format import E4M3, RECORD_656
    from mla_backend_vllm import impl

    passes = types.SimpleNamespace(fuse_rope_kvcache_cat_mla=True)
    config = types.SimpleNamespace(compilation_config=types.SimpleNamespace(pass_config=passes))
    impl._append_records_unfused(config, E4M3)
    assert passes.fuse_rope_kvcache_cat_mla
    impl._append_records_unfused(config, RECORD_656)
    assert not passes.fuse_rope_kvcache_cat_mla


def test_methods_take_what_vllms_own_take():
    """A method that overrides one of vLLM's takes whatever this version may hand to it."""
    from mla_backend_vllm import backend, impl, metadata, sparse

    classes = [impl.MLAImpl, metadata.MetadataBuilder, backend.VllmMLABackend, MLAPrefill]
    for cls in [*classes, sparse.SparseImpl, sparse.SparseMetadataBuilder, sparse.SparseBackend]:
        for name, method in vars(cls).items():
            taken = parameters(method)
            theirs = next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), None)
            kinds = {parameter.kind for parameter in taken.values()}
            if not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}:
                assert set(parameters(theirs)) <= set(taken), f"{cls.__name__}.{name}"


class WithKernelHook:
    """As vLLM 0.33's sparse implementations, whose attention ends in a method that each backend has."""

    def forward_mqa(self):
        return self._forward_mqa_kernel(is_decode=True)

    def _forward_mqa_kernel(self, *, is_decode):
        raise NotImplementedError


def test_no_method_that_vllm_leaves_to_its_backends_is_reached():
    from mla_backend_vllm import impl, sparse

    class Ours(WithKernelHook):
        def forward_mqa(self):
            """Needs no kernel of vLLM's."""

    assert reached_stubs(WithKernelHook) == {"_forward_mqa_kernel"} and not reached_stubs(Ours)
    for cls in (impl.MLAImpl, sparse.SparseImpl):
        assert not reached_stubs(cls), cls.__name__


def reached_stubs(cls):
    """Methods that only raise NotImplementedError, and are named in another method of the class."""
    methods = {}
    for base in reversed(cls.__mro__):
        methods |= {name: method for name, method in vars(base).items() if inspect.isfunction(method)}
    named = {name: method.__code__.co_names for name, method in methods.items()}
    stubs = {name for name, names in named.items() if names == ("NotImplementedError",)}
    return stubs & set().union(*named.values())


def parameters(method):
    function = getattr(method, "__func__", method)
    return inspect.signature(function).parameters if inspect.isfunction(function) else {}


def test_prefill_backend_for_head_dims_that_vllm_refuses(deepseek_path, monkeypatch):
    from mla_backend_vllm import impl

    def refuse(config):
        raise ValueError("no prefill backend accepts these head dims")

    config = EngineArgs(str(deepseek_path), attention_backend=NAME).create_engine_config()
    impl._ensure_prefill_backend(config)
    assert config.attention_config.mla_prefill_backend is None
    monkeypatch.setattr(impl, "get_mla_prefill_backend", refuse)
    impl._ensure_prefill_backend(config)
    assert config.attention_config.mla_prefill_backend.get_class() is MLAPrefill
    chosen = config.attention_config.mla_prefill_backend = object()  # by the user
    impl._ensure_prefill_backend(config)
    assert config.attention_config.mla_prefill_backend is chosen
    config.attention_config.mla_prefill_backend = None
    other = types.SimpleNamespace(get_path=lambda: "other.plugin.Prefill", name="CUSTOM")
    monkeypatch.setattr(impl, "prefill_member", lambda: other)
    with pytest.raises(UnsupportedError, match=r"registered other.plugin.Prefill in its place .* load mla-b"):
        impl._ensure_prefill_backend(config)
    with set_current_vllm_config(config), pytest.raises(UnsupportedError, match="other.plugin.Prefill"):
        impl.MLAImpl(**_layer())  # asks when it is made


# Of vLLM, without the plugins.
preload("vllm.plugins", "vllm.v1.attention.selector", "vllm.v1.attention.backends.mla.prefill.registry")


@pytest.mark.skipif(NAME != BACKEND_NAME, reason="this vLLM accepts no new names")
@pytest.mark.parametrize(
    "kind, path", [("attention", BACKEND_PATH), ("prefill", mla_backend_vllm.PREFILL_PATH)]
)
def test_names_can_be_unpickled_before_plugins_load(kind, path):
    pickled = pickle.dumps(mla_backend_vllm._registry(kind)[0][BACKEND_NAME])
    output = run_forked(
        exec,
        "import pickle, sys; assert 'mla_backend_vllm' not in sys.modules\n"
        f"b = pickle.loads({pickled!r}); print(b.name, b.get_path())",
    )
    assert output.splitlines()[-1].split() == [BACKEND_NAME, path]


def test_registering_twice_is_harmless_and_loads_no_backend():
    output = run_forked(
        exec,
        "import sys, mla_backend_vllm as m; m.register(); m.register()\n"
        "import torch; print('mla_backend_vllm.backend' in sys.modules, torch.cuda.is_initialized())",
    )
    assert output.splitlines()[-1] == "False False"


# Every process that vLLM starts loads the plugins and then selects a backend.
LOAD_AND_SELECT = """
import torch
from vllm.plugins import load_general_plugins

load_general_plugins()

from vllm.platforms import current_platform
from vllm.v1.attention.selector import AttentionSelectorConfig

for mla in (False, True):
    config = AttentionSelectorConfig(
        head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=mla
    )
    print("SELECTED", current_platform.get_attn_backend_cls(None, config, num_heads=16))
"""


def selected_in(output):
    return [line.split()[1] for line in output.splitlines() if line.startswith("SELECTED")]


def test_default_holds_in_processes_that_vllm_starts():
    output = run_forked(exec, LOAD_AND_SELECT, MLA_BACKEND_DEFAULT="1")
    assert selected_in(output) == [AttentionBackendEnum.CPU_ATTN.get_path(), BACKEND_PATH]


@pytest.mark.parametrize(
    "broken",
    [
        "import vllm.v1.attention.backends.mla.prefill.registry as r; del r.register_mla_prefill_backend",
        "import vllm.v1.attention.backends.registry as r; r.register_backend = None",
    ],
    ids=["moved", "changed"],
)
def test_a_failed_registration_logs_one_warning(broken):
    """vLLM does not catch what a plugin raises, so an exception would keep every model from starting."""
    output = run_forked(exec, f"{broken}\n{LOAD_AND_SELECT}", MLA_BACKEND_DEFAULT="1")
    dense, mla = selected_in(output)
    assert dense == AttentionBackendEnum.CPU_ATTN.get_path()
    assert mla in STOCK
    (warning,) = [line for line in output.splitlines() if "mla-backend could not register" in line]
    assert "Other attention backends work as before" in warning


@pytest.mark.parametrize("accepts_names", [True, False])
def test_custom_is_used_only_where_vllm_accepts_no_names(monkeypatch, accepts_names):
    if accepts_names and NAME != BACKEND_NAME:
        pytest.skip("this vLLM accepts no new names")
    monkeypatch.setattr(mla_backend_vllm, "_accepts_names", lambda backend_enum: accepts_names)
    AttentionBackendEnum.CUSTOM.clear_override()
    try:
        mla_backend_vllm.register()
        assert AttentionBackendEnum.CUSTOM.is_overridden() != accepts_names
        assert accepts_names or AttentionBackendEnum.CUSTOM.get_path() == BACKEND_PATH
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
        monkeypatch.undo()
        mla_backend_vllm.register()


def test_custom_that_nobody_registered_is_warned_of_once(vllm_log):
    if NAME != BACKEND_NAME:
        pytest.skip("this vLLM accepts no new names")
    selection._warn_of_custom.cache_clear()
    custom = AttentionBackendEnum.CUSTOM
    assert select(custom, use_mla=False) == AttentionBackendEnum.CPU_ATTN.get_path()
    register_backend(custom, "other.plugin.Backend")
    try:
        assert select(custom) in STOCK, "it is the other plugin's, not ours"
    finally:
        custom.clear_override()
    assert not [record for record in vllm_log if record.levelname == "WARNING"]
    for _layer in range(2):
        assert select(custom) in STOCK
    (warning,) = [record.getMessage() for record in vllm_log if record.levelname == "WARNING"]
    assert warning == (
        "--attention-backend CUSTOM selects no backend here: mla-backend is MLA_BACKEND in this vLLM"
    )


def test_custom_stays_with_another_plugin_that_holds_it(monkeypatch, vllm_log):
    monkeypatch.setattr(mla_backend_vllm, "_accepts_names", lambda backend_enum: False)
    register_backend(AttentionBackendEnum.CUSTOM, "other.plugin.Backend")
    try:
        mla_backend_vllm.register()
        assert AttentionBackendEnum.CUSTOM.get_path() == "other.plugin.Backend"
        messages = [record.getMessage() for record in vllm_log if record.levelname == "WARNING"]
        (message,) = [m for m in messages if "AttentionBackendEnum.CUSTOM to other.plugin.Backend" in m]
        assert "VLLM_PLUGINS=mla_backend" in message
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
        monkeypatch.undo()
        mla_backend_vllm.register()


def test_the_librarys_records_appear_once_in_vllms_log(vllm_log, monkeypatch):
    mla_backend_vllm.register()
    of_root = logging.Handler()
    of_root.records = []
    of_root.emit = of_root.records.append
    monkeypatch.setattr(logging.getLogger(), "handlers", [of_root])
    logging.getLogger("mla_backend.jit").debug("found nvcc")
    logging.getLogger("mla_backend.jit").info("building 4 kernels")
    assert [record.getMessage() for record in vllm_log] == ["building 4 kernels"]
    assert len(of_root.records) == logging.getLogger("vllm").propagate, "from vLLM's logger alone"


@pytest.fixture
def cuda_platform(monkeypatch):
    """vLLM's CUDA platform with any compute capability, without vLLM's compiled extensions."""
    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(jit, "why_unavailable", lambda variants: None, raising=False)

    def platform(major, minor):
        capability = classmethod(lambda cls, device_id=0: DeviceCapability(major, minor))
        made = type("FakeCudaPlatform", (CudaPlatformBase,), {"get_device_capability": capability})()
        extend_selection(made)
        return made

    return platform


def test_a_platform_that_selects_in_another_way_is_left_as_it_is():
    """Registration then logs a warning, and vLLM's own selection goes on."""

    class Platform:
        def is_cpu(self):
            return True

    platform = Platform()
    with pytest.raises(RuntimeError, match="Platform does not select backends with get_attn_backend_cls"):
        extend_selection(platform)
    assert type(platform) is Platform


def test_other_platforms_than_cuda_and_the_cpu_are_left_as_they_are():
    class Platform(types.SimpleNamespace):
        get_attn_backend_cls = None

    platform = Platform(is_cpu=lambda: False, is_cuda=lambda: False)
    extend_selection(platform)
    assert type(platform) is Platform


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_selected_on_cuda(cuda_platform, capability):
    assert select(OURS, cuda_platform(*capability)) == BACKEND_PATH
    assert select(OURS, cuda_platform(*capability), head_size=288) == BACKEND_PATH


def test_sparse_layers_on_cuda(cuda_platform):
    assert select(OURS, cuda_platform(9, 0), use_sparse=True) == SPARSE_PATH
    for block_size in (64, 256):
        assert select(OURS, cuda_platform(9, 0), use_sparse=True, block_size=block_size) == SPARSE_PATH
    for head_size, kv_cache_dtype in ((512, "auto"), (512, "fp8")):  # GLM-5.3-Flash
        latents = {"head_size": head_size, "kv_cache_dtype": kv_cache_dtype}
        assert select(OURS, cuda_platform(9, 0), use_sparse=True, **latents) == SPARSE_PATH
    assert select(OURS, cuda_platform(9, 0), use_sparse=True, has_sink=True) == SPARSE_PATH
    refused = {
        "DeepGEMM.* needs compute capability 9.0": ((8, 0), {}),
        "--kv-cache-dtype bfloat16": ((9, 0), {"kv_cache_dtype": "fp8_e5m2"}),
        "pages of 16 tokens are not supported: .*of 64 with sparse attention": ((9, 0), {"block_size": 16}),
        "leave VLLM_BATCH_INVARIANT unset": ((9, 0), {"use_batch_invariant": True}),
        "non-causal attention not supported: leave this draft": ((9, 0), {"use_non_causal": True}),
    }
    for reason, (capability, changes) in refused.items():
        with pytest.raises(ValueError, match=reason):
            select(OURS, cuda_platform(*capability), use_sparse=True, **changes)


@pytest.mark.parametrize("use_sparse", [False, True], ids=["dense", "sparse"])
def test_fp8_caches_on_cuda(cuda_platform, use_sparse):
    path = SPARSE_PATH if use_sparse else BACKEND_PATH
    for name in ("fp8", "fp8_e4m3", "fp8_ds_mla"):
        assert select(OURS, cuda_platform(9, 0), use_sparse=use_sparse, kv_cache_dtype=name) == path


def test_a_divided_cache_of_sparse_layers_is_refused(cuda_platform, monkeypatch):
    from mla_backend_vllm import refusals

    monkeypatch.setattr(refusals, "_divides_cache", lambda: True)
    with pytest.raises(ValueError, match="sparse layers: leave out --decode-context-parallel-size"):
        select(OURS, cuda_platform(9, 0), use_sparse=True)


@pytest.fixture
def divided(deepseek_path, monkeypatch):
    """Two ranks divide the cache. Returns the configuration of the transfer, whose connector a test sets."""
    from mla_backend_vllm import refusals

    config = EngineArgs(str(deepseek_path), attention_backend=NAME).create_engine_config()
    transfer = types.SimpleNamespace(kv_connector=None, kv_connector_extra_config={})
    monkeypatch.setattr(config, "kv_transfer_config", transfer)
    monkeypatch.setattr(config.parallel_config, "decode_context_parallel_size", 2)
    monkeypatch.setattr(refusals, "CPU_HAS_DCP", True)
    with set_current_vllm_config(config):
        yield transfer


def test_variants_of_sparse_attention_that_are_not_implemented_are_refused(
    cuda_platform, deepseek_path, monkeypatch
):
    config = EngineArgs(str(deepseek_path)).create_engine_config()
    variants = {
        "leave hisparse_config out of": (config.attention_config, "hisparse_config", object()),
    }
    with set_current_vllm_config(config):
        assert select(OURS, cuda_platform(9, 0), use_sparse=True) == SPARSE_PATH
        for reason, (owner, name, value) in variants.items():
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, value, raising=False)
                with pytest.raises(ValueError, match=reason):
                    select(OURS, cuda_platform(9, 0), use_sparse=True)


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_divided_cache_of_two_servers_is_refused_if_vllm_does_not_compare_them(
    cuda_platform, monkeypatch, divided, is_seen
):
    fields = {"dcp_size": None} if is_seen else {}
    metadata = types.SimpleNamespace(__dataclass_fields__=fields)
    monkeypatch.setattr(
        "vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata.NixlAgentMetadata", metadata
    )
    divided.kv_connector = "NixlConnector"
    if is_seen:
        assert select(OURS, cuda_platform(9, 0)) == BACKEND_PATH
        return
    with pytest.raises(ValueError, match="NixlConnector .* leave out --decode-context-parallel-size"):
        select(OURS, cuda_platform(9, 0))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "connector, serves",
    [
        ("OffloadingConnector", True),
        ("SimpleCPUOffloadConnector", True),
        ("MooncakeStoreConnector", True),
        ("MooncakeConnector", False),
        ("LMCacheConnectorV1", False),
        ("LMCacheMPConnector", False),
        ("AConnectorOfSomebody", False),
    ],
)
def test_a_divided_cache_is_moved_only_by_connectors_that_know_of_it(
    cuda_platform, divided, connector, serves, inside
):
    divided.kv_connector = connector
    if inside:
        divided.kv_connector = "MultiConnector"
        divided.kv_connector_extra_config = {"connectors": [{"kv_connector": connector}]}
    if serves:
        assert select(OURS, cuda_platform(9, 0)) == BACKEND_PATH
        return
    message = f"{connector} does not see that .* leave out --decode-context-parallel-size, or use one of Nixl"
    with pytest.raises(ValueError, match=message):
        select(OURS, cuda_platform(9, 0))


def test_a_divided_cache_in_e4m3_needs_rows_that_vllm_gathers(cuda_platform, divided, monkeypatch):
    from mla_backend_vllm import refusals

    platform = cuda_platform(9, 0)
    monkeypatch.setattr(refusals, "current_platform", platform)
    assert select(OURS, platform, head_size=288) == BACKEND_PATH
    assert select(OURS, platform, kv_cache_dtype="fp8") == BACKEND_PATH
    with pytest.raises(ValueError, match="does not gather e4m3 rows of 288 .*: leave out --decode-context"):
        select(OURS, platform, head_size=288, kv_cache_dtype="fp8")


def test_refused_on_gpus_without_kernels(cuda_platform):
    with pytest.raises(ValueError, match="this GPU has 7.5"):
        select(OURS, cuda_platform(7, 5))


def test_rocm_is_refused_by_name(cuda_platform, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ValueError, match="ROCm"):
        select(OURS, cuda_platform(9, 4))  # what an MI300 reports


NO_COMPILER = "no CUDA compiler found: install one"
NOT_SERVED = {
    "dtype not supported": {"dtype": torch.float64},
    "--kv-cache-dtype bfloat16": {"kv_cache_dtype": "fp8_e5m2"},
    "use --kv-cache-dtype fp8_e4m3, or --dtype bfloat16": {
        "kv_cache_dtype": "fp8_ds_mla",
        "dtype": torch.float16,
    },
    "latent rows of 512 + 64, 256 + 32, 256 + 64, 512 + 0, 512 + 32 or 256 + 0": {"head_size": 321},
    "have 288, but the command line": {"kv_cache_dtype": "fp8_ds_mla", "head_size": 288},
    NO_COMPILER: {},
}


@pytest.mark.parametrize("reason", NOT_SERVED)
def test_limits_on_cuda_are_known_when_vllm_selects(cuda_platform, monkeypatch, reason):
    """If the user names the backend, it is refused with the reason; by default vLLM makes its own choice."""
    if reason == NO_COMPILER:
        monkeypatch.setattr(jit, "why_unavailable", lambda variants: NO_COMPILER, raising=False)
    changes = NOT_SERVED[reason]
    with pytest.raises(ValueError, match=re.escape(reason)):
        select(OURS, cuda_platform(9, 0), **changes)

    def unnamed():
        try:
            return select(None, cuda_platform(9, 0), **changes)
        except ValueError:
            return "vLLM has none"

    stock = unnamed()
    monkeypatch.setenv("MLA_BACKEND_DEFAULT", "1")
    assert unnamed() == stock != BACKEND_PATH


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_default_on_cuda_if_the_user_names_no_backend(cuda_platform, monkeypatch, capability, vllm_log):
    named = (AttentionBackendEnum.FLASH_ATTN_MLA, AttentionBackendEnum.TRITON_MLA)
    paths = [backend.get_path() for backend in named]
    monkeypatch.setenv("MLA_BACKEND_DEFAULT", "1")
    mla_backend_vllm.register()
    platform = cuda_platform(*capability)
    assert select(None, platform) == BACKEND_PATH
    assert [r.getMessage() for r in vllm_log if "Using" in r.getMessage()][-1].startswith("Using MLA_BACKEND")
    assert [backend.get_path() for backend in named] == paths, "a name must still mean the same backend"
    assert select(AttentionBackendEnum.TRITON_MLA, platform) == AttentionBackendEnum.TRITON_MLA.get_path()
    if capability != (10, 0):  # vLLM's own choice for it asks torch about the GPU
        assert select(None, platform, use_mla=False) != BACKEND_PATH


@pytest.mark.parametrize("capability, arch", [((9, 0), "90a"), ((8, 9), "89"), ((12, 0), "120")])
@pytest.mark.parametrize("heads", [None, 16, 128])
def test_only_the_models_kernels_are_needed(
    cuda_platform, deepseek_path, monkeypatch, capability, arch, heads
):
    """With the kernels for its number of heads in the cache, a model needs no compiler."""
    checked = []
    monkeypatch.setattr(jit, "why_unavailable", checked.extend, raising=False)
    config = EngineArgs(str(deepseek_path)).create_engine_config()
    monkeypatch.setattr(type(config.model_config), "get_num_attention_heads", lambda *_: heads)
    if heads is None:
        select(OURS, cuda_platform(*capability))
    else:
        with set_current_vllm_config(config):
            select(OURS, cuda_platform(*capability))
    assert {variant.arch for variant in checked} == {arch}
    assert all("bf16-d512_64" in variant.name for variant in checked)
    sizes = [re.search(r"-r([\dx]+)", variant.name)[1].split("x") for variant in checked]
    rows = {math.prod(map(int, size)) for size in sizes}  # a cluster of two m-blocks has twice the rows
    largest = 128 if arch == "90a" else 64
    assert max(rows) == largest
    assert min(rows) == {None: 8 if arch == "90a" else 16, 16: 16, 128: largest}[heads]


def test_only_the_kernels_of_a_divided_cache_are_needed(cuda_platform, deepseek_path, monkeypatch):
    """vLLM gathers the queries of the ranks that divide the cache."""
    from mla_backend_vllm import refusals

    checked = []
    monkeypatch.setattr(jit, "why_unavailable", checked.extend, raising=False)
    monkeypatch.setattr(refusals, "CPU_HAS_DCP", True)
    config = EngineArgs(str(deepseek_path)).create_engine_config()
    monkeypatch.setattr(type(config.model_config), "get_num_attention_heads", lambda *_: 8)
    monkeypatch.setattr(config.parallel_config, "decode_context_parallel_size", 2)
    with set_current_vllm_config(config):
        select(OURS, cuda_platform(9, 0))
    assert min(int(re.search(r"-r(\d+)", variant.name)[1]) for variant in checked) == 16


def test_only_the_kernel_of_one_token_is_needed_for_sparse_layers(cuda_platform, monkeypatch):
    checked = []
    monkeypatch.setattr(jit, "why_unavailable", checked.extend, raising=False)
    select(OURS, cuda_platform(9, 0), use_sparse=True)
    assert [variant.name for variant in checked] == ["hopper_few_rows-bf16-d512_64-r8-lists"]
