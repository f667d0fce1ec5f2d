"""Checks of model, cache and mode when a worker creates its backend; drafts are also checked before start."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from mla_backend.errors import UnsupportedError
from mla_backend_sglang import NAME, settings


def check_supported(runner: Any) -> None:
    """Check the model, cache and mode of an SGLang ``ModelRunner``.

    Raises:
        UnsupportedError: something is not supported; the message names the remedy.
    """
    _check_model(runner)
    _check_cache(runner)
    _check_modes()
    check_speculation(settings.speculation())


def cache_name(runner: Any) -> str:
    """The format of a ``ModelRunner``'s cache, as --kv-cache-dtype spells it if SGLang keeps this name."""
    option = getattr(getattr(runner, "server_args", None), "kv_cache_dtype", "auto")
    name = getattr(runner, "kv_cache_dtype_str", option)  # 0.5.16 lacks it
    return str(runner.kv_cache_dtype).removeprefix("torch.") if name == "auto" else name


def is_draft(runner: Any) -> bool:
    """Whether a ``ModelRunner`` runs a draft model. Runners of SGLang's test kit do not say, so: no."""
    return getattr(runner, "is_draft_worker", False)


def check_topk(topk: int) -> None:
    """Check the number of candidates per step of speculative decoding.

    Raises:
        UnsupportedError: there are several candidates.
    """
    if topk > 1:
        raise UnsupportedError(
            f"mla_backend verifies chains of drafts, not trees: use --speculative-eagle-topk 1 (it is {topk})"
        )


def _check_model(runner: Any) -> None:
    option = "--speculative-draft-attention-backend" if is_draft(runner) else "--attention-backend"
    if not runner.use_mla_backend:
        raise UnsupportedError(
            "mla_backend serves models with Multi-head Latent Attention (DeepSeek-V2/V3, Kimi-K2, "
            f"GLM-4.7-Flash, MiniCPM3, ...), and this model has none: choose another {option}"
        )
    # Not from the HuggingFace config: SGLang also sets 0 for a model that says use_mla_nope.
    if getattr(runner.model_config, "qk_rope_head_dim", None) == 0:
        raise UnsupportedError(
            "mla_backend needs latents with a rotary part, but those of this model have none "
            f"(qk_rope_head_dim is 0): choose another {option}"
        )
    if getattr(runner.model_config.hf_text_config, "llama_4_scaling", None):
        raise UnsupportedError(
            "mla_backend does not scale queries by their position, but this model has llama_4_scaling: "
            f"choose another {option}"
        )


def _check_cache(runner: Any) -> None:
    # mxfp8 has elements of this dtype too, but also its own scales.
    is_e4m3 = runner.kv_cache_dtype == torch.float8_e4m3fn and cache_name(runner) != "mxfp8"
    if runner.kv_cache_dtype != runner.dtype and not is_e4m3:
        dtype = "" if runner.dtype == torch.bfloat16 else "--dtype bfloat16 "
        has_own = getattr(settings.speculation(), "speculative_draft_kv_cache_dtype", None) is not None
        option = "--speculative-draft-kv-cache-dtype" if is_draft(runner) and has_own else "--kv-cache-dtype"
        raise UnsupportedError(
            f"mla_backend keeps the latent cache in the model's dtype, {runner.dtype}, or as fp8_e4m3, but "
            f"this cache is {cache_name(runner)} (auto follows the checkpoint): "
            f"start with {option} fp8_e4m3, or with {dtype}{option} bfloat16"
        )
    pool = runner.token_to_kv_pool
    if getattr(getattr(pool, "full_kv_pool", pool), "requires_physical_write_loc", False):
        raise UnsupportedError(
            "mla_backend reads cache slots from req_to_token, but with unified memory these are virtual: "
            "leave --enable-unified-memory off"
        )


def _check_modes() -> None:
    if settings.multiplexes_prefill():
        raise UnsupportedError(
            "--enable-pdmux runs a prefill a few layers at a time, which SGLang's DeepSeek models and "
            "mla_backend do not support: leave it off"
        )
    if settings.offloads_weights():
        raise UnsupportedError(
            "mla_backend reads weights where SGLang loaded them, and offloaded weights are not on the GPU: "
            "leave --cpu-offload-gb and --offload-group-size off"
        )
    parallel = get_parallel()
    if parallel.attn_cp_size > 1:
        raise UnsupportedError(
            "mla_backend does not split the prefill of a request over GPUs: leave --enable-prefill-cp and "
            "--attn-cp-size off"
        )
    if parallel.attn_dcp_size > 1:
        _check_shard()


def _check_shard() -> None:
    """Refuse features that decode context parallelism excludes, such as drafts and absorbed prefills."""
    if settings.speculation().speculative_algorithm is not None:
        raise UnsupportedError(
            "mla_backend does not verify drafts with decode context parallelism: leave "
            "--speculative-algorithm or --dcp-size out"
        )
    absorbs = {
        "--enable-deterministic-inference": settings.is_deterministic(),
        "--disable-chunked-prefix-cache": settings.is_chunked_prefix_disabled(),
    }
    if given := [option for option, is_on in absorbs.items() if is_on]:
        raise UnsupportedError(
            "with decode context parallelism, mla_backend cannot use absorbed attention in prefills: leave "
            f"--dcp-size, or {' and '.join(given)}, out"
        )
    if getattr(get_parallel(), "dcp_replicate_q_proj", False):  # from 0.5.23 on
        raise UnsupportedError(
            "SGLang copies query weights for decode context parallelism (--dcp-replicate-q-proj, with some "
            "models by default), and no weight update reaches the copies: use --no-dcp-replicate-q-proj"
        )
    if settings.serves_one_phase() and not _transfers_shards():
        raise UnsupportedError(
            "this version of SGLang cannot transfer caches that are divided by decode context parallelism "
            "between servers: leave --dcp-size or --disaggregation-mode out"
        )
    if _merges_to_base_e():
        raise UnsupportedError(
            "this version of SGLang merges the outputs of decode context parallelism by natural logarithms, "
            "but mla_backend returns logarithms to base 2: use a supported version, or leave --dcp-size out"
        )


def _transfers_shards() -> bool:
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    return hasattr(CommonKVManager, "requires_dcp_relayout")


def _merges_to_base_e() -> bool:
    """Whether SGLang, going by this backend's name, takes its log-sum-exp for a natural logarithm."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    is_base_e = getattr(forward_mla, "is_mla_dcp_lse_base_on_e", None)  # versions without it assume base 2
    return is_base_e is not None and is_base_e(NAME)


def check_layers_of_shard(model: Any) -> None:
    """Check that SGLang divides the cache of all attention layers with latents.

    Raises:
        UnsupportedError: there is a layer whose cache it does not divide; the message names the remedy.
    """
    for name, module in model.named_modules():
        if not hasattr(module, "attn_mqa"):
            continue
        has_adapters = hasattr(getattr(module, "kv_b_proj", None), "set_lora")
        if not hasattr(module, "attn_mqa_for_dcp_decode") or has_adapters:
            raise UnsupportedError(
                f"{name} cannot attend with decode context parallelism, as in MiniCPM3 or with LoRA adapters "
                "of kv_b_proj: leave --dcp-size out"
            )


def check_speculation(speculation: Any) -> None:
    """Check an object with the ``speculative_*`` settings.

    Raises:
        UnsupportedError: such drafts are not supported; the message names the remedy.
    """
    if speculation.speculative_algorithm == "NGRAM":
        raise UnsupportedError(
            "mla_backend verifies chains of drafts, but SGLang combines n-grams into trees: "
            "use another --speculative-algorithm"
        )
    if speculation.speculative_algorithm is None:
        return
    check_topk(speculation.speculative_eagle_topk or 1)
    if speculation.speculative_algorithm == "DSPARK" and settings.verifies_fewer_drafts():
        raise UnsupportedError(
            "mla_backend verifies the same number of drafts of each request, but "
            "SGLANG_RAGGED_VERIFY_MODE=compact varies it: unset SGLANG_RAGGED_VERIFY_MODE"
        )
    if settings.plans_on_another_stream():
        raise UnsupportedError(
            "mla_backend keeps one plan, which the step before may still be reading when SGLang plans on a "
            "stream of its own: unset SGLANG_ENABLE_OVERLAP_PLAN_STREAM (planning does not wait for the GPU)"
        )
