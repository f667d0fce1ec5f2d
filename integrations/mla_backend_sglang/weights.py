"""The model's attention weights as we want them: one copy in memory, refreshed in place.

SGLang's MLA layers split ``kv_b_proj`` at load into ``w_kc`` [H, d_nope, d_c] and ``w_vc`` [H, d_c, d_v],
from which they absorb queries and project outputs. We put :class:`mla_backend.weights.AbsorbedWeights` in
their place, so that memory holds one copy.

Layers without ``q_lora_rank`` multiply the same input by ``q_proj`` and by ``kv_a_proj_with_mqa``, one after
the other. :class:`JointProjection` makes that one product where the backend takes new tokens in itself
(:meth:`MLABackend.take_in`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor

from mla_backend.errors import UnsupportedError
from mla_backend.geometry import MLAGeometry
from mla_backend.weights import AbsorbedWeights


class JointProjection:
    """``q_proj`` and ``kv_a_proj_with_mqa`` of a layer as one matrix.

    At few tokens a product takes as long as reading its weights and starting a kernel, and the second one
    here is small.

    Attributes:
        weight: [H * (d_nope + d_rope) + d_c + d_rope, hidden_size]. The parameters of both layers become
            views of it.
    """

    def __init__(self, attention: torch.nn.Module):
        self._layers = attention.q_proj, attention.kv_a_proj_with_mqa
        self._sizes = [len(layer.weight) for layer in self._layers]
        first = attention.q_proj.weight
        self.weight = first.new_empty(sum(self._sizes), first.shape[1])
        self.share()

    @staticmethod
    def is_possible(attention: torch.nn.Module) -> bool:
        """Whether both are there, plain and on one device: not quantized, adapted (LoRA) or offloaded."""
        layers = getattr(attention, "q_proj", None), getattr(attention, "kv_a_proj_with_mqa", None)
        if tuple(map(type, layers)) != (ColumnParallelLinear, ReplicatedLinear):
            return False
        # Quantized ones may have no `weight`.
        if any(type(layer.quant_method) is not UnquantizedLinearMethod for layer in layers):
            return False
        weights = [layer.weight.data for layer in layers]
        return (
            all(layer.bias is None for layer in layers)
            and not any(getattr(layer, "use_intel_amx_backend", False) for layer in layers)  # packed
            and all(type(weight) is Tensor for weight in weights)  # no subclass, as torchao's
            and weights[0].dtype == weights[1].dtype
            and weights[0].device == weights[1].device == attention.w_kc.device
        )

    def share(self) -> None:
        """Make the layers' parameters views of ours, with the values that they have."""
        for layer, part in zip(self._layers, self.weight.split(self._sizes), strict=True):
            if layer.weight.data_ptr() != part.data_ptr():
                part.copy_(layer.weight)
                layer.weight.data = part

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden_size] -> what ``q_proj`` and ``kv_a_proj_with_mqa`` give, side by side in one tensor."""
        product = self._layers[0].quant_method.apply(self, hidden_states)
        return product.split(self._sizes, dim=-1)


class LayerWeights:
    """One attention layer of the model.

    Args:
        attention: SGLang's layer.
        may_move: whether parameters may be given other memory.

    Attributes:
        absorbed: its materialized weights.
        projection: both projections of its input in one, if they can be.
    """

    def __init__(self, attention: torch.nn.Module, may_move: bool = True):
        if getattr(attention, "use_deep_gemm_bmm", False):
            raise UnsupportedError(
                "mla_backend keeps absorbed weights in 16 bits: unset SGLANG_USE_DEEPGEMM_BMM"
            )
        self._attention = attention
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
        joint = may_move and JointProjection.is_possible(attention)
        self.projection = JointProjection(attention) if joint else None
        self._share()

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [n, H, d_nope + d_rope] and values [n, H, d_v] of cached tokens, latent [n, d_c + d_rope]."""
        attention = self._attention
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
            self._attention.w_kc = self._attention.w_vc = None

    def finish_update(self) -> None:
        """After that: what the model wrote into our tensors stands, what it made anew is taken over."""
        if self._attention.w_kc is not None and self._attention.w_kc is not self.absorbed.w_uk:
            weight, scale = self._source()
            self.absorbed.update_(weight, scale=scale)
        self._share()

    def reload(self) -> None:
        """After a transfer straight into the parameters, which splits nothing."""
        weight, scale = self._source()
        self.absorbed.update_(weight, scale=scale)
        self._share()

    def _share(self) -> None:
        self._attention.w_kc = self.absorbed.w_uk
        self._attention.w_vc = self.absorbed.w_uv
        if self.projection is not None:
            self.projection.share()

    def _source(self) -> tuple[Tensor, Tensor | None]:
        """A weight as ``kv_b_proj`` would have it, [H * (d_nope + d_v), d_c], and its scale if it is fp8.

        ``kv_b_proj.weight`` itself where it is plain; else put together from the model's split, which has
        undone whatever quantization and layout the checkpoint uses.
        """
        attention = self._attention
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


def adopt_weights(model: torch.nn.Module | None, may_move: bool = True) -> dict[int, LayerWeights]:
    """Take over the attention weights of a loaded model's layers; once, however many backends it has.

    Args:
        may_move: see :class:`LayerWeights`.

    Returns:
        the layers by their ``layer_id``.
    """
    if model is None:
        return {}
    if not hasattr(model, "mla_backend_layers"):
        layers = {
            module.layer_id: LayerWeights(module, may_move)
            for module in model.modules()
            if getattr(module, "w_kc", None) is not None and hasattr(module, "kv_b_proj")
        }
        model.mla_backend_layers = layers
        # The engine looks both up on the instance: load_weights is where almost every update ends, and
        # post_load_weights follows transfers that bypass it.
        for name in ("load_weights", "post_load_weights"):
            if hasattr(model, name):
                setattr(model, name, _refreshing(getattr(model, name), layers))
    return model.mla_backend_layers


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
