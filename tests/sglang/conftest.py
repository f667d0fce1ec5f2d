"""Fixtures of the SGLang tests: a small checkpoint, HuggingFace's tokens for it, engines in child processes.

The tests need an environment made by install.py. Without SGLang they are not collected.
"""

import functools
import importlib.util
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import scenarios

from make_checkpoint import make_checkpoint as write_checkpoint
from mla_backend_bench.ports import free_port
from tests.support import processes
from tests.support.greedy import Sequence, assert_clear_choices
from tests.support.missing import skip_without

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]

if not torch.cuda.is_available():
    # SGLang reads these variables when it is imported, here and in its processes.
    os.environ.update(
        SGLANG_PLATFORM="plain_cpu",
        SGLANG_USE_CPU_ENGINE="0",
        # Compiling SGLang's small functions would take longer than everything else.
        TORCHDYNAMO_DISABLE="1",
        # For decode context parallelism, whose outputs SGLang merges by a Triton kernel. In some versions the
        # attention kit fills its caches with one.
        TRITON_INTERPRET="1",
    )


# New processes have no interpreter of Triton's kernels, as users' have none.
run_script = functools.partial(processes.run_script, TRITON_INTERPRET="0")
# What takes the time of an engine's start. The second one imports all models.
processes.preload("sglang.srt.entrypoints.engine", "sglang.srt.models.registry")


def make_checkpoint(path: Path, *arguments: str) -> None:
    write_checkpoint(str(path), *arguments)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """An fp32 checkpoint with DeepSeek-V2's attention and YaRN, one dense and one MoE layer."""
    path = tmp_path_factory.mktemp("deepseek-v2")
    make_checkpoint(path, "--dtype", "float32", "--heads", "4", "--layers", "2")
    return path


@pytest.fixture(scope="session")
def oracle(checkpoint):
    return Oracle(checkpoint)


class Oracle:
    """Greedy tokens and their log-probabilities from HuggingFace's model, in fp32."""

    def __init__(self, path: Path, device: str = "cpu"):
        import transformers

        config = json.loads((path / "config.json").read_text())
        # Its class for automatic choice does not know all of them.
        model = getattr(transformers, config["architectures"][0])
        self._model = model.from_pretrained(path, dtype=torch.float32).to(device).eval()
        if config["model_type"] != "deepseek_v2":
            return
        rope = config["rope_scaling"]
        if rope is None:
            return
        # Some versions of HuggingFace's DeepSeek-V2 leave YaRN's factor out of the scale.
        mscale = 0.1 * rope["mscale_all_dim"] * torch.tensor(float(rope["factor"])).log().item() + 1.0
        for layer in self._model.model.layers:
            layer.self_attn.scaling = (
                config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
            ) ** -0.5 * mscale**2

    @torch.no_grad()
    def greedy(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        tokens, logits, cache, new = [], [], None, self._batch(prompt)
        for _ in range(num_tokens):
            output = self._model(new, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits.append(output.logits[0, -1])
            new = logits[-1].argmax().view(1, 1)
            tokens.append(new.item())
        assert_clear_choices(torch.stack(logits), tokens)
        return tokens, torch.stack(logits).log_softmax(-1).max(-1).values.tolist()

    def logprobs_of(self, prompt: list[int], tokens: list[int]) -> list[float]:
        index = self._batch(tokens).T
        return self._logprobs(prompt, tokens).gather(1, index).flatten().tolist()

    def choices(self, prompt: list[int], tokens: list[int]) -> Sequence:
        """What the model would choose in the place of each token, after the tokens before it."""
        best, indices = self._logprobs(prompt, tokens).topk(2)
        return Sequence(indices[:, 0].tolist(), best[:, 0].tolist(), (best[:, 0] - best[:, 1]).tolist())

    @torch.no_grad()
    def _logprobs(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """[tokens, vocabulary], in the place of each token."""
        return self._model(self._batch(prompt + tokens)).logits[0, len(prompt) - 1 : -1].log_softmax(-1)

    def _batch(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self._model.device)

    def check(self, records: list[dict]) -> None:
        """Assert that records have the model's tokens, and its log-probabilities if they have any."""
        for record in records:
            what = f"prompt of {len(record['prompt'])}, {record['cached']} cached"
            tokens, logprobs = self.greedy(record["prompt"], len(record["tokens"]))
            assert record["tokens"] == tokens, what
            if record["logprobs"]:
                assert record["logprobs"] == pytest.approx(logprobs, abs=1e-4, rel=0), what

    def check_fp8(self, records: list[dict]) -> None:
        """Assert that records have the model's tokens over a cache rounded to e4m3, up to near-ties.

        Prompts are shorter than a chunk, and cached prefixes were prompts of their own.
        """
        from tests.support.fp8_oracle import CACHES_LATENTS, Fp8Latents, assert_greedy

        for record in records:
            cached, new = record["cached"], len(record["prompt"]) - record["cached"]
            if not CACHES_LATENTS:  # no cache to round; wrong tokens are some 5 nats off
                logprobs = self.logprobs_of(record["prompt"], record["tokens"])
                deviations = [abs(a - b) for a, b in zip(record["logprobs"], logprobs, strict=True)]
                assert sum(deviations) / len(deviations) < 0.5
                continue
            # On a prefix, absorbed or expanded in one shot, new tokens see each other through the cache.
            passes = [(cached, True), (new, False)] if cached else [(new, True)]
            assert_greedy(record["tokens"], self._model, record["prompt"], passes, Fp8Latents("fp8_e4m3"))

    @torch.no_grad()
    def replace(self, weights: dict[str, torch.Tensor]) -> None:
        """Copy new values into parameters."""
        for name, weight in weights.items():
            self._model.get_parameter(name).copy_(weight)


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory, checkpoint):
    """A function that runs a scenario of scenarios.py in an engine and processes of its own.

    Its arguments are the name of the scenario, its parameters, and environment variables. It returns the
    result of the scenario, and the counts of attention paths over all processes. Its attribute ``output`` is
    what the engine of the last call has printed.
    """

    def run(scenario: str, *parameters: str, model: Path = checkpoint, **environment: str):
        from mla_backend import counters

        folder = tmp_path_factory.mktemp(scenario)
        result, counts = folder / "result.json", folder / "counts"
        environment["MLA_BACKEND_COUNTERS"] = str(counts)
        arguments = (scenario, str(model), str(result), *parameters)
        # A fork cannot use a GPU, `tokens` spawns processes as SGLang does, and renaming precedes imports.
        if torch.cuda.is_available() or scenario == "tokens" or "RENAMED_IN_SGLANG" in environment:
            run.output = run_script(HERE / "scenarios.py", *arguments, **environment)
        else:
            run.output = processes.run_forked(scenarios.run, *arguments, **environment)
        return json.loads(result.read_text()), counters.read_folder(counts)

    return run


@pytest.fixture
def run_pair(run_engine, tmp_path):
    """A function that runs a prefill server and a decode server at the same time.

    Its arguments are settings of both servers, those of one under its role, and what `run_engine` takes. It
    returns the result of the decode server, and the counts of the prefill server and of the decode server.
    """

    def run(settings, **others):
        if importlib.util.find_spec("nixl") is None:
            skip_without("nixl", "caches are transferred by NIXL, which is not installed")
        place = dict(disaggregation_bootstrap_port=free_port(), disaggregation_transfer_backend="nixl")

        def serve(role):
            return run_engine("server_of_pair", role, str(tmp_path), json.dumps(place | settings), **others)

        with ThreadPoolExecutor() as executor, processes.shown_if_interrupted():
            (_, prefill), (result, decode) = executor.map(serve, ("prefill", "decode"))
        return result, prefill, decode

    return run


@pytest.fixture(scope="module")
def one_rank():
    """The sizes of parallel groups, which the mock runner of SGLang's attention kit does not set."""
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(attn_tp_size=1, attn_cp_size=1, attn_dcp_size=1, attn_dcp_rank=0):
        yield
