"""The attention of one layer: absorbed for decode and short extends, vLLM's regular prefill for the rest.

vLLM multiplies the queries of `MLAImpl.forward_mqa` by the absorbed weights beforehand. `forward_mha` expands
latents into keys and values.

The absorbed weights are vLLM's own `W_UK_T` and `W_UV`: views of kv_b_proj's weight, or 16-bit copies if that
is quantized. So updating, reloading and discarding weights works as with vLLM's own backends. Copies in
another layout would not make the batched products faster.

The signatures of vLLM 0.26 to 0.33 differ. The methods here take keyword arguments and ignore those that they
do not use; no version is ever compared.
"""

from __future__ import annotations

import functools
from typing import Any

import vllm
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.mla.prefill.selector import get_mla_prefill_backend

from mla_backend import MLAGeometry, UnsupportedError, cache, counters, engines
from mla_backend_vllm import BACKEND_NAME, PREFILL_PATH, prefill_member
from mla_backend_vllm.metadata import Metadata

logger = init_logger(f"vllm.{__name__}")  # vLLM prints only the logs below its own name


class MLAImpl(MLACommonImpl[Metadata]):
    """The attention of one layer."""

    # Context parallelism: of decode, with drafts at any interleave, but not of prefill. The version of vLLM
    # decides which of these it reads.
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    supports_pcp: bool = False

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
        _refuse_layer_options(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            attn_type=None if attn_type == AttentionType.DECODER else attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
        )
        super().__init__(
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
        _warn_if_untested()
        self.supports_quant_query_input = False
        vllm_config = get_current_vllm_config()
        _refuse_elastic_expert_parallelism(vllm_config)
        self.geometry = MLAGeometry(
            num_heads=self.num_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            softmax_scale=self.scale,
            hidden_size=vllm_config.model_config.get_hidden_size(),
            q_lora_rank=self.q_lora_rank,
        )
        _ensure_prefill_backend(vllm_config)

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Append the new tokens' latents: with vLLM's own kernel on a GPU, with torch on the CPU."""
        if not kv_cache.is_cpu:
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, *args, **kwargs)
        elif kv_cache.numel():
            slots = slot_mapping.flatten()  # the other inputs may be padded
            cache.append(kv_cache, kv_c_normed[: len(slots)], k_pe.squeeze(1)[: len(slots)], slots)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Metadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor]:
        """Absorbed attention.

        Args:
            q: q_nope [T, H, d_c] and q_rope [T, H, d_rope], or both in one tensor [T, H, d_c + d_rope] from
                models with an attention layer of their own, such as Kimi-K3, and where the ranks of a shard
                gather their queries. H then counts the heads of all these ranks.
            kv_c_and_k_pe_cache: [pages, page_size, d_c + d_rope].
            attn_metadata: the step's metadata, whose ``decode`` is not None.
            layer: vLLM's layer; not used.

        Returns:
            the output [T, H, d_c], and the lse [T, H] (fp32, natural logarithm): 0 and -inf for query rows
            that see no key of this rank's.
        """
        if isinstance(q, Tensor):
            q = q.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        q_nope, q_rope = q
        decode = attn_metadata.decode
        counters.add(decode.path, q_nope.shape[0])
        return decode.decoder.run(q_nope, q_rope, kv_c_and_k_pe_cache, decode.plan, self.scale)

    def forward_mha(self, q: Tensor, *args: Any, **kwargs: Any) -> None:
        """vLLM's regular prefill, on the prefill backend that the metadata builder chose."""
        counters.add("vanilla_prefill", q.shape[0])
        super().forward_mha(q, *args, **kwargs)


def _refuse_layer_options(**options: Any) -> None:
    """Refuse options that vLLM does not check when it selects a backend; each must be None."""
    for name, value in options.items():
        if value is not None:
            raise UnsupportedError(
                f"{BACKEND_NAME} does not implement {name}={value!r}, which a layer of this model needs: "
                "choose another --attention-backend"
            )


def _refuse_elastic_expert_parallelism(vllm_config: Any) -> None:
    if getattr(vllm_config.parallel_config, "enable_elastic_ep", False):
        raise UnsupportedError(
            f"{BACKEND_NAME} leaves the absorbed weights out of state_dict, but elastic expert parallelism "
            "pairs weights by their order there: leave --enable-elastic-ep off, or choose another "
            "--attention-backend"
        )


@functools.cache
def _warn_if_untested() -> None:
    """Warn, once per process, if this vLLM is not one of the tested versions."""
    message = engines.VLLM.untested(vllm.__version__)
    if message is not None:
        logger.warning("%s", message)


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
            raise UnsupportedError(
                f"vLLM has no MLA prefill for these head dimensions ({error}). {BACKEND_NAME} has one, but "
                f"another plugin registered {ours.get_path()} in its place ({ours.name}): load mla-backend "
                "alone (VLLM_PLUGINS=mla_backend)"
            ) from error
        attention_config.mla_prefill_backend = ours
