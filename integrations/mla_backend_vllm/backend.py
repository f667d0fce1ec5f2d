"""The backend as vLLM selects it: its name, its classes, and the configurations that it serves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import transformers
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

from mla_backend import TableKind, jit, kernels
from mla_backend.cache_format import (
    E4M3,
    RECORD_656,
    RECORD_BYTES,
    RECORD_DIMENSIONS,
    CacheFormat,
    cache_format,
)
from mla_backend.kernels.base import DIMENSIONS, ELEMENTS, FIRST_CAPABILITY
from mla_backend.spec import DecoderSpec
from mla_backend_vllm import BACKEND_NAME, selection_name
from mla_backend_vllm.configuration import reasons_against
from mla_backend_vllm.impl import FP8_FORMATS, MLAImpl
from mla_backend_vllm.metadata import MetadataBuilder
from mla_backend_vllm.prefill_backend import is_gathered_by_vllm
from mla_backend_vllm.sharding import divides_cache

CPU_HAS_DCP = False
"""Whether vLLM's CPU platform has all that decode context parallelism needs; it assigns no slots for it.
Tests whose ranks do that set it."""

PREFERRED_PAGE_SIZE = 64
"""On a GPU, and on the CPU from vLLM 0.33 on; before, its CPU platform had its own default."""


class VllmMLABackend(MLACommonBackend):
    """The attention backend that vLLM knows as MLA_BACKEND (CUSTOM before 0.32)."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FP8_FORMATS]
    table_kind: ClassVar[TableKind] = TableKind.BLOCK

    @staticmethod
    def get_name() -> str:
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[MLAImpl]:
        return MLAImpl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """The shape of a layer's cache. Newer versions of vLLM read the layer's spec instead."""
        width = RECORD_BYTES if FP8_FORMATS.get(cache_dtype_str) is RECORD_656 else head_size
        return num_blocks, block_size, width

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # which means any: validate_configuration refuses the sizes without a kernel

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PREFERRED_PAGE_SIZE

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in (torch.float16, torch.bfloat16) or (
            dtype is torch.float32 and current_platform.is_cpu()
        )

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability is None or (capability.major, capability.minor) >= FIRST_CAPABILITY

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # the builder reads the longest query of a step from the lengths on the host

    @classmethod
    def validate_configuration(cls, **selection: Any) -> list[str]:
        """The reasons why this configuration cannot be served; an empty list if it can."""
        config = get_current_vllm_config_or_none()
        model = None if config is None else config.model_config
        if not selection["use_mla"]:
            return [_reason_without_mla(model)]
        reasons = [_with_remedy(reason) for reason in super().validate_configuration(**selection)]
        dtype, head_size = selection["dtype"], selection["head_size"]
        kv_cache_dtype = selection["kv_cache_dtype"]
        fp8_format = FP8_FORMATS.get(kv_cache_dtype)
        if model is not None:
            reasons += reasons_against(config, fp8_format)
        reasons += _reasons_against_cache(kv_cache_dtype, dtype, head_size)
        reasons += _reasons_against_parallelism(selection.get("use_pcp", False), fp8_format, head_size)
        if current_platform.is_cpu() and "CPU" not in MLAPrefillBackendEnum.__members__:
            reasons.append("the CPU platform of this vLLM has no prefill for MLA: use 0.29 or later")
        if torch.version.hip is not None:
            reasons.append(
                f"{BACKEND_NAME} has kernels for NVIDIA GPUs, not for AMD GPUs (ROCm): choose "
                "another --attention-backend"
            )
        elif (capability := selection.get("device_capability")) is not None:
            gpu = (capability.major, capability.minor)
            reasons += _reasons_against_gpu(gpu, head_size)
            if not reasons and dtype in ELEMENTS:
                reasons += _reasons_against_kernels(
                    gpu, dtype, fp8_format or cache_format(dtype), head_size, cls.table_kind
                )
        return reasons


def _reason_without_mla(model_config: Any) -> str:
    """Why a layer that vLLM runs without latent attention is not served."""
    if model_config is not None and getattr(model_config.hf_text_config, "kv_lora_rank", None) is not None:
        if envs.VLLM_MLA_DISABLE:
            return "VLLM_MLA_DISABLE keeps vLLM from using latent attention: unset it"
        if model_config.using_transformers_backend():
            return (
                "vLLM's Transformers backend has not recognized the latent attention of this model in "
                f"transformers {transformers.__version__}: use vLLM 0.28 or later with transformers 5.19"
            )
        if not model_config.use_mla:  # MiniCPM3
            return (
                "vLLM's own implementation of this model does not use its latent attention: add --model-impl "
                "transformers (vLLM 0.28 or later, with transformers 5.19)"
            )
    kinds = f'{{"backend_per_kind": {{"mla_attention": "{selection_name()}"}}}}'
    return (
        f"{BACKEND_NAME} serves layers with latent attention (MLA), and this layer has none: name it for MLA "
        f"layers alone, by --attention-config '{kinds}' in place of --attention-backend, or choose another "
        "--attention-backend if no layer of the model has it"
    )


_REMEDIES = {
    "dtype": "use --dtype bfloat16 or float16",
    "block_size": "use a --block-size that is a multiple of 16 (of 64 with sparse attention)",
    "non-causal": "leave this draft model out of --speculative-config, or use_non_causal out of "
    "--attention-config",
    "batch invariance": "leave VLLM_BATCH_INVARIANT unset",
    "device-cpu query lens mismatch": "leave enable_adaptive_verification out of --speculative-config",
}
"""What to type, by how vLLM's own reason begins."""

_EXPLAINED = ("kv_cache_dtype", "compute capability", "PCP", "DCP")
"""How those of vLLM's reasons begin which a reason with a remedy follows."""


def _with_remedy(reason: str) -> str:
    """Append to a reason of vLLM's, which names no remedy, what to type."""
    if reason.startswith(_EXPLAINED):
        return reason
    remedies = (remedy for start, remedy in _REMEDIES.items() if reason.startswith(start))
    return f"{reason}: {next(remedies, 'choose another --attention-backend')}"


def _reasons_against_parallelism(
    use_pcp: bool, fp8_format: CacheFormat | None, head_size: int
) -> Iterable[str]:
    """Why contexts cannot be divided among ranks as the engine is configured to do."""
    if use_pcp:
        yield (
            f"{BACKEND_NAME} does not implement context parallelism of prefill (PCP): leave out "
            "--prefill-context-parallel-size"
        )
    if not divides_cache():
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


def _reasons_against_cache(kv_cache_dtype: str | None, dtype: torch.dtype, head_size: int) -> Iterable[str]:
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
    elif FP8_FORMATS[kv_cache_dtype] is RECORD_656:
        if head_size != sum(RECORD_DIMENSIONS):
            yield (
                f"records of fp8_ds_mla hold latent rows of {sum(RECORD_DIMENSIONS)} values and this model's "
                f"have {head_size}, but {asked}: use --kv-cache-dtype fp8_e4m3"
            )
        if dtype is torch.float16:  # vLLM writes a record's rotary part in the model's dtype
            yield (
                f"records of fp8_ds_mla hold rotary parts in bfloat16 and this model computes in float16, "
                f"but {asked}: use --kv-cache-dtype fp8_e4m3, or --dtype bfloat16"
            )


_DIMENSIONS = {sum(dimensions): dimensions for dimensions in DIMENSIONS}
"""kv_lora_rank and qk_rope_head_dim, by the width of a latent row."""


def _reasons_against_gpu(capability: tuple[int, int], head_size: int) -> Iterable[str]:
    """Why there are no kernels for latent rows of ``head_size`` on a GPU of this compute capability."""
    if capability < FIRST_CAPABILITY:
        yield (
            f"{BACKEND_NAME} needs a GPU with compute capability {'.'.join(map(str, FIRST_CAPABILITY))} or "
            f"higher, but this GPU has {'.'.join(map(str, capability))}: choose another --attention-backend"
        )
    elif head_size not in _DIMENSIONS:
        yield (
            f"{BACKEND_NAME} has kernels for latent rows of {' or '.join(map(str, _DIMENSIONS))} values, "
            f"but this model's rows have {head_size}: choose another --attention-backend"
        )


def _reasons_against_kernels(
    capability: tuple[int, int],
    dtype: torch.dtype,
    kv_format: CacheFormat,
    head_size: int,
    table_kind: TableKind,
) -> Iterable[str]:
    """Why the kernels that a configuration needs can be neither found nor built. Does not touch the GPU."""
    specs = [_spec_of_current_model(dtype, kv_format, _DIMENSIONS[head_size], table_kind)]
    if table_kind is TableKind.LIST:
        from mla_backend_vllm.sparse_step import specs_of  # imports what only sparse layers need

        specs = specs_of(*specs)
    variants = [variant for spec in specs for variant in kernels.variants_of(spec, capability)]
    if why_not := jit.why_unavailable(variants):
        yield why_not


def _spec_of_current_model(
    dtype: torch.dtype,
    kv_format: CacheFormat,
    dimensions: tuple[int, int],
    table_kind: TableKind,
) -> DecoderSpec:
    """A spec that needs the kernels of the model that vLLM is configuring; with one head if there is none."""
    config = get_current_vllm_config_or_none()
    heads = 1
    if config is not None and config.model_config is not None:
        parallel = config.parallel_config
        heads = config.model_config.get_num_attention_heads(parallel) * parallel.decode_context_parallel_size
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
