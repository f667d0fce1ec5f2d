"""Races in the decode kernels with fp8 caches."""

import pytest

from tests.emulation.races.support import E4M3, HALVES, THIRDS, TWO, WHOLE, Race


@pytest.mark.smoke(num_heads=(16, 40), page_size=8, batch=[TWO])
@pytest.mark.parametrize(
    "family, num_heads, page_size, batch, kv_dtype",
    [
        ("hopper", 40, 8, TWO, E4M3),
        ("hopper", 32, 8, TWO, E4M3),
        ("hopper", 16, 1, TWO, E4M3),
        ("hopper", 16, 8, HALVES, E4M3),
        ("hopper", 40, 8, HALVES, E4M3),
        ("hopper", 40, 1, HALVES, E4M3),
        ("hopper", 16, 8, TWO, "fp8_ds_mla"),
        ("hopper", 32, 8, TWO, "fp8_ds_mla"),
        ("hopper", 40, 8, TWO, "fp8_ds_mla"),
        ("hopper", 40, 8, WHOLE, "fp8_ds_mla"),
        ("hopper", 40, 1, TWO, "fp8_ds_mla"),
        ("hopper", 40, 1, TWO, E4M3),
        ("hopper", 80, 8, TWO, E4M3),
        ("hopper", 40, 8, THIRDS, E4M3),
        ("hopper", 40, 8, THIRDS, "fp8_ds_mla"),
        ("hopper", 80, 8, (THIRDS[0], 6), E4M3),
        ("portable", 16, 8, TWO, E4M3),
        ("portable", 16, 8, HALVES, E4M3),
        ("portable", 16, 8, TWO, "fp8_ds_mla"),
    ],
)
def test_no_races_with_fp8_keys(judge, family, num_heads, page_size, batch, kv_dtype):
    judge(family, num_heads, page_size, *batch, kv_dtype=kv_dtype)


@pytest.mark.smoke(num_heads=40, batch=[TWO])
@pytest.mark.parametrize(
    "num_heads, batch", [(40, TWO), (40, HALVES), (40, THIRDS), (80, TWO), (80, (THIRDS[0], 6))]
)
def test_no_races_with_fp8_products(judge, num_heads, batch):
    judge("hopper", num_heads, 8, *batch, kv_dtype=E4M3, two_term_blocks=5)


@pytest.mark.faults
@pytest.mark.parametrize(
    "num_heads, page_size, file, line",
    [
        (16, 8, "few_rows/keys_e4m3", "        t.sync_consumers();\n"),
        (16, 8, "few_rows/keys_e4m3", "        fence_async_proxy();\n"),
        (16, 8, "few_rows/kernel", "            keys.publish_weights();\n"),
        (40, 8, "many_rows_fp8/kernel", "        fence_async_proxy();\n        t.sync_consumers();\n"),
        (40, 8, "many_rows_fp8/keys_e4m3", "        t.sync_consumers();  // all have read the queries\n"),
        (40, 8, "many_rows_fp8/kernel", "        smem.p_is_there[tile % 2].wait(tile / 2 % 2);\n"),
        (40, 1, "many_rows_fp8/keys_e4m3", "                if constexpr (!C::kTma) fence_async_proxy();\n"),
    ],
    ids=[
        "queries that are converted",
        "queries that tensor cores do not see",
        "probabilities that tensor cores do not see",
        "queries that are converted for m-blocks of 64",
        "queries overwritten while they are read",
        "probabilities that are not there yet",
        "keys that tensor cores do not see",
    ],
)
def test_a_missing_barrier_with_fp8_keys_is_seen(judge, num_heads, page_size, file, line):
    with pytest.raises(Race):
        judge("hopper", num_heads, page_size, *HALVES, (f"decode/hopper/{file}.cuh", line, ""), kv_dtype=E4M3)


@pytest.mark.faults
def test_ratios_of_records_overwritten_while_they_are_read_are_seen(judge):
    edit = (
        "decode/hopper/many_rows_fp8/keys_records.cuh",
        "memory.ratios[tile % 4]",
        "memory.ratios[tile % 2]",
    )
    with pytest.raises(Race):
        judge("hopper", 40, 8, *WHOLE, edit, kv_dtype="fp8_ds_mla")


@pytest.mark.faults
@pytest.mark.parametrize(
    "before, after",
    [
        ("buffer = remaining / C::kTile % 2", "buffer = 0"),
        ("cp_async_wait<C::kStages - 3>();", "cp_async_wait<C::kStages - 2>();"),
        ("weights, buffer);\n                __syncthreads();", "weights, buffer);"),
    ],
    ids=["P overwritten while it is read", "keys that have not landed", "P read while it is written again"],
)
def test_faults_with_whole_scores_are_seen(judge, before, after):
    with pytest.raises(Race):
        judge(
            "portable", 16, 8, *HALVES, ("decode/portable/token_products.cuh", before, after), kv_dtype=E4M3
        )
