"""Reads about a model's attention from its files: without loading weights, and without transformers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mla_backend.cache_format import E4M3, CacheFormat, cache_format
from mla_backend.checks import check_int
from mla_backend.errors import InvalidInputError
from mla_backend.geometry import MLAGeometry, language_config, section
from mla_backend.models import ModelFamily, family_of

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_INDEX = "model.safetensors.index.json"
_FETCH_SECONDS = 10
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Checkpoint:
    """A model's attention, and the size of its weights.

    Attributes:
        config_path: its config.json.
        model_type: its architecture, as the config names it.
        family: the models that it is like; None if the table of models has none with its code.
        geometry: of an attention layer of the whole model.
        num_layers: layers that have a latent cache. Layers for multi-token prediction are not among them.
        num_mtp_layers: layers for multi-token prediction, which only speculative decoding runs.
        dtype: bfloat16 or float16, of activations.
        kv_format: of the cache that engines make by default: in ``dtype``, or fp8_e4m3 if the checkpoint asks
            for an fp8 cache, as ModelOpt's checkpoints do.
        is_quantized: whether the config says that weights are quantized, perhaps not all of them.
        weight_bytes: size of the safetensors files next to the config; None if there are none.
        is_sparse: whether queries attend only to keys that an indexer chooses (DSA).
        num_indexers: layers that have an indexer; other layers attend to the keys that the indexer of an
            earlier layer has chosen (GLM-5.2).
        indexer_bytes: of a token in the cache of one indexer; 0 without indexers.
        has_sinks: whether attention has sinks.
        says_no_rotation: whether the config has ``use_mla_nope``.
        has_windows: whether some layers have sliding windows.
    """

    config_path: Path
    model_type: str
    family: ModelFamily | None
    geometry: MLAGeometry
    num_layers: int
    num_mtp_layers: int
    dtype: torch.dtype
    kv_format: CacheFormat
    is_quantized: bool
    weight_bytes: int | None
    is_sparse: bool
    num_indexers: int
    indexer_bytes: int
    has_sinks: bool
    says_no_rotation: bool
    has_windows: bool

    @classmethod
    def find(cls, model: str) -> Checkpoint:
        """Read the config of a model.

        Args:
            model: a folder with a config.json, a path to one, or the Hub name of a model. If it is not in the
                local Hugging Face cache, huggingface_hub fetches its config, if that is installed.

        Raises:
            InvalidInputError: there is no such file, or it does not describe an MLA model.
        """
        try:
            path = _config_path(model)
        except InvalidInputError:
            raise
        except (OSError, RuntimeError, ValueError) as error:  # a name that no file can have
            why = getattr(error, "strerror", None) or error  # without the name, which may be long
            raise InvalidInputError(f"no config.json for {model[:80]!r}: {why}") from error
        whole = _read_json(path)
        if not isinstance(whole, dict):
            raise InvalidInputError(f"{path} is not a model's config: it holds no object")
        try:
            return cls._of_config(path, whole)
        except InvalidInputError:
            raise
        # A field has a type or size that no model has.
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise InvalidInputError(f"{path} is not a valid config: {error}") from error

    @classmethod
    def _of_config(cls, path: Path, whole: Mapping[str, Any]) -> Checkpoint:
        geometry = MLAGeometry.from_hf_config(whole)
        config = language_config(whole)
        num_layers = _num_layers(config)
        num_mtp_layers = config.get("num_nextn_predict_layers") or 0
        check_int("num_nextn_predict_layers", num_mtp_layers, 0)
        names = ("torch_dtype", "dtype")
        named = next((part[name] for part in (config, whole) for name in names if part.get(name)), None)
        dtype = _DTYPES.get(str(named), torch.bfloat16)
        quantization = _quantization(path, whole)
        return cls(
            config_path=path,
            model_type=str(whole.get("model_type", "unknown")),
            family=family_of(whole),
            geometry=geometry,
            num_layers=num_layers,
            num_mtp_layers=num_mtp_layers,
            dtype=dtype,
            kv_format=E4M3 if asks_for_fp8_cache(quantization) else cache_format(dtype),
            is_quantized=bool(quantization),
            weight_bytes=_weight_bytes(path.parent),
            is_sparse=bool(config.get("index_topk")),
            num_indexers=_num_indexers(config, num_layers),
            indexer_bytes=_indexer_bytes(config),
            has_sinks=bool(config.get("learnable_sink")),
            says_no_rotation=bool(config.get("use_mla_nope")),
            has_windows="sliding_attention" in _list(config, "layer_types"),
        )

    def latent_bytes(self, kv_format: CacheFormat) -> int:
        """Bytes of a token in the latent cache of one layer.

        Raises:
            InvalidInputError: the format has no rows of these dimensions.
        """
        return kv_format.row_bytes(self.geometry.kv_lora_rank, self.geometry.qk_rope_head_dim)

    def cache_bytes(self, kv_format: CacheFormat) -> int:
        """Bytes of a token in the caches of all layers: its latents, and what the indexers keep.

        Raises:
            InvalidInputError: as in `latent_bytes`.
        """
        return self.num_layers * self.latent_bytes(kv_format) + self.num_indexers * self.indexer_bytes


def asks_for_fp8_cache(quantization: Mapping[str, Any] | None) -> bool:
    """Whether a checkpoint asks for an fp8 cache, which engines then make by default.

    Args:
        quantization: ``quantization_config`` of its config.json, or its hf_quant_config.json.
    """
    if not quantization or not str(quantization.get("quant_method", "modelopt")).startswith("modelopt"):
        return False
    for settings in (section(quantization, "quantization"), quantization):
        scheme = settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo")
        if isinstance(scheme, Mapping):
            return scheme.get("num_bits") == 8 and scheme.get("type") == "float"
        if scheme:
            return str(scheme).upper() == "FP8"
    return False


def hub_cache() -> Path:
    """Where Hugging Face's libraries keep what they downloaded, by the variables that they read."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if path := os.environ.get(name):
            return Path(path).expanduser()
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HOME") or default, "hub").expanduser()


def _config_path(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    cached = hub_cache() / f"models--{model.replace('/', '--')}"
    revision = cached / "refs" / "main"
    snapshots = [cached / "snapshots" / revision.read_text().strip()] if revision.is_file() else []
    snapshots += sorted(cached.glob("snapshots/*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for snapshot in snapshots:
        if (snapshot / "config.json").is_file():
            return snapshot / "config.json"
    reason = f"no config.json for {model!r}: it is neither a folder with one nor a path to one"
    if _HUB_NAME.fullmatch(model):
        try:
            return _fetch(model)
        except ModuleNotFoundError:
            why_not = "huggingface_hub, which would fetch it, is not installed"
        except Exception as error:  # of the network, of the Hub, or of a library of either
            why_not = f"it cannot be fetched ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
        reason += f", and as a Hub name it is not in {hub_cache()}: {why_not}; name a path"
    raise InvalidInputError(reason)


def _fetch(model: str) -> Path:
    """Download a model's config, and what else is read beside it if the model has it. Returns the config."""
    from huggingface_hub import hf_hub_download

    config = Path(hf_hub_download(model, "config.json", etag_timeout=_FETCH_SECONDS))
    for name in ("hf_quant_config.json", _INDEX):
        with contextlib.suppress(Exception):  # many models do not have it
            hf_hub_download(model, name, etag_timeout=_FETCH_SECONDS)
    return config


def _quantization(config_path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization in a config, or in a file next to it, as in older checkpoints of ModelOpt."""
    beside = config_path.with_name("hf_quant_config.json")
    named = section(config, "quantization_config")
    if named or not beside.is_file():
        return named
    quantization = _read_json(beside)
    if not isinstance(quantization, dict):
        raise InvalidInputError(f"{beside} is not a model's quantization: it holds no object")
    return quantization


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, RecursionError, ValueError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from error


def _num_layers(config: Mapping[str, Any]) -> int:
    # Kimi-Linear lists the layers that have a cache; the others have linear attention.
    if listed := _list(section(config, "linear_attn_config"), "full_attn_layers"):
        return len(listed)
    caches, name = 1, "num_hidden_layers"
    if name not in config and "num_layers" in config:  # LongCat-Flash
        caches, name = 2, "num_layers"
    layers: Any = config.get(name)
    if "linear_attention" in (types := _list(config, "layer_types")):
        if set(types) == {"linear_attention"}:
            raise InvalidInputError("no layer has latent attention: layer_types names linear_attention alone")
        return len(types) - types.count("linear_attention")
    # In Ling-2.5 and Ring-2.5, the last layer of each group has MLA. In later models, so do all layers after
    # the last whole group.
    group: Any = config.get("layer_group_size") or 1
    check_int(name, layers)
    check_int("layer_group_size", group)
    return caches * (layers // group + layers % group)


def _num_indexers(config: Mapping[str, Any], num_layers: int) -> int:
    """The number of layers that have an indexer, by the rule of vLLM's DeepSeek-V3.2 (0.26 to 0.33).

    The names of kinds of layers may also be those of transformers.
    """
    if not config.get("index_topk"):
        return 0
    if shared := config.get("indexer_types") or config.get("index_topk_pattern"):
        return num_layers - sum(kind in ("shared", "S") for kind in shared[:num_layers])
    every, offset = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset", 2)
    check_int("index_topk_freq", every)
    check_int("index_skip_topk_offset", offset, 0)
    # The first `offset` layers, and then each `every`-th layer.
    return min(offset, num_layers) + max(num_layers - offset, 0) // every


def _indexer_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of an indexer's key, which both engines keep in e4m3 with an fp32 scale for each 128 values."""
    if not config.get("index_topk"):
        return 0
    width = config.get("index_head_dim") or 128
    check_int("index_head_dim", width)
    return width + 4 * math.ceil(width / 128)


def _list(config: Mapping[str, Any], name: str) -> list[Any]:
    items = config.get(name) or []
    if not isinstance(items, list):
        raise InvalidInputError(f"{name} must be a list, got {items!r}")
    return items


def _weight_bytes(folder: Path) -> int | None:
    index = folder / _INDEX
    # A model in one file has no index.
    with contextlib.suppress(OSError, ValueError, KeyError, OverflowError, TypeError):
        if (size := int(json.loads(index.read_text())["metadata"]["total_size"])) > 0:
            return size
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None
