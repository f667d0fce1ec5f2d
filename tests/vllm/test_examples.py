"""The small model of the examples says what it learnt; with wrong attention it says other things."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vllm import SamplingParams

import train
from common import RECIPE_FILE, check_continuations, recipe
from mla_backend_vllm import selection_name
from sentences import SENTENCES

pytestmark = pytest.mark.newest

PROMPTS = list(SENTENCES)
LEARNT = list(SENTENCES.values())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "model"
    train.train_once(path)
    return path


def test_the_text_shows_whether_attention_is_right(start_engine, trained, capfd):
    llm = start_engine(trained, attention_backend=selection_name(), dtype="auto", enable_prefix_caching=False)

    def generate() -> list[str]:
        # As many tokens as the examples generate.
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    assert generate() == LEARNT
    config = llm.llm_engine.vllm_config.compilation_config
    layers = [layer for layer in config.static_forward_context.values() if hasattr(layer, "impl")]
    right = layers[0].impl.scale
    for factor in (0.63, 0.8, 1.25):  # the first one leaves out YaRN's part of the scale
        for layer in layers:
            layer.impl.scale = factor * right
        texts = generate()
        assert check_continuations(PROMPTS, texts, cut=[False] * len(texts)) == 1
        output = capfd.readouterr().out
        assert "0 of 12 continuations are what the small model learnt. The attention is wrong." in output


def test_counts_leave_nothing_behind():
    code = "import common; print(common.count_engine_calls())"
    examples = Path(train.__file__).parent  # where "-c" then imports from
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=examples, check=True, stdout=subprocess.PIPE, text=True
    )
    folder = process.stdout
    assert "mla-backend-counters-" in folder and not Path(folder.strip()).exists()


def test_comparison(capsys):
    assert check_continuations(PROMPTS, LEARNT, [False] * 12) == 0
    assert "12 of 12 continuations are what the small model learnt." in capsys.readouterr().out
    # Fewer tokens than the sentence has.
    assert check_continuations(PROMPTS[:1], [LEARNT[0][:10]], [True]) == 0
    assert check_continuations(PROMPTS[:1], [LEARNT[0][:10]], [False]) == 1
    assert check_continuations(PROMPTS[:2], [LEARNT[0], " something else"], [False, True]) == 1
    output = capsys.readouterr().out
    assert "Wrong after 'Multi-head" in output and "1 of 2 continuations" in output
    # A prompt that the model does not know.
    assert check_continuations(["Hello"], [" Paris"], [False]) == 0
    output = capsys.readouterr().out
    assert "can only continue" in output and "continuations" not in output


def test_model_is_trained_once_per_recipe(tmp_path, monkeypatch):
    trainings = []

    def fake_train(path):
        trainings.append(path)
        time.sleep(0.1)
        path.mkdir()
        (path / RECIPE_FILE).write_text(recipe())

    monkeypatch.setattr(train, "train", fake_train)
    path = tmp_path / "new" / "model"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_text("someone's weights")
    with pytest.raises(FileExistsError, match="name a new folder"):
        train.train_once(path)
    assert not trainings
    (path / RECIPE_FILE).write_text("an older recipe")
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train.train_once, [path] * 3))
    assert len(trainings) == 1
    assert [file.name for file in path.iterdir()] == [RECIPE_FILE]
    (path / RECIPE_FILE).write_text("another recipe")
    train.train_once(path)
    assert len(trainings) == 2
    assert sorted(file.name for file in path.parent.iterdir()) == ["model", "model.lock"]
