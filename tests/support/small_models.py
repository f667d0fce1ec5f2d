"""Small checkpoints of the families in `mla_backend.models`, and greedy tokens of HuggingFace's models.

Latents and dimensions of heads are the family's; all else is tiny. Weights keep the variance of what passes
through them, as in examples/make_checkpoint.py.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mla_backend.models import ModelFamily
from tests.support.greedy import CLEAR

VOCABULARY = 512
NEW_TOKENS = 16
PROMPT_LENGTHS = (1, 7, 40, 100, 300)
"""The last one is longer than a chunk of the engines that the tests start."""

COMPUTED_BY = {"kimi_k2": "deepseek_v3", "pangu_ultra_moe": "deepseek_v3", "sarvam_mla": "deepseek_v3"}
"""Types of models that transformers does not have, and types of models that compute the same."""

_EXPERTS, _SHARED = 4, 1
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": _EXPERTS,
    "n_shared_experts": _SHARED,
    "num_experts_per_tok": 2,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
# By type of model: other names of the same sizes, and what else its code wants.
_MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False},
    "minicpm3": {"scale_emb": 1, "scale_depth": 2**0.5, "dim_model_base": 256},
    "longcat_flash": {
        "num_layers": 1,
        "ffn_hidden_size": 512,
        "expert_ffn_hidden_size": 128,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    # Norms behind attention and experts, which the published models have, are left out.
    "pangu_ultra_moe": {"sandwich_norm": False},
    "sarvam_mla": {"num_experts": _EXPERTS, "num_shared_experts": _SHARED},
}


class Greedy(NamedTuple):
    """A prompt and the greedy tokens with which HuggingFace's model continues it in fp32."""

    prompt: list[int]
    tokens: list[int]


def small_config(family: ModelFamily, **more: Any) -> dict[str, Any]:
    """The config.json of a small checkpoint."""
    config = {**family.config, **_SMALL, **_MORE.get(family.config["model_type"], {}), **more}
    if config["q_lora_rank"]:
        config["q_lora_rank"] = 96
    return config


def make_small_model(family: ModelFamily, path: Path) -> list[Greedy]:
    """Write a small checkpoint. Returns what it generates.

    The weights are the first random ones with which no choice between two tokens is close.
    """
    config = small_config(family)
    model = _huggingface_model(config)
    for seed in range(8):
        _randomize(model, seed)
        expected, gap = _greedy(model)
        if gap > CLEAR:
            _save(model, config, path)
            return expected
    raise AssertionError("two tokens are nearly a tie, whatever the seed")


def make_small_checkpoint(family: ModelFamily, path: Path, **more: Any) -> Path:
    """Write a small checkpoint, with other fields in its config. Returns its folder."""
    config = small_config(family, **more)
    model = _huggingface_model(config)
    _randomize(model, 0)
    _save(model, config, path)
    return path


def _huggingface_model(config: dict[str, Any]) -> torch.nn.Module:
    its_own = {"model_type": COMPUTED_BY.get(config["model_type"], config["model_type"])}
    if config["rope_scaling"] is not None:
        its_own["rope_scaling"] = config["rope_scaling"] | {"type": "yarn"}
    known = AutoConfig.for_model(**config | its_own)
    # To read a config of Kimi-K2, vLLM changes DeepSeek-V3's class, and transformers saves by this name.
    type(known).model_type = its_own["model_type"]
    return AutoModelForCausalLM.from_config(known, dtype=torch.float32, attn_implementation="eager").eval()


def _save(model: torch.nn.Module, config: dict[str, Any], path: Path) -> None:
    model.save_pretrained(path)
    _rename(config["model_type"], path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config, indent=2))


def _rename(model_type: str, file: Path) -> None:
    """Give weights that transformers has saved the names that they have in published checkpoints."""
    weights = load_file(file)
    if model_type == "longcat_flash":  # experts without weights
        weights = {k: v for k, v in weights.items() if not re.search(f"experts.[{_EXPERTS}-9]", k)}
    elif model_type == "pangu_ultra_moe":  # a bias of zeros
        weights = {k: v for k, v in weights.items() if not k.endswith("e_score_correction_bias")}
    elif model_type == "axk1":  # layers without experts have this norm, but no use for it
        weights["model.layers.0.post_mlp_layernorm.weight"] = torch.ones(_SMALL["hidden_size"])
    else:
        return
    save_file(weights, file, metadata={"format": "pt"})


def know_config(model_type: str) -> None:
    """Let transformers read configs of a type that it does not have, as code beside the weights would."""
    if model_type not in CONFIG_MAPPING:
        base = CONFIG_MAPPING[COMPUTED_BY[model_type]]
        AutoConfig.register(model_type, type("Config", (base,), {"model_type": model_type}))


@torch.no_grad()
def _randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.copy_(1 + 0.1 * noise if "norm" in name else torch.zeros_like(noise))
        elif "embed" in name:
            parameter.copy_(noise)
        else:
            # Attention chooses rather than averages, and logits are sharp.
            gains = {"q_proj": 2, "q_b_proj": 2, "o_proj": 2, "lm_head": 3, "gate": 3, "classifier": 3}
            gain = gains.get(name.split(".")[-2], 1)
            parameter.copy_(noise * gain * parameter.shape[-1] ** -0.5)


@torch.no_grad()
def _greedy(model: torch.nn.Module) -> tuple[list[Greedy], float]:
    """Texts, and the smallest difference between the best two logits of a token."""
    expected, gap = [], float("inf")
    for length in PROMPT_LENGTHS:
        prompt = random.Random(length).choices(range(3, VOCABULARY), k=length)
        tokens: list[int] = []
        for _ in range(NEW_TOKENS):
            best, indices = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1].topk(2)
            gap = min(gap, float(best[0] - best[1]))
            tokens.append(int(indices[0]))
        expected.append(Greedy(prompt, tokens))
    return expected, gap
