"""Small EAGLE heads with latent attention, as vLLM loads both kinds and SGLang EAGLE3's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from make_checkpoint import make_checkpoint


def eagle_head(folder: Path, method: str, *options: str) -> Path:
    """A head of one layer for a model of `make_checkpoint` with DeepSeek-V3's form and three layers.

    Args:
        method: "eagle", whose head reads the model's last hidden states, or "eagle3": those of all layers.
        options: of `make_checkpoint`, the model's.
    """
    form = ("--architecture", "deepseek-v3", *options, "--layers", "1", "--experts", "0")
    make_checkpoint(str(folder), *form)
    config = json.loads((folder / "config.json").read_text())
    hidden = config["hidden_size"]
    named = load_file(folder / "model.safetensors")
    layer = {n.removeprefix("model."): w for n, w in named.items() if n.startswith("model.layers.0.")}
    outside = {n.removeprefix("model."): w for n, w in named.items() if "layers" not in n}

    def norms(*names: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in names}

    if method == "eagle":
        inputs = 2
        further = norms("enorm", "hnorm")
        # The layer is numbered behind the model's, and not to have experts.
        config |= {"first_k_dense_replace": 8, "num_nextn_predict_layers": 1}
    else:
        inputs = 3
        further = norms("layers.0.hidden_norm")
        # It attends to the embedding and to hidden states side by side.
        for name in layer:
            if name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")):
                layer[name] = torch.cat([layer[name], layer[name].flip(0)], dim=1) * 2**-0.5
        config |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
        config |= {"draft_vocab_size": config["vocab_size"], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
        # SGLang's own setting: the inputs of these layers.
        config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
        config |= {"num_nextn_predict_layers": 0}
    generator = torch.Generator().manual_seed(1)
    fc = torch.randn(hidden, inputs * hidden, generator=generator) * (inputs * hidden) ** -0.5
    further["fc.weight"] = fc.to(torch.bfloat16)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(layer | outside | further, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
