"""What the backend refuses, with the remedy.

:func:`check_before_start` refuses what the configuration alone decides, in the process that the user starts:
within seconds, and as the last line of the error. Workers check the rest when they create their backends, and
what was checked before for the case that SGLang could not be hooked: :func:`check_runner` the cache and the
modes, :func:`check_layer` each layer of the loaded model. Sparse layers have checks of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from mla_backend.batch import TableKind
from mla_backend.engines import FIRST_INDEXER_CAPABILITY
from mla_backend.errors import UnsupportedError
from mla_backend.settings import is_on
from mla_backend_sglang import hooks
from mla_backend_sglang.names import DSA_BACKENDS, DSA_VARIABLE, NAME
from mla_backend_sglang.query_scaling import QueryScaling
from mla_backend_sglang.settings import Settings, plans_on_another_stream, verifies_fewer_drafts

_MODEL_CONFIG = "sglang.srt.configs.model_config"

# Before the start.


def check_before_start(server_args: Any, resolved: Any) -> None:
    """Check what an engine is going to serve, before it starts workers.

    Args:
        server_args: SGLang's ``ServerArgs``.
        resolved: the same arguments after SGLang's own choices.

    Raises:
        InvalidInputError: the model's config is wrong, or its heads cannot be split over the GPUs.
        UnsupportedError: something is not supported, or a kernel is missing and cannot be built; the message
            names the remedy.
    """
    target = set(_backends_of_phases(resolved))
    if NAME in target:
        _check_target(server_args, resolved)
    if _draft_backend(resolved) == NAME:
        _check_draft(server_args, resolved, with_kernels=NAME not in target)
    if is_on(DSA_VARIABLE) and DSA_BACKENDS & target and resolved.device == "cuda":
        from sglang.srt.configs.model_config import ModelConfig

        from mla_backend_sglang.kernel_check import check_kernels

        model_config = ModelConfig.from_server_args(server_args)
        check_sparse_settings(resolved, model_config.hf_text_config, torch.cuda.get_device_capability())
        check_kernels(model_config, resolved, TableKind.LIST)


def _check_target(server_args: Any, resolved: Any) -> None:
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig

    from mla_backend_sglang.kernel_check import check_kernels

    model_config = ModelConfig.from_server_args(server_args)
    _check_selected_keys(model_config)
    _check_model(model_config, model_config.attention_arch == AttentionArch.MLA, is_draft=False)
    _check_cache_option(resolved.kv_cache_dtype, model_config.dtype)
    _check_implementation(resolved)
    _check_modes(Settings(resolved))
    check_speculation(resolved)
    _check_prefill_graphs(resolved)
    check_kernels(model_config, resolved, TableKind.TOKEN)


def _check_draft(server_args: Any, resolved: Any, with_kernels: bool) -> None:
    """Check a draft model that runs on this backend.

    Args:
        with_kernels: also check its kernels, because the target model does not run on this backend.
    """
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig

    from mla_backend_sglang.kernel_check import check_kernels

    check_speculation(resolved)
    model_config = ModelConfig.from_server_args(
        server_args,
        model_path=resolved.speculative_draft_model_path,
        model_revision=resolved.speculative_draft_model_revision,
        is_draft_model=True,
    )
    _check_model(model_config, model_config.attention_arch == AttentionArch.MLA, is_draft=True)
    if with_kernels:
        check_kernels(model_config, resolved, TableKind.TOKEN)


def serves_prefill(resolved: Any) -> bool:
    """Whether this backend serves the target model's prefills."""
    return _backends_of_phases(resolved)[0] == NAME


def _backends_of_phases(resolved: Any) -> tuple[str | None, str | None]:
    """The target model's backends for prefill and for decode."""
    general = resolved.attention_backend
    return resolved.prefill_attention_backend or general, resolved.decode_attention_backend or general


def _draft_backend(resolved: Any) -> str | None:
    """The attention backend of a draft model; None without one.

    SGLang chooses that of other algorithms (DFLASH, DSpark) from a list of its own.
    """
    if getattr(resolved, "speculative_algorithm", None) not in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"):
        return None
    if not resolved.speculative_draft_model_path:
        return None
    own: str | None = getattr(resolved, "speculative_draft_attention_backend", None)
    backends = _backends_of_phases(resolved)
    return own or (NAME if NAME in backends else backends[0])


def _check_selected_keys(model_config: Any) -> None:
    is_sparse = hooks.resolve(f"{_MODEL_CONFIG}.is_deepseek_dsa")
    if is_sparse is not None and is_sparse(model_config.hf_config):
        raise UnsupportedError(f"this model attends to selected keys (DSA), {_ALL_KEYS}")


_ALL_KEYS = (
    "mla_backend to all keys: leave --attention-backend out; with MLA_BACKEND_DSA=1 SGLang's dsa backend "
    "uses mla_backend's kernels"
)


def _check_cache_option(option: str, model_dtype: torch.dtype) -> None:
    """Check --kv-cache-dtype. With "auto" it is the model's dtype, or e4m3 for some checkpoints."""
    is_16_bit = option in ("bf16", "bfloat16")
    if option not in ("auto", "fp8_e4m3") and not (is_16_bit and model_dtype == torch.bfloat16):
        raise _cache_refusal(option, model_dtype, "--kv-cache-dtype")


def _check_implementation(resolved: Any) -> None:
    """Check that SGLang's own model runs, with weights that it has loaded itself."""
    if getattr(resolved, "model_impl", "auto") == "transformers":
        raise UnsupportedError(
            "mla_backend serves SGLang's own models, not those of --model-impl transformers: leave it out"
        )
    if getattr(resolved, "enable_nvidia_megakernel", False):
        raise UnsupportedError(
            "--enable-nvidia-megakernel replaces the model's forward, which then does not call mla_backend: "
            "leave one of the two out"
        )
    if getattr(resolved, "weight_cache_mode", "off") != "off":
        raise UnsupportedError(
            "mla_backend reads kv_b_proj, which layers from a weight cache do not have: leave "
            "--weight-cache-mode out"
        )


def _check_prefill_graphs(resolved: Any) -> None:
    config = resolved.cuda_graph_config  # None before SGLang has resolved it
    if serves_prefill(resolved) and config is not None and config.prefill.backend == "full":
        raise UnsupportedError(
            "mla_backend plans a prefill on the host, so a graph cannot capture all of it: "
            "use --cuda-graph-backend-prefill disabled"
        )


# When a worker creates its backend.


def check_runner(runner: Any) -> None:
    """Check the model, cache and mode of an SGLang ``ModelRunner``.

    Raises:
        UnsupportedError: something is not supported; the message names the remedy.
    """
    settings = Settings()
    _check_model(runner.model_config, runner.use_mla_backend, is_draft(runner))
    _check_cache(runner, settings)
    _check_modes(settings)
    if settings.cache_ranks > 1:
        _check_merge_of_shards()
    check_speculation(settings.speculation)


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
    if speculation.speculative_algorithm == "DSPARK" and verifies_fewer_drafts():
        raise UnsupportedError(
            "mla_backend verifies the same number of drafts of each request, but "
            "SGLANG_RAGGED_VERIFY_MODE=compact varies it: unset SGLANG_RAGGED_VERIFY_MODE"
        )
    if plans_on_another_stream():
        raise UnsupportedError(
            "mla_backend keeps one plan, which the step before may still be reading when SGLang plans on a "
            "stream of its own: unset SGLANG_ENABLE_OVERLAP_PLAN_STREAM (planning does not wait for the GPU)"
        )


def _check_model(model_config: Any, has_latents: bool, is_draft: bool) -> None:
    option = "--speculative-draft-attention-backend" if is_draft else "--attention-backend"
    if not has_latents:
        raise UnsupportedError(
            "mla_backend serves models with Multi-head Latent Attention (DeepSeek-V2/V3, Kimi-K2, "
            f"GLM-4.7-Flash, MiniCPM3, ...), and this model has none: choose another {option}"
        )
    of_cache = getattr(model_config, "qk_rope_head_dim", None)
    of_layers = getattr(model_config.hf_text_config, "qk_rope_head_dim", None)
    if of_cache == 0 and of_layers:
        raise UnsupportedError(
            f"this model's layers have keys with {of_layers} columns, not rotated (use_mla_nope), but "
            "SGLang makes a cache without these columns: "
            f"choose another {option}, or a checkpoint with qk_rope_head_dim 0"
        )
    QueryScaling.of_config(model_config.hf_text_config)
    if has_sinks(model_config.hf_text_config):
        raise UnsupportedError(
            f"mla_backend implements attention sinks, which this model has, in sparse layers alone: "
            f"choose another {option}"
        )


def _check_cache(runner: Any, settings: Settings) -> None:
    # mxfp8 has elements of this dtype too, but also its own scales.
    is_e4m3 = runner.kv_cache_dtype == torch.float8_e4m3fn and _cache_name(runner) != "mxfp8"
    if runner.kv_cache_dtype != runner.dtype and not is_e4m3:
        has_own = getattr(settings.speculation, "speculative_draft_kv_cache_dtype", None) is not None
        option = "--speculative-draft-kv-cache-dtype" if is_draft(runner) and has_own else "--kv-cache-dtype"
        raise _cache_refusal(_cache_name(runner), runner.dtype, option)
    pool = runner.token_to_kv_pool
    if getattr(getattr(pool, "full_kv_pool", pool), "requires_physical_write_loc", False):
        raise UnsupportedError(
            "mla_backend reads cache slots from req_to_token, but with unified memory these are virtual: "
            "leave --enable-unified-memory off"
        )


def _cache_name(runner: Any) -> str:
    """The format of a ``ModelRunner``'s cache, as --kv-cache-dtype spells it if SGLang keeps this name."""
    option = getattr(getattr(runner, "server_args", None), "kv_cache_dtype", "auto")
    name = getattr(runner, "kv_cache_dtype_str", option)  # 0.5.16 lacks it
    return str(runner.kv_cache_dtype).removeprefix("torch.") if name == "auto" else name


def _cache_refusal(name: str, model_dtype: torch.dtype, option: str) -> UnsupportedError:
    dtype = "" if model_dtype == torch.bfloat16 else "--dtype bfloat16 "
    return UnsupportedError(
        f"mla_backend keeps the latent cache in the model's dtype, {model_dtype}, or as fp8_e4m3, but "
        f"this cache is {name} (auto follows the checkpoint): "
        f"start with {option} fp8_e4m3, or with {dtype}{option} bfloat16"
    )


def _check_modes(settings: Settings) -> None:
    if settings.multiplexes_prefill:
        raise UnsupportedError(
            "--enable-pdmux runs a prefill a few layers at a time, which SGLang's DeepSeek models and "
            "mla_backend do not support: leave it off"
        )
    if settings.offloads_weights:
        raise UnsupportedError(
            "mla_backend reads weights where SGLang loaded them, and offloaded weights are not on the GPU: "
            "leave --cpu-offload-gb and --offload-group-size off"
        )
    if settings.prefill_ranks > 1:
        raise UnsupportedError(
            "mla_backend does not split the prefill of a request over GPUs: leave --enable-prefill-cp and "
            "--attn-cp-size off"
        )
    if settings.cache_ranks > 1:
        _check_shard(settings)


def _check_shard(settings: Settings) -> None:
    """Refuse features that decode context parallelism excludes, such as drafts and absorbed prefills."""
    if settings.speculation.speculative_algorithm is not None:
        raise UnsupportedError(
            "mla_backend does not verify drafts with decode context parallelism: leave "
            "--speculative-algorithm or --dcp-size out"
        )
    absorbs = {
        "--enable-deterministic-inference": settings.is_deterministic,
        "--disable-chunked-prefix-cache": settings.is_chunked_prefix_disabled,
    }
    if given := [option for option, is_given in absorbs.items() if is_given]:
        raise UnsupportedError(
            "with decode context parallelism, mla_backend cannot use absorbed attention in prefills: leave "
            f"--dcp-size, or {' and '.join(given)}, out"
        )
    if settings.replicates_queries:
        raise UnsupportedError(
            "SGLang copies query weights for decode context parallelism (--dcp-replicate-q-proj, with some "
            "models by default), and no weight update reaches the copies: use --no-dcp-replicate-q-proj"
        )
    if settings.serves_one_phase and not _transfers_shards():
        raise UnsupportedError(
            "this version of SGLang cannot transfer caches that are divided by decode context parallelism "
            "between servers: leave --dcp-size or --disaggregation-mode out"
        )


def _transfers_shards() -> bool:
    from sglang.srt.disaggregation.common.conn import CommonKVManager

    return hasattr(CommonKVManager, "requires_dcp_relayout")


def _check_merge_of_shards() -> None:
    """Refuse a SGLang that, going by this backend's name, takes its log-sum-exp for a natural logarithm."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    is_base_e = getattr(forward_mla, "is_mla_dcp_lse_base_on_e", None)  # versions without it assume base 2
    if is_base_e is not None and is_base_e(NAME):
        raise UnsupportedError(
            "this version of SGLang merges the outputs of decode context parallelism by natural logarithms, "
            "but mla_backend returns logarithms to base 2: use a supported version, or leave --dcp-size out"
        )


# Layers of a loaded model.


def check_layers_found(model: Any, modules: Sequence[Any]) -> None:
    """Raises UnsupportedError if ``modules``, those of a model that make attention calls, are none."""
    if not modules:
        raise UnsupportedError(
            f"mla_backend finds no attention layers in {type(model).__name__}, as with --model-impl "
            "transformers: leave --model-impl out, or choose another --attention-backend"
        )


def check_layer(module: Any, calls: Sequence[Any], cannot_expand: bool) -> None:
    """Refuse a layer at start that would fail, or give wrong results, when it serves a request.

    Args:
        module: a module that makes attention calls.
        calls: its ``RadixAttention`` modules.
        cannot_expand: whether it attends with keys per head, but has nothing to make those of cached tokens.

    Raises:
        UnsupportedError: the layer cannot be served; the message names it.
    """
    name = f"layer {getattr(module, 'layer_id', '?')} ({type(module).__name__})"
    remedy = "choose another --attention-backend"
    if getattr(module, "learnable_sink_param", None) is not None:
        raise UnsupportedError(
            f"{name} has attention sinks, which mla_backend implements in sparse layers alone: {remedy}"
        )
    if getattr(module, "use_dsa", False):
        raise UnsupportedError(f"{name} attends to selected keys (DSA), {_ALL_KEYS}")
    # SGLang's mark of weights that it has packed, for its CPU engine.
    if any(getattr(m, "use_intel_amx_backend", False) for m in (module, getattr(module, "kv_b_proj", None))):
        raise UnsupportedError(
            f"{name} has weights that SGLang packed for Intel AMX, which mla_backend cannot read: use "
            "--attention-backend intel_amx"
        )
    if getattr(module, "use_deep_gemm_bmm", False):
        raise UnsupportedError(
            f"{name} has absorbed weights in 8 bits, but mla_backend keeps them in 16: unset "
            "SGLANG_USE_DEEPGEMM_BMM (SGL_USE_DEEPGEMM_BMM in 0.5.16)"
        )
    if any(call.sliding_window_size > 0 or call.logit_cap for call in calls):
        raise UnsupportedError(
            f"{name} has a sliding window or a soft cap, which mla_backend does not implement: {remedy}"
        )
    if kinds := {kind for call in calls if (kind := _attention_type(call)) != "decoder"}:
        raise UnsupportedError(
            f"{name} is not causal ({', '.join(sorted(kinds))}), but with mla_backend no token attends to "
            f"later ones: {remedy}"
        )
    if cannot_expand:
        raise UnsupportedError(
            f"{name} attends with keys per head, but has no kv_b_proj and w_kc from which mla_backend could "
            f"expand the keys of cached tokens. Layers from GGUF files have none: {remedy}. Layers from a "
            "weight cache have none, either: leave out --weight-cache-mode"
        )


def _attention_type(call: Any) -> str:
    """The value of SGLang's ``AttentionType``: "decoder", "decoder_bidirectional" or "encoder_only"."""
    kind = getattr(call, "attn_type", "decoder")
    return getattr(kind, "value", kind)


_PREPARE_MHA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha"
_PREPARE_MHA += ".DeepseekMHAForwardMixin.forward_normal_prepare"


def check_unscaled_queries() -> None:
    """Raises UnsupportedError if SGLang's MHA forward scales queries by their position itself."""
    hooks.require(_PREPARE_MHA)
    if "llama_4_scaling" in inspect.signature(hooks.resolve(_PREPARE_MHA)).parameters:
        raise hooks.mismatch(f"{_PREPARE_MHA} scales queries by their position itself")


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


# Sparse layers, with MLA_BACKEND_DSA=1.


def has_sinks(text_config: Any) -> bool:
    """Whether a model's heads have attention sinks."""
    return bool(getattr(text_config, "learnable_sink", False))


def stores_records(decode: str | None, prefill: str | None) -> bool:
    """Whether SGLang stores an fp8 cache of sparse layers as records with scales, going by the two
    sub-backends, and not as elements without scales."""
    return {decode, prefill} != {"tilelang"}


def check_sparse_settings(resolved: Any, text_config: Any, capability: tuple[int, int]) -> None:
    """Check an engine's settings after SGLang's own choices, before it loads weights.

    Args:
        resolved: the settings.
        text_config: the HuggingFace config of the language model.
        capability: compute capability of the GPU.

    Raises:
        UnsupportedError: our kernels cannot serve them; the message names the remedy.
    """
    decode, prefill = resolved.dsa_decode_backend, resolved.dsa_prefill_backend
    is_fp8 = resolved.kv_cache_dtype == "fp8_e4m3"
    _check_sparse(
        resolved,
        with_sinks=has_sinks(text_config),
        has_rotary_part=getattr(text_config, "qk_rope_head_dim", None) != 0,
        decode=decode,
        prefill=prefill,
        is_fp8=is_fp8,
        has_records=is_fp8 and stores_records(decode, prefill),
        has_hisparse=resolved.enable_hisparse,
        capability=capability,
    )


def check_sparse_backend(backend: Any, server_args: Any, with_sinks: bool) -> None:
    """Check a ``dsa`` backend that has been made.

    Raises:
        UnsupportedError: our kernels cannot serve it; the message names the remedy.
    """
    is_fp8, has_records = backend.kv_cache_dtype.itemsize == 1, backend.dsa_kv_cache_store_fp8
    decode, prefill = backend.dsa_decode_impl, backend.dsa_prefill_impl
    _check_sparse(
        server_args,
        with_sinks=with_sinks,
        has_rotary_part=backend.qk_rope_head_dim != 0,
        decode=decode,
        prefill=prefill,
        is_fp8=is_fp8,
        has_records=has_records,
        has_hisparse=backend.hisparse_coordinator is not None,
        capability=tuple(backend.device_capability),
    )
    if is_fp8 and has_records is not stores_records(decode, prefill):
        raise sparse_refusal(
            f"the cache is fp8 {'in' if has_records else 'without'} records, which does not go with "
            f"{decode} and {prefill} in this version of SGLang: use --kv-cache-dtype bfloat16"
        )


def _check_sparse(
    settings: Any,
    *,
    with_sinks: bool,
    has_rotary_part: bool,
    decode: str,
    prefill: str,
    is_fp8: bool,
    has_records: bool,
    has_hisparse: bool,
    capability: tuple[int, ...],
) -> None:
    is_fp16 = getattr(settings, "dtype", None) in ("half", "float16")
    is_divided = (getattr(settings, "dcp_size", None) or 1) > 1
    reasons = [
        (
            # With sinks SGLang allows flashmla_sparse alone.
            not with_sinks and not {"fa3", "tilelang"} & {decode, prefill},
            f"they take the place of fa3 and tilelang, but decode runs on {decode} and prefill on {prefill}: "
            "use --dsa-decode-backend fa3",
        ),
        (
            has_records and not has_rotary_part,
            "there is no kernel for records of latents without a rotary part: use --dsa-decode-backend "
            "tilelang --dsa-prefill-backend tilelang, with which SGLang's fp8 caches have no records",
        ),
        (is_fp8 and is_fp16, "SGLang's fp8 caches go with bfloat16 queries: use --dtype bfloat16"),
        (has_hisparse, "HiSparse is on: leave --enable-hisparse off"),
        (is_divided, "context is parallel (DCP): leave --dcp-size out"),
        (
            capability < FIRST_INDEXER_CAPABILITY,
            "SGLang's indexer needs compute capability 9.0: use such a GPU",
        ),
    ]
    for holds, reason in reasons:
        if holds:
            raise sparse_refusal(reason)


def sparse_refusal(reason: str) -> UnsupportedError:
    """The error for sparse layers that our kernels cannot serve."""
    return UnsupportedError(f"{DSA_VARIABLE}=1, but mla-backend's kernels cannot serve: {reason}")
