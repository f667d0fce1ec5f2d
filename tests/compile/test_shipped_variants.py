"""Kernels that ship compile for their architectures, and the report holds what speed depends on.

Most variants are compiled for the device only. That also checks the types of their host code and, by a
`static_assert`, the size of their shared memory. One module per family is built and loaded whole.
"""

import re
from dataclasses import replace

import pytest
import torch

from mla_backend import jit
from mla_backend.cache_format import E4M3, RECORD_656
from mla_backend.errors import KernelBuildError
from mla_backend.kernels import shipped_variants, sm80, sm90
from mla_backend.kernels.prefill import prefill_config
from mla_backend.kernels.sm80 import is_small

# Of the prefill kernels for other head dimensions, one for each way to divide the work, in turn for all GPUs.
OTHER_PREFILL = [
    prefill_config(dtype, d_qk, d_v, arch, is_small(arch)).variant()
    for arch, dtype, d_qk, d_v in (
        ("80", torch.float16, 320, 320),
        ("86", torch.bfloat16, 320, 320),
        ("89", torch.float16, 576, 512),
        ("90a", torch.bfloat16, 576, 576),
        ("80", torch.bfloat16, 768, 768),
        ("86", torch.float16, 768, 768),
        ("89", torch.bfloat16, 1024, 1024),
        ("80", torch.bfloat16, 1024, 1024),
        ("90a", torch.float16, 576, 128),
    )
]
# Of the kernels for lists in fp8 caches, which no engine has yet, those with the most rows.
OTHER_LISTS = [
    *(
        sm90.decode_config(torch.bfloat16, 512, 64, 64, rows, E4M3, lists=True).variant()
        for rows in (24, 48, 96)
    ),
    *(
        sm80.decode_config(torch.bfloat16, 512, 64, 64, arch, is_small(arch), E4M3, lists=True).variant()
        for arch in ("80", "89")
    ),
]
# Of the portable kernels for records, those with the fewest and the most rows.
OTHER_RECORDS = [
    sm80.decode_config(torch.bfloat16, 512, 64, rows, arch, is_small(arch), RECORD_656, lists).variant()
    for arch, rows, lists in (("80", 16, False), ("86", 64, False), ("89", 64, False), ("80", 64, True))
]


def without_twins(variants: list[jit.KernelVariant]) -> list[jit.KernelVariant]:
    """Of kernels whose source is the same for sm_86 and sm_89, one for each GPU in turn."""
    sources = {arch: {v.source for v in variants if v.arch == arch} for arch in ("86", "89")}
    twins = [v.source for v in variants if v.arch == "86" and v.source in sources["89"]]
    left_out = {("86" if i % 2 else "89", source) for i, source in enumerate(twins)}
    return [v for v in variants if (v.arch, v.source) not in left_out]


def sample(variants: list[jit.KernelVariant]) -> list[jit.KernelVariant]:
    """Of fp16, of MiniCPM3's dimensions, of lists and of sm_86, every second kernel."""
    others = [v for v in variants if v.arch == "86" or re.search("fp16|d256_32|lists", v.name)]
    return [v for v in variants if v not in others[1::2]]


VARIANTS = sample(without_twins(shipped_variants())) + OTHER_PREFILL + OTHER_LISTS + OTHER_RECORDS

WHOLE = {
    "sm90_decode-bf16-d512_64-r16-tma (sm_90a)",
    "sm90_decode-fp16-d512_64-r64-rows (sm_90a)",
    "sm80_decode-bf16-d512_64-r16-t32x4 (sm_80)",
    "append (sm_90a)",
}


def as_compiled(variant: jit.KernelVariant) -> jit.KernelVariant:
    """The variant itself, or its device code alone, which takes half as long."""
    return variant if str(variant) in WHOLE else replace(variant, flags=(*variant.flags, "-cubin"))


@pytest.fixture(scope="module")
def built():
    try:
        jit.find_toolchain()
    except KernelBuildError as error:
        pytest.skip(str(error))
    return {result.variant: result for result in jit.build(map(as_compiled, VARIANTS))}


def test_variants_have_names_of_their_own():
    labels = [str(variant) for variant in VARIANTS]
    assert len(labels) == len(set(labels)) > 0


@pytest.mark.parametrize("variant", [as_compiled(variant) for variant in VARIANTS], ids=str)
def test_variant(variant, built):
    if built[variant].error:
        raise built[variant].error
    report = jit.compile_report(variant)
    assert report.warnings == ()
    assert report.kernels
    for kernel in report.kernels:
        assert kernel.spill_store_bytes == kernel.spill_load_bytes == kernel.stack_bytes == 0, kernel
        assert 0 < kernel.registers <= 255, kernel
        assert kernel.static_smem_bytes <= 48 << 10, kernel


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_module(name, built):
    (variant,) = (variant for variant in VARIANTS if str(variant) == name)
    module = jit.load(variant)
    if "decode" in variant.name:  # others need no workspace
        assert all(size > 0 for size in module.workspace())
