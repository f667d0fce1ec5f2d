"""Absorbing queries and expanding outputs by kernels of our own, for the few tokens of a decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_backend import jit
from mla_backend.jit import KernelVariant
from mla_backend.kernels.base import ELEMENT_NAMES, ELEMENTS
from mla_backend.weights import AbsorbedWeights

MAX_TOKENS = 64
"""Up to how many tokens these kernels are taken: a library's products are no slower above."""

DIMENSIONS = ((128, 512, 128), (64, 256, 64), (192, 512, 256))
"""(qk_nope_head_dim, kv_lora_rank, v_head_dim) that they are made for: DeepSeek, MiniCPM3, GLM."""


def variant(dtype: torch.dtype, d_nope: int, d_c: int, d_v: int, arch: str) -> KernelVariant:
    """Both products of a model."""
    element, overlaps = ELEMENTS[dtype], str(int(arch.rstrip("af")) >= 90).lower()
    all_of = f"{element}, {d_nope}, {d_c}, {d_v}"
    source = f"""\
#include "ffi/project.cuh"
TVM_FFI_DLL_EXPORT_TYPED_FUNC(absorb, (mla::ffi::absorb<{element}, {d_nope}, {d_c}, {overlaps}>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expand, (mla::ffi::expand<{element}, {d_c}, {d_v}, {overlaps}>));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shared_bytes, (mla::ffi::project_shared_bytes<{all_of}>));
"""
    return KernelVariant(f"project-{ELEMENT_NAMES[dtype]}-d{d_nope}_{d_c}_{d_v}", source, arch)


class Projections:
    """The products of :class:`AbsorbedWeights`, by kernels where there are few tokens."""

    def __init__(self, weights: AbsorbedWeights, module: object):
        self._weights = weights
        self._module = module

    @classmethod
    def of(cls, weights: AbsorbedWeights) -> Projections | AbsorbedWeights:
        """The weights themselves where no kernel is made for them."""
        w_uk, w_uv = weights.w_uk, weights.w_uv
        dimensions = (*w_uk.shape[1:], w_uv.shape[2])
        if not w_uk.is_cuda or w_uk.dtype not in ELEMENTS or dimensions not in DIMENSIONS:
            return weights
        return cls(weights, jit.load(variant(w_uk.dtype, *dimensions, jit.arch_of(w_uk.device))))

    def absorb_query(self, q_nope: Tensor) -> Tensor:
        """q_nope [T, H, d_nope] -> [T, H, d_c]."""
        if len(q_nope) > MAX_TOKENS:
            return self._weights.absorb_query(q_nope)
        return self._absorb(q_nope, None, None, None, None)

    def absorb_and_append(
        self, q_nope: Tensor, latent: Tensor, rope: Tensor, slots: Tensor, latent_cache: Tensor
    ) -> Tensor:
        """Also write the step's new latents to the cache, in the same launch.

        Args:
            q_nope: [T, H, d_nope], T > 0.
            latent: [N, d_c], N at least as many as there are slots.
            rope: [N, d_rope].
            slots: int64, page * page_size + row of each new latent; a negative one is not written.
            latent_cache: [num_pages, page_size, d_c + d_rope].
        """
        return self._absorb(q_nope, latent, rope, slots, latent_cache)

    def can_append(self, num_tokens: int, latent: Tensor, rope: Tensor, slots: Tensor) -> bool:
        """Whether `absorb_and_append` takes these: few tokens, whose rows begin at multiples of 16 bytes."""
        return (
            0 < num_tokens <= MAX_TOKENS
            and slots.dtype is torch.int64
            and all(
                t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (latent, rope)
            )
        )

    def _absorb(self, q_nope: Tensor, *new: Tensor | None) -> Tensor:
        out = q_nope.new_empty(*q_nope.shape[:2], self._weights.w_uk.shape[2])
        self._module.absorb(q_nope, self._weights.w_uk, out, *new)
        return out

    def project_output(self, o_latent: Tensor, out: Tensor) -> None:
        """o_latent [T, H, d_c] -> out [T, H, d_v]."""
        if len(o_latent) > MAX_TOKENS:
            self._weights.project_output(o_latent, out)
        else:
            self._module.expand(o_latent, self._weights.w_uv, out)


def shipped_variants() -> list[KernelVariant]:
    """All in bf16 for Hopper, DeepSeek's also in fp16 and for the other architectures."""
    hopper = [variant(torch.bfloat16, *dimensions, "90a") for dimensions in DIMENSIONS]
    others = [variant(torch.bfloat16, *DIMENSIONS[0], arch) for arch in ("80", "86", "89")]
    return [*hopper, variant(torch.float16, *DIMENSIONS[0], "90a"), *others]
