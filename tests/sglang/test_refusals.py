"""What is refused when a worker creates the SGLang backend, with the remedy.

test_registration.py has what is refused before workers start.
"""

import inspect
import types

import pytest
import torch

from mla_backend.errors import InvalidInputError, UnsupportedError
from mla_backend_sglang import refusals, settings
from mla_backend_sglang.settings import Settings

pytestmark = pytest.mark.smoke


def runner(**changes):
    settings = dict(
        use_mla_backend=True,
        dtype=torch.bfloat16,
        kv_cache_dtype=torch.bfloat16,
        token_to_kv_pool=None,
        model_config=types.SimpleNamespace(hf_text_config=types.SimpleNamespace()),
    )
    return types.SimpleNamespace(**(settings | changes))


SCALED = types.SimpleNamespace(hf_text_config=types.SimpleNamespace(llama_4_scaling={"beta": 0.1}))
SHORT = types.SimpleNamespace(qk_rope_head_dim=0, hf_text_config=types.SimpleNamespace(qk_rope_head_dim=0))
UNROTATED = types.SimpleNamespace(
    # As of a model that says use_mla_nope.
    qk_rope_head_dim=0,
    hf_text_config=types.SimpleNamespace(qk_rope_head_dim=64),
)
WITH_SINKS = types.SimpleNamespace(hf_text_config=types.SimpleNamespace(learnable_sink=True))
UNIFIED = types.SimpleNamespace(requires_physical_write_loc=True)


def engine_settings(**changes):
    settings = dict(speculative_algorithm=None, speculative_eagle_topk=None, enable_pdmux=False)
    settings |= dict(cpu_offload_gb=0, offload_group_size=-1)
    settings |= dict(enable_deterministic_inference=False, disable_chunked_prefix_cache=False)
    settings |= dict(disaggregation_mode="null", attn_cp_size=1, attn_dcp_size=1)
    return types.SimpleNamespace(**(settings | changes))


@pytest.fixture
def check(monkeypatch):
    """A function that checks a runner with changes, beside other GPUs, under settings of the engine."""

    def run(parallel, changes, spec):
        given = engine_settings(**parallel, **spec)
        monkeypatch.setattr(Settings, "_group", lambda self, getter: given)
        monkeypatch.setattr(settings, "_changes_by_sglang", list)
        refusals.check_runner(runner(**changes))

    return run


@pytest.mark.parametrize(
    "parallel, changes, spec, message",
    [
        ({}, dict(use_mla_backend=False), {}, "choose another --attention-backend"),
        (
            {},
            dict(kv_cache_dtype=torch.float8_e5m2),
            {},
            r"float8_e5m2 \(auto follows the checkpoint\): start with --kv-cache-dtype fp8_e4m3, or with "
            "--kv-cache-dtype bfloat16",
        ),
        (
            {},
            dict(dtype=torch.float16, kv_cache_dtype=torch.float8_e5m2),
            {},
            "--dtype bfloat16 --kv-cache-dtype bfloat16",
        ),
        (
            {},
            dict(kv_cache_dtype=torch.float8_e5m2, is_draft_worker=True),
            dict(speculative_draft_kv_cache_dtype="fp8_e5m2"),
            "start with --speculative-draft-kv-cache-dtype fp8_e4m3",
        ),
        (
            {},
            dict(kv_cache_dtype=torch.float8_e5m2, is_draft_worker=True),
            {},
            "with --kv-cache-dtype fp8_e4",
        ),
        (
            {},
            dict(kv_cache_dtype=torch.float8_e4m3fn, kv_cache_dtype_str="mxfp8"),
            {},
            "this cache is mxfp8 .*: start with --kv-cache-dtype fp8_e4m3",
        ),
        (
            {},
            dict(
                kv_cache_dtype=torch.float8_e4m3fn,
                server_args=types.SimpleNamespace(kv_cache_dtype="mxfp8"),  # as in 0.5.16
            ),
            {},
            "this cache is mxfp8",
        ),
        ({}, dict(kv_cache_dtype=torch.uint8, kv_cache_dtype_str="nvfp4"), {}, "this cache is nvfp4"),
        ({}, dict(use_mla_backend=False, is_draft_worker=True), {}, "another --speculative-draft-attention"),
        ({}, {}, dict(enable_pdmux=True), "--enable-pdmux .* leave it off"),
        ({}, {}, dict(cpu_offload_gb=4), "leave --cpu-offload-gb and --offload-group-size off"),
        ({}, {}, dict(offload_group_size=2), "leave --cpu-offload-gb and --offload-group-size off"),
        (
            {},
            dict(model_config=UNROTATED),
            {},
            r"64 columns, not rotated \(use_mla_nope\).*choose another --attention-backend, or",
        ),
        ({}, dict(model_config=WITH_SINKS), {}, "attention sinks, .*: choose another --attention-backend"),
        ({}, dict(model_config=UNROTATED, is_draft_worker=True), {}, "another --speculative-draft-attention"),
        ({}, dict(token_to_kv_pool=UNIFIED), {}, "leave --enable-unified-memory off"),
        ({}, dict(token_to_kv_pool=types.SimpleNamespace(full_kv_pool=UNIFIED)), {}, "unified-memory off"),
        (dict(attn_cp_size=2), {}, {}, "leave --enable-prefill-cp and --attn-cp-size off"),
        (dict(attn_dcp_size=2), {}, dict(speculative_algorithm="EAGLE"), "or --dcp-size out"),
        (
            dict(attn_dcp_size=2),
            {},
            dict(enable_deterministic_inference=True),
            "--dcp-size, or --enable-deterministic-inference, out",
        ),
        (
            dict(attn_dcp_size=2),
            {},
            dict(disable_chunked_prefix_cache=True),
            "--dcp-size, or --disable-chunked-prefix-cache, out",
        ),
        (dict(attn_dcp_size=2, dcp_replicate_q_proj=True), {}, {}, "use --no-dcp-replicate-q-proj"),
        ({}, {}, dict(speculative_algorithm="EAGLE", speculative_eagle_topk=4), "--speculative-eagle-topk 1"),
        ({}, {}, dict(speculative_algorithm="NGRAM"), "another --speculative-algorithm"),
    ],
)
def test_refusals_name_the_remedy(check, parallel, changes, spec, message):
    with pytest.raises(UnsupportedError, match=message):
        check(parallel, changes, spec)


def test_plans_beside_the_step_before_are_refused(check, monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    check({}, {}, {})
    with pytest.raises(UnsupportedError, match="unset SGLANG_ENABLE_OVERLAP_PLAN_STREAM"):
        check({}, {}, dict(speculative_algorithm="EAGLE"))


def test_ragged_verification_is_refused(check, monkeypatch):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    check({}, {}, dict(speculative_algorithm="EAGLE"))  # it does not use it
    with pytest.raises(UnsupportedError, match="unset SGLANG_RAGGED_VERIFY_MODE"):
        check({}, {}, dict(speculative_algorithm="DSPARK"))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_divided_caches_between_servers_need_a_sglang_that_transfers_them(check, monkeypatch, role):
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    monkeypatch.setattr(CommonKVManager, "requires_dcp_relayout", None, raising=False)
    check(dict(attn_dcp_size=2), {}, dict(disaggregation_mode=role))
    monkeypatch.delattr(CommonKVManager, "requires_dcp_relayout")
    check({}, {}, dict(disaggregation_mode=role))
    with pytest.raises(UnsupportedError, match="leave --dcp-size or --disaggregation-mode out"):
        check(dict(attn_dcp_size=2), {}, dict(disaggregation_mode=role))


@pytest.mark.parametrize("answer", [None, False, True], ids=["not asked", "base 2", "base e"])
def test_outputs_must_be_merged_to_base_2(check, monkeypatch, answer):
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    name = "is_mla_dcp_lse_base_on_e"
    if answer is None:
        monkeypatch.delattr(forward_mla, name, raising=False)
    else:
        others = {"mla_backend": answer}
        monkeypatch.setattr(forward_mla, name, lambda name: others.get(name, not answer), raising=False)
    check({}, {}, {})  # nothing is merged
    if not answer:
        return check(dict(attn_dcp_size=2), {}, {})
    with pytest.raises(UnsupportedError, match="base 2: use a supported version, or leave --dcp-size out"):
        check(dict(attn_dcp_size=2), {}, {})


@pytest.mark.parametrize("by_user", [False, True])
def test_chunked_prefixes_are_disabled_by_the_user_only(by_user):
    """SGLang also sets the option itself, if the target model's prefills run on a backend like triton."""
    from sglang.srt.model_executor.model_runner_components import misc_utils
    from sglang.srt.runtime_context import get_context

    tells_who = hasattr(get_context(), "overrides_log")  # not 0.5.16
    given = dict(attention_backend="triton", disable_chunked_prefix_cache=by_user)
    with get_context().override_server_args(**given) as arguments:
        values = dict(server_args=arguments, use_mla_backend=True, is_draft_worker=False)
        gate = misc_utils.maybe_disable_chunked_prefix_cache
        gate(**{name: values[name] for name in inspect.signature(gate).parameters})
        assert Settings()._group("get_schedule").disable_chunked_prefix_cache
        assert Settings().is_chunked_prefix_disabled is (by_user or not tells_who)


def test_latents_without_a_rotary_part_are_supported(check):
    check({}, dict(model_config=SHORT), {})


def test_a_scaling_of_queries_must_be_known(check):
    with pytest.raises(InvalidInputError, match="must have positive numbers beta and original_max_pos"):
        check({}, dict(model_config=SCALED), {})
    SCALED.hf_text_config.llama_4_scaling["original_max_position_embeddings"] = 8192
    check({}, dict(model_config=SCALED), {})


def test_queries_that_sglang_scales_in_its_mha_forward_are_refused(monkeypatch):
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha

    refusals.check_unscaled_queries()
    mixin = forward_mha.DeepseekMHAForwardMixin
    monkeypatch.setattr(mixin, "forward_normal_prepare", lambda self, positions, llama_4_scaling=None: None)
    with pytest.raises(UnsupportedError, match="scales queries by their position itself: use a supported"):
        refusals.check_unscaled_queries()
    monkeypatch.delattr(mixin, "forward_normal_prepare")
    with pytest.raises(UnsupportedError, match="it has no .*forward_normal_prepare: use a supported"):
        refusals.check_unscaled_queries()


def test_an_e4m3_cache_is_supported(check):
    check({}, dict(kv_cache_dtype=torch.float8_e4m3fn, kv_cache_dtype_str="fp8_e4m3"), {})
