"""The model's absorbed weights: one copy in memory, which weight updates refresh in place.

When SGLang loads a model, its MLA layers split ``kv_b_proj`` into ``w_kc`` [H, d_nope, d_c] and ``w_vc``
[H, d_c, d_v]. With these they absorb queries and project outputs. This module replaces both by the tensors of
:class:`mla_backend.weights.AbsorbedWeights`, so memory holds only one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from mla_backend.geometry import MLAGeometry
from mla_backend.weights import AbsorbedWeights
from mla_backend_sglang.refusals import check_layer, check_layers_found


class LayerWeights:
    """The absorbed weights of one attention layer.

    Args:
        attention: SGLang's layer, which uses these weights from then on.

    Attributes:
        attention: that layer.
        absorbed: its absorbed weights.
    """

    def __init__(self, attention: Any):
        self.attention = attention
        self._is_requantized = not _is_unquantized(attention.w_kc)
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
        if self._is_requantized:
            self.absorbed = AbsorbedWeights.from_kv_b_proj(weight, geometry, scale=scale)
        else:
            w_uk, w_uv = _in_place_of(attention.w_kc), _in_place_of(attention.w_vc)
            self.absorbed = AbsorbedWeights(w_uk, w_uv, geometry)
            self.absorbed.update_(weight, scale=scale)
        self._share()

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Expand the latents [n, d_c + d_rope] of cached tokens.

        Returns:
            keys [n, H, d_nope + d_rope] and values [n, H, d_v].
        """
        attention = self.attention
        kv_c, k_pe = latent.split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
        # The model's own layer, because it may be quantized.
        kv = attention.kv_b_proj(kv_c.contiguous())[0]
        kv = kv.view(-1, self.absorbed.w_uk.shape[0], attention.qk_nope_head_dim + attention.v_head_dim)
        k_nope, value = kv.split([attention.qk_nope_head_dim, attention.v_head_dim], dim=-1)
        return _join(k_nope, k_pe.unsqueeze(1).expand(-1, kv.shape[1], -1)), value

    def prepare_update(self) -> None:
        """Call this before the model loads new weights.

        The model copies its new split into ``w_kc`` and ``w_vc`` if they exist. With an fp8 split, the copy
        would lose the scale, so they are removed first: then the model makes new ones.
        """
        if self._is_requantized:
            self.attention.w_kc = self.attention.w_vc = None

    def finish_update(self) -> None:
        """Call this after the model has loaded new weights.

        A split that the model copied into the absorbed weights needs no work. A new split is copied into
        them if both of its tensors exist: an update may have failed half-way.
        """
        w_kc, w_vc = self.attention.w_kc, self.attention.w_vc
        if w_kc is not None and w_vc is not None and w_kc is not self.absorbed.w_uk:
            self.reload()
        else:
            self._share()

    def reload(self) -> None:
        """Read the weights. Call this after a transfer into a 16-bit ``kv_b_proj``, which makes no split."""
        weight, scale = self._source()
        self.absorbed.update_(weight, scale=scale)
        self._share()

    def has_16_bit_source(self) -> bool:
        """Whether ``kv_b_proj`` is not quantized. If it is, only the split has its values in 16 bits."""
        weight = getattr(self.attention.kv_b_proj, "weight", None)
        return weight is not None and _is_unquantized(weight)

    def _share(self) -> None:
        self.attention.w_kc = self.absorbed.w_uk
        self.attention.w_vc = self.absorbed.w_uv

    def _source(self) -> tuple[Tensor, Tensor | None]:
        """The weight of ``kv_b_proj`` as [H * (d_nope + d_v), d_c], and its scale if it is fp8.

        This is ``kv_b_proj.weight`` itself if it is not quantized. Otherwise it is joined from the model's
        split, which no longer has the checkpoint's quantization and layout.
        """
        attention = self.attention
        if self.has_16_bit_source():
            return attention.kv_b_proj.weight, None
        weight = torch.cat([attention.w_kc, attention.w_vc.transpose(1, 2)], dim=1).flatten(0, 1)
        if _is_unquantized(weight):
            return weight, None
        scale = torch.as_tensor(attention.w_scale, dtype=torch.float32, device=weight.device)
        return weight, scale


def _in_place_of(split: Tensor) -> Tensor:
    """A contiguous tensor of the same shape in the memory of SGLang's split, whose values are lost.

    The model owns that memory: `release_memory_occupation` releases it with the other weights. If the split
    is only part of its storage, the result gets new memory.
    """
    if split.untyped_storage().nbytes() != split.numel() * split.itemsize:
        return torch.empty_like(split, memory_format=torch.contiguous_format)
    _, rows, columns = split.shape
    return split.detach().as_strided(split.shape, (rows * columns, columns, 1), 0)


def _is_unquantized(weight: Tensor) -> bool:
    return weight.is_floating_point() and weight.element_size() > 1


def adopt_weights(
    model: Any, d_c: int, d_rope: int, layer_ids: Container[int] | None = None
) -> dict[int, LayerWeights]:
    """Replace the absorbed weights in the layers of a loaded model.

    A model's weights are replaced once, however many backends it has.

    Args:
        model: SGLang's model.
        d_c, d_rope: the widths of a latent and of its rotary part.
        layer_ids: of the layers that this backend serves; None if it serves all. Other layers have another
            backend, for example for linear attention.

    Returns:
        the layers' weights by ``layer_id``. A layer that always uses absorbed attention and has no
        ``kv_b_proj`` (MiniCPM3) keeps its own weights and is not among them.

    Raises:
        UnsupportedError: a layer cannot be served; the message names it.
    """
    if not hasattr(model, "mla_backend_layers"):
        modules = _attention_modules(model)
        check_layers_found(model, modules)
        if layer_ids is not None:
            modules = [module for module in modules if _layer_id(module) in layer_ids]
        for module in modules:
            calls = [child for child in module.children() if isinstance(child, RadixAttention)]
            expands = any(not is_absorbed(call, d_c, d_rope) for call in calls)
            check_layer(module, calls, cannot_expand=expands and not _can_adopt(module))
        layers = {module.layer_id: LayerWeights(module) for module in modules if _can_adopt(module)}
        model.mla_backend_layers = layers
        # SGLang looks up both methods on the instance. Almost every update ends in load_weights; after
        # transfers that bypass load_weights, SGLang calls post_load_weights.
        for name in ("load_weights", "post_load_weights"):
            if hasattr(model, name):
                setattr(model, name, _with_refresh(getattr(model, name), layers))
    return model.mla_backend_layers


def _attention_modules(model: Any) -> list[Any]:
    """The modules that make attention calls."""
    return [m for m in model.modules() if any(isinstance(c, RadixAttention) for c in m.children())]


def _layer_id(module: Any) -> int:
    layer_id: int = next(child.layer_id for child in module.children() if isinstance(child, RadixAttention))
    return layer_id


def _can_adopt(module: Any) -> bool:
    return getattr(module, "w_kc", None) is not None and hasattr(module, "kv_b_proj")


def is_absorbed(layer: RadixAttention, d_c: int, d_rope: int) -> bool:
    """Whether an attention call uses latents as keys and values, as the cache holds them."""
    return (layer.tp_k_head_num, layer.head_dim, layer.v_head_dim) == (1, d_c + d_rope, d_c)


def update_from_tensors(
    original: Callable[..., tuple[bool, str]],
    updater: Any,
    named_tensors: Sequence[tuple[str, Any]],
    load_format: str | None = None,
) -> tuple[bool, str]:
    """Call SGLang's ``update_weights_from_tensor``, and refresh absorbed weights if it may write parameters.

    Returns:
        whether the update was made, and a message. A direct load of a quantized ``kv_b_proj`` is refused
        before it writes anything.
    """
    if load_format in (None, "flattened_bucket"):  # the model loads these, and its methods are wrapped
        return original(updater, named_tensors, load_format)
    model = updater.get_model()
    layers = list(getattr(model, "mla_backend_layers", {}).values())
    if load_format == "direct":
        layers = _with_parameters(layers, model, {name for name, _ in named_tensors})
        for layer in layers:
            if not layer.has_16_bit_source():
                return False, (
                    f'mla_backend: load_format="direct" does not reach the absorbed weights of a quantized '
                    f"kv_b_proj (layer {layer.attention.layer_id}), so nothing was updated: leave "
                    "load_format out"
                )
    result = original(updater, named_tensors, load_format)
    # A --custom-weight-loader may use other names for parameters, so then all layers count as updated.
    for layer in layers:
        if layer.has_16_bit_source():
            layer.reload()
    return result


def _with_parameters(layers: list[LayerWeights], model: Any, names: set[str]) -> list[LayerWeights]:
    """The layers of a model whose ``kv_b_proj`` has parameters with these names."""
    named = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    return [layer for layer in layers if any(id(p) in named for p in layer.attention.kv_b_proj.parameters())]


def _with_refresh(load: Callable[..., Any], layers: dict[int, LayerWeights]) -> Callable[..., Any]:
    def load_and_refresh(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as updates:  # finishes the update of each layer, whatever fails in others
            for layer in layers.values():
                layer.prepare_update()
                updates.callback(layer.finish_update)
            return load(*args, **kwargs)

    return load_and_refresh


def _join(left: Tensor, right: Tensor) -> Tensor:
    """Join two tensors along their last dimension, moving words of 8 bytes if the sizes allow it.

    Torch moves non-contiguous tensors element by element, and a prefill joins megabytes in every layer.
    """
    parts = (left, right)
    sizes = [size * left.itemsize for part in parts for size in (part.shape[-1], part.storage_offset())]
    sizes += [stride * left.itemsize for part in parts for stride in part.stride()[:-1]]
    if any(size % 8 for size in sizes) or any(part.stride(-1) != 1 for part in parts):
        return torch.cat(parts, dim=-1)
    return torch.cat([part.view(torch.int64) for part in parts], dim=-1).view(left.dtype)
