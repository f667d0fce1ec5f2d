"""LoRA adapters: applied where vLLM applies them, and refused where it would not."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from make_checkpoint import make_checkpoint
from mla_backend import UnsupportedError
from mla_backend_vllm import selection_name
from tests.support.vllm_outputs import assert_tokens, generate
from tests.vllm.conftest import Model, huggingface_tokens

pytestmark = pytest.mark.newest

RANK = 4


def write_adapter(folder: Path, model: Path, modules: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Write an adapter of these modules of all layers; returns what it adds to the weights."""
    generator = torch.Generator().manual_seed(1)
    tensors, added = {}, {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.removesuffix(".weight").endswith(modules):
            rows, columns = weight.shape
            a = torch.randn(RANK, columns, generator=generator) * columns**-0.5
            b = torch.randn(rows, RANK, generator=generator)
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            added[name] = b @ a
    assert added
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(modules)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return added


def merged(model: Path, folder: Path, added: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights |= {name: weights[name] + more for name, more in added.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_adapters_beside_kv_b_proj_are_applied_and_those_of_kv_b_proj_refused(start_engine, tmp_path):
    # vLLM's CPU platform has no adapters of routed experts.
    base = make_checkpoint(str(tmp_path / "base"), "--experts", "0", "--dtype", "float32", "--layers", "2")
    added = write_adapter(tmp_path / "beside", base, ("q_proj", "o_proj"))
    write_adapter(tmp_path / "of_kv_b_proj", base, ("q_proj", "kv_b_proj"))
    path = merged(base, tmp_path / "merged", added)
    with_adapter = Model(path, huggingface_tokens(path))
    without = Model(base, huggingface_tokens(base))
    assert all(a.tokens != b.tokens for a, b in zip(with_adapter.expected, without.expected, strict=True))
    llm = start_engine(
        base,
        attention_backend=selection_name(),
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        max_num_batched_tokens=256,
    )
    beside = LoRARequest("beside", 1, str(tmp_path / "beside"))
    assert_tokens(generate(llm, with_adapter, lora_request=beside), with_adapter)
    assert_tokens(generate(llm, without), without)
    refused = LoRARequest("latent", 2, str(tmp_path / "of_kv_b_proj"))
    for _attempt in range(2):
        with pytest.raises(
            UnsupportedError, match=r"'latent' changes model.layers.0.self_attn.kv_b_proj: mer"
        ):
            llm.llm_engine.add_lora(refused)
    assert llm.llm_engine.list_loras() == {1}
    assert_tokens(generate(llm, with_adapter, lora_request=beside), with_adapter)
