#!/usr/bin/env python3
"""Write a small MLA checkpoint with random weights: config, safetensors and tokenizer, nothing downloaded.

The attention has a real model's geometry; the rest is tiny. Weights keep the variance of what passes through
them, so that the model's tokens depend on its attention: with the usual small initialization all logits are
nearly the same, and a broken backend would go unnoticed.

It needs transformers, tokenizers and safetensors, which come with either engine.

    python examples/make_checkpoint.py /tmp/deepseek-v2-small
    python examples/make_checkpoint.py /tmp/minicpm3-small --architecture minicpm3

DeepSeek's models scale their rotary embeddings by YaRN. `--rope default` leaves YaRN out, as in Moonlight,
GLM-4.7-Flash and GLM-5.

`--architecture deepseek-v2-lite --config-only` writes the full model's config and no weights, for engines
that make up their own (`load_format="dummy"`): enough to measure speed, never correctness.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

try:
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
except ModuleNotFoundError as error:
    sys.exit(f"make_checkpoint.py: {error}; pip install transformers tokenizers safetensors")

TOKENIZER_TEXT = """A cache of keys and values grows with every token that a model has read. Multi-head latent
attention keeps one short vector per token instead, from which the keys and values of all heads can be made
again. When a model writes, one token at a time, it need not make them: the matrices that would do so are
multiplied into the query and into the output, and attention runs on the short vectors themselves. When it
reads a long prompt, it does make them, because there are enough queries to share the work. user: what is the
capital of France? assistant: I am a small model with random weights, so I do not know; please ask me
something about nothing in particular."""

SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CONTEXT_LENGTH = 4096
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": CONTEXT_LENGTH,
}


def make_tokenizer(path: Path, text: str) -> int:
    """Train a byte-level BPE tokenizer on this text and save it; returns the size of its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 2, trainer)
    bos, eos, pad = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        model_max_length=CONTEXT_LENGTH,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    return len(fast)


class Weights(dict[str, torch.Tensor]):
    """Random weights by name; :meth:`linear` preserves the variance of its input, times gain²."""

    def __init__(self, seed: int, dtype: torch.dtype):
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def embedding(self, name: str, rows: int, width: int) -> None:
        self[f"{name}.weight"] = self._normal(rows, width).to(self._dtype)

    def linear(self, name: str, out_features: int, in_features: int, gain: float = 1.0) -> None:
        weight = self._normal(out_features, in_features) * (gain * in_features**-0.5)
        self[f"{name}.weight"] = weight.to(self._dtype)

    def norm(self, name: str, width: int) -> None:
        self[f"{name}.weight"] = (1 + 0.1 * self._normal(width)).to(self._dtype)

    def mlp(self, name: str, hidden: int, intermediate: int) -> None:
        self.linear(f"{name}.gate_proj", intermediate, hidden)
        self.linear(f"{name}.up_proj", intermediate, hidden)
        self.linear(f"{name}.down_proj", hidden, intermediate)

    def latent_attention(self, name: str, config: dict) -> None:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        d_c, d_rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        d_nope, d_v, q_rank = config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]
        # A gain of 2 on the queries makes attention choose rather than average.
        if q_rank:
            self.linear(f"{name}.q_a_proj", q_rank, hidden)
            self.norm(f"{name}.q_a_layernorm", q_rank)
            self.linear(f"{name}.q_b_proj", heads * (d_nope + d_rope), q_rank, gain=2.0)
        else:
            self.linear(f"{name}.q_proj", heads * (d_nope + d_rope), hidden, gain=2.0)
        self.linear(f"{name}.kv_a_proj_with_mqa", d_c + d_rope, hidden)
        self.norm(f"{name}.kv_a_layernorm", d_c)
        self.linear(f"{name}.kv_b_proj", heads * (d_nope + d_v), d_c)
        self.linear(f"{name}.o_proj", hidden, heads * d_v, gain=2.0)
        if "index_topk" in config:
            self.indexer(f"{name}.indexer", config)

    def indexer(self, name: str, config: dict) -> None:
        """What scores the keys of a layer with sparse attention."""
        hidden, heads, width = config["hidden_size"], config["index_n_heads"], config["index_head_dim"]
        self.linear(f"{name}.wq_b", heads * width, config["q_lora_rank"])
        self.linear(f"{name}.wk", width, hidden)
        self.norm(f"{name}.k_norm", width)
        self[f"{name}.k_norm.bias"] = torch.zeros(width, dtype=self._dtype)
        self.linear(f"{name}.weights_proj", heads, hidden)

    def draft_head(self, name: str, config: dict) -> None:
        """What a layer for multi-token prediction has besides a layer's weights."""
        hidden = config["hidden_size"]
        self.embedding(f"{name}.embed_tokens", config["vocab_size"], hidden)
        self.norm(f"{name}.enorm", hidden)
        self.norm(f"{name}.hnorm", hidden)
        self.linear(f"{name}.eh_proj", hidden, 2 * hidden)
        self.norm(f"{name}.shared_head.norm", hidden)
        self.linear(f"{name}.shared_head.head", config["vocab_size"], hidden, gain=3.0)


def _sizes(args: argparse.Namespace, heads: int) -> dict:
    """Sizes that the command line gives to any architecture; ``heads`` is the default number of heads."""
    return {
        "hidden_size": args.hidden_size,
        "intermediate_size": 2 * args.hidden_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads or heads,
        "num_key_value_heads": args.heads or heads,
    }


def deepseek_v2_config(args: argparse.Namespace) -> dict:
    """DeepSeek-V2-Lite's attention (d_c 512, d_rope 64, d_nope 128, d_v 128); all else is small."""
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        **_sizes(args, heads=16),
        "moe_intermediate_size": args.hidden_size // 2,
        "kv_lora_rank": 512,
        "q_lora_rank": args.q_lora_rank or None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": args.experts or 4,  # SGLang wants some even where no layer has them
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1 if args.experts else args.layers,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
        "rope_theta": 10000,
        "rope_scaling": None if args.rope == "default" else YARN,
        "attention_bias": False,
    }


def deepseek_v3_config(args: argparse.Namespace) -> dict:
    """DeepSeek-V3's form: latents of queries too, experts chosen by sigmoids, a layer that drafts tokens."""
    return deepseek_v2_config(args) | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": args.q_lora_rank or 192,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
    }


def deepseek_v32_config(args: argparse.Namespace) -> dict:
    """DeepSeek-V3.2's form: an indexer of the real size in each layer, which chooses a token's keys."""
    return deepseek_v3_config(args) | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_topk": args.index_topk,
        "index_n_heads": 64,
        "index_head_dim": 128,
    }


def minicpm3_config(args: argparse.Namespace) -> dict:
    """MiniCPM3-4B's attention (d_c 256, d_rope 32, d_nope 64, d_v 64); everything else is small."""
    return {
        "architectures": ["MiniCPM3ForCausalLM"],
        "model_type": "minicpm3",
        **_sizes(args, heads=8),
        "kv_lora_rank": 256,
        "q_lora_rank": args.q_lora_rank or 96,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "rope_theta": 10000,
        # Neutral values of the three factors by which MiniCPM3 scales embeddings, residuals and logits.
        "scale_emb": 1,
        "scale_depth": args.layers**0.5,
        "dim_model_base": args.hidden_size,
    }


def kimi_linear_config(args: argparse.Namespace) -> dict:
    """Kimi-Linear's latent attention (as DeepSeek-V2-Lite's, without rotation), in each layer."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        **_sizes(args, heads=16),
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "first_k_dense_replace": args.layers,
        "layer_types": ["full_attention"] * args.layers,  # or vLLM looks for linear ones
        "mlp_layer_types": ["dense"] * args.layers,
        "model_max_length": args.context_length,
        "linear_attn_config": {
            "full_attn_layers": list(range(1, args.layers + 1)),
            "kda_layers": [],
            "head_dim": 64,
            "num_heads": args.heads or 16,
            "short_conv_kernel_size": 4,
        },
    }


def mistral_large_3_config(args: argparse.Namespace) -> dict:
    """Mistral-Large-3's attention (as DeepSeek-V3's), whose queries are scaled by a factor of the position.

    The factor is 1 for the first `original_max_position_embeddings` tokens: few, so short texts see more.
    """
    return {
        "architectures": ["Mistral4ForCausalLM"],
        "model_type": "mistral4",
        **_sizes(args, heads=16),
        "kv_lora_rank": 512,
        "q_lora_rank": args.q_lora_rank or 192,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": args.layers,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": args.context_length / 64,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }


def mistral_small_4_config(args: argparse.Namespace) -> dict:
    """Mistral-Small-4's attention (d_c 256, d_rope 64, d_nope 64, d_v 128)."""
    return mistral_large_3_config(args) | {"kv_lora_rank": 256, "qk_nope_head_dim": 64}


def deepseek_v2_lite_config(args: argparse.Namespace) -> dict:
    """DeepSeek-V2-Lite in full: 27 layers, 15.7 billion parameters."""
    return deepseek_v2_config(args) | {
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 40 * CONTEXT_LENGTH,
    }


CONFIGS = {
    "deepseek-v2": deepseek_v2_config,
    "deepseek-v2-lite": deepseek_v2_lite_config,
    "deepseek-v3": deepseek_v3_config,
    "deepseek-v3.2": deepseek_v32_config,
    "kimi-linear": kimi_linear_config,
    "minicpm3": minicpm3_config,
    "mistral-large-3": mistral_large_3_config,
    "mistral-small-4": mistral_small_4_config,
}


def make_weights(config: dict, seed: int, dtype: torch.dtype) -> Weights:
    """All weights of a model with this config, under the names that HuggingFace gives them."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    weights = Weights(seed, dtype)
    weights.embedding("model.embed_tokens", config["vocab_size"], hidden)
    for i in range(layers + config.get("num_nextn_predict_layers", 0)):
        layer = f"model.layers.{i}"
        if i >= layers:
            weights.draft_head(layer, config)
        weights.norm(f"{layer}.input_layernorm", hidden)
        weights.latent_attention(f"{layer}.self_attn", config)
        weights.norm(f"{layer}.post_attention_layernorm", hidden)
        if i < config.get("first_k_dense_replace", layers):
            weights.mlp(f"{layer}.mlp", hidden, config["intermediate_size"])
            continue
        weights.linear(f"{layer}.mlp.gate", config["n_routed_experts"], hidden, gain=3.0)
        if config["topk_method"] == "noaux_tc":
            weights[f"{layer}.mlp.gate.e_score_correction_bias"] = torch.zeros(config["n_routed_experts"])
        for expert in range(config["n_routed_experts"]):
            weights.mlp(f"{layer}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
        weights.mlp(f"{layer}.mlp.shared_experts", hidden, config["moe_intermediate_size"])
    weights.norm("model.norm", hidden)
    # Sharp logits: few near-ties between the best two tokens.
    weights.linear("lm_head", config["vocab_size"], hidden, gain=3.0)
    return weights


def make_checkpoint(*arguments: str, tokenizer_text: str = TOKENIZER_TEXT) -> Path:
    """Write a checkpoint; takes the arguments of the command line. Returns its folder."""
    args = parse_args(list(arguments))
    path = args.path
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "vocab_size": -(-make_tokenizer(path, tokenizer_text) // 64) * 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "max_position_embeddings": args.context_length,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": args.dtype,
    }
    config |= CONFIGS[args.architecture](args)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "do_sample": False}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2))
    if not args.config_only:
        weights = make_weights(config, args.seed, getattr(torch, args.dtype))
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def parse_args(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="folder to write")
    parser.add_argument("--architecture", choices=CONFIGS, default="deepseek-v2")
    parser.add_argument("--config-only", action="store_true", help="no weights")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=None, help="default: 8 (minicpm3), 16 (others)")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument(
        "--q-lora-rank", type=int, default=None, help="default: none (deepseek-v2), 96 (minicpm3)"
    )
    parser.add_argument(
        "--rope",
        choices=("yarn", "default"),
        default=None,
        help="how rotary embeddings are scaled; default: yarn (deepseek), default (minicpm3)",
    )
    parser.add_argument("--experts", type=int, default=4, help="routed experts; 0 makes every layer dense")
    parser.add_argument("--index-topk", type=int, default=512, help="keys of a token (deepseek-v3.2)")
    parser.add_argument("--context-length", type=int, default=CONTEXT_LENGTH)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.architecture == "deepseek-v2-lite" and not args.config_only:
        parser.error("deepseek-v2-lite has 31 GB of weights: add --config-only")
    if args.architecture == "minicpm3" and args.rope == "yarn":
        parser.error("minicpm3 is written without YaRN: leave --rope yarn out")
    return args


if __name__ == "__main__":
    written = make_checkpoint(*sys.argv[1:])
    size = sum(file.stat().st_size for file in written.iterdir())
    print(f"{written}: {size / 1e6:.1f} MB")
