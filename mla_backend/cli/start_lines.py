"""How to start each engine with a model, for `mla-backend doctor MODEL`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from packaging.version import Version

from mla_backend.cache_format import E4M3
from mla_backend.engines import SGLANG, VLLM

if TYPE_CHECKING:
    from mla_backend.checkpoint import Checkpoint
    from mla_backend.cli.model_report import Target

_GIB = 1 << 30
_FIRST_WITH_NAMES = Version("0.32")  # older versions of vLLM have one name for all plugins' backends


def why_weights_do_not_fit(checkpoint: Checkpoint, target: Target) -> str | None:
    """Why the weights do not fit into a GPU's memory, or None if they do or their size is not known."""
    if target.memory is None or checkpoint.weight_bytes is None:
        return None
    weights = checkpoint.weight_bytes / target.tensor_parallel_size
    if weights < target.memory:
        return None
    least = checkpoint.weight_bytes / target.memory
    gpus = next((n for n in (2, 4, 8, 16, 32, 64) if n > least), None)
    remedy = f"--tensor-parallel-size {gpus} or more" if gpus else "more GPUs"
    memory = f"{target.memory / _GIB:.0f} GiB of a GPU's memory"
    return f"{weights / _GIB:.0f} GiB of weights do not fit into {memory}: use {remedy}"


def start_lines(
    model: str, checkpoint: Checkpoint, target: Target, not_in: Collection[str]
) -> Iterator[tuple[str, str]]:
    """(engine or option, command line) of those that serve the model.

    Args:
        model: as the user names it.
        not_in: the names of engines that do not serve it. On a CPU, SGLang serves in tests only.
    """
    if target.capability is None:
        not_in = {*not_in, SGLANG.name}
    if VLLM.name not in not_in:
        yield VLLM.name, shlex.join(["vllm", "serve", model, *_vllm_options(checkpoint, target)])
    if SGLANG.name not in not_in:
        command = ["python", "-m", "sglang.launch_server", "--model-path", model]
        switch = "MLA_BACKEND_DSA=1 " if checkpoint.is_sparse else ""
        yield SGLANG.name, switch + shlex.join([*command, *_sglang_options(checkpoint, target)])
    yield from _further_options(checkpoint, target, not_in)


def _vllm_options(checkpoint: Checkpoint, target: Target) -> Iterable[str]:
    yield from ("--attention-backend", _name_in_vllm())
    if checkpoint.family is not None:
        yield from checkpoint.family.vllm.options.split()
    yield from _sizes(target, "--tensor-parallel-size", "--decode-context-parallel-size")
    if target.page_size != 64:
        yield from ("--block-size", str(target.page_size))


def _name_in_vllm() -> str:
    """The backend's name in the vLLM that is installed here, or in the newest."""
    installed = [Version(version) for _, version in VLLM.installed()]
    return "CUSTOM" if installed and installed[0] < _FIRST_WITH_NAMES else "MLA_BACKEND"


def _sglang_options(checkpoint: Checkpoint, target: Target) -> Iterable[str]:
    if not checkpoint.is_sparse:
        yield from ("--attention-backend", "mla_backend", "--page-size", str(target.page_size))
    elif not checkpoint.has_sinks:  # with which SGLang allows one sub-backend only, its default
        yield from ("--dsa-decode-backend", "fa3")
    if checkpoint.family is not None:
        yield from checkpoint.family.sglang.options.split()
    yield from _sizes(target, "--tp-size", "--dcp-size")


def _sizes(target: Target, tensor: str, context: str) -> Iterable[str]:
    for option, size in (
        (tensor, target.tensor_parallel_size),
        (context, target.decode_context_parallel_size),
    ):
        if size > 1:
            yield from (option, str(size))


def _further_options(
    checkpoint: Checkpoint, target: Target, not_in: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Options that many users add: an fp8 cache, and drafts."""
    if checkpoint.kv_format is not E4M3 and not (checkpoint.is_sparse and VLLM.name in not_in):
        # SGLang's sparse layers need further options with it, which docs/sglang.md explains.
        only = f" in {VLLM.name}" * checkpoint.is_sparse
        yield f"fp8 cache{only}", "add --kv-cache-dtype fp8_e4m3"
    if not checkpoint.num_mtp_layers:
        return
    if VLLM.name not in not_in:
        drafts = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": _name_in_vllm()}
        yield f"MTP in {VLLM.name}", f"add --speculative-config '{json.dumps(drafts)}'"
    if SGLANG.name not in not_in and target.decode_context_parallel_size == 1:
        yield (
            f"MTP in {SGLANG.name}",
            "add --speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 2",
        )
