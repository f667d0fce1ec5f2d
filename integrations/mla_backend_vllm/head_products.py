"""The products with W_UK and W_UV in small decode steps: launches that begin before their predecessor ends.

vLLM's `MLAAttention.forward_impl` multiplies queries by W_UK, calls `impl.forward_mqa`, and multiplies its
output by W_UV. With cuBLAS each product waits until the kernel before it has ended, and only then for its
weights. On a layer that `why_not` finds nothing against, `HeadProducts` takes the place of that method. It
calls `forward_mqa` between kernels of ours in the steps that these serve, and vLLM's method in all others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.platforms import current_platform

from mla_backend import jit
from mla_backend.jit import KernelVariant
from mla_backend.kernels import head_product
from mla_backend.kernels.head_product import HeadProduct
from mla_backend_vllm import AROUND_ATTENTION_VARIABLE, launches_around_attention

# Of x [T, H, depth], weights [H, depth, columns] and out [T, H, columns].
Multiply = Callable[[Tensor, Tensor, Tensor], None]


class HeadProducts:
    """In the place of the ``forward_impl`` of a layer of vLLM's that has its weights."""

    def __init__(self, layer: Any):
        self._layer = layer
        self._of_vllm = layer.forward_impl
        self._by_w_uk, self._by_w_uv = HeadProduct(layer.W_UK_T), HeadProduct(layer.W_UV)

    def __call__(
        self,
        q: Tensor,
        k_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **options: Any,
    ) -> Tensor:
        if self._serves(q, attn_metadata, output, options):
            return forward(self._layer, q, kv_cache, attn_metadata, output, self._by_w_uk, self._by_w_uv)
        return self._of_vllm(q, k_c_normed, k_pe, kv_cache, attn_metadata, output=output, **options)

    def _serves(self, q: Tensor, attn_metadata: Any, output: Tensor, options: dict[str, Any]) -> bool:
        # An option asks for more, such as a quantized output. A profiling run has no metadata.
        if attn_metadata is None or any(option is not None for option in options.values()):
            return False
        layer, tokens = self._layer, attn_metadata.num_actual_tokens
        return (
            attn_metadata.num_decode_tokens == tokens
            and output.dtype is q.dtype
            and self._by_w_uk.serves(q[:tokens, :, : layer.qk_nope_head_dim], layer.W_UK_T)
            # Its product has as many rows, which `forward_mqa` allocates.
            and self._by_w_uv.reads(layer.W_UV)
        )


def forward(
    layer: Any,
    q: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    output: Tensor,
    by_w_uk: Multiply,
    by_w_uv: Multiply,
) -> Tensor:
    """vLLM's ``forward_impl`` for a step that only decodes. Padding in ``output`` stays as it is."""
    tokens = attn_metadata.num_actual_tokens
    q_nope, q_rope = q[:tokens].split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
    q_latent = q.new_empty(tokens, layer.num_heads, layer.kv_lora_rank)
    by_w_uk(q_nope, layer.W_UK_T, q_latent)
    kv_cache = layer.impl.typed_cache(kv_cache)
    o_latent, _ = layer.impl.forward_mqa((q_latent, q_rope), kv_cache, attn_metadata, layer)
    by_w_uv(o_latent, layer.W_UV, output[:tokens].view(tokens, layer.num_heads, layer.v_head_dim))
    return output


def suited(layers: Iterable[Any], vllm_config: Any) -> tuple[list[Any], str | None]:
    """The layers for `HeadProducts`, and why the first of the others, if any, keeps vLLM's way."""
    reasons = [(layer, next(why_not(layer, vllm_config), None)) for layer in layers]
    kept = (reason for _, reason in reasons if reason is not None)
    return [layer for layer, reason in reasons if reason is None], next(kept, None)


def kernels_of(layers: Iterable[Any]) -> set[KernelVariant]:
    """The kernels that `HeadProducts` of these layers load."""
    return {head_product.variant(weights) for layer in layers for weights in (layer.W_UK_T, layer.W_UV)}


def install(layers: list[Any]) -> None:
    """Put `HeadProducts` on layers that do not have them yet: vLLM may make several builders for a layer.

    Raises:
        KernelBuildError: a kernel cannot be built.
    """
    jit.load_all(list(kernels_of(layers)))  # built at the same time
    for layer in layers:
        if not has_head_products(layer):
            layer.forward_impl = HeadProducts(layer)


def has_head_products(layer: Any) -> bool:
    return isinstance(vars(layer).get("forward_impl"), HeadProducts)


# ---- When vLLM's own way is kept


def why_not(layer: Any, vllm_config: Any) -> Iterator[str]:
    """Why vLLM must multiply by the absorbed weights of ``layer``, which is loaded, itself."""
    if not launches_around_attention():
        yield f"{AROUND_ATTENTION_VARIABLE}=0"
    try:
        yield from _against_engine(vllm_config)
        yield from _against_layer(layer)
        if not computes_the_same(MLAAttention.forward_impl):
            yield "vLLM's forward_impl computes something else than this backend"
        yield from _against_kernels(layer)
    except Exception as error:  # vLLM has moved something
        yield f"this version of vLLM differs from those that were tested ({type(error).__name__}: {error})"


def _against_engine(vllm_config: Any) -> Iterator[str]:
    if current_platform.is_cpu():
        yield "on the CPU"
    if getattr(vllm_config.parallel_config, "prefill_context_parallel_size", 1) > 1:
        yield "with context parallelism of prefill"
    if envs.VLLM_BATCH_INVARIANT:
        yield "VLLM_BATCH_INVARIANT asks for products that are the same in batches of any size"


def _against_layer(layer: Any) -> Iterator[str]:
    if type(layer) is not MLAAttention:
        yield f"the attention is a {type(layer).__name__}"
    elif "forward_impl" in vars(layer) and not has_head_products(layer):
        yield "something else has replaced the layer's forward_impl"
    elif layer.use_direct_call:
        yield "vLLM traces attention"
    elif layer.q_pad_num_heads is not None:
        yield "vLLM pads the heads"
    elif layer.impl.dcp_world_size > 1:  # the configuration of a draft model may differ
        yield "with decode context parallelism"


def _against_kernels(layer: Any) -> Iterator[str]:
    capability = torch.cuda.get_device_capability()
    for weights in (layer.W_UK_T, layer.W_UV):
        if reason := head_product.why_not(weights, capability):
            yield reason


@functools.cache
def computes_the_same(forward_of_vllm: Callable[..., Tensor]) -> bool:
    """Whether vLLM's ``forward_impl`` gives the same as `forward`, bit for bit, for a small layer.

    The layer has no attributes but those that `forward` and vLLM's method are known to read: a method that
    reads others raises an AttributeError.
    """
    results = []
    for ours in (False, True):
        with torch.device("cpu"):
            layer, calls = _small_layer()
            q = torch.arange(2 * 3 * 5, dtype=torch.float32).view(3, 2, 5)
            latents, keys, kv_cache = (torch.full((3, n), n + 0.5) for n in (4, 2, 6))
            output = torch.full((3, 2 * 3), -7.0)
        step = SimpleNamespace(
            num_actual_tokens=2,  # the third one is padding
            num_decode_tokens=2,
            num_decodes=2,
            num_prefills=0,
            decode=SimpleNamespace(),
            prefill=None,
        )
        if ours:
            result = forward(layer, q, kv_cache, step, output, _multiply, _multiply)
        else:
            result = forward_of_vllm(layer, q, latents, keys, kv_cache, step, output=output)
        results.append([result, output, *calls])
    return len(results[0]) == len(results[1]) == 5 and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(*results, strict=True)
    )


def _multiply(x: Tensor, weights: Tensor, out: Tensor) -> None:
    torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))


def _small_layer() -> tuple[Any, list[Tensor]]:
    """A layer of 2 heads, and the list to which its `forward_mqa` adds its arguments.

    All values are integers or halves, so the order of sums does not matter.
    """
    heads, d_c, d_nope, d_rope, d_v = 2, 4, 3, 2, 3
    calls: list[Tensor] = []

    def forward_mqa(q: Any, kv_cache: Tensor, attn_metadata: Any, layer: Any) -> tuple[Tensor, None]:
        q_latent, q_rope = q
        calls.extend((q_latent.clone(), q_rope.clone(), kv_cache.clone()))
        return (q_latent + q_rope.sum(-1, keepdim=True) + kv_cache.sum()).contiguous(), None

    layer = SimpleNamespace(
        num_heads=heads,
        kv_lora_rank=d_c,
        qk_nope_head_dim=d_nope,
        qk_rope_head_dim=d_rope,
        v_head_dim=d_v,
        W_UK_T=torch.arange(heads * d_nope * d_c, dtype=torch.float32).view(heads, d_nope, d_c) - 7,
        W_UV=torch.arange(heads * d_c * d_v, dtype=torch.float32).view(heads, d_v, d_c).transpose(1, 2) - 9,
        kv_cache_dtype="auto",
        prefill_backend=None,
        q_pad_num_heads=None,
        use_pcp=False,
        dcp_manager=None,
        is_aiter_triton_fp4_bmm_enabled=False,
        is_aiter_triton_fp8_bmm_enabled=False,
        is_amx_bmm_enabled=False,
        impl=SimpleNamespace(
            forward_mqa=forward_mqa,
            typed_cache=lambda kv_cache: kv_cache,
            dcp_world_size=1,
            is_sparse=False,
            supports_quant_query_input=False,
        ),
    )
    layer._v_up_proj = functools.partial(MLAAttention._v_up_proj, layer)
    return layer, calls
