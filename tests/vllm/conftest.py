"""Real vLLM engines on small checkpoints, and HuggingFace transformers as the oracle for their tokens.

Engines run inside the test process, one after the other, because a start then takes two seconds instead of
twenty. test_serve.py covers engines in processes of their own.
"""

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the option kv_cache_memory_bytes

import pytest
import torch
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from make_checkpoint import TOKENIZER_TEXT, make_checkpoint
from tests.support.greedy import assert_clear_choices
from tests.support.missing import skip_without
from tests.support.processes import in_a_new_process
from tests.support.vllm_servers import Servers
from tests.support.vllm_workload import CPU_ENGINE, NEW_TOKENS, clean_up, freeze_for_good

PROMPTS = (
    "Hi",
    "The capital of France is",
    "one two three one two three one two three one two",
    "user: what is attention? assistant:",
    TOKENIZER_TEXT[:60],
    TOKENIZER_TEXT[100:260],
    TOKENIZER_TEXT[:300] + " Now",
    "a b c d e f g " * 12,
    # Longer than a batch of the chunked configurations: its last chunk is a long query on a long context.
    TOKENIZER_TEXT * 2,
)


class Expected(NamedTuple):
    """A prompt, and the greedy fp32 tokens with which HuggingFace transformers continues it."""

    prompt: list[int]
    tokens: list[int]


class Model(NamedTuple):
    path: Path
    expected: list[Expected]


@torch.no_grad()
def huggingface_tokens(path: Path) -> list[Expected]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    (architecture,) = json.loads((path / "config.json").read_text())["architectures"]
    model = (
        getattr(transformers, architecture)
        .from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
    model.generation_config.eos_token_id = None  # engines are told to ignore the end of a text, too
    expected = []
    for text in PROMPTS:
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        output = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[0, len(prompt) :].tolist()
        assert_clear_choices(torch.cat(output.logits), tokens)
        expected.append(Expected(prompt, tokens))
    return expected


@pytest.fixture(scope="session")
def make_model(run_folder):
    """A function that makes the model of an architecture, with more arguments, once for all processes."""

    @functools.cache
    def make(architecture: str, *more: str) -> Model:
        name = "".join((architecture, *more))
        path, tokens = run_folder / name, run_folder / f"{name}.json"
        with FileLock(f"{path}.lock"):
            if not tokens.exists():
                make_checkpoint(str(path), "--architecture", architecture, *more)
                # vLLM's Transformers backend, which serves MiniCPM3, changes the class for the whole process.
                own = architecture == "minicpm3"
                made = in_a_new_process(huggingface_tokens, path) if own else huggingface_tokens(path)
                tokens.write_text(json.dumps(made))
        return Model(path, [Expected(*expected) for expected in json.loads(tokens.read_text())])

    return make


@pytest.fixture(scope="session")
def deepseek_path(tmp_path_factory) -> Path:
    """The checkpoint of `deepseek`, for tests that do not need its tokens."""
    return make_checkpoint(str(tmp_path_factory.mktemp("deepseek-v2")))


@pytest.fixture(scope="session")
def deepseek(make_model) -> Model:
    return make_model("deepseek-v2")


@pytest.fixture(scope="session")
def deepseek_v3(make_model) -> Model:
    return make_model("deepseek-v3")


@pytest.fixture(scope="session")
def minicpm3(make_model) -> Model:
    return make_model("minicpm3")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """A prefill and a decode server, in which no engine has started yet."""
    if importlib.util.find_spec("nixl") is None:
        skip_without("nixl", "servers transfer caches by NIXL, which is not installed")
    with Servers(tmp_path_factory.mktemp("servers")) as pair:
        yield pair


@pytest.fixture(scope="session")
def llm_class():
    from vllm import LLM

    freeze_for_good()
    return LLM


@pytest.fixture
def start_engine(llm_class):
    """Start an `LLM` in this process, after shutting down the one before. The last one ends with the test."""
    started = False

    def start(path: Path, **options):
        nonlocal started
        if started:
            clean_up()
        started = True
        with pytest.MonkeyPatch.context() as patch:
            # At a start vLLM looks into all modules, and fails at what n-gram drafts have loaded before.
            for name in [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]:
                patch.delitem(sys.modules, name)
            return llm_class(str(path), distributed_executor_backend="uni", **(CPU_ENGINE | options))

    yield start
    clean_up()
