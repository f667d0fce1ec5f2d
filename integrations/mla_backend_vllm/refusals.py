"""All that this backend refuses in vLLM, each with a reason and what to type instead.

vLLM asks for reasons when a layer selects its backend: in a worker, minutes after the start. What the
configuration alone shows, `refuse_at_start` refuses before that, in the process that the user has started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers
from vllm import envs
from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from mla_backend import TableKind, UnsupportedError, engines, jit, kernels
from mla_backend.cache_format import E4M3, CacheFormat, cache_format
from mla_backend.kernels.base import DIMENSIONS, ELEMENTS, FIRST_CAPABILITY
from mla_backend.spec import DecoderSpec
from mla_backend_vllm import (
    BACKEND_NAME,
    BACKEND_PATH,
    PREFERRED_PAGE_SIZE,
    SPARSE_PATH,
    is_this_backend,
    selection_name,
)
from mla_backend_vllm.prefill_backend import is_gathered_by_vllm
from mla_backend_vllm.scales import FP8_FORMATS

CPU_HAS_DCP = False
"""Whether vLLM's CPU platform has all that decode context parallelism needs; it assigns no slots for it.
Tests whose ranks do that set it."""

KNOW_SHARDS = ("OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector")
"""vLLM's connectors, beside those of NIXL, that tell the ranks' parts of a page from each other."""

BENCHMARKS_KNOWING_SHARDS = ("DecodeBenchConnector",)
"""Likewise, but they fill the cache with made-up values, so no message advises them."""

CHOOSE_THEMSELVES = ("deepseek_v4", "dots3")
"""How the types of those models begin whose layers use backends of their own, whatever the user names."""

EXPAND_LATENTS = ("minicpm3",)
"""The types of those models whose implementation in vLLM uses no latent attention."""


# ---- In the process that the user has started


def refuse_at_start(platform: Any, vllm_config: Any) -> None:
    """Refuse what the configuration shows to be unsupported, if the user names this backend for its layers.

    Layers that select a backend are checked again: the configuration does not show all layers of all models.

    Raises:
        UnsupportedError: what is not supported, and what to type instead.
    """
    # While it builds a model, vLLM makes further configurations, of drafts and of a model's parts.
    if vllm_config.model_config is None or get_current_vllm_config_or_none() is not None:
        return
    with set_current_vllm_config(vllm_config):
        reasons = _reasons_at_start(platform, vllm_config)
    if reasons:
        raise UnsupportedError(f"{BACKEND_NAME} cannot serve this configuration: {'; '.join(reasons)}")


def _reasons_at_start(platform: Any, vllm_config: Any) -> list[str]:
    model = vllm_config.model_config
    model_type = str(getattr(model.hf_text_config, "model_type", None))
    if model_type.startswith(CHOOSE_THEMSELVES):
        return []
    if model.use_mla and (dimensions := _latent_dimensions(model)) is not None:
        use_sparse = getattr(model.hf_text_config, "index_topk", None) is not None
        backend = resolve_obj_by_qualname(SPARSE_PATH if use_sparse else BACKEND_PATH)
        capability = platform.get_device_capability() if _runs_on_this_host(vllm_config) else None
        selection = _selection(vllm_config, sum(dimensions), use_sparse)
        return list(backend.validate_configuration(device_capability=capability, **selection))
    # vLLM's list of models with latent attention is not complete: layers of other models may have it, too.
    may_be_latent = _has_latents(model) and not envs.VLLM_MLA_DISABLE and model_type not in EXPAND_LATENTS
    if may_be_latent or not is_this_backend(vllm_config.attention_config.backend):
        return []
    return [reason_without_mla("model")]


def _runs_on_this_host(vllm_config: Any) -> bool:
    """Whether the engine's GPUs are this host's, so that it is known here whether there are kernels."""
    parallel = vllm_config.parallel_config
    local = getattr(parallel, "data_parallel_size_local", 1) > 0 and getattr(parallel, "nnodes", 1) == 1
    return local and parallel.distributed_executor_backend in (None, "uni", "mp")


def _selection(vllm_config: Any, head_size: int, use_sparse: bool) -> dict[str, Any]:
    """What vLLM's layers with latent attention will ask for when they select a backend."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    options = {
        "head_size": head_size,
        "dtype": vllm_config.model_config.dtype,
        "kv_cache_dtype": cache.cache_dtype,
        "block_size": cache.block_size if cache.user_specified_block_size else None,
        "use_mla": True,
        "use_sparse": use_sparse,
        "use_non_causal": getattr(vllm_config.attention_config, "use_non_causal", False),
        "use_batch_invariant": envs.VLLM_BATCH_INVARIANT,
        "use_pcp": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "use_dcp": parallel.decode_context_parallel_size > 1,
        "use_adaptive_verification": getattr(
            vllm_config.speculative_config, "enable_adaptive_verification", False
        ),
    }
    known = AttentionSelectorConfig._fields  # they differ between versions
    return AttentionSelectorConfig(**{k: v for k, v in options.items() if k in known})._asdict()


# ---- When layers select their backend


def reasons_against(
    selection: dict[str, Any], reasons_of_vllm: Iterable[str], table_kind: TableKind
) -> list[str]:
    """Why layers with latent attention cannot be served.

    Args:
        selection: what vLLM asks for, by the names of its `validate_configuration`.
        reasons_of_vllm: what that method of vLLM's own class objects to.
        table_kind: LIST for sparse attention.
    """
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    dtype, head_size = selection["dtype"], selection["head_size"]
    kv_cache_dtype, capability = selection["kv_cache_dtype"], selection.get("device_capability")
    fp8_format = FP8_FORMATS.get(kv_cache_dtype)
    reasons = list(_against_pages(selection.get("block_size"), table_kind))
    if model is not None:
        reasons += reasons_against_engine(config, fp8_format)
    reasons += _against_cache(kv_cache_dtype, dtype, head_size)
    reasons += _against_parallelism(selection.get("use_pcp", False), fp8_format, head_size)
    if current_platform.is_cpu() and "CPU" not in MLAPrefillBackendEnum.__members__:
        reasons.append("the CPU platform of this vLLM has no prefill for MLA: use 0.29 or later")
    if table_kind is TableKind.LIST:
        reasons += _against_sparse_attention(capability)
        if model is not None:
            reasons += reasons_against_indexer(config)
    gpu = None if capability is None else (capability.major, capability.minor)
    if torch.version.hip is not None:
        reasons.append(
            f"{BACKEND_NAME} has kernels for NVIDIA GPUs, not for AMD GPUs (ROCm): choose another "
            "--attention-backend"
        )
    elif gpu is not None:
        reasons += _against_gpu(gpu, model, head_size)
    # Most of vLLM's own reasons name no remedy. Some repeat what is said above.
    repeated = _EXPLAINED if reasons else ()
    reasons = [_with_remedy(why) for why in reasons_of_vllm if not why.startswith(repeated)] + reasons
    if gpu is not None and not reasons and dtype in ELEMENTS:
        kv_format = fp8_format or cache_format(dtype)
        reasons += reasons_against_kernels(gpu, dtype, kv_format, head_size, table_kind)
    return reasons


def reason_without_mla(what: str) -> str:
    """Why a layer, or a model, that vLLM runs without latent attention is not served."""
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    if model is not None and _has_latents(model):
        if envs.VLLM_MLA_DISABLE:
            return "VLLM_MLA_DISABLE keeps vLLM from using latent attention: unset it"
        if model.using_transformers_backend():
            return (
                "vLLM's Transformers backend has not recognized the latent attention of this model in "
                f"transformers {transformers.__version__}: use vLLM 0.28 or later with transformers 5.19"
            )
        if not model.use_mla:  # MiniCPM3
            return (
                "vLLM's own implementation of this model does not use its latent attention: add --model-impl "
                "transformers (vLLM 0.28 or later, with transformers 5.19)"
            )
    kinds = f'{{"backend_per_kind": {{"mla_attention": "{selection_name()}"}}}}'
    return (
        f"{BACKEND_NAME} serves layers with latent attention (MLA), and this {what} has none: name it for "
        f"MLA layers alone, by --attention-config '{kinds}' in place of --attention-backend, or choose "
        "another --attention-backend if no layer of the model has it"
    )


_REMEDIES = {
    "non-causal MLA attention with DCP": "leave out --decode-context-parallel-size",
    "dtype": "use --dtype bfloat16 or float16",
    "non-causal": "leave this draft model out of --speculative-config, or use_non_causal out of "
    "--attention-config",
    "batch invariance": "leave VLLM_BATCH_INVARIANT unset",
    "device-cpu query lens mismatch": "leave enable_adaptive_verification out of --speculative-config",
}
"""What to type, by how vLLM's own reason begins."""

_EXPLAINED = ("block_size", "kv_cache_dtype", "compute capability", "PCP", "DCP")
"""How those of vLLM's reasons begin for which there is one with a remedy."""


def _with_remedy(reason: str) -> str:
    """Append to a reason of vLLM's, which names no remedy, what to type."""
    remedies = (remedy for start, remedy in _REMEDIES.items() if reason.startswith(start))
    return f"{reason}: {next(remedies, 'choose another --attention-backend')}"


def _against_pages(block_size: int | None, table_kind: TableKind) -> Iterator[str]:
    """Why pages cannot have ``block_size`` tokens (None: the user leaves it to the backend)."""
    multiple = PREFERRED_PAGE_SIZE if table_kind is TableKind.LIST else 16
    if block_size is not None and block_size % multiple:
        yield (
            f"pages of {block_size} tokens are not supported: use a --block-size that is a multiple of 16 "
            "(of 64 with sparse attention)"
        )


def _divides_cache() -> bool:
    """Whether the engine that vLLM is configuring has decode context parallelism."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.parallel_config.decode_context_parallel_size > 1


def _against_parallelism(use_pcp: bool, fp8_format: CacheFormat | None, head_size: int) -> Iterator[str]:
    """Why contexts cannot be divided among ranks as the engine is configured to do."""
    if use_pcp:
        yield (
            f"{BACKEND_NAME} does not implement context parallelism of prefill (PCP): leave out "
            "--prefill-context-parallel-size"
        )
    if not _divides_cache():
        return
    if current_platform.is_cpu() and not CPU_HAS_DCP:
        yield (
            "vLLM's CPU platform does not implement context parallelism: leave out "
            "--decode-context-parallel-size"
        )
    if fp8_format is E4M3 and not is_gathered_by_vllm(head_size, current_platform.device_type):
        yield (
            f"with decode context parallelism vLLM does not gather e4m3 rows of {head_size} values from the "
            "cache: leave out --decode-context-parallel-size, or use --kv-cache-dtype bfloat16"
        )


def _against_cache(kv_cache_dtype: str | None, dtype: torch.dtype, head_size: int) -> Iterator[str]:
    """Why a cache in ``kv_cache_dtype`` cannot hold latents of a model in ``dtype``."""
    model_dtype = str(dtype).removeprefix("torch.")
    if kv_cache_dtype in (None, "auto", model_dtype):
        return
    asked = f"the command line or the checkpoint asks for {kv_cache_dtype!r}"
    in_16_bits = "auto" if dtype is torch.float32 else model_dtype
    if kv_cache_dtype not in FP8_FORMATS:
        yield (
            f"{BACKEND_NAME} keeps the latent cache in the model's dtype ({dtype}), or in fp8 as e4m3 with a "
            f"scale or as records (fp8_ds_mla), but {asked}: use --kv-cache-dtype {in_16_bits} or fp8_e4m3"
        )
    elif (dimensions := FP8_FORMATS[kv_cache_dtype].dimensions) is not None:
        if head_size != sum(dimensions):
            yield (
                f"records of fp8_ds_mla hold latent rows of {sum(dimensions)} values and this model's "
                f"have {head_size}, but {asked}: use --kv-cache-dtype fp8_e4m3"
            )
        if dtype is torch.float16:  # vLLM writes a record's rotary part in the model's dtype
            yield (
                f"records of fp8_ds_mla hold rotary parts in bfloat16 and this model computes in float16, "
                f"but {asked}: use --kv-cache-dtype fp8_e4m3, or --dtype bfloat16"
            )


def _against_sparse_attention(capability: Any) -> Iterator[str]:
    """Why layers with sparse attention cannot be served on a GPU of this compute capability (CPU: None)."""
    if capability is None:
        if current_platform.is_cpu():
            yield "vLLM has no indexer for sparse attention (DSA) on the CPU: use a GPU"
    elif (capability.major, capability.minor) < engines.FIRST_INDEXER_CAPABILITY:
        yield (
            "vLLM's indexer for sparse attention (DeepGEMM) needs compute capability 9.0 or higher, but "
            f"this GPU has {capability.major}.{capability.minor}: use a newer GPU"
        )
    if _divides_cache():
        yield (
            f"{BACKEND_NAME} does not implement decode context parallelism (DCP) of sparse layers: leave "
            "out --decode-context-parallel-size"
        )


def _has_latents(model_config: Any) -> bool:
    return getattr(model_config.hf_text_config, "kv_lora_rank", None) is not None


def _latent_dimensions(model_config: Any) -> tuple[int, int] | None:
    """kv_lora_rank and qk_rope_head_dim of a model with latent attention; None if its config names none."""
    if not _has_latents(model_config):
        return None
    config = model_config.hf_text_config
    if model_config.is_deepseek_mla:  # vLLM then corrects what some versions of transformers mistake
        return config.kv_lora_rank, model_config.get_head_size() - config.kv_lora_rank
    return config.kv_lora_rank, config.qk_rope_head_dim


def _dimensions_of(model_config: Any, head_size: int) -> tuple[int, int] | None:
    """kv_lora_rank and qk_rope_head_dim of layers whose latent rows have ``head_size`` values.

    None if they are neither those of the model (a draft's layers) nor those of any kernel.
    """
    of_model = None if model_config is None else _latent_dimensions(model_config)
    if of_model is not None and sum(of_model) == head_size:
        return of_model
    return next((served for served in DIMENSIONS if sum(served) == head_size), None)


def _against_gpu(capability: tuple[int, int], model_config: Any, head_size: int) -> Iterator[str]:
    """Why there are no kernels for latent rows of ``head_size`` on a GPU of this compute capability."""
    if capability < FIRST_CAPABILITY:
        yield (
            f"{BACKEND_NAME} needs a GPU with compute capability {'.'.join(map(str, FIRST_CAPABILITY))} or "
            f"higher, but this GPU has {'.'.join(map(str, capability))}: choose another --attention-backend"
        )
        return
    dimensions = _dimensions_of(model_config, head_size)
    if dimensions not in DIMENSIONS:
        yield _without_kernels(f"{head_size}" if dimensions is None else _sum(dimensions))


def _sum(dimensions: tuple[int, int]) -> str:
    return " + ".join(map(str, dimensions))


def _without_kernels(rows: str) -> str:
    *others, last = map(_sum, DIMENSIONS)
    return (
        f"{BACKEND_NAME} serves latent rows of {', '.join(others)} or {last} values "
        f"(kv_lora_rank + qk_rope_head_dim), but this model's rows have {rows}: choose another "
        "--attention-backend"
    )


def reasons_against_kernels(
    capability: tuple[int, int],
    dtype: torch.dtype,
    kv_format: CacheFormat,
    head_size: int,
    table_kind: TableKind,
) -> Iterator[str]:
    """Why the kernels that a configuration needs can be neither found nor built. Does not touch the GPU."""
    specs = [_spec_of_current_model(dtype, kv_format, head_size, table_kind)]
    if table_kind is TableKind.LIST:
        from mla_backend_vllm.sparse_step import specs_of  # imports what only sparse layers need

        specs = specs_of(*specs)
    variants = [variant for spec in specs for variant in kernels.variants_of(spec, capability)]
    if why_not := jit.why_unavailable(variants):
        yield why_not


def _spec_of_current_model(
    dtype: torch.dtype, kv_format: CacheFormat, head_size: int, table_kind: TableKind
) -> DecoderSpec:
    """A spec that needs the kernels of the model that vLLM is configuring; with one head if there is none."""
    config = get_current_vllm_config_or_none()
    model, heads = None, 1
    if config is not None and config.model_config is not None:
        model, parallel = config.model_config, config.parallel_config
        heads = model.get_num_attention_heads(parallel) * parallel.decode_context_parallel_size
    dimensions = _dimensions_of(model, head_size)
    assert dimensions is not None  # else `_against_gpu` has said so
    kv_lora_rank, qk_rope_head_dim = dimensions
    return DecoderSpec(
        num_heads=heads,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        dtype=dtype,
        kv_dtype=kv_format.name,
        page_size=PREFERRED_PAGE_SIZE,
        table_kind=table_kind,
        device=torch.device("cuda"),
        max_batch=1,
        # With lists, each token is a separate request.
        max_query_len=1 if table_kind is TableKind.LIST else kernels.largest_query_len(heads),
        batch_invariant=False,
    )


# ---- When layers select their backend, and again when they are made


def reasons_against_engine(vllm_config: Any, kv_format: CacheFormat | None) -> Iterator[str]:
    """Why layers with a cache in ``kv_format`` (None if it is unknown) cannot be served by this engine."""
    if getattr(vllm_config.parallel_config, "enable_elastic_ep", False):
        yield (
            f"{BACKEND_NAME} leaves the absorbed weights out of state_dict, but elastic expert parallelism "
            "pairs weights by their order there: leave --enable-elastic-ep off, or choose another "
            "--attention-backend"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):  # gone by vLLM 0.29
        yield (
            f"{BACKEND_NAME} takes the scale of an fp8 cache from the checkpoint (1 if it has none) and does "
            "not calculate one from the first batch: leave --calculate-kv-scales off"
        )
    text_config = vllm_config.model_config.hf_text_config
    if getattr(text_config, "learnable_sink", False) and getattr(text_config, "index_topk", None) is None:
        # HY-V4's layers do not mention sinks when a backend is selected, and drop them if it supports none.
        yield (
            f"{BACKEND_NAME} implements attention sinks, which this model has, for sparse attention alone: "
            "choose another --attention-backend"
        )
    if (reason := _reason_against_connector(vllm_config)) is not None:
        yield reason
    if kv_format is not None and kv_format.takes_scale:
        yield from _against_scale(vllm_config)


def _against_scale(vllm_config: Any) -> Iterator[str]:
    """Why the cache cannot have one scale."""
    # vLLM's prefill in fp8, on GPUs of compute capability 10.x, does not apply the scale to context: with
    # vLLM's own backends the scale is always 1 (see `mla_backend_vllm.scales`).
    quantizes = getattr(vllm_config.attention_config, "use_prefill_query_quantization", False)
    if quantizes and current_platform.is_device_capability_family(100):
        yield (
            "with use_prefill_query_quantization vLLM reads context without the scale of the fp8 cache, "
            f"which {BACKEND_NAME} loads from the checkpoint: leave it out of --attention-config"
        )


def _connectors_of(vllm_config: Any) -> list[str]:
    """The names of the connectors that move the cache to other servers or memories."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return []
    return list(_names_of(transfer.kv_connector, transfer.kv_connector_extra_config))


def _names_of(connector: str | None, extra_config: dict[str, Any]) -> Iterator[str]:
    if connector == "MultiConnector":
        for inner in extra_config.get("connectors", ()):
            yield from _names_of(inner.get("kv_connector"), inner.get("kv_connector_extra_config") or {})
    elif connector is not None:
        yield connector


def _reason_against_connector(vllm_config: Any) -> str | None:
    """Why the configured connectors cannot move the cache among ranks that divide it; None if they can.

    A connector that does not know that ranks divide the cache would give some ranks the tokens of others.
    """
    if vllm_config.parallel_config.decode_context_parallel_size == 1:
        return None
    remedy = "leave out --decode-context-parallel-size"
    for name in _connectors_of(vllm_config):
        if name.startswith("Nixl"):
            from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

            if "dcp_size" not in NixlAgentMetadata.__dataclass_fields__:
                return (
                    f"the {name} of this vLLM does not see how many ranks divide the cache of the other "
                    f"server: {remedy}, or use vLLM 0.29 or later"
                )
        elif name not in (*KNOW_SHARDS, *BENCHMARKS_KNOWING_SHARDS):
            known = ", ".join(("NixlConnector", *KNOW_SHARDS))
            return f"{name} does not see that ranks divide the cache: {remedy}, or use one of {known}"
    return None


def reasons_against_indexer(vllm_config: Any) -> Iterator[str]:
    """Why keys cannot be chosen as the model and the engine are configured to do."""
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        yield f"{BACKEND_NAME} does not implement HiSparse: leave hisparse_config out of --attention-config"


# ---- When layers, and what serves them, are made


def refuse(reasons: Iterable[str]) -> None:
    """Refuse for the first of these reasons, if there is one.

    Raises:
        UnsupportedError: there is.
    """
    for reason in reasons:
        raise UnsupportedError(reason)


def reasons_against_layer(dimensions: tuple[int, int], **options: Any) -> Iterator[str]:
    """Why a layer cannot be served for what vLLM does not say when the layer selects its backend.

    Args:
        dimensions: kv_lora_rank and qk_rope_head_dim.
        options: options of the layer; each must be None.
    """
    if current_platform.is_cuda() and dimensions not in DIMENSIONS:
        yield _without_kernels(_sum(dimensions))
    for name, value in options.items():
        if value is not None:
            yield (
                f"{BACKEND_NAME} does not implement {name}={value!r}, which a layer of this model needs: "
                "choose another --attention-backend"
            )


def reasons_against_sinks(vllm_config: Any) -> Iterator[str]:
    """Why a layer with sinks cannot be served: only absorbed attention counts them, not regular prefill."""
    if not getattr(vllm_config.attention_config, "sparse_mla_force_mqa", False):
        yield (
            "this vLLM would leave attention sinks out of regular prefill: choose another --attention-backend"
        )


def reasons_against_shard(vllm_config: Any, impl: Any, num_ranks: int, page_size: int) -> Iterator[str]:
    """Why ``num_ranks`` ranks cannot divide the cache of a layer whose attention is ``impl``.

    To move caches between servers, vLLM pairs pages as if each rank had whole pages of a text, and does not
    compare the servers' interleaves. For `NixlConnector` it sets the interleave to a page, unless the user
    sets it.
    """
    if impl.dcp_world_size == 1:  # the draft model of vLLM's Model Runner V2 (seen in 0.32 and 0.33)
        yield (
            f"vLLM's Model Runner V2 divides the model's cache among {num_ranks} ranks, but not that of its "
            "draft model: leave out --decode-context-parallel-size, or set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    # Checked only when the connector exists: before that, vLLM may build metadata to measure CUDA graphs, and
    # has not set the interleave yet.
    interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
    uses_nixl = any(name.startswith("Nixl") for name in _connectors_of(vllm_config))
    if uses_nixl and has_kv_transfer_group() and interleave != page_size:
        yield (
            f"with decode context parallelism, NIXL transfers whole pages of {page_size} tokens, but "
            f"--cp-kv-cache-interleave-size is {interleave}, and another server would read the wrong tokens: "
            f"set --cp-kv-cache-interleave-size to {page_size} on all servers"
        )


def reasons_against_sparse_drafts(max_query_len: int) -> Iterator[str]:
    """Why sparse layers of a draft model cannot serve ``max_query_len`` tokens of each request at a time."""
    if max_query_len > 1:
        yield (
            f"{BACKEND_NAME} serves sparse layers of draft models only one token at a time: leave this "
            "draft model out of --speculative-config"
        )


def reasons_against_adapter(name: str, modules: Iterable[str]) -> Iterator[str]:
    """Why the LoRA adapter ``name``, which changes ``modules``, cannot be applied."""
    changed = sorted(module for module in modules if module.endswith("kv_b_proj"))
    if changed:
        yield (
            "vLLM does not apply LoRA adapters of kv_b_proj to latent attention, with any backend, and "
            f"adapter {name!r} changes {changed[0]}: merge it into the model's weights, or train one without "
            "kv_b_proj"
        )


def reason_without_prefill(error: Exception, holder: Any) -> str:
    """Why layers have no regular prefill if vLLM has none and ``holder``, of another plugin, has our name."""
    return (
        f"vLLM has no MLA prefill for these head dimensions ({error}). {BACKEND_NAME} has one, but another "
        f"plugin registered {holder.get_path()} in its place ({holder.name}): load mla-backend alone "
        "(VLLM_PLUGINS=mla_backend)"
    )
