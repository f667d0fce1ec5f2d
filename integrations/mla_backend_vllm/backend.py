"""The backend as vLLM selects it: its name, its classes, and what these support."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonMetadataBuilder
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf

from mla_backend import TableKind
from mla_backend.kernels.base import FIRST_CAPABILITY
from mla_backend_vllm import BACKEND_NAME, PREFERRED_PAGE_SIZE, refusals
from mla_backend_vllm.impl import MLAImpl
from mla_backend_vllm.metadata import MetadataBuilder
from mla_backend_vllm.scales import FP8_FORMATS


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
        kv_format = FP8_FORMATS.get(cache_dtype_str)
        return num_blocks, block_size, (kv_format and kv_format.fixed_width) or head_size

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # which means any: `refusals` has the sizes without a kernel

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
    def supports_non_causal(cls) -> bool:
        return hasattr(MLACommonMetadataBuilder, "supports_non_causal_multi_token_decode")  # from 0.29 on

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # the builder reads the longest query of a step from the lengths on the host

    @classmethod
    def validate_configuration(cls, **selection: Any) -> list[str]:
        """The reasons why this configuration cannot be served; an empty list if it can."""
        if not selection["use_mla"]:
            return [refusals.reason_without_mla("layer")]
        return refusals.reasons_against(
            selection, super().validate_configuration(**selection), cls.table_kind
        )
