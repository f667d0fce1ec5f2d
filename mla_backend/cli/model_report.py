"""`mla-backend doctor MODEL`: what a user wants to know before serving a model, from its config alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from mla_backend import jit, kernels, settings
from mla_backend.batch import TableKind
from mla_backend.cache_format import E4M3, RECORD_656, CacheFormat, cache_format
from mla_backend.checkpoint import Checkpoint
from mla_backend.cli.console import Report
from mla_backend.cli.start_lines import start_lines, why_weights_do_not_fit
from mla_backend.engines import FIRST_INDEXER_CAPABILITY, SGLANG, VLLM
from mla_backend.errors import InvalidInputError
from mla_backend.geometry import MLAGeometry
from mla_backend.kernels import head_product
from mla_backend.kernels.portable import has_only_99k
from mla_backend.models import Support
from mla_backend.policy import Policy, Rates, default_rates_and_origin, rates_of
from mla_backend.spec import DecoderSpec

_GIB = 1 << 30
_LARGEST_MEMORY = 1_000_000  # GiB


@dataclass(frozen=True)
class Target:
    """Where a model is to be served.

    Attributes:
        capability: compute capability of the GPU; None is the CPU.
        is_here: whether this machine has such a GPU.
        rates: achieved on that GPU or CPU.
        rates_origin: where the rates come from, in words.
        tensor_parallel_size: GPUs that split the heads.
        decode_context_parallel_size: GPUs, of these, that divide the tokens of the cache.
        page_size: tokens in a page.
        memory: bytes of one GPU for weights and cache; None if unknown.
    """

    capability: tuple[int, int] | None
    is_here: bool
    rates: Rates
    rates_origin: str
    tensor_parallel_size: int
    decode_context_parallel_size: int
    page_size: int
    memory: float | None

    @classmethod
    def find(
        cls,
        arch: str | None,
        tensor_parallel_size: int,
        decode_context_parallel_size: int,
        page_size: int,
        gpu_memory: float | None,
    ) -> Target:
        """The GPU of ``arch``, else the first one of this machine, else its CPU.

        Args:
            gpu_memory: GiB of one GPU; None means what is free on this machine's GPU.

        Raises:
            InvalidInputError: ``arch`` is not an architecture, MLA_BACKEND_RATES names a file that does not
                fit, the GPUs cannot divide the cache, or ``gpu_memory`` is not positive.
        """
        if tensor_parallel_size % decode_context_parallel_size:
            raise InvalidInputError(
                f"--decode-context-parallel-size {decode_context_parallel_size} does not divide "
                f"--tensor-parallel-size {tensor_parallel_size}"
            )
        if gpu_memory is not None and not 0 < gpu_memory < _LARGEST_MEMORY:
            raise InvalidInputError(
                f"--gpu-memory must be a positive number of GiB below {_LARGEST_MEMORY:,}, not {gpu_memory}"
            )
        memory = gpu_memory * _GIB if gpu_memory else None
        capability = jit.capability_of(arch) if arch else None
        here = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
        is_here = here is not None and capability in (None, here)
        if is_here:
            capability = here
            memory = memory or torch.cuda.mem_get_info(0)[0]
            rates, origin = default_rates_and_origin("cuda:0")
        elif capability is not None:
            rates, origin = rates_of(capability)
        else:
            rates, origin = default_rates_and_origin("cpu")
        sizes = (tensor_parallel_size, decode_context_parallel_size, page_size)
        return cls(capability, is_here, rates, origin, *sizes, memory)

    @property
    def device_type(self) -> str:
        """As torch names it."""
        return "cuda" if self.capability else "cpu"

    def __str__(self) -> str:
        return f"sm_{jit.arch_name(self.capability)}" if self.capability else "the CPU"


def report(out: Report, model: str, checkpoint: Checkpoint, target: Target) -> bool:
    """Report on the model that the user named ``model``. Returns whether mla-backend serves it on the target.

    Raises:
        InvalidInputError: the heads cannot be split over the GPUs.
    """
    geometry = checkpoint.geometry.per_rank(target.tensor_parallel_size)
    title = f"{checkpoint.model_type} ({checkpoint.config_path})"
    out.section(title, _geometry(checkpoint, geometry))
    out.section("latent cache", _cache(checkpoint, target))
    why_not, rows = _attention(checkpoint, geometry, target)
    out.section("attention", rows)
    out.section("engines", _engines(checkpoint))
    why_not = why_not or why_weights_do_not_fit(checkpoint, target)
    not_in = _reasons_against_engines(checkpoint, target)
    if not_in.keys() == {VLLM.name, SGLANG.name}:
        why_not = why_not or "; ".join(not_in.values())
    if why_not is None:
        out.section("start it by", start_lines(model, checkpoint, target, not_in))
    reservation = "" if why_not else "; ".join((_reservation(checkpoint, target), *not_in.values()))
    verdict = f"not served on {target}: {why_not}" if why_not else f"served on {target}{reservation}"
    color = "red" if why_not else "yellow" if reservation else "green"
    out.verdict(why_not is None, verdict, color)
    return why_not is None


def _reservation(checkpoint: Checkpoint, target: Target) -> str:
    """What to know before choosing this backend for a model or on a GPU; empty if there is nothing."""
    known = ""
    if target.capability is not None and target.capability[0] != 9:
        known = " by the portable kernel, which has run on Hopper only"
        if target.capability[0] == 10:
            known += "; your engine has special kernels for this GPU"
    for name, support in _support(checkpoint).items():
        if support.on(target.device_type).is_served and support.options:
            known += f"; in {name} with {support.options}"
    return known


def _support(checkpoint: Checkpoint) -> dict[str, Support]:
    """How far each engine serves models of the checkpoint's family; empty if that is not known."""
    family = checkpoint.family
    return {} if family is None else {VLLM.name: family.vllm, SGLANG.name: family.sglang}


def _reasons_against_engines(checkpoint: Checkpoint, target: Target) -> dict[str, str]:
    """Why engines cannot serve the model on the target, by the names of those that cannot."""
    reasons = {}
    of_vllm = 64 if checkpoint.is_sparse else 16
    if target.page_size % of_vllm:
        reasons[VLLM.name] = f"not in vLLM, whose --block-size must be a multiple of {of_vllm}"
    if checkpoint.says_no_rotation and (columns := checkpoint.geometry.qk_rope_head_dim):
        reasons[SGLANG.name] = (
            f"not in SGLang, which with use_mla_nope makes a cache without the {columns} columns of the "
            "layers' qk_rope_head_dim"
        )
    for name, support in _support(checkpoint).items():
        if not support.on(target.device_type).is_served:
            reasons.setdefault(name, f"not in {name}, because {support.reason}")
    return reasons


def _engines(checkpoint: Checkpoint) -> Iterable[tuple[str, str]]:
    """What is known of the model's family in each engine."""
    family = checkpoint.family
    if family is None:
        yield "family", "none of the table of models (docs/models.md): its config alone is judged"
        return
    yield "family", family.name + f": {family.special}" * bool(family.special)
    for name, support in _support(checkpoint).items():
        yield name, str(support)


def _geometry(checkpoint: Checkpoint, per_gpu: MLAGeometry) -> Iterable[tuple[str, str]]:
    whole = checkpoint.geometry
    mtp = checkpoint.num_mtp_layers
    further = (
        f", and {mtp} more for multi-token prediction (only speculative decoding runs it)" if mtp else ""
    )
    yield "layers", f"{checkpoint.num_layers} with latent attention{further}"
    split = f", {per_gpu.num_heads} per GPU" if per_gpu.num_heads != whole.num_heads else ""
    yield "heads", f"{whole.num_heads}{split}"
    yield "kv_lora_rank", f"{whole.kv_lora_rank}: the compressed keys and values of a token, for all heads"
    yield "qk_rope_head_dim", f"{whole.qk_rope_head_dim}: the rotary key of a token, for all heads"
    yield "qk_nope_head_dim", f"{whole.qk_nope_head_dim}: the rest of a head's key, expanded"
    yield "v_head_dim", f"{whole.v_head_dim}: a head's value, expanded"
    yield (
        "q_lora_rank",
        str(whole.q_lora_rank or f"none: queries come from the hidden state ({whole.hidden_size})"),
    )


def _cache(checkpoint: Checkpoint, target: Target) -> Iterable[tuple[str, str]]:
    geometry, default = checkpoint.geometry, checkpoint.kv_format
    in_sglang = " (records in SGLang)" if checkpoint.is_sparse and default is E4M3 else ""
    yield "format", f"{default.name}{in_sglang}{', as the checkpoint asks' * default.is_quantized}"
    indexers = (
        f", {checkpoint.indexer_bytes} per indexer ({checkpoint.num_indexers} of them)"
        if checkpoint.is_sparse
        else ""
    )
    yield (
        "bytes per token",
        f"{checkpoint.latent_bytes(default):,} per layer ({geometry.kv_lora_rank} + "
        f"{geometry.qk_rope_head_dim} values in {default.name}){indexers}, "
        f"{checkpoint.cache_bytes(default):,} in all layers",
    )
    yield "tokens that fit", _tokens_that_fit(checkpoint, default, target)
    for option, other in _other_formats(checkpoint):
        yield option, _tokens_that_fit(checkpoint, other, target)
    shards = target.decode_context_parallel_size
    if shards > 1:
        yield "per GPU", f"one in {shards} tokens of each request, for the heads of {shards} GPUs"
    elif target.tensor_parallel_size > 1:
        yield "per GPU", "all of it: the heads of every GPU read the same latents"


def _other_formats(checkpoint: Checkpoint) -> Iterable[tuple[str, CacheFormat]]:
    """Other formats, each with the option that selects it. In sparse layers, SGLang takes fp8_e4m3 to mean
    records."""
    dimensions = (checkpoint.geometry.kv_lora_rank, checkpoint.geometry.qk_rope_head_dim)
    if checkpoint.kv_format.is_quantized:
        yield f"--kv-cache-dtype {cache_format(checkpoint.dtype).name}", cache_format(checkpoint.dtype)
    else:
        yield f"--kv-cache-dtype {E4M3.name}{' (vLLM)' * checkpoint.is_sparse}", E4M3
    if dimensions == RECORD_656.dimensions and checkpoint.dtype is RECORD_656.rope:
        in_sglang = f", {E4M3.name} (SGLang)" if checkpoint.is_sparse else ""
        yield f"--kv-cache-dtype {RECORD_656.name} (vLLM){in_sglang}", RECORD_656


def _tokens_that_fit(checkpoint: Checkpoint, kv_format: CacheFormat, target: Target) -> str:
    per_token = checkpoint.cache_bytes(kv_format)
    if target.memory is None:
        per_gib = target.decode_context_parallel_size * _GIB // per_token
        return f"{per_gib:,} per GiB; for a GPU, give its memory by --gpu-memory"
    weights = (checkpoint.weight_bytes or 0) / target.tensor_parallel_size
    left = target.memory - weights
    sizes = f"{target.memory / _GIB:.1f} GiB less {weights / _GIB:.1f} GiB of weights"
    if left <= 0:
        return f"none: {sizes} leaves nothing; use more GPUs (--tensor-parallel-size)"
    if checkpoint.weight_bytes is None:
        sizes = f"{target.memory / _GIB:.1f} GiB, without weights, which are not beside the config"
    tokens = int(left // per_token) * target.decode_context_parallel_size
    return f"{tokens:,} ({sizes}; activations and CUDA graphs need some, too)"


def _attention(
    checkpoint: Checkpoint, geometry: MLAGeometry, target: Target
) -> tuple[str | None, list[tuple[str, str]]]:
    """Why the model is not served on the target, or None; and what would run there."""
    rows = []
    why_not = _why_not_with_any_kernel(checkpoint, target)
    if target.capability is None:
        rows.append(("kernels", "none on the CPU: plain torch; for a GPU name its arch, such as --arch 90a"))
    elif why_not is None:
        why_not, kernel_rows = _kernels(checkpoint, geometry, target, target.capability)
        rows += kernel_rows
    if checkpoint.is_sparse:
        rows.append(("keys", "those that the engine's indexer chooses for each token (index_topk)"))
        return why_not, rows
    limit = Policy(geometry, target.rates).absorbed_query_limit()
    rows.append(
        (
            "choice",
            f"requests with at most {limit:,} new tokens on a long prefix use absorbed attention, longer "
            f"ones vanilla attention, which expands the latents (by the {target.rates_origin})",
        )
    )
    return why_not, rows


def _why_not_with_any_kernel(checkpoint: Checkpoint, target: Target) -> str | None:
    if checkpoint.has_sinks and not checkpoint.is_sparse:
        return "its attention has sinks (learnable_sink in its config) and is not sparse: use another backend"
    if checkpoint.has_windows:
        return "some of its layers have sliding windows (layer_types in its config): use another backend"
    return _why_not_sparse(target) if checkpoint.is_sparse else None


def _why_not_sparse(target: Target) -> str | None:
    """Why engines cannot serve sparse attention on the target, or None."""
    if target.capability is None or target.capability < FIRST_INDEXER_CAPABILITY:
        return (
            "its attention is sparse (index_topk in its config), and the engines' indexers need a GPU of "
            "compute capability 9.0 or newer" + ("" if target.capability else "; name it, such as --arch 90a")
        )
    if target.decode_context_parallel_size > 1:
        return "sparse attention cannot divide the cache: leave out --decode-context-parallel-size"
    return None


def _kernels(
    checkpoint: Checkpoint, geometry: MLAGeometry, target: Target, capability: tuple[int, int]
) -> tuple[str | None, list[tuple[str, str]]]:
    spec = DecoderSpec(
        num_heads=geometry.num_heads * target.decode_context_parallel_size,
        kv_lora_rank=geometry.kv_lora_rank,
        qk_rope_head_dim=geometry.qk_rope_head_dim,
        dtype=checkpoint.dtype,
        kv_dtype=checkpoint.kv_format.name,
        page_size=target.page_size,
        table_kind=TableKind.LIST if checkpoint.is_sparse else TableKind.BLOCK,
        device=torch.device("cuda"),
        max_batch=1,
        max_query_len=1,
        batch_invariant=False,
    )
    name, reason = kernels.choose(spec, capability)
    if name is None:
        return reason, [("kernels", f"none: {reason}")]
    memory = ", within 99 KB of shared memory" * has_only_99k(jit.arch_name(capability))
    rows = [("kernels", f"{name} ({reason}), pages of {target.page_size} tokens{memory}")]
    of_steps = kernels.variants_of(spec, capability, with_append=not checkpoint.is_sparse)
    most, in_one = _most_absorbed(checkpoint, geometry, target)
    of_all = kernels.variants_of(replace(spec, max_query_len=most), capability)
    why_not = jit.why_unavailable([*of_steps, *of_all])
    missing = "not built yet" if why_not else "not built yet: an engine's start builds it"
    rows += _states("", of_steps, missing)
    more = [variant for variant in of_all if variant not in of_steps]
    rows += _states(f"up to {most:,} tokens", more, missing + in_one)
    rows += _drafts(checkpoint, spec)
    rows += _products_in_vllm(checkpoint, geometry, target, capability)
    if target.is_here:
        return why_not, rows
    if why_not:
        rows.append(("", f"this machine cannot build what is missing: {why_not}"))
    return None, rows


def _most_absorbed(checkpoint: Checkpoint, geometry: MLAGeometry, target: Target) -> tuple[int, str]:
    """The most new tokens of a request that an engine has kernels of absorbed attention for; and in brackets
    which engine, if not all that serve the model."""
    if checkpoint.is_sparse:  # each token is a request of its own
        return 1, ""
    not_in = _reasons_against_engines(checkpoint, target)
    serving = [engine for engine in (VLLM, SGLANG) if engine.name not in not_in]
    absorbing = [e.name for e in serving if e.absorbs_prompts(target.decode_context_parallel_size)]
    limit = Policy(geometry, target.rates).absorbed_query_limit() if absorbing else 1
    in_one = f" (in {absorbing[0]})" if 0 < len(absorbing) < len(serving) else ""
    return max(limit, 1 + checkpoint.num_mtp_layers), in_one


def _states(title: str, variants: Iterable[jit.KernelVariant], missing: str) -> list[tuple[str, str]]:
    """A row for each kernel: whether it is built; ``missing`` if not."""
    states = [f"{variant}: {'built' if jit.find_entry(variant) else missing}" for variant in variants]
    return [("" if number else title, state) for number, state in enumerate(states)]


def _drafts(checkpoint: Checkpoint, spec: DecoderSpec) -> Iterable[tuple[str, str]]:
    """What verifies drafts of multi-token prediction."""
    if not checkpoint.num_mtp_layers:
        return
    query_len = 1 + checkpoint.num_mtp_layers
    rows = f" ({query_len} tokens, so {query_len * spec.num_heads} query rows)"
    yield "with MTP", "the same kernels verify drafts" + rows * (not checkpoint.is_sparse)


def _products_in_vllm(
    checkpoint: Checkpoint, geometry: MLAGeometry, target: Target, capability: tuple[int, int]
) -> list[tuple[str, str]]:
    """The kernels by which vLLM's layers multiply by W_UK and W_UV. A start does without those that it cannot
    build."""
    if (
        VLLM.name in _reasons_against_engines(checkpoint, target)
        or checkpoint.is_sparse
        or target.decode_context_parallel_size > 1
        or not settings.is_on("MLA_BACKEND_AROUND_ATTENTION")
    ):
        return []
    weights = head_product.weights_in_vllm(geometry, checkpoint.dtype)
    if any(head_product.unsupported(one, capability) for one in weights):
        return []
    if checkpoint.is_quantized:
        which = "kernels of products with W_UK and W_UV, for the layout to which vLLM dequantizes kv_b_proj"
        return [("in vLLM", which)]
    return _states("in vLLM", map(head_product.variant, weights), "not built yet")
