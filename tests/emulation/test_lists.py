"""The CUDA kernels on lists of slots, run on the CPU, against fp64 attention to what the lists name."""

from dataclasses import replace

import pytest
import torch

from tests.emulation.emulator import assert_right, run, sources
from tests.support.cases import make_list_case

FAMILIES = pytest.mark.parametrize("family", ["hopper", "portable"])


@pytest.mark.smoke(num_heads=16)
@pytest.mark.parametrize(
    "family, num_heads, shared",
    [
        ("hopper", 16, False),
        ("hopper", 20, True),
        ("hopper", 80, True),
        ("portable", 16, True),
        ("portable", 40, False),
        ("portable_99k", 40, True),
    ],
)
def test_random_lists(decoder, family, num_heads, shared):
    """The cache may have pages of any size; lengths from none to several tiles, on fewer CTAs than lists."""
    lengths = [300, 70, 0, 1, 9, 64, 65, 200]
    case = make_list_case(lengths, num_heads=num_heads, shared=shared, page_size=24, page_gap=3, device="cpu")
    assert_right(case, *run(decoder(case, family, 5), case))


@FAMILIES
@pytest.mark.parametrize("num_heads", [16, 40])
@pytest.mark.parametrize("num_ctas", [4, 9])
def test_lists_are_split(decoder, family, num_heads, num_ctas):
    """Two CTAs, or more, of a list: also where a split names no key at all."""
    case = make_list_case([600, 512], num_heads=num_heads, device="cpu")
    assert_right(case, *run(decoder(case, family, num_ctas), case))


@FAMILIES
def test_layers_have_lists_of_their_own(decoder, family):
    """One plan serves all layers, and gives the same bits for the same lists."""
    layers = [make_list_case([200, 0, 130], num_heads=16, seed=seed, device="cpu") for seed in range(2)]
    implementation = decoder(layers[0], family, 3)
    plan = implementation.plan(layers[0].batch)
    first = [run(implementation, layer, plan=plan) for layer in layers]
    for layer, results in zip(layers, first, strict=True):
        assert_right(layer, *results)
        assert all(
            torch.equal(a, b) for a, b in zip(run(implementation, layer, plan=plan), results, strict=True)
        )


# Each kernel, with one m-block and with several.
@pytest.mark.smoke(num_heads=24)
@pytest.mark.parametrize(
    "family, num_heads, kv_dtype",
    [
        *((family, heads, torch.float8_e4m3fn) for family in ("hopper", "portable") for heads in (16, 40)),
        ("hopper", 24, torch.float8_e4m3fn),
        ("portable_99k", 20, torch.float8_e4m3fn),
        ("hopper", 40, "fp8_ds_mla"),
        ("hopper", 80, "fp8_ds_mla"),
    ],
)
def test_lists_in_fp8_caches(decoder, family, num_heads, kv_dtype):
    lengths = [300, 70, 0, 1, 9, 64, 65, 200]
    options = {"kv_dtype": kv_dtype, "page_size": 24, "page_gap": 3, "device": "cpu"}
    case = make_list_case(lengths, num_heads=num_heads, **options)
    assert_right(case, *run(decoder(case, family, 5), case))


@pytest.mark.parametrize("num_heads, kv_dtype", [(16, None), (16, "fp8_ds_mla"), (40, torch.float8_e4m3fn)])
def test_batch_invariance(decoder, num_heads, kv_dtype):
    """The bits of a row do not depend on the lists beside its own."""
    case = make_list_case([300, 40, 0, 201], num_heads=num_heads, kv_dtype=kv_dtype, device="cpu", unnamed=0)
    implementation = decoder(case, "hopper", 4, batch_invariant=True)
    together = run(implementation, case)
    for i in range(4):
        row = slice(i, i + 1)
        batch = replace(case.batch, seq_lens=case.batch.seq_lens[row])
        tensors = {name: getattr(case, name)[row] for name in ("q_nope", "q_rope", "lists")}
        alone = run(implementation, replace(case, batch=batch, **tensors))
        assert all(torch.equal(a, t[row]) for a, t in zip(alone, together, strict=True))


def test_rows_that_end_inside_a_column_block(decoder):
    case = make_list_case([200, 90, 0], num_heads=16, d_c=256, d_rope=32, device="cpu")
    assert_right(case, *run(decoder(case, "hopper", 3), case))


@pytest.mark.faults
@pytest.mark.parametrize(
    "family, num_heads, kv_dtype, file, before, after",
    [
        ("hopper", 16, None, "few_rows/kernel", "output.blocks.mask_unnamed(s, ring.stage);", ";"),
        ("hopper", 40, None, "many_rows/kernel", "if (unnamed) mask_unnamed(", "if (0) mask_unnamed("),
        (
            "hopper",
            16,
            None,
            "load/gather_keys",
            "policy, offset >= 0);",
            "policy);",
        ),
        ("hopper", 16, "fp8_ds_mla", "load/gather_keys", "? no_row", "? (const uint8_t*)t.p.cache"),
        (
            "hopper",
            40,
            None,
            "load/token_keys",
            "next_row = no_row;",
            "next_row = (const uint8_t*)t.p.cache;",
        ),
        ("portable", 16, None, "softmax", "mask_invalid(mine, invalid, s);", ";"),
    ],
)
def test_faults_are_seen(decoder, tmp_path, family, num_heads, kv_dtype, file, before, after):
    root = sources(tmp_path / "csrc", [(f"decode/{family}/{file}.cuh", before, after)])
    case = make_list_case([300, 70, 9], num_heads=num_heads, kv_dtype=kv_dtype, device="cpu")
    case.cache[0, 0] = 0x7F if kv_dtype else float("nan")  # what entries that name no slot would read
    results = run(decoder(case, family, root=root), case)
    with pytest.raises(AssertionError):
        assert_right(case, *results)
