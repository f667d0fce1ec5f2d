"""SGLang's attention backend interface on :mod:`mla_backend`."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import sglang
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention import base_attn_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from mla_backend import counters, engines, jit, kernels, prefill
from mla_backend.batch import DecodeBatch, TableKind
from mla_backend.decode import DecodePlan, MLADecoder
from mla_backend.errors import UnsupportedError
from mla_backend.geometry import MLAGeometry
from mla_backend.policy import Policy, default_rates
from mla_backend.spec import DecoderSpec
from mla_backend_sglang.append import Appender, NewTokens, refuse_arguments
from mla_backend_sglang.fused_append import fuse_appends
from mla_backend_sglang.names import NAME
from mla_backend_sglang.prefill_step import LayerInputs, PrefillChooser, PrefillStep, expansion_tokens
from mla_backend_sglang.query_scaling import QueryScaling
from mla_backend_sglang.refusals import (
    check_layers_of_shard,
    check_runner,
    check_unscaled_queries,
    is_draft,
)
from mla_backend_sglang.settings import Settings
from mla_backend_sglang.shard import LOG2_E, current_shard
from mla_backend_sglang.weights import LayerWeights, adopt_weights, is_absorbed

logger = logging.getLogger(__name__)


class SglangMLABackend(AttentionBackend):
    """The attention of one ``ModelRunner``.

    In decode, target verification and draft extension, every request has the same number of query tokens.
    Such a step is planned entirely on the device, from SGLang's own tensors: the lengths, ``req_to_token`` as
    the token table, and ``req_pool_indices`` as its rows. A CUDA graph captures the planning too, so a replay
    costs the host nothing. A prefill is planned from the lengths that SGLang keeps on the host; see
    :class:`PrefillStep`.

    Args:
        runner: SGLang's ``ModelRunner``.
        draft_step: the step of a multi-step draft that this backend decodes, from 0; None outside of drafts.

    Raises:
        UnsupportedError: the model, cache or mode is not supported; the message names the remedy.
    """

    # Nothing in this backend reads seq_lens_cpu, which costs SGLang a copy per step of speculative decoding.
    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, *, draft_step: int | None = None):
        super().__init__()
        check_runner(runner)
        self._set_attributes_for_sglang(runner)
        self._table: Tensor = runner.req_to_token_pool.req_to_token
        self._page_size: int = runner.page_size
        self._draft_step = draft_step
        self._is_draft = is_draft(runner)
        self._num_draft_tokens: int = Settings().speculation.speculative_num_draft_tokens or 0
        config, device = runner.model_config.hf_text_config, self._table.device
        geometry = MLAGeometry.from_hf_config(config).per_rank(get_parallel().attn_tp_size)
        self._dimensions = (geometry.kv_lora_rank, geometry.qk_rope_head_dim)
        self._query_scaling = QueryScaling.of_config(config)
        if self._query_scaling is not None:
            check_unscaled_queries()
        self._shard = current_shard()
        # SGLang's writers cast latents to fp8 without dividing by a scale, so the scale is 1.
        self._kv_scale: Tensor | None = None
        if runner.kv_cache_dtype == torch.float8_e4m3fn:
            self._kv_scale = torch.ones(1, dtype=torch.float32, device=device)
        # The runners of SGLang's attention test kit have no model.
        model = getattr(runner, "model", None)
        self._layers = self._adopt_weights(model, runner.token_to_kv_pool) if model is not None else {}
        policy = Policy(geometry, default_rates(device))
        self._chooser = self._make_chooser(policy, runner.dtype)
        spec = self._decoder_spec(geometry, runner, policy.absorbed_query_limit())
        kernel_state = engines.describe_kernels(spec, with_append=True)
        _build_kernels(spec)
        self._outgrown: list[Any] = []
        self._make_decoder(spec)
        self._appender = self._make_appender(model, runner.dtype)
        self._prefill_library = self._prepare_prefill(geometry)
        if draft_step is None:
            self._log_start(kernel_state)
            if self._kv_scale is not None:
                _warn_of_scales(self._layers)

    def _set_attributes_for_sglang(self, runner: Any) -> None:
        """Set the attributes that SGLang reads from its backends."""
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.data_type = self.kv_cache_dtype = runner.kv_cache_dtype
        self.max_context_len = runner.model_config.context_len  # sizes masks if lengths stay on the GPU
        self.forward_metadata: Any = None  # a DecodePlan; in a prefill step a PrefillStep

    def _adopt_weights(self, model: Any, kv_pool: Any) -> dict[int, LayerWeights]:
        """The absorbed weights of the model's MLA layers, by the layers' numbers."""
        if self._shard.size > 1:
            check_layers_of_shard(model)
        # In models that also have linear attention, the pool lists the MLA layers.
        layer_ids = getattr(kv_pool, "full_attention_layer_id_mapping", None)
        return adopt_weights(model, *self._dimensions, layer_ids)

    def _make_chooser(self, policy: Policy, dtype: torch.dtype) -> PrefillChooser:
        return PrefillChooser(
            policy,
            # SGLang's own limit holds too.
            chunk_tokens=min(expansion_tokens(policy, dtype), envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get()),
            absorb_prefixes=Settings().is_chunked_prefix_disabled,
            may_absorb=engines.SGLANG.absorbs_prompts(self._shard.size),
        )

    def _decoder_spec(self, geometry: MLAGeometry, runner: Any, absorbed_limit: int) -> DecoderSpec:
        absorbs_prompts = engines.SGLANG.absorbs_prompts(self._shard.size)
        query_len = max(self._num_draft_tokens, absorbed_limit if absorbs_prompts else 1)
        return DecoderSpec(
            num_heads=geometry.num_heads * self._shard.size,
            kv_lora_rank=geometry.kv_lora_rank,
            qk_rope_head_dim=geometry.qk_rope_head_dim,
            dtype=runner.dtype,
            kv_dtype=runner.kv_cache_dtype,
            page_size=self._page_size,
            table_kind=TableKind.TOKEN,
            device=self._table.device,
            max_batch=runner.req_to_token_pool.size,
            max_query_len=query_len if self._draft_step is None else 1,
            batch_invariant=Settings().is_deterministic,
        )

    def _make_decoder(self, spec: DecoderSpec) -> None:
        self._decoder = engines.make_decoder(spec, NAME)
        self._seq_lens = torch.zeros(spec.max_batch, dtype=torch.int32, device=spec.device)
        self._verify_mask = self._unread_mask(spec.max_batch)

    def _make_appender(self, model: Any, dtype: torch.dtype) -> Appender:
        # Not if ranks divide the cache: SGLang then gathers queries, which must be rotated before that.
        may_fuse = model is not None and self._shard.size == 1
        fused = fuse_appends(model, dtype, receives_calls) if may_fuse else {}
        return Appender(fused, self._shard, self._kv_scale, dtype, self._table.device)

    def _prepare_prefill(self, geometry: MLAGeometry) -> str:
        """The library of regular prefill; its kernels are compiled now, but for a step of a draft."""
        spec, dimensions = self._decoder.spec, (geometry.qk_head_dim, geometry.v_head_dim)
        find = prefill.prepare if self._draft_step is None else prefill.library
        return find(spec.device, spec.dtype, *dimensions, with_plans=True)

    def _make_room(self, batch_size: int) -> None:
        """Make room for batches of ``batch_size`` requests.

        A batch may have more requests than SGLang's pool: when SGLang tunes kernels, and when it rounds
        batches up for data-parallel attention.
        """
        if batch_size > self._seq_lens.shape[0]:
            # Captured graphs keep using these.
            self._outgrown.append((self._decoder, self._seq_lens, self._verify_mask))
            self._make_decoder(dataclasses.replace(self._decoder.spec, max_batch=batch_size))

    def _unread_mask(self, max_batch: int) -> Any:
        """A small mask for SGLang's drafts to write; None if SGLang needs none.

        Otherwise SGLang would write, in each step, a mask for the longest possible context of each request.
        """
        try:
            from sglang.srt.layers.attention.verify_mask import maybe_create_verify_mask
        except ImportError:
            return None
        return maybe_create_verify_mask(
            is_draft_runner=self._is_draft,
            skip_prefill=False,
            max_bs=max_batch,
            max_context_len=self.max_context_len,
            num_draft_tokens=self._num_draft_tokens,
            device=self._table.device,
            is_read=False,
        )

    def _log_start(self, kernel_state: str | None) -> None:
        spec = self._decoder.spec
        counters.open_file()
        line = engines.start_line(
            engines.SGLANG,
            sglang.__version__,
            self._decoder,
            kernels=kernel_state,
            prefill_library=self._prefill_library,
            absorbed=self._describe_absorbed(),
            shard=self._shard,
            cache_tokens=self.token_to_kv_pool.size,
        )
        logger.info(
            "%s; norm, rotary embedding and cache append fused in %d of %d attention layers",
            line,
            len(self._appender.fused),
            len(self._layers),
        )
        if spec.page_size == 1 and spec.device.type == "cuda":
            logger.info(
                "mla_backend: --page-size 64 makes decode faster than --page-size 1, SGLang's default"
            )

    def _describe_absorbed(self) -> str:
        if Settings().is_deterministic:
            return "all requests use absorbed attention (deterministic inference)"
        if not self._chooser.may_absorb:
            return "decode uses absorbed attention, and every prefill regular prefill"
        if self._chooser.absorb_prefixes:
            return "requests with a cached prefix use absorbed attention, others regular prefill"
        limit = self._chooser.policy.absorbed_query_limit()
        return f"on a cached prefix, {engines.describe_threshold(limit)}"

    # Planning a step.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if forward_batch.batch_size == 0:
            self.forward_metadata = None
            return
        self._make_room(forward_batch.batch_size)
        if _has_uniform_queries(forward_batch.forward_mode):
            self._plan_uniform(forward_batch)
        else:
            seq_lens = self._seq_lens[: forward_batch.batch_size]
            seq_lens.copy_(forward_batch.seq_lens)
            self.forward_metadata = PrefillStep(
                forward_batch.extend_seq_lens_cpu,
                forward_batch.extend_prefix_lens_cpu,
                table=self._table,
                table_rows=forward_batch.req_pool_indices,
                seq_lens=seq_lens,
                decoder=self._decoder,
                library=self._prefill_library,
            )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._make_room(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Do nothing: all planning happens on the device, inside the graph."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        assert _has_uniform_queries(forward_batch.forward_mode), (
            "prefills are planned on the host, not in graphs"
        )
        self._plan_uniform(forward_batch)

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        return True

    @property
    def verify_mask(self) -> Any:
        """The buffer for the mask of a draft tree. Nothing reads it: with this backend, trees are chains."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Do nothing: a plan depends on lengths, not on a mask."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def shared_read_ends(self, forward_mode: Any) -> Any:
        """When a step has read ``req_to_token``: after its last layer (SGLang calls this from 0.5.18 on)."""
        return base_attn_backend.SharedReadEnds.POST_REPLAY

    def support_triton(self) -> bool:
        return self._table.device.type == "cuda"

    def _plan_uniform(self, forward_batch: Any) -> None:
        """Plan a step in which every request has the same number of query tokens."""
        batch_size = forward_batch.batch_size
        seq_lens = self._seq_lens[:batch_size]
        torch.add(forward_batch.seq_lens[:batch_size], self._extra_keys(forward_batch), out=seq_lens)
        self.forward_metadata = self._decoder.plan(
            DecodeBatch(
                seq_lens=seq_lens,
                table=self._table,
                page_size=self._page_size,
                query_start_loc=None,
                max_query_len=_query_len(forward_batch),
                table_kind=TableKind.TOKEN,
                table_rows=forward_batch.req_pool_indices[:batch_size],
                shard=self._shard,
            )
        )

    def _extra_keys(self, forward_batch: Any) -> int:
        """The number of keys of each request that ``forward_batch.seq_lens`` does not count."""
        if forward_batch.forward_mode.is_target_verify():
            return forward_batch.spec_info.draft_token_num
        # Lengths of a draft extension end with its last query token.
        return 0 if self._draft_step is None else self._draft_step + 1

    # Attending.

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any, *args, **kwargs
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The output [T, H * d_c]; on a rank of a shard [T, H, d_c], with the lse [T, H] to base 2."""
        latent_cache = self._latent_cache(layer)
        tokens = NewTokens.of_call(q, k, v, layer, forward_batch, *args, **kwargs)
        self._appender.append(tokens, latent_cache, self.token_to_kv_pool)
        q_nope, q_rope = self._scaled(tokens)
        decoder = self._decoder
        served_by = {"kernel": decoder.implementation, "cache_format": decoder.spec.kv_format.name}
        counters.add("absorbed_decode", q_nope.shape[0], **served_by)
        _check_tokens(self.forward_metadata.batch, q_nope.shape[0], forward_batch)
        out, lse = attend_planned_tokens(
            decoder, self.forward_metadata, q_nope, q_rope, latent_cache, layer.scaling, self._kv_scale
        )
        return out.flatten(1) if self._shard.size == 1 else (out, lse.mul_(LOG2_E))

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any, *args, **kwargs
    ) -> Tensor | tuple[Tensor, Tensor]:
        if _has_uniform_queries(forward_batch.forward_mode):
            return self.forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)
        step, latent_cache = self.forward_metadata, self._latent_cache(layer)
        if is_absorbed(layer, *self._dimensions):
            tokens = NewTokens.of_call(q, k, v, layer, forward_batch, *args, **kwargs)
            self._appender.append(tokens, latent_cache, self.token_to_kv_pool)
            queries = self._scaled(tokens)
            return step.attend_absorbed(*queries, latent_cache, layer.scaling, self._kv_scale).flatten(1)
        if getattr(forward_batch, "attn_attend_prefix_cache", False):
            raise UnsupportedError(
                f"layer {layer.layer_id} passes cached prefixes to its attention in chunks, but mla_backend "
                "needs SGLang's plain MHA forward: start with --disable-chunked-prefix-cache"
            )
        refuse_arguments(layer, {name: value for name, value in kwargs.items() if name != "save_kv_cache"})
        assert k is not None and v is not None  # the MHA forward always passes both
        heads = layer.tp_q_head_num
        q = q.view(-1, heads, layer.qk_head_dim)
        if self._query_scaling is not None:
            self._query_scaling.scale_(step, forward_batch.positions, q)
        inputs = LayerInputs(
            q=q,
            key=k.view(-1, heads, layer.qk_head_dim),
            value=v.view(-1, heads, layer.v_head_dim),
            latent_cache=latent_cache,
            softmax_scale=layer.scaling,
            weights=self._layers.get(layer.layer_id),
            shard=self._shard,
            kv_scale=self._kv_scale,
        )
        return step.attend(inputs, self._chooser).flatten(1)

    def _scaled(self, tokens: NewTokens) -> tuple[Tensor, Tensor]:
        """q_nope and q_rope of an absorbed call, scaled by their positions if the model asks for it."""
        if self._query_scaling is not None and tokens.has_split_queries:
            positions = tokens.forward_batch.positions
            self._query_scaling.scale_(self.forward_metadata, positions, tokens.q_nope, tokens.q_rope)
        return tokens.q_nope, tokens.q_rope

    def _latent_cache(self, layer: Any) -> Tensor:
        """The layer's cache, [pages, page_size, d_c + d_rope].

        Each call gets one layer's cache from SGLang, which may still be loading the caches of later layers.
        """
        tokens = self.token_to_kv_pool.get_key_buffer(layer.layer_id).squeeze(1)
        return tokens.unflatten(0, (-1, self._page_size))


def _build_kernels(spec: DecoderSpec) -> None:
    """Build the kernels of the decoder and of the append together, not one after the other."""
    if spec.device.type == "cuda":
        capability = torch.cuda.get_device_capability(spec.device)
        jit.prepare(kernels.variants_of(spec, capability, with_append=True))


def _warn_of_scales(layers: dict[int, LayerWeights]) -> None:
    """Warn if the checkpoint has scales for the cache, which SGLang's writers do not apply."""
    for layer_id, layer in layers.items():
        k_scale = getattr(getattr(layer.attention, "attn_mqa", None), "k_scale", None)
        if k_scale is not None and float(k_scale) != 1.0:
            logger.warning(
                "The checkpoint has a k_scale of %g for layer %d. SGLang writes latents to an fp8 cache "
                "without dividing by it, so mla_backend reads the cache with a scale of 1.",
                float(k_scale),
                layer_id,
            )
            return


def receives_calls(forward_batch: Any) -> bool:
    """Whether a step has uniform queries, and a :class:`SglangMLABackend` receives its attention calls."""
    mode = forward_batch.forward_mode
    return (
        _has_uniform_queries(mode)
        and not mode.is_idle()  # an idle step makes no attention call
        and isinstance(_serving_backend(get_attn_backend(), mode), SglangMLABackend)
        # With two-batch overlap a layer prepares the other half of the batch before it attends to this one.
        and getattr(forward_batch, "tbo_parent_token_range", None) is None
    )


def _serving_backend(attn_backend: Any, mode: Any) -> Any:
    """The backend that serves layers with latents in a step of this mode.

    SGLang may wrap it for different prefill and decode backends, and wrap that again for hybrid models. The
    wrapper for two-batch overlap is not unwrapped, because each half of a batch has its own backend.
    """
    attn_backend = getattr(attn_backend, "full_attn_backend", attn_backend)
    select = getattr(attn_backend, "_select_backend", None)
    return attn_backend if select is None else select(mode)


def serves_prefill(attn_backend: Any) -> bool:
    """Whether a :class:`SglangMLABackend` serves prefills, possibly inside SGLang's wrappers."""
    for inner in ("primary", "full_attn_backend", "prefill_backend"):  # from the outside in
        attn_backend = getattr(attn_backend, inner, attn_backend)
    return isinstance(attn_backend, SglangMLABackend)


def _query_len(forward_batch: Any) -> int:
    """The number of query tokens of each request of a step with uniform queries."""
    mode = forward_batch.forward_mode
    if mode.is_target_verify():
        return forward_batch.spec_info.draft_token_num
    # Not the number of draft tokens: with several draft layers, an extension also covers earlier tokens.
    return forward_batch.spec_info.num_tokens_per_req if mode.is_draft_extend_v2() else 1


def _check_tokens(planned: DecodeBatch, num_tokens: int, forward_batch: Any) -> None:
    """Check that a step has the query tokens that were planned, or more where SGLang may have padded it.

    Raises:
        UnsupportedError: the step has other query tokens, for which there is no plan.
    """
    # SGLang pads batches with data-parallel attention, even after they are planned, and halves of a batch.
    padding = ("global_num_tokens_cpu", "tbo_parent_token_range")
    may_be_padded = any(getattr(forward_batch, name, None) is not None for name in padding)
    added = num_tokens - planned.num_uniform_tokens
    if added == 0 or (added > 0 and may_be_padded):
        return
    raise UnsupportedError(
        f"SGLang attends with {num_tokens} query tokens of {planned.batch_size} requests, for each of which "
        f"mla_backend has planned {planned.max_query_len}: use a supported version of SGLang, or another "
        "--attention-backend"
    )


def attend_planned_tokens(
    decoder: MLADecoder,
    plan: DecodePlan,
    q_nope: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    softmax_scale: float,
    kv_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Absorbed attention of a step's queries, some of which may be padding that was not planned for.

    With data-parallel attention, SGLang pads the eager steps of drafts after they are planned.

    Returns:
        out [T, H, d_c] and lse [T, H]; 0 for the padding.
    """
    num_tokens = plan.batch.num_uniform_tokens
    if num_tokens == len(q_nope):
        return decoder.run(q_nope, q_rope, latent_cache, plan, softmax_scale, kv_scale=kv_scale)
    out, lse = q_nope.new_zeros(q_nope.shape), q_nope.new_zeros(q_nope.shape[:2], dtype=torch.float32)
    planned = slice(num_tokens)
    outputs = {"out": out[planned], "lse": lse[planned]}
    decoder.run(
        q_nope[planned], q_rope[planned], latent_cache, plan, softmax_scale, kv_scale=kv_scale, **outputs
    )
    return out, lse


def _has_uniform_queries(mode: Any) -> bool:
    return mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2()
