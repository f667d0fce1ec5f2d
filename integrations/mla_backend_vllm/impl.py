"""The attention of one layer: absorbed for decode and short extends, vLLM's regular prefill for the rest.

vLLM multiplies the queries of `MLAImpl.forward_mqa` by the absorbed weights beforehand. `forward_mha` expands
latents into keys and values.

The absorbed weights are vLLM's own `W_UK_T` and `W_UV`: views of kv_b_proj's weight, or 16-bit copies if that
weight is quantized. So updating, reloading and discarding weights works as with vLLM's own backends. Copies
in another layout would not make the batched products faster.

The signatures of vLLM 0.26 to 0.33 differ. The methods of this module take keyword arguments and ignore those
that they do not use; no versions are compared.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import vllm
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.mla.prefill.selector import get_mla_prefill_backend

from mla_backend import MLAGeometry, UnsupportedError, cache, counters, engines
from mla_backend.cache_format import CacheFormat, Scale, cache_format, dequantize
from mla_backend_vllm import (
    AROUND_ATTENTION_VARIABLE,
    PREFILL_PATH,
    launches_around_attention,
    prefill_member,
    refusals,
)
from mla_backend_vllm.adapters import refuse_adapters
from mla_backend_vllm.metadata import Metadata
from mla_backend_vllm.prefill_backend import attend_to_context, is_gathered_by_vllm, library_of
from mla_backend_vllm.scales import FP8_FORMATS, load_scales_of

if TYPE_CHECKING:
    from mla_backend_vllm.fused_append import FusedAppend

logger = init_logger(f"vllm.{__name__}")  # vLLM prints only the logs below its own name


class CheckedImpl:
    """A mixin for vLLM's class of a layer's attention: refuses layers that this backend does not serve.

    Attributes:
        geometry: of the layer.
        kv_format: how the layer's cache is stored. Layers of a model may differ (kv_cache_dtype_skip_layers).
    """

    # Set by vLLM's class.
    kv_lora_rank: int
    qk_rope_head_dim: int
    kv_cache_dtype: str

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_arguments: Any,
    ):
        refusals.refuse(
            refusals.reasons_against_layer(
                (mla_arguments["kv_lora_rank"], mla_arguments["qk_rope_head_dim"]),
                alibi_slopes=alibi_slopes,
                sliding_window=sliding_window,
                logits_soft_cap=logits_soft_cap,
                attn_type=None if attn_type == AttentionType.DECODER else attn_type,
                kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            )
        )
        super().__init__(  # type: ignore[call-arg]
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_arguments,
        )
        warn_if_unsupported()
        self.supports_quant_query_input = False
        vllm_config = get_current_vllm_config()
        if vllm_config.lora_config is not None:
            refuse_adapters(_is_ours)
        self.geometry = _geometry_of(self, vllm_config, mla_arguments["q_lora_rank"])
        load_scales_of(vllm_config, _is_ours)
        self.kv_format: CacheFormat = FP8_FORMATS.get(self.kv_cache_dtype) or cache_format(
            vllm_config.model_config.dtype
        )
        # Checked again, because vLLM reuses its selection for an earlier engine of the process.
        refusals.refuse(refusals.reasons_against_engine(vllm_config, self.kv_format))
        _append_records_unfused(vllm_config, self.kv_format)

    def split_queries(self, q: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """q_nope [T, H, d_c] and q_rope [T, H, d_rope], which some of vLLM's models pass as one tensor."""
        if isinstance(q, Tensor):
            q = q.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        return q

    def typed_cache(self, kv_cache: Tensor) -> Tensor:
        """vLLM's cache of the layer, which may be bytes, in the dtype of its format."""
        return kv_cache.view(self.kv_format.storage)

    def scale_of(self, layer: Any) -> Tensor | None:
        """The scale of the cache of vLLM's ``layer``; None if its format has none."""
        return self._scale(layer._k_scale)

    def _scale(self, k_scale: Tensor) -> Tensor | None:
        """The scale of the cache; None if its format has none. The tensor belongs to the layer: reloading
        weights writes to it, so captured graphs see the change."""
        return k_scale if self.kv_format.takes_scale else None

    def _count_prefill(self, tokens: int, attn_metadata: Any) -> None:
        """Count the new tokens of a regular prefill, by the library that attends."""
        library = library_of(attn_metadata.prefill.prefill_backend)
        counters.add("vanilla_prefill", tokens, kernel=library, cache_format=self.kv_format.name)


class MLAImpl(CheckedImpl, MLACommonImpl[Metadata]):
    """The attention of one layer."""

    # Context parallelism is supported for decode, with drafts at any interleave, but not for prefill.
    # Versions of vLLM differ in which of these attributes they read.
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    supports_pcp: bool = False

    # Of `mla_backend_vllm.fused_append`, which sets both for layers of vLLM's usual class.
    fused_append: FusedAppend | None = None
    why_not_fused: str | None = (
        "the layer is not built by mla-backend's subclass of MultiHeadLatentAttentionWrapper"
    )

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not launches_around_attention():
            self.why_not_fused = f"{AROUND_ATTENTION_VARIABLE}=0"
        if self.kv_format.is_quantized and current_platform.is_cpu():
            # On the CPU vLLM gathers context only from caches that are not quantized, so forward_mha
            # passes it a cache in the model's dtype.
            self.kv_cache_dtype = "auto"
        _ensure_prefill_backend(get_current_vllm_config())

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        *args: Any,
    ) -> None:
        """Append the new tokens' latents, unless one launch has normalized, rotated and appended them: with
        vLLM's own kernel on a GPU, with torch on the CPU.

        From 0.33 on, vLLM also says whether the scale is 1, so that its kernel need not divide. This argument
        is not passed on: a captured graph would not divide by another scale that is loaded later.
        """
        if self.fused_append is not None and self.fused_append.has_appended(kv_c_normed, k_pe):
            return
        if not kv_cache.is_cpu:
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)
        elif kv_cache.numel():
            slots = slot_mapping.flatten()  # the other inputs may be padded
            kv_c, k_pe = kv_c_normed[: len(slots)], k_pe.squeeze(1)[: len(slots)]
            cache.append(self.typed_cache(kv_cache), kv_c, k_pe, slots, self._scale(k_scale))

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Metadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor]:
        """Absorbed attention.

        Args:
            q: q_nope [T, H, d_c] and q_rope [T, H, d_rope], or both in one tensor [T, H, d_c + d_rope]. It is
                one tensor in models that define their own attention layer, such as Kimi-K3, and where ranks
                that divide the cache gather their queries; H then counts the heads of all these ranks.
            kv_c_and_k_pe_cache: [pages, page_size, d_c + d_rope], or records.
            attn_metadata: the step's metadata, whose ``decode`` is not None.
            layer: vLLM's layer, which has the cache's scale.

        Returns:
            the output [T, H, d_c], and the lse [T, H] (fp32, natural logarithm): 0 and -inf for query rows
            that see no key on this rank.
        """
        q_nope, q_rope = self.split_queries(q)
        decode = attn_metadata.decode
        served_by = {"kernel": decode.decoder.implementation, "cache_format": self.kv_format.name}
        counters.add(decode.path, q_nope.shape[0], **served_by)
        return decode.decoder.run(
            q_nope,
            q_rope,
            kv_c_and_k_pe_cache,
            decode.plan,
            self.scale,
            kv_scale=self._scale(layer._k_scale),
            # Block drafts (DSpark, DFlash) see all tokens of their block. vLLM 0.26 has none.
            causal=getattr(attn_metadata, "causal", True),
        )

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Metadata,
        k_scale: Tensor,
        **kwargs: Any,
    ) -> None:
        """vLLM's regular prefill, on the prefill backend that the metadata builder chose."""
        self._count_prefill(q.shape[0], attn_metadata)
        has_context = attn_metadata.prefill.chunked_context is not None
        if has_context and kv_c_and_k_pe_cache.is_cpu and self.kv_format.is_quantized:
            kv_c_and_k_pe_cache = self._dequantized_context(
                kv_c_and_k_pe_cache, attn_metadata, k_scale, q.dtype
            )
        super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, **kwargs)

    def _compute_prefill_context(
        self, q: Tensor, kv_c_and_k_pe_cache: Tensor, attn_metadata: Metadata, k_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend to context: by vLLM's code, or by ours if vLLM's kernel does not gather such latent rows."""
        # On the CPU, vLLM's kernel needs contiguous pages, which VLLM_KV_CACHE_LAYOUT may prevent.
        can_gather = kv_c_and_k_pe_cache.is_contiguous() or not kv_c_and_k_pe_cache.is_cpu
        if can_gather and is_gathered_by_vllm(self.geometry.latent_dim, q.device.type):
            return super()._compute_prefill_context(q, kv_c_and_k_pe_cache, attn_metadata, k_scale)
        kv_cache = kv_c_and_k_pe_cache
        if self.kv_format.is_quantized:  # torch gathers no e4m3
            kv_cache = kv_cache.view(torch.uint8)

        def expand(rows: Tensor) -> tuple[Tensor, Tensor]:
            if self.kv_format.is_quantized:
                rows = dequantize(rows.view(self.kv_format.storage), self._scale(k_scale), dtype=q.dtype)
            kv_c, k_pe = rows.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
            kv = self.kv_b_proj(kv_c.contiguous())[0].unflatten(-1, (self.num_heads, -1))
            k_nope, value = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            return self._concat_k_nope_k_pe(k_nope, k_pe.unsqueeze(1)), value

        return attend_to_context(q, kv_cache, attn_metadata.prefill, expand)

    def _dequantized_context(
        self, kv_cache: Tensor, attn_metadata: Metadata, k_scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """A copy of the cache in ``dtype``, with only the pages that the batch's prefills refer to.

        The other pages are never written, so the system allocates no memory for them.
        """
        pages, page_size, _ = kv_cache.shape
        needed = attn_metadata.prefill.block_table.flatten().unique()
        # Entries after a request's last page may hold anything.
        needed = needed[(needed >= 0) & (needed < pages)]
        rows = kv_cache[needed] if kv_cache.dtype is torch.uint8 else kv_cache.view(torch.uint8)[needed]
        rows = rows.view(self.kv_format.storage).flatten(0, 1)
        values = dequantize(rows, self._scale(k_scale), dtype=dtype)
        result = values.new_empty(pages, page_size, values.shape[1])
        result[needed] = values.view(-1, page_size, values.shape[1])
        return result


def _geometry_of(impl: Any, vllm_config: Any, q_lora_rank: int | None) -> MLAGeometry:
    """The geometry of a layer whose attention is ``impl``."""
    return MLAGeometry(
        num_heads=impl.num_heads,
        kv_lora_rank=impl.kv_lora_rank,
        qk_nope_head_dim=impl.qk_nope_head_dim,
        qk_rope_head_dim=impl.qk_rope_head_dim,
        v_head_dim=impl.v_head_dim,
        softmax_scale=impl.scale,
        hidden_size=vllm_config.model_config.get_hidden_size(),
        q_lora_rank=q_lora_rank,
    )


def _append_records_unfused(vllm_config: Any, kv_format: CacheFormat) -> None:
    """Turn off vLLM's pass that fuses rotation and append if its kernel would have to write records.

    vLLM reads this option when it compiles the model, after the construction of its layers.
    """
    passes = vllm_config.compilation_config.pass_config
    if kv_format.scale is Scale.GROUP and getattr(passes, "fuse_rope_kvcache_cat_mla", False):
        passes.fuse_rope_kvcache_cat_mla = False
        logger.info("fuse_rope_kvcache_cat_mla is off: vLLM's fused kernel does not write fp8_ds_mla records")


@functools.cache
def warn_if_unsupported() -> None:
    """Warn, once per process, if this vLLM is not one of the supported versions."""
    message = engines.VLLM.unsupported(vllm.__version__)
    if message is not None:
        logger.warning("%s", message)


def _is_ours(impl: Any) -> bool:
    return isinstance(impl, CheckedImpl)


def _ensure_prefill_backend(vllm_config: Any) -> None:
    """Choose our prefill backend if vLLM, which chooses right after this, has none for these head dims."""
    attention_config = vllm_config.attention_config
    if attention_config.mla_prefill_backend is not None:
        return
    try:
        get_mla_prefill_backend(vllm_config)
    except ValueError as error:
        ours = prefill_member()
        if ours.get_path() != PREFILL_PATH:
            raise UnsupportedError(refusals.reason_without_prefill(error, ours)) from error
        attention_config.mla_prefill_backend = ours
