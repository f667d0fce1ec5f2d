"""The CUDA kernels and the planner, run on the CPU, against fp64 attention and the planner in Python."""

import functools
import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from mla_backend.batch import WHOLE, Shard, TableKind
from mla_backend.jit import KernelVariant
from mla_backend.kernels import hopper
from mla_backend.kernels.base import Workspace
from mla_backend.spec import DecodeCall
from mla_backend.torch_attention import merge_states
from tests.emulation.emulator import assert_alone_as_together, assert_right, run, sources
from tests.support.cases import assert_first_keys, make_case, random_case
from tests.support.planner import PLAN_TILE_TOKENS, m_block_cost_of, planned_ranges
from tests.support.seeds import seeds
from tests.support.shards import shard_of

FAMILIES = pytest.mark.parametrize("family", ["hopper", "portable"])
RAGGED = [
    (family, heads, page_size)
    for family in ("hopper", "portable")
    for heads in (5, 16, 20, 40)
    for page_size in (1, 8)
]
# The same sources with other sizes of tiles and rings: no more of it than this, and some random cases.
RAGGED += [("portable_99k", 16, 8), ("portable_99k", 20, 8), ("portable_99k", 40, 1)]


@pytest.mark.smoke(num_heads=16, page_size=8)
@pytest.mark.smoke(num_heads=40, page_size=1)
@pytest.mark.parametrize("family, num_heads, page_size", RAGGED)
def test_ragged_batch(decoder, family, num_heads, page_size):
    lengths = [0, 1, 9, 33, 64, 65, 200]
    case = make_case(lengths, [1] * 7, num_heads=num_heads, page_size=page_size, device="cpu")
    assert_right(case, *run(decoder(case, family), case))


@pytest.mark.smoke(seed=seeds(1))
@pytest.mark.parametrize(
    "family, seed",
    [
        (family, seed)
        for seed in seeds(10)
        for family in ("hopper", "portable_99k" if seed % 2 else "portable")
    ],
)
def test_random_geometry(decoder, family, seed):
    draw = random.Random(seed)
    case = random_case(
        draw,
        requests=[1, 2, 3, 6],
        keys=(80, 500),
        max_query_len=4,
        num_heads=[1, 2, 3, 8, 12, 16, 20, 40, 80],
        page_sizes=[1, 2, 4, 8, 16, 40, 64],
        latents=[(512, 64), (256, 32)],
        seed=seed,
        device="cpu",
    )
    causal = draw.random() < 0.8
    implementation = decoder(case, family, draw.randint(1, 10), batch_invariant=draw.random() < 0.2)
    assert_right(case, *run(implementation, case, causal), causal)


@pytest.mark.parametrize("family", ["hopper", "portable"])
@pytest.mark.parametrize("latent", [(512, 64), (256, 32)])
@pytest.mark.parametrize("num_heads", [1, 16, 33])
@pytest.mark.parametrize("num_ctas", [5, 12])
def test_one_request_on_all_ctas(decoder, family, num_ctas, num_heads, latent):
    """From sections of many quads to sections that several groups of threads share."""
    d_c, d_rope = latent
    case = make_case([800], [1], num_heads=num_heads, page_size=64, d_c=d_c, d_rope=d_rope, device="cpu")
    assert_right(case, *run(decoder(case, family, num_ctas), case))


# Every kernel in DeepSeek's dimensions; of the others, one for each way in which rows lie in a block.
KERNELS = [(family, heads, (512, 64)) for family in ("hopper", "portable") for heads in (5, 16, 24, 40, 64)]
KERNELS += [(family, heads, (256, 32)) for family in ("hopper", "portable") for heads in (16, 40)]


@pytest.mark.smoke(num_heads=16, latent=[(512, 64)], in_pairs=True)
@pytest.mark.parametrize("family, num_heads, latent", KERNELS)
@pytest.mark.parametrize(
    "lengths, num_ctas, in_pairs",
    [([400, 390], 4, True), ([128, 100], 4, True), ([400, 390], 5, False), ([500, 800, 330], 4, False)],
    ids=["halves", "halves of one tile", "halves without clusters", "an end and a start in one range"],
)
def test_m_blocks_of_two_ctas(decoder, lengths, num_ctas, in_pairs, family, num_heads, latent):
    """On Hopper, a cluster whose two CTAs have one m-block between them leaves no splits in memory."""
    queries, (d_c, d_rope) = [1] * len(lengths), latent
    case = make_case(lengths, queries, num_heads=num_heads, page_size=8, d_c=d_c, d_rope=d_rope, device="cpu")
    implementation = decoder(case, family, num_ctas)
    assert_right(case, *run(implementation, case))
    assert (implementation._split_buffers == -1).all() == (family == "hopper" and in_pairs)


@pytest.mark.parametrize("num_heads, num_ctas", [(40, 5), (80, 10)], ids=["CTAs", "clusters"])
@pytest.mark.parametrize(
    "kv_dtype", [None, torch.float8_e4m3fn, "fp8_ds_mla"], ids=["bf16", "e4m3", "records"]
)
def test_two_wide_splits_of_a_cta(decoder, num_heads, num_ctas, kv_dtype):
    """The third CTA has a split of three of one m-block, and one of another."""
    sizes = {"num_heads": num_heads, "page_size": 8, "kv_dtype": kv_dtype, "device": "cpu"}
    case = make_case([519, 472, 76], [1, 1, 1], **sizes)
    assert_right(case, *run(decoder(case, "hopper", num_ctas), case))


@pytest.mark.parametrize("family, page_size", [("hopper", 64), ("hopper", 1), ("portable", 64)])
@pytest.mark.parametrize("num_heads", [16, 40])
def test_cache_beyond_2_31_elements(decoder, family, num_heads, page_size):
    case = make_case([200, 33], [1, 1], num_heads=num_heads, page_size=page_size, device="cpu")
    case = case.far_away(2**31 + 10**8)
    assert_right(case, *run(decoder(case, family), case))


@pytest.mark.parametrize("family", ["hopper", "portable"])
@pytest.mark.parametrize("num_ctas", [1, 5], ids=["whole requests", "splits"])
def test_results_between_others(decoder, family, num_ctas):
    """Results may be parts of larger tensors, whose other elements stay as they are."""
    case = make_case([300, 33, 0], [1, 1, 1], num_heads=16, page_size=8, device="cpu")
    implementation = decoder(case, family, num_ctas)
    wide_out = torch.full((3, 20, 520), 7.0, dtype=torch.bfloat16)
    wide_lse = torch.full((3, 20), 7.0)
    results = wide_out[:, :16, :512], wide_lse[:, :16]
    plan = implementation.plan(case.batch)
    tensors = case.q_nope, case.q_rope, case.cache
    implementation.run(DecodeCall(*tensors, case.scale, True, None, None, *results), plan)
    assert_right(case, *results)
    for others in (wide_out[:, 16:], wide_out[..., 512:], wide_lse[:, 16:]):
        assert (others == 7).all()


@pytest.mark.parametrize(
    "first, later, column", [(60, 60, 12), (-120, -120, 0), (0, -40, 12)], ids=["large", "small", "both"]
)
@pytest.mark.parametrize("num_ctas", [4, 5, 12], ids=["pairs", "two splits", "more"])
@pytest.mark.parametrize("family, num_heads", [("hopper", 16), ("hopper", 40), ("portable", 40)])
def test_splits_of_any_magnitude(decoder, family, num_heads, num_ctas, first, later, column):
    """Splits of values that fp16 does not hold, though some split buffers have fp16.

    ``first`` and ``later`` are exponents of two of a request's keys; ``column`` raises half of the columns.
    """
    case = make_case([400, 390], [1, 1], num_heads=num_heads, page_size=8, device="cpu")
    pages = torch.arange(len(case.cache)) % 50 < 25
    case.cache *= 2.0 ** torch.where(pages, first, later)[:, None, None]
    case.cache[..., 256:512] *= 2.0**column
    case.q_nope, case.q_rope = case.q_nope * 2.0**-first, case.q_rope * 2.0**-first
    case.q_nope[..., 256:] *= 2.0**-column
    case.scale /= 16  # many keys have weight, so sums of weights are large
    assert_right(case, *run(decoder(case, family, num_ctas), case))


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["hopper", "portable"])
def test_rows_of_a_table_in_32_bits(decoder, family):
    sizes = {"num_heads": 16, "page_size": 1, "table_kind": TableKind.TOKEN}
    case = make_case([70, 33, 9], [1, 1, 1], **sizes, device="cpu")
    case = replace(case, batch=replace(case.batch, table_rows=case.batch.table_rows.int()))
    assert_right(case, *run(decoder(case, family, 3), case))


@pytest.mark.parametrize("family, num_heads", [("hopper", 16), ("hopper", 40), ("portable", 16)])
@pytest.mark.parametrize("num_ctas", [1, 4])
def test_nan_is_no_lack_of_keys(decoder, num_ctas, family, num_heads):
    """The LSE of a row with a NaN score is NaN, so merging does not take the row for one without keys."""
    case = make_case([300, 0], [1, 1], num_heads=num_heads, page_size=64, device="cpu")
    case.q_nope[0, 3, 5] = float("nan")
    out, lse = run(decoder(case, family, num_ctas), case)
    assert out[0, 3].isnan().all() and lse[0, 3].isnan()
    assert lse[0, :3].isfinite().all() and lse[1].isneginf().all() and (out[1] == 0).all()


@pytest.mark.parametrize("family", ["hopper", "portable"])
@pytest.mark.parametrize("num_heads, q_len", [(128, 1), (40, 4)], ids=["2 blocks", "3 blocks"])
@pytest.mark.parametrize(
    "num_ctas, lengths",
    [(8, [130, 150]), (10, [130, 150]), (12, [130, 150]), (9, [200, 9, 64, 130])],
    ids=["8 CTAs", "10 CTAs", "12 CTAs", "9 CTAs, ragged batch"],
)
def test_blocks_side_by_side(decoder, family, num_ctas, lengths, num_heads, q_len):
    """CTA groups, of even and of odd size, with pairs and without, and a single group."""
    queries = [q_len] * len(lengths)
    case = make_case(lengths, queries, num_heads=num_heads, page_size=64, device="cpu")
    assert_right(case, *run(decoder(case, family, num_ctas), case))


def plan_on_device(
    module, seq_lens, starts, table, *, num_heads, num_ctas, rows=None, longest_query=1, page_size=64,
    of_tokens=False, shard=WHOLE, whole=False,
):  # fmt: skip
    """The plans of a batch, as 32-bit integers: [num_ctas, plan_words]."""
    sizes = Workspace(*module.workspace())
    plans = torch.full((num_ctas, sizes.plan_words), -1, dtype=torch.int32)
    flags = torch.empty(num_ctas, sizes.flag_stride, dtype=torch.int32)
    module.plan(
        torch.tensor(seq_lens, dtype=torch.int32), starts, table, rows, plans, flags,
        torch.empty(2 * len(seq_lens), dtype=torch.int64),
        torch.empty(len(seq_lens), sizes.request_words, dtype=torch.int32), longest_query,
        *shard.as_integers, num_heads, page_size, of_tokens, whole, 1,
    )  # fmt: skip
    return plans


def plan_of_single_tokens(module, seq_lens, num_heads, num_ctas):
    """The ranges that the device planner writes for a query token of each request, in pages of 64."""
    table = torch.zeros(len(seq_lens), -(-max(seq_lens) // 64), dtype=torch.int32)
    plans = plan_on_device(module, seq_lens, None, table, num_heads=num_heads, num_ctas=num_ctas)
    return plans[:, :10].tolist()


def test_cta_groups_of_odd_size_pair_where_clusters_do(modules):
    """Two requests in halves, of two m-blocks each. The second group, CTAs 5 to 8, has no clusters."""
    config = hopper.decode_config(torch.bfloat16, 512, 64, 1, 64)
    ranges = plan_of_single_tokens(modules(config.variant()), [260, 300], 128, 10)
    assert [r[8] for r in ranges] == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert [r[:4] for r in ranges[5:9]] == [[0, 1, 0, 5], [0, 1, 3, 5], [1, 1, 0, 7], [1, 1, 3, 7]]
    assert ranges == planned_ranges(
        [260, 300], 1, num_heads=128, rows=64, num_ctas=10, m_block_cost=m_block_cost_of(config)
    )


@pytest.mark.parametrize("num_ctas", [16, 32, 78, 132])
@pytest.mark.parametrize("rows", [64, 128], ids=["CTAs", "clusters"])
def test_the_device_forms_cta_groups_where_its_oracle_does(modules, rows, num_ctas):
    config = hopper.decode_config(torch.bfloat16, 512, 64, 64, rows)
    seq_lens = [5000, 300, 70000]
    for m_blocks in range(2, 10):
        actual = plan_of_single_tokens(modules(config.variant()), seq_lens, m_blocks * rows, num_ctas)
        assert actual == planned_ranges(
            seq_lens, 1, num_heads=m_blocks * rows, rows=rows, num_ctas=num_ctas,
            range_ctas=config.range_ctas, m_block_cost=m_block_cost_of(config),
        ), m_blocks  # fmt: skip


@pytest.mark.smoke(num_heads=96)
@pytest.mark.parametrize(
    "num_heads, queries, lengths, num_ctas",
    [
        (128, [1, 1, 1, 1, 1], [200, 64, 65, 1, 0], 6),
        (96, [1], [640], 7),
        (40, [4, 4, 4], [100, 30, 260], 6),
        (16, [8, 1, 5, 0], [300, 500, 70, 90], 6),
        (128, [2, 2], [700, 130], 12),
    ],
)
def test_clusters_that_share_keys(decoder, num_heads, queries, lengths, num_ctas):
    """More than 64 rows, some of a request: the second CTA of a cluster has fewer, or none."""
    case = make_case(lengths, queries, num_heads=num_heads, page_size=64, device="cpu")
    assert_right(case, *run(decoder(case, "hopper", num_ctas), case))


@pytest.mark.smoke(page_size=64, causal=True)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("family, page_size", [("hopper", 64), ("hopper", 1), ("portable", 16)])
def test_m_blocks_see_fewer_keys_than_their_request(decoder, family, page_size, causal):
    """Prompts of their own and behind a prefix. Plans are for causal masks, and right without one, too."""
    case = make_case([200, 150, 70, 64], [150, 90, 70, 1], num_heads=5, page_size=page_size, device="cpu")
    assert_right(case, *run(decoder(case, family, 5), case, causal), causal)


@pytest.mark.smoke(num_heads=5)
@FAMILIES
@pytest.mark.parametrize(
    "num_heads, queries, page_size, kind, ranks, interleave",
    [
        (16, [1] * 6, 64, TableKind.BLOCK, 2, 1),
        (5, [4, 1, 8, 0, 3, 2], 8, TableKind.BLOCK, 4, 3),
        (40, [3] * 6, 1, TableKind.TOKEN, 2, 1),
        (128, [2, 1, 2, 1, 1, 1], 64, TableKind.BLOCK, 2, 64),
    ],
    ids=["one query", "ragged", "token table", "several m-blocks"],
)
def test_merged_shards_are_the_whole(decoder, family, num_heads, queries, page_size, kind, ranks, interleave):
    """Also where a rank has no key, or none that a row sees."""
    whole = make_case(
        [300, 1, 130, 2, 65, 0],
        queries,
        num_heads=num_heads,
        page_size=page_size,
        table_kind=kind,
        device="cpu",
    )
    latents = [whole.keys(request, length) for request, length in enumerate(whole.seq_lens)]
    states = []
    for rank in range(ranks):
        cache, batch = shard_of(whole.batch, latents, Shard(rank, ranks, interleave))
        case = replace(whole, cache=cache, batch=batch)
        out, lse = run(decoder(case, family), case)
        assert not out.isnan().any() and not out[lse.isneginf()].any()
        states.append((out, lse))
    assert_right(whole, *functools.reduce(lambda a, b: merge_states(*a, *b), states))


@pytest.mark.parametrize("page_size", [24, 48, 128, 256])
@pytest.mark.parametrize("num_heads", [16, 40])
def test_work_tiles_begin_inside_pages(decoder, num_heads, page_size):
    lengths = [500, 640, 330, 90, 20]
    case = make_case(lengths, [1] * 5, num_heads=num_heads, page_size=page_size, device="cpu")
    implementation = decoder(case, "hopper", 4)
    assert_right(case, *run(implementation, case))
    tiles = implementation._plans[:, 2]
    assert any(tiles * PLAN_TILE_TOKENS % page_size), "all work tiles begin where pages do"


def test_division_is_exact(modules):
    source = """\
#include "schedule/params.cuh"
#include "ffi/tvm.cuh"
int64_t divide(int64_t dividend, int64_t divisor) { return int(dividend) / mla::Divisor(int(divisor)); }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(divide, divide);
"""
    module = modules(KernelVariant("divide", source, "90a"))
    draw, largest = random.Random(0), (1 << 31) - 1
    divisors = [1, 2, 3, 5, 7, 24, 64, 640, 641, largest - 1, largest]
    for divisor in divisors + [draw.randint(1, 1 << draw.randint(1, 30)) for _ in range(500)]:
        multiple = draw.randint(0, largest // divisor) * divisor
        for dividend in (0, max(multiple - 1, 0), multiple, min(multiple + divisor - 1, largest), largest):
            assert module.divide(dividend, divisor) == dividend // divisor, (dividend, divisor)


@pytest.mark.parametrize("family", ["hopper", "portable", "portable_99k"])
def test_large_scores(decoder, family):
    """Scores far apart: the running maximum moves by more than any bound, and most weights vanish."""
    for num_heads in (16, 40):
        case = make_case([400, 40], [1, 1], num_heads=num_heads, page_size=64, device="cpu")
        case.scale *= 300
        assert_right(case, *run(decoder(case, family), case))


@FAMILIES
def test_launches_follow_each_other(decoder, family):
    """Every launch of a plan gives the same bits, and so does one after another plan in the same buffers."""
    case = make_case([300, 7, 170], [1, 1, 1], num_heads=16, page_size=64, device="cpu")
    other = make_case([40, 500, 0], [3, 1, 2], num_heads=16, page_size=64, seed=1, device="cpu")
    implementation = decoder(case, family, max_query_len=3)
    plan = implementation.plan(case.batch)
    first = run(implementation, case, plan=plan)
    assert all(torch.equal(a, b) for a, b in zip(run(implementation, case, plan=plan), first, strict=True))
    assert_right(other, *run(implementation, other))
    assert all(torch.equal(a, b) for a, b in zip(run(implementation, case), first, strict=True))


@FAMILIES
def test_streams_with_fewer_multiprocessors(decoder, monkeypatch, family):
    """Plans for fewer CTAs and for all of them in turn."""
    case = make_case([500, 7], [1, 1], num_heads=16, page_size=64, device="cpu")
    implementation = decoder(case, family, num_ctas=6)
    module = implementation.plan(case.batch).state.module
    for multiprocessors in (6, 4, 1, 6, 3):
        monkeypatch.setattr(module, "multiprocessors", multiprocessors)
        plan = implementation.plan(case.batch)
        assert plan.state.num_ctas == multiprocessors
        assert_right(case, *run(implementation, case, plan=plan))


@FAMILIES
def test_a_plan_needs_nothing_of_the_workspace(decoder, family):
    """Memory may come back from sleep with anything in it; the next plan makes it fit for use."""
    case = make_case([500, 7], [1, 1], num_heads=16, page_size=64, device="cpu")
    implementation = decoder(case, family)
    first = run(implementation, case)
    generator = torch.Generator().manual_seed(0)
    for name in ("_plans", "_ends", "_split_buffers"):
        memory = getattr(implementation, name).view(torch.int32)
        memory.copy_(torch.randint(-(1 << 31), 1 << 31, memory.shape, generator=generator, dtype=torch.int64))
    # Those of neighbours differ by one: as if one of them had seen a launch that the other has not.
    implementation._flags.copy_(torch.arange(100, 100 - len(implementation._flags), -1)[:, None])
    assert all(torch.equal(a, b) for a, b in zip(run(implementation, case), first, strict=True))


@pytest.mark.smoke(num_heads=16)
@FAMILIES
@pytest.mark.parametrize("num_heads", [16, 40])
def test_batch_invariance(decoder, family, num_heads):
    lengths, query_lens = [300, 40, 0, 201], [2, 1, 3, 1]
    case = make_case(lengths, query_lens, num_heads=num_heads, page_size=64, device="cpu")
    assert_right(case, *assert_alone_as_together(decoder(case, family, 4, batch_invariant=True), case))


@pytest.mark.smoke(seed=seeds(4))
@pytest.mark.parametrize("seed", seeds(24))
def test_device_planner_equals_reference(modules, seed):
    draw = random.Random(seed)
    batch = draw.choice([1, 3, 64, 132, 200, 1500])
    longest = draw.choice([50, 3000, 100000])
    seq_lens = (
        [draw.randrange(longest)] * batch
        if seed % 4 == 0
        else [draw.randrange(longest) for _ in range(batch)]
    )
    query_lens = draw.choice([1, 2, 4, 9, [draw.randrange(5) for _ in range(batch)]])
    uniform = isinstance(query_lens, int)
    starts = None if uniform else torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
    num_heads, num_ctas = draw.choice([1, 16, 40, 128]), draw.choice([1, 78, 132, 192])
    whole = seed % 5 == 0
    page_size, of_tokens = draw.choice([(64, False), (64, True), (8, False), (1, False), (4, True)])
    longest_query = query_lens if uniform else 4
    shards = draw.choice([1, 1, 2, 8])
    shard = Shard(draw.randrange(shards), shards, 1 if of_tokens else draw.choice([1, 3, 64]))
    config = hopper.decode_config(torch.bfloat16, 512, 64, page_size, num_heads * longest_query)
    num_ctas = max(num_ctas, config.range_ctas)
    table = torch.randint(
        1 << 24, (batch, longest if of_tokens else -(-longest // page_size)), dtype=torch.int32
    )
    rows = torch.randperm(batch) if of_tokens else None
    plans = plan_on_device(
        modules(config.variant()), seq_lens, starts, table, rows=rows, longest_query=longest_query,
        num_heads=num_heads, num_ctas=num_ctas, page_size=page_size, of_tokens=of_tokens, shard=shard,
        whole=whole,
    )  # fmt: skip
    expected = planned_ranges(
        seq_lens, query_lens, num_heads=num_heads, rows=config.plan_rows, num_ctas=num_ctas, whole=whole,
        range_ctas=config.range_ctas, shard=shard, m_block_cost=m_block_cost_of(config),
    )  # fmt: skip
    assert [r[:10] for r in plans.tolist()] == expected
    each = [query_lens] * batch if uniform else query_lens
    kind = TableKind.TOKEN if of_tokens else TableKind.BLOCK
    step = 8 if config.tma else 0 if isinstance(config, hopper.ManyRowsConfig) else 1
    assert_first_keys(plans, seq_lens, each, table, rows, page_size, kind, step, shard)


@pytest.mark.parametrize("requests, query_len", [(4, 128), (1, 256), (124, 1), (116, 1)])
def test_the_device_lets_ctas_idle_where_its_oracle_does(modules, requests, query_len):
    """For equal splits: of 132 CTAs, or of 66 clusters."""
    config = hopper.decode_config(torch.bfloat16, 512, 64, 64, 16 * query_len)
    seq_lens, table = [16384] * requests, torch.zeros(requests, 256, dtype=torch.int32)
    plans = plan_on_device(
        modules(config.variant()), seq_lens, None, table, longest_query=query_len, num_heads=16, num_ctas=132
    )  # fmt: skip
    expected = planned_ranges(
        seq_lens, query_len, num_heads=16, rows=config.plan_rows, num_ctas=132, range_ctas=config.range_ctas,
        m_block_cost=m_block_cost_of(config),
    )  # fmt: skip
    assert [r[:10] for r in plans.tolist()] == expected


@pytest.mark.faults
@pytest.mark.parametrize(
    "family, num_heads, file, before, after",
    [
        (
            "hopper",
            16,
            "decode/hopper/kernel.cuh",
            "= make_uint4(0, 0, 0, 0);",
            "= make_uint4(1, 1, 1, ~0u);",
        ),
        ("hopper", 16, "schedule/params.cuh", "min(range.end_tile * kPlanTile, keys)", "keys"),
        ("portable", 16, "schedule/combine.cuh", "at + i * kSplitStride", "at"),
        (
            "hopper",
            40,
            "schedule/combine.cuh",
            "buffers.buffer_of_split(split)) + first",
            "buffers.buffer_of_split(0)) + first",
        ),
        (
            "hopper",
            40,
            "schedule/combine.cuh",
            "states_in(buffers.buffer_of_split(split))",
            "states_in(buffers.buffer_of_split(0))",
        ),
    ],
    ids=[
        "tails of tiles not zeroed",
        "ranges overlap",
        "splits of others not read",
        "shares of others not read",
        "states of others not read",
    ],
)
def test_faults_are_seen(decoder, tmp_path, family, num_heads, file, before, after):
    root = sources(tmp_path / "csrc", [(file, before, after)])
    case = make_case([900, 70, 9], [1, 1, 1], num_heads=num_heads, page_size=64, device="cpu")
    results = run(decoder(case, family, root=root), case)
    with pytest.raises(AssertionError):
        assert_right(case, *results)
