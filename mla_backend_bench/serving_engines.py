"""The engines that the serving benchmark drives, behind one interface.

Each driver runs in a separate process. It imports its engine when it is constructed, not before.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mla_backend.errors import InvalidInputError

Prompts = list[list[int]]
"""Token ids of each request."""

# Added to the logit of the one token that a request may generate. vLLM accepts no larger value.
_LOGIT_BIAS = 100.0


class Shape(NamedTuple):
    """Requests of a batch, prompt tokens of each, and how many of these the prefix cache holds beforehand."""

    batch: int
    context: int
    cached: int = 0

    @staticmethod
    def parse(text: str) -> Shape:
        """Read `BATCHxCONTEXT`, such as 16x2048, or `BATCHxCACHED+NEW`, such as 1x8192+128.

        Raises:
            InvalidInputError: ``text`` is not such a shape.
        """
        match = re.fullmatch(r"([0-9]+)x([0-9]+)(?:\+([0-9]+))?", text)
        if match is None or any(number is not None and not int(number) for number in match.groups()):
            raise InvalidInputError(
                f"{text!r} is not a valid shape: write BATCHxCONTEXT, such as 16x2048, or BATCHxCACHED+NEW, "
                "such as 1x8192+128"
            )
        batch, tokens, new = int(match[1]), int(match[2]), int(match[3] or 0)
        return Shape(batch, tokens + new, tokens if new else 0)


class Backend(NamedTuple):
    """A backend, and what it alone has.

    Attributes:
        options: further arguments of the engine's constructor.
        environment: environment variables.
    """

    name: str
    options: dict[str, Any]
    environment: dict[str, str]

    @property
    def label(self) -> str:
        """The name, and the environment variables."""
        return " ".join((self.name, *(f"{name}={value}" for name, value in self.environment.items())))

    @staticmethod
    def parse(text: str) -> Backend:
        """Read `NAME` or `NAME JSON`, such as `MLA_BACKEND {"decode_context_parallel_size": 2}`. The object's
        "environment" is an object of environment variables.

        Raises:
            InvalidInputError: what follows the name is no JSON object, or "environment" none of strings.
        """
        name, _, json_text = text.partition(" ")
        try:
            options = json.loads(json_text or "{}")
        except ValueError:
            options = None
        if not isinstance(options, dict):
            raise InvalidInputError(f"{text!r} is not a backend: write NAME, or NAME and a JSON object")
        environment = options.pop("environment", {})
        if not isinstance(environment, dict) or not all(isinstance(v, str) for v in environment.values()):
            raise InvalidInputError(f"the environment in {text!r} is not a JSON object of strings")
        return Backend(name, options, environment)


@dataclass(frozen=True)
class Settings:
    """What the engines of one run have in common.

    Attributes:
        engine: a key of `DRIVERS`.
        model: a path.
        shapes: measured in this order.
        new_tokens: tokens that each request generates.
        rounds: how often each backend measures each shape; the median counts.
        together: engines that run at the same time.
        dtype: passed to the engine.
        engine_options: further arguments of the engine's constructor.
        profile: also time by the engine's profiler, on a GPU.
        layers: what `layer.measure` measures is measured instead, of a model with so many layers, if not 0.
    """

    engine: str
    model: str
    shapes: list[Shape]
    new_tokens: int = 129
    rounds: int = 1
    together: int = 1
    dtype: str = "bfloat16"
    engine_options: dict[str, Any] = field(default_factory=dict)
    profile: bool = True
    layers: int = 0

    @property
    def max_batch(self) -> int:
        return max(shape.batch for shape in self.shapes)

    @property
    def max_tokens(self) -> int:
        """Prompt and generated tokens of the longest request."""
        return max(shape.context for shape in self.shapes) + self.new_tokens


class Driver(ABC):
    """An engine with one attention backend.

    Args:
        backend: the engine's name of the backend.
        traces: a folder for the traces of the engine's profiler.

    Attributes:
        version: the engine's version.
        setup: tp, the GPUs that divide the heads; dcp, how many of these divide the tokens of a request;
            interleave, the length of a run of tokens on one GPU; kv_dtype, the dtype of the cache;
            cache_tokens, the tokens that fit it.
        vocabulary: the number of token ids.
        traces: as given.
    """

    version: str
    setup: dict[str, int | str]
    vocabulary: int
    traces: Path

    @abstractmethod
    def __init__(self, settings: Settings, backend: str, traces: Path): ...

    @staticmethod
    @abstractmethod
    def default_backends(on_gpu: bool) -> list[str]:
        """Ours, and those of the engine's own that serve MLA here."""

    @staticmethod
    @abstractmethod
    def is_ours(backend: str) -> bool:
        """Whether a backend's name is this package's."""

    @abstractmethod
    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        """Generate exactly num_tokens tokens per request, each the first token of the request's prompt."""

    @abstractmethod
    def start_profile(self) -> None: ...

    @abstractmethod
    def stop_profile(self) -> None:
        """Returns when the traces are written."""


class VllmDriver(Driver):
    """vLLM's offline engine, whose scheduler runs in a process of its own, as in a server."""

    def __init__(self, settings: Settings, backend: str, traces: Path):
        # Otherwise is_available would start CUDA, but vLLM forks its scheduler.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        import vllm

        self._vllm = vllm
        self.version = vllm.__version__
        self.traces = traces
        options: dict[str, Any] = {
            "dtype": settings.dtype,
            "max_model_len": settings.max_tokens,
            "max_num_seqs": settings.max_batch,
            "attention_backend": backend,
        }
        if on_gpu:
            options["profiler_config"] = {
                "profiler": "torch",
                "torch_profiler_dir": str(traces),
                "torch_profiler_with_stack": False,
            }
        self._llm = vllm.LLM(settings.model, **(options | settings.engine_options))
        self.vocabulary = self._llm.model_config.get_vocab_size()
        config = self._llm.llm_engine.vllm_config
        dcp = config.parallel_config.decode_context_parallel_size
        self.setup = {
            "tp": config.parallel_config.tensor_parallel_size,
            "dcp": dcp,
            "interleave": config.parallel_config.cp_kv_cache_interleave_size,
            "kv_dtype": config.cache_config.cache_dtype,
            "cache_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size * dcp,
        }

    @staticmethod
    def default_backends(on_gpu: bool) -> list[str]:
        from mla_backend_vllm import selection_name

        return [selection_name(), *(["FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"] if on_gpu else ["CPU_MLA"])]

    @staticmethod
    def is_ours(backend: str) -> bool:
        return backend in ("CUSTOM", "MLA_BACKEND")

    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        common = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "detokenize": False}
        sampling = [
            self._vllm.SamplingParams(**common, logit_bias={prompt[0]: _LOGIT_BIAS}) for prompt in prompts
        ]
        self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    def start_profile(self) -> None:
        self._llm.start_profile()

    def stop_profile(self) -> None:
        self._llm.stop_profile()


class SglangDriver(Driver):
    """SGLang's offline engine, with tokenizer, scheduler and detokenizer processes as in a server.

    "mla_backend_dsa" is SGLang's own backend "dsa" for sparse attention, with our kernels in place of fa3.
    """

    def __init__(self, settings: Settings, backend: str, traces: Path):
        import sglang

        self.version = sglang.__version__
        self.traces = traces
        decode, _, prefill = backend.partition("/")
        options: dict[str, Any] = {
            "dtype": settings.dtype,
            "context_length": settings.max_tokens + 8,  # of which SGLang reserves six
            "max_running_requests": settings.max_batch,
            "page_size": 64,
            "attention_backend": decode,
            "prefill_attention_backend": prefill or None,
            "log_level": "warning",
        }
        if decode == "mla_backend_dsa":
            os.environ["MLA_BACKEND_DSA"] = "1"
            ours = {"dsa_decode_backend": "fa3", "dsa_prefill_backend": "fa3"}
            options |= {"attention_backend": "dsa"} | ours
        options |= settings.engine_options
        self._engine = sglang.Engine(model_path=settings.model, **options)
        self.setup = {
            "tp": options.get("tp_size", 1),
            "dcp": options.get("dcp_size", 1),
            "interleave": 1,
            "kv_dtype": options.get("kv_cache_dtype", "auto"),
            "cache_tokens": self._engine.get_server_info()["max_total_num_tokens"],
        }
        self.vocabulary = json.loads((Path(settings.model) / "config.json").read_text())["vocab_size"]

    @staticmethod
    def default_backends(on_gpu: bool) -> list[str]:
        return ["mla_backend", *(["flashmla", "triton", "flashinfer"] if on_gpu else ["triton"])]

    @staticmethod
    def is_ours(backend: str) -> bool:
        return not {"mla_backend", "mla_backend_dsa"}.isdisjoint(backend.split("/"))

    def generate(self, prompts: Prompts, num_tokens: int) -> None:
        common = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        sampling = [common | {"logit_bias": {str(prompt[0]): _LOGIT_BIAS}} for prompt in prompts]
        self._engine.generate(input_ids=prompts, sampling_params=sampling)

    def start_profile(self) -> None:
        self._engine.start_profile(output_dir=str(self.traces), activities=["GPU"], with_stack=False)

    def stop_profile(self) -> None:
        self._engine.stop_profile()


DRIVERS: dict[str, type[Driver]] = {"vllm": VllmDriver, "sglang": SglangDriver}
"""By the name of the engine's module."""
