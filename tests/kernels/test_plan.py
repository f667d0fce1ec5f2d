"""Properties of the planner's oracle, and the device planner against it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cases import assert_first_keys
from tests.support.planner import (
    M_BLOCK_COST,
    M_BLOCK_COST_OF_64_ROWS,
    PLAN_TILE_TOKENS,
    m_block_cost_of,
    num_cta_groups,
    num_m_blocks,
    planned_ranges,
)


def m_blocks_of_requests(seq_lens, query_lens, num_heads, rows):
    each = query_lens if isinstance(query_lens, list) else [query_lens] * len(seq_lens)
    return [num_m_blocks(num_heads, query_len, rows) for query_len in each]


def work_tiles_of(planned_range, m_blocks, tiles):
    """Request, m-block, first plan tile and the one behind the last, of each work tile of a range.

    ``m_blocks`` are those of each request, and ``tiles(request, m_block)`` those of an m-block.
    """
    *begin, _, end_request, end_m_block, end_tile, _, _, same_m_block = planned_range
    place, end = tuple(begin), (end_request, end_m_block, end_tile)
    while place < end:
        request, m_block, tile = place
        if m_block >= m_blocks[request]:
            place = (request + 1, 0, 0)
            continue
        cut = place[:2] == end[:2]
        yield request, m_block, tile, end_tile if cut else tiles(request, m_block)
        if cut:
            return
        place = (request + 1, m_block, 0) if same_m_block else (request, m_block + 1, 0)


@st.composite
def batches(draw):
    size = draw(st.integers(1, 40))
    uniform = draw(st.booleans())
    length = st.one_of(st.integers(0, 40), st.integers(0, 20000))
    seq_lens = [draw(length)] * size if uniform else draw(st.lists(length, min_size=size, max_size=size))
    each = st.lists(st.integers(0, 9), min_size=size, max_size=size)
    query_lens = draw(st.one_of(st.integers(1, 9), each))
    return (
        seq_lens,
        query_lens,
        draw(st.sampled_from([1, 8, 16, 20, 128])),
        draw(st.sampled_from([1, 7, 16, 78, 132])),
    )


@given(batches())
@settings(max_examples=300, deadline=None)
def test_every_key_of_every_m_block_belongs_to_one_cta(batch):
    seq_lens, query_lens, num_heads, num_ctas = batch
    rows = 32
    ranges = planned_ranges(seq_lens, query_lens, num_heads=num_heads, rows=rows, num_ctas=num_ctas)
    m_blocks = m_blocks_of_requests(seq_lens, query_lens, num_heads, rows)
    in_groups = isinstance(query_lens, int) and num_cta_groups(m_blocks[0], num_ctas) > 1
    assert len(ranges) == num_ctas

    def tiles(request, m_block):
        """Those that the last row of the m-block sees; where m-blocks have CTA groups, all."""
        query_len = query_lens if isinstance(query_lens, int) else query_lens[request]
        hidden = sum(t * num_heads >= (m_block + 1) * rows for t in range(query_len))
        return -(-max(seq_lens[request] - (0 if in_groups else hidden), 0) // PLAN_TILE_TOKENS)

    work_tiles: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for cta, planned_range in enumerate(ranges):
        for request, m_block, begin, stop in work_tiles_of(planned_range, m_blocks, tiles):
            work_tiles.setdefault((request, m_block), []).append((begin, stop, cta))
    expected = {(request, m_block) for request, count in enumerate(m_blocks) for m_block in range(count)}
    assert set(work_tiles) == expected
    for place, found in work_tiles.items():
        assert found[0][0] == 0 and found[-1][1] == tiles(*place)
        assert all(a[1] == b[0] and a[2] + 1 == b[2] for a, b in zip(found, found[1:], strict=False))
        for begin, stop, cta in found:
            assert begin < stop or len(found) == 1
            if begin > 0:
                assert ranges[cta][3] == found[0][2]
            if stop < tiles(*place):
                assert ranges[cta][7] == found[-1][2]
    for cta, (*_, paired, _) in enumerate(ranges):
        if paired:
            [owners] = [ctas for found in work_tiles.values() if cta in (ctas := {c for _, _, c in found})]
            assert owners == {cta, cta ^ 1}


@pytest.mark.parametrize(
    "requests, length, ctas", [(1, 131072, 128), (8, 8192, 128), (64, 1024, 128), (128, 2048, 128)]
)
def test_uniform_batches_are_cut_at_borders(requests, length, ctas):
    ranges = planned_ranges([length] * requests, [1] * requests, num_heads=16, rows=16, num_ctas=132)
    busy = [r for r in ranges if r[:3] != r[4:7]]
    assert len(busy) == ctas
    assert all(r[4] == r[0] or r[4:7] == [r[0] + 1, 0, 0] for r in busy)
    assert all(r[8] == (requests == 64) for r in busy)


@pytest.mark.parametrize(
    "requests, length, query_len, busy", [(4, 16384, 128, 64), (1, 16384, 256, 64), (62, 8192, 8, 62)]
)
def test_some_clusters_may_idle(requests, length, query_len, busy):
    """Equal splits instead of ranges that hold parts of two m-blocks."""
    sizes = {"num_heads": 16, "rows": 128, "num_ctas": 66, "m_block_cost": M_BLOCK_COST_OF_64_ROWS}
    ranges = planned_ranges([length] * requests, [query_len] * requests, **sizes)
    ranges = [r for r in ranges if r[:3] != r[4:7]]
    assert len(ranges) == busy
    splits = busy // (requests * query_len // 8)
    assert all(r[7] - r[3] < splits for r in ranges)


@pytest.mark.parametrize("m_blocks, group_size", [(2, 66), (3, 44), (5, 26)])
def test_each_m_block_index_has_a_cta_group(m_blocks, group_size):
    ranges = planned_ranges([5000, 300, 70000], 1, num_heads=64 * m_blocks, rows=64, num_ctas=132)
    for cta in range(m_blocks * group_size):
        assert ranges[cta][1] == ranges[cta][5] == cta // group_size
        assert [ranges[cta][i] for i in (0, 2, 4, 6)] == [ranges[cta % group_size][i] for i in (0, 2, 4, 6)]
    assert all(r[:3] == r[4:7] for r in ranges[m_blocks * group_size :])


@pytest.mark.parametrize("range_ctas", [1, 2])
@pytest.mark.parametrize("num_ctas", [16, 32, 78, 114, 124, 132])
def test_no_range_costs_much_more_than_its_share(num_ctas, range_ctas):
    """Whatever the number of multiprocessors is: those of GPUs, and of parts of them (MIG)."""
    seq_lens = [20_000 + 991 * i for i in range(33)]
    tiles = [-(-length // PLAN_TILE_TOKENS) for length in seq_lens]
    for m_blocks in range(1, 13):
        rows = 64 * range_ctas
        ranges = planned_ranges(
            seq_lens, 1, num_heads=m_blocks * rows, rows=rows, num_ctas=num_ctas, range_ctas=range_ctas
        )
        costs = [
            sum(
                stop - begin + M_BLOCK_COST
                for *_, begin, stop in work_tiles_of(
                    planned_range, [m_blocks] * len(tiles), lambda request, _: tiles[request]
                )
            )
            for planned_range in ranges
        ]
        share = m_blocks * sum(count + M_BLOCK_COST for count in tiles) / (num_ctas // range_ctas)
        assert max(costs) <= 1.08 * share, m_blocks


@given(batches())
@settings(max_examples=100, deadline=None)
def test_m_blocks_can_be_kept_whole(batch):
    seq_lens, query_lens, num_heads, num_ctas = batch
    ranges = planned_ranges(seq_lens, query_lens, num_heads=num_heads, rows=32, num_ctas=num_ctas, whole=True)
    assert all(r[2] == 0 and r[6] == 0 for r in ranges)
    m_blocks = sum(m_blocks_of_requests(seq_lens, query_lens, num_heads, 32))
    busy = sum(r[:3] != r[4:7] for r in ranges)
    assert min(m_blocks, 1) <= busy <= m_blocks


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_device_planner_equals_its_oracle(seed):
    from mla_backend import MLADecoder
    from mla_backend.batch import DecodeBatch, TableKind
    from mla_backend.kernels import hopper

    generator = torch.Generator().manual_seed(seed)

    def integers(high, count):
        return torch.randint(0, high, (count,), generator=generator, dtype=torch.int32)

    size = [1, 3, 64, 132, 200, 1500][seed % 6]
    seq_lens = integers([50, 3000, 100000][seed % 3], size)
    if seed % 4 == 0:
        seq_lens[:] = seq_lens[0]
    query_lens = integers(10 if seed % 11 == 0 else 5, size)
    query_lens[0] = 1
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0).int()]).cuda()
    uniform = seed % 7 < 3
    if uniform:
        query_lens[:] = query_lens.max()
    num_heads = [1, 16, 40, 128][seed % 4]
    decoder = MLADecoder(
        num_heads=num_heads,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        dtype=torch.bfloat16,
        page_size=64,
        device="cuda",
        max_batch=size,
        max_query_len=int(query_lens.max()),
        batch_invariant=seed % 5 == 0,
    )
    table = torch.randint(
        1 << 24, (size, int(seq_lens.max()) // 64 + 1), generator=generator, dtype=torch.int32
    )
    batch = DecodeBatch(seq_lens.cuda(), table.cuda(), 64, None if uniform else starts, int(query_lens.max()))
    decoder.plan(batch)
    plans = decoder._implementation._plans.cpu()
    config = hopper.decode_config(torch.bfloat16, 512, 64, 64, num_heads * int(query_lens.max()))
    expected = planned_ranges(
        seq_lens.tolist(),
        int(query_lens.max()) if uniform else query_lens.tolist(),
        num_heads=num_heads,
        rows=config.plan_rows,
        num_ctas=len(plans),
        whole=decoder.spec.batch_invariant,
        range_ctas=config.range_ctas,
        m_block_cost=m_block_cost_of(config),
    )
    assert plans[:, :10].tolist() == expected
    assert_first_keys(plans, seq_lens.tolist(), query_lens.tolist(), table, None, 64, TableKind.BLOCK, 8)
