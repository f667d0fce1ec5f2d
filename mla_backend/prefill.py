"""Vanilla attention on the fastest library that is available.

That is the first of these that serves the device, the dtype and the head dimensions:

- FlashAttention-3 on Hopper: its own package, or the copy in a serving engine.
- FlashInfer's ragged prefill on Hopper, with DeepSeek's dimensions, for callers that keep its plans.
- cuDNN, through torch, on Hopper: for one long request that is alone in a causal call (`libraries.is_alone`).
- Our kernel (`csrc/prefill/kernel.cuh`) where it is faster than FlashAttention-2 (`_ours_is_faster`).
- FlashAttention-2, which torch contains, from Ampere on. Values are padded to the width of the keys.
- Our kernel from Ampere on, with dimensions that FlashAttention-2 refuses.
- Plain torch (:func:`mla_backend.torch_attention.prefill_attention`) anywhere else.
"""

from __future__ import annotations

import functools
import logging
import numbers
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from mla_backend import jit, torch_attention
from mla_backend import prefill_libraries as libraries
from mla_backend.batch import value_range
from mla_backend.checks import check_operand, check_tensors
from mla_backend.device import with_index
from mla_backend.errors import InvalidInputError, KernelBuildError, UnsupportedError
from mla_backend.kernels import merge
from mla_backend.kernels import prefill as kernels
from mla_backend.prefill_libraries import Call, Plans

logger = logging.getLogger(__name__)

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_DEEPSEEK_DIMS = (192, 128)

_TORCH_NAME = "torch"


class _Use(NamedTuple):
    """What the choice of a library depends on."""

    device: torch.device
    dtype: torch.dtype
    d_qk: int
    d_v: int
    with_plans: bool
    batch_invariant: bool
    alone: bool = False
    """Whether the call is one long request's attention to its own tokens: `libraries.is_alone`."""

    @property
    def operands(self) -> tuple[torch.device, torch.dtype, int, int]:
        """What a library may turn out not to serve, and a kernel of ours is built for."""
        return self[:4]


@torch.no_grad()
def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    softmax_scale: float,
    causal: bool,
    return_lse: bool = False,
    plans: Plans | None = None,
    batch_invariant: bool = False,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Vanilla attention over ragged requests, for new tokens (causal) or a chunk of context (not causal).

    For inference: results have no gradients.

    Args:
        q: [T, H, d_qk].
        k: [S, H, d_qk].
        v: [S, H, d_v]; may be strided, the last dimension contiguous. A value that is NaN or infinite can
            turn all results of its request into NaN, even for queries that do not see it; where max_q and
            max_k exceed the length of a single request, so can a value of the tokens after it.
        cu_seqlens_q, cu_seqlens_k: int32 [batch + 1], contiguous, offsets of the requests' tokens, starting
            at 0. Results of tokens after the last request are undefined. Values are checked on the CPU only.
        max_q, max_k: tokens of the longest request, or more, known on the host. On a GPU, results are
            undefined if they are too small.
        softmax_scale: factor on the scores, finite and greater than 0 in fp32.
        causal: bottom-right aligned.
        return_lse: also return the log-sum-exp, for :func:`merge_states`.
        plans: a dict, empty at first, that the caller passes in all layers of a step. A library that plans
            keeps its plans for the two tensors of offsets in this dict. Nobody may write to these tensors
            while the dict is in use, and every request must have keys. None: use no library that plans.
        batch_invariant: make a request's results independent of the other requests of the call.
        sinks: fp32 [H], contiguous. A head's sink counts as a key that each of its queries sees, with this
            score (after scaling) and without values; the LSE counts it too. Of calls whose results are
            merged, pass it to one.

    Returns:
        out [T, H, d_v] in the dtype of q; with ``return_lse`` also lse [T, H], fp32, natural logarithm.
        Queries without keys are 0 and -inf, or the sink.

    Raises:
        InvalidInputError: shapes or dtypes do not fit together, on the CPU also offsets or longest requests;
            or softmax_scale is not finite and greater than 0.
        KernelBuildError: our kernel is needed, but cannot be built.
    """
    torch_attention.check_prefill(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)
    if sinks is not None:
        check_operand("sinks", sinks, (q.shape[1],), torch.float32, q.device)
    max_q = _longest("max_q", max_q, cu_seqlens_q)
    max_k = _longest("max_k", max_k, cu_seqlens_k)
    call = Call(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, float(softmax_scale), causal)
    use = _Use(q.device, q.dtype, q.shape[2], v.shape[2], plans is not None, batch_invariant)
    use = use._replace(alone=libraries.is_alone(call))
    # A chunk of context may be empty, which the libraries do not allow.
    chosen = _choose(use) if len(k) else _TORCH
    out, lse = chosen.attend(call, plans) if chosen.takes_plans else chosen.attend(call)
    if sinks is not None:
        out, lse = torch_attention.count_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _longest(name: str, longest: int, offsets: Tensor) -> int:
    """Check a length, and convert it to int: numpy's integers (vLLM's drafters) overflow in products."""
    if not isinstance(longest, numbers.Integral):
        raise InvalidInputError(f"{name} must be an int, got {longest!r}")
    if offsets.device.type == "cpu" and (lengths := value_range(offsets.diff())) and longest < lengths[1]:
        raise InvalidInputError(f"{name} is {longest}, but a request has {lengths[1]} tokens")
    return int(longest)


def library(
    device: torch.device | str,
    dtype: torch.dtype,
    qk_head_dim: int,
    v_head_dim: int,
    with_plans: bool = False,
    batch_invariant: bool = False,
) -> str:
    """The name of the library that :func:`prefill` calls, such as "FlashAttention-3" or "torch".

    Where another one attends for a long request that is alone: "mla_backend, cuDNN for one long request".

    Args:
        device, dtype: of queries, keys and values.
        qk_head_dim, v_head_dim: columns of a head's keys and of its values.
        with_plans: whether `prefill` will get ``plans``.
        batch_invariant: as of `prefill`.

    Raises:
        InvalidInputError: no device is called that.
        UnsupportedError: torch sees no such device.
    """
    return _describe(_Use(with_index(device), dtype, qk_head_dim, v_head_dim, with_plans, batch_invariant))


def _describe(use: _Use) -> str:
    usual, alone = (_choose(use._replace(alone=alone)).name for alone in (False, True))
    return usual if alone == usual else f"{usual}, {alone} for one long request"


def prepare(
    device: torch.device | str,
    dtype: torch.dtype,
    qk_head_dim: int,
    v_head_dim: int,
    with_plans: bool = False,
    batch_invariant: bool = False,
) -> str:
    """Build and load what :func:`prefill` will use, so that no request waits for a compiler.

    A library that fails or is wrong in a small call is not used, and torch merges states if our kernel cannot
    be built; warnings say why. Arguments are those of :func:`library`.

    Returns:
        what :func:`library` returns.

    Raises:
        InvalidInputError: no device is called that.
        UnsupportedError: torch sees no such device.
    """
    use = _Use(with_index(device), dtype, qk_head_dim, v_head_dim, with_plans, batch_invariant)
    if dtype in _FLASH_DTYPES:
        _merges_in_one_launch(use.device)
    usual = _prepare(use)
    _prepare(use._replace(alone=True), prepared=usual)
    return _describe(use)


def _prepare(use: _Use, prepared: str = _TORCH_NAME) -> str:
    """Find the library that works for a use, and return its name. ``prepared`` is known to work."""
    while (chosen := _choose(use)).name not in (_TORCH_NAME, prepared):
        try:
            _try_out(chosen, use)
            break
        except Exception as error:  # libraries may raise anything, above all when they compile
            logger.warning("%s cannot be used for prefill here: %s", chosen.name, error)
            _failed.add((*use.operands, chosen.name))
            _choose.cache_clear()
    return chosen.name


@torch.no_grad()
def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys into attention over their union. The sets are chunks of
    a request, or the keys of two ranks of a `Shard`. On a GPU in one launch. Results have no gradients.

    Args:
        out_a, out_b: [T, H, d], of one dtype.
        lse_a, lse_b: [T, H], natural logarithm; -inf where that side saw no key (its output is then ignored).

    Returns:
        out [T, H, d] in the dtype of out_a, lse [T, H] fp32.

    Raises:
        InvalidInputError: shapes, dtypes or devices that differ.
    """
    check_tensors(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if _merges_in_one_launch(out_a.device) and merge.serves(out_a, lse_a, out_b, lse_b):
        return merge.merge_states(out_a, lse_a, out_b, lse_b)
    return torch_attention.merge_states(out_a, lse_a, out_b, lse_b)


@functools.cache
def _merges_in_one_launch(device: torch.device) -> bool:
    """Whether our kernel merges states on a device. Builds the kernel; if that fails, a warning says why."""
    if device.type != "cuda":
        return False
    try:
        merge.module(device)
    except (KernelBuildError, InvalidInputError) as error:
        logger.warning("torch merges the states of prefill here: %s", error)
        return False
    return True


class _Library(NamedTuple):
    """A library's name, and its attention, which takes a `Call` and returns out [T, H, d_v], lse [T, H]."""

    name: str
    attend: Callable[..., tuple[Tensor, Tensor]]
    takes_plans: bool = False
    """Whether `attend` also takes `Plans`."""


_TORCH = _Library(_TORCH_NAME, libraries.by_torch)
_failed: set[tuple[torch.device, torch.dtype, int, int, str]] = set()
"""What `prepare` found not to work: device, dtype, d_qk, d_v, the library's name."""


@functools.cache
def _choose(use: _Use) -> _Library:
    if use.device.type != "cuda" or use.dtype not in _FLASH_DTYPES:
        return _TORCH
    for candidate in _candidates(use):
        if (*use.operands, candidate.name) not in _failed:
            return candidate
    return _TORCH


def _candidates(use: _Use) -> list[_Library]:
    """The libraries that serve a CUDA device with 16-bit inputs, the best first."""
    d_qk, d_v = use.d_qk, use.d_v
    capability = torch.cuda.get_device_capability(use.device)
    ours = _ours(use, capability)
    found = list(_hopper_candidates(use)) if capability[0] == 9 else []
    if ours is not None and _ours_is_faster(capability, d_qk, d_v):
        found.append(ours)
    flash2_serves = d_v <= d_qk <= 256 and d_qk % 8 == 0
    if capability >= (8, 0) and flash2_serves and torch.backends.cuda.is_flash_attention_available():
        found.append(_Library("FlashAttention-2", libraries.by_flash2))
    if ours is not None and ours not in found:
        found.append(ours)
    return found


def _hopper_candidates(use: _Use) -> Iterator[_Library]:
    """The libraries that run on Hopper only, the best first."""
    dims = use.d_qk, use.d_v
    if libraries.flash3_serves(*dims) and (attend := libraries.flash3(use.batch_invariant)) is not None:
        yield _Library("FlashAttention-3", attend)
    if use.batch_invariant:
        return
    if use.with_plans and dims == _DEEPSEEK_DIMS and libraries.FlashInfer.is_installed():
        yield _Library("FlashInfer", libraries.by_flashinfer, takes_plans=True)
    if use.alone and libraries.cudnn_serves(*dims):
        yield _Library("cuDNN", libraries.by_cudnn)


def _ours(use: _Use, capability: tuple[int, int]) -> _Library | None:
    """Our kernel, if there is one for this use that is built or can be built."""
    if kernels.refusal(use.dtype, use.d_qk, use.d_v, capability) is not None:
        return None
    if jit.why_unavailable([kernels.variant_on(*use.operands)]) is not None:
        return None
    return _Library("mla_backend", lambda call: kernels.attend(*call))


def _ours_is_faster(capability: tuple[int, int], d_qk: int, d_v: int) -> bool:
    """Whether our kernel is faster than FlashAttention-2, which pads values to the width of keys.

    Only with the shared memory of an H200, where DeepSeek's and GLM-4.7-Flash's dimensions were measured.
    """
    return capability[0] in (9, 10) and (d_v <= 128 and d_v < d_qk or d_v > 192)


def _try_out(chosen: _Library, use: _Use) -> None:
    """Compare a small call with torch: versions of a library may differ, in the base of lse for example.

    Raises:
        UnsupportedError: the results differ.
    """
    generator = torch.Generator().manual_seed(0)
    heads = 2
    lens_q, lens_k = ([300], [300]) if use.alone else ([33, 5], [70, 5])
    q, k, v = (
        torch.randn(sum(lens), heads, dim, generator=generator, device="cpu").to(use.device, use.dtype)
        for lens, dim in ((lens_q, use.d_qk), (lens_k, use.d_qk), (lens_k, use.d_v))
    )
    starts_q, starts_k = (
        torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=use.device)
        for lens in (lens_q, lens_k)
    )
    for causal in (True,) if use.alone else (True, False):
        call = Call(q, k, v, starts_q, starts_k, max(lens_q), max(lens_k), use.d_qk**-0.5, causal)
        plans: list[Plans] = [{}] if chosen.takes_plans else []
        actual, expected = chosen.attend(call, *plans), libraries.by_torch(call)
        for what, ours, right, most in zip(("outputs", "lse"), actual, expected, (0.05, 0.01), strict=True):
            error = float((ours.float() - right.float()).abs().max())
            if not error <= most:
                raise UnsupportedError(f"its {what} differ from torch's by {error:.2g}")
