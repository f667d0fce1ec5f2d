"""Races in the Hopper kernels if tensor cores did not start a warpgroup's wgmma for all four warps at once.

PTX does not promise that they do.
"""

import pytest

from tests.emulation.emulator import EmulatedModule, shared_sources
from tests.emulation.races.support import E4M3, HALVES, SAME_VALUES, TWO, WHOLE, Race, WarpsAloneModule

# Scores of the tokens whose values are zeroed are masked, whatever other warps read: see the invariants of
# few_rows/kernel.cuh. There, this barrier would cost time in the last tile of each request for nothing.
HARMLESS = (
    "decode/hopper/few_rows/kernel.cuh",
    "if (valid < C::kTile) keys.zero_values(kv, valid);",
    "if (valid < C::kTile) t.sync_consumer(), keys.zero_values(kv, valid);",
)


@pytest.fixture(scope="module")
def module_class(module_class, compiler, run_folder):
    root = shared_sources(run_folder / "csrc")
    return lambda variant, *where: WarpsAloneModule(
        variant, *where, unwatched=EmulatedModule(variant, root, compiler)
    )


@pytest.fixture(scope="module")
def without_faults(run_folder):
    return shared_sources(run_folder / "csrc-warps-alone", [*SAME_VALUES, HARMLESS])


@pytest.mark.parametrize(
    "num_heads, page_size, batch, kv_dtype",
    [
        (16, 8, HALVES, None),
        (16, 1, HALVES, None),
        (40, 8, HALVES, None),
        (40, 1, HALVES, None),
        (80, 8, HALVES, None),
        (16, 8, TWO, E4M3),
        (40, 8, WHOLE, E4M3),
        (16, 8, TWO, "fp8_ds_mla"),
        (40, 8, WHOLE, "fp8_ds_mla"),
    ],
)
def test_no_races(judge, num_heads, page_size, batch, kv_dtype):
    judge("hopper", num_heads, page_size, *batch, kv_dtype=kv_dtype)


@pytest.mark.faults
@pytest.mark.parametrize(
    "num_heads, file, before, after",
    [
        (16, "few_rows", "if constexpr (C::kWeightBuffers == 1) t.sync_consumer();", ""),
        (40, "many_rows_fp8", "            else\n                t.sync_consumer();", ""),
    ],
)
def test_probabilities_overwritten_while_another_warp_multiplies_are_seen(
    judge, num_heads, file, before, after
):
    with pytest.raises(Race):
        judge(
            "hopper", num_heads, 8, *WHOLE, (f"decode/hopper/{file}/kernel.cuh", before, after), kv_dtype=E4M3
        )
