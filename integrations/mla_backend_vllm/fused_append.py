"""Norm, rotary embedding and cache append of a layer's new tokens in one launch instead of three or more.

vLLM's `MultiHeadLatentAttentionWrapper` normalizes latents and rotates queries and keys; its `MLAAttention`
then appends the result to the cache. `FusedWrapper` replaces the first of these classes, which vLLM lets
plugins do. For layers that `why_not_fused` finds nothing against, its forward calls one custom op, and then
`MLAAttention` as always. The op also writes normalized latents and rotated keys, which regular prefill needs,
to tensors. It leaves a mark with which `do_kv_cache_update`, called by `MLAAttention`, recognizes that they
are in the cache already. Without the mark they are appended (again): whatever vLLM does in between, no token
is lost.

All steps use the op, also those with prefill tokens: a compiled graph has no branches.
"""

# No `annotations` of __future__: torch reads the op's schema from its signature.
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from vllm.config import CompilationMode, get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding
from vllm.platforms import current_platform
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)

from mla_backend import RotaryAppend, jit
from mla_backend.kernels import append as append_kernel
from mla_backend.kernels.base import ELEMENT_NAMES, FIRST_CAPABILITY
from mla_backend.rotary import rms_norm, rotate
from mla_backend_vllm import AROUND_ATTENTION_VARIABLE, launches_around_attention, logger

OP_NAME = "normalize_rotate_append"
_ATTENTION_OP = "vllm::unified_mla_attention_with_output"


class FusedAppend:
    """The part of a layer's attention that the op calls.

    Attributes:
        launch: what normalizes, rotates and appends. None until the layer's metadata builder exists: until
            then, the layer has no cache.
    """

    def __init__(self) -> None:
        self.launch: RotaryAppend | None = None
        self._appended: tuple[int, int] | None = None
        self._checked_cache: int | None = None

    def run(
        self,
        q_rope: Tensor,
        kv_lora: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        kv_cache: Tensor,
        slots: Tensor | None,
        kv_scale: Tensor | None,
        kv_c_out: Tensor,
        k_rope_out: Tensor,
        **options: Any,
    ) -> None:
        """Rotate ``q_rope`` [T, H, d_rope] in place, and append to the cache unless there is none.

        Args:
            kv_lora: [T, d_c + d_rope], latents before the norm and keys before rotation; not changed.
            slots: [n], of the first n tokens; the others are padding. None in a step that appends nothing.
            kv_c_out: [T, d_c], becomes the normalized latents; anything for padding.
            k_rope_out: [T, d_rope], becomes the rotated keys, likewise.
            options: the norm's and the rotation's, as of a `RotaryAppend`.
        """
        d_rope = q_rope.shape[2]
        kv_c, k_rope = kv_lora.split([kv_lora.shape[1] - d_rope, d_rope], dim=1)
        self._appended = None
        if self.launch is None or slots is None or not kv_cache.numel():
            interleaved = options["interleaved"]
            q_rope.copy_(rotate(q_rope, positions, cos_sin_cache, interleaved=interleaved))
            k_rope_out.copy_(rotate(k_rope, positions, cos_sin_cache, interleaved=interleaved))
            kv_c_out.copy_(rms_norm(kv_c, options["norm_weight"], options["norm_eps"]))
            return
        slots = slots.flatten()
        of_tokens = {
            "q_rope": q_rope,
            "kv_c": kv_c,
            "k_rope": k_rope,
            "positions": positions,
            "kv_c_out": kv_c_out,
            "k_rope_out": k_rope_out,
        }
        # Prompts wait for the host: it makes views only if it must, and checks a layer's first step alone.
        if len(slots) < len(kv_lora):
            of_tokens = {name: x[: len(slots)] for name, x in of_tokens.items()}
        cache = kv_cache.data_ptr()
        self.launch(
            **of_tokens,
            latent_cache=kv_cache,
            slot_mapping=slots,
            cos_sin_cache=cos_sin_cache,
            kv_scale=kv_scale,
            check=cache != self._checked_cache,
            **options,
        )
        self._checked_cache = cache
        self._appended = kv_c_out.data_ptr(), k_rope_out.data_ptr()

    def has_appended(self, kv_c_normed: Tensor, k_pe: Tensor) -> bool:
        """Whether these are the results of the last `run`, and in the cache. True only once for each run."""
        appended, self._appended = self._appended, None
        return appended == (kv_c_normed.data_ptr(), k_pe.data_ptr())


def _normalize_rotate_append(
    q: Tensor,
    kv_lora: Tensor,
    positions: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    cos_sin_cache: Tensor,
    interleaved: bool,
    layer_name: LayerNameType,
    kv_c_normed: Tensor,
    k_pe: Tensor,
) -> None:
    """`FusedAppend.run` of the layer. The last columns of q [T, H, d_nope + d_rope] are rotated in place;
    kv_c_normed [T, d_c] and k_pe [T, 1, d_rope] are written."""
    _, layer, kv_cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    d_rope = k_pe.shape[2]
    layer.impl.fused_append.run(
        q.narrow(2, q.shape[2] - d_rope, d_rope),
        kv_lora,
        positions,
        cos_sin_cache,
        layer.impl.typed_cache(kv_cache),
        slots,
        layer.impl.scale_of(layer),
        kv_c_normed,
        k_pe.squeeze(1),
        interleaved=interleaved,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
    )


def _trace_nothing(*args: Any) -> None:
    """The op for tensors without values, while a graph is traced: it returns nothing."""


_library = Library("mla_backend", "FRAGMENT")  # the op lives as long as this object
direct_register_custom_op(
    OP_NAME,
    _normalize_rotate_append,
    # It writes results to arguments: nodes that unpack returned ones would stand between it and vLLM's cache
    # update. Both split a compiled graph, and vLLM runs adjacent ones as one piece, which saves host time.
    mutates_args=["q", "kv_c_normed", "k_pe"],
    fake_impl=_trace_nothing,
    target_lib=_library,
)


class FusedWrapper(MultiHeadLatentAttentionWrapper):
    """vLLM's layer; with `is_fused`, one op normalizes, rotates and appends its new tokens."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.is_fused = _fuse(self)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None
    ) -> Tensor:
        if not self.is_fused or llama_4_scaling is not None or positions.ndim != 1:
            return super().forward(positions, hidden_states, llama_4_scaling)
        return forward(self, positions, hidden_states, _call_op)


def forward(
    layer: Any,
    positions: Tensor,
    hidden_states: Tensor,
    normalize_rotate_append: Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """The forward of vLLM's wrapper for layers that nothing speaks against, with one function in it."""
    if layer.q_lora_rank is None:
        kv_lora = layer.kv_a_proj_with_mqa(hidden_states)[0]
        q = layer.q_proj(hidden_states)[0]
    else:
        widths = [layer.q_lora_rank, layer.kv_lora_rank + layer.qk_rope_head_dim]
        q_c, kv_lora = layer.fused_qkv_a_proj(hidden_states)[0].split(widths, dim=-1)
        q = layer.q_b_proj(layer.q_a_layernorm(q_c))[0]
    q = q.view(-1, layer.num_heads, layer.qk_head_dim)
    kv_c_normed, k_pe = normalize_rotate_append(layer, q, kv_lora, positions)
    output_shape = (hidden_states.shape[0], layer.num_heads * layer.v_head_dim)
    return layer.o_proj(layer.mla_attn(q, kv_c_normed, k_pe, output_shape=output_shape))[0]


def _call_op(layer: Any, q: Tensor, kv_lora: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    norm, rotary = layer.kv_a_layernorm, layer.rotary_emb
    tokens = kv_lora.shape[0]
    kv_c_normed = kv_lora.new_empty(tokens, layer.kv_lora_rank)
    k_pe = kv_lora.new_empty(tokens, 1, layer.qk_rope_head_dim)
    torch.ops.mla_backend.normalize_rotate_append(
        q,
        kv_lora,
        positions,
        norm.weight,
        norm.variance_epsilon,
        rotary.cos_sin_cache,
        not rotary.is_neox_style,
        _encode_layer_name(layer.mla_attn.layer_name),
        kv_c_normed,
        k_pe,
    )
    return kv_c_normed, k_pe


def replace_wrapper() -> None:
    """Make vLLM construct `FusedWrapper` for its wrapper, unless another plugin has replaced it."""
    name = MultiHeadLatentAttentionWrapper.__name__
    if name not in op_registry_oot:
        MultiHeadLatentAttentionWrapper.register_oot(FusedWrapper)
    elif op_registry_oot[name] is not FusedWrapper:
        logger.warning(
            "another plugin has replaced vLLM's %s (%r), so mla-backend leaves norm, rotation and append of "
            "new tokens to it; %s=0 is silent about this",
            name,
            op_registry_oot[name],
            AROUND_ATTENTION_VARIABLE,
        )


def _fuse(layer: FusedWrapper) -> bool:
    """Prepare the attention of ``layer`` for the op, if it is ours and nothing speaks against it."""
    from mla_backend_vllm.impl import MLAImpl

    impl = layer.mla_attn.impl
    if not isinstance(impl, MLAImpl):
        return False
    vllm_config = get_current_vllm_config()
    impl.why_not_fused = next(why_not_fused(layer, vllm_config), None)
    if impl.why_not_fused is not None:
        return False
    impl.fused_append = FusedAppend()
    compilation = vllm_config.compilation_config
    if compilation.mode == CompilationMode.VLLM_COMPILE:
        # Outside of the compiled pieces, as attention and append are: it depends on the step. vLLM reads this
        # list, which is also a part of the key of its caches, when it compiles the model.
        name = f"mla_backend::{OP_NAME}"
        if name not in compilation.splitting_ops:
            compilation.splitting_ops.append(name)
    return True


# ---- When vLLM's own way is kept


def why_not_fused(layer: Any, vllm_config: Any) -> Iterator[str]:
    """Why vLLM must normalize, rotate and append the new tokens of ``layer`` (vLLM's wrapper) itself."""
    if not launches_around_attention():
        yield f"{AROUND_ATTENTION_VARIABLE}=0"
    try:
        yield from _against_engine(vllm_config)
        yield from _against_attention(layer.mla_attn)
        yield from _against_layer(layer, vllm_config.model_config.dtype)
        yield from _against_kernel(layer, vllm_config.model_config.dtype)
        yield from _against_behaviour(layer)
    except Exception as error:  # vLLM has moved something
        yield f"this version of vLLM differs from those that were tested ({type(error).__name__}: {error})"


def _against_engine(vllm_config: Any) -> Iterator[str]:
    from vllm.compilation import backends

    compilation = vllm_config.compilation_config
    text_config = getattr(vllm_config.model_config, "hf_text_config", None)
    if getattr(text_config, "llama_4_scaling", None):
        yield "queries are scaled by their position (llama_4_scaling)"
    if getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1) > 1:
        yield "with context parallelism of prefill"
    if vllm_config.lora_config is not None:
        yield "with LoRA adapters"
    if backends.model_tag != "backbone":
        yield "in draft models"
    if getattr(compilation.pass_config, "fuse_rope_kvcache_cat_mla", False):
        yield "vLLM's pass fuse_rope_kvcache_cat_mla fuses rotation and append"
    if current_platform.is_cpu() or compilation.mode == CompilationMode.NONE:
        return
    is_split = (
        compilation.mode == CompilationMode.VLLM_COMPILE and not compilation.use_inductor_graph_partition
    )
    if not is_split or _ATTENTION_OP not in (compilation.splitting_ops or ()):
        yield "the compiled graph is not split at attention"


def _against_attention(attention: Any) -> Iterator[str]:
    if type(attention) is not MLAAttention:
        yield f"the attention is a {type(attention).__name__}"
    if attention.impl.dcp_world_size > 1:
        yield "with decode context parallelism"
    if getattr(attention, "hisparse_cache", None) is not None:
        yield "with HiSparse"


def _against_layer(layer: Any, dtype: torch.dtype) -> Iterator[str]:
    if layer.is_sparse or layer.indexer is not None:
        yield "the layer has an indexer"
    if getattr(layer, "g_proj", None) is not None:
        yield "the layer has a gate"
    if getattr(layer, "fuse_qkv_rmsnorm", False):
        yield "vLLM normalizes queries and latents in one kernel (fuse_qkv_rmsnorm)"
    if getattr(layer, "dcp_q_replicate", False):
        yield "with dcp_q_replicate"
    norm, rotary = layer.kv_a_layernorm, layer.rotary_emb
    if type(norm) is not RMSNorm:
        yield f"the norm is {_describe(norm)}"
    elif norm.weight.dtype != dtype or norm.variance_size_override is not None or not norm.has_weight:
        yield "the norm has options or a dtype that this backend does not implement"
    if type(rotary) not in (RotaryEmbedding, DeepseekScalingRotaryEmbedding):
        yield f"the rotary embedding is {_describe(rotary)}"
    elif (
        rotary.rotary_dim != layer.qk_rope_head_dim
        or rotary.head_size != layer.qk_rope_head_dim
        or rotary.cos_sin_cache.dtype not in (torch.float32, dtype)
        or rotary.cos_sin_cache.device != norm.weight.device
    ):
        yield "the rotary embedding has options or a dtype that this backend does not implement"


def _describe(module: Any) -> str:
    return "missing" if module is None else f"a {type(module).__name__}"


def _against_kernel(layer: Any, dtype: torch.dtype) -> Iterator[str]:
    widths = (
        layer.kv_lora_rank,
        layer.qk_rope_head_dim,
        layer.qk_nope_head_dim,
        layer.q_lora_rank or 0,
    )
    if any(width % 8 for width in widths):
        yield f"some widths are not multiples of 8: {', '.join(map(str, widths))}"
    if not current_platform.is_cpu() and (why_not := _why_without_kernel(dtype)):
        yield why_not


@functools.cache
def _why_without_kernel(dtype: torch.dtype) -> str | None:
    capability = torch.cuda.get_device_capability()
    if dtype not in ELEMENT_NAMES or capability < FIRST_CAPABILITY:
        return f"there is no kernel for {dtype} on this GPU"
    return jit.why_unavailable([append_kernel.variant(jit.arch_name(capability))])


def _against_behaviour(layer: Any) -> Iterator[str]:
    """What this version of vLLM computes otherwise than `forward` and `RotaryAppend`, on small inputs."""
    norm, rotary = layer.kv_a_layernorm, layer.rotary_emb
    like = {"dtype": norm.weight.dtype, "device": norm.weight.device}
    x = torch.linspace(-2, 3, 2 * len(norm.weight), **like).view(2, -1)
    if not _are_close(norm.forward_native(x), rms_norm(x, norm.weight, norm.variance_epsilon)):
        yield "vLLM's norm computes something else than this backend"
    positions = torch.tensor([1, len(rotary.cos_sin_cache) - 1], device=like["device"])
    angles, interleaved = rotary.cos_sin_cache, not rotary.is_neox_style
    q, k = (torch.linspace(-2, 3, 2 * n * rotary.rotary_dim, **like).view(2, n, -1) for n in (3, 1))
    expected = [rotate(x, positions, angles, interleaved=interleaved) for x in (q, k)]
    if not all(map(_are_close, rotary.forward_native(positions, q.clone(), k.clone()), expected)):
        yield "vLLM's rotary embedding computes something else than this backend"
    if not computes_the_same(MultiHeadLatentAttentionWrapper.forward, layer.q_lora_rank is not None):
        yield f"vLLM's {MultiHeadLatentAttentionWrapper.__name__} computes something else than this backend"


def _are_close(actual: Tensor, expected: Tensor) -> bool:
    tolerance = 4 * torch.finfo(expected.dtype).eps
    return actual.shape == expected.shape and torch.allclose(
        actual.float(), expected.float(), rtol=tolerance, atol=tolerance
    )


@functools.cache
def computes_the_same(forward_of_vllm: Callable[..., Tensor], has_q_lora: bool) -> bool:
    """Whether vLLM's forward gives the same as ours, bit for bit, for a small layer of plain functions.

    The layer has no attributes but those that `forward` or `why_not_fused` know: a forward that reads others
    raises an AttributeError.
    """
    results = []
    for run in (forward_of_vllm, functools.partial(forward, normalize_rotate_append=_normalize_and_rotate)):
        with torch.device("cpu"):  # vLLM constructs layers in the context of another
            layer, calls = _small_layer(has_q_lora)
            hidden_states = torch.linspace(-1, 2, 8, dtype=torch.float32).view(2, 4)
            out = run(layer, torch.tensor([3, 0]), hidden_states)
        results.append([out, *calls])
    theirs, ours = results
    return len(theirs) == len(ours) == 4 and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)
    )


def _normalize_and_rotate(layer: Any, q: Tensor, kv_lora: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What the op returns and does to q, by the layer's own functions."""
    kv_c, k_pe = kv_lora.split([layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
    q_rope = q[..., layer.qk_nope_head_dim :]
    rotated, k_pe = layer.rotary_emb(positions, q_rope, k_pe.unsqueeze(1))
    q_rope.copy_(rotated)
    return layer.kv_a_layernorm(kv_c), k_pe


def _small_layer(has_q_lora: bool) -> tuple[Any, list[Tensor]]:
    """A layer of 2 heads for hidden states of 4, and the list to which its attention adds its arguments."""
    heads, d_c, d_nope, d_rope, d_v, q_lora_rank = 2, 3, 1, 2, 2, 5
    calls: list[Tensor] = []

    def project(width: int, phase: float) -> Callable[[Tensor], tuple[Tensor, None]]:
        def times_weight(x: Tensor) -> tuple[Tensor, None]:
            weight = torch.arange(x.shape[-1] * width, dtype=torch.float32).view(-1, width)
            return x @ (weight + phase).sin(), None

        return times_weight

    def turn(positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        factor = (positions + 2.0).view(-1, 1, 1)
        return q.flip(-1) * factor, k.flip(-1) * factor

    def attend(
        q: Tensor, kv_c: Tensor, k_pe: Tensor, output_shape: Any = None, q_dcp_replicated: None = None
    ) -> Tensor:
        assert q_dcp_replicated is None
        calls.extend((q.clone(), kv_c.clone(), k_pe.clone()))
        return q.flatten(1)[:, : output_shape[1]] * kv_c.sum(1, keepdim=True) + k_pe.sum((1, 2))[:, None]

    layer = SimpleNamespace(
        num_heads=heads,
        kv_lora_rank=d_c,
        qk_nope_head_dim=d_nope,
        qk_rope_head_dim=d_rope,
        qk_head_dim=d_nope + d_rope,
        v_head_dim=d_v,
        q_lora_rank=q_lora_rank if has_q_lora else None,
        fused_qkv_a_proj=project(q_lora_rank + d_c + d_rope, 1) if has_q_lora else None,
        q_a_layernorm=(lambda x: x * x) if has_q_lora else None,
        q_b_proj=project(heads * (d_nope + d_rope), 2) if has_q_lora else None,
        kv_a_proj_with_mqa=None if has_q_lora else project(d_c + d_rope, 3),
        q_proj=None if has_q_lora else project(heads * (d_nope + d_rope), 4),
        kv_a_layernorm=lambda x: x.cos(),
        rotary_emb=turn,
        o_proj=project(4, 5),
        mla_attn=attend,
        indexer=None,
        indexer_rope_emb=None,
        is_sparse=False,
        skip_topk=False,
        fuse_qkv_rmsnorm=False,
        dcp_q_replicate=False,
        g_proj=None,
    )
    return layer, calls
