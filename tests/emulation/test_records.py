"""Hopper's kernels on records of 656 bytes, run on the CPU, against fp64 attention over their values."""

import random

import pytest
import torch

from tests.emulation.emulator import assert_right, run, sources
from tests.support.cases import make_case, make_list_case, random_case
from tests.support.seeds import seeds

RECORD = "fp8_ds_mla"
LENGTHS = [0, 1, 9, 33, 64, 65, 200]


@pytest.mark.smoke(num_heads=16, page_size=8)
@pytest.mark.parametrize("num_heads, page_size", [(5, 64), (16, 8), (16, 1), (20, 64), (32, 8)])
def test_ragged_batch(decoder, num_heads, page_size):
    sizes = {"num_heads": num_heads, "page_size": page_size}
    case = make_case(LENGTHS, [1] * 7, kv_dtype=RECORD, device="cpu", **sizes)
    assert_right(case, *run(decoder(case, "hopper"), case))


@pytest.mark.parametrize("seed", seeds(4))
def test_random_geometry(decoder, seed):
    draw = random.Random(seed)
    case = random_case(
        draw,
        requests=[1, 2, 3, 6],
        keys=(80, 500),
        max_query_len=2,
        num_heads=[1, 3, 8, 16],
        page_sizes=[1, 2, 8, 16, 40, 64],
        latents=[(512, 64)],
        seed=seed,
        kv_dtype=RECORD,
        device="cpu",
    )
    causal = draw.random() < 0.8
    assert_right(case, *run(decoder(case, "hopper", draw.randint(2, 10)), case, causal), causal)


def far_apart(num_heads, page_size):
    """Scales far apart, within a tile and, in the first request, between tiles: later ones are larger."""
    options = {"num_heads": num_heads, "page_size": page_size, "scale_exponents": (-10, 10), "device": "cpu"}
    case = make_case([700, 300, 70], [1, 1, 1], kv_dtype=RECORD, **options)
    case.scale *= 2.0**-14
    tokens = torch.arange(200)
    places = case.batch.table[0][tokens // page_size].long(), tokens % page_size
    rows = case.cache[places]
    rows[:, 512:528] = (rows[:, 512:528].contiguous().view(torch.float32) * 2.0**-5).view(torch.uint8)
    case.cache[places] = rows
    values = case.values[places]
    values[:, :512] *= 2.0**-5
    case.values[places] = values
    return case


@pytest.mark.parametrize("num_heads, page_size", [(16, 8), (5, 1), (24, 8), (40, 8), (80, 64)])
def test_scales_far_apart(decoder, num_heads, page_size):
    case = far_apart(num_heads, page_size)
    assert_right(case, *run(decoder(case, "hopper", 2), case))


@pytest.mark.parametrize("num_ctas", [1, 2], ids=["whole", "split"])
@pytest.mark.parametrize("num_heads", [16, 40])
def test_a_large_scale_without_weight(decoder, num_heads, num_ctas):
    """A token whose scales are 64 times those of others, in whose tile it has no part."""
    sizes = {"num_heads": num_heads, "page_size": 8, "scale_exponents": (0, 0), "device": "cpu"}
    case = make_case([64 * num_ctas], [1], kv_dtype=RECORD, **sizes)
    case.scale /= 16  # of the latents
    case.q_rope.fill_(1)
    place = case.batch.table[0][0].long(), 0
    row, values = case.cache[place].clone(), case.values[place].clone()
    row[:512] = 0
    row[512:528] = torch.full((4,), 64.0).view(torch.uint8)
    row[528:] = torch.full((64,), -100.0, dtype=torch.bfloat16).view(torch.uint8)
    values[:512], values[512:] = 0, -100
    case.cache[place], case.values[place] = row, values
    assert_right(case, *run(decoder(case, "hopper", num_ctas), case))


@pytest.mark.parametrize("num_heads", [8, 16, 40])
def test_lists(decoder, num_heads):
    options = {"kv_dtype": RECORD, "page_size": 24, "page_gap": 3, "device": "cpu"}
    case = make_list_case([300, 70, 0, 1, 9, 64, 65, 200], num_heads=num_heads, **options)
    assert_right(case, *run(decoder(case, "hopper", 5), case))


@pytest.mark.faults
@pytest.mark.parametrize(
    "num_heads, file, before, after",
    [
        (16, "few_rows/keys_records", "exists = t.warp * 16 + t.lane / 4 + k * 8 < valid;", "exists = true;"),
        (16, "few_rows/keys_records", "units[block / kGroupBlocks]", "units[0]"),
        (16, "few_rows/keys_records", "factors[1][group]);", "factors[0][group]);"),
        (
            *(40, "many_rows_fp8/keys_records"),
            *("memory.ratios[tile % 4][group]", "memory.ratios[(tile + 1) % 4][group]"),
        ),
        (40, "many_rows_fp8/keys_records", "if (valid <= k * 8)", "if (false)"),
        (40, "many_rows_fp8/keys_records", "ratios[half][i]);", "ratios[half][0]);"),
        (40, "many_rows_fp8/kernel", "factor.x *= unit, factor.y *= unit;", ";"),
        (16, "load/copy", "first < 0 ? place(line - 1) : place(line)", "place(line)"),
        (40, "load/copy", "first < 0 ? place(line - 1) : place(line)", "place(line)"),
    ],
    ids=[
        "ratios of keys that do not exist",
        "outputs in units of another group",
        "ratios of other tokens",
        "m-blocks of 64: ratios of another tile",
        "m-blocks of 64: scales of keys that do not exist",
        "m-blocks of 64: ratios of other tokens",
        "m-blocks of 64: outputs in units of an older reference",
        "vectors of a line in the places of the next one",
        "m-blocks of 64: vectors of a line in the places of the next one",
    ],
)
def test_faults_are_seen(decoder, tmp_path, num_heads, file, before, after):
    root = sources(tmp_path / "csrc", [(f"decode/hopper/{file}.cuh", before, after)])
    case = far_apart(num_heads, page_size=1 if file == "load/copy" else 8)
    results = run(decoder(case, "hopper", 2, root=root), case)
    with pytest.raises(AssertionError):
        assert_right(case, *results)
