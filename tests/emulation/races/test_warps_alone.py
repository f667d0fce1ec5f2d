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


FEW, MANY = "decode/hopper/few_rows/kernel.cuh", "decode/hopper/many_rows_fp8/kernel.cuh"
VALUES = "decode/hopper/many_rows_fp8/values.cuh"


@pytest.mark.faults
@pytest.mark.parametrize(
    "num_heads, kv_dtype, edits",
    [
        (16, E4M3, [(FEW, "[tile / 2 % C::kWeightBuffers]", "[0]")]),
        (16, "fp8_ds_mla", [(FEW, "if constexpr (C::kWeightBuffers == 1) t.sync_consumer();", "")]),
        (40, E4M3, [(file, "[tile % C::kWeightTiles]", "[tile % 2]") for file in (MANY, VALUES)]),
        (
            40,
            "fp8_ds_mla",
            [(MANY, "if constexpr (C::kWeightTiles == 2)\n                t.sync_consumer();", ";")],
        ),
    ],
    ids=["few_rows-e4m3", "few_rows-records", "many_rows-e4m3", "many_rows-records"],
)
def test_probabilities_overwritten_while_another_warp_multiplies_are_seen(judge, num_heads, kv_dtype, edits):
    with pytest.raises(Race):
        judge("hopper", num_heads, 8, *WHOLE, *edits, kv_dtype=kv_dtype)
