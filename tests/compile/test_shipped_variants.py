"""Kernels that ship compile for their architectures, and the report holds what speed depends on.

Most variants are compiled for the device only, several in one translation unit, because to read the headers
takes as long as a kernel. That also checks the types of their host code and, by a `static_assert`, the size
of their shared memory. One module per family is built and loaded whole.
"""

import re
from itertools import groupby

import pytest
import torch

from mla_backend import jit
from mla_backend.cache_format import E4M3, RECORD_656
from mla_backend.errors import KernelBuildError
from mla_backend.kernels import hopper, portable, shipped_variants
from mla_backend.kernels.portable import has_only_99k
from mla_backend.kernels.prefill import prefill_config
from tests.support.missing import skip_without

# Of the prefill kernels for other head dimensions, one for each way to divide the work, in turn for all GPUs.
OTHER_PREFILL = [
    prefill_config(dtype, d_qk, d_v, arch, has_only_99k(arch)).variant()
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
# Of the kernels for lists in e4m3 caches, which are not shipped, those with the most rows.
OTHER_LISTS = [
    *(
        hopper.decode_config(torch.bfloat16, 512, 64, 64, rows, E4M3, lists=True).variant()
        for rows in (16, 48)
    ),
    *(
        portable.decode_config(
            torch.bfloat16, 512, 64, 64, arch, has_only_99k(arch), E4M3, lists=True
        ).variant()
        for arch in ("80", "89")
    ),
]
# Of the portable kernels for records, those with the fewest and the most rows.
OTHER_RECORDS = [
    portable.decode_config(
        torch.bfloat16, 512, 64, rows, arch, has_only_99k(arch), RECORD_656, lists
    ).variant()
    for arch, rows, lists in (("80", 16, False), ("86", 64, False), ("89", 64, False), ("80", 64, True))
]
# Of the portable kernels for GPUs of compute capability 12, which are built where one is: for each width
# of latents that ships, for lists and for fp8 caches.
FOR_SM_120 = [
    portable.decode_config(
        torch.bfloat16, *latents, rows, "120", has_only_99k("120"), kv_format, lists
    ).variant()
    for latents, rows, kv_format, lists in (
        ((512, 64), 16, None, False),
        ((512, 64), 64, None, False),
        ((512, 64), 16, E4M3, False),
        ((512, 64), 64, None, True),
        ((512, 0), 48, None, False),
        ((256, 64), 32, E4M3, False),
        ((256, 32), 64, None, False),
    )
]


def without_twins(variants: list[jit.KernelVariant]) -> list[jit.KernelVariant]:
    """Of kernels whose source is the same for sm_86 and sm_89, one for each GPU in turn."""
    sources = {arch: {v.source for v in variants if v.arch == arch} for arch in ("86", "89")}
    twins = [v.source for v in variants if v.arch == "86" and v.source in sources["89"]]
    left_out = {("86" if i % 2 else "89", source) for i, source in enumerate(twins)}
    return [v for v in variants if (v.arch, v.source) not in left_out]


# Compiled kernels of fp16 and of other latents: most code is that of bf16 and DeepSeek's.
TWINS = (
    "fp16.*-(r24-small_pages|r64-tma|r32-t16x4|r48-t32x3)"
    "|d256_32-(r24-small_pages|r64x2-tma|r48-t32x6|r64-t32x3)"
    "|d256_64-(r32-tma|r32-small_pages|r32-lists|r64-small_pages|r64x2-tma|r24-t32x6)"
    "|d512_0-(r24-tma|r24-small_pages|r24-lists|r64-tma|r64-small_pages|r16-t32x4|r64-t32x3)"
)
TWINS_OF = "fp16|d256_32|d256_64|d512_0"


def sample(variants: list[jit.KernelVariant]) -> list[jit.KernelVariant]:
    """`TWINS`, of lists every second kernel, and all others."""
    rest = [v for v in variants if re.search(TWINS, v.name) or not re.search(TWINS_OF, v.name)]
    lists = [v for v in rest if "lists" in v.name and not re.search(TWINS_OF, v.name)]
    return [v for v in rest if v not in lists[1::2]]


VARIANTS = (
    sample(without_twins(shipped_variants())) + OTHER_PREFILL + OTHER_LISTS + OTHER_RECORDS + FOR_SM_120
)

SOME_WHOLE = {
    "hopper_few_rows-bf16-d512_64-r16-small_pages (sm_90a)",
    "portable_decode-bf16-d512_64-r16-t32x4 (sm_80)",
    "append (sm_90a)",
}
WHOLE = SOME_WHOLE | {"hopper_many_rows-fp16-d512_64-r64-tma (sm_90a)"}


Group = tuple[jit.KernelVariant, ...]
MOST_TOGETHER = 6  # so that there is work for all processors to the end
# The functions that a module exports have the same names in all of them: they only have to be instantiated.
EXPORTS = """\
#undef TVM_FFI_DLL_EXPORT_TYPED_FUNC
#define TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, function) auto* name = &function
"""


def headers_of(variant: jit.KernelVariant) -> str:
    return "".join(line for line in variant.source.splitlines(True) if line.startswith("#include"))


def compiled_together(variants: list[jit.KernelVariant]) -> list[Group]:
    """Variants of the same architecture and headers."""

    def of(variant: jit.KernelVariant) -> tuple[str, str]:
        return variant.arch, headers_of(variant)

    families = [tuple(family) for _, family in groupby(sorted(variants, key=of), key=of)]
    return [f[i : i + MOST_TOGETHER] for f in families for i in range(0, len(f), MOST_TOGETHER)]


def device_code(group: Group) -> jit.KernelVariant:
    """The kernels of all variants, without host code."""
    bodies = [
        f"namespace variant_{i} {{\n{variant.source.removeprefix(headers_of(variant))}}}\n"
        for i, variant in enumerate(group)
    ]
    source = headers_of(group[0]) + EXPORTS + "".join(bodies)
    return jit.KernelVariant(f"{group[0].name}-and-{len(group) - 1}", source, group[0].arch, ("-cubin",))


GROUPS = compiled_together([variant for variant in VARIANTS if str(variant) not in WHOLE])
UNITS = {device_code(group): group for group in GROUPS}
UNITS |= {variant: (variant,) for variant in VARIANTS if str(variant) in WHOLE}


@pytest.fixture(scope="module")
def built(request):
    """All units of the tests that have been chosen, built together."""
    try:
        jit.find_toolchain()
    except KernelBuildError as error:
        skip_without("nvcc", error)
    chosen = (item for item in request.session.items if "built" in item.fixturenames)
    return {result.variant: result for result in jit.build(item.callspec.params["unit"] for item in chosen)}


def test_variants_have_names_of_their_own():
    labels = [str(variant) for variant in VARIANTS]
    assert len(labels) == len(set(labels)) > 0
    assert set(labels) >= WHOLE


def is_whole(unit: jit.KernelVariant) -> bool:
    return str(unit) in WHOLE


NAMES = {unit: ", ".join(map(str, group)) for unit, group in UNITS.items()}
SMOKE = pytest.mark.smoke(unit=[unit for unit in UNITS if str(unit) in SOME_WHOLE])


@SMOKE
@pytest.mark.parametrize("unit", UNITS, ids=NAMES.values())
def test_kernels(unit, built):
    if built[unit].error:
        raise built[unit].error
    report = jit.compile_report(unit)
    assert report.warnings == ()
    assert len(report.kernels) >= len(UNITS[unit])
    for kernel in report.kernels:
        assert kernel.spill_store_bytes == kernel.spill_load_bytes == kernel.stack_bytes == 0, kernel
        assert 0 < kernel.registers <= 255, kernel
        assert kernel.static_smem_bytes <= 48 << 10, kernel


@SMOKE
@pytest.mark.parametrize("unit", [*filter(is_whole, UNITS)], ids=str)
def test_module(unit, built):
    module = jit.load(unit)
    if "decode" in unit.name:  # others need no workspace
        assert all(size > 0 for size in module.workspace())
