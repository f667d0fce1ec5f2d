"""Every kernel that ships compiles for its architecture, and the report holds what speed depends on."""

import pytest

from mla_backend import jit
from mla_backend.errors import KernelBuildError
from mla_backend.kernels import shipped_variants

VARIANTS = shipped_variants()


@pytest.fixture(scope="module")
def built():
    try:
        jit.find_toolchain()
    except KernelBuildError as error:
        pytest.skip(str(error))
    return {result.variant: result for result in jit.build(VARIANTS)}


def test_variants_have_names_of_their_own():
    labels = [str(variant) for variant in VARIANTS]
    assert len(labels) == len(set(labels)) > 0


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
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
