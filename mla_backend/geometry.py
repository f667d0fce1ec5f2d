"""The shape of a model's Multi-head Latent Attention, read from its HuggingFace config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from mla_backend.checks import check_int, check_positive, check_softmax_scale, is_number
from mla_backend.errors import InvalidInputError

# Fields of multimodal configs that hold the language model's own config.
_NESTED_CONFIGS = ("text_config", "language_config")


@dataclasses.dataclass(frozen=True)
class MLAGeometry:
    """Dimensions of one attention layer: of the whole model, or after :meth:`per_rank` of one GPU.

    Attributes:
        num_heads: query heads, H.
        kv_lora_rank: width d_c of the compressed keys and values of a token, and of absorbed queries and
            outputs.
        qk_nope_head_dim: width d_nope of a head's key part without rotary embedding.
        qk_rope_head_dim: width d_rope of the rotary key part, which all heads share; 0 if there is none.
        v_head_dim: width d_v of a head's value.
        softmax_scale: factor on the attention scores, YaRN's mscale² included.
        hidden_size: width of the residual stream.
        q_lora_rank: width of the compressed query; None where queries come straight from the hidden state.

    Raises:
        InvalidInputError: a dimension is not a positive integer (or 0, where that is allowed), or the scale
            not positive and finite.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    hidden_size: int
    q_lora_rank: int | None = None

    def __post_init__(self) -> None:
        sizes = {field.name for field in dataclasses.fields(self)} - {"softmax_scale", "qk_rope_head_dim"}
        if self.q_lora_rank is None:
            sizes.remove("q_lora_rank")
        check_positive(self, *sorted(sizes))
        check_int("qk_rope_head_dim", self.qk_rope_head_dim, least=0)
        check_softmax_scale(self.softmax_scale)

    @property
    def latent_dim(self) -> int:
        """Width of a latent cache row, d_c + d_rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of a vanilla query or key head, d_nope + d_rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def per_rank(self, tensor_parallel_size: int) -> MLAGeometry:
        """The geometry of one of ``tensor_parallel_size`` ranks. Only heads are split.

        Raises:
            InvalidInputError: the heads do not divide evenly.
        """
        if tensor_parallel_size < 1 or self.num_heads % tensor_parallel_size:
            raise InvalidInputError(
                f"{self.num_heads} heads cannot be split over {tensor_parallel_size} tensor-parallel GPUs: "
                "choose a number of GPUs that divides them"
            )
        return dataclasses.replace(self, num_heads=self.num_heads // tensor_parallel_size)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any] | Any) -> MLAGeometry:
        """Read the geometry from a HuggingFace config (a ``PretrainedConfig`` or the dict of a config.json).

        Of a multimodal config, the language model's part (``text_config``) is read. The scale is
        ``qk_head_dim ** -0.5``. If the rotary scaling has an ``mscale_all_dim``, it is multiplied by
        ``mscale²`` with ``mscale = 0.1 * mscale_all_dim * ln(factor) + 1`` (YaRN as in DeepSeek-V2,
        arXiv:2405.04434, and its published code), unless the scaling's type is ``default``, its ``factor`` is
        at most 1, or its ``apply_yarn_scaling`` is false.

        Raises:
            InvalidInputError: the config does not describe an MLA model, lacks a dimension, has a field of
                the wrong type, or gives each type of layer a rotary embedding of its own.
        """
        config = language_config(config)
        required = (
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "num_attention_heads",
            "hidden_size",
        )
        missing = [name for name in required if _get(config, name) is None]
        if missing or not _get(config, "kv_lora_rank"):
            raise InvalidInputError(
                f"the config of model type {_get(config, 'model_type')!r} does not describe "
                f"Multi-head Latent Attention: it has no {', '.join(missing or ['kv_lora_rank'])}"
            )
        for name in required:
            check_int(name, _get(config, name), least=0 if name == "qk_rope_head_dim" else 1)
        num_heads = _get(config, "num_attention_heads")
        hidden_size = _get(config, "hidden_size")
        qk_nope_head_dim = _get(config, "qk_nope_head_dim")
        qk_rope_head_dim = _get(config, "qk_rope_head_dim")
        return cls(
            num_heads=num_heads,
            kv_lora_rank=_get(config, "kv_lora_rank"),
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            # MiniCPM3's config has none; its heads split the hidden state evenly.
            v_head_dim=_get(config, "v_head_dim") or hidden_size // num_heads,
            softmax_scale=(qk_nope_head_dim + qk_rope_head_dim) ** -0.5 * _yarn_mscale(config) ** 2,
            hidden_size=hidden_size,
            q_lora_rank=_get(config, "q_lora_rank") or None,
        )


def _get(config: Mapping[str, Any] | Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def language_config(config: Mapping[str, Any] | Any) -> Any:
    """The language model's own config: of a multimodal model the nested one, else ``config`` itself."""
    if not _get(config, "kv_lora_rank"):
        for name in _NESTED_CONFIGS:
            nested = _get(config, name)
            if nested is not None:
                return nested
    return config


def section(config: Mapping[str, Any] | Any, name: str) -> Mapping[str, Any]:
    """A part of a config that is itself a mapping; empty if the config lacks it.

    Raises:
        InvalidInputError: the part is not a mapping.
    """
    part = _get(config, name) or {}
    if not isinstance(part, Mapping):
        raise InvalidInputError(f"{name} must be an object, got {part!r}")
    return part


def _yarn_mscale(config: Mapping[str, Any] | Any) -> float:
    # transformers 5 has theta and scaling in rope_parameters; earlier versions have scaling in rope_scaling.
    rope = section(config, "rope_parameters") or section(config, "rope_scaling")
    if nested := [str(name) for name, part in rope.items() if isinstance(part, Mapping)]:
        raise InvalidInputError(
            f"the rotary embedding is given for each type of layer ({', '.join(nested)}), from which "
            "no softmax_scale follows: put the parameters of the layers with latent attention directly into "
            "rope_parameters (rope_type, rope_theta, ...)"
        )
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    mscale_all_dim = rope.get("mscale_all_dim") or 0.0
    factor = rope.get("factor") or 1.0
    for name, value in (("mscale_all_dim", mscale_all_dim), ("factor", factor)):
        if not is_number(value):
            raise InvalidInputError(f"the rotary scaling's {name} must be a number, got {value!r}")
    # Models with apply_yarn_scaling=False scale queries by position instead.
    if rope_type == "default" or factor <= 1.0 or not rope.get("apply_yarn_scaling", True):
        return 1.0
    return 0.1 * mscale_all_dim * math.log(factor) + 1.0
