"""Small checkpoints of model families, each as SGLang reads it and as HuggingFace's own class does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from make_checkpoint import Weights, make_checkpoint, make_weights


def write(
    folder: Path, config: dict, weights: dict[str, torch.Tensor], rename: Callable[[str], str] = str
) -> Path:
    """Write a checkpoint with a tokenizer; ``rename`` maps the names of weights to those in the file."""
    make_checkpoint(str(folder), "--config-only")
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": given["vocab_size"]}))
    named = {rename(name): weight for name, weight in weights.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def base_config(folder: Path, *options: str, **changes: object) -> dict:
    """The config of `make_checkpoint` with two dense layers of 4 heads in fp32, with changes."""
    sizes = ("--heads", "4", "--layers", "2", "--experts", "0", "--dtype", "float32")
    make_checkpoint(str(folder), "--config-only", *sizes, *options)
    return json.loads((folder / "config.json").read_text()) | changes


def weights_of(config: dict) -> Weights:
    return make_weights(config, 1, getattr(torch, config["torch_dtype"]))


def mistral(folder: Path, original_length: int, *options: str, **widths: int) -> tuple[Path, Path]:
    """Mistral-Small-4, or with other ``widths`` Mistral-Large-3, whose queries grow with their position.

    As a model of DeepSeek's: SGLang's class for Mistral's adds other names of weights, and forces bfloat16.

    Args:
        original_length: the number of positions whose queries are not scaled.
        options: further ones of `make_checkpoint`.

    Returns:
        the checkpoint for SGLang, and the same model for HuggingFace.
    """
    yarn = {
        "factor": 16.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": original_length,
        "rope_theta": 10000.0,
    }
    config = base_config(
        folder / "sglang",
        "--q-lora-rank",
        "96",
        *options,
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        **widths,
    )
    weights = weights_of(config)
    scaled = {"llama_4_scaling": {"original_max_position_embeddings": original_length, "beta": 0.4}}
    # As SGLang translates Mistral's yarn with apply_scale false.
    scaled["rope_scaling"] = yarn | {
        "rope_type": "deepseek_yarn",
        "mscale_all_dim": 1,
        "apply_yarn_scaling": False,
    }
    ours = write(folder / "sglang", config | scaled, weights)
    own = {
        "architectures": ["Mistral4ForCausalLM"],
        "model_type": "mistral4",
        "rope_interleave": True,
        # Without mscale_all_dim the scores have no factor; mscale and mscale_all_dim cancel out in angles.
        "rope_parameters": yarn | {"rope_type": "yarn", "llama_4_scaling_beta": 0.4, "attention_factor": 1.0},
    }
    own = {name: value for name, value in (config | own).items() if name != "rope_scaling"}
    return ours, write(folder / "huggingface", own, weights)


SMALL_4 = {"kv_lora_rank": 256, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128}


def kimi_linear(folder: Path, *options: str) -> tuple[Path, Path]:
    """Kimi-Linear's layers with latent attention, which rotate nothing; Kimi-K3's are of the same class.

    Its layers with linear attention, which need a GPU in SGLang, are left out.

    Returns:
        the checkpoint for SGLang, and the same model for HuggingFace.
    """
    layers = {"kda_layers": [], "full_attn_layers": [1, 2], "head_dim": 64, "num_heads": 4}
    config = base_config(
        folder / "sglang",
        *options,
        architectures=["KimiLinearForCausalLM"],
        model_type="kimi_linear",
        mla_use_nope=True,
        linear_attn_config=layers | {"short_conv_kernel_size": 4},
        rope_scaling=None,
    )
    weights = weights_of(config)
    without_experts = {name: value for name, value in config.items() if "expert" not in name}
    ours = write(folder / "sglang", without_experts, weights)
    return ours, write(folder / "huggingface", without_experts, weights)


def without_rotary_part(folder: Path) -> tuple[Path, Path]:
    """Latents of 512 + 0, as Ling-3's with use_mla_nope, whose layers are of a subclass of DeepSeek's.

    Returns:
        the checkpoint for SGLang, and for HuggingFace the same model with a rotary part of zeros.
    """
    options = ("--rope", "default", "--q-lora-rank", "96")
    names = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    config = base_config(folder / "sglang", *options, **names, qk_rope_head_dim=0)
    weights = weights_of(config)
    ours = write(folder / "sglang", config, weights)
    d_nope, heads = config["qk_nope_head_dim"], config["num_attention_heads"]
    padded = dict(weights)
    for name, weight in weights.items():
        if name.endswith("kv_a_proj_with_mqa.weight"):
            padded[name] = torch.cat([weight, weight.new_zeros(64, weight.shape[1])])
        if name.endswith("q_b_proj.weight"):
            rotary = weight.new_zeros(heads, 64, weight.shape[1])
            query = torch.cat([weight.view(heads, d_nope, -1), rotary], dim=1).flatten(0, 1)
            padded[name] = query * ((d_nope + 64) / d_nope) ** 0.5  # the scale of scores falls with the width
    return ours, write(folder / "huggingface", config | {"qk_rope_head_dim": 64}, padded)


def ling_3(folder: Path) -> tuple[Path, Path]:
    """Ling-3's layers with latent attention and use_mla_nope; those with linear attention are left out.

    Returns:
        the checkpoint for SGLang, and for HuggingFace the same model as one of DeepSeek's.
    """
    plain, theirs = without_rotary_part(folder / "deepseek")
    config = json.loads((plain / "config.json").read_text())
    own = {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "use_mla_nope": True,
        "layer_group_size": 1,  # every layer has latent attention
        "short_conv_kernel_size": 4,
        "num_experts": 1,  # none
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }

    def rename(name: str) -> str:
        return name.replace("self_attn", "attention").replace("embed_tokens", "word_embeddings")

    return write(folder / "ling", config | own, weights_of(config), rename), theirs
