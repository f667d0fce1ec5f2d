"""Kernels that read e4m3 caches, run on the CPU, against fp64 attention over the values of the cache."""

import random
from dataclasses import replace

import pytest
import torch

from mla_backend import Shard
from mla_backend.jit import KernelVariant
from mla_backend.torch_attention import merge_states
from tests.emulation.emulator import assert_alone_as_together, assert_right, run, sources
from tests.support.cases import make_case, make_dominated_case, random_case, relative_error
from tests.support.seeds import seeds
from tests.support.shards import shard_of

E4M3 = torch.float8_e4m3fn
IN_SOFTWARE = (
    "numbers/cache_format.cuh",
    "constexpr bool kConvertsE4m3 = true;",
    "constexpr bool kConvertsE4m3 = false;",
)


# Each kernel, with and without the copy engine; also two m-blocks, which share keys.
@pytest.mark.smoke(num_heads=(20, 40), page_size=8)
@pytest.mark.parametrize(
    "family, num_heads, page_size",
    [
        *(
            ("hopper", heads, page)
            for heads, page in ((5, 1), (16, 8), (20, 8), (32, 8), (40, 8), (40, 1), (64, 8), (80, 1))
        ),
        *(("portable", heads, 8) for heads in (5, 20, 40)),
        ("portable_99k", 16, 1),
    ],
)
def test_ragged_batch(decoder, family, num_heads, page_size):
    lengths = [0, 1, 9, 33, 64, 65, 200]
    case = make_case(lengths, [1] * 7, num_heads=num_heads, page_size=page_size, kv_dtype=E4M3, device="cpu")
    assert_right(case, *run(decoder(case, family), case))


@pytest.mark.smoke(num_heads=40)
@pytest.mark.parametrize("num_heads, page_size", [(5, 8), (40, 1), (80, 64)])
def test_records(decoder, num_heads, page_size):
    lengths = [0, 1, 9, 33, 64, 65, 200]
    case = make_case(
        lengths, [1] * 7, num_heads=num_heads, page_size=page_size, kv_dtype="fp8_ds_mla", device="cpu"
    )
    assert_right(case, *run(decoder(case, "hopper"), case))


def test_batch_invariance(decoder):
    case = make_case(
        [300, 40, 0, 201],
        [2, 1, 3, 1],
        num_heads=40,
        page_size=64,
        kv_dtype=torch.float8_e4m3fn,
        device="cpu",
    )
    assert_alone_as_together(decoder(case, "hopper", 4, batch_invariant=True), case)


@pytest.mark.parametrize("num_heads", [16, 40])
def test_an_attention_sink(decoder, num_heads):
    """A key with a far greater score than others, and no values: what counts are small probabilities."""
    case = make_case([600], [1], num_heads=num_heads, page_size=8, kv_dtype=E4M3, device="cpu")
    case.q_rope.fill_(1)
    tokens = torch.arange(600)
    places = case.batch.table[0][tokens // 8].long(), tokens % 8
    for rows, unit in ((case.cache.view(torch.uint8), None), (case.values, case.kv_scale.double())):
        changed = rows[places]
        changed[:, 512:] = 0
        changed[0, :512] = 0
        # A score of 9, where the greatest of the others is about 5.
        changed[0, 512:] = torch.tensor(32.0).to(E4M3).view(torch.uint8) if unit is None else 32 * unit
        rows[places] = changed
    assert_right(case, *run(decoder(case, "hopper", 1), case))


@pytest.mark.parametrize("kv_dtype", [E4M3, "fp8_ds_mla"])
@pytest.mark.parametrize("num_heads", [16, 40])
@pytest.mark.parametrize("dominant", [[0], [64, 2500]], ids=["one", "two"])
def test_dominant_keys_of_a_long_context(decoder, dominant, num_heads, kv_dtype):
    """Most of the weight is that of keys without values; e4m3 has no bits for probabilities beside theirs."""
    sizes = {"num_heads": num_heads, "page_size": 64, "kv_dtype": kv_dtype, "device": "cpu"}
    case = make_dominated_case(5000, dominant, 12.0, **sizes)
    assert_right(case, *run(decoder(case, "hopper", 1), case))


@pytest.mark.parametrize("num_heads", [16, 40])
def test_an_outlier_column_of_queries(decoder, num_heads):
    """The other columns keep their bits, as if the outlier, whose keys are 0, were not there."""
    case = make_case([300, 70], [1, 1], num_heads=num_heads, page_size=8, kv_dtype=E4M3, device="cpu")
    case.q_nope[..., 0] = 2.0**10
    case.cache.view(torch.uint8)[..., 0] = 0
    case.values[..., 0] = 0
    out, lse = run(decoder(case, "hopper"), case)
    expected_out, expected_lse = case.expected()
    assert relative_error(out, expected_out) < 2.3e-3
    torch.testing.assert_close(lse, expected_lse.float(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("num_heads", [16, 40])
def test_infinite_queries_are_not_hidden(decoder, num_heads):
    case = make_case([70], [1], num_heads=num_heads, page_size=8, kv_dtype=E4M3, device="cpu")
    case.q_nope[0, 3, 5] = torch.inf
    out, _ = run(decoder(case, "hopper", 1), case)
    assert out[0, 3].isnan().all() and not out[0, 4].isnan().any()


@pytest.mark.parametrize("num_heads", [16, 40])
def test_queries_in_fp16(decoder, num_heads):
    """Of them as many bits count as bf16 has."""
    sizes = {"num_heads": num_heads, "page_size": 8, "kv_dtype": E4M3, "device": "cpu"}
    case = make_case([300, 70], [1, 1], dtype=torch.float16, **sizes)
    out, _ = run(decoder(case, "hopper"), case)
    assert relative_error(out, case.expected()[0]) <= 1.5e-3


@pytest.mark.parametrize(
    "family, num_heads", [("hopper", 16), ("hopper", 40), ("portable", 16), ("portable", 40)]
)
def test_a_scale_of_zero(decoder, family, num_heads):
    """As a calibration on zeros gives it: all values count as 0, and no masked score as NaN."""
    case = make_case([70, 9], [1, 1], num_heads=num_heads, page_size=8, kv_dtype=E4M3, device="cpu")
    case.kv_scale.zero_()
    out, lse = run(decoder(case, family, 2), case)
    assert (out == 0).all()
    torch.testing.assert_close(lse, torch.tensor([[70.0], [9.0]]).log().expand_as(lse))


@pytest.mark.parametrize("exponents", [(-10, -10), (10, 10), (-10, 10)])
@pytest.mark.parametrize("sharpness", [0.25, 2.0])
def test_scales_of_records(decoder, exponents, sharpness):
    """Also the smallest and the largest in one tile."""
    sizes = {"num_heads": 16, "page_size": 64, "kv_dtype": "fp8_ds_mla", "device": "cpu"}
    case = make_case([300, 70], [1, 1], scale_exponents=exponents, **sizes)
    case.scale *= sharpness * 2.0 ** -exponents[1]
    assert_right(case, *run(decoder(case, "hopper", 2), case))


@pytest.mark.parametrize("family", ["hopper", "portable"])
@pytest.mark.parametrize("seed", seeds(4))
def test_random_geometry(decoder, family, seed):
    draw = random.Random(seed)
    case = random_case(
        draw,
        requests=[1, 2, 3, 6],
        keys=(80, 500),
        max_query_len=4,
        num_heads=[1, 3, 8, 16, 20, 40],
        page_sizes=[1, 2, 8, 16, 40, 64],
        latents=[(512, 64), (256, 32)],
        seed=seed,
        kv_dtype=E4M3,
        device="cpu",
    )
    causal = draw.random() < 0.8
    implementation = decoder(case, family, draw.randint(2, 10), batch_invariant=draw.random() < 0.2)
    assert_right(case, *run(implementation, case, causal), causal)


@pytest.mark.parametrize(
    "family, num_heads, page_size", [("hopper", 40, 8), ("hopper", 16, 1), ("portable", 16, 8)]
)
def test_merged_shards_are_the_whole(decoder, family, num_heads, page_size):
    lengths, sizes = [300, 1, 130, 2, 65, 0], {"num_heads": num_heads, "page_size": page_size}
    whole = make_case(lengths, [1] * 6, kv_dtype=E4M3, device="cpu", **sizes)
    stored = replace(whole, cache=whole.cache.view(torch.uint8), values=None)
    latents = [stored.keys(request, length) for request, length in enumerate(lengths)]
    states = []
    for rank in range(2):
        cache, batch = shard_of(whole.batch, latents, Shard(rank, 2, 3))
        case = replace(whole, cache=cache.view(E4M3), batch=batch)
        states.append(run(decoder(case, family), case))
    assert_right(whole, *merge_states(*states[0], *states[1]))


@pytest.mark.parametrize("kv_dtype", [E4M3, "fp8_ds_mla"])
@pytest.mark.parametrize("exponent", [-60, 60])
@pytest.mark.parametrize("num_ctas", [4, 5, 12], ids=["pairs", "two splits", "more"])
@pytest.mark.parametrize("num_heads", [16, 40])
def test_splits_of_any_magnitude(decoder, num_heads, num_ctas, exponent, kv_dtype):
    """Splits are in fp16, which holds no such values."""
    scales = {"kv_scale": 2.0**exponent, "scale_exponents": (exponent, exponent)}
    case = make_case(
        [400, 390], [1, 1], num_heads=num_heads, page_size=8, kv_dtype=kv_dtype, device="cpu", **scales
    )
    if kv_dtype != E4M3:
        case.scale *= 2.0 ** -max(exponent, 0)  # rotary keys have no scale
    case.scale /= 16  # many keys have weight, so sums of weights are large
    assert_right(case, *run(decoder(case, "hopper", num_ctas), case))


@pytest.mark.parametrize("family, num_heads", [("hopper", 16), ("hopper", 40), ("portable", 16)])
@pytest.mark.parametrize("kv_scale", [2.0**-10, 2.0**10])
@pytest.mark.parametrize("query_exponents", [(-40, 0), (0, 40)], ids=["small queries", "large queries"])
def test_ranges_beyond_fp16(decoder, family, num_heads, kv_scale, query_exponents):
    """Query rows of any magnitude that bf16 has, side by side. Products, and some splits, are in fp16."""
    options = {"num_heads": num_heads, "kv_dtype": E4M3, "kv_scale": kv_scale}
    case = make_case([300, 70], [1, 1], page_size=8, device="cpu", **options)
    exponents = torch.linspace(*query_exponents, num_heads).round()[:, None]
    case.q_nope, case.q_rope = case.q_nope * 2**exponents, case.q_rope * 2**exponents
    case.q_nope, case.q_rope = case.q_nope.bfloat16(), case.q_rope.bfloat16()
    case.scale *= 2.0 ** -query_exponents[1]
    assert_right(case, *run(decoder(case, family), case))


@pytest.mark.parametrize("edits", [[], [IN_SOFTWARE]], ids=["by an instruction", "in software"])
def test_conversion_of_e4m3(modules, tmp_path, edits):
    source = """\
#include "numbers/cache_format.cuh"
#include "ffi/tvm.cuh"
mla::ffi::Shape convert(int64_t bytes) {
    uint32_t even, odd;
    mla::halves_of_e4m3(static_cast<uint32_t>(bytes), even, odd);
    return {even & 0xffff, odd & 0xffff, even >> 16, odd >> 16, int64_t(mla::kE4m3Unit)};
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(convert, convert);
"""
    module = modules(KernelVariant("convert", source, "90a"), sources(tmp_path / "csrc", edits))
    for first in range(0, 256, 4):
        stored = torch.arange(first, first + 4).to(torch.uint8)
        *halves, unit = module.convert(int(stored.view(torch.int32)) & 0xFFFFFFFF)
        values = torch.tensor(halves, dtype=torch.int32).to(torch.int16).view(torch.float16).double() * unit
        expected = stored.view(E4M3).double()
        if edits:
            expected = torch.where(expected.isnan(), torch.where(stored > 127, -480.0, 480.0), expected)
        assert torch.equal(values.nan_to_num(1000), expected.nan_to_num(1000))


def test_conversion_in_software(decoder, tmp_path):
    """As on sm_80 and sm_86."""
    case = make_case([300, 70], [1, 1], num_heads=16, page_size=8, kv_dtype=E4M3, device="cpu")
    root = sources(tmp_path / "csrc", [IN_SOFTWARE])
    assert_right(case, *run(decoder(case, "portable", root=root), case))


@pytest.mark.faults
@pytest.mark.parametrize(
    "family, num_heads, file, before, after",
    [
        (
            "hopper",
            16,
            "decode/hopper/few_rows/keys_e4m3.cuh",
            "= make_uint4(0, 0, 0, 0);",
            "= make_uint4(~0u, 0, 0, 0);",
        ),
        (
            "hopper",
            16,
            "decode/hopper/few_rows/keys_e4m3.cuh",
            "sum_of_terms(terms[i], terms[kScores + i])",
            "terms[i]",
        ),
        (
            "hopper",
            40,
            "decode/hopper/many_rows_fp8/keys_e4m3.cuh",
            "sum_of_terms(terms[i], terms[kScores + i])",
            "terms[i]",
        ),
        (
            "hopper",
            40,
            "decode/hopper/many_rows_fp8/values.cuh",
            "make_uint4(0, 0, 0, 0);",
            "make_uint4(~0u, 0, 0, 0);",
        ),
        (
            "hopper",
            40,
            "decode/hopper/many_rows_fp8/kernel.cuh",
            "        if (tile != smem.progress.first_tile) rescale();\n    }\n\n    // Masks",
            "    }\n\n    // Masks",
        ),
        (
            "portable",
            20,
            "decode/portable/queries.cuh",
            "inverse, (lane % 4 * 2 + i)",
            "inverse, (lane % 4 * 2)",
        ),
        ("portable", 16, "decode/portable/token_queries.cuh", "score_scales[i] =", "score_scales[1 - i] ="),
        (
            "portable",
            16,
            "decode/portable/token_products.cuh",
            "factors[octet], (lane % 4 * 2 + k)",
            "factors[octet], (k)",
        ),
    ],
    ids=[
        "tails of tiles not zeroed",
        "low terms not added",
        "low terms not added in m-blocks of 64",
        "tails of tiles not zeroed in m-blocks of 64",
        "outputs relative to older maxima",
        "scores scaled as those of another row",
        "whole scores scaled as those of another row",
        "results rescaled as those of another row",
    ],
)
def test_faults_are_seen(decoder, tmp_path, family, num_heads, file, before, after):
    root = sources(tmp_path / "csrc", [(file, before, after)])
    sizes = {"num_heads": num_heads, "page_size": 8, "kv_dtype": E4M3, "device": "cpu"}
    case = make_case([300, 70, 9], [1, 1, 1], **sizes)
    case.q_nope = case.q_nope * (2.0 ** (torch.arange(num_heads) % 5)).bfloat16()[:, None]
    results = run(decoder(case, family, root=root), case)
    with pytest.raises(AssertionError):
        assert_right(case, *results)
