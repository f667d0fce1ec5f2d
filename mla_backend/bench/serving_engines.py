"""The engines that the serving benchmark drives, behind one interface.

A driver runs in a process of its own. It imports its engine when it is constructed, not before.
"""

from __future__ import annotations

import contextlib
import json
import os
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
    """Requests of a batch, and prompt tokens of each."""

    batch: int
    context: int

    @staticmethod
    def parse(text: str) -> Shape:
        """Read `BATCHxCONTEXT`, such as 16x2048.

        Raises:
            InvalidInputError: ``text`` is not such a shape.
        """
        numbers = text.split("x")
        if len(numbers) != 2 or not all(number.isdecimal() and int(number) for number in numbers):
            raise InvalidInputError(f"{text!r} is not a valid shape: write BATCHxCONTEXT, such as 16x2048")
        return Shape(*map(int, numbers))


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
    """

    engine: str
    model: str
    shapes: list[Shape]
    new_tokens: int = 129
    rounds: int = 1
    together: int = 1
    dtype: str = "bfloat16"
    engine_options: dict[str, Any] = field(default_factory=dict)

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
        backend: the engine's name of the backend; after a colon the format of the cache, if not the default.
        traces: a folder for the traces of the engine's profiler.

    Attributes:
        version: the engine's version.
        cache_tokens: tokens that fit the engine's cache; None if it does not tell.
        vocabulary: the number of token ids.
        traces: as given.
    """

    version: str
    cache_tokens: int | None = None
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
        name, _, kv_cache_dtype = backend.partition(":")
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
            "attention_backend": name,
        }
        if kv_cache_dtype:
            options["kv_cache_dtype"] = kv_cache_dtype
        if on_gpu:
            options["profiler_config"] = {
                "profiler": "torch",
                "torch_profiler_dir": str(traces),
                "torch_profiler_with_stack": False,
            }
        self._llm = vllm.LLM(settings.model, **(options | settings.engine_options))
        self.vocabulary = self._llm.model_config.get_vocab_size()
        with contextlib.suppress(AttributeError, TypeError):
            cache = self._llm.llm_engine.vllm_config.cache_config
            self.cache_tokens = cache.num_gpu_blocks * cache.block_size

    @staticmethod
    def default_backends(on_gpu: bool) -> list[str]:
        from mla_backend_vllm import selection_name

        return [selection_name(), *(["FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA"] if on_gpu else ["CPU_MLA"])]

    @staticmethod
    def is_ours(backend: str) -> bool:
        return backend.partition(":")[0] in ("CUSTOM", "MLA_BACKEND")

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
    """SGLang's offline engine, with tokenizer, scheduler and detokenizer processes as in a server."""

    def __init__(self, settings: Settings, backend: str, traces: Path):
        import sglang

        self.version = sglang.__version__
        self.traces = traces
        names, _, kv_cache_dtype = backend.partition(":")
        decode, _, prefill = names.partition("/")
        options = {
            "dtype": settings.dtype,
            "context_length": settings.max_tokens + 8,  # of which SGLang reserves six
            "max_running_requests": settings.max_batch,
            "page_size": 64,
            "attention_backend": decode,
            "prefill_attention_backend": prefill or None,
            "log_level": "warning",
        }
        if kv_cache_dtype:
            options["kv_cache_dtype"] = kv_cache_dtype
        self._engine = sglang.Engine(model_path=settings.model, **(options | settings.engine_options))
        self.vocabulary = json.loads((Path(settings.model) / "config.json").read_text())["vocab_size"]
        self.cache_tokens = self._engine.get_server_info().get("max_total_num_tokens")

    @staticmethod
    def default_backends(on_gpu: bool) -> list[str]:
        return ["mla_backend", *(["flashmla", "triton", "flashinfer"] if on_gpu else ["triton"])]

    @staticmethod
    def is_ours(backend: str) -> bool:
        return "mla_backend" in backend.partition(":")[0].split("/")

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
