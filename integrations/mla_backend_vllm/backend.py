"""The attention backend that vLLM runs: absorbed decode and short extends on our kernels.

vLLM keeps the orchestration. In each step it puts requests with few new tokens first and hands those to
`MLAImpl.forward_mqa`, already multiplied by the absorbed weights; the others go to `forward_mha`, which
expands the latents into keys and values. Where the line lies is the policy's choice: see `MetadataBuilder`.

The absorbed weights are vLLM's own `W_UK_T` and `W_UV`: views of kv_b_proj's weight, or 16-bit copies where
that is quantized. So whatever updates, reloads or discards weights finds them as it does with vLLM's own
backends. Copies in another layout would not make the batched products faster.

Signatures differ between vLLM 0.26 and 0.33. What we override takes keywords and ignores those that it has no
use for; no version is ever compared.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import vllm
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.mla.prefill.selector import get_mla_prefill_backend

from mla_backend import (
    DecodeBatch,
    DecodePlan,
    MLADecoder,
    MLAGeometry,
    Policy,
    TableKind,
    UnsupportedError,
    cache,
    counters,
    engines,
    prefill,
)
from mla_backend.policy import default_rates
from mla_backend.spec import DecoderSpec
from mla_backend_vllm import BACKEND_NAME, PREFILL_PATH, prefill_member
from mla_backend_vllm.prefill import MLAPrefill

logger = init_logger(f"vllm.{__name__}")  # vLLM prints the logs below its own name only

FIRST_CAPABILITY = (8, 0)
"""The least compute capability that the decoder has kernels for."""

PREFERRED_PAGE_SIZE = 64
"""On a GPU; the CPU platform has its own default."""


class MLABackend(MLACommonBackend):
    """What the backend is called, made of, and able to do."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[MLAImpl]:
        return MLAImpl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any width of the latent row

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
        return False  # the builder takes the longest query of a step from the host's lengths

    @classmethod
    def validate_configuration(cls, **selection: Any) -> list[str]:
        """Why this configuration cannot be served; an empty list if it can."""
        reasons = super().validate_configuration(**selection)
        kv_dtype, dtype = selection.get("kv_cache_dtype"), selection["dtype"]
        own_dtype = str(dtype).removeprefix("torch.")
        if kv_dtype not in (None, "auto", own_dtype):
            remedy = own_dtype if own_dtype in cls.supported_kv_cache_dtypes else "auto"
            reasons.append(
                f"{BACKEND_NAME} keeps the latent cache in the model's dtype ({dtype}), not in {kv_dtype!r}, "
                f"which the command line or the checkpoint asks for: use --kv-cache-dtype {remedy}"
            )
        if selection.get("use_dcp") or selection.get("use_pcp"):
            reasons.append(f"{BACKEND_NAME} does not implement context parallelism (DCP, PCP)")
        if current_platform.is_cpu() and "CPU" not in MLAPrefillBackendEnum.__members__:
            reasons.append("the CPU platform of this vLLM has no prefill for MLA: use 0.29 or later")
        if torch.version.hip is not None:
            reasons.append(f"{BACKEND_NAME} has kernels for NVIDIA GPUs, not for AMD's (ROCm)")
        elif (capability := selection.get("device_capability")) is not None:
            reasons += _reasons_against_gpu(
                (capability.major, capability.minor), dtype, selection["head_size"]
            )
        return reasons


def _reasons_against_gpu(capability: tuple[int, int], dtype: torch.dtype, head_size: int) -> Iterable[str]:
    """Why the kernels cannot serve latent rows of ``head_size`` on such a GPU. Does not touch the GPU."""
    if capability < FIRST_CAPABILITY:
        yield (
            f"{BACKEND_NAME} has kernels from compute capability {'.'.join(map(str, FIRST_CAPABILITY))} on, "
            f"this GPU has {'.'.join(map(str, capability))}"
        )
        return
    try:
        from mla_backend import jit, kernels
        from mla_backend.kernels.base import DIMENSIONS, ELEMENTS
    except ImportError as error:
        yield f"the CUDA kernels of {BACKEND_NAME} cannot be loaded: {error}"
        return
    widths = {sum(dimensions): dimensions for dimensions in DIMENSIONS}
    if head_size not in widths:
        yield (
            f"{BACKEND_NAME} has kernels for latent rows of {' or '.join(map(str, widths))}, "
            f"this model's have {head_size}"
        )
    elif dtype in ELEMENTS:
        spec = _spec(dtype, widths[head_size], kernels.LARGEST_BLOCK)
        variants = kernels.variants_of(spec, capability)
        why_not = jit.why_unavailable(variants)
        if why_not is not None:
            yield why_not


def _spec(dtype: torch.dtype, dimensions: tuple[int, int], largest_block: int) -> DecoderSpec:
    """Of the model that is being configured; for one head if none is."""
    config = get_current_vllm_config_or_none()
    heads = 1
    if config is not None and config.model_config is not None:
        heads = config.model_config.get_num_attention_heads(config.parallel_config)
    kv_lora_rank, qk_rope_head_dim = dimensions
    return DecoderSpec(
        num_heads=heads,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=PREFERRED_PAGE_SIZE,
        table_kind=TableKind.BLOCK,
        device=torch.device("cuda"),
        max_batch=1,
        max_query_len=-(-largest_block // heads),  # more rows than a block has take its kernel
        batch_invariant=False,
    )


@dataclass
class DecodeMetadata(MLACommonDecodeMetadata):
    """A step's absorbed pass, planned once for all layers."""

    decoder: MLADecoder
    plan: DecodePlan
    path: counters.AttentionPath


@dataclass
class Metadata(MLACommonMetadata[DecodeMetadata]):
    def __post_init__(self) -> None:
        pass  # vLLM's check admits latent rows of 320, 512 and 576 only; MiniCPM3's have 288


class MetadataBuilder(MLACommonMetadataBuilder[Metadata]):
    """Turns vLLM's batch into a `DecodeBatch` and plans it.

    Requests with at most `reorder_batch_threshold` new tokens are attended to in absorbed form. The threshold
    is the longest query for which the policy's cost model prefers that on a long prefix; 1 where results must
    not depend on the batch.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        **kwargs: Any,
    ):
        layers = vllm_config.compilation_config.static_forward_context
        impl: MLAImpl = layers[layer_names[0]].impl
        # vLLM may put a short prompt on either side of the threshold, depending on what stands before it.
        self.reorder_batch_threshold = (
            1
            if envs.VLLM_BATCH_INVARIANT
            else Policy(impl.geometry, default_rates(device)).absorbed_query_limit()
        )
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, Metadata, **kwargs)
        if device.type == "cpu":
            stock = self._prefill_backend
            self._prefill_backend = MLAPrefill(
                num_heads=stock.num_heads,
                scale=stock.scale,
                kv_lora_rank=stock.kv_lora_rank,
                qk_nope_head_dim=stock.qk_nope_head_dim,
                qk_rope_head_dim=stock.qk_rope_head_dim,
                v_head_dim=stock.v_head_dim,
                vllm_config=vllm_config,
            )
        for name in layer_names:
            layers[name].register_state_dict_post_hook(_leave_out_absorbed_weights)
        graph_batch = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self.decoder = MLADecoder(
            num_heads=impl.geometry.num_heads,
            kv_lora_rank=impl.geometry.kv_lora_rank,
            qk_rope_head_dim=impl.geometry.qk_rope_head_dim,
            dtype=vllm_config.model_config.dtype,
            page_size=kv_cache_spec.block_size,
            device=device,
            max_batch=max(vllm_config.scheduler_config.max_num_seqs, graph_batch),
            max_query_len=self.reorder_batch_threshold,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )
        if device.type == "cuda" and self.decoder.implementation == "torch":
            raise UnsupportedError(
                f"{BACKEND_NAME} has no kernel for this model on this GPU ({self.decoder.reason}): "
                "choose another --attention-backend"
            )
        self._log_choices(impl.geometry)

    def _log_choices(self, geometry: MLAGeometry) -> None:
        spec, device = self.decoder.spec, self.decoder.spec.device
        library = self._prefill_backend.get_name()
        if isinstance(self._prefill_backend, MLAPrefill):
            library = prefill.library(device, spec.dtype, geometry.qk_head_dim, geometry.v_head_dim)
        logger.info_once(
            "mla-backend %s on %s: decode kernel %s (%s), pages of %d tokens, prefill by %s; requests with "
            "at most %d new tokens use absorbed attention, longer ones regular prefill",
            importlib.metadata.version("mla-backend"),
            torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
            self.decoder.implementation,
            self.decoder.reason,
            spec.page_size,
            library,
            self.reorder_batch_threshold,
        )

    def build(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = super().build(*args, **kwargs)
        context = metadata.prefill.chunked_context if metadata.prefill is not None else None
        if hasattr(context, "prefill_tokens_with_context"):
            # vLLM 0.26 merges context into its first rows only, as if prompts with context came first. But
            # its runner sorts by new tokens: the end of a chunked prompt can stand behind others, and would
            # lose its context. Without this bound all rows are merged; those without context weigh it by 0.
            context.prefill_tokens_with_context = None
        return metadata

    def _build_decode(
        self,
        *,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
        **unused: Any,
    ) -> DecodeMetadata:
        num_decodes = seq_lens_device.shape[0]
        query_lens = query_start_loc_cpu.diff()
        max_query_len = max(1, int(query_lens.max()))
        # vLLM pads graph batches with requests whose query_start_loc says that they are empty, but whose rows
        # exist. Only a batch described as uniform gives those rows an owner, with seq_len 0.
        is_uniform = num_decode_tokens == num_decodes * max_query_len
        if is_uniform and max_query_len > 1:  # or a ragged batch that was padded to as many rows
            is_uniform = bool(((query_lens == max_query_len) | (query_lens == 0)).all())
        batch = DecodeBatch(
            seq_lens=seq_lens_device,
            table=block_table_tensor,
            page_size=self.decoder.spec.page_size,
            query_start_loc=None if is_uniform else query_start_loc_device,
            max_query_len=max_query_len,
        )
        return DecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            decoder=self.decoder,
            plan=self.decoder.plan(batch),
            path="absorbed_decode" if max_query_len == 1 else "absorbed_extend",
        )


class MLAImpl(MLACommonImpl[Metadata]):
    """One layer's attention."""

    # No context parallelism. Which of these vLLM looks at depends on its version.
    can_return_lse_for_decode: bool = False
    supports_dcp: bool = False
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
        # vLLM's selection of backends does not know of these.
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "attn_type": None if attn_type == AttentionType.DECODER else attn_type,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }
        for name, value in unsupported.items():
            if value is not None:
                raise UnsupportedError(
                    f"{BACKEND_NAME} does not implement {name}={value!r}, which a layer of this model needs: "
                    "choose another --attention-backend"
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
        _say_if_untested()
        self.supports_quant_query_input = False
        vllm_config = get_current_vllm_config()
        if getattr(vllm_config.parallel_config, "enable_elastic_ep", False):
            raise UnsupportedError(
                f"{BACKEND_NAME} leaves absorbed weights out of state_dict, by whose order elastic expert "
                "parallelism pairs weights: leave --enable-elastic-ep off, or choose another "
                "--attention-backend"
            )
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
        """Write the new tokens' latents: by vLLM's own kernel on a GPU, by ours on the CPU."""
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
        """Absorbed attention of q: (q_nope [T, H, d_c], q_rope [T, H, d_rope]), or one tensor
        [T, H, d_c + d_rope] from models with an attention layer of their own, such as Kimi-K3.

        Returns the output [T, H, d_c] and the lse [T, H], natural logarithm.
        """
        if isinstance(q, Tensor):
            q = q.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        q_nope, q_rope = q
        decode = attn_metadata.decode
        counters.add(decode.path, q_nope.shape[0])
        return decode.decoder.run(q_nope, q_rope, kv_c_and_k_pe_cache, decode.plan, self.scale)

    def forward_mha(self, q: Tensor, *args: Any, **kwargs: Any) -> None:
        """Vanilla attention, as vLLM does it, on the prefill backend that the builder chose."""
        counters.add("vanilla_prefill", q.shape[0])
        super().forward_mha(q, *args, **kwargs)


def _leave_out_absorbed_weights(
    layer: torch.nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Hook of a layer's ``state_dict``. vLLM derives W_UK_T and W_UV from kv_b_proj when it loads a model.

    As parameters, which they are, `save_sharded_state` fails on them where they are views, and where they are
    copies it writes what no model can load.
    """
    for name in ("W_UK_T", "W_UV"):
        state_dict.pop(prefix + name, None)


@functools.cache
def _say_if_untested() -> None:
    """Log, once in a process, that this vLLM is not among the tested versions."""
    message = engines.VLLM.untested(vllm.__version__)
    if message is not None:
        logger.warning("%s", message)


def _ensure_prefill_backend(vllm_config: Any) -> None:
    """Choose our prefill backend if vLLM, which is about to choose, has none for these head dims."""
    attention_config = vllm_config.attention_config
    if attention_config.mla_prefill_backend is not None:
        return
    try:
        get_mla_prefill_backend(vllm_config)
    except ValueError as error:
        ours = prefill_member()
        if ours.get_path() != PREFILL_PATH:
            raise UnsupportedError(
                f"vLLM has no MLA prefill for these head dims ({error}). {BACKEND_NAME} has one, but another "
                f"plugin registered {ours.get_path()} in its place ({ours.name}): load mla-backend alone "
                "(VLLM_PLUGINS=mla_backend)"
            ) from error
        attention_config.mla_prefill_backend = ours
