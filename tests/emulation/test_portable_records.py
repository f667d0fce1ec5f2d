"""The portable kernel with caches of 656-byte records, on the CPU, against fp64 attention."""

import random

import pytest
import torch

from tests.emulation.emulator import TOLERANCE, assert_right, run, sources
from tests.emulation.test_fp8 import IN_SOFTWARE
from tests.support.cases import make_case, make_list_case, random_case, relative_error
from tests.support.seeds import seeds

GROWTH = "growth = rescaling(before, exponent);"
RECORDS = {"kv_dtype": "fp8_ds_mla", "device": "cpu"}


# KV tiles of 64, 32 and 16 tokens; registers for one token block or for a whole tile.
@pytest.mark.smoke(num_heads=20)
@pytest.mark.parametrize(
    "family, num_heads, page_size",
    [("portable", 5, 8), ("portable", 20, 8), ("portable", 64, 8), ("portable_99k", 40, 1)],
)
def test_ragged_batch(decoder, family, num_heads, page_size):
    lengths = [0, 1, 9, 33, 64, 65, 200]
    case = make_case(lengths, [1] * 7, num_heads=num_heads, page_size=page_size, **RECORDS)
    assert_right(case, *run(decoder(case, family), case))


@pytest.mark.parametrize("seed", seeds(2))
def test_random_geometry(decoder, seed):
    draw = random.Random(seed)
    case = random_case(
        draw,
        requests=[1, 2, 3],
        keys=(80, 500),
        max_query_len=4,
        num_heads=[1, 3, 8, 16, 20],
        page_sizes=[1, 2, 8, 40, 64],
        latents=[(512, 64)],
        seed=seed,
        scale_exponents=(-10, 10),
        **RECORDS,
    )
    case.scale *= 2.0**-11
    implementation = decoder(case, draw.choice(["portable", "portable_99k"]), draw.randint(2, 10))
    assert_right(case, *run(implementation, case))


@pytest.mark.parametrize("exponents", [(-10, 10), (-40, -20), (20, 40)], ids=str)
def test_scales_of_any_size(decoder, exponents):
    """Side by side in each tile, in each group of columns. Every row is right, also one of small results."""
    case = make_case([300, 70], [1, 1], num_heads=16, page_size=8, scale_exponents=exponents, **RECORDS)
    case.scale *= 2.0 ** -(exponents[1] + 1)
    out, lse = run(decoder(case, "portable"), case)
    assert_right(case, out, lse)
    expected, _ = case.expected()
    groups, expected_groups = (x.double().unflatten(-1, (4, 128)) for x in (out, expected))
    errors = (groups - expected_groups).norm(dim=-1) / expected_groups.norm(dim=-1)
    assert errors.max() <= 4e-3


@pytest.mark.parametrize("family, num_heads", [("portable", 16), ("portable_99k", 40)])
def test_the_least_scales(decoder, family, num_heads):
    """The unit of the output is a normal number, too, if all scales are below 2^-120."""
    options = {"num_heads": num_heads, "page_size": 8, "scale_exponents": (-122, -122)}
    case = make_case([300, 70], [1, 1], **options, **RECORDS)
    out, _ = run(decoder(case, family), case)
    expected, _ = case.expected()
    assert relative_error(out.double() * 2.0**120, expected * 2.0**120) <= TOLERANCE[out.dtype]


def case_of_growing_scales():
    """A request whose first two tiles have scales that are 2^12 and 2^6 times smaller than the rest."""
    case = make_case([300], [1], num_heads=16, page_size=8, **RECORDS)
    pages = case.batch.table[0].long()
    for first, factor in ((0, 2.0**-12), (8, 2.0**-6)):
        own = pages[first : first + 8]
        scales = case.cache[own, :, 512:528].contiguous().view(torch.float32) * factor
        case.cache[own, :, 512:528] = scales.view(torch.uint8)
        case.values[own, :, :512] *= factor
    return case


def test_scales_that_grow(decoder, tmp_path):
    case = case_of_growing_scales()
    assert_right(case, *run(decoder(case, "portable", 1), case))
    root = sources(tmp_path / "csrc", [("decode/portable/token_products.cuh", GROWTH, "growth = 1.f;")])
    results = run(decoder(case, "portable", 1, root=root), case)
    with pytest.raises(AssertionError):
        assert_right(case, *results)


def test_lists(decoder):
    case = make_list_case([300, 70, 0, 1, 9, 200], num_heads=16, page_size=24, page_gap=3, **RECORDS)
    assert_right(case, *run(decoder(case, "portable", 5), case))


def test_conversion_in_software(decoder, tmp_path):
    """As on sm_80 and sm_86."""
    case = make_case([300, 70], [1, 1], num_heads=16, page_size=8, **RECORDS)
    root = sources(tmp_path / "csrc", [IN_SOFTWARE])
    assert_right(case, *run(decoder(case, "portable", root=root), case))


@pytest.mark.faults
@pytest.mark.parametrize(
    "family, num_heads, file, before, after, exponents",
    [
        ("portable_99k", 40, "group_scales.cuh", GROWTH, "growth = 1.f;", (-10, 10)),
        ("portable_99k", 40, "group_scales.cuh", "block % 2 * 16 + i * 8", "block % 2 * 16", (-10, 10)),
        ("portable", 16, "token_products.cuh", "scales[i % 2 * kScales]", "scales[0]", (-10, 10)),
        # With small scales, so that rotary columns count.
        (
            "portable_99k",
            40,
            "key_loader.cuh",
            "kVectors + kScaleVectors + vector + i",
            "kVectors + vector + i",
            (-10, -10),
        ),
    ],
    ids=[
        "results not rescaled",
        "scales of other tokens",
        "scales of other tokens, with whole scores",
        "rotary columns at another place",
    ],
)
def test_faults_are_seen(decoder, tmp_path, family, num_heads, file, before, after, exponents):
    root = sources(tmp_path / "csrc", [(f"decode/portable/{file}", before, after)])
    options = {"num_heads": num_heads, "page_size": 8, "scale_exponents": exponents}
    case = make_case([300, 70, 9], [1, 1, 1], **options, **RECORDS)
    case.scale *= 2.0 ** min(0, -1 - exponents[1])
    results = run(decoder(case, family, root=root), case)
    with pytest.raises(AssertionError):
        assert_right(case, *results)
