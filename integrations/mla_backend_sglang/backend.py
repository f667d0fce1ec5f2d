"""SGLang's attention backend interface on :mod:`mla_backend`."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention import base_attn_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache import memory_pool
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from mla_backend import cache, counters, jit, kernels
from mla_backend.batch import DecodeBatch, TableKind
from mla_backend.decode import MLADecoder
from mla_backend.errors import UnsupportedError
from mla_backend.geometry import MLAGeometry
from mla_backend.policy import Policy, default_rates
from mla_backend.prefill import library as prefill_library
from mla_backend.rotary import RotaryAppend
from mla_backend.spec import DecoderSpec
from mla_backend_sglang import settings
from mla_backend_sglang.fused_append import Deferred, FusedAppend, why_not_fused
from mla_backend_sglang.prefill import LayerInputs, PrefillChooser, PrefillStep, expansion_tokens
from mla_backend_sglang.weights import adopt_weights, is_absorbed

logger = logging.getLogger(__name__)


class MLABackend(AttentionBackend):
    """Attention of one ``ModelRunner``.

    Decode, target verification and draft extension give every request the same number of query rows. Such a
    step is planned on the device alone, from SGLang's own tensors: lengths, ``req_to_token`` as the page
    table, and ``req_pool_indices`` as its rows. In a CUDA graph the planning is captured too, so a replay
    costs the host nothing. A prefill is planned from the lengths that SGLang keeps on the host, see
    :class:`PrefillStep`.

    Args:
        runner: SGLang's ``ModelRunner``.
        draft_step: of a multi-step draft, which of its steps this backend decodes, from 0.

    Raises:
        UnsupportedError: something about the model, cache or mode is not served.
    """

    # seq_lens_cpu is never read; keeping it costs SGLang a copy per step of speculative decoding.
    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, *, draft_step: int | None = None):
        super().__init__()
        _check_supported(runner)
        # SGLang reads these off its backends.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)
        self.data_type = self.kv_cache_dtype = runner.kv_cache_dtype
        self.max_context_len = runner.model_config.context_len  # sizes masks where lengths stay on the GPU
        self.forward_metadata = None

        self._table = runner.req_to_token_pool.req_to_token
        self._page_size = runner.page_size
        self._draft_step = draft_step
        self._num_draft_tokens = settings.speculation().speculative_num_draft_tokens or 0
        geometry = MLAGeometry.from_hf_config(runner.model_config.hf_text_config)
        geometry = geometry.shard(get_parallel().attn_tp_size)
        device = self._table.device
        # SGLang's attention kit has runners without a model.
        model = getattr(runner, "model", None)
        self._layers = adopt_weights(model, geometry.latent_dim) if model is not None else {}
        self._fused = fuse_appends(model, runner.dtype) if model is not None else {}
        policy = Policy(geometry, default_rates(device))
        self._chooser = PrefillChooser(
            policy,
            # SGLang's own bound holds too.
            chunk_tokens=min(expansion_tokens(policy, runner.dtype), envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get()),
            absorb_prefixes=settings.is_chunked_prefix_disabled(),
        )
        max_query_len = max(self._num_draft_tokens, policy.absorbed_query_limit())
        self._decoder_arguments = dict(
            num_heads=geometry.num_heads,
            kv_lora_rank=geometry.kv_lora_rank,
            qk_rope_head_dim=geometry.qk_rope_head_dim,
            dtype=runner.dtype,
            page_size=runner.page_size,
            table_kind=TableKind.TOKEN,
            device=device,
            max_query_len=1 if draft_step is not None else max_query_len,
            batch_invariant=settings.is_deterministic(),
        )
        if device.type == "cuda":
            self._build_kernels()
        self._prepare_decoder(runner.req_to_token_pool.size)
        if device.type == "cuda" and self._decoder.implementation == "torch":
            raise UnsupportedError(
                f"mla_backend has no kernel for this model on this GPU ({self._decoder.reason}): "
                "choose another --attention-backend"
            )
        self._append = RotaryAppend(runner.dtype, device)
        if draft_step is None:
            self._log_start(geometry, policy, runner.dtype)

    def _log_start(self, geometry: MLAGeometry, policy: Policy, dtype: torch.dtype) -> None:
        device = self._table.device
        logger.info(
            "mla_backend %s: decode kernel %s (%s) on %s, page size %d. Prefill by %s, but absorbed for "
            "requests with at most %d new tokens on a cached prefix. %d attention layers; norm, rotary "
            "embedding and cache append fused in %d",
            importlib.metadata.version("mla-backend"),
            self._decoder.implementation,
            self._decoder.reason,
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            self._page_size,
            prefill_library(device, dtype, geometry.qk_head_dim, geometry.v_head_dim),
            policy.absorbed_query_limit(),
            len(self._layers),
            len(self._fused),
        )
        if self._page_size == 1 and self._decoder.implementation == "sm90":
            logger.info(
                "mla_backend: decode is faster on this GPU with --page-size 64 than with the default, 1"
            )

    def _build_kernels(self) -> None:
        """Those of the decoder and of the append, side by side; they are loaded one after the other."""
        spec = DecoderSpec(max_batch=1, kv_dtype=self.data_type, **self._decoder_arguments)
        capability = torch.cuda.get_device_capability(spec.device)
        jit.prepare(kernels.variants_of(spec, capability, with_append=True))

    def _prepare_decoder(self, max_batch: int) -> None:
        self._decoder = MLADecoder(max_batch=max_batch, **self._decoder_arguments)
        self._seq_lens = torch.zeros(max_batch, dtype=torch.int32, device=self._table.device)

    # Planning a step.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if forward_batch.batch_size == 0:
            self.forward_metadata = None
        elif _has_uniform_queries(forward_batch.forward_mode):
            self._plan_uniform(forward_batch, in_graph=False)
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
            )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if max_bs > self._seq_lens.shape[0]:
            self._prepare_decoder(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Nothing: all of it happens on the device, inside the graph."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        if not _has_uniform_queries(forward_batch.forward_mode):
            raise UnsupportedError(
                "mla_backend plans a prefill on the host and cannot capture it whole: "
                "use --cuda-graph-backend-prefill disabled"
            )
        self._plan_uniform(forward_batch, in_graph=True)

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        return True

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def shared_read_ends(self, forward_mode: Any) -> Any:
        """The kernels read ``req_to_token`` until the last layer (asked from 0.5.18)."""
        return base_attn_backend.SharedReadEnds.POST_REPLAY

    def support_triton(self) -> bool:
        return self._table.device.type == "cuda"

    def _plan_uniform(self, forward_batch: Any, in_graph: bool) -> None:
        """Plan a step in which every request has the same number of query rows."""
        batch_size = forward_batch.batch_size
        seq_lens = self._seq_lens[:batch_size]
        extra = self._extra_keys(forward_batch, in_graph)
        torch.add(forward_batch.seq_lens[:batch_size], extra, out=seq_lens)
        self.forward_metadata = self._decoder.plan(
            DecodeBatch(
                seq_lens=seq_lens,
                table=self._table,
                page_size=self._page_size,
                query_start_loc=None,
                max_query_len=self._query_len(forward_batch),
                table_kind=TableKind.TOKEN,
                table_rows=forward_batch.req_pool_indices[:batch_size],
            )
        )

    def _query_len(self, forward_batch: Any) -> int:
        mode = forward_batch.forward_mode
        if mode.is_target_verify():
            return forward_batch.spec_info.draft_token_num
        return self._num_draft_tokens if mode.is_draft_extend_v2() else 1

    def _extra_keys(self, forward_batch: Any, in_graph: bool) -> Tensor | int:
        """How many keys of each request ``forward_batch.seq_lens`` leaves out."""
        mode = forward_batch.forward_mode
        if mode.is_target_verify():
            return forward_batch.spec_info.draft_token_num
        if mode.is_draft_extend_v2() and not in_graph:
            # Eager lengths end with the accepted tokens, those in a graph with the window of query rows.
            return self._num_draft_tokens - forward_batch.extend_seq_lens
        return 0 if self._draft_step is None else self._draft_step + 1

    # Attending.

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any, *args, **kwargs
    ) -> Tensor:
        latent_cache = self._latent_cache(layer)
        q_nope, q_rope = self._store(latent_cache, q, k, v, layer, forward_batch, *args, **kwargs)
        counters.add("absorbed_decode", q_nope.shape[0])
        out, _ = self._decoder.run(q_nope, q_rope, latent_cache, self.forward_metadata, layer.scaling)
        return out.flatten(1)

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any, *args, **kwargs
    ) -> Tensor:
        if _has_uniform_queries(forward_batch.forward_mode):
            return self.forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)
        step, latent_cache = self.forward_metadata, self._latent_cache(layer)
        if is_absorbed(layer, latent_cache.shape[-1]):
            q_nope, q_rope = self._store(latent_cache, q, k, v, layer, forward_batch, *args, **kwargs)
            out = step.attend_absorbed(q_nope, q_rope, latent_cache, layer.scaling)
        else:
            if getattr(forward_batch, "attn_attend_prefix_cache", False):
                raise UnsupportedError(
                    f"layer {layer.layer_id} hands cached prefixes to its attention in chunks, although "
                    "mla_backend asks for the plain MHA forward: start with --disable-chunked-prefix-cache"
                )
            heads = layer.tp_q_head_num
            inputs = LayerInputs(
                q=q.view(-1, heads, layer.qk_head_dim),
                key=k.view(-1, heads, layer.qk_head_dim),
                value=v.view(-1, heads, layer.v_head_dim),
                latent_cache=latent_cache,
                scale=layer.scaling,
                weights=self._layers.get(layer.layer_id),
            )
            out = step.attend(inputs, self._chooser)
        return out.flatten(1)

    def _latent_cache(self, layer: Any) -> Tensor:
        """[pages, page_size, d_c + d_rope]; layer by layer, as the pool may still be loading later ones."""
        tokens = self.token_to_kv_pool.get_key_buffer(layer.layer_id).squeeze(1)
        return tokens.unflatten(0, (-1, self._page_size))

    def _store(
        self,
        latent_cache: Tensor,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens' latents to the cache, unless the model has done so.

        If the layer's forward left norm and rotary embedding to us (:class:`FusedAppend`), these come first.

        Args:
            latent_cache: the layer's.
            q: [T, H, d_c], with ``q_rope`` [T, H, d_rope]; or [T, H, d_c + d_rope] alone.
            k: [T, 1, d_c], with ``k_rope`` [T, 1, d_rope]; or [T, 1, d_c + d_rope] alone; None if written.
            v: [T, 1, d_c], a part of k.

        Returns:
            q_nope [T, H, d_c] and q_rope [T, H, d_rope], views of what was given.
        """
        _refuse_unknown(others, layer)
        heads, d_c = layer.tp_q_head_num, layer.v_head_dim
        if q_rope is not None:
            q_nope, q_rope = q.view(-1, heads, d_c), q_rope.view(-1, heads, layer.head_dim - d_c)
        else:
            q_nope, q_rope = q.view(-1, heads, layer.head_dim).tensor_split([d_c], dim=-1)
        fused = self._fused.get(layer.layer_id)
        if deferred := fused and fused.take(forward_batch):
            if not save_kv_cache or k is None:
                raise UnsupportedError(
                    f"layer {layer.layer_id} left norm and rotary embedding to mla_backend, but gives no keys"
                )
            if k_rope is None:
                k, k_rope = k.tensor_split([d_c], dim=-1)
            self._append_deferred(deferred, latent_cache, q_rope, k.flatten(1), k_rope.flatten(1))
        elif save_kv_cache and k is not None:
            location = _write_location(forward_batch)
            if k_rope is None:
                self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
            elif self._table.device.type == "cuda":
                self.token_to_kv_pool.set_mla_kv_buffer(layer, location, k, k_rope)
            else:
                # The pool's own writer of two parts is a GPU kernel.
                cache.append(latent_cache, k.flatten(1), k_rope.flatten(1), forward_batch.out_cache_loc)
        return q_nope, q_rope

    def _append_deferred(
        self, deferred: Deferred, latent_cache: Tensor, q_rope: Tensor, kv_c: Tensor, k_rope: Tensor
    ) -> None:
        """Normalize kv_c [T, d_c], rotate k_rope [T, d_rope] and, in place, q_rope; append the keys."""
        location = _write_location(deferred.forward_batch)
        slots = getattr(location, "loc", location)
        self._append(
            q_rope,
            kv_c,
            k_rope,
            latent_cache,
            slots.contiguous(),  # those of several draft steps lie side by side
            deferred.positions,
            deferred.rotary.cos_sin_cache,
            interleaved=not deferred.rotary.is_neox_style,
            norm_weight=deferred.norm.weight.data,
            norm_eps=deferred.norm.variance_epsilon,
        )


class MLADraftDecodeBackend:
    """The decode steps of an EAGLE or MTP draft: one backend for each, all planned before the first."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any, topk: int, num_steps: int):
        _check_topk(topk)
        self.topk = topk
        self.speculative_num_steps = num_steps
        # The last step's token is drafted by the one before.
        self.attn_backends = [MLABackend(runner, draft_step=step) for step in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Nothing, as for one step."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)


def fuse_appends(model: torch.nn.Module, dtype: torch.dtype) -> dict[int, FusedAppend]:
    """Wrap those layers of a model whose new tokens one launch can normalize, rotate and append.

    Not in deterministic inference: prefill uses SGLang's kernels, and a key's bits must be the same. Once for
    a model, however many backends it has.

    Args:
        model: one whose weights are adopted.
        dtype: of the latent cache.

    Returns:
        the wrapped layers by their ``layer_id``.
    """
    if not hasattr(model, "mla_backend_fused"):
        fused, refused = {}, {}
        for layer_id, layer in model.mla_backend_layers.items():
            if why_not := why_not_fused(layer.attention, dtype):
                refused.setdefault(why_not, []).append(layer_id)
            elif not settings.is_deterministic():
                fused[layer_id] = FusedAppend(layer.attention, _is_served)
        for why_not, layer_ids in refused.items():
            logger.warning(
                "mla_backend leaves norm, rotary embedding and cache append of %d layers to SGLang's slower "
                "kernels: %s",
                len(layer_ids),
                why_not,
            )
        model.mla_backend_fused = fused
    return model.mla_backend_fused


def _is_served(forward_batch: Any) -> bool:
    """Whether the attention calls of a step come to an :class:`MLABackend`, with uniform queries."""
    # Not if SGLang's wrapper is asked, which may have another backend behind it.
    return (
        isinstance(get_attn_backend(), MLABackend)
        and _has_uniform_queries(forward_batch.forward_mode)
        and not forward_batch.forward_mode.is_idle()  # makes no attention call
    )


def _write_location(forward_batch: Any) -> Any:
    """Where the new tokens go, as the pool's writers want to be told (from 0.5.22, not by a bare tensor)."""
    if hasattr(getattr(memory_pool, "KVWriteLoc", None), "for_batch"):
        return memory_pool.KVWriteLoc.for_batch(forward_batch)
    return forward_batch.out_cache_loc


def _refuse_unknown(arguments: dict[str, Any], layer: Any) -> None:
    if given := [name for name, value in arguments.items() if value is not None]:
        raise UnsupportedError(
            f"layer {layer.layer_id} asks for attention with {', '.join(given)}, which mla_backend does "
            "not know: choose another --attention-backend"
        )


def serves_prefill(attn_backend: Any) -> bool:
    """Whether prefills come to an :class:`MLABackend`, maybe through SGLang's wrappers of several."""
    for inner in ("primary", "full_attn_backend", "prefill_backend"):  # from the outside in
        attn_backend = getattr(attn_backend, inner, attn_backend)
    return isinstance(attn_backend, MLABackend)


def _has_uniform_queries(mode: Any) -> bool:
    return mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2()


def _check_supported(runner: Any) -> None:
    if not runner.use_mla_backend:
        raise UnsupportedError(
            "--attention-backend mla_backend serves models with Multi-head Latent Attention (DeepSeek-V2/V3, "
            "Kimi-K2, GLM-4.7-Flash, MiniCPM3, ...), and this model has none: "
            + (
                "choose another --speculative-draft-attention-backend"
                if getattr(runner, "is_draft_worker", False)
                else "choose another backend"
            )
        )
    if runner.kv_cache_dtype != runner.dtype:
        raise UnsupportedError(
            f"mla_backend reads latent caches in the model's dtype, {runner.dtype}, and fp8 ones not yet; "
            f"this one is {runner.kv_cache_dtype} (auto follows the checkpoint): "
            f"{_cache_remedy(runner.dtype)}"
        )
    if settings.multiplexes_prefill():
        raise UnsupportedError(
            "--enable-pdmux runs prefills a few layers at a time, and neither SGLang's DeepSeek models nor "
            "mla_backend do that: leave it off"
        )
    if settings.offloads_weights():
        raise UnsupportedError(
            "mla_backend multiplies by weights where SGLang loaded them, and offloaded ones are not on the "
            "GPU: leave --cpu-offload-gb and --offload-group-size off"
        )
    if getattr(runner.model_config.hf_text_config, "llama_4_scaling", None):
        raise UnsupportedError(
            "mla_backend does not scale queries by their position, as this model's llama_4_scaling asks: "
            "choose another backend"
        )
    pool = runner.token_to_kv_pool
    if getattr(getattr(pool, "full_kv_pool", pool), "requires_physical_write_loc", False):
        raise UnsupportedError(
            "mla_backend reads req_to_token as it is, and unified memory translates what it holds: "
            "leave --enable-unified-memory off"
        )
    parallel = get_parallel()
    if max(parallel.attn_cp_size, parallel.attn_dcp_size) > 1:
        raise UnsupportedError(
            "mla_backend does not split a request over GPUs: leave context parallelism off"
        )
    spec = settings.speculation()
    if spec.speculative_algorithm == "NGRAM":
        raise UnsupportedError(
            "mla_backend verifies chains of drafts, and SGLang joins n-grams to trees, at any breadth: "
            "use another --speculative-algorithm"
        )
    if spec.speculative_algorithm is not None:
        _check_topk(spec.speculative_eagle_topk or 1)


def _cache_remedy(dtype: torch.dtype) -> str:
    if dtype == torch.bfloat16:
        return "start with --kv-cache-dtype bfloat16"
    return "start with --dtype bfloat16 --kv-cache-dtype bfloat16"


def _check_topk(topk: int) -> None:
    if topk > 1:
        raise UnsupportedError(
            f"mla_backend verifies chains of drafts, not trees: use --speculative-eagle-topk 1 (it is {topk})"
        )
