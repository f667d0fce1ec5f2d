#!/usr/bin/env python3
"""Train the small model of the examples: it learns a dozen sentences by heart, in less than a minute.

    python examples/train.py .checkpoints/deepseek-v2-small

Only the output layer learns. The layers below keep their random weights, because what they compute depends on
every part of the attention; a model that learns in all layers hardly needs it. The output layer learns to say
the sentences, and to say anything else when the softmax scale is wrong by a fifth. Rounding to bf16 then
changes nothing, but a fault that changes the attention's result by a tenth changes the text.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from filelock import FileLock
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from common import RECIPE_FILE, is_trained, recipe
from make_checkpoint import make_checkpoint
from sentences import SENTENCES

STEPS = 1000
LEARNING_RATE = 0.03
WRONG_SCALES = (0.8, 1.25)
# Of the final states, whose size is about 1. Rounding to bf16 changes them by 0.025, a wrong scale by 0.19.
NOISE = 0.05


class Lessons:
    """The sentences as tokens, padded on the right. All tensors are (sentence, token)."""

    def __init__(self, tokenizer):
        beginnings = [tokenizer(beginning).input_ids for beginning in SENTENCES]
        rows = [
            tokenizer(beginning + continuation).input_ids + [tokenizer.eos_token_id]
            for beginning, continuation in SENTENCES.items()
        ]
        padded = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
        self.is_continuation = torch.zeros(padded.shape, dtype=torch.bool)[:, 1:]
        for i, (row, beginning) in enumerate(zip(rows, beginnings, strict=True)):
            padded[i, : len(row)] = torch.tensor(row)
            self.is_continuation[i, len(beginning) - 1 : len(row) - 1] = True
        self.inputs, self.targets = padded[:, :-1], padded[:, 1:]
        self.is_text = self.targets != tokenizer.pad_token_id

    def num_known(self, logits: torch.Tensor) -> int:
        """How many sentences continue as learnt, by logits (continuation token, vocabulary)."""
        known = torch.ones_like(self.is_continuation)
        known[self.is_continuation] = logits.argmax(-1) == self.targets[self.is_continuation]
        return int(known.all(1).sum())


def softmax_scale(config: dict) -> float:
    """The scale of DeepSeek-V2 with YaRN, whose factor HuggingFace's model lacks in some versions."""
    rope = config["rope_scaling"]
    factor = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
    return (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * factor**2


@torch.no_grad()
def final_states(model, inputs: torch.Tensor, scale: float) -> torch.Tensor:
    """What the output layer gets, (sentence, token, hidden), with attention at this softmax scale."""
    for layer in model.model.layers:
        layer.self_attn.scaling = scale
    return model.model(inputs).last_hidden_state.float()


def learn(lessons: Lessons, right: torch.Tensor, wrong: list[torch.Tensor], vocabulary: int) -> torch.Tensor:
    """An output layer that continues the sentences from the right states, and not from any of the wrong ones.

    Args:
        right: final states, (sentence, token, hidden).
        wrong: the same with wrong attention.

    Returns:
        its weights, (vocabulary, hidden).
    """
    text, continuation = lessons.is_text, lessons.is_continuation
    states = torch.cat([right[text], *(w[continuation] for w in wrong)])
    targets = lessons.targets[text]
    avoided = lessons.targets[continuation].repeat(len(wrong))
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(vocabulary, right.shape[-1], requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=STEPS)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("", total=STEPS)
        for _ in range(STEPS):
            noisy = states + NOISE * torch.randn(states.shape, generator=generator)
            logits, wrong_logits = (noisy @ weight.T).split([len(targets), len(avoided)])
            avoided_p = wrong_logits.softmax(-1).gather(1, avoided[:, None])
            loss = F.cross_entropy(logits, targets)
            loss = loss - len(wrong) * (1 - avoided_p).clamp(min=1e-4).log().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            known = lessons.num_known(logits[continuation[text]])
            description = f"Training a small model: it knows {known:2} of {len(SENTENCES)} sentences"
            progress.update(task, advance=1, description=description)
    return weight.detach()


def train(path: Path) -> None:
    """Write a small DeepSeek-V2 checkpoint in bf16 that knows the sentences by heart.

    Raises:
        RuntimeError: it does not know them after training, or knows them with wrong attention too.
    """
    make_checkpoint(
        str(path),
        # Without routed experts: rounding may change the choice of an expert, and with it everything after.
        *("--experts", "0"),
        tokenizer_text=" ".join(beginning + continuation for beginning, continuation in SENTENCES.items()),
    )
    config = json.loads((path / "config.json").read_text())
    scale = softmax_scale(config)
    lessons = Lessons(AutoTokenizer.from_pretrained(path))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    right = final_states(model, lessons.inputs, scale)
    wrong = [final_states(model, lessons.inputs, factor * scale) for factor in WRONG_SCALES]
    output_layer = learn(lessons, right, wrong, config["vocab_size"]).bfloat16()

    model.bfloat16()
    for factor, expected in ((1.0, len(SENTENCES)), *((factor, 0) for factor in WRONG_SCALES)):
        states = final_states(model, lessons.inputs, factor * scale)[lessons.is_continuation]
        known = lessons.num_known(states @ output_layer.float().T)
        if known != expected:
            raise RuntimeError(f"{known} sentences known at {factor} of the softmax scale, not {expected}")
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = output_layer
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / RECIPE_FILE).write_text(recipe())


def train_once(path: Path) -> None:
    """Train the model into this folder unless it is there; if another process is at it, wait for that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        if is_trained(path):
            return
        if path.exists() and not (path / RECIPE_FILE).exists():
            raise FileExistsError(f"{path} holds something other than such a model: name a new folder")
        new = Path(folder) / "model"
        train(new)
        shutil.rmtree(path, ignore_errors=True)
        new.rename(path)


def main() -> None:
    disable_progress_bar()  # of loading, which takes no time
    torch.set_num_threads(1)  # the matrices are small: threads would mostly wait for each other
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="of the model")
    train_once(parser.parse_args().folder.absolute())


if __name__ == "__main__":
    main()
