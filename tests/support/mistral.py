"""Mistral's models with latent attention in the class that vLLM has for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def in_mistrals_class(source: Path, target: Path) -> Path:
    """The checkpoint as vLLM reads Mistral's own format: DeepSeek's class with a factor on queries."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    rope = config["rope_parameters"]
    config |= {"architectures": ["MistralLarge3ForCausalLM"], "model_type": "deepseek_v3"}
    config |= {"n_routed_experts": 4, "moe_layer_freq": 1, "num_nextn_predict_layers": 0}
    config["llama_4_scaling"] = {
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta": rope.pop("llama_4_scaling_beta"),
    }
    (target / "config.json").write_text(json.dumps(config))
    return target
