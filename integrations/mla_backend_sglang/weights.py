"""The model's attention weights as we want them: one copy in memory, refreshed in place.

SGLang's MLA layers split ``kv_b_proj`` at load into ``w_kc`` [H, d_nope, d_c] and ``w_vc`` [H, d_c, d_v],
from which they absorb queries and project outputs. We put :class:`mla_backend.weights.AbsorbedWeights` in
their place, so that memory holds one copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from mla_backend.errors import UnsupportedError
from mla_backend.geometry import MLAGeometry
from mla_backend.weights import AbsorbedWeights


class LayerWeights:
    """One attention layer of the model.

    Args:
        attention: SGLang's layer.

    Attributes:
        attention: that layer.
        absorbed: its materialized weights.
    """

    def __init__(self, attention: torch.nn.Module):
        if getattr(attention, "use_deep_gemm_bmm", False):
            raise UnsupportedError(
                "mla_backend keeps absorbed weights in 16 bits: unset SGLANG_USE_DEEPGEMM_BMM"
            )
        self.attention = attention
        self._is_requantized = not _is_plain(attention.w_kc)
        geometry = MLAGeometry(
            num_heads=attention.w_kc.shape[0],
            kv_lora_rank=attention.kv_lora_rank,
            qk_nope_head_dim=attention.qk_nope_head_dim,
            qk_rope_head_dim=attention.qk_rope_head_dim,
            v_head_dim=attention.v_head_dim,
            softmax_scale=attention.scaling,
            hidden_size=attention.hidden_size,
        )
        weight, scale = self._source()
        self.absorbed = AbsorbedWeights.from_kv_b_proj(weight, geometry, scale=scale)
        self._share()

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [n, H, d_nope + d_rope] and values [n, H, d_v] of cached tokens, latent [n, d_c + d_rope]."""
        attention = self.attention
        kv_c, k_pe = latent.split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
        # Through the model's own layer, so that any quantization of it counts here too.
        kv = attention.kv_b_proj(kv_c.contiguous())[0]
        kv = kv.view(-1, self.absorbed.w_uk.shape[0], attention.qk_nope_head_dim + attention.v_head_dim)
        k_nope, value = kv.split([attention.qk_nope_head_dim, attention.v_head_dim], dim=-1)
        key = torch.cat([k_nope, k_pe.unsqueeze(1).expand(-1, kv.shape[1], -1)], dim=-1)
        return key, value

    def prepare_update(self) -> None:
        """Before the model loads new weights.

        It copies its new split into ``w_kc`` and ``w_vc`` if it finds them, which would lose the scale of an
        fp8 split; without them it makes new ones.
        """
        if self._is_requantized:
            self.attention.w_kc = self.attention.w_vc = None

    def finish_update(self) -> None:
        """After that: what the model wrote into our tensors stands, what it made anew is taken over."""
        if self.attention.w_kc is not None and self.attention.w_kc is not self.absorbed.w_uk:
            weight, scale = self._source()
            self.absorbed.update_(weight, scale=scale)
        self._share()

    def reload(self) -> None:
        """After a transfer straight into the parameters, which splits nothing.

        Raises:
            UnsupportedError: ``kv_b_proj`` is quantized, so that only a split has its values in 16 bits.
        """
        weight, scale = self._source()
        if weight is not getattr(self.attention.kv_b_proj, "weight", None):
            raise UnsupportedError(
                f'layer {self.attention.layer_id}: load_format="direct" does not reach the absorbed weights '
                "of a quantized kv_b_proj: update weights without it"
            )
        self.absorbed.update_(weight, scale=scale)
        self._share()

    def _share(self) -> None:
        self.attention.w_kc = self.absorbed.w_uk
        self.attention.w_vc = self.absorbed.w_uv

    def _source(self) -> tuple[Tensor, Tensor | None]:
        """A weight as ``kv_b_proj`` would have it, [H * (d_nope + d_v), d_c], and its scale if it is fp8.

        The weight is ``kv_b_proj.weight`` itself where that is plain; else it is put together from the
        model's split, which has undone the checkpoint's quantization and layout.
        """
        attention = self.attention
        weight = getattr(attention.kv_b_proj, "weight", None)
        if weight is not None and _is_plain(weight):
            return weight, None
        weight = torch.cat([attention.w_kc, attention.w_vc.transpose(1, 2)], dim=1).flatten(0, 1)
        if _is_plain(weight):
            return weight, None
        scale = torch.as_tensor(attention.w_scale, dtype=torch.float32, device=weight.device)
        return weight, scale


def _is_plain(weight: Tensor) -> bool:
    return weight.is_floating_point() and weight.element_size() > 1


def adopt_weights(model: torch.nn.Module, latent_dim: int) -> dict[int, LayerWeights]:
    """Take over the attention weights of a loaded model's layers; once, however many backends it has.

    Args:
        model: SGLang's.
        latent_dim: d_c + d_rope.

    Returns:
        the layers by their ``layer_id``. A layer that always attends absorbed and keeps no ``kv_b_proj``
        (MiniCPM3) needs nothing of ours and is not among them.

    Raises:
        UnsupportedError: a layer cannot be served; says which.
    """
    if not hasattr(model, "mla_backend_layers"):
        modules = _attention_modules(model)
        for module in modules:
            _check_layer(module, latent_dim)
        layers = {module.layer_id: LayerWeights(module) for module in modules if _can_adopt(module)}
        model.mla_backend_layers = layers
        # The engine looks both up on the instance: load_weights is where almost every update ends, and
        # post_load_weights follows transfers that bypass it.
        for name in ("load_weights", "post_load_weights"):
            if hasattr(model, name):
                setattr(model, name, _refreshing(getattr(model, name), layers))
    return model.mla_backend_layers


def _attention_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that make attention calls."""
    return [m for m in model.modules() if any(isinstance(c, RadixAttention) for c in m.children())]


def _can_adopt(module: torch.nn.Module) -> bool:
    return getattr(module, "w_kc", None) is not None and hasattr(module, "kv_b_proj")


def _check_layer(module: torch.nn.Module, latent_dim: int) -> None:
    """Refuse now what would fail at a request."""
    name = f"layer {getattr(module, 'layer_id', '?')} ({type(module).__name__})"
    remedy = "choose another --attention-backend"
    if getattr(module, "use_dsa", False):
        raise UnsupportedError(f"{name} attends to chosen keys (DSA), mla_backend to all: {remedy}")
    if getattr(module, "learnable_sink_param", None) is not None:
        raise UnsupportedError(f"mla_backend knows no attention sinks, which {name} has: {remedy}")
    calls = [child for child in module.children() if isinstance(child, RadixAttention)]
    if any(call.sliding_window_size > 0 or call.logit_cap for call in calls):
        raise UnsupportedError(
            f"{name} has a sliding window or a soft cap, which mla_backend does not implement: {remedy}"
        )
    if not _can_adopt(module) and any(not is_absorbed(call, latent_dim) for call in calls):
        raise UnsupportedError(
            f"{name} attends with keys per head, and has no kv_b_proj and w_kc from which mla_backend could "
            f"make those of cached tokens (layers of GGUF files are so): {remedy}"
        )


def is_absorbed(layer: RadixAttention, latent_dim: int) -> bool:
    """Whether an attention call's keys and values are latents, as the cache holds them."""
    return layer.tp_k_head_num == 1 and layer.head_dim == latent_dim


def refresh_after_direct_load(result: Any, model: torch.nn.Module, *_: Any) -> Any:
    """Follows SGLang's ``load_format="direct"``, which copies into parameters by name."""
    for layer in getattr(model, "mla_backend_layers", {}).values():
        layer.reload()
    return result


def _refreshing(load: Callable[..., Any], layers: dict[int, LayerWeights]) -> Callable[..., Any]:
    def load_and_refresh(*args: Any, **kwargs: Any) -> Any:
        for layer in layers.values():
            layer.prepare_update()
        try:
            return load(*args, **kwargs)
        finally:
            for layer in layers.values():
                layer.finish_update()

    return load_and_refresh
